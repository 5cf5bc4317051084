"""Versions that a robot did not take, told to people: once for each robot and reason, whatever the version's number."""

from __future__ import annotations

import re
from pathlib import Path

from robot_edge.runtime.log_files import old_log
from robot_edge.runtime.log_format import message_of

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
            begun_anew = self._file.stat().st_size < self._at
            found = _read_from(old_log(self._file), self._at) if begun_anew else b""
            self._at = 0 if begun_anew else self._at
            added = _read_from(self._file, self._at)
        except OSError:
            return []
        # The last line may be half written.
        added = added[: added.rfind(b"\n") + 1]
        self._at += len(added)
        whole = found + added
        said = map(message_of, whole.decode(errors="replace").splitlines())
        reported = (self._refusals.line(self._robot, text) for text in said)
        return [line for line in reported if line]


def _read_from(path: Path, at: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read()
