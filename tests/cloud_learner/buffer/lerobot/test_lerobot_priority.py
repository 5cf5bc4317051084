"""Encoding a video makes nothing real-time."""

import os
import threading

import pytest

from cloud_learner.buffer.lerobot.priority import as_before
from cloud_learner.buffer.lerobot.video import why_not_encodable


def test_an_encoder_leaves_the_thread_as_urgent_as_it_was() -> None:
    before = os.sched_getscheduler(0)
    assert why_not_encodable("libsvtav1", 64, 64, 30) == ""
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
