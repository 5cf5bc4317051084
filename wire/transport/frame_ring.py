"""Camera frames in memory that the processes of one robot computer share.

The process that has the driver puts every frame in once; the others look at it where it lies. A slot is used again
after the camera's whole ring has gone round, so whoever has used a frame asks afterwards whether it is still `intact`.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np

from wire.errors import InvalidDataError
from wire.transport.shared_memory import MARK_BYTES, map_file
from wire.types import CameraSpec, Frame, Observation, RobotSpec

_ALIGN = 64
"""a cache line: before each slot's pixels stand its guard and its time"""


class RingSlot(NamedTuple):
    """Where a picture lies."""

    ring: FrameRing
    camera: str
    number: int
    """counts the camera's frames"""


class SharedFrame(Frame, frozen=True, eq=False, dict=True):
    """A frame whose pictures are read-only views into a `FrameRing`.

    Where they lie is not among its fields: on the wire and in files it is a plain `Frame`.
    """

    slots: ClassVar[tuple[RingSlot, ...]] = ()
    """of the image, then of the preview if it has one"""

    @property
    def intact(self) -> bool:
        """Whether its pictures are still those that were put in; ask after they have been used."""
        return all(slot.ring.has(slot.camera, slot.number) for slot in self.slots)


class FrameRing:
    """The newest frames of every camera in one mapped file; one writer, any number of readers.

    Guarded like a seqlock: a slot's guard is odd while the writer is in it, `2 * number` when frame `number` is whole.
    """

    def __init__(self, path: Path, spec: RobotSpec, *, write: bool, keep_s: float = 1.0) -> None:
        """Make or find the file `path`. A frame stays at least `keep_s` at its camera's rate: longer than any thought.

        Raises `ConfigError` for a file of another robot or size, `StorageError` when it cannot be made.
        """
        self._cameras: dict[str, tuple[CameraSpec, int, int]] = {}
        at = _up(MARK_BYTES)
        for camera in spec.cameras:
            slots = math.ceil(camera.rate_hz * keep_s) + 2
            self._cameras[camera.name] = (camera, slots, at)
            at += slots * _slot_bytes(camera)
        self._writes = write
        self._map = map_file(path, f"vla-fleet frames 1, {spec.hash}, {keep_s:g} s", at, write=write)
        status = path.stat()
        self._file = status.st_dev, status.st_ino
        """tells a file from a later one of the same name"""
        self._words = np.frombuffer(self._map, np.int64, at // 8)
        self._last: dict[str, tuple[int, Frame | None]] = {name: (self._newest(name), None) for name in self._cameras}
        """number of the newest frame and the frame, as this process knows it; only the writer's is kept up to date"""

    def put(self, camera: str, frame: Frame) -> int:
        """Copy `frame` in, unless it is the newest one already, and return its number.

        Raises `InvalidDataError` for an image that is not of the camera's shape.
        """
        known, slots, start = self._camera(camera)
        number, last = self._last[camera]
        if last is not None and self._same(camera, frame, last, number):
            return number
        image, shape = frame.image, (known.height, known.width, 3)
        if not isinstance(image, np.ndarray) or image.shape != shape or image.dtype != np.uint8:
            got = f"{image.dtype}{list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
            raise InvalidDataError(f"camera '{camera}': {got}, expected uint8{list(shape)}.")
        number += 1
        at = start + number % slots * _slot_bytes(known)
        self._words[at // 8] = 2 * number - 1
        self._words[at // 8 + 1] = frame.time_ns
        self._pixels(known, at)[...] = image
        self._words[at // 8] = 2 * number
        self._last[camera] = number, frame
        return number

    def view(self, camera: str, number: int) -> SharedFrame | None:
        """Frame `number` where it lies, read-only; None when it has been overwritten or never was."""
        known, slots, start = self._camera(camera)
        at = start + number % slots * _slot_bytes(known)
        time_ns = int(self._words[at // 8 + 1])
        if number < 1 or not self.has(camera, number):
            return None
        image = self._pixels(known, at)
        image.flags.writeable = False
        return _shared(time_ns, image, None, (RingSlot(self, camera, number),))

    def has(self, camera: str, number: int) -> bool:
        """Whether frame `number` is whole and still there."""
        known, slots, start = self._camera(camera)
        return int(self._words[(start + number % slots * _slot_bytes(known)) // 8]) == 2 * number

    def refer(self, camera: str, frame: Frame) -> int | None:
        """The number under which others find `frame` here, None when this process cannot put it in."""
        if isinstance(frame, SharedFrame) and frame.slots and frame.slots[0].ring._file == self._file:
            return frame.slots[0].number
        return self.put(camera, frame) if self._writes else None

    def close(self) -> None:
        """Give the memory back as soon as nobody in this process looks at a frame any more."""
        del self._words
        # Views that are still held keep the mapping alive; it goes with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()

    def _camera(self, name: str) -> tuple[CameraSpec, int, int]:
        try:
            return self._cameras[name]
        except KeyError:
            raise InvalidDataError(f"a frame of camera '{name}'; this robot has {sorted(self._cameras)}.") from None

    def _pixels(self, camera: CameraSpec, at: int) -> np.ndarray:
        shape = (camera.height, camera.width, 3)
        return np.frombuffer(self._map, np.uint8, math.prod(shape), at + _ALIGN).reshape(shape)

    def _same(self, camera: str, frame: Frame, last: Frame, number: int) -> bool:
        """Whether `frame` is `last`, the newest one. Its time alone does not tell: a clock may stand or begin anew."""
        if frame is last or frame.time_ns != last.time_ns:
            return frame is last
        newest = self.view(camera, number)
        return frame.image is last.image or (newest is not None and np.array_equal(frame.image, newest.image))

    def _newest(self, name: str) -> int:
        """A writer that comes back counts on, so that no number ever means two frames."""
        camera, slots, start = self._cameras[name]
        guards = [int(self._words[(start + slot * _slot_bytes(camera)) // 8]) for slot in range(slots)]
        return (max(guards) + 1) // 2


def ring_path(socket: Path, spec: RobotSpec) -> Path:
    """Where the frames of a robot lie whose host listens at `socket`, whether it has a host or not.

    A host of another robot at the same place has another file, and is refused by its spec.
    """
    return socket.with_name(f"{socket.name}.{spec.hash}.frames")


def with_preview(frame: SharedFrame, preview: SharedFrame) -> SharedFrame:
    """`frame` with the image of `preview` as the larger picture for people."""
    return _shared(frame.time_ns, frame.image, preview.image, frame.slots[:1] + preview.slots[:1])


def without_preview(frame: Frame) -> Frame:
    """`frame` as a policy needs it, where it lies."""
    if frame.preview is None:
        return frame
    if isinstance(frame, SharedFrame):
        return _shared(frame.time_ns, frame.image, None, frame.slots[:1])
    return Frame(frame.time_ns, frame.image)


def without_previews(observation: Observation) -> Observation:
    """The observation as a policy needs it: pictures for people stay behind."""
    if all(frame.preview is None for frame in observation.images.values()):
        return observation
    images = {camera: without_preview(frame) for camera, frame in observation.images.items()}
    return Observation(observation.time_ns, observation.state, images, observation.task)


def intact(observation: Observation) -> bool:
    """Whether all images of `observation` are still those that were sent; ask after they have been used."""
    return all(frame.intact for frame in observation.images.values() if isinstance(frame, SharedFrame))


def private(frame: Frame) -> Frame:
    """`frame` in memory of this process. Raises `InvalidDataError` when it was overwritten before it was all copied."""
    if not isinstance(frame, SharedFrame):
        return frame
    copy = Frame(frame.time_ns, frame.image.copy(), None if frame.preview is None else frame.preview.copy())
    if not frame.intact:
        raise InvalidDataError(
            f"the frame of {frame.time_ns} ns was overwritten in shared memory before it was copied: its camera is "
            "faster than its spec says, or this process stood still."
        )
    return copy


def _shared(time_ns: int, image: np.ndarray, preview: np.ndarray | None, slots: tuple[RingSlot, ...]) -> SharedFrame:
    frame = SharedFrame(time_ns, image, preview)
    msgspec.structs.force_setattr(frame, "slots", slots)
    return frame


def _slot_bytes(camera: CameraSpec) -> int:
    return _ALIGN + _up(camera.height * camera.width * 3)


def _up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
