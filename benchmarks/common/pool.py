"""Processes that share the runs of a benchmark."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def process_pool(most: int, initializer: Callable[[], object] | None = None) -> Iterator[ProcessPoolExecutor]:
    """A process for each core, `most` at most. What ends the benchmark ends them in the middle of what they do."""
    workers = min(most, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer) as pool:
        try:
            yield pool
        except BaseException:
            for child in multiprocessing.active_children():
                child.terminate()
            raise
