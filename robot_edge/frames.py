"""Camera frames in memory that the processes of one robot computer share.

Control puts every frame in once; the others look at it where it lies. A slot is used again after the camera's whole
ring has gone round, so whoever has used a frame asks `intact` afterwards whether it was still the same.
"""

from __future__ import annotations

import contextlib
import logging
import math
from pathlib import Path

import numpy as np

from wire.channel import Channel
from wire.errors import ConfigError, InvalidData
from wire.messages import ChunkRequest, Framed, Message, ThinkRequest
from wire.shared_memory import MARK_BYTES, map_file
from wire.types import CameraSpec, Frame, Observation, RobotSpec

log = logging.getLogger(__name__)

_ALIGN = 64
"""a cache line: before each slot's pixels stand its guard and its time"""


class SharedFrame(Frame, frozen=True, eq=False, kw_only=True):
    """A frame whose image is a read-only view into a `FrameRing`."""

    ring: FrameRing
    camera: str
    number: int
    """counts the camera's frames"""


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
        self._words = np.frombuffer(self._map, np.uint64, at // 8)
        self._last = {name: self._newest(name) for name in self._cameras}
        """number and time of the newest frame, as this process knows it; only the writer's is kept up to date"""

    def put(self, camera: str, frame: Frame) -> int:
        """Copy `frame` in, unless it is the newest one already, and return its number.

        Raises `InvalidData` for an image that is not of the camera's shape.
        """
        known, slots, start = self._camera(camera)
        number, time_ns = self._last[camera]
        if number and frame.time_ns == time_ns:
            return number
        if frame.image.shape != (known.height, known.width, 3) or frame.image.dtype != np.uint8:
            raise InvalidData(
                f"camera '{camera}': {frame.image.dtype}{list(frame.image.shape)}, "
                f"expected uint8[{known.height}, {known.width}, 3]."
            )
        number += 1
        at = start + number % slots * _slot_bytes(known)
        self._words[at // 8] = 2 * number - 1
        self._words[at // 8 + 1] = frame.time_ns
        self._pixels(known, at)[...] = frame.image
        self._words[at // 8] = 2 * number
        self._last[camera] = number, frame.time_ns
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
        return SharedFrame(time_ns, image, ring=self, camera=camera, number=number)

    def has(self, camera: str, number: int) -> bool:
        """Whether frame `number` is whole and still there."""
        known, slots, start = self._camera(camera)
        return int(self._words[(start + number % slots * _slot_bytes(known)) // 8]) == 2 * number

    def refer(self, camera: str, frame: Frame) -> int | None:
        """The number under which others find `frame` here, None when this process cannot put it in."""
        if isinstance(frame, SharedFrame) and frame.ring is self:
            return frame.number
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
            raise InvalidData(f"a frame of camera '{name}'; this robot has {sorted(self._cameras)}.") from None

    def _pixels(self, camera: CameraSpec, at: int) -> np.ndarray:
        shape = (camera.height, camera.width, 3)
        return np.frombuffer(self._map, np.uint8, math.prod(shape), at + _ALIGN).reshape(shape)

    def _newest(self, name: str) -> tuple[int, int]:
        """A writer that comes back counts on, so that no number ever means two frames."""
        camera, slots, start = self._cameras[name]
        guards = [int(self._words[(start + slot * _slot_bytes(camera)) // 8]) for slot in range(slots)]
        # The predecessor's clock may have been another one: its newest frame is never taken for one of ours.
        return (max(guards) + 1) // 2, -1


class FramedChannel:
    """A line on which the images of requests travel by their place in a `FrameRing`; previews stay behind.

    Both ends see plain messages. What is no request passes as it is, and so does a request whose images the ring cannot
    take.
    """

    def __init__(self, channel: Channel, ring: FrameRing) -> None:
        self._channel = channel
        self._ring = ring
        self.socket = getattr(channel, "socket", None)
        """what `wait_any` waits for"""
        self.late = 0
        """requests that came when their frames had been overwritten, and were dropped"""

    def send(self, message: Message) -> bool:
        if isinstance(message, ChunkRequest | ThinkRequest):
            message = self._framed(message)
        return self._channel.send(message)

    def recv(self, timeout_s: float = 0.0) -> Message | None:
        while (message := self._channel.recv(timeout_s)) is not None:
            if not isinstance(message, Framed):
                return message
            whole = self._plain(message)
            if whole is not None:
                return whole
        return None

    def close(self) -> None:
        self._channel.close()

    def _framed(self, message: ChunkRequest | ThinkRequest) -> Message:
        seen = message.observation
        frames = {camera: self._ring.refer(camera, frame) for camera, frame in seen.images.items()}
        known = {camera: number for camera, number in frames.items() if number is not None}
        if len(known) < len(frames):
            return _with(message, without_previews(seen))
        return Framed(_with(message, Observation(seen.time_ns, seen.state, {}, seen.task)), known)

    def _plain(self, framed: Framed) -> Message | None:
        try:
            frames = {camera: self._ring.view(camera, number) for camera, number in framed.frames.items()}
        except InvalidData as error:
            raise ConfigError(f"the other process of this robot speaks of another robot: {error}") from error
        whole = {camera: frame for camera, frame in frames.items() if frame is not None}
        if len(whole) < len(frames):
            self.late += 1
            log.warning(
                "a request waited so long that its frames of %s were overwritten; it is dropped (%d so far).",
                sorted(set(frames) - set(whole)),
                self.late,
            )
            return None
        seen = framed.message.observation
        return _with(framed.message, Observation(seen.time_ns, seen.state, dict(whole), seen.task))


def intact(observation: Observation) -> bool:
    """Whether all images of `observation` are still those that were sent; ask after they have been used."""
    return all(
        frame.ring.has(frame.camera, frame.number)
        for frame in observation.images.values()
        if isinstance(frame, SharedFrame)
    )


def without_previews(observation: Observation) -> Observation:
    """The observation as a policy needs it, as plain frames: pictures for people stay behind."""
    if all(type(frame) is Frame and frame.preview is None for frame in observation.images.values()):
        return observation
    images = {name: Frame(frame.time_ns, frame.image) for name, frame in observation.images.items()}
    return Observation(observation.time_ns, observation.state, images, observation.task)


def _with(message: ChunkRequest | ThinkRequest, observation: Observation) -> ChunkRequest | ThinkRequest:
    if isinstance(message, ThinkRequest):
        return ThinkRequest(message.number, message.versions, observation, message.jpeg)
    return ChunkRequest(message.tick, observation, message.first_tick, message.state, message.prefix, message.residual)


def _slot_bytes(camera: CameraSpec) -> int:
    return _ALIGN + _up(camera.height * camera.width * 3)


def _up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
