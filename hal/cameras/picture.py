"""Pictures as drivers give them into pictures as the fleet takes them: uint8[height, width, 3], RGB."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from wire.errors import InvalidDataError
from wire.types import Frame

Fit = Literal["stretch", "crop"]
"""stretch: the whole picture, whatever its sides; crop: the largest middle part of the wanted sides"""


def to_rgb(picture: Any) -> np.ndarray:
    """uint8[h, w, 3] of a picture with 1, 3 or 4 channels, channels last or first. Raises `InvalidDataError`."""
    image = np.asarray(picture)
    if image.dtype != np.uint8:
        raise InvalidDataError(f"a picture of {image.dtype}{list(image.shape)}; it must be uint8[height, width, 3].")
    if image.ndim == 2:
        image = image[:, :, None]
    if image.ndim == 3 and image.shape[2] not in (1, 3, 4) and image.shape[0] in (1, 3, 4):
        image = image.transpose(1, 2, 0)
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or not image.size:
        raise InvalidDataError(f"a picture of shape {list(image.shape)}; it must be uint8[height, width, 3].")
    if image.shape[2] == 1:
        image = np.repeat(image, 3, 2)
    return image[:, :, :3]


def resize_image(image: np.ndarray, height: int, width: int, fit: Fit = "stretch") -> np.ndarray:
    """uint8[height, width, 3] as memory of its own: pixels averaged where it shrinks, interpolated where it grows."""
    if fit == "crop":
        image = center_crop(image, height, width)
    if image.shape[:2] != (height, width):
        import cv2

        shrinks = image.shape[0] >= height and image.shape[1] >= width
        way = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        image = cv2.resize(np.ascontiguousarray(image), (width, height), interpolation=way)
        return image if image.flags.owndata else image.copy()
    return np.array(image, np.uint8, order="C")


def make_frame(
    time_ns: int, image: np.ndarray, size: tuple[int, int], preview: tuple[int, int] = (0, 0), fit: Fit = "stretch"
) -> Frame:
    """The frame of `image`, uint8[h, w, 3]: (height, width) for the policy, and for people unless that is 0."""
    larger = resize_image(image, *preview, fit) if all(preview) else None
    return Frame(time_ns, resize_image(image, *size, fit), larger)


def center_crop(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The largest part in the middle with sides as `height` to `width`; a view."""
    h, w = image.shape[:2]
    scale = min(h / height, w / width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (h - rows) // 2, (w - columns) // 2
    return image[top : top + rows, left : left + columns]
