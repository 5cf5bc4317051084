"""Fetches announced versions in parts, as deltas where that is less, and has them rebuilt and checked whole."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from robot_edge.uplink.weights.cache import WeightCache
from robot_edge.uplink.weights.file import Appended, Begun, Found, WeightFile
from robot_edge.uplink.weights.offer_check import OfferCheck
from robot_edge.uplink.weights.part_requests import PartRequests
from robot_edge.uplink.weights.plan import FetchPlan, Offer, is_held, is_possible, same
from robot_edge.uplink.weights.relay_source import RelaySource
from wire.clock import Clock
from wire.errors import WeightsError, storage_error
from wire.messages.gateway import Deltas, FetchDeltas, FetchWeights, Rejection, VersionAvailable, WeightBytes
from wire.task_thread import Task, TaskQueue
from wire.transport.channel import Channel
from wire.types import PolicyVersion
from wire.weights.manifest import DeltaForm

log = logging.getLogger(__name__)

_SILENT_PARTS = 5
"""so often a part is asked for in vain before a newer version is fetched instead"""
_SILENT_DELTA = 15
"""as often before the whole is fetched instead of a delta: it is larger by far, and a gateway may only be busy"""
_WRONG_CHUNKS = 3
"""so often one is fetched again before the whole is, or a newer version"""


class WeightClient:
    """Follows announcements; `ready` names the version announced last that is here, whole and checked.

    An announcement may go back to an older version: a measurement asks for it, or the newer one was no good.

    Files are read and written by `tasks`: in a thread once that is started, before the call returns without one.
    """

    _loading = 1  # as of `WeightCache`

    def __init__(
        self, directory: Path, channel: Channel, clock: Clock, keep: int = 3, relay: RelaySource | None = None
    ) -> None:
        """`keep`: as of `WeightCache`. `relay`: passes on what the gateway has; it is asked first."""
        self.tasks = TaskQueue("weights")
        self.check = OfferCheck()
        self.directory = directory
        self._channel = channel
        self._cache = WeightCache(directory, keep, self._loading)
        self._wanted: Offer | None = None
        self._following: Offer | None = None
        """announced meanwhile, and fetched when that is here"""
        self._file: WeightFile | None = None
        """of the version that is wanted"""
        self._plan: FetchPlan | None = None
        """how it is fetched; None while that is not known, or while it is checked"""
        self._checks = self._waits_for_deltas = False
        self._held: dict[int, str] = {}
        """versions that are here, as the gateway was asked for deltas from them"""
        self._busy = self._wrong = 0
        """what is being done with it now; chunks of it that were wrong"""
        self._requests = PartRequests(channel, clock, relay)
        self._silent = 0
        self.refused: Counter[str] = Counter()
        """what cannot be a version or a part of one, by reason"""
        self.announced = 0
        """the version that is to act, whether it is here or not"""
        self.fault = ""
        """why the version announced last is not fetched, "" when it is"""
        self.fetched_bytes = 0
        """of all that was asked for"""
        self.is_gateway_silent: Callable[[], bool] = lambda: False
        """whether nothing at all comes from it"""
        self.ready: tuple[PolicyVersion, Path] | None = None
        self._is_new = False
        """`poll` has not said yet that it is ready"""

    def handle_message(self, message: VersionAvailable | Deltas | WeightBytes | Rejection) -> None:
        """Take in what the gateway says of versions."""
        match message:
            case VersionAvailable():
                self.announced = message.version.number
                self._on_offer(message)
            case Deltas():
                self._on_deltas(message)
            case WeightBytes():
                self.add_part(message)
            case Rejection(request=request, reason=reason):
                if request is not None and self._requests.was_asked_of_gateway(request):
                    self._on_refused(reason)

    @property
    def fetching(self) -> int:
        """The version that is under way, 0: none."""
        return self._wanted.version.number if self._wanted is not None else 0

    def on_reverted(self, version: PolicyVersion, reason: str) -> None:
        """It could not be loaded, and is checked when it is announced again."""
        self.refused[reason] += 1
        if self.ready is not None and same(self.ready[0], version):
            self.ready = None

    def fetch(self, version: PolicyVersion, delta: DeltaForm | None = None, chunks: bytes = b"", *more: bytes) -> None:
        """This version is to act; `poll` says when it is ready. The rest: as of `Offer`.

        A fetch under way is finished first, and of those announced meanwhile only the last one is fetched: where
        versions come faster than they can be fetched, none would ever arrive. One that is called back to replaces what
        is under way.
        """
        if not is_possible(version):
            self.refused["impossible_version"] += 1
            log.error("version %d of %d bytes cannot be: %.80r.", version.number, version.size_bytes, version.sha256)
            return
        offer = Offer(version, delta, chunks, *more)
        self._following, wanted = None, self._wanted.version if self._wanted is not None else None
        here = self.ready[0] if self.ready is not None else None
        if wanted is not None and same(wanted, version):
            self.fault = ""
            return
        if here is not None and same(here, version):
            self.fault = ""
            self._drop()  # called back before its successor was here
            return
        if wanted is not None and version.number > wanted.number > (here.number if here is not None else 0):
            self._following = offer
            return
        self._drop()
        self._begin(offer)
        self.tasks.poll()

    def add_part(self, message: WeightBytes, by_relay: bool = False) -> None:
        """Take in a part that was asked for."""
        file, plan, part = self._file, self._plan, self._requests.find(message, by_relay)
        if file is None or plan is None or part is None:
            return
        size = len(message.data)
        if not self._requests.is_possible(message, plan):
            self.refused["impossible_part"] += 1
            log.error("version %d: a part of %d bytes was not asked for.", message.number, size)
            if self._blame_relay("sent a part of another size"):
                self._ask()
            return
        position = self._requests.on_part(size)
        self.fetched_bytes += size
        self._silent = 0
        if size != part.size:
            part = plan.part(position, size)
        self._submit(partial(file.append, part, position, message.data), self._on_appended)
        self.tasks.poll()

    def on_relay_refused(self, request: FetchWeights, reason: str) -> None:
        """The relay says that it cannot have this."""
        if self._plan is not None and self._requests.on_relay_refused(request):
            log.warning("version %d comes from the gateway instead of the relay: %.300s", request.number, reason)
            self._ask()

    def _on_refused(self, reason: str) -> None:
        """The gateway has it no more."""
        log.warning("version %d does not come: %.300s", self.fetching, reason)
        if self._plan is not None and self._plan.base:
            self._follow_plan(None)
        else:
            # The newest is announced again to whoever does not act by it.
            self._drop()
            self._follow()
        self.tasks.poll()

    def poll(self) -> bool:
        """Ask again for what did not come; check a part of what was here before. True when a version has just become
        ready."""
        if self._file is not None and not self._busy:
            if self._checks:
                self._submit(self._file.check, self._on_checked)
            elif self._plan is not None and self._requests.leave_lost_relay():
                log.warning("version %d comes from the gateway: the relay is not there any more.", self.fetching)
                self._ask()
            elif self._requests.late:
                self._on_silence()
        self.tasks.poll()
        is_new, self._is_new = self._is_new, False
        return is_new

    # --- what is said of versions ---------------------------------------------------------------------------------

    def _on_offer(self, message: VersionAvailable) -> None:
        try:
            chunks = self.check.chunks_of(message)
        except WeightsError as error:
            self.refused["manifest"] += 1
            self._refuse(str(error))
            return
        self.fetch(message.version, message.delta, chunks, message.manifest, message.signature)

    def _on_deltas(self, message: Deltas) -> None:
        offer = self._wanted
        if offer is None or message.number != offer.version.number or not self._waits_for_deltas:
            return
        self._waits_for_deltas = False
        deltas = message.deltas
        fits = deltas and is_held(self._held, deltas[0].base, deltas[0].base_sha256)
        usable = fits and all(one.size_bytes > 0 for one in deltas) and deltas[-1].number == message.number
        self._follow_plan(FetchPlan.by(deltas) if usable else None)
        self.tasks.poll()

    def _refuse(self, fault: str) -> None:
        if fault != self.fault:
            log.error("%s", fault)
        self.fault = fault

    # --- what is done with the file -------------------------------------------------------------------------------

    def _begin(self, offer: Offer) -> None:
        """Nothing of it is here, as far as is known."""
        self._wanted, self._file = offer, WeightFile(self._cache, offer)
        self._plan, self._checks, self._waits_for_deltas = None, False, False
        self._busy = self._silent = self._wrong = 0
        self._requests.window.begin()
        self._requests.set_position(0)
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
            self._on_no_room(offer, found.fault)
            return
        delta = offer.delta
        if delta is not None and is_held(found.held, delta.base, delta.base_sha256) and delta.size_bytes > 0:
            self._follow_plan(FetchPlan.by([delta]))
        elif delta is not None and found.held:
            self._waits_for_deltas, self._held = True, found.held
            self._ask_for_deltas(offer)
        else:
            self._follow_plan(None)

    def _ask_for_deltas(self, offer: Offer) -> None:
        self._requests.touch()
        self._channel.send(FetchDeltas(offer.version.number, self._held))

    def _follow_plan(self, plan: FetchPlan | None) -> None:
        """Fetch by that, None: the whole."""
        assert self._wanted is not None
        assert self._file is not None
        version = self._wanted.version
        plan = plan or FetchPlan.whole(version.number, version.size_bytes, self._wanted.chunks)
        self._plan, self._wrong = None, 0
        self._requests.touch()

        def begun(offer: Offer, found: Begun) -> None:
            if found.fault and plan.base:
                self._follow_plan(None)  # which takes a little less
            elif found.fault:
                self._on_no_room(offer, found.fault)
            else:
                self._plan, self.fault = plan, ""
                self._requests.begin(found.position)
                self._ask()

        self._submit(partial(self._file.begin, plan), begun)

    def _on_no_room(self, offer: Offer, fault: str) -> None:
        """Only another version, or more room, can mend that."""
        self._refuse(fault)
        self._drop()
        self._follow()

    def _on_appended(self, offer: Offer, found: Appended | None) -> None:
        if found is None:
            return
        self._requests.written = found.position
        if found.done:
            self._on_ready(offer)
        elif found.wrong_chunk or found.wrong_whole:
            self._on_wrong(offer, found)
        else:
            self._ask()

    def _on_wrong(self, offer: Offer, found: Appended) -> None:
        self._wrong += 1
        if found.wrong_chunk:
            self._blame_relay("sent a chunk that is another one", found.position)
        log.error("version %d arrived with the wrong hash from byte %d on.", offer.version.number, found.position)
        enough = found.wrong_whole or self._wrong >= _WRONG_CHUNKS
        if enough and self._plan is not None and self._plan.base:
            # A base that is damaged makes something else of a delta that is right.
            self._follow_plan(None)
        elif enough and self._following is not None:
            self._drop()
            self._follow()
        else:
            self._requests.set_position(found.position)
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
        if self._plan is not None:
            self._requests.on_ready(self._plan)
        self._wanted = self._file = self._plan = None
        self._requests.set_position(0)
        self._follow()

    def _on_failed(self, offer: Offer, error: OSError) -> None:
        assert self._file is not None
        what = f"{'reading' if self._checks else 'keeping'} version {offer.version.number}"
        log.error("%s", storage_error(error, what, self._file.path))
        if self._checks:
            self._checks = False
            self._follow_plan(None)
        else:
            # The robot goes on with the version it has; the next announcement tries again.
            self._drop()
            self._follow()

    def _follow(self) -> None:
        """Fetch what was announced meanwhile."""
        if (following := self._following) is not None:
            self.fetch(*following)

    def _drop(self) -> None:
        """Fetch nothing any more; what came of it goes."""
        file, self._wanted, self._file, self._plan, self._busy = self._file, None, None, None, 0
        self._requests.set_position(0)
        if file is not None:
            self.tasks.submit(Task(file.drop))

    # --- parts ----------------------------------------------------------------------------------------------------

    def _on_silence(self) -> None:
        self._requests.window.halve()
        # A line that is cut says nothing of what the gateway has: what is here is gone on with when it is back.
        self._silent += not self.is_gateway_silent()
        if self._requests.under_way:  # else it is not the relay that is waited for
            self._blame_relay("is silent, or too slow")
        if self._waits_for_deltas and self._silent < _SILENT_PARTS and self._wanted is not None:
            self._ask_for_deltas(self._wanted)
        elif self._waits_for_deltas or self._plan is None:
            self._waits_for_deltas = False
            self._follow_plan(None)
        elif self._following is not None and self._silent >= _SILENT_PARTS:
            # Nobody may have the rest of it: a gateway that was lost with it, say.
            log.warning("a version does not come; %d is fetched instead.", self._following.version.number)
            self._drop()
            self._follow()
        elif self._silent >= _SILENT_DELTA and self._plan.base:
            # A gateway that cannot read a delta has the whole.
            self._follow_plan(None)
        else:
            self._requests.set_position(self._requests.received)
            self._ask()

    def _blame_relay(self, what: str, since: int | None = None) -> bool:
        """Whether there was a reason to."""
        if not self._requests.blame_relay(what, since):
            return False
        self.refused["relay"] += 1
        return True

    def _ask(self) -> None:
        assert self._plan is not None
        self._requests.ask(self._plan)
