"""Draws from data larger than memory: epochs over segments, of which as many as fit are held and drawn from at once.

An *epoch* visits every segment once, in a seeded order, or several times at even distances if it is due much. When a
visit begins, each step of the segment gets a whole number of *draws* by systematic sampling (Madow 1949): expected are
D p(s) of all D of the epoch, `echo` for each eligible step, and what it gets is less than one off. As many segments are
held as fit. Each draw chooses one of them in proportion to the draws its visit was planned with, and takes the next of
that visit's own, which lie in random order. So all visits take about as long, W draws (those planned for all that is
held), and segments come and go evenly. One without draws left makes room for the next of the order.

The first segments held begin in the middle, spread evenly, as if this had gone on for long. So the first draws come
from all that fits, and segments run out one by one from then on.

**Deviation.** Let D be the draws of an epoch. With static weights, a step s that is due the part p(s) of n draws got

    |c(s) - n p(s)|  <  (j + 2) (1 + p(s)) + (2 D + W) p(s)

more or fewer in epoch j = 0, 1, ..., as long as no draw of it waits from the epoch before (proof: decision 0006).
In words: less than a draw for each epoch, and what it is due in two epochs and a window, however long it goes on.
Independent draws would be off by about sqrt(n p(s)).

New data joins the running epoch as if it had been there from the start: a segment whose place in the order is to come
is put there, one that would be held now is held with the draws it would have left, and the others wait for the next.

Everything is a pure function of seed, stratum, epoch, weights, and of how far it has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.eligible import EligibleSteps, HeldSegments, SegmentVisit, VisitState, generator
from cloud_learner.buffer.sampling.growing import Growing

_VISIT = 0.1
"""of all draws that are held: a segment of more than usual weight that is due more than that has several visits"""
_MOST_VISITS = 1000
_BARREN = 3
"""epochs without a draw before it is said that there is none"""
_ORDER = 0
"""what random numbers are for; see `eligible`"""


class Leg(msgspec.Struct, frozen=True):
    """Data that joined an epoch together: what was eligible at one moment and not in it."""

    watermark: int
    newest_version: int
    head: int
    """visits of the epoch that had begun"""
    done: float
    """the part of the epoch that was over"""
    window: float
    """W / D: the part of an epoch that is held at once"""
    usual: float
    """weight of a step on average"""


class SweepState(msgspec.Struct):
    """How far a sweep has come."""

    epoch: int
    legs: list[Leg]
    head: int
    visits: list[VisitState]
    """the last `aside` of them do not fit at the moment"""
    aside: int


class Sweep:
    """Draws from those segments of one stratum that are in its epoch."""

    def __init__(
        self, number: int, known: EligibleSteps, held: HeldSegments, seed: int, renew: Callable[[], None]
    ) -> None:
        """`renew` begins another epoch."""
        self._known, self._held, self._key, self._renew = known, held, (seed, 2, number), renew
        self.epoch = -1
        self.room = 0
        """bytes that may be held; to be set"""
        self.scale = 0.0
        """draws per unit of weight, for visits from now on; to be set"""
        self.usual = 0.0
        """weight of a step on average; to be set"""
        self.bytes = 0
        """of all that is held"""
        self.left_bytes = 0
        """of what left during this batch"""
        self._holders: Counter[int] = Counter()
        self._visits: list[SegmentVisit] = []
        self._aside: list[SegmentVisit] = []
        self._rates: np.ndarray = np.zeros(64)
        """of each visit, and room for more"""
        self._clear()

    def _clear(self) -> None:
        self._legs: list[Leg] = []
        self._segments = Growing(np.int64)
        """in the epoch"""
        self._mass = 0.0
        """of all these when they joined"""
        self._order: np.ndarray = np.zeros((0, 5))
        """visits in order: segment, begin and end among its draws, the difference, and the segment's mass"""
        self._left: np.ndarray = np.zeros(1)
        """mass of each of `_order` and of those after it"""
        self._late: np.ndarray = np.zeros((0, 5))
        """visits of those that joined later: few of all, so that it costs little to put some more among them"""
        self._late_at: np.ndarray = np.zeros(0, np.int64)
        """place of each among all visits"""
        self._head = 0
        self._next: SegmentVisit | None = None

    @property
    def window(self) -> float:
        """W"""
        return float(self._rates[: len(self._visits)].sum())

    # --- epochs ---------------------------------------------------------------------------------------------------

    def begin(self, runs: np.ndarray, total_bytes: int) -> None:
        """A new epoch over the eligible ones of int64 `runs`, all of the stratum; what is held stays."""
        self._known.in_epoch[self._segments.all] = False
        self.epoch += 1
        self._clear()
        window = min(1.0, self.room / max(1, total_bytes))
        visits, place = self._add_leg(0.0, window, runs)
        if not self._visits and not self._aside:
            last = np.argsort(-place)
            last = last[: int((1 - place < window).sum())]
            self.hold(visits[last], (1 - place[last]) / window)

    def join(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Let the eligible ones of `runs` take part in what is left of the epoch.

        (visits of them that would have begun, the part of their draws float64[k] that would be out); `hold` them when
        there is room.
        """
        late = int(self._late_at.searchsorted(self._head))
        _, begin, end, _, masses = self._late[late:].T
        left = float(self._left[self._head - late] + ((end - begin) * masses).sum())
        mass = self._mass
        done = min(1.0, max(0.0, 1.0 - left / mass)) if mass else 1.0
        window = min(1.0, self.window / max(1.0, mass * self.scale))
        visits, place = self._add_leg(done, window, runs)
        over = (done - place) % 1.0
        return visits[over < window], over[over < window] / window

    def hold(self, visits: np.ndarray, out: np.ndarray) -> None:
        """Begin visits now, a part `out` float64[k] of their draws left out, while they fit."""
        for (segment, begin, end, width, _), part in zip(visits.tolist(), out.tolist(), strict=True):
            visit = self._plan(int(segment), begin + part * (end - begin), end, width)
            if not self._fits(visit):
                return
            if visit.left:
                self._hold(visit)

    def _add_leg(self, done: float, window: float, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._legs.append(Leg(self._known.watermark, self._known.newest_version, self._head, done, window, self.usual))
        self._next = None
        return self._join(self._legs[-1], runs)

    def _join(self, leg: Leg, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The visits of what joins, and their places in the epoch, float64 in [0, 1); those to come are in order."""
        known, index = self._known, self._known.index
        weight = known.weights_at(runs, leg.watermark, leg.newest_version)
        here = (weight > 0) & ~known.in_epoch[index.run_segment[runs]]
        runs, weight = runs[here], weight[here]
        first = np.flatnonzero(np.diff(index.run_segment[runs], prepend=-1))
        segments = index.run_segment[runs[first]]
        count = index.run_count[runs]
        mass, steps = (np.add.reduceat(v, first) if len(first) else v for v in (weight * count, count))
        known.in_epoch[segments] = True
        rng = generator(*self._key, self.epoch, _ORDER, leg.head, len(self._segments.all))
        self._segments.append(segments)
        self._mass += float(mass.sum())
        most = _VISIT * self._legs[0].window * self._mass
        parts = np.ceil(np.minimum(mass / max(most, 1e-300), _MOST_VISITS)).astype(np.int64)
        parts[mass <= 1.01 * leg.usual * steps] = 1
        part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        parts = np.repeat(parts, parts)
        place = (part + np.repeat(rng.random(len(segments)), parts[part == 0])) / parts
        once = np.flatnonzero(parts == 1)
        place[once] = (rng.permutation(len(once)) + rng.random()) / max(1, len(once))
        segments, mass = np.repeat(segments, parts[part == 0]), np.repeat(mass, parts[part == 0])
        visits = np.stack([segments, part / parts, (part + 1) / parts, 1 / parts, mass], 1)
        new = np.flatnonzero(place >= leg.done)
        new = new[np.argsort(place[new], kind="stable")]
        if leg is self._legs[0]:
            self._order = visits[new]
            _, begin, end, _, masses = self._order.T
            self._left = np.append(np.cumsum(((end - begin) * masses)[::-1])[::-1], 0.0)
        else:
            # those that wait are evenly spread over what is left of the epoch
            waiting = len(self._order) + len(self._late) - leg.head
            passed = (place[new] - leg.done) / max(1 - leg.done, 1e-300) * waiting + 0.5
            at = leg.head + np.minimum(passed.astype(np.int64), waiting)
            among = self._late_at.searchsorted(at)
            self._late_at = self._late_at + at.searchsorted(self._late_at, "right")
            self._late_at = np.insert(self._late_at, among, at + np.arange(len(at)))
            self._late = np.insert(self._late, among, visits[new], axis=0)
        return visits, place

    # --- one batch ------------------------------------------------------------------------------------------------

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64 of `count` draws; fewer if the next segment has no room before this batch is over."""
        runs, offsets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while count:
            self._fill()
            if not self._visits:
                break
            until = np.cumsum(self._rates[: len(self._visits)])
            picked, counts = np.unique(until.searchsorted(rng.random(count) * until[-1], "right"), return_counts=True)
            for number, some in zip(picked.tolist(), counts.tolist(), strict=True):
                drawn = self._visits[number].draw(some)
                runs.append(drawn[0])
                offsets.append(drawn[1])
                count -= len(drawn[0])
            self._retire(picked)
        return np.concatenate(runs), np.concatenate(offsets)

    def _fill(self) -> None:
        """Begin visits while they fit, and an epoch when one is over."""
        barren = 0
        while barren < _BARREN:
            visit = self._look_ahead()
            if visit is None:
                barren += 1
                self._renew()
            elif self._fits(visit):
                barren = 0
                self._advance()
                self._hold(visit)
            else:
                return

    def _look_ahead(self) -> SegmentVisit | None:
        """The next visit; None when all of the epoch have begun."""
        while self._next is None and (self._aside or self._head < len(self._order) + len(self._late)):
            if self._aside:
                visit = self._aside[-1]
            else:
                late = int(self._late_at.searchsorted(self._head))
                is_late = late < len(self._late) and self._late_at[late] == self._head
                row = self._late[late] if is_late else self._order[self._head - late]
                segment, begin, end, width, _ = row.tolist()
                visit = self._plan(int(segment), begin, end, width)
            if visit.left:
                self._next = visit
            else:
                self._advance()
        return self._next

    def _advance(self) -> None:
        if self._aside:
            self._aside.pop()
        else:
            self._head += 1
        self._next = None

    def _plan(self, segment: int, begin: float, end: float, width: float) -> SegmentVisit:
        known = self._known
        row = int(known.index.row[segment])
        state = VisitState(self.epoch, row, known.watermark, known.newest_version, self.scale, begin, end, width)
        return SegmentVisit(state, segment, known, self._key)

    # --- what is held ---------------------------------------------------------------------------------------------

    def between_batches(self) -> None:
        """More may be known now."""
        self.left_bytes, self._next = 0, None

    def look_again(self) -> None:
        """Weights changed, or segments left: forget the draws of what may not be drawn any more."""
        self._next = None
        for visit in (*self._visits, *self._aside):
            visit.look_again(self._known, self.scale)
        self._rates[: len(self._visits)] = [visit.rate for visit in self._visits]
        self._aside = [visit for visit in self._aside if visit.left]
        self._retire(np.arange(len(self._visits)))

    def shrink(self) -> None:
        """Set the visits that came last aside until the others fit."""
        while self.bytes > self.room and self._visits:
            self._aside.append(self._let_go(len(self._visits) - 1))
            self._next = None

    def end(self) -> None:
        """Hold nothing."""
        self._known.in_epoch[self._segments.all] = False
        while self._visits:
            self._let_go(len(self._visits) - 1)

    def _retire(self, numbers: np.ndarray) -> None:
        """Let go of those of growing int64[k] visits that have no draws left."""
        for number in reversed([number for number in numbers.tolist() if not self._visits[number].left]):
            self.note_left(np.array([self._let_go(number).segment]))

    def note_left(self, segments: np.ndarray) -> None:
        """These int64[k] are held no more, but perhaps drawn from by this batch."""
        mine = [segment for segment in segments.tolist() if segment not in self._holders]
        self.left_bytes += int(self._known.cost[mine].sum()) if mine else 0

    def _fits(self, visit: SegmentVisit) -> bool:
        more = 0 if visit.segment in self._holders else int(self._known.cost[visit.segment])
        return self.bytes + self.left_bytes + more <= self.room

    def _hold(self, visit: SegmentVisit) -> None:
        if visit.segment not in self._holders:
            self.bytes += int(self._known.cost[visit.segment])
        self._holders[visit.segment] += 1
        self._held.hold(np.array([visit.segment]))
        if len(self._visits) == len(self._rates):
            self._rates = np.append(self._rates, np.zeros(len(self._rates)))
        self._rates[len(self._visits)] = visit.rate
        self._visits.append(visit)

    def _let_go(self, number: int) -> SegmentVisit:
        # the last one takes its place
        visit, last = self._visits[number], self._visits.pop()
        if visit is not last:
            self._visits[number], self._rates[number] = last, last.rate
        self._held.release(np.array([visit.segment]))
        self._holders[visit.segment] -= 1
        if not self._holders[visit.segment]:
            del self._holders[visit.segment]
            self.bytes -= int(self._known.cost[visit.segment])
        return visit

    # --- going on later -------------------------------------------------------------------------------------------

    def state(self) -> SweepState:
        """JSON-able through msgspec."""
        visits = [visit.state for visit in (*self._visits, *self._aside)]
        return SweepState(self.epoch, self._legs, self._head, visits, len(self._aside))

    def restore(self, state: SweepState, runs: np.ndarray) -> None:
        """Go on from `state`, on a new sweep; `runs`: int64 all of the stratum."""
        self.epoch, index = state.epoch, self._known.index
        self._legs, self._head = list(state.legs), state.head
        for leg in state.legs:
            self._join(leg, runs[: np.searchsorted(runs, index.prefix(leg.watermark)[1])])
        segments = index.find(np.array([visit.row for visit in state.visits], np.int64))
        for number, (one, segment) in enumerate(zip(state.visits, segments.tolist(), strict=True)):
            visit = SegmentVisit(one, segment, self._known, self._key)
            if number < len(state.visits) - state.aside:
                self._hold(visit)
            else:
                self._aside.append(visit)
