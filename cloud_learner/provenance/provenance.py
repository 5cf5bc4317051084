"""Whether what a robot says of a segment can be believed: who acted, what for, and with which values.

A step is a human's when a lease or a job in the ledger says that a person had the robot at its time, or when the record
of the robot's key lets it say so by its own word (`Teaching`). The steps of a script, and demonstrations that no person
gave, need the latter. A step's time is carried to the gateway's clock by what was measured of the robot's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

import msgspec
import numpy as np

from cloud_learner.buffer.check import find_out_of_range
from cloud_learner.buffer.control import HOLD, HUMAN, POLICY, SCRIPT, by_human
from cloud_learner.buffer.ledger import clock_history
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import LeaseKind, OffsetRow
from cloud_learner.buffer.store.quarantine import QuarantineReason
from wire.messages.gateway import Segment
from wire.transport.keys import Teaching
from wire.types import EpisodeSource, RobotSpec

MARGIN_NS = 1_000_000_000
"""so long before and after a lease its person may have had the robot, which changes hands at a tick of its own; the
error of its measured clock, half a round trip at most, is part of it"""
BOOT_MARGIN_NS = 5_000_000_000
"""and so long in addition where the gateway's computer was started again in between: wall clocks tell then"""
CLOCKS = 8
"""of a robot, the newest, by which a time is tried: boots of its computer since it recorded what it brings"""
_ROBOTS = 1024


class Doubt(msgspec.Struct, frozen=True):
    """Why a segment is not believed."""

    reason: QuarantineReason
    text: str


def no_teaching(peer: str) -> Collection[Teaching]:
    """Nobody teaches by its own word."""
    return ()


class Provenance:
    """Judges segments that are valid in themselves. Not for several threads at once."""

    def __init__(self, ledger: Ledger, may_teach: Callable[[str], Collection[Teaching]] = no_teaching) -> None:
        """`may_teach`: what a robot may say by its own word, now."""
        self._ledger, self._may_teach = ledger, may_teach
        self._offsets: OrderedDict[str, list[OffsetRow]] = OrderedDict()
        self._evaluated: set[str] = set()

    def doubts(self, segment: Segment, spec: RobotSpec, now_ns: int, offset_ns: int = 0) -> tuple[Doubt, ...]:
        """Everything about a segment that passed `check_names` and `check_steps` that is not believed.

        `now_ns`: of the gateway's clock; `offset_ns`: that minus the robot's as it is known now, which the ledger may
        not know yet; 0: it is. Raises `StorageError`.
        """
        found = []
        if text := self._find_unconfirmed(segment, now_ns, offset_ns):
            found.append(Doubt(QuarantineReason.unconfirmed, text))
        if text := find_out_of_range(segment, spec):
            found.append(Doubt(QuarantineReason.out_of_range, text))
        return tuple(found)

    # --- who acted ------------------------------------------------------------------------------------------------

    def _find_unconfirmed(self, segment: Segment, now_ns: int, offset_ns: int) -> str:
        """What the segment says of teachers that nobody else says, '' when there is nothing of that kind."""
        robot, source, actor = segment.episode.robot, segment.episode.source, segment.actor
        if source == EpisodeSource.evaluation and not self._was_evaluated(robot):
            return f"it calls its episode an evaluation, and this fleet never gave one to '{robot}'."
        shown = source == EpisodeSource.demonstration
        claimed = actor != HOLD if shown else by_human(actor)
        if not claimed.any() and not shown:
            return ""
        teaches = self._may_teach(robot)
        if shown and Teaching.demonstrations not in teaches and not claimed.any():
            # It goes on with what was confirmed before, or says nothing that could be.
            known = self._ledger.episode(segment.episode.id) is not None
            return "" if known else f"it calls its episode a demonstration, in which nobody acts.{_remedy(robot)}"
        doubted = claimed & ~_by_own_word(actor, shown, teaches)
        human = np.flatnonzero(doubted & (actor == HUMAN))
        if len(human):
            doubted[human] = ~self._held_by_person(robot, segment.times_ns[human], now_ns, offset_ns)
        if not doubted.any():
            return ""
        ticks = segment.first_tick + np.flatnonzero(doubted)
        whose = "a demonstration" if shown else "a script's" if not (actor[doubted] == HUMAN).any() else "a human's"
        return (
            f"it says that {len(ticks)} steps, ticks {ticks[0]} to {ticks[-1]}, are {whose}, and no lease or job of "
            f"this fleet says that a person had '{robot}' then.{_remedy(robot)}"
        )

    def _was_evaluated(self, robot: str) -> bool:
        if robot not in self._evaluated and self._ledger.ever_leased(robot, LeaseKind.evaluation):
            self._evaluated.add(robot)
        return robot in self._evaluated

    # --- when -----------------------------------------------------------------------------------------------------

    def _held_by_person(self, robot: str, times_ns: np.ndarray, now_ns: int, offset_ns: int) -> np.ndarray:
        """bool[k]: whether a person had the robot at each of int64[k] times of its clock; of the newest clocks that it
        had, the one by which most are confirmed counts."""
        clocks = self._clocks(robot)
        if offset_ns or not clocks:
            clocks.append([OffsetRow(0, now_ns, offset_ns, "", self._ledger.known_clock_base())])
        carried = [(then_ns, clock[0].base_ns) for clock in clocks for then_ns in _carried(times_ns, clock)]
        wide_ns = MARGIN_NS + BOOT_MARGIN_NS
        spans = {(int(then_ns.min()) - wide_ns, int(then_ns.max()) + wide_ns) for then_ns, _ in carried}
        leases = self._ledger.lease_intervals(robot, LeaseKind.person, spans, now_ns)
        return max((within(then_ns, leases, base_ns) for then_ns, base_ns in carried), key=np.count_nonzero)

    def _clocks(self, robot: str) -> list[list[OffsetRow]]:
        """What was measured of each of the newest clocks that the robot had, a boot of its computer or of the gateway's
        each, the newest first."""
        known = self._offsets.setdefault(robot, [])
        self._offsets.move_to_end(robot)
        if len(self._offsets) > _ROBOTS:
            self._offsets.popitem(last=False)
        if fresh := self._ledger.clock_offsets(robot, known[-1].id if known else 0):
            known[:] = clock_history.kept([*known, *fresh], CLOCKS)
        return sorted(clock_history.by_clock(known), key=lambda rows: rows[-1].id, reverse=True)


def within(times_ns: np.ndarray, leases: np.ndarray, base_ns: int) -> np.ndarray:
    """bool[k]: whether each of int64[k] times lies in one of `leases`, int64[n, 3] as `Ledger.lease_intervals` has
    them, or within the margin of one; `base_ns`: of the clock that the times were carried to."""
    if not len(leases):
        return np.zeros(len(times_ns), bool)
    margin_ns = np.where(leases[:, 2] == base_ns, MARGIN_NS, MARGIN_NS + BOOT_MARGIN_NS)
    order = np.argsort(leases[:, 0] - margin_ns)
    begin, end = (leases[:, 0] - margin_ns)[order], np.maximum.accumulate((leases[:, 1] + margin_ns)[order])
    at = begin.searchsorted(times_ns, "right") - 1
    return (at >= 0) & (times_ns <= end[np.maximum(at, 0)])


def _by_own_word(actor: np.ndarray, shown: bool, teaches: Collection[Teaching]) -> np.ndarray:
    """bool[T]: for which steps a robot's word is enough; `shown`: in a demonstration."""
    if shown and Teaching.demonstrations not in teaches:
        return np.zeros(len(actor), bool)
    believed = (actor == POLICY) & shown
    if Teaching.beside in teaches:
        believed |= actor == HUMAN
    if Teaching.script in teaches:
        believed |= actor == SCRIPT
    return believed


def _carried(times_ns: np.ndarray, clock: list[OffsetRow]) -> list[np.ndarray]:
    """int64[k] times of a robot's clock in nanoseconds since 1970: by what was known of it then, and by what is now."""
    offsets = np.array([row.offset_ns for row in clock], np.int64)
    measured = np.array([row.measured_ns for row in clock], np.int64)
    base_ns = clock[0].base_ns
    newest = times_ns + offsets[-1]
    if len(clock) == 1:
        return [newest + base_ns]
    then = offsets[np.maximum(measured.searchsorted(newest, "right") - 1, 0)]
    return [times_ns + then + base_ns, newest + base_ns]


def _remedy(robot: str) -> str:
    return (
        " If that is right: `vla-fleet quarantine admit` takes it in, `vla-fleet quarantine list` names it; "
        f"`vla-fleet keys {robot} --teaches script` (or beside, demonstrations) has what comes later believed."
    )
