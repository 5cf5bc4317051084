"""Shared by all tests: one thread per process, no display, nothing written outside temporary folders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from hal.driver_host import real_time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("LP_NUM_THREADS", "1")
os.environ.setdefault("VLA_FLEET_LOG", "INFO")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.groups import GroupScheduling

    return GroupScheduling(config, log)


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        from tests.groups import in_order

        in_order(items)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(report):
    """pytest-xdist ends the whole run at a string that is no UTF-8, such as what a test logged of a broken name."""
    return _encodable((yield))


def _encodable(data):
    if isinstance(data, str):
        return data.encode(errors="backslashreplace").decode()
    if isinstance(data, dict):
        return {_encodable(key): _encodable(value) for key, value in data.items()}
    return type(data)(map(_encodable, data)) if type(data) in (list, tuple) else data


@pytest.fixture(autouse=True)
def _ordinary_priority():
    """LeRobot's video encoder, run as root, leaves its thread real-time: no test and what it starts inherits that."""
    _calm()
    yield
    _calm()


def _calm() -> None:
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getscheduler(thread) != os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


@pytest.fixture(autouse=True, scope="session")
def _memory_is_free() -> Iterator[None]:
    """A host in a thread of a test must not lock the memory of every test after it."""
    with patch.object(real_time, "lock_memory", lambda: True):
        yield
