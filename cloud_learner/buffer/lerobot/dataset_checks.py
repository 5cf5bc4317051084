"""What a LeRobot dataset may claim: its shapes, its counts, and where its files lie.

A dataset is made by anybody. Its paths are templates that it brings itself, its tables say how many rows they unpack
to, and its pictures how large they are; all that is looked at before it is believed.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cloud_learner.buffer.lerobot.video import of_lerobot
from wire.errors import ConfigError, CorruptDataError
from wire.spec_checks import check_rate
from wire.untrusted import MAX_PICTURE_PIXELS, picture_size, require_file

MAX_VALUES = 1 << 27
"""numbers that are read from the columns of one file: a gigabyte"""
MAX_TABLE_BYTES = 1 << 30
"""of one row group, unpacked, and of what is read of it"""
MAX_PICTURE_BYTES = 64 * 1024 * 1024
MAX_TEXT = 10_000
"""characters of an instruction"""
_MAX_FEATURES = 1024
_MAX_LENGTH = 65_536
"""numbers of one row of a column"""
_MAX_NUMBER = 2**31
_FIELDS = ("video_key", "chunk_index", "file_index")
_FORMATS = ("", *(f"{zeros}{width}d" for zeros in ("", "0") for width in range(1, 10)))


def check_info(info: dict[str, Any], path: Path) -> None:
    """Raise `ConfigError` or `CorruptDataError` unless `info` has a rate, features of a size there is, and paths."""
    check_rate(f"{path}: fps", info.get("fps"))  # type: ignore[arg-type]
    features = info.get("features")
    if not isinstance(features, dict) or not features or len(features) > _MAX_FEATURES:
        raise CorruptDataError(f"{path}: 'features' are no object of 1 to {_MAX_FEATURES} features. Copy it again.")
    for key, feature in features.items():
        if not key.isprintable() or "/" in key or "\\" in key or key.strip(".") == "":
            raise CorruptDataError(f"{path}: {key[:100]!r} cannot be a feature: it is part of file names.")
        shape = feature.get("shape") if isinstance(feature, dict) else None
        if not isinstance(shape, list) or not isinstance(feature.get("dtype"), str):
            raise CorruptDataError(f"{path}: feature '{key}' has no dtype or no shape. Copy the dataset again.")
        picture = feature["dtype"] in ("image", "video")
        most = 4 * MAX_PICTURE_PIXELS if picture else _MAX_LENGTH
        good = len(shape) == 3 if picture else len(shape) <= 8
        if not good or not all(type(side) is int and 1 <= side <= _MAX_LENGTH for side in shape):
            good = False
        if not good or math.prod(shape) > most:
            raise CorruptDataError(f"{path}: feature '{key}' cannot have the shape {str(shape)[:100]}.")
        if picture and not isinstance(feature.get("names") or [], list):
            raise CorruptDataError(f"{path}: feature '{key}' has names that are no list. Copy the dataset again.")
    for kind in ("data_path", *(["video_path"] if any(f["dtype"] == "video" for f in features.values()) else [])):
        _check_template(info.get(kind), kind, path)


def place(root: Path, template: str, key: str, chunk: int, number: int) -> Path:
    """The file that a checked template names. That it lies below `root` is seen when it is opened."""
    return root / template.format(video_key=key, chunk_index=chunk, file_index=number)


def whole_number(value: Any, what: str) -> int:
    """Raise `CorruptDataError` unless `value` counts something."""
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise CorruptDataError(f"{what} is {str(value)[:50]}, no count. Copy the whole dataset again.")
    return value


def require_table(path: Path, root: Path, columns: Sequence[str] | None = None, what: str = "") -> None:
    """Raise `CorruptDataError` unless the columns of a parquet file that are read (None: all) fit into memory.

    A column of one number a million times is a few bytes on the disk; its footer says how many there are. `what` begins
    the message.
    """
    try:
        require_file(path, root=root, wrong=CorruptDataError)
    except CorruptDataError as error:
        raise CorruptDataError(f"{what}{error} Copy the whole dataset again.") from error
    about = of_lerobot("pyarrow.parquet").read_metadata(path)
    values = 0
    for group in range(about.num_row_groups):
        rows, unpacked = about.row_group(group), 0
        for number in range(rows.num_columns):
            column = rows.column(number)
            name = column.path_in_schema
            if columns is None or any(name == one or name.startswith(f"{one}.") for one in columns):
                values += column.num_values
                unpacked += column.total_uncompressed_size
        if unpacked > MAX_TABLE_BYTES or values > MAX_VALUES:
            raise CorruptDataError(
                f"{what}{path}: it claims {values} numbers and {unpacked} bytes of a row group, above the caps of "
                f"{MAX_VALUES} and {MAX_TABLE_BYTES}. Split the dataset, or copy it again."
            )


def require_picture(data: bytes, what: str) -> None:
    """Raise `CorruptDataError` unless `data` begins as a PNG or JPEG file of a size that can be decoded."""
    if len(data) > MAX_PICTURE_BYTES or (size := picture_size(data)) is None:
        raise CorruptDataError(f"{what} is no PNG or JPEG file of up to {MAX_PICTURE_BYTES} bytes.")
    if not 0 < math.prod(size) <= MAX_PICTURE_PIXELS:
        raise CorruptDataError(
            f"{what} claims {size[0]}x{size[1]} pixels; up to {MAX_PICTURE_PIXELS} are decoded. Resize it."
        )


def _check_template(template: Any, kind: str, path: Path) -> None:
    """Formatting can read attributes of what it is given and make text of any length, so only numbers are formatted."""
    try:
        parts = list(string.Formatter().parse(template))
    except (TypeError, ValueError) as error:
        raise CorruptDataError(f"{path}: {kind} is no template: {error}. Copy the dataset again.") from error
    for _, field, form, conversion in parts:
        plain = field in _FIELDS and not conversion and form in (_FORMATS if field != "video_key" else ("",))
        if field is not None and not plain:
            raise ConfigError(
                f"{path}: {kind} has '{{{str(field)[:50]}:{str(form)[:50]}}}'; only {', '.join(_FIELDS)} and widths "
                "such as :03d are filled in."
            )
    if Path(template).is_absolute() or ".." in Path(template).parts or len(template) > 1000 or "\0" in template:
        raise ConfigError(f"{path}: {kind} is '{template[:100]}', which leads out of the dataset. Copy it again.")
