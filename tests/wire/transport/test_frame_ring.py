"""Frames in shared memory: written once, looked at where they lie, and never taken for another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import samples
from tests.wire.transport.rings import SLOTS, SPEC, Rings, frame
from tests.wire.transport.rings import rings as rings
from wire.codec import decode, encode
from wire.errors import ConfigError, InvalidDataError
from wire.messages.local import FrameRecorded
from wire.transport.frame_ring import FrameRing, SharedFrame, private, ring_path, with_preview, without_preview
from wire.types import Frame


def seen(writer: FrameRing, reader: FrameRing, number: int) -> SharedFrame:
    view = reader.view("front", writer.put("front", frame(number)))
    assert view is not None
    return view


def test_a_frame_is_seen_where_it_lies_and_cannot_be_changed(rings: Rings) -> None:
    writer, reader = rings
    number = writer.put("front", frame(1))
    view = reader.view("front", number)
    assert view is not None
    assert view.time_ns == 10
    assert (view.image == 1).all()
    assert not view.image.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        view.image[0, 0, 0] = 5
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.image.flags.writeable = True


def test_a_frame_goes_in_once(rings: Rings) -> None:
    writer, _ = rings
    assert [writer.put("front", frame(n)) for n in (1, 1, 2, 2, 3)] == [1, 1, 2, 2, 3]


def test_neither_its_time_nor_its_picture_alone_makes_a_frame_the_same(rings: Rings) -> None:
    writer, reader = rings
    first = frame(1)
    assert writer.put("front", first) == 1
    assert writer.put("front", Frame(first.time_ns, first.image)) == 1
    assert writer.put("front", Frame(first.time_ns, frame(2).image)) == 2, "a clock stands, or began anew"
    assert writer.put("front", Frame(30, frame(2).image)) == 3
    view = reader.view("front", 2)
    assert view is not None
    assert (view.image == 2).all()


def test_an_overwritten_frame_is_noticed(rings: Rings) -> None:
    writer, reader = rings
    old = seen(writer, reader, 1)
    for number in range(2, SLOTS + 1):
        writer.put("front", frame(number))
        assert old.intact
    writer.put("front", frame(SLOTS + 1))
    assert not old.intact
    assert reader.view("front", 1) is None
    assert reader.view("front", 0) is None
    assert reader.view("front", 99) is None


def test_a_frame_that_is_being_written_is_not_there(rings: Rings) -> None:
    writer, reader = rings
    for number in range(1, SLOTS + 1):
        writer.put("front", frame(number))
    view = reader.view("front", 1)
    assert view is not None
    # As if the writer had died in the middle of frame 23, which takes the place of frame 1.
    writer._words[writer._cameras["front"][2] // 8 + 1 % SLOTS * (64 + 192) // 8] = 2 * (SLOTS + 1) - 1
    assert reader.view("front", 1) is None
    assert reader.view("front", SLOTS + 1) is None
    assert not reader.has("front", 1)
    assert not view.intact


def test_while_a_slot_is_written_nobody_finds_anything_in_it(rings: Rings, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = rings
    old = seen(writer, reader, 1)
    for number in range(2, SLOTS + 1):
        writer.put("front", frame(number))
    found: list[object] = []
    pixels = writer._pixels

    class Watched:
        """Looks from the other side when half of the pixels are there."""

        def __init__(self, *where: Any) -> None:
            self._array = pixels(*where)

        def __setitem__(self, key: object, image: np.ndarray) -> None:
            self._array[:4] = image[:4]
            found.extend((old.intact, reader.view("front", 1), reader.view("front", SLOTS + 1)))
            self._array[4:] = image[4:]

    monkeypatch.setattr(writer, "_pixels", Watched)
    writer.put("front", frame(SLOTS + 1))
    assert found == [False, None, None]
    assert reader.has("front", SLOTS + 1)


def test_a_writer_that_comes_back_counts_on(rings: Rings, tmp_path: Path) -> None:
    writer, reader = rings
    for number in range(1, 31):
        writer.put("front", frame(number))
    successor = FrameRing(tmp_path / "frames", SPEC, write=True)
    # The same time is not the same frame: it may be another clock's.
    assert successor.put("front", frame(30)) == 31
    view = reader.view("front", 31)
    assert view is not None
    assert reader.view("front", 30) is not None
    successor.close()


def test_wrong_shapes_and_unknown_cameras_are_named(rings: Rings) -> None:
    writer, _ = rings
    with pytest.raises(InvalidDataError, match=r"camera 'front': uint8\[4, 8, 3\], expected uint8\[8, 8, 3\]"):
        writer.put("front", Frame(1, np.zeros((4, 8, 3), np.uint8)))
    with pytest.raises(InvalidDataError, match=r"float32\[8, 8, 3\]"):
        writer.put("front", Frame(1, np.zeros((8, 8, 3), np.float32)))
    with pytest.raises(InvalidDataError, match=r"camera 'front': list, expected"):
        writer.put("front", Frame(1, [0]))  # type: ignore[arg-type]
    with pytest.raises(InvalidDataError, match=r"camera 'wrist'; this robot has \['front'\]"):
        writer.put("wrist", frame(1))


def test_another_robot_is_refused(rings: Rings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="same version, recipe and sizes"):
        FrameRing(tmp_path / "frames", samples.spec(control_hz=50.0), write=False)


def test_for_others_it_is_a_plain_frame(rings: Rings) -> None:
    view = seen(*rings, 7)
    message = decode(encode(FrameRecorded("e", "front", view)))
    assert isinstance(message, FrameRecorded)
    assert type(message.frame) is Frame
    assert (message.frame.time_ns, message.frame.image.tolist()) == (70, view.image.tolist())


def test_a_copy_of_an_overwritten_frame_is_refused(rings: Rings) -> None:
    writer, reader = rings
    old = seen(writer, reader, 1)
    copy = private(old)
    assert type(copy) is Frame
    for number in range(2, SLOTS + 2):
        writer.put("front", frame(number))
    with pytest.raises(InvalidDataError, match="the frame of 10 ns was overwritten"):
        private(old)
    assert (copy.image == 1).all()
    own = frame(3)
    assert private(own) is own


def test_a_preview_counts_as_part_of_its_frame_until_it_is_left_behind(rings: Rings, tmp_path: Path) -> None:
    larger = FrameRing(tmp_path / "previews", SPEC, write=True, keep_s=0.05)
    shown = with_preview(seen(*rings, 1), seen(larger, larger, 101))
    assert shown.preview is not None
    assert (shown.preview == 101).all()
    copy, small = private(shown), without_preview(shown)
    for number in (102, 103, 104):
        assert shown.intact
        larger.put("front", frame(number))
    assert not shown.intact
    assert isinstance(small, SharedFrame)
    assert small.intact
    assert (small.preview, small.image is shown.image) == (None, True)
    assert copy.preview is not None
    assert (copy.preview == 101).all()
    own = Frame(1, frame(1).image, frame(2).image)
    assert without_preview(own).preview is None


def test_a_frame_is_referred_to_only_in_the_file_it_lies_in(rings: Rings, tmp_path: Path) -> None:
    _, reader = rings
    view = seen(*rings, 1)
    again = FrameRing(tmp_path / "frames", SPEC, write=False)
    assert (reader.refer("front", view), again.refer("front", view)) == (1, 1)
    assert again.refer("front", frame(1)) is None
    (tmp_path / "frames").unlink()
    successor = FrameRing(tmp_path / "frames", SPEC, write=False)
    assert successor.refer("front", view) is None
    for ring in (again, successor):
        ring.close()


def test_robots_and_hosts_beside_each_other_have_their_own_files(tmp_path: Path) -> None:
    other = samples.spec(control_hz=50.0)
    paths = {ring_path(tmp_path / socket, spec) for socket in ("a", "b") for spec in (SPEC, other)}
    assert len(paths) == 4
    assert {path.parent for path in paths} == {tmp_path}
