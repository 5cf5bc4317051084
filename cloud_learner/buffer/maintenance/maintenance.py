"""Keeping the buffer whole and in bounds: checking it, forgetting episodes, giving their room back.

Everything here may be killed at any point: a segment lies where the ledger says, and what the ledger does not refer to
is removed afterwards, or at the next start of a writer. Whoever commits segments meanwhile waits for no more than one
short transaction: what is read, written to the store and waited for is outside of it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable

from cloud_learner.buffer.files import room_warning
from cloud_learner.buffer.maintenance.compact import Compacted, Stuck, compact, compact_one, drop_dead
from cloud_learner.buffer.maintenance.prune import Pruned, prune
from cloud_learner.buffer.maintenance.retention import Bound, Retention
from cloud_learner.buffer.maintenance.shard_writer import seal_one
from cloud_learner.buffer.maintenance.verify import VerifyFinding, verify
from cloud_learner.buffer.store.store import SegmentStore
from wire.clock import Clock, MonotonicClock
from wire.errors import FleetError

__all__ = ["Bound", "Compacted", "Pruned", "Retention", "VerifyFinding", "compact", "drop_dead", "prune", "verify"]
log = logging.getLogger(__name__)
_BOUNDS_EVERY_NS = 60 * 10**9
_BETWEEN_S = 0.05
"""between two pieces: whoever else waits to seal, prune or compact looks every 20 ms"""
_OTHERS_S = 5.0
"""another gateway on the same ledger seals a shard in less"""
_FEW_SHARDS = 8
"""Small shards that are worth writing together: fewer would be written again and again."""


class MaintenanceThread:
    """Seals and compacts a shard at a time, and each minute forgets what retention says.

    What fails is logged and tried again after a pause.
    """

    def __init__(
        self,
        store: SegmentStore,
        retention: Retention | None = None,
        clock: Clock | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        every_s: float = 5.0,
        pause_s: float = 30.0,
    ) -> None:
        """`retention`: None forgets nothing."""
        self._store = store
        self._ledger = store.ledger
        self._retention = retention or Retention()
        self._clock = clock or MonotonicClock()
        self._wall_ns = wall_ns
        self._every_s = every_s
        self._pause_s = pause_s
        self._stuck: Stuck = set()
        self._bounds_due_ns = 0
        self._failed = False
        self._warned: set[str] = set()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the piece that is under way, and end."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def step(self) -> bool:
        """One shard of what is to be sealed and one to be compacted, and the bounds if they are due; whether there may
        be more to do at once.

        Each is tried, whatever becomes of the others: on a full disk nothing can be sealed before something goes.
        """
        now_ns, more, crashed, reasons = self._clock.now_ns(), False, False, list[str]()
        for piece in (self._clean, self._seal, self._keep_bounds, self._compact):
            try:
                more |= piece(now_ns)
            except FleetError as error:
                reasons.append(str(error))
            except Exception:
                crashed = True
                log.exception("the buffer's maintenance failed; the next try is in %.0f s.", self._pause_s)
        # somebody else at work is one reason for all of them
        for reason in dict.fromkeys(reasons):
            log.warning("the buffer's maintenance waits %.0f s: %s", self._pause_s, reason)
        self._failed = crashed or bool(reasons)
        return more

    def _clean(self, now_ns: int) -> bool:
        """What the round before left half-done, if it failed."""
        if self._failed:
            with self._ledger.exclusive(wait_s=0):
                self._store.clean()
        return False

    def _seal(self, now_ns: int) -> bool:
        sealed = seal_one(self._store, now_ns, wait_s=_OTHERS_S)
        if sealed is not None:
            log.info("%d segments with %d steps sealed.", sealed.segments, sealed.rows)
        return sealed is not None

    def _compact(self, now_ns: int) -> bool:
        more = compact_one(self._store, now_ns, self._stuck, few=_FEW_SHARDS, wait_s=_OTHERS_S)
        if more is not None and more.written_shards:
            log.info("%d shards became %d.", more.read_shards, more.written_shards)
        return more is not None

    def _keep_bounds(self, now_ns: int) -> bool:
        if now_ns < self._bounds_due_ns:
            return False
        self._bounds_due_ns = now_ns + _BOUNDS_EVERY_NS
        self._store.quarantine.trim(self._retention.quarantine_bytes)
        warnings = {room_warning(self._store.journal.directory.parent)}
        if self._retention.bounded:
            done = prune(self._ledger, self._retention, self._wall_ns(), wait_s=0, stop=self._stopping.is_set)
            if done.episodes:
                log.info("%d episodes (%.1f MB) forgotten, as retention says.", done.episodes, done.bytes / 1e6)
                drop_dead(self._store, wait_s=0)
            warnings.add(done.warning)
        # once for as long as it lasts
        for warning in warnings - self._warned - {""}:
            log.warning("%s", warning)
        self._warned = warnings
        return False

    def _run(self) -> None:
        more = False
        while not self._stopping.wait(self._pause_s if self._failed else _BETWEEN_S if more else self._every_s):
            more = self.step()
            if not more:
                give_memory_back()


def give_memory_back() -> None:
    """Give the system what this process has freed. glibc keeps it: after a burst of segments a gateway would have three
    times the memory that it uses."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
