"""Files from elsewhere: what each of them may claim, and what is looked at before it is believed."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from wire.errors import ConfigError, CorruptDataError, WeightsError
from wire.untrusted import (
    MAX_HEADER_BYTES,
    MAX_METADATA,
    parse_json,
    picture_size,
    read_file,
    read_safetensors_header,
    require_file,
)


class TestFiles:
    def test_a_file_is_read_and_a_larger_one_is_not(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"12345")
        assert read_file(tmp_path / "a", 5, tmp_path) == b"12345"
        with pytest.raises(CorruptDataError, match="a: 5 bytes, above the cap of 4"):
            read_file(tmp_path / "a", 4, tmp_path, CorruptDataError)
        os.truncate(tmp_path / "a", 2**40)  # nothing of it is read
        with pytest.raises(ConfigError, match="1099511627776 bytes, above the cap"):
            read_file(tmp_path / "a", 2**20)

    @pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
    def test_what_is_no_file_is_not_opened(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "a"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        with pytest.raises(ConfigError, match="a: no regular file"):
            read_file(path, 2**20)

    def test_links_stay_within_the_directory(self, tmp_path: Path) -> None:
        inside, secret = tmp_path / "inside", tmp_path / "secret"
        inside.mkdir()
        secret.write_text("x")
        (inside / "out").symlink_to(secret)
        (inside / "up").symlink_to("../secret")
        (inside / "loop").symlink_to("loop")
        (inside / "file").write_text("y")
        (inside / "link").symlink_to("file")
        assert require_file(inside / "link", root=inside) == 1
        for name in ("out", "up", "../secret"):
            with pytest.raises(ConfigError, match="leads out of"):
                require_file(inside / name, root=inside)
        for name in ("loop", "nothing"):
            with pytest.raises(ConfigError, match=f"{name}: (Too many|No such|Symlink)"):
                require_file(inside / name, root=inside)

    def test_a_snapshot_of_the_hugging_face_cache_links_to_its_blobs_alone(self, tmp_path: Path) -> None:
        snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        (blobs / "abc").write_text("x")
        (blobs / "out").symlink_to("/etc/hostname")
        (snapshot / "config.json").symlink_to("../../blobs/abc")
        (snapshot / "model").symlink_to("../../blobs/out")
        assert require_file(snapshot / "config.json", root=snapshot) == 1
        with pytest.raises(ConfigError, match="leads out of"):
            require_file(snapshot / "model", root=snapshot)


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**6, "{", "1" * 10**6, b"\xff"])
def test_json_that_is_none_is_an_error_of_ours(text: str | bytes) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: not JSON.*Copy it"):
        parse_json(text, "config.json", "Copy it.")


def safetensors(header: object, data: int = 0, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


class TestSafetensors:
    def test_a_header_that_is_kept(self) -> None:
        made = {"b": tensor("F16", [2, 3], 4, 16), "a": tensor("F32", [], 0, 4), "__metadata__": {"x": "y"}}
        data = safetensors(made, 16)
        found = read_safetensors_header(io.BytesIO(data), len(data), "it")
        assert found.metadata == {"x": "y"}
        assert found.tensors["b"].shape == (2, 3)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "0 bytes that are no safetensors"),
            (safetensors({}, length=2**40), "no safetensors file, or a torn one"),
            (
                safetensors({"a": tensor("F32", [2**38], 0, 2**40)}, 8),
                "tensors have 1099511627776 bytes, the file has 8",
            ),
            (safetensors({"a": tensor("F32", [2**20], 0, 8)}, 8), r"'a', F32\[1048576\], cannot be"),
            (safetensors({"a": tensor("F32", [2**62, 2**62], 0, 8)}, 8), "cannot be the bytes"),
            (safetensors({"a": tensor("F32", [2**40] * 10**5, 0, 8)}, 8), "cannot be the bytes"),
            (safetensors({"a": tensor("F32", [-2, -1], 0, 8)}, 8), "cannot be the bytes"),
            (safetensors({"a": tensor("F32", [2], 8, 0)}, 8), "cannot be the bytes"),
            (safetensors({"a": tensor("F32", [2], 8, 16)}, 16), "where 0 comes next"),
            (safetensors({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, 12), "where 8 comes next"),
            (safetensors({"a": tensor("F32", [2], 0, 8)}, 12), "have 8 bytes, the file has 12"),
            (safetensors({"a": tensor("object", [1], 0, 8)}, 8), "of type 'object'"),
            (safetensors({"a": tensor("F32", [2], 0, 8) | {"class": "os.system"}}, 8), "cannot be read.*class"),
            (safetensors({"a": [1]}, 8), "cannot be read"),
            (safetensors({"__metadata__": {"a": 1}}), "cannot be read"),
            (safetensors({"__metadata__": {str(n): "" for n in range(MAX_METADATA + 1)}}), "metadata entries"),
            (safetensors(b"[" * 10**6), "cannot be read"),
        ],
    )
    def test_a_header_that_the_file_does_not_keep(self, data: bytes, message: str) -> None:
        with pytest.raises(WeightsError, match=f"it: .*{message}"):
            read_safetensors_header(io.BytesIO(data), len(data), "it")

    def test_a_header_above_the_cap_is_not_read(self) -> None:
        file = io.BytesIO(safetensors({}, length=MAX_HEADER_BYTES + 1))
        with pytest.raises(WeightsError, match="above the cap"):
            read_safetensors_header(file, 2**40, "it")
        assert file.tell() == 8


class TestPictures:
    @pytest.mark.parametrize("kind", [".png", ".jpg"])
    def test_sizes_are_those_of_the_decoded(self, kind: str) -> None:
        data = cv2.imencode(kind, np.zeros((24, 40, 3), np.uint8))[1].tobytes()
        assert picture_size(data) == (24, 40)

    def test_the_size_of_a_bomb_is_known_before_it_is_decoded(self) -> None:
        data = bytearray(cv2.imencode(".png", np.zeros((24, 40, 3), np.uint8))[1].tobytes())
        data[16:24] = (2**30).to_bytes(4) * 2
        assert picture_size(bytes(data)) == (2**30, 2**30)

    def test_nothing_else_has_one(self) -> None:
        rng = np.random.default_rng(0)
        tiff = cv2.imencode(".tiff", np.zeros((4, 4, 3), np.uint8))[1].tobytes()
        good = cv2.imencode(".jpg", np.zeros((24, 40, 3), np.uint8))[1].tobytes()
        for data in (b"", b"\xff\xd8", b"\xff\xd8" + b"\xff" * 100, b"\xff\xd8\xff\xd0" * 100, tiff, good[:100]):
            assert picture_size(data) is None
        for _ in range(200):  # whatever else stands there, it ends
            picture_size(b"\xff\xd8" + rng.bytes(60))
