"""Videos, with PyAV: whether one can be encoded here, and its frames by time. PyAV comes with lerobot."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cloud_learner.buffer.lerobot.priority import as_before
from wire.errors import ConfigError, CorruptDataError

CODECS = ("libsvtav1", "h264", "hevc")
_LEAST_SIDE = 64
"""SVT-AV1 ends the whole process when it is given a picture much smaller than this."""


def why_not_encodable(codec: str, height: int, width: int, fps: int) -> str:
    """Why frames of this size cannot become a video here, or an empty string; a few frames are tried."""
    if min(height, width) < _LEAST_SIDE:
        return f"a side is shorter than {_LEAST_SIDE} pixels"
    av = pyav()
    os.environ.setdefault("SVT_LOG", "0")
    av.logging.set_libav_level(av.logging.PANIC)
    try:
        video = io.BytesIO()
        with as_before(), av.open(video, "w", format="mp4") as output:
            stream = output.add_stream(codec, fps)
            stream.pix_fmt, stream.height, stream.width = "yuv420p", height, width
            for shade in (0, 100, 200):
                picture = np.full((height, width, 3), shade, np.uint8)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            output.mux(stream.encode())
        video.seek(0)
        with av.open(video) as again:
            count = sum(1 for _ in again.decode(video=0))
        return "" if count == 3 else f"of 3 frames {count} came back"
    except (av.error.FFmpegError, ValueError) as error:
        return str(error)
    finally:
        av.logging.set_libav_level(av.logging.ERROR)


def frames_at(path: Path, times_s: Sequence[float], tolerance_s: float, what: str) -> Iterator[tuple[np.ndarray, bool]]:
    """For each of the growing `times_s` the nearest frame uint8[h, w, 3] in BGR, and whether it is the same as before.

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
                same = picture is not None
                if picture is None:
                    picture = here.to_ndarray(format="bgr24")
                yield picture, same
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
