"""Parts of remote objects on this machine's disk, below a number of bytes: what is read again is not fetched again.

A file for each part. Shards are read in the same parts each time, chunk by chunk, and whoever reads checks what comes:
what is damaged is fetched again past the cache. What was not read for longest goes first. All of it may be deleted at
any time, and several processes may use one directory.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from pathlib import Path

from cloud_learner.buffer.files import TEMPORARY, remove_quietly, spare_bytes

log = logging.getLogger(__name__)
Span = tuple[str, int, int]
"""(key, first byte, end byte) of a part of an object."""
_STEP = 32
"""this part of the cap is written between looks at how much there is"""


class RangeCache:
    """At most `cap_bytes` below `directory`, and a thirty-second part more for each further process that writes there.

    What fits only on a disk that is nearly full is not kept. Safe to use from several threads.
    """

    def __init__(self, directory: Path, cap_bytes: int) -> None:
        self.directory, self.cap_bytes = directory, cap_bytes
        self._left = 0
        """bytes to write before the next look"""
        self._off = False
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """On the disk now."""
        return sum(size for _, size, _ in self._files())

    def get(self, span: Span) -> bytes | None:
        """What was kept of it, None unless it has the right length."""
        path = self._path(span)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data if len(data) == span[2] - span[1] else None

    def put(self, span: Span, data: bytes) -> None:
        """Keep it, if there is room."""
        if self._off:
            return
        path = self._path(span)
        temporary = path.with_name(f"{path.name}-{os.getpid()}-{threading.get_ident()}{TEMPORARY}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._make_room(len(data))
            temporary.write_bytes(data)
            temporary.replace(path)
        except FileNotFoundError:
            log.debug("%s was cleared meanwhile.", self.directory)
        except OSError as error:
            remove_quietly(temporary)
            self._off = True
            log.warning(
                "nothing more of the object store is kept in %s, from now on it is fetched each time: %s. Free some "
                "room and start again, or set cache_bytes in buffer.json.",
                self.directory,
                error.strerror or error,
            )

    def _path(self, span: Span) -> Path:
        key, first, end = span
        return self.directory / f"{key.replace('/', '_')}_{first}-{end}"

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._left -= size
            if self._left >= 0:
                return
            files = sorted(self._files())
            used = sum(size for _, size, _ in files)
            cap = min(self.cap_bytes, used + spare_bytes(self.directory))
            step = max(size, self.cap_bytes // _STEP)
            for _, file_bytes, path in files:
                if used + step <= cap:
                    break
                remove_quietly(Path(path))
                used -= file_bytes
            self._left = min(step, cap - used) - size
            if self._left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _files(self) -> list[tuple[int, int, str]]:
        """When each was read last, bytes and path."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.directory):
                # another process may remove it now
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat()
                    found.append((stat.st_mtime_ns, stat.st_size, entry.path))
        return found
