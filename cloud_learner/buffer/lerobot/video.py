"""What comes with lerobot: its modules, the frames of videos with PyAV, and an encoder that stays in its place."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wire.errors import ConfigError, CorruptDataError
from wire.untrusted import MAX_PICTURE_PIXELS

_CAPABILITY_VERSION_3 = 0x20080522
_CAP_SYS_NICE = 1 << 23


def of_lerobot(module: str) -> Any:
    """`lerobot` or one of the modules that come with it. Raises `ConfigError` when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} is not installed here ({error}): pip install 'vla-fleet[lerobot]'") from error


@contextlib.contextmanager
def never_real_time() -> Iterator[None]:
    """Neither this thread nor those that it starts meanwhile can become real-time.

    SVT-AV1, in a process of root, gives the thread that opens it and all threads it starts SCHED_FIFO at the highest
    priority. They would then run before every control loop of the machine.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    libc = ctypes.CDLL(None)
    # capabilities(7): this thread's effective, permitted and inheritable sets, the low words before the high ones
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    effective, limits = sets[0], resource.getrlimit(resource.RLIMIT_RTPRIO)
    sets[0] = effective & ~_CAP_SYS_NICE
    libc.capset(header, sets)
    resource.setrlimit(resource.RLIMIT_RTPRIO, (0, limits[1]))
    try:
        yield
    finally:
        sets[0] = effective
        libc.capset(header, sets)
        resource.setrlimit(resource.RLIMIT_RTPRIO, limits)


def frames_at(path: Path, times_s: Sequence[float], tolerance_s: float, what: str) -> Iterator[np.ndarray]:
    """For each of the growing `times_s` the nearest frame uint8[h, w, 3] in BGR; the same array for the same frame.

    Decodes in one go from the key frame before the first time, so memory holds two frames. `what` begins the message
    of `CorruptDataError`, raised when the file is gone or broken or has no frame within `tolerance_s` of a time.
    """
    av = of_lerobot("av")
    try:
        # FFmpeg goes by what is in a file: a playlist would have it read other files, and hosts
        with av.open(str(path.absolute()), format="mp4", options={"protocol_whitelist": "file"}) as container:
            stream = container.streams.video[0]
            if stream.codec_context.width * stream.codec_context.height > MAX_PICTURE_PIXELS:
                raise CorruptDataError(f"{what}: video {path} claims more than {MAX_PICTURE_PIXELS} pixels a frame.")
            stream.codec_context.options = {"max_pixels": str(MAX_PICTURE_PIXELS)}  # a later frame may claim others
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
