"""Encoding a video makes nothing real-time."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from cloud_learner.buffer.lerobot.video import VideoEncoder, as_before


def test_an_encoder_leaves_the_thread_as_urgent_as_it_was(tmp_path: Path) -> None:
    before = os.sched_getscheduler(0)
    encoder = VideoEncoder(30)
    encoder.start_episode(["camera"], tmp_path)
    encoder.feed_frame("camera", np.zeros((64, 64, 3), np.uint8))
    encoder.finish_episode()
    assert os.sched_getscheduler(0) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make threads real-time")
def test_threads_that_become_real_time_meanwhile_are_put_back() -> None:
    done, tried = threading.Event(), threading.Event()
    seen: list[int] = []

    def work() -> None:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        tried.set()
        done.wait(60)
        seen.append(os.sched_getscheduler(0))

    try:
        with as_before():
            thread = threading.Thread(target=work)
            thread.start()
            if not tried.wait(5):
                pytest.skip("real-time scheduling is not permitted here")
    finally:
        done.set()
        thread.join()
    assert seen == [os.sched_getscheduler(0)]
