"""The recorder's other thread: takes ticks out of a bounded queue and puts them on disk.

It holds Python's lock for microseconds at a time: digests, JPEGs, compression and writing release it, and between two
ticks it steps aside, so that the control thread never waits for it.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO, TypeVar

import cv2
import msgspec
import numpy as np

from hal.driver_host.priority import ordinary
from robot_edge.flight_recorder.events import (
    FlightHeader,
    Gap,
    PreviewFrame,
    Reference,
    SnapshotRecord,
    StoredArray,
    TickBlock,
    TickRecord,
    is_image,
    refer,
)
from robot_edge.flight_recorder.file import MAGIC, SUFFIX, frame
from robot_edge.uplink.segments import encode_jpeg
from wire.errors import StorageError, storage_errors
from wire.transport.frame_ring import SharedFrame
from wire.types import Frame

log = logging.getLogger(__name__)

_AT_ONCE = 4
"""ticks written before the lock is offered: a fifth of a millisecond"""
_JPEG_QUALITY = 80
_KNOWN = 16
"""arrays whose digests are remembered: a frame comes again in every tick until the next one"""


@dataclass(frozen=True, slots=True)
class FlightConfig:
    """How much is recorded and kept."""

    file_bytes: int = 64 * 2**20
    """a file that passes this is followed by the next one"""
    files: int = 8
    """so many of a robot are kept, the newest"""
    frames_hz: float = 2.0
    """pictures a second and camera kept for people; 0: none. Decisions are replayed without them"""
    frames_px: int = 320
    """longest side of such a picture"""
    flush_s: float = 0.5
    """a killed process loses at most what it recorded in this time"""
    queue_ticks: int = 1000
    """ticks that may wait for a slow disk"""
    snapshot_ticks: int = 3000
    """after so many ticks the loop's state is noted again, if no episode ended before"""
    boundary_ticks: int = 500
    """after so many ticks the next end of an episode is where it is noted again: little is under way then"""
    retry_s: float = 5.0
    """how long a disk that refused is left alone"""


Record = TickRecord | SnapshotRecord | Gap
_R = TypeVar("_R", TickRecord, SnapshotRecord)
_Queued = tuple[Record, Sequence[np.ndarray], Mapping[str, Frame]]
"""as `Writer.submit` takes them"""


class Writer:
    """Runs from `start` to `close`. `submit` never blocks."""

    def __init__(self, directory: Path, header: FlightHeader, config: FlightConfig) -> None:
        """Touches nothing yet."""
        self.config = config
        self.failure = ""
        """why nothing is written now, '' while all is well"""
        self._directory = directory
        self._header = msgspec.structs.replace(header, program=program(), started_unix_ns=time.time_ns())
        self._queue: deque[_Queued] = deque()
        self._closing = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flight-recorder", daemon=True)
        self._file: BinaryIO | None = None
        self._bytes = 0
        self._useful = False
        self._files = 0
        self._retry_at = 0.0
        self._known: OrderedDict[int, tuple[np.ndarray, Reference]] = OrderedDict()
        self._stored: set[bytes] = set()
        self._block: list[TickRecord] = []
        self._pictured: dict[str, int] = {}

    @property
    def full(self) -> bool:
        """Whether the file has reached its size; it ends before the next snapshot."""
        return self._bytes >= self.config.file_bytes

    def start(self) -> None:
        self._thread.start()

    def submit(self, record: Record, large: Sequence[np.ndarray] = (), images: Mapping[str, Frame] = {}) -> bool:
        """Hand over a record; False when there is no room: then it is lost.

        `large`: the arrays that `record.references` will stand for; `images`: the newest frames by camera.
        """
        waiting = len(self._queue)
        if waiting >= self.config.queue_ticks:
            return False
        self._queue.append((record, large, images))
        if waiting == self.config.queue_ticks // 2:
            self._hurry.set()
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits and end the thread."""
        self._closing.set()
        self._hurry.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # --- the other thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ordinary()
        while True:
            closing = self._closing.is_set()
            try:
                with storage_errors("recording the flight", self._directory):
                    self._drain()
            except StorageError as error:
                self._fail(error)
            except Exception as error:  # a recorder that breaks must neither be silent nor stop a robot
                log.exception("robot '%s': the flight recorder failed.", self._header.name)
                self._fail(StorageError(f"the flight recorder failed: {error!r}"))
            if closing:
                if self._file is not None:
                    self._file.close()
                return
            self._hurry.wait(self.config.flush_s)
            self._hurry.clear()

    def _drain(self) -> None:
        if self.failure and time.monotonic() < self._retry_at:
            self._queue.clear()
            return
        taken = 0
        while self._queue:
            record, large, images = self._queue.popleft()
            if self._file is None and not isinstance(record, SnapshotRecord):
                continue
            self._store(record, large, images)
            # A few ticks' work, then the control thread may have Python's lock if it waits for it.
            taken += 1
            if taken % _AT_ONCE == 0:
                time.sleep(0)
        self._flush()

    def _store(self, record: Record, large: Sequence[np.ndarray], images: Mapping[str, Frame]) -> None:
        if isinstance(record, TickRecord):
            self._block.append(self._referring(record, large, images))
            if self.config.frames_hz > 0:
                self._film(record.tick, images)
            if len(self._block) >= 64:
                self._flush()
            return
        self._flush()
        if isinstance(record, Gap):
            self._write(frame(record))
            return
        if self._file is None or self.full:
            self._open()
        self._write(frame(self._referring(record, large, images)))
        self._useful = True
        self.failure = ""

    def _flush(self) -> None:
        if self._block and self._file is not None:
            block, self._block = self._block, []
            self._write(frame(TickBlock(block)))

    def _referring(self, record: _R, large: Sequence[np.ndarray], images: Mapping[str, Frame]) -> _R:
        return msgspec.structs.replace(record, references=tuple(self._refer(array, images) for array in large))

    def _refer(self, array: np.ndarray, images: Mapping[str, Frame]) -> Reference:
        known = self._known.get(id(array))
        if known is not None:
            return known[1]
        reference = refer(array)
        shared = (frame for frame in images.values() if isinstance(frame, SharedFrame))
        if any(frame.image is array and not frame.intact for frame in shared):
            raise StorageError("frames were overwritten before they were digested: this computer or its disk is busy.")
        self._known[id(array)] = (array, reference)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        digest = reference.digests[0]
        if not is_image(array) and digest not in self._stored:
            self._stored.add(digest)
            self._write(frame(StoredArray(digest, array.tobytes())))
        return reference

    def _film(self, tick: int, images: Mapping[str, Frame]) -> None:
        """Keep a JPEG of each camera's frame when it is time for one."""
        for camera, shot in images.items():
            last = self._pictured.get(camera)
            if last is not None and 0 <= shot.time_ns - last < 1e9 / self.config.frames_hz:
                continue
            image = shot.image
            if not is_image(image) or image.shape[2] != 3 or not image.size:
                continue
            self._pictured[camera] = shot.time_ns
            scale = self.config.frames_px / max(image.shape[:2])
            if scale < 1:
                size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
                image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
            jpeg = encode_jpeg(image, _JPEG_QUALITY)
            if not isinstance(shot, SharedFrame) or shot.intact:
                self._write(frame(PreviewFrame(tick, camera, shot.time_ns, jpeg)))

    def _open(self) -> None:
        """Begin the next file, and drop the oldest ones of this robot."""
        if self._file is not None:
            self._file.close()
            self._file = None
        header = msgspec.structs.replace(self._header, file=self._files)
        began = datetime.datetime.fromtimestamp(header.started_unix_ns / 1e9, datetime.UTC)
        name = f"{began:%Y%m%d-%H%M%S-%f}-{header.session_id}-{self._files:05d}{SUFFIX}"
        self._directory.mkdir(parents=True, exist_ok=True)
        old = sorted(self._directory.glob(f"*{SUFFIX}"))
        for path in old[: max(0, len(old) - self.config.files + 1)]:
            path.unlink(missing_ok=True)
        # Without a buffer of its own: what was written is the kernel's, whatever becomes of this process.
        self._file = (self._directory / name).open("xb", buffering=0)
        self._files += 1
        self._bytes = 0
        self._useful = False
        self._stored = set()
        self._known.clear()
        self._pictured = {}
        self._write(MAGIC + frame(header))

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._bytes += len(data)

    def _fail(self, error: StorageError) -> None:
        """Give up the file; try a new one later. What waits is lost: the robot has long gone on."""
        self._block = []
        self._retry_at = time.monotonic() + self.config.retry_s
        if not self.failure:
            log.warning(
                "robot '%s': the flight recorder pauses, the robot goes on: %s Trying again every %g s.",
                self._header.name,
                error,
                self.config.retry_s,
            )
        self.failure = str(error)
        if self._file is not None:
            self._file.close()
            if not self._useful:
                # A file that never got beyond its header would push an older, whole one out.
                Path(self._file.name).unlink(missing_ok=True)
            self._file = None
        self._queue.clear()


def program() -> str:
    """The version of vla-fleet that runs."""
    try:
        return version("vla-fleet")
    except PackageNotFoundError:
        return "unknown"
