"""Fetches announced weights in parts, checks them whole, and puts them on disk for whoever loads them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from wire.clock import Clock
from wire.errors import storage_error, storage_errors
from wire.messages import Message
from wire.messages.gateway import FetchWeights, Hello, Stop, VersionAvailable, WeightBytes
from wire.transport.channel import Channel
from wire.transport.session import GatewaySession
from wire.types import PolicyVersion

log = logging.getLogger(__name__)

_MOST_PART, _LEAST_PART = 256 * 1024, 16 * 1024
_TIMEOUT_S = 2.0
_SLOW_NS, _FAST_NS = 400_000_000, 100_000_000
"""parts that take longer are asked for in halves, or answers to heartbeats would wait behind them; the next after one
that takes less is twice as large"""
_CHECKED_AT_ONCE = 8 * 1024 * 1024
_HASH = re.compile(r"[0-9a-f]{64}")


class WeightClient:
    """Follows announcements; `ready` names the version announced last that is here, whole and checked.

    An announcement may go back to an older version: a measurement asks for it, or the newer one was no good.
    """

    def __init__(self, directory: Path, channel: Channel, clock: Clock, keep: int = 3) -> None:
        """`directory` keeps the `keep` versions that came last; what a crash left half-written there is removed."""
        self._directory = directory
        self._channel = channel
        self._clock = clock
        self._keep = keep
        self._wanted: PolicyVersion | None = None
        self._file: BinaryIO | None = None
        """of the version that is wanted: being written, or read to be checked"""
        self._checks = False
        """it is being read"""
        self._size, self._sha256 = 0, hashlib.sha256()
        self._part = _MOST_PART
        self._asked_ns = 0
        self.refused: Counter[str] = Counter()
        """what cannot be a version or a part of one, by reason"""
        self.ready: tuple[PolicyVersion, Path] | None = None
        with storage_errors("preparing the weight cache", directory):
            directory.mkdir(parents=True, exist_ok=True)
            for stale in directory.glob("*.tmp"):
                stale.unlink()

    def fetch(self, version: PolicyVersion) -> None:
        """This version is to act. It replaces a fetch under way; `poll` or `add_part` says when it is ready."""
        if not (_HASH.fullmatch(version.sha256) and version.number > 0 and version.size_bytes > 0):
            self.refused["impossible_version"] += 1
            log.error("version %d of %d bytes cannot be: %.80r.", version.number, version.size_bytes, version.sha256)
            return
        current = self._wanted.number if self._wanted else self.ready[0].number if self.ready else 0
        if version.number == current:
            return
        if self.ready is not None and self.ready[0].number == version.number:
            # Called back before its successor was here.
            self._drop()
            return
        self._drop()
        self._wanted = version
        self._begin(self._path(version).exists())

    def add_part(self, part: WeightBytes) -> bool:
        """Take in a part; True when a version has just become ready."""
        wanted = self._wanted
        if wanted is None or self._checks or part.number != wanted.number or part.offset != self._size:
            return False
        if len(part.data) > min(_MOST_PART, wanted.size_bytes - self._size):
            self.refused["impossible_part"] += 1
            log.error("version %d: a part of %d bytes was not asked for.", wanted.number, len(part.data))
            return False
        took_ns = self._clock.now_ns() - self._asked_ns
        if took_ns > _SLOW_NS:
            self._part = max(_LEAST_PART, self._part // 2)
        elif took_ns < _FAST_NS:
            self._part = min(_MOST_PART, self._part * 2)
        try:
            self._open(self._temporary(wanted), "wb").write(part.data)
        except OSError as error:
            self._give_up(error)
            return False
        self._size += len(part.data)
        self._sha256.update(part.data)
        if self._size < wanted.size_bytes and part.data:
            self._request_part()
            return False
        if self._sha256.hexdigest() != wanted.sha256:
            log.error("version %d arrived with the wrong hash; it is fetched again.", wanted.number)
            self._begin()
            return False
        return self._keep_version(wanted)

    def poll(self) -> bool:
        """Ask again for what did not come; check a part of what was here before. True when that is ready now."""
        if self._wanted is None:
            return False
        if self._checks:
            return self._check(self._wanted)
        if self._clock.now_ns() - self._asked_ns > _TIMEOUT_S * 1e9:
            self._part = max(_LEAST_PART, self._part // 2)
            self._request_part()
        return False

    # --- inside -------------------------------------------------------------------------------------------------

    def _begin(self, checks: bool = False) -> None:
        """Fetch the version from its first byte on, or check the file that is here."""
        with contextlib.suppress(OSError):
            self._close()
        self._checks, self._size, self._sha256 = checks, 0, hashlib.sha256()
        if not checks:
            self._request_part()

    def _check(self, wanted: PolicyVersion) -> bool:
        """Read on, for a gigabyte at once would keep everything else waiting; whether all of it is right."""
        path = self._path(wanted)
        try:
            data = self._open(path, "rb").read(_CHECKED_AT_ONCE)
        except OSError as error:
            log.error("%s", storage_error(error, f"reading version {wanted.number}", path))
            self._begin()
            return False
        self._sha256.update(data)
        if len(data) == _CHECKED_AT_ONCE:
            return False
        if self._sha256.hexdigest() != wanted.sha256:
            self._begin()
            return False
        self._close()
        self._wanted, self.ready = None, (wanted, path)
        return True

    def _keep_version(self, wanted: PolicyVersion) -> bool:
        path = self._path(wanted)
        try:
            self._close()
            self._temporary(wanted).rename(path)
            others = [file for file in self._directory.glob("*.safetensors") if file != path]
            for old in sorted(others, key=lambda file: file.stat().st_mtime_ns)[: len(others) + 1 - self._keep]:
                old.unlink()
        except OSError as error:
            self._give_up(error)
            return False
        self._wanted, self.ready = None, (wanted, path)
        return True

    def _give_up(self, error: OSError) -> None:
        """The robot goes on with the version it has; the next announcement tries again."""
        assert self._wanted is not None
        log.error("%s", storage_error(error, f"keeping version {self._wanted.number}", self._path(self._wanted)))
        self._drop()

    def _drop(self) -> None:
        """Fetch nothing any more; what came of it goes."""
        wanted, self._wanted = self._wanted, None
        with contextlib.suppress(OSError):
            self._close()
        if wanted is not None:
            with contextlib.suppress(OSError):
                self._temporary(wanted).unlink(missing_ok=True)

    def _open(self, path: Path, mode: str) -> BinaryIO:
        """The file of the version that is wanted."""
        if self._file is None:
            self._file = cast(BinaryIO, path.open(mode))
        return self._file

    def _close(self) -> None:
        """Raises `OSError` when what was written could not be."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _request_part(self) -> None:
        assert self._wanted is not None
        self._asked_ns = self._clock.now_ns()
        self._channel.send(FetchWeights(self._wanted.number, self._size, self._part))

    def _path(self, version: PolicyVersion) -> Path:
        return self._directory / f"{version.number:08d}-{version.sha256[:12]}.safetensors"

    def _temporary(self, version: PolicyVersion) -> Path:
        return self._path(version).with_suffix(".tmp")


class WeightSubscriber:
    """Follows the gateway's versions, for processes that run them but drive no robot of the fleet.

    `poll` handles what the gateway says and fetches what it announces; `ready` names the newest version that is here.
    """

    def __init__(
        self,
        hello: Hello,
        gateway: Channel,
        weights: Path,
        clock: Clock,
        *,
        wants: Callable[[PolicyVersion], bool] = lambda version: True,
        remind: Callable[[], Message | None] = lambda: None,
    ) -> None:
        """`hello`: what the process is; `weights`: a directory for the newest files.

        `wants`: whether an announced version is of interest; `remind`: what to say with every heartbeat, if anything.
        """
        self.session = GatewaySession(gateway, hello, clock)
        self.stopping = False
        self._name = f"{hello.role} '{hello.name}'"
        self._gateway = gateway
        self._wants, self._remind = wants, remind
        self._client = WeightClient(weights, gateway, clock)

    @property
    def ready(self) -> tuple[PolicyVersion, Path] | None:
        """The newest version that is here, whole and checked, and its file."""
        return self._client.ready

    def poll(self) -> None:
        """Handle what is new, ask again for what did not come, and keep the connection."""
        while (message := self._gateway.recv()) is not None:
            match message:
                case VersionAvailable(version=version):
                    if self._wants(version):
                        self._client.fetch(version)
                case WeightBytes():
                    self._client.add_part(message)
                case Stop():
                    self.stopping = True
                case _:
                    if not self.session.handle_message(message):
                        log.warning("%s does not understand %s.", self._name, type(message).__name__)
        self._client.poll()
        if self.session.poll() and (reminder := self._remind()) is not None:
            self._gateway.send(reminder)
