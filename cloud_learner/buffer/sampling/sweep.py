"""Draws from data larger than memory: epochs over segments, of which as many as fit are held and drawn from at once.

An *epoch* visits every segment once, each at its seeded random *place* from 0 to 1, or several times at even distances
if it is due much. When a visit begins, each step of the segment gets a whole number of *draws*: expected are D p(s) of
all D of the epoch, `echo` for each eligible step, and what it gets is less than one off. As many segments are held as
fit. Each draw chooses one of them in proportion to the draws its visit was planned with, and takes the next of that
visit's own, which lie in random order. So all visits take about as long, W draws (those planned for all that is held),
and segments come and go evenly. One without draws left makes room for the next.

The first segments held begin in the middle, spread evenly, as if this had gone on for long. So the first draws come
from all that fits, and segments run out one by one from then on.

**Deviation.** Let D be the draws of an epoch. With static weights, a step s that is due the part p(s) of n draws got

    |c(s) - n p(s)|  <  (j + 2) (1 + p(s)) + (2 D + W) p(s)

more or fewer in epoch j = 0, 1, ..., as long as no draw of it waits from the epoch before (proof: decision 0006).
In words: less than a draw for each epoch, and what it is due in two epochs and a window, however long it goes on.
Independent draws would be off by about sqrt(n p(s)).

What joins a running epoch is treated as if it had been there from the start: visits whose place is to come begin there,
those that would be held now are held with the draws they would have left, and the others wait for the next epoch.

Everything is a pure function of seed, stratum, epoch, weights, and of how far it has come.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.eligible import EligibleSteps
from cloud_learner.buffer.sampling.growing import Growing
from cloud_learner.buffer.sampling.memory import LoadedSegments
from cloud_learner.buffer.sampling.visit import SegmentVisit, VisitState

_VISIT = 0.1
"""of all draws that are held: a segment of more than usual weight that is due more than that has several visits"""
_MOST_VISITS = 1000
_BARREN = 3
"""epochs without a draw before it is said that there is none"""
_PLACES = 0
"""what random numbers are for; see `visit`"""


class SweepState(msgspec.Struct, frozen=True):
    """How far a sweep has come."""

    epoch: int
    place: float
    parts: list[tuple[int, int]]
    """ledger rows of segments that have several visits in this epoch, and how many"""
    visits: list[VisitState]
    """the last `waiting` of them have no room yet"""
    waiting: int


class Sweep:
    """Draws from those segments of one stratum that are in its epoch."""

    def __init__(
        self, number: int, known: EligibleSteps, memory: LoadedSegments, seed: int, renew: Callable[[], None]
    ) -> None:
        """`renew` begins another epoch."""
        self._known, self._memory, self._key, self._renew = known, memory, (seed, 2, number), renew
        self.epoch = 0
        self.room = 0
        """bytes that may be held; to be set"""
        self.scale = self.echo = 0.0
        """draws per unit of weight, and those of a step on average, for visits from now on; to be set"""
        self.bytes = 0
        """of all that is held"""
        self.leaving_bytes = 0
        """of what left during this batch"""
        self._visits: list[SegmentVisit] = []
        self._waiting: list[SegmentVisit] = []
        """planned, and held from the last on when there is room"""
        self._rates = Growing(np.float64)
        """of each visit"""
        self._clear(0.0)

    def _clear(self, place: float) -> None:
        self._place = place
        """where visits of the epoch begin now"""
        self._parts: dict[int, int] = {}
        """how many visits a segment has, if several"""
        self._coming: np.ndarray = np.zeros((0, 2), np.int64)
        """segment and part of the visits that have not begun, by their places, and these; the first `_next` have"""
        self._places: np.ndarray = np.zeros(0)
        self._next = 0

    @property
    def window(self) -> float:
        """W"""
        return float(self._rates.all.sum())

    # --- epochs ---------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """A new epoch with this number, of nothing as yet; what is held stays."""
        self.epoch = epoch
        self._clear(0.0)

    def join(self, segments: np.ndarray, mass: np.ndarray, steps: np.ndarray, total_mass: float, total: int) -> None:
        """Let growing int64[k] segments take part in what is left of the epoch.

        float64[k] sums of their weights and int64[k] eligible steps; that sum of all that is in the epoch, and bytes.
        """
        draws, due, window = total_mass * self.scale, mass * self.scale, min(1.0, self.room / max(1, total))
        parts = np.ceil(np.minimum(due / max(_VISIT * window * draws, 1e-300), _MOST_VISITS)).astype(np.int64)
        parts[due <= 1.01 * self.echo * steps] = 1
        self._parts |= dict(zip(segments[parts > 1].tolist(), parts[parts > 1].tolist(), strict=True))
        visits, places = self._visits_of(segments)
        self._put(visits, places)
        # those that would be held now begin in the middle; when an epoch follows another, these are of the one before
        if not self._place and (self._visits or self._waiting):
            return
        begun = (self._place - places) % 1.0
        if self._visits:
            held = np.flatnonzero(begun < self.window / max(1.0, draws))
            begun = begun[held] * (draws / self.window)
        else:
            held = np.argsort(begun)
            held = held[np.cumsum(self._known.cost[visits[held, 0]]) <= self.room]
            begun = (np.arange(len(held)) + 0.5) / max(1, len(held))
        for (segment, part), share in zip(visits[held].tolist(), begun.tolist(), strict=True):
            visit = self._plan(segment, part, share)
            if not self._fits(visit):
                return
            if visit.left:
                self._hold(visit)

    def _visits_of(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[v, 2] segments and parts of all visits of growing segments, and their places, float64[v]."""
        if not len(segments):
            return self._coming[:0], self._places[:0]
        # the number of a ledger row among all: the same whatever else is here. The generator counts in fours
        rows = self._known.index.row[segments]
        first = int(rows[0]) // 4
        seed = np.random.SeedSequence((*self._key, self.epoch, _PLACES))
        numbers = np.random.Generator(np.random.Philox(seed).advance(first))
        place = numbers.random(int(rows[-1]) - 4 * first + 1)[rows - 4 * first]
        parts = np.ones(len(segments), np.int64)
        several = np.fromiter(self._parts, np.int64)
        at = np.minimum(segments.searchsorted(several), len(segments) - 1)
        here = segments[at] == several
        parts[at[here]] = np.fromiter(self._parts.values(), np.int64)[here]
        ends = np.cumsum(parts)
        part = np.arange(ends[-1]) - np.repeat(ends - parts, parts)
        places = (np.repeat(place, parts) + part) / np.repeat(parts, parts)
        return np.stack([np.repeat(segments, parts), part], 1), places

    def _put(self, visits: np.ndarray, places: np.ndarray) -> None:
        """Among those to come."""
        new = np.flatnonzero(places > self._place)
        new = new[np.argsort(places[new])]
        if not len(self._places):
            self._coming, self._places = visits[new], places[new]
            return
        self._coming, self._places, self._next = self._coming[self._next :], self._places[self._next :], 0
        at = self._places.searchsorted(places[new])
        self._coming = np.insert(self._coming, at, visits[new], axis=0)
        self._places = np.insert(self._places, at, places[new])

    # --- one batch ------------------------------------------------------------------------------------------------

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64 of `count` draws; fewer if the next segment has no room before this batch is over."""
        runs, offsets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while count:
            self._fill()
            if not self._visits:
                break
            until = np.cumsum(self._rates.all)
            picked, counts = np.unique(until.searchsorted(rng.random(count) * until[-1], "right"), return_counts=True)
            for number, some in zip(picked.tolist(), counts.tolist(), strict=True):
                drawn = self._visits[number].draw(some)
                runs.append(drawn[0])
                offsets.append(drawn[1])
                count -= len(drawn[0])
            self._retire(picked.tolist())
        return np.concatenate(runs), np.concatenate(offsets)

    def _fill(self) -> None:
        """Begin visits while they fit, and an epoch when one is over."""
        barren = 0
        while barren < _BARREN:
            if self._waiting:
                if not self._fits(self._waiting[-1]):
                    return
                barren = 0
                self._hold(self._waiting.pop())
            elif self._next < len(self._places):
                segment, part = self._coming[self._next].tolist()
                # one that could not be drawn from for a while may stand there twice
                again = self._places[self._next] == self._place
                self._place = float(self._places[self._next])
                self._next += 1
                visit = self._plan(segment, part)
                if visit.left and not again:
                    self._waiting.append(visit)
            else:
                barren += 1
                self._place = 1.0
                self._renew()

    def _plan(self, segment: int, part: int, begun: float = 0.0) -> SegmentVisit:
        known, parts = self._known, self._parts.get(segment, 1)
        row = int(known.index.row[segment])
        label = float(known.index.label[segment])
        state = VisitState(self.epoch, row, known.watermark, known.newest_version, self.scale, part, parts)
        state.label, state.bound = None if math.isnan(label) else label, known.bound(segment)
        return SegmentVisit(state, segment, known, self._key, begun)

    # --- what is held ---------------------------------------------------------------------------------------------

    def look_again(self, segments: np.ndarray) -> None:
        """Weights in these int64[k] changed, or they left: forget the draws of what may not be drawn any more."""
        changed = set(segments.tolist())
        if not changed:
            return
        held = [number for number, visit in enumerate(self._visits) if visit.segment in changed]
        for visit in (*self._visits, *self._waiting):
            if visit.segment in changed:
                visit.look_again(self._known, self.scale)
        self._rates.all[held] = [self._visits[number].rate for number in held]
        self._waiting = [visit for visit in self._waiting if visit.left]
        self._retire(held)

    def shrink(self) -> None:
        """Let those that came last wait until the others fit."""
        while self.bytes > self.room and self._visits:
            self._waiting.append(self._let_go(len(self._visits) - 1))

    def end(self) -> None:
        """Hold nothing."""
        while self._visits:
            self._let_go(len(self._visits) - 1)

    def note_left(self, segments: np.ndarray) -> None:
        """These int64[k] are held no more but by visits, and may have been drawn from by this batch."""
        self._memory.let_leave(segments)
        self.leaving_bytes += int(self._known.cost[segments[self._memory.visits[segments] == 0]].sum())

    def _retire(self, numbers: list[int]) -> None:
        """Let go of those of these visits, growing, that have no draws left."""
        for number in reversed([number for number in numbers if not self._visits[number].left]):
            self._let_go(number)

    def _fits(self, visit: SegmentVisit) -> bool:
        more = 0 if self._memory.visits[visit.segment] else int(self._known.cost[visit.segment])
        return self.bytes + self.leaving_bytes + more <= self.room

    def _hold(self, visit: SegmentVisit) -> None:
        if not self._memory.visits[visit.segment]:
            self.bytes += int(self._known.cost[visit.segment])
        self._memory.visits[visit.segment] += 1
        self._rates.append(np.array([visit.rate]))
        self._visits.append(visit)

    def _let_go(self, number: int) -> SegmentVisit:
        # the last one takes its place
        visit, last = self._visits[number], self._visits.pop()
        rate = self._rates.cut(len(self._visits))
        if visit is not last:
            self._visits[number], self._rates.all[number] = last, rate[0]
        self._memory.visits[visit.segment] -= 1
        if not self._memory.visits[visit.segment]:
            self.bytes -= int(self._known.cost[visit.segment])
        self.note_left(np.array([visit.segment]))
        return visit

    # --- going on later -------------------------------------------------------------------------------------------

    def state(self) -> SweepState:
        """JSON-able through msgspec."""
        visits = [visit.state for visit in (*self._visits, *self._waiting)]
        parts = [(int(self._known.index.row[segment]), parts) for segment, parts in self._parts.items()]
        return SweepState(self.epoch, self._place, parts, visits, len(self._waiting))

    def restore(self, state: SweepState, segments: np.ndarray) -> None:
        """Go on from `state`, on a new sweep; growing int64 `segments` are in the epoch."""
        self.epoch, find = state.epoch, self._known.index.find
        self._clear(state.place)
        rows, parts = np.array(state.parts, np.int64).reshape(-1, 2).T
        self._parts = dict(zip(find(rows).tolist(), parts.tolist(), strict=True))
        self._put(*self._visits_of(segments))
        numbers = find(np.array([visit.row for visit in state.visits], np.int64)).tolist()
        visits = [
            SegmentVisit(one, number, self._known, self._key) for one, number in zip(state.visits, numbers, strict=True)
        ]
        for visit in visits[: len(visits) - state.waiting]:
            self._hold(visit)
        self._waiting = visits[len(visits) - state.waiting :]
