"""Fetches announced versions in parts, as deltas where that is less, and has them rebuilt and checked whole."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from robot_edge.uplink.weights.file import REBUILT, Appended, Found, WeightFile, file_name
from robot_edge.uplink.weights.offer_check import OfferCheck
from robot_edge.uplink.weights.plan import FetchPlan, Offer, is_held, is_possible, same
from robot_edge.uplink.weights.window import MOST_PART, MOST_UNDER_WAY, Asked, RequestWindow
from wire.clock import Clock
from wire.errors import WeightsError, storage_error, storage_errors
from wire.messages.gateway import Deltas, FetchDeltas, FetchWeights, VersionAvailable, WeightBytes
from wire.task_thread import Task, TaskQueue
from wire.transport.channel import Channel
from wire.types import PolicyVersion
from wire.weights.manifest import DeltaForm

log = logging.getLogger(__name__)

_TIMEOUT_S, _RELAY_TIMEOUT_S = 2.0, 10.0
"""a relay may have to fetch a whole chunk for all robots of its site first"""
_SILENT_PARTS = 5
"""so often a part is asked for in vain before a newer version is fetched instead"""
_WRONG_CHUNKS = 3
"""so often one is fetched again before the whole is, or a newer version"""
_RELAY_REST_NS = 60_000_000_000
"""a relay that was silent, or sent what was wrong, is asked again after so long"""


class WeightClient:
    """Follows announcements; `ready` names the version announced last that is here, whole and checked.

    An announcement may go back to an older version: a measurement asks for it, or the newer one was no good.

    Files are read and written by `tasks`: in a thread once that is started, before the call returns without one.
    """

    def __init__(
        self, directory: Path, channel: Channel, clock: Clock, keep: int = 3, relay: Channel | None = None
    ) -> None:
        """`directory` keeps the `keep` versions that came last. `relay`: passes on what the gateway has; it is asked
        first, and nothing of it is believed."""
        self.tasks = TaskQueue("weights")
        self.check = OfferCheck()
        self.directory = directory
        self._channel, self._relay = channel, relay
        self._relay_rests_ns = 0
        self._clock = clock
        self._keep = keep
        self._wanted: Offer | None = None
        self._following: Offer | None = None
        """announced meanwhile, and fetched when that is here"""
        self._file: WeightFile | None = None
        """of the version that is wanted"""
        self._plan: FetchPlan | None = None
        """how it is fetched; None while that is not known, or while it is checked"""
        self._checks = self._waits_for_deltas = False
        self._busy = self._wrong = 0
        """what is being done with it now; chunks of it that were wrong"""
        self._asked = self._received = self._written = 0
        """bytes of the plan"""
        self._under_way: deque[Asked] = deque()
        self._by_relay = False
        self._window = RequestWindow()
        self._progress_ns = self._silent = 0
        self.refused: Counter[str] = Counter()
        """what cannot be a version or a part of one, by reason"""
        self.announced = 0
        """the version that is to act, whether it is here or not"""
        self.fault = ""
        """why the version announced last is not fetched, "" when it is"""
        self.fetched_bytes = 0
        """of all that was asked for"""
        self.ready: tuple[PolicyVersion, Path] | None = None
        self._is_new = False
        """`poll` has not said yet that it is ready"""
        with storage_errors("preparing the weight cache", directory):
            directory.mkdir(parents=True, exist_ok=True)
            for stale in directory.glob(f"*{REBUILT}"):
                stale.unlink()

    def handle_message(self, message: VersionAvailable | Deltas | WeightBytes) -> None:
        """Take in what the gateway says."""
        match message:
            case VersionAvailable():
                self.announced = message.version.number
                self._on_offer(message)
            case Deltas():
                self._on_deltas(message)
            case WeightBytes():
                self.add_part(message)

    @property
    def fetching(self) -> int:
        """The version that is under way, 0: none."""
        return self._wanted.version.number if self._wanted is not None else 0

    def on_reverted(self, version: PolicyVersion, reason: str) -> None:
        """It could not be loaded, and is checked when it is announced again."""
        self.refused[reason] += 1
        if self.ready is not None and same(self.ready[0], version):
            self.ready = None

    def fetch(self, version: PolicyVersion, delta: DeltaForm | None = None, chunks: bytes = b"") -> None:
        """This version is to act; `poll` says when it is ready. `delta`: of its parent; `chunks`: hashes of its file.

        A fetch under way is finished first, and of those announced meanwhile only the last one is fetched: where
        versions come faster than they can be fetched, none would ever arrive. One that is called back to replaces what
        is under way.
        """
        if not is_possible(version):
            self.refused["impossible_version"] += 1
            log.error("version %d of %d bytes cannot be: %.80r.", version.number, version.size_bytes, version.sha256)
            return
        offer = Offer(version, delta, chunks)
        self._following, wanted = None, self._wanted.version if self._wanted is not None else None
        here = self.ready[0] if self.ready is not None else None
        if wanted is not None and same(wanted, version):
            self.fault = ""
            return
        if here is not None and same(here, version):
            # Called back before its successor was here.
            self.fault = ""
            self._drop()
            return
        if wanted is not None and version.number > wanted.number > (here.number if here is not None else 0):
            self._following = offer
            return
        self._drop()
        self._begin(offer)
        self.tasks.poll()

    def add_part(self, message: WeightBytes, by_relay: bool = False) -> None:
        """Take in a part that was asked for."""
        file, asked = self._file, self._under_way[0] if self._under_way else None
        if file is None or self._plan is None or asked is None or by_relay != self._by_relay:
            return
        part, size = asked.part, len(message.data)
        if (message.number, message.delta, message.offset) != (part.number, part.delta, part.offset):
            return
        if not 0 < size <= self._plan.part(self._received, MOST_PART).size:
            self.refused["impossible_part"] += 1
            log.error("version %d: a part of %d bytes was not asked for.", message.number, size)
            if self._blame_relay("sent a part of another size"):
                self._ask()
            return
        self._under_way.popleft()
        self._progress_ns = self._clock.now_ns()
        self._window.adapt(asked, self._progress_ns, size)
        position, self._received = self._received, self._received + size
        self.fetched_bytes += size
        self._silent = 0
        if size != part.size:
            # One that was asked for before, or whoever has it sends smaller ones: what is behind it begins elsewhere.
            part = self._plan.part(position, size)
            self._asked = self._received
            self._under_way.clear()

        def appended(of: Offer, found: Appended | None) -> None:
            if found is not None:
                self._on_appended(of, found)

        self._submit(partial(file.append, part, position, message.data), appended)
        self.tasks.poll()

    def poll(self) -> bool:
        """Ask again for what did not come; check a part of what was here before. True when a version has just become
        ready."""
        if self._file is not None and not self._busy:
            if self._checks:
                self._submit(self._file.check, self._on_checked)
            elif self._clock.now_ns() - self._progress_ns > self._timeout_s * 1e9:
                self._on_silence()
        self.tasks.poll()
        is_new, self._is_new = self._is_new, False
        return is_new

    @property
    def _timeout_s(self) -> float:
        return _RELAY_TIMEOUT_S if self._by_relay and self._under_way else _TIMEOUT_S

    # --- what is said of versions ---------------------------------------------------------------------------------

    def _on_offer(self, message: VersionAvailable) -> None:
        try:
            chunks = self.check.chunks_of(message)
        except WeightsError as error:
            self.refused["manifest"] += 1
            self._refuse(str(error))
            return
        self.fetch(message.version, message.delta, chunks)

    def _on_deltas(self, message: Deltas) -> None:
        offer = self._wanted
        if offer is None or message.number != offer.version.number or not self._waits_for_deltas:
            return
        self._waits_for_deltas = False
        deltas = message.deltas
        if deltas and all(one.size_bytes > 0 for one in deltas) and deltas[-1].number == message.number:
            self._follow_plan(FetchPlan.by(deltas, file_name(deltas[0].base, deltas[0].base_sha256)))
        else:
            self._follow_plan(None)
        self.tasks.poll()

    def _refuse(self, fault: str) -> None:
        if fault != self.fault:
            log.error("%s", fault)
        self.fault = fault

    # --- what is done with the file -------------------------------------------------------------------------------

    def _begin(self, offer: Offer) -> None:
        """Nothing of it is here, as far as is known."""
        self._wanted, self._file = offer, WeightFile(self.directory, offer.version, self._keep)
        self._plan, self._checks, self._waits_for_deltas = None, False, False
        self._busy = self._silent = self._wrong = 0
        self._window.begin()
        self._set_position(0)
        self._submit(self._file.look, self._on_looked)

    def _submit(self, run: Callable[[], Any], done: Callable[[Offer, Any], None]) -> None:
        """Have something done with the file; `done` hears of it, unless another version is wanted by then."""
        wanted, file = self._wanted, self._file
        assert wanted is not None
        self._busy += 1

        def finished(found: Any) -> None:
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

    def _on_looked(self, offer: Offer, found: Found) -> None:
        self._checks = found.whole
        if found.whole:
            self.fault = ""
            return
        if found.fault:
            # Only another version, or more room, can mend that.
            self._refuse(found.fault)
            self._drop()
            self._follow()
            return
        self.fault = ""
        delta = offer.delta
        if delta is not None and is_held(found.held, delta.base, delta.base_sha256) and delta.size_bytes > 0:
            self._follow_plan(FetchPlan.by([delta], file_name(delta.base, delta.base_sha256)))
        elif delta is not None and found.held:
            self._waits_for_deltas, self._progress_ns = True, self._clock.now_ns()
            self._channel.send(FetchDeltas(offer.version.number, found.held))
        else:
            self._follow_plan(None)

    def _follow_plan(self, plan: FetchPlan | None) -> None:
        """Fetch by that, None: the whole."""
        assert self._wanted is not None
        assert self._file is not None
        version = self._wanted.version
        plan = plan or FetchPlan.whole(version.number, version.size_bytes, self._wanted.chunks)
        self._plan, self._wrong = None, 0
        self._progress_ns = self._clock.now_ns()

        def begun(_: Offer, position: int) -> None:
            self._plan = plan
            self._set_position(position)
            self._ask()

        self._submit(partial(self._file.begin, plan), begun)

    def _on_appended(self, offer: Offer, found: Appended) -> None:
        self._written = found.position
        if found.done:
            self._on_ready(offer)
        elif found.wrong_chunk or found.wrong_whole:
            self._on_wrong(offer, found)
        else:
            self._ask()

    def _on_wrong(self, offer: Offer, found: Appended) -> None:
        self._wrong += 1
        if found.wrong_chunk:
            self._blame_relay("sent a chunk that is another one")
        log.error("version %d arrived with the wrong hash from byte %d on.", offer.version.number, found.position)
        enough = found.wrong_whole or self._wrong >= _WRONG_CHUNKS
        if enough and self._plan is not None and self._plan.base:
            # A base that is damaged makes something else of a delta that is right.
            self._follow_plan(None)
        elif enough and self._following is not None:
            self._drop()
            self._follow()
        else:
            self._set_position(found.position)
            if self._wrong < _WRONG_CHUNKS:  # else `_on_silence` does, later
                self._ask()

    def _on_checked(self, offer: Offer, right: bool | None) -> None:
        if right:
            self._on_ready(offer)
        elif right is not None:
            self._checks = False
            self._follow_plan(None)

    def _on_ready(self, offer: Offer) -> None:
        assert self._file is not None
        self.ready, self._is_new = (offer.version, self._file.path), True
        self._wanted = self._file = self._plan = None
        self._under_way.clear()
        self._follow()

    def _on_failed(self, offer: Offer, error: OSError) -> None:
        assert self._file is not None
        path, number = self._file.path, offer.version.number
        if self._checks:
            log.error("%s", storage_error(error, f"reading version {number}", path))
            self._checks = False
            self._follow_plan(None)
            return
        # The robot goes on with the version it has; the next announcement tries again.
        log.error("%s", storage_error(error, f"keeping version {number}", path))
        self._drop()
        self._follow()

    def _follow(self) -> None:
        """Fetch what was announced meanwhile."""
        if (following := self._following) is not None:
            self.fetch(*following)

    def _drop(self) -> None:
        """Fetch nothing any more; what came of it goes."""
        file, self._wanted, self._file, self._plan, self._busy = self._file, None, None, None, 0
        self._under_way.clear()
        if file is not None:
            self.tasks.submit(Task(file.drop))

    # --- parts ----------------------------------------------------------------------------------------------------

    def _on_silence(self) -> None:
        self._window.halve()
        self._silent += 1
        self._blame_relay("is silent")
        if self._waits_for_deltas or self._plan is None:
            self._waits_for_deltas = False
            self._follow_plan(None)
        elif self._following is not None and self._silent >= _SILENT_PARTS:
            # Nobody may have the rest of it: a gateway that was lost with it, say.
            log.warning("a version does not come; %d is fetched instead.", self._following.version.number)
            self._drop()
            self._follow()
        elif self._silent % _SILENT_PARTS == 0 and self._plan.base:
            # A gateway that lost a delta has the whole.
            self._follow_plan(None)
        else:
            self._set_position(self._received)
            self._ask()

    def _blame_relay(self, what: str) -> bool:
        """Whether it was asked."""
        if self._by_relay:
            log.error("the relay %s; for a minute the gateway is asked instead.", what)
            self.refused["relay"] += 1
            self._relay_rests_ns = self._clock.now_ns() + _RELAY_REST_NS
            self._under_way.clear()
            self._asked, self._by_relay = self._received, False
            return True
        return False

    def _set_position(self, position: int) -> None:
        """Go on from there; what is under way is not waited for."""
        self._asked = self._received = self._written = position
        self._under_way.clear()

    def _ask(self) -> None:
        """Ask for as much as may be under way, for one part at least."""
        assert self._plan is not None
        self._progress_ns = now_ns = self._clock.now_ns()
        while self._asked < self._plan.size_bytes and len(self._under_way) < MOST_UNDER_WAY:
            part = self._plan.part(self._asked, self._window.part_bytes)
            if self._under_way and self._asked + part.size - self._written > self._window.size_bytes:
                break
            if not self._under_way:
                # Nothing is waited for from either: this may be asked of the other.
                self._by_relay = self._relay is not None and bool(part.chunk) and now_ns >= self._relay_rests_ns
            channel = self._relay if self._by_relay and self._relay is not None else self._channel
            channel.send(FetchWeights(part.number, part.offset, part.size, part.delta, part.chunk))
            self._asked += part.size
            self._under_way.append(Asked(part, now_ns))
