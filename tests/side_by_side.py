"""Runs the tests side by side, then those that failed once more with nothing beside them.

    python -m tests.side_by_side [--quick] [options of pytest]

A test that fails twice fails the run; one that only passed alone is named. An interrupted first run is not repeated.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

WORKERS = 4
"""more than the cores of a small machine: tests with real processes wait most of the time"""
MOST_REPEATED = 20
"""more failures than this are a fault, and no accident"""
BYTECODE = Path(__file__).resolve().parents[1] / ".pytest_cache" / "bytecode"
QUICK = ("-m", "not slow and not browser")
_SERIAL = ("-n", "--numprocesses", "--dist", "--pdb", "--trace", "--collect-only", "--co", "-s", "no:xdist")
"""options with which tests are not shared out here: the user does it, or looks at one process"""


class Failures:
    """A pytest plugin that notes, in the process that shares the tests out, which of them failed."""

    def __init__(self) -> None:
        self.tests: list[str] = []
        self.repeatable = True
        self.places: list[str] = []
        """what pytest was asked to run: files, folders, tests"""
        self._given: list[str] = []

    @property
    def options(self) -> list[str]:
        """What pytest was given beside `places`."""
        left = self._given[::-1]
        for place in self.places:
            left.remove(place)
        return left[::-1]

    def pytest_configure(self, config: pytest.Config) -> None:
        self._given = [str(word) for word in config.invocation_params.args]
        self.places = [word for word in config.option.file_or_dir if word in self._given]
        # After a run that stopped at its first failures nobody knows about the rest.
        self.repeatable = not config.option.maxfail

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.tests:
            self.tests.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.repeatable &= not report.failed


def main(words: Sequence[str]) -> int:
    """Exit status of the whole: pytest's own, and 0 when all tests that failed passed alone."""
    _compile_once()
    failures = Failures()
    status = int(pytest.main(_options(words), plugins=[failures]))
    if status != pytest.ExitCode.TESTS_FAILED or not failures.repeatable or not failures.tests:
        return status
    if len(failures.tests) > MOST_REPEATED:
        _say(f"{len(failures.tests)} tests failed: that is no accident, none of them is run again.")
        return status
    _say(f"{len(failures.tests)} failed; once more, one after the other, with nothing beside them:")
    again = [sys.executable, "-m", "tests.side_by_side", "--alone", *failures.options, *failures.tests]
    return subprocess.run(again, check=False).returncode


def run_alone(words: Sequence[str]) -> int:
    """The second run, in this process: the tests that `words` ends with, and a line for each that passes now."""
    failures = Failures()
    serial = () if any("no:xdist" in word for word in words) else ("-n", "0")
    status = int(pytest.main([*words, *serial], plugins=[failures]))
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        for name in failures.places:
            if name not in failures.tests:
                _say(f"passed alone, failed beside others: {name}: a flaky test, mend it")
    return status


def _compile_once() -> None:
    """Where no bytecode may lie beside the sources, it is kept here: hundreds of processes import the same."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(BYTECODE))


def _options(words: Sequence[str]) -> list[str]:
    """`words` for pytest."""
    options, workers = [word for word in words if word != "--quick"], WORKERS
    if len(options) < len(words):
        # none of these waits
        options, workers = [*QUICK, *options], len(os.sched_getaffinity(0))
    if not any(word.startswith("-n") or word.split("=")[0] in _SERIAL for word in options):
        options = ["-n", str(workers), *options]
    return options


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(run_alone(words[1:]) if words[:1] == ["--alone"] else main(words))
