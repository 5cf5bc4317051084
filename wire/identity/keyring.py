"""The key directory of a gateway as it stands now: keys may be filed and revoked while it runs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from wire.errors import ConfigError
from wire.transport.keys import KeyRecord, read_record

log = logging.getLogger(__name__)

LOOK_S = 0.4
_FOLDERS = ("public", "revoked")
_Stamp = tuple[int, int, int]


class Keyring:
    """Records by public key. The directory is looked at every `LOOK_S`, never because of what a peer sends; a file is
    read when it is new or has changed."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._files: dict[str, tuple[_Stamp, KeyRecord | None]] = {}
        self._known: dict[str, KeyRecord] = {}
        self._names: dict[str, KeyRecord] = {}
        self._revoked: dict[str, KeyRecord] = {}
        self._ended: dict[str, KeyRecord] = {}
        self.reads = 0
        """files read so far"""
        self._next_s = 0.0
        self.refresh()

    def record(self, public: str) -> KeyRecord | None:
        """Whose key it is, None when nobody's who may connect."""
        return self._known.get(public)

    def of_name(self, name: str) -> KeyRecord | None:
        """The record of this name, None when nobody of it may connect. For any thread."""
        return self._names.get(name)

    def revoked(self, public: str) -> KeyRecord | None:
        """Whose key it was before it was revoked."""
        return self._revoked.get(public)

    def refresh(self, *, now: bool = False) -> None:
        """Look at the directory if it is time to, or `now`."""
        if not now and self._clock() < self._next_s:
            return
        self._next_s = self._clock() + LOOK_S
        try:
            files = self._look()
        except OSError as error:
            # No file handle left, say: what was read last stands until the next look.
            log.warning("the keys in %s could not be looked at: %s", self._directory, error)
            return
        if files == self._files:
            return
        before, self._files = self._known, files
        self._revoked = self._of("revoked")
        self._known = {key: record for key, record in self._of("public").items() if key not in self._revoked}
        self._names = {record.name: record for record in self._known.values()}
        self._ended |= {public: record for public, record in before.items() if self._known.get(public) != record}

    def pop_ended(self) -> dict[str, KeyRecord]:
        """By public key: the records that stood and do not any more, since the last call."""
        ended, self._ended = self._ended, {}
        return ended

    def _of(self, folder: str) -> dict[str, KeyRecord]:
        within = os.path.join(self._directory, folder, "")
        found = [record for path, (_, record) in sorted(self._files.items()) if path.startswith(within)]
        return {record.public: record for record in found if record is not None}

    def _look(self) -> dict[str, tuple[_Stamp, KeyRecord | None]]:
        files: dict[str, tuple[_Stamp, KeyRecord | None]] = {}
        for folder in _FOLDERS:
            for entry in self._entries(folder):
                try:
                    status, known = entry.stat(), self._files.get(entry.path)
                except FileNotFoundError:
                    # It was taken away in between, or is a link to nothing: that says nothing of the others.
                    continue
                stamp = status.st_ino, status.st_mtime_ns, status.st_size
                same = known is not None and known[0] == stamp
                files[entry.path] = known if known and same else (stamp, self._read(Path(entry.path)))
        return files

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._directory / folder) as entries:
                return [entry for entry in entries if entry.name.endswith(".key")]
        except FileNotFoundError:
            return []

    def _read(self, path: Path) -> KeyRecord | None:
        """What a file says; None, and a word in the log, for one that lets nobody in."""
        self.reads += 1
        try:
            record = read_record(path)
        except (ConfigError, OSError) as error:
            log.error("nobody is let in by %s: %s", path, error)
            return None
        if path.parent.name == "public" and record.name != path.stem:
            log.error("nobody is let in by %s: it is the record of '%s'; call the file so.", path, record.name)
            return None
        return record
