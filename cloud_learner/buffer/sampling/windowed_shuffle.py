"""Windowed shuffle: draws from data larger than memory, each step with its probability and nearly without noise.

A sweep draws from one stratum: N eligible steps, step s with weight w(s) and p(s) = w(s) / (sum of all weights). Steps
lie in *blocks*, lists of neighbouring segments that enter and leave memory together. The sweep makes one *pass* after
the other. In a pass that plans D draws (about echo * N):

1. Every step gets a whole number a(s) of tokens by systematic sampling (Madow 1949): lay intervals of length D p(s)
   side by side; token k lies at k - u, with one random u in [0, 1) for the pass. So |a(s) - D p(s)| < 1 for every
   step, E a(s) = D p(s), and |sum of a - D| < 1.
2. Every block that got tokens is *visited* once, or several times with some of its tokens each if they are many. The
   visits come in random order. Each begins at a key that is at least the begin of the visit before it plus that one's
   tokens; passes follow each other on one axis without a gap. A token of a visit that begins at key T gets the key
   T + U W, U uniform in [0, 1), where W <= D is the window of the pass.
3. Tokens come out in order of key. A block enters memory when all waiting tokens have keys above its visit's begin, and
   leaves it after the visit's last token, at most W keys later. So at most W + t tokens wait in memory (t: of the
   largest visit), and W is chosen so that their blocks fit the budget. While the next block does not fit, tokens
   further on come out until blocks have left, and its begin moves along with them.

**Deviation.** Let n tokens have come out, in pass j (0, 1, 2, ...), every pass with the same weights. B is how many
tokens of pass j belong to visits that have begun, F how many tokens of begun visits have not come out. All visits of
earlier passes have begun, so n = (tokens of all passes before j) + B - F. The draws of step s number
c(s) = a_0(s) + ... + a_(j-1)(s) + b(s) - f(s), b(s) <= a_j(s) being its tokens in begun visits of pass j and f(s) those
of its tokens in begun visits that have not come out. With e_i = a_i(s) - D p(s) and d_i = (tokens of pass i) - D, all
within (-1, 1),

    c(s) - n p(s) = sum over i < j of (e_i - d_i p(s))  +  b(s)  -  f(s)  -  B p(s)  +  F p(s).

The sum lies within j (1 + p(s)) of 0. F <= W + t: the waiting tokens have keys within W of the least of them, so their
visits began within W of it, and begins are at least as far apart as the tokens between them.
From above: b(s) + F p(s) < 1 + (D + W + t) p(s).
From below, if no token of s waits from pass j - 1: f(s) <= b(s), and what is left is -B p(s) > -(D + 1) p(s).
If one waits, its key is less than W above the first key of pass j, and visits that began since have smaller begins, so
B < W + t; and f(s) <= a_(j-1)(s) + b(s), so what is left is above -(1 + D p(s)) - (W + t) p(s). Hence always, whatever
the random numbers were,

    |c(s) - n p(s)|  <  (j + 1) (1 + p(s)) + (D + W + t) p(s),

and after whole passes with nothing waiting it is below j (1 + p(s)). In words: a step is off by less than one draw for
each pass, from rounding (these have mean 0), and by the draws of one pass and one window. Independent draws would be
off by about sqrt(n p(s)). A block that `shrink` puts back keeps its tokens; then D takes the place of W in the bound.

**Late data** that joins a pass gets tokens as if it had been there from the start, and its visits get places spread
evenly over the pass. Visits whose place is still to come are put into the queue; those whose place came less than a
window ago are in memory with the tokens that would still wait; the others wait for the next pass. So old and new steps
are in the right proportion in what waits and in what is to come, at once. The draws of a step since the join are the
difference of two counts of a sweep that had it from the start, so they are off by less than twice the bound.

Everything is a pure function of seed, stratum, pass, population, weights, and of how far the sweep has come.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.cache_ops import CacheOps
from cloud_learner.buffer.sampling.calendar_queue import CalendarQueue
from cloud_learner.buffer.sampling.epoch import Block, Epoch, EpochState, Population, Tokens

_DAYS, _SHORTEST_DAY = 64, 1024.0
"""a window is put in order in so many parts, if they are not shorter than this"""


class WindowedShuffleState(msgspec.Struct):
    """How far a sweep has come. The newest pass is the last."""

    passes: list[EpochState]
    head: int
    again: list[tuple[int, int, int]]
    """(pass, visit, tokens that have come out) of blocks that were put back, the next one last"""
    begun: list[tuple[int, int, float, int]]
    """(pass, visit, begin, tokens that have come out) of the visits with waiting tokens, in the order they began"""
    cursor: float
    """begin of the next visit, if nothing holds it back"""
    frontier: float
    """key of the last token"""


class _Visit(msgspec.Struct):
    """A block in memory with waiting tokens, or the next one."""

    number: int
    """of the pass"""
    visit: int
    out: int
    """tokens that have come out"""
    total: int
    """tokens"""
    segments: Block
    begin: float = 0.0


class WindowedShuffle:
    """Draws from one stratum, pass after pass."""

    def __init__(
        self, make: Callable[[], Epoch], cost: Callable[[Block], list[int]], moves: CacheOps, keep: bool
    ) -> None:
        """`make()` a new pass over all there is, with a higher number than all before. `moves` is written to.

        `cost`: bytes of each segment of a block. `keep`: blocks stay in memory after their last token, and one pass is
        all.
        """
        self._make, self._cost, self._moves, self.keep = make, cost, moves, keep
        self.bytes = 0
        """of all segments in memory, also of those that leave after this batch"""
        self._holders: Counter[int] = Counter()
        self._leaving: list[Block] = []
        self._passes: dict[int, Epoch] = {}
        self._begun: dict[int, _Visit] = {}
        self._again: list[tuple[int, int, int]] = []
        self._kept: list[Block] = []
        self._next: tuple[_Visit, Tokens] | None = None
        self._slots = 0
        self._used: set[int] = set()
        self._cursor = self._frontier = 0.0
        self._pending = CalendarQueue(1.0)

    @property
    def newest(self) -> Epoch:
        """The pass that visits come from."""
        return self._passes[max(self._passes)]

    @property
    def finished(self) -> bool:
        """Whether all visits have begun; a sweep that does not keep blocks goes on with another pass."""
        return self.newest.head == len(self.newest.queue) and not self._again

    @property
    def largest_ahead(self) -> int:
        """Bytes of the largest block that is still to be visited."""
        newest = self.newest
        again = max((int(self._passes[number].bytes[visit]) for number, visit, _ in self._again), default=0)
        return max(again, int(newest.bytes[newest.queue[newest.head :]].max(initial=0)))

    @property
    def blocks(self) -> list[Block]:
        """All that are in memory, in the order they came."""
        return list(self._kept) if self.keep else [begun.segments for begun in self._begun.values()]

    def begin(self) -> None:
        """Begin a pass now; visits of the running one that have not begun never will."""
        newest = self._make()
        self._again.clear()
        live = {begun.number for begun in self._begun.values()}
        self._passes = {number: one for number, one in self._passes.items() if number in live}
        self._passes[newest.state.number] = newest
        self._pending.set_width(max(_SHORTEST_DAY, newest.window / _DAYS))
        self.look_again()

    def join(self, population: Population, alive: np.ndarray) -> None:
        """Let late steps take part in the newest pass, as if they had been there from the start."""
        newest = self.newest
        now = max(self._cursor, self._frontier)
        for number, age in newest.join(population):
            begin = now - age * newest.draws
            if begin < max(0.0, now - newest.window):
                continue
            # it would be in memory now, with these tokens to come
            tokens = newest.draw(number)
            out = int(np.searchsorted(begin + tokens.time * newest.window, self._frontier, "right"))
            if alive[tokens.run[out:]].any():
                visit = _Visit(newest.state.number, number, out, len(tokens.run), tokens.segments, begin)
                self._place(visit, tokens)
        self.look_again()

    def start_batch(self) -> None:
        """What was to leave after the batch before has left."""
        for block in self._leaving:
            self._let_go(block)
        self._leaving.clear()
        self._used.clear()

    def look_again(self) -> None:
        """After a change of the visits or of what may be drawn: choose the next one anew."""
        self._next = None

    def take(self, count: int, room: int, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64 of the next `count` draws, while the segments in memory take at most `room` bytes.

        Only runs that are `alive` (bool by run) are drawn; tokens of others are passed over. It is fewer draws if the
        next block has no room before this batch is over, or if a sweep that keeps its blocks has none left.
        """
        runs, offsets, need, idle = [], [], count, 0
        while need:
            ahead = self._look_ahead(alive)
            if ahead is None and not self.keep:
                if idle == 2:  # two passes in a row without a step that may be drawn
                    break
                idle += 1
                self.begin()
                continue
            fits = ahead is not None and self._more_bytes(ahead.segments) <= room - self.bytes
            waiting = self._pending.count
            for run, offset in self._pop(need, self._cursor if fits else math.inf, alive):
                runs.append(run)
                offsets.append(offset)
                need -= len(run)
                idle = 0
            if need and fits:
                self._enter()
            elif need and self._pending.count == waiting:
                break
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *runs]), np.concatenate([none, *offsets])

    def shrink(self, room: int) -> None:
        """Put back the blocks that came last until the others take at most `room` bytes."""
        while self.bytes > room and self._begun:
            slot, begun = self._begun.popitem()
            self._pending.remove(slot)
            self._again.append((begun.number, begun.visit, begun.out))
            self._moves.drop.append(begun.segments)
            self._let_go(begun.segments)
            self._cursor = begun.begin
        self.look_again()

    def state(self) -> WindowedShuffleState:
        """JSON-able through msgspec."""
        live = {number for number, _, _ in self._again} | {begun.number for begun in self._begun.values()}
        numbers = sorted(live | {self.newest.state.number})
        return WindowedShuffleState(
            passes=[self._passes[number].state for number in numbers],
            head=self.newest.head,
            again=list(self._again),
            begun=[(begun.number, begun.visit, begun.begin, begun.out) for begun in self._begun.values()],
            cursor=self._cursor,
            frontier=self._frontier,
        )

    def restore(self, state: WindowedShuffleState, remake: Callable[[EpochState], Epoch]) -> None:
        """Go on from `state`; everything that was in memory is admitted again. `remake` makes a pass from its state."""
        self._passes = {one.number: remake(one) for one in state.passes}
        self.newest.head = state.head
        self._pending.set_width(max(_SHORTEST_DAY, self.newest.window / _DAYS))
        self._again = list(state.again)
        self._cursor, self._frontier = state.cursor, state.frontier
        done = deque(self.newest.queue[: state.head].tolist() if self.keep else ())
        for number, visit, begin, out in state.begun:
            while done and (kept := done.popleft()) != visit:
                self._admit(self.newest.draw(kept).segments)
            tokens = self._passes[number].draw(visit)
            self._place(_Visit(number, visit, out, len(tokens.run), tokens.segments, begin), tokens)
        for kept in done:
            self._admit(self.newest.draw(kept).segments)

    def _look_ahead(self, alive: np.ndarray) -> _Visit | None:
        """The next visit with a token that may be drawn; None when all of the pass have begun."""
        while self._next is None and not self.finished:
            newest = self.newest
            if self._again:
                number, visit, out = self._again[-1]
            else:
                number, visit, out = newest.state.number, int(newest.queue[newest.head]), 0
            tokens = self._passes[number].draw(visit)
            if self.keep or alive[tokens.run[out:]].any():
                self._next = _Visit(number, visit, out, len(tokens.run), tokens.segments), tokens
            else:
                self._advance()
        return self._next[0] if self._next else None

    def _advance(self) -> None:
        if self._again:
            self._again.pop()
        else:
            self.newest.head += 1
        self.look_again()

    def _enter(self) -> None:
        """Begin the visit that `_look_ahead` found."""
        assert self._next is not None
        visit, tokens = self._next
        self._advance()
        begin = max(self._cursor, self._frontier)
        self._cursor = begin + visit.total - visit.out
        # one that was put back goes on where it stopped
        passed = float(tokens.time[visit.out]) if visit.out else 0.0
        visit.begin = begin - passed * self._passes[visit.number].window
        self._place(visit, tokens)

    def _place(self, visit: _Visit, tokens: Tokens) -> None:
        keys = visit.begin + tokens.time * self._passes[visit.number].window
        self._pending.add(keys[visit.out :], self._slots, tokens.run[visit.out :], tokens.offset[visit.out :])
        self._begun[self._slots] = visit
        self._slots += 1
        self._admit(visit.segments)

    def _admit(self, block: Block) -> None:
        self._moves.admit.append(block)
        self.bytes += self._more_bytes(block)
        self._holders.update(block)
        if self.keep:
            self._kept.append(block)

    def _more_bytes(self, block: Block) -> int:
        """What would enter memory with a block."""
        costs = zip(block, self._cost(block), strict=True)
        return sum(cost for segment, cost in costs if segment not in self._holders)

    def _let_go(self, block: Block) -> None:
        for segment, cost in zip(block, self._cost(block), strict=True):
            self._holders[segment] -= 1
            if not self._holders[segment]:
                del self._holders[segment]
                self.bytes -= cost

    def _pop(self, count: int, below: float, alive: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while count:
            slots, runs, offsets, last = self._pending.pop(count, below)
            if not len(slots):
                return
            self._frontier = max(self._frontier, last)
            drawn = alive[runs]
            self._used.update(slots[drawn].tolist())
            for slot, out in zip(*(column.tolist() for column in np.unique(slots, return_counts=True)), strict=True):
                begun = self._begun[slot]
                begun.out += out
                if begun.out == begun.total:
                    self._retire(slot)
            count -= int(drawn.sum())
            yield runs[drawn], offsets[drawn]

    def _retire(self, slot: int) -> None:
        begun = self._begun.pop(slot)
        if self.keep:
            return
        if slot in self._used:
            self._moves.release.append(begun.segments)
            self._leaving.append(begun.segments)
        else:  # nothing of this batch comes from it, so it need not wait
            self._moves.drop.append(begun.segments)
            self._let_go(begun.segments)
