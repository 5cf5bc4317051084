"""Files from elsewhere, read as data: what they claim is checked before anything is opened, allocated or handed on.

A checkpoint, a dataset, a configuration or an episode may be made by somebody who wants this machine to run their code,
show them another file, or stop for lack of memory. What several readers have to check stands here; what only one format
can say stands with its reader. `wrong` is the error a reader raises, so that its caller hears of its own kind.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from wire.errors import ConfigError, FleetError, WeightsError, suggest

MAX_JSON_BYTES = 64 * 1024 * 1024
"""the largest there is of its kind, a tokenizer's vocabulary, has about 35 MB"""
MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""of a configuration that a person might have written"""
MAX_HEADER_BYTES = 8 * 1024 * 1024
"""of a safetensors header: some 60,000 tensors"""
MAX_METADATA = 1024
"""entries beside the tensors"""
_MAX_SIDES = 16
MAX_PICTURE_PIXELS = 64 * 1024 * 1024
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_FRAME_STARTS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG markers behind which height and width stand"""
_BARE_MARKERS = frozenset(range(0xD0, 0xD8)) | {0x01}


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a safetensors header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """[begin, end) within the data"""


class SafetensorsHeader(msgspec.Struct, frozen=True):
    """A header that its file keeps: every tensor has its bytes there, and no byte is left over."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def require_file(
    path: Path, max_bytes: int | None = None, root: Path | None = None, wrong: type[FleetError] = ConfigError
) -> int:
    """The size of a regular file that is not larger than `max_bytes` and, followed through links, lies below `root`.

    A pipe or a device would be read for ever. A snapshot of the Hugging Face cache links to `blobs` beside it, which
    counts as below. Raises `wrong` that names the file and what it is instead.
    """
    try:
        found = path.stat()
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise wrong(f"{path}: {getattr(error, 'strerror', None) or error}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise wrong(f"{path}: no regular file, and is not read. Put the file itself there.")
    if root is not None and not any(real.is_relative_to(place) for place in _places(root)):
        raise wrong(f"{path}: it leads out of {root}, to {real}, and is not read. Put the file itself there.")
    if max_bytes is not None and found.st_size > max_bytes:
        raise wrong(f"{path}: {found.st_size} bytes, above the cap of {max_bytes} for a file of its kind.")
    return found.st_size


def read_file(path: Path, max_bytes: int, root: Path | None = None, wrong: type[FleetError] = ConfigError) -> bytes:
    """All of a file that `require_file` lets pass. Raises `wrong`."""
    require_file(path, max_bytes, root, wrong)
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise wrong(f"{path}: {error.strerror or error}.") from error
    if len(data) > max_bytes:
        raise wrong(f"{path}: it grew above the cap of {max_bytes} bytes while it was read.")
    return data


def parse_json(data: bytes | str, what: object, remedy: str = "", wrong: type[FleetError] = ConfigError) -> Any:
    """The value in `data`. Raises `wrong` for what is no JSON or is nested too deep."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise wrong(f"{what}: not JSON: it is nested too deep.{remedy and ' ' + remedy}") from error
    except ValueError as error:
        raise wrong(f"{what}: not JSON: {error}.{remedy and ' ' + remedy}") from error


def read_safetensors_header(
    file: IO[bytes], size: int, what: object, max_header: int = MAX_HEADER_BYTES
) -> SafetensorsHeader:
    """The header of a safetensors file of `size` bytes, of which nothing else is read.

    Raises `WeightsError` for a header that is too long, that cannot be read, or that the file does not keep: a type
    nobody knows, a shape that does not fill its bytes, bytes that two tensors share, that are missing or left over.
    """
    begin = file.read(8)
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or length > size - 8:
        raise WeightsError(f"{what}: {size} bytes that are no safetensors file, or a torn one.")
    if length > max_header:
        raise WeightsError(f"{what}: a safetensors header of {length} bytes, above the cap of {max_header}.")
    try:
        entries = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop("__metadata__", b"{}"), type=dict[str, str])
        tensors = {name: msgspec.json.decode(raw, type=TensorInfo) for name, raw in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{what}: the safetensors header cannot be read: {error}.") from error
    if len(metadata) > MAX_METADATA:
        raise WeightsError(f"{what}: {len(metadata)} metadata entries, above the cap of {MAX_METADATA}.")
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda one: one[1].data_offsets):
        item = _ITEM_BYTES.get(tensor.dtype)
        if item is None:
            raise WeightsError(
                f"{what}: tensor '{name[:100]}' is of type '{tensor.dtype[:20]}'.{suggest(tensor.dtype, _ITEM_BYTES)}"
            )
        first, last = tensor.data_offsets
        sides = tensor.shape
        sound = len(sides) <= _MAX_SIDES and all(0 <= side < 2**48 for side in sides)  # no product of endless numbers
        if not sound or first != end or item * math.prod(sides) != last - first:
            raise WeightsError(
                f"{what}: tensor '{name[:100]}', {tensor.dtype}{list(sides[:_MAX_SIDES])}, cannot be the bytes from "
                f"{first} to {last}, where {end} comes next."
            )
        end = last
    if end != size - 8 - length:
        raise WeightsError(f"{what}: its tensors have {end} bytes, the file has {size - 8 - length} for them.")
    return SafetensorsHeader(tensors, metadata)


def picture_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) that a PNG or JPEG file claims; None for anything else."""
    if data.startswith(_PNG):
        return int.from_bytes(data[20:24]), int.from_bytes(data[16:20])
    at = 2
    while data.startswith(b"\xff\xd8") and at + 9 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker in _FRAME_STARTS:
            return int.from_bytes(data[at + 5 : at + 7]), int.from_bytes(data[at + 7 : at + 9])
        # 0xFF may be repeated before a marker, and some markers stand alone
        at += 1 if marker == 0xFF else 2 if marker in _BARE_MARKERS else 2 + int.from_bytes(data[at + 2 : at + 4])
    return None


def _places(root: Path) -> list[Path]:
    """Where files of `root` may lie: below it, and the blobs of a snapshot in the Hugging Face cache."""
    real = root.resolve()
    return [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]
