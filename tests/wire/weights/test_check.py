"""Nobody is offered a version with a value that is not finite, or with other tensors than its parent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.wire.weights.files import pack
from wire.errors import StorageError, WeightsError
from wire.weights import check
from wire.weights.check import require_finite, require_same_tensors
from wire.weights.manifest import TensorEntry

FLOATS = ("F16", "BF16", "F32", "F64")


def values_of(dtype: str, values: np.ndarray) -> np.ndarray:
    return values.astype("<f4").view("<u4") >> 16 if dtype == "BF16" else values


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_SLICE_BYTES", 64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wrong", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 7, 8, 199])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(
    tmp_path: Path, dtype: str, wrong: float, place: int
) -> None:
    values = np.ones(200)
    values[place] = wrong
    some = {"a": (dtype, values_of(dtype, np.ones(3))), "layer.w": (dtype, values_of(dtype, values))}
    (tmp_path / "w").write_bytes(pack(some))
    with pytest.raises(WeightsError, match=r"version 3: 'layer\.w' is not finite: .*checkpoint"):
        require_finite(tmp_path / "w", "version 3")


@pytest.mark.parametrize("dtype", FLOATS)
def test_whatever_is_finite_passes(tmp_path: Path, dtype: str) -> None:
    most = {"F16": 65504.0, "BF16": 3.38e38, "F32": 3.4028e38, "F64": 1.79e308}[dtype]
    values = np.array([0.0, -0.0, most, -most, 6e-8, 1e-40, 1.0] * 30)
    whole = {"i": ("I64", np.full(20, -1)), "w": (dtype, values_of(dtype, values)), "none": (dtype, np.zeros(0))}
    (tmp_path / "w").write_bytes(pack(whole))
    require_finite(tmp_path / "w", "version 3")


@pytest.mark.parametrize("data", [b"", b"x", b"no weights at all", pack({"w": ("F32", np.ones(9))})[:-1]])
def test_what_is_no_weights_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(WeightsError, match="version 3"):
        require_finite(tmp_path / "w", "version 3")


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gone"):
        require_finite(tmp_path / "gone", "version 3")


W, B = TensorEntry("w", "F32", (2, 3)), TensorEntry("b", "F32", (3,))


def test_the_same_tensors_in_another_order_pass() -> None:
    require_same_tensors((W, B), (B, W), "version 3")


@pytest.mark.parametrize(
    "mine, says",
    [
        ((W,), "'b' is nothing, in its parent F32[3]"),
        ((W, B, TensorEntry("c", "I64", ())), "'c' is I64[], in its parent nothing"),
        ((W, TensorEntry("b", "F32", (4,))), "'b' is F32[4], in its parent F32[3]"),
        ((W, TensorEntry("b", "BF16", (3,))), "'b' is BF16[3], in its parent F32[3]"),
        ((), "'b' is nothing"),
    ],
)
def test_the_first_tensor_that_differs_is_named(mine: tuple[TensorEntry, ...], says: str) -> None:
    with pytest.raises(WeightsError) as error:
        require_same_tensors(mine, (W, B), "version 3")
    assert says in str(error.value)
    assert "fresh --data directory" in str(error.value)
