"""What was done of a long run, a JSON line for each piece, so that one that was interrupted goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Progress:
    """Pieces by a key such as `seed 7` or `without NAME`. A line that a kill cut short does not count."""

    def __init__(self, path: Path | None, made_by: str) -> None:
        """`path`: None keeps nothing. `made_by`: the commit; what another one left there is no part of this run.

        Raises `SystemExit` that says so.
        """
        self.done: dict[str, dict[str, Any]] = {}
        self._path = path
        if path is None:
            return
        if made_by.endswith(("+", "?")):
            raise SystemExit(f"--resume needs a commit without changes, this is {made_by}: commit, or leave it out.")
        lines = path.read_text().splitlines() if path.exists() else []
        if not lines:
            self._append({"commit": made_by})
            return
        for line in lines:
            try:
                piece = json.loads(line)
            except json.JSONDecodeError:
                continue
            if piece.pop("commit", made_by) != made_by:
                raise SystemExit(f"{path} is of another commit than {made_by}; name another file.")
            if piece:
                self.done[piece.pop("piece")] = piece
        # What comes next must not go on a line that was cut short.
        if not path.read_text().endswith("\n"):
            with path.open("a") as file:
                file.write("\n")

    def add(self, piece: str, found: dict[str, Any]) -> None:
        self.done[piece] = found
        if self._path is not None:
            self._append({"piece": piece, **found})

    def _append(self, line: dict[str, Any]) -> None:
        assert self._path is not None
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
