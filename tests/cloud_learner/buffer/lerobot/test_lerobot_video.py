"""Encoding a video makes nothing real-time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from cloud_learner.buffer.lerobot.video import never_real_time
from tests.extras import needs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make threads real-time")


def may_be_real_time() -> bool:
    """Whether a new thread can become real-time; it does not stay so."""
    found: list[bool] = []

    def attempt() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except PermissionError:
            found.append(False)
        else:
            found.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return found[0]


def test_no_thread_becomes_real_time_meanwhile_and_any_may_afterwards() -> None:
    if not may_be_real_time():
        pytest.skip("real-time scheduling is not permitted here")
    with pytest.raises(ZeroDivisionError), never_real_time():
        assert not may_be_real_time()
        raise ZeroDivisionError
    assert may_be_real_time()


@needs("av")
def test_an_encoder_and_its_threads_stay_as_urgent_as_the_thread_that_opens_it(tmp_path: Path) -> None:
    import av

    with never_real_time(), av.open(str(tmp_path / "video.mp4"), "w") as output:
        stream = output.add_stream("libsvtav1", 30, options={"g": "2", "crf": "30", "preset": "12"})
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        output.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")))
        threads = [int(thread) for thread in os.listdir("/proc/self/task")]
        assert len(threads) > 2
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_OTHER}
        output.mux(stream.encode())
