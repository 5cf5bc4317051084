"""A delta makes exactly the version that the trainer published, and is small."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.weights.files import applied, delta_of, floats, mapped, pack, walk
from wire.errors import InvalidDataError, WeightsError
from wire.weights import delta
from wire.weights.delta import DeltaStats, Precision, WeightsLayout

PRECISIONS = st.sampled_from(list(Precision))
COUNTS = st.sampled_from([0, 1, 2, 3, 63, 64, 65, 127, 128, 129, 500])
KINDS = ("same", "zeros", "normal", "sparse", "far", "huge", "tiny", "denormal", "signs", "bits")


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that files of a kilobyte have what those of a gigabyte have."""
    monkeypatch.setattr(delta, "_SLICE", 128)


def change(values: np.ndarray, kind: str, random: np.random.Generator) -> np.ndarray:
    noise = random.standard_normal(len(values)).astype(np.float32)
    some = random.random(len(values)) < 0.02
    with np.errstate(over="ignore"):
        match kind:
            case "same":
                return values.copy()
            case "zeros":
                return np.zeros_like(values)
            case "normal":
                return values + np.float32(1e-3) * noise
            case "sparse":
                return np.where(some, values + noise, values)
            case "far":
                return values + np.where(some, np.float32(1e4), np.float32(1)) * noise
            case "huge":
                return np.where(some, np.float32(3e38) * np.sign(noise), values)
            case "tiny":
                return values + np.float32(1e-33) * noise
            case "denormal":
                return np.where(some, np.float32(1e-41) * noise, values)
            case "signs":
                return np.where(some, -values, values)
    bits = random.integers(0, 2**32, len(values), np.uint32).view(np.float32)
    return np.where(np.isfinite(bits), bits, np.float32(0))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A weights file and another one of the same tensors."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    old: dict[str, tuple[str, np.ndarray]] = {}
    new: dict[str, tuple[str, np.ndarray]] = {}
    for number in range(draw(st.integers(1, 4))):
        name, count, dtype = f"t{number}", draw(COUNTS), draw(st.sampled_from(["F32", "F32", "BF16", "I64"]))
        values = change(np.zeros(count, np.float32), draw(st.sampled_from(KINDS)), random)
        after = change(values, draw(st.sampled_from(KINDS)), random)
        if dtype == "F32":
            old[name], new[name] = (dtype, values), (dtype, after)
        else:
            wide = values.view(np.uint32) >> 16, after.view(np.uint32) >> 16
            old[name], new[name] = (dtype, wide[0]), (dtype, wide[1])
    told = draw(st.sampled_from(["1", "2"]))
    return pack(old, {"at": "1"}), pack(new, {"at": told})


@given(pairs(), PRECISIONS, st.sampled_from([0.01, 1.5, 100.0]))
def test_what_is_rebuilt_is_what_was_published_bit_by_bit(files, precision: Precision, step: float) -> None:
    base, target = files
    made, published = delta_of(base, target, precision, step)
    assert applied(base, made) == published
    if precision == Precision.exact:
        assert published == target
    assert WeightsLayout.of(mapped(published)) == WeightsLayout.of(mapped(target))
    assert delta_of(published, published)[0] == b""


@given(pairs(), PRECISIONS)
def test_what_is_no_float32_and_small_tensors_travel_as_they_are(files, precision: Precision) -> None:
    base, target = files
    _, published = delta_of(base, target, precision)
    layout = WeightsLayout.of(mapped(target))
    for tensor in layout.header.tensors.values():
        begin, end = (layout.data_offset + at for at in tensor.data_offsets)
        if tensor.dtype != "F32" or end - begin < 4 * 64:
            assert published[begin:end] == target[begin:end]


@given(st.integers(64, 2000), st.integers(0, 2**32), st.floats(-12, 12))
def test_a_value_is_at_most_six_tenths_of_a_step_from_what_was_trained(count: int, seed: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    change = (10**scale * random.standard_normal(count)).astype(np.float32)
    old = np.zeros(count, np.float32)
    _, published = delta_of(floats(w=old), floats(w=change))
    width = delta.STEP * np.sqrt(np.mean(np.square(change, dtype=np.float64)))
    error = np.abs(np.frombuffer(published[-4 * count :], np.float32) - change)
    assert error.max() <= 0.601 * width


def test_errors_do_not_add_up_over_two_hundred_versions() -> None:
    errors, published = [], b""
    for trained in walk(1000, 200):
        _, published = delta_of(published, floats(w=trained)) if published else (b"", floats(w=trained))
        errors.append(np.abs(np.frombuffer(published[-4000:], np.float32) - trained).max())
    assert max(errors[150:]) < 1.5 * max(errors[2:50])
    assert max(errors) < 0.6 * 1.5 * 1.6e-3


def test_without_slices_and_with_them_a_delta_makes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    base, target = (floats(w=values) for values in walk(1000, 2))
    _, sliced = delta_of(base, target)
    monkeypatch.setattr(delta, "_SLICE", 1 << 20)
    _, whole = delta_of(base, target)
    np.testing.assert_allclose(np.frombuffer(sliced[-4000:], "<f4"), np.frombuffer(whole[-4000:], "<f4"))


def test_a_delta_of_a_training_run_is_less_than_a_twentieth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_SLICE", 1 << 20)
    base, target = (floats(w=values) for values in walk(100_000, 2))
    sizes = {precision: len(delta_of(base, target, precision)[0]) for precision in Precision}
    assert sizes[Precision.int8] < len(base) / 20
    assert sizes[Precision.int8] < sizes[Precision.bf16] < sizes[Precision.exact] < len(base)


def test_few_changes_cost_little_and_none_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_SLICE", 1 << 20)
    old = np.zeros(100_000, np.float32)
    new = old.copy()
    new[::1000] = 1.0
    for precision in Precision:
        most = 2000 if precision == Precision.int8 else len(old) // 1.5
        assert len(delta_of(floats(w=old), floats(w=new), precision)[0]) < most
        assert delta_of(floats(w=old), floats(w=old), precision)[0] == b""


def test_a_version_is_made_by_all_deltas_since_another_one_in_a_row() -> None:
    made: list[bytes] = []
    first = published = floats(w=next(iter(walk(300, 1))), n=np.ones(8, np.float32))
    for trained in walk(300, 6)[1:]:
        one, published = delta_of(published, floats(w=trained, n=trained[:8]))
        made.append(one)
    assert applied(first, *made) == published
    assert functools.reduce(applied, made, first) == published


def test_what_a_delta_changes_is_counted() -> None:
    old, new = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
    new[:10] = 1.0
    stats = DeltaStats()
    same = np.ones(100, np.float32)
    delta_of(floats(w=old, same=same, n=old[:4]), floats(w=new, same=same, n=new[:4]), stats=stats)
    assert (stats.values, stats.changed, stats.tensors) == (1100, 10, 2)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("count", [8, 1000])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named(precision: Precision, count: int, wrong: float) -> None:
    old = np.zeros(count, np.float32)
    new = old.copy()
    new[count // 2] = wrong
    with pytest.raises(InvalidDataError, match=r"'head\.bias' is not finite"):
        delta_of(floats(a=old, **{"head.bias": old}), floats(a=old, **{"head.bias": new}), precision)


@pytest.mark.parametrize("precision", Precision)
def test_a_version_recovers_from_a_parent_that_is_not_finite(precision: Precision) -> None:
    old = np.full(1000, np.nan, np.float32)
    new = np.arange(1000, dtype=np.float32)
    made, published = delta_of(floats(w=old), floats(w=new), precision)
    assert applied(floats(w=old), made) == published == floats(w=new)


def test_a_delta_between_other_tensors_is_refused() -> None:
    old = np.zeros(100, np.float32)
    for other in (floats(v=old), floats(w=old[:50]), floats(w=old.reshape(10, 10)), floats(w=old, v=old)):
        with pytest.raises(WeightsError, match="travels whole"):
            delta_of(floats(w=old), other)
    for none in (b"", b"no weights at all", floats(w=old)[:-1]):
        with pytest.raises(WeightsError):
            delta_of(floats(w=old), none)
        with pytest.raises(WeightsError):
            delta_of(none, floats(w=old))


@pytest.mark.parametrize("precision", Precision)
def test_a_difference_that_no_float32_has_is_sent_all_the_same_and_nobody_is_warned(precision: Precision) -> None:
    old = np.full(100, 3e38, np.float32)
    with np.errstate(all="raise"):
        made, published = delta_of(floats(w=old), floats(w=-old), precision)
    assert applied(floats(w=old), made) == published == floats(w=-old)
