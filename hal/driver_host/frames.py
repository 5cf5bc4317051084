"""The pictures of a hosted robot: the host puts each one into shared memory once, control looks at it where it lies.

The files stand beside the host's socket. They stay when host or control dies, so that a successor counts on and nobody
takes a new frame for an old one; they go with their directory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from hal.driver_host.protocol import FrameView, require_int, require_text
from wire.errors import ConfigError, InvalidDataError, RobotError, StorageError
from wire.transport.frame_ring import FrameRing, ring_path, with_preview
from wire.types import CameraSpec, Frame, RobotSpec

log = logging.getLogger(__name__)

_PREVIEW_S = 0.05
"""how long a larger picture stays: control sends it on, or copies it, in the tick that reads it"""


class FrameWriter:
    """The host's side."""

    def __init__(self, socket: Path, spec: RobotSpec) -> None:
        """`socket`: where the host listens. Raises as `FrameRing`."""
        self._socket, self._spec = socket, spec
        self._ring = FrameRing(ring_path(socket, spec), spec, write=True)
        self._previews: dict[str, FrameRing] = {}
        self._failed_previews: set[str] = set()
        self._written: dict[str, tuple[Frame, FrameView]] = {}

    def write(self, images: Mapping[str, Frame], what: str) -> dict[str, FrameView]:
        """Put in what is new of `images` and say where it lies.

        Raises `InvalidDataError`, which begins with `what`, for a name that is no text, a time that is none, a camera
        that the spec does not name and an image of another shape than it says.
        """
        views = {}
        for name, frame in images.items():
            camera = require_text(f"{what} a camera named", name)
            last = self._written.get(camera)
            if last is None or last[0] is not frame:
                last = self._written[camera] = frame, self._put(camera, frame, what)
            views[camera] = last[1]
        return views

    def _put(self, camera: str, frame: Frame, what: str) -> FrameView:
        time_ns = require_int(f"{what} a frame of camera '{camera}' with time_ns", frame.time_ns)
        try:
            number = self._ring.put(camera, Frame(time_ns, frame.image))
        except InvalidDataError as error:
            raise InvalidDataError(f"{what} {error}") from error
        if frame.preview is None:
            return FrameView(number)
        try:
            return FrameView(number, self._put_preview(camera, Frame(time_ns, frame.preview)), frame.preview.shape[:2])
        except (ConfigError, InvalidDataError, StorageError) as error:
            # A robot must not stand still because somebody would like to look at it.
            if camera not in self._failed_previews:
                log.warning("robot '%s': larger pictures are left out: %s", self._spec.embodiment, error)
            self._failed_previews.add(camera)
            return FrameView(number)

    def _put_preview(self, camera: str, frame: Frame) -> int:
        """The first one says what shape they have, for as long as this process lives."""
        if camera not in self._previews:
            image = frame.image
            if not isinstance(image, np.ndarray) or image.ndim != 3:
                raise InvalidDataError(f"camera '{camera}' gave no uint8[H, W, 3] as preview.")
            self._previews[camera] = _preview_ring(self._socket, self._spec, camera, image.shape[:2], write=True)
        number = self._previews[camera].put(camera, frame)
        self._failed_previews.discard(camera)
        return number


class FrameReader:
    """Control's side; the same frame is the same object."""

    def __init__(self, socket: Path, spec: RobotSpec) -> None:
        """`socket`: where the host listens. Raises as `FrameRing`."""
        self._socket, self._spec = socket, spec
        self._ring = FrameRing(ring_path(socket, spec), spec, write=False)
        self._previews: dict[tuple[str, tuple[int, ...]], FrameRing] = {}
        self._seen: dict[str, tuple[FrameView, Frame]] = {}

    def read(self, views: Mapping[str, FrameView]) -> dict[str, Frame]:
        """The frames of a reply. No more than the next reading is put in before control asks again: they stay whole.

        Raises `RobotError` for one that is not there.
        """
        frames = {}
        for camera, view in views.items():
            seen = self._seen.get(camera)
            if seen is None or seen[0] != view:
                seen = self._seen[camera] = view, self._frame(camera, view)
            frames[camera] = seen[1]
        return frames

    def _frame(self, camera: str, view: FrameView) -> Frame:
        frame = self._ring.view(camera, view.number)
        if frame is None:
            raise RobotError(
                f"robot '{self._spec.embodiment}': frame {view.number} of camera '{camera}' is not in the memory that "
                f"its host at {self._socket} shares. Restart the processes of this robot."
            )
        if not view.preview:
            return frame
        key = camera, view.preview_shape
        if key not in self._previews:
            self._previews[key] = _preview_ring(self._socket, self._spec, *key, write=False)
        preview = self._previews[key].view(camera, view.preview)
        return frame if preview is None else with_preview(frame, preview)


def _preview_ring(socket: Path, spec: RobotSpec, camera: str, shape: tuple[int, ...], *, write: bool) -> FrameRing:
    """A ring for the larger pictures of one camera, which no spec knows; its name holds their shape."""
    rate_hz = next(known.rate_hz for known in spec.cameras if known.name == camera)
    height, width = shape
    seen = msgspec.structs.replace(spec, cameras=(CameraSpec(camera, height, width, rate_hz),))
    return FrameRing(ring_path(socket, seen), seen, write=write, keep_s=_PREVIEW_S)
