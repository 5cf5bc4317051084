"""A manifest is what the fleet's own gateway said of a version, or nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.weights.files import floats, pack, version_of
from wire.errors import StorageError, WeightsError
from wire.weights.manifest import (
    CHUNK_BYTES,
    HASH_BYTES,
    RUNTIME,
    ChunkHashes,
    Manifest,
    Signer,
    TensorEntry,
    chunk_hashes,
    count_chunks,
    describe,
    hash_bytes,
    read_manifest,
)

OURS, OTHERS = Signer(b"1" * 32), Signer(b"2" * 32)
DATA = floats(w=np.ones((2, 3), np.float32))
VERSION = version_of(3, DATA)
SIZES = st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 7])
encode = msgspec.msgpack.encode


def signed(manifest: Manifest) -> tuple[bytes, bytes]:
    data = encode(manifest)
    return data, OURS.sign(data)


def test_what_was_signed_is_read(tmp_path: Path) -> None:
    about = '{"network": "flow", "spec_hash": "abc", "format": 1, "more": [1]}'
    data = pack({"w": ("F32", np.ones((2, 3))), "n": ("I64", np.zeros(0))}, {"vla_fleet": about})
    path, version = tmp_path / "w.safetensors", version_of(3, data)
    path.write_bytes(data)
    made = describe(version, path, "ab", (2, 1), hash_bytes(data))
    found = read_manifest(made, OURS.sign(made), OURS.public)
    tensors = TensorEntry("w", "F32", (2, 3)), TensorEntry("n", "I64", (0,))
    assert found == Manifest(version, hash_bytes(data), "ab", (2, 1), tensors, "abc", "flow", 1)


def test_a_key_is_always_made_of_its_secret_alike() -> None:
    again = Signer(b"1" * 32)
    assert again.public == OURS.public != OTHERS.public
    assert again.sign(b"data") == OURS.sign(b"data")


def test_a_manifest_of_another_fleet_is_refused() -> None:
    data, _ = signed(Manifest(VERSION, hash_bytes(DATA)))
    for signature in (OTHERS.sign(data), b"", b"x" * 64, OURS.sign(data)[:-1]):
        with pytest.raises(WeightsError, match="did not sign"):
            read_manifest(data, signature, OURS.public)
    for key in (OTHERS.public, b"short", b""):
        with pytest.raises(WeightsError, match="did not sign"):
            read_manifest(data, OURS.sign(data), key)


@given(st.data())
def test_a_manifest_that_was_changed_is_refused(data: st.DataObject) -> None:
    made, signature = signed(Manifest(VERSION, hash_bytes(DATA), "ab", (2, 1)))
    turned = bytearray(made + signature)
    place = data.draw(st.integers(0, 8 * len(turned) - 1))
    turned[place // 8] ^= 1 << place % 8
    with pytest.raises(WeightsError, match="did not sign"):
        read_manifest(bytes(turned[: len(made)]), bytes(turned[len(made) :]), OURS.public)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", encode({"version": 1}), b"\x91" * 100_000])
def test_what_is_signed_and_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(WeightsError, match="cannot be read"):
        read_manifest(data, OURS.sign(data), OURS.public)


@given(SIZES, st.integers(0, 3 * HASH_BYTES))
def test_every_chunk_has_a_hash(size: int, length: int) -> None:
    version = msgspec.structs.replace(VERSION, size_bytes=size)
    right = length == HASH_BYTES * count_chunks(size)
    try:
        assert read_manifest(*signed(Manifest(version, bytes(length))), OURS.public).version == version
        assert right
    except WeightsError as error:
        assert not right and "hashes of other than all its chunks" in str(error)


def test_a_version_for_another_robot_or_a_later_runtime_names_the_remedy() -> None:
    plain = Manifest(VERSION, hash_bytes(DATA), spec_hash="abc")
    plain.require_runnable("abc")
    plain.require_runnable("")
    Manifest(VERSION, hash_bytes(DATA)).require_runnable("abc")
    with pytest.raises(WeightsError, match=r"version 3 is for robot spec abc, this robot's is xyz: .* recipe"):
        plain.require_runnable("xyz")
    later = msgspec.structs.replace(plain, runtime=RUNTIME + 1)
    with pytest.raises(WeightsError, match=f"needs runtime {RUNTIME + 1}, .* install"):
        later.require_runnable("abc")


@pytest.mark.parametrize("about", ["{", "[]", '{"format": "1"}', "[" * 100_000, '{"spec_hash": 7}'])
def test_metadata_that_says_nothing_is_no_fault(tmp_path: Path, about: str) -> None:
    data = pack({"w": ("F32", np.ones(3))}, {"vla_fleet": about})
    (tmp_path / "w").write_bytes(data)
    found = msgspec.msgpack.decode(describe(version_of(1, data), tmp_path / "w", "", (), b""), type=Manifest)
    assert (found.spec_hash, found.network, found.runtime) == ("", "", RUNTIME)
    assert found.tensors == (TensorEntry("w", "F32", (3,)),)


def test_a_file_that_is_no_weights_has_no_tensors_and_one_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"no weights")
    found = msgspec.msgpack.decode(describe(VERSION, tmp_path / "w", "", (), b""), type=Manifest)
    assert found.tensors == ()
    with pytest.raises(StorageError, match="gone"):
        describe(VERSION, tmp_path / "gone", "", (), b"")


@given(SIZES, st.lists(st.integers(1, CHUNK_BYTES + 5), max_size=5))
def test_a_file_is_hashed_by_chunks_however_it_comes(size: int, cuts: list[int]) -> None:
    data = np.random.default_rng(size).bytes(size)
    wanted = b"".join(hashlib.sha256(data[at : at + CHUNK_BYTES]).digest() for at in range(0, size, CHUNK_BYTES))
    found, rest = ChunkHashes(), memoryview(data)
    for cut in cuts:
        found.append(rest[:cut])
        rest = rest[cut:]
    found.append(rest)
    assert found.digest() == found.digest() == wanted == hash_bytes(data)
    assert len(wanted) == HASH_BYTES * count_chunks(size)


def test_a_file_on_disk_is_hashed_alike(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 7)
    (tmp_path / "w").write_bytes(data)
    assert chunk_hashes(tmp_path / "w") == hash_bytes(data)
