from __future__ import annotations

import numpy as np
import pytest

from hal.cameras.picture import center_crop, make_frame, resize_image, to_rgb
from wire.errors import InvalidDataError

RAMP = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def test_pictures_of_all_layouts_become_one() -> None:
    assert np.array_equal(to_rgb(RAMP), RAMP)
    assert np.array_equal(to_rgb(RAMP.transpose(2, 0, 1)), RAMP)
    assert np.array_equal(to_rgb(np.concatenate([RAMP, RAMP[:, :, :1]], 2)), RAMP)
    grey = to_rgb(RAMP[:, :, 0])
    assert grey.shape == (4, 6, 3) and np.array_equal(grey[:, :, 2], RAMP[:, :, 0])


@pytest.mark.parametrize(
    "bad", [np.zeros((4, 4, 3)), np.zeros((5, 5, 2), np.uint8), np.zeros(7, np.uint8), np.zeros((0, 4, 3), np.uint8)]
)
def test_what_is_no_picture_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(InvalidDataError, match=r"must be uint8\[height, width, 3\]"):
        to_rgb(bad)


def test_shrinking_averages_and_the_result_owns_its_memory() -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    image[::2] = 200
    assert resize_image(image, 2, 2).tolist() == np.full((2, 2, 3), 100).tolist()
    for height, width in ((2, 2), (4, 4), (9, 7)):
        out = resize_image(image[:, ::-1], height, width)
        assert out.shape == (height, width, 3) and out.dtype == np.uint8
        assert out.flags.c_contiguous and not np.shares_memory(out, image)


def test_crop_keeps_the_proportions_of_what_is_seen() -> None:
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 255
    assert resize_image(wide, 5, 5, "crop").min() == 255
    assert resize_image(wide, 5, 5, "stretch").min() == 0
    assert center_crop(wide, 1, 1).shape == (10, 10, 3)
    assert center_crop(wide, 2, 1).shape == (10, 5, 3)
    assert center_crop(wide, 1, 10).shape == (3, 30, 3)


def test_people_may_get_a_larger_picture() -> None:
    image = np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3)
    frame = make_frame(7, image, (10, 15), (20, 30))
    assert frame.time_ns == 7 and frame.image.shape == (10, 15, 3)
    assert frame.preview is not None and frame.preview.shape == (20, 30, 3)
    assert make_frame(7, image, (10, 15)).preview is None
