"""Fetches announced weights in parts, checks them whole, and puts them on disk for whoever loads them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from wire.clock import Clock
from wire.errors import storage_error, storage_errors
from wire.messages import Message
from wire.messages.gateway import FetchWeights, Hello, Stop, VersionAvailable, WeightBytes
from wire.task_thread import Task, TaskQueue
from wire.transport.channel import Channel
from wire.transport.session import GatewaySession
from wire.types import PolicyVersion

log = logging.getLogger(__name__)

_MOST_PART, _LEAST_PART = 256 * 1024, 16 * 1024
_TIMEOUT_S = 2.0
_MOST_UNDER_WAY = 16
_SILENT_PARTS = 5
"""so often a part is asked for in vain before a newer version is fetched instead"""
_SLOW_NS, _FAST_NS = 400_000_000, 200_000_000
_QUEUED_NS, _FREE_NS = 100_000_000, 25_000_000
"""what is under way is halved where a part takes longer than that, or so much longer than the quickest one: what people
command waits behind it. It is doubled where a part takes less, and hardly longer than the quickest one"""
_CHECKED_AT_ONCE = 8 * 1024 * 1024
_HASH = re.compile(r"[0-9a-f]{64}")


class WeightFile:
    """The file of a version that is wanted: written as it comes, or read to be checked.

    For the thread that may wait for the disk. Raises `OSError`.
    """

    def __init__(self, path: Path, version: PolicyVersion, keep: int) -> None:
        """`keep`: so many versions are kept, with this one, when it is here."""
        self.path = path
        self._temporary = path.with_suffix(".tmp")
        self._wanted_sha256, self._keep = version.sha256, keep
        self._file: BinaryIO | None = None
        self._sha256 = hashlib.sha256()

    def append(self, data: bytes, last: bool) -> bool | None:
        """Write what comes next; after the `last` part whether it is right, and then it is kept. Else None."""
        self._open(self._temporary, "wb").write(data)
        self._sha256.update(data)
        if not last:
            return None
        self._close()
        if self._sha256.hexdigest() != self._wanted_sha256:
            return False
        self._temporary.rename(self.path)
        others = [file for file in self.path.parent.glob("*.safetensors") if file != self.path]
        for old in sorted(others, key=lambda file: file.stat().st_mtime_ns)[: len(others) + 1 - self._keep]:
            old.unlink()
        return True

    def check(self) -> bool | None:
        """Read on in the file that is here, for other things may have to be done; in the end whether it is right."""
        data = self._open(self.path, "rb").read(_CHECKED_AT_ONCE)
        self._sha256.update(data)
        if len(data) == _CHECKED_AT_ONCE:
            return None
        self._close()
        return self._sha256.hexdigest() == self._wanted_sha256

    def drop(self) -> None:
        """It is wanted no more; what came of it goes."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    def _open(self, path: Path, mode: str) -> BinaryIO:
        if self._file is None:
            self._file = cast(BinaryIO, path.open(mode))
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class WeightClient:
    """Follows announcements; `ready` names the version announced last that is here, whole and checked.

    An announcement may go back to an older version: a measurement asks for it, or the newer one was no good.

    Files are read and written by `tasks`: in a thread once that is started, before the call returns without one.
    """

    def __init__(self, directory: Path, channel: Channel, clock: Clock, keep: int = 3) -> None:
        """`directory` keeps the `keep` versions that came last; what a crash left half-written there is removed."""
        self.tasks = TaskQueue("weights")
        self._directory = directory
        self._channel = channel
        self._clock = clock
        self._keep = keep
        self._wanted: PolicyVersion | None = None
        self._file: WeightFile | None = None
        """of the version that is wanted"""
        self._following: PolicyVersion | None = None
        """announced meanwhile, and fetched when that is here"""
        self._checks = False
        """it is being read"""
        self._busy = 0
        """what is being done with it now"""
        self._asked = self._received = self._written = 0
        """bytes of it"""
        self._asked_ns: deque[tuple[int, int]] = deque()
        """of the parts under way: where each ends, and when it was asked for"""
        self._progress_ns = self._silent = 0
        self._window, self._quickest_ns = _MOST_PART, _SLOW_NS
        """bytes that are under way at most, and how long a part took at the least"""
        self.refused: Counter[str] = Counter()
        """what cannot be a version or a part of one, by reason"""
        self.ready: tuple[PolicyVersion, Path] | None = None
        self._is_new = False
        """`poll` has not said yet that it is ready"""
        with storage_errors("preparing the weight cache", directory):
            directory.mkdir(parents=True, exist_ok=True)
            for stale in directory.glob("*.tmp"):
                stale.unlink()

    def fetch(self, version: PolicyVersion) -> None:
        """This version is to act; `poll` says when it is ready.

        A fetch under way is finished first, and of those announced meanwhile only the last one is fetched: where
        versions come faster than they can be fetched, none would ever arrive. One that is called back to replaces what
        is under way.
        """
        if not (_HASH.fullmatch(version.sha256) and version.number > 0 and version.size_bytes > 0):
            self.refused["impossible_version"] += 1
            log.error("version %d of %d bytes cannot be: %.80r.", version.number, version.size_bytes, version.sha256)
            return
        self._following, wanted = None, self._wanted
        here = self.ready[0] if self.ready is not None else None
        if wanted is not None and _same(wanted, version):
            return
        if here is not None and _same(here, version):
            # Called back before its successor was here.
            self._drop()
            return
        if wanted is not None and version.number > wanted.number > (here.number if here is not None else 0):
            self._following = version
            return
        self._drop()
        self._wanted = version
        file = self._begin(version)
        self._submit(file.path.exists, self._on_looked)
        self.tasks.poll()

    def add_part(self, part: WeightBytes) -> None:
        """Take in a part that was asked for."""
        wanted, file = self._wanted, self._file
        if wanted is None or file is None or self._checks or part.number != wanted.number:
            return
        size = len(part.data)
        if part.offset != self._received or not self._asked_ns:
            return
        if size > min(_MOST_PART, wanted.size_bytes - self._received):
            self.refused["impossible_part"] += 1
            log.error("version %d: a part of %d bytes was not asked for.", wanted.number, size)
            return
        self._progress_ns = self._clock.now_ns()
        end, asked_ns = self._asked_ns.popleft()
        self._adapt(self._progress_ns - asked_ns)
        self._received += size
        self._silent = 0
        last = self._received >= wanted.size_bytes or not part.data
        if self._received != end:
            # Whoever has it sends smaller ones: what was asked for behind it begins elsewhere.
            self._asked = self._received
            self._asked_ns.clear()

        def appended(of: PolicyVersion, right: bool | None) -> None:
            self._written += size
            self._on_appended(of, right)

        self._submit(partial(file.append, part.data, last), appended)
        self.tasks.poll()

    def poll(self) -> bool:
        """Ask again for what did not come; check a part of what was here before. True when a version has just become
        ready."""
        if self._file is not None and not self._busy:
            if self._checks:
                self._submit(self._file.check, self._on_checked)
            elif self._clock.now_ns() - self._progress_ns > _TIMEOUT_S * 1e9:
                self._window = max(_LEAST_PART, self._window // 2)
                self._silent += 1
                if self._following is not None and self._silent >= _SILENT_PARTS:
                    # Nobody may have the rest of it: a gateway that was lost with it, say.
                    log.warning("a version does not come; %d is fetched instead.", self._following.number)
                    self._drop()
                    self._follow()
                else:
                    self._ask_again()
        self.tasks.poll()
        is_new, self._is_new = self._is_new, False
        return is_new

    # --- inside -------------------------------------------------------------------------------------------------

    def _begin(self, version: PolicyVersion) -> WeightFile:
        """Nothing of it is here, as far as is known."""
        path = self._directory / f"{version.number:08d}-{version.sha256[:12]}.safetensors"
        self._file = WeightFile(path, version, self._keep)
        self._checks, self._busy, self._silent = False, 0, 0
        # All robots begin at once: the gateway has so much of each in memory.
        self._window = min(self._window, _MOST_PART)
        self._asked = self._received = self._written = 0
        self._asked_ns.clear()
        return self._file

    def _submit(self, run: Callable[[], bool | None], done: Callable[[PolicyVersion, bool | None], None]) -> None:
        """Have something done with the file; `done` hears of it, unless another version is wanted by then."""
        wanted, file = self._wanted, self._file
        assert wanted is not None
        self._busy += 1

        def finished(found: bool | None) -> None:
            if file is self._file:
                self._busy -= 1
                done(wanted, found)

        def failed(error: Exception) -> None:
            if not isinstance(error, OSError):
                raise error
            if file is self._file:
                self._busy -= 1
                self._on_failed(wanted, error)

        self.tasks.submit(Task(run, finished, failed))

    def _on_looked(self, wanted: PolicyVersion, found: bool | None) -> None:
        self._checks = bool(found)
        if not found:
            self._ask()

    def _on_appended(self, wanted: PolicyVersion, right: bool | None) -> None:
        if right is None:
            self._ask()
        elif right:
            self._on_ready(wanted)
        else:
            log.error("version %d arrived with the wrong hash.", wanted.number)
            if self._following is None:
                self._fetch_again(wanted)
            else:
                self._drop()
                self._follow()

    def _on_checked(self, wanted: PolicyVersion, right: bool | None) -> None:
        if right:
            self._on_ready(wanted)
        elif right is not None:
            self._fetch_again(wanted)

    def _fetch_again(self, wanted: PolicyVersion) -> None:
        self._begin(wanted)
        self._ask()

    def _on_ready(self, wanted: PolicyVersion) -> None:
        assert self._file is not None
        self.ready, self._is_new = (wanted, self._file.path), True
        self._wanted = self._file = None
        self._follow()

    def _on_failed(self, wanted: PolicyVersion, error: OSError) -> None:
        assert self._file is not None
        path = self._file.path
        if self._checks:
            log.error("%s", storage_error(error, f"reading version {wanted.number}", path))
            self._fetch_again(wanted)
            return
        # The robot goes on with the version it has; the next announcement tries again.
        log.error("%s", storage_error(error, f"keeping version {wanted.number}", path))
        self._drop()
        self._follow()

    def _follow(self) -> None:
        """Fetch what was announced meanwhile."""
        if (following := self._following) is not None:
            self.fetch(following)

    def _drop(self) -> None:
        """Fetch nothing any more; what came of it goes."""
        file, self._wanted, self._file, self._busy = self._file, None, None, 0
        if file is not None:
            self.tasks.submit(Task(file.drop))

    def _adapt(self, took_ns: int) -> None:
        """A part took so long."""
        # The line may be another one by now.
        self._quickest_ns = min(self._quickest_ns * 65 // 64, took_ns)
        more_ns = took_ns - self._quickest_ns
        if took_ns > _SLOW_NS or more_ns > _QUEUED_NS:
            self._window = max(_LEAST_PART, self._window // 2)
        elif took_ns < _FAST_NS and more_ns < _FREE_NS:
            self._window = min(_MOST_UNDER_WAY * _MOST_PART, self._window * 2)

    def _ask_again(self) -> None:
        """What is under way does not come."""
        self._asked = self._received
        self._asked_ns.clear()
        self._ask()

    def _ask(self) -> None:
        """Ask for as much as may be under way, for one part at least."""
        assert self._wanted is not None
        self._progress_ns = now_ns = self._clock.now_ns()
        whole, most = self._wanted.size_bytes, min(_MOST_PART, self._window)
        while self._asked < whole and len(self._asked_ns) < _MOST_UNDER_WAY:
            size = min(most, whole - self._asked)
            if self._asked_ns and self._asked + size - self._written > self._window:
                break
            self._channel.send(FetchWeights(self._wanted.number, self._asked, size))
            self._asked += size
            self._asked_ns.append((self._asked, now_ns))


def _same(one: PolicyVersion, other: PolicyVersion) -> bool:
    return (one.number, one.sha256) == (other.number, other.sha256)


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
