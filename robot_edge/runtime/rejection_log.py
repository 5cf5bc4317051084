"""Versions that a robot did not take, told to people: once for each robot and reason, whatever the version's number."""

from __future__ import annotations

import re
from pathlib import Path

_REJECTION = re.compile(r"version (\d+) is not taken: (.*)")


def not_taken(number: int, why: str) -> str:
    """What the inference process says, in its log and as an event of the kind `refused`."""
    return f"version {number} is not taken: {why}"


def read_refusal(text: str) -> tuple[int, str] | None:
    """(version, first line of the reason) if `text` has what `not_taken` made, else None."""
    found = _REJECTION.search(text)
    return (int(found[1]), found[2].strip()) if found else None


class RejectionLog:
    """Remembers what was told."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()

    def line(self, robot: str, text: str) -> str:
        """One line for a person about `text`; '' if it is no refusal or the reason was told of this robot before."""
        found = read_refusal(text)
        if found is None or (robot, found[1]) in self._reported:
            return ""
        self._reported.add((robot, found[1]))
        return f"{robot} refuses version {found[0]}: {found[1]}"


class RejectionLogTail:
    """Refusals that a robot's inference process writes into its log from now on."""

    def __init__(self, robot: str, log_file: Path) -> None:
        self._robot = robot
        self._file = log_file
        self._refusals = RejectionLog()
        self._at = log_file.stat().st_size if log_file.exists() else 0

    def lines(self) -> list[str]:
        """New ones since the last call; a log that is not there or cannot be read has none."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._at)
                found = file.read()
        except OSError:
            return []
        # The last line may be half written.
        whole = found[: found.rfind(b"\n") + 1]
        self._at += len(whole)
        reported = (self._refusals.line(self._robot, line) for line in whole.decode(errors="replace").splitlines())
        return [line for line in reported if line]
