"""Processes of a benchmark end with it."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from benchmarks.common.pool import process_pool


def test_what_ends_the_benchmark_ends_what_its_processes_do() -> None:
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt), process_pool(1) as pool:
        assert pool.submit(abs, -1).result() == 1
        pool.submit(time.sleep, 600)
        raise KeyboardInterrupt
    assert time.monotonic() - began_s < 60
    assert not multiprocessing.active_children()
