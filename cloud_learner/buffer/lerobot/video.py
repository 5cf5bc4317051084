"""Videos, with PyAV, which comes with lerobot: an export's are encoded here, and frames read by time.

`VideoEncoder` takes the place of lerobot's own streaming encoder, behind the same five methods. Lerobot's is made for
recording: it drops frames when it cannot keep up, gives up an episode after two minutes, and spends seven times as long
on the statistics of a 224x224 frame as on encoding it. This one takes every frame.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from wire.errors import ConfigError, CorruptDataError, storage_error

LEAST_SIDE = 64
"""pixels; SVT-AV1 ends the whole process when it is given a picture much smaller than this"""
MOST_HZ = 240
"""frames a second that SVT-AV1 takes"""
QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)
"""Those that lerobot keeps."""
_CODEC = "libsvtav1"
_OPTIONS = {"g": "2", "crf": "30", "preset": "12"}
"""As lerobot encodes: a key frame every second frame, so that single frames are found fast."""
_TASKS = "/proc/self/task"


class PixelCounts:
    """How often each value occurs in each channel of many frames: exact statistics at the cost of counting."""

    def __init__(self) -> None:
        self.frames = 0
        self._counts: np.ndarray = np.zeros((3, 256), np.int64)

    def add(self, image: np.ndarray, times: int = 1) -> None:
        """uint8[h, w, 3], seen `times` times."""
        flat = image.reshape(-1, 3)
        for channel in range(3):
            self._counts[channel] += times * np.bincount(flat[:, channel], minlength=256)
        self.frames += times

    def statistics(self) -> dict[str, np.ndarray]:
        """float64[3] each of min, max, mean, std and the quantiles, on the scale 0 to 255; count int64[1] of frames."""
        values = np.arange(256.0)
        total = self._counts.sum(axis=1)
        mean = self._counts @ values / total
        there = self._counts > 0
        found = {
            "min": values[there.argmax(axis=1)],
            "max": 255.0 - there[:, ::-1].argmax(axis=1),
            "mean": mean,
            "std": np.sqrt(np.maximum(self._counts @ values**2 / total - mean**2, 0)),
            "count": np.array([self.frames]),
        }
        reached = self._counts.cumsum(axis=1) / total[:, None]
        for quantile in QUANTILES:
            found[f"q{round(quantile * 100):02d}"] = (reached >= quantile).argmax(axis=1).astype(np.float64)
        return found


class VideoEncoder:
    """One video file for each camera of the running episode."""

    def __init__(self, fps: int) -> None:
        self._fps = fps
        self._streams: dict[str, _Stream] = {}

    def start_episode(self, video_keys: Sequence[str], temp_dir: Path) -> None:
        self.cancel_episode()
        for key in video_keys:
            directory = Path(tempfile.mkdtemp(dir=temp_dir))
            self._streams[key] = _Stream(directory / "episode.mp4", self._fps)

    def feed_frame(self, video_key: str, image: np.ndarray) -> None:
        """uint8[h, w, 3], RGB. The same array given again must be the same picture."""
        self._streams[video_key].add(image)

    def finish_episode(self) -> dict[str, tuple[Path, dict[str, np.ndarray]]]:
        """The finished file of each camera, which lerobot moves away with its directory, and its statistics."""
        found = {key: (stream.path, stream.finish()) for key, stream in self._streams.items()}
        self._streams = {}
        return found

    def cancel_episode(self) -> None:
        for stream in self._streams.values():
            stream.cancel()
        self._streams = {}

    close = cancel_episode


class _Stream:
    def __init__(self, path: Path, fps: int) -> None:
        self.path = path
        self._fps = fps
        self._av = pyav()
        self._output: Any = None
        self._video: Any = None
        self._counts = PixelCounts()
        self._image: np.ndarray | None = None
        self._frame: Any = None
        self._repeats = 0
        self._number = 0

    def add(self, image: np.ndarray) -> None:
        if self._output is None:
            self._open(*image.shape[:2])
        if image is not self._image:
            self._count()
            self._image = image
            self._frame = self._av.VideoFrame.from_ndarray(image, format="rgb24")
        self._frame.pts = self._number
        self._write(self._frame)
        self._number += 1
        self._repeats += 1

    def finish(self) -> dict[str, np.ndarray]:
        self._count()
        self._write(None)
        with self._explained():
            self._output.close()
        return self._counts.statistics()

    def cancel(self) -> None:
        """Give the file up; it goes with its directory."""
        if self._output is not None:
            # a full disk cannot take the end of the file either
            with contextlib.suppress(self._av.error.FFmpegError):
                self._output.close()

    def _open(self, height: int, width: int) -> None:
        with self._explained():
            self._output = self._av.open(str(self.path), "w")
            self._video = self._output.add_stream(_CODEC, self._fps, options=_OPTIONS)
        self._video.pix_fmt, self._video.height, self._video.width = "yuv420p", height, width
        self._video.time_base = Fraction(1, self._fps)

    def _write(self, frame: Any) -> None:
        # the first frame opens the codec
        guard = contextlib.nullcontext() if self._number else as_before()
        with self._explained(), guard:
            self._output.mux(self._video.encode(frame))

    def _count(self) -> None:
        if self._image is not None:
            self._counts.add(self._image, self._repeats)
        self._repeats = 0

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._av.error.FFmpegError as error:
            reason = OSError(getattr(error, "errno", 0), str(error))
            raise storage_error(reason, "video of a LeRobot dataset", self.path) from error


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Threads of this process that become real-time meanwhile get the calling thread's scheduling back.

    SVT-AV1, in a process of root, gives the thread that opens it and all threads it starts SCHED_FIFO at the highest
    priority. They would then run before every control loop of the machine.
    """
    if not hasattr(os, "sched_getscheduler") or not os.path.isdir(_TASKS):
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    already = _real_time()
    try:
        yield
    finally:
        for thread in _real_time() - already:
            # a thread may have ended since it was listed
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread, policy, parameters)


def _real_time() -> set[int]:
    """Thread ids."""
    found = set()
    for thread in map(int, os.listdir(_TASKS)):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getscheduler(thread) in (os.SCHED_FIFO, os.SCHED_RR):
                found.add(thread)
    return found


def frames_at(path: Path, times_s: Sequence[float], tolerance_s: float, what: str) -> Iterator[np.ndarray]:
    """For each of the growing `times_s` the nearest frame uint8[h, w, 3] in BGR; the same array for the same frame.

    Decodes in one go from the key frame before the first time, so memory holds two frames. `what` begins the message
    of `CorruptDataError`, raised when the file is gone or broken or has no frame within `tolerance_s` of a time.
    """
    av = pyav()
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            if times_s[0] > 0:
                container.seek(int(times_s[0] / stream.time_base), stream=stream, backward=True)
            decoded = (frame for frame in container.decode(stream) if frame.time is not None)
            here, after = next(decoded, None), next(decoded, None)
            picture = None
            for time in times_s:
                while here is not None and after is not None and abs(after.time - time) <= abs(here.time - time):
                    here, after, picture = after, next(decoded, None), None
                if here is None or abs(here.time - time) > tolerance_s:
                    raise CorruptDataError(f"{what}: video {path} has no frame at {time:.3f} s.")
                if picture is None:
                    picture = here.to_ndarray(format="bgr24")
                yield picture
    except FileNotFoundError as error:
        raise CorruptDataError(
            f"{what}: video {path} is not there. Copy the whole dataset, with its videos directory."
        ) from error
    except (av.error.FFmpegError, IndexError) as error:
        # IndexError: no video stream in the file
        raise CorruptDataError(f"{what}: video {path} cannot be decoded: {error}. Fetch the file again.") from error


def pyav() -> Any:
    """The module `av`. Raises `ConfigError` when it is not installed."""
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"PyAV, which reads videos, is not installed: pip install 'vla-fleet[lerobot]' ({error})"
        ) from error
    return av
