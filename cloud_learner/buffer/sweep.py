"""Windowed shuffle: draws from data larger than memory, each step with its probability and nearly without noise.

A sweep draws from one stratum: N eligible steps, step s with weight w(s) and p(s) = w(s) / (sum of all weights). Steps
lie in *blocks*, lists of neighbouring segments that enter and leave memory together. The sweep makes one *pass* after
the other. In a pass that plans D draws (about echo * N):

1. Every step gets a whole number a(s) of tokens by systematic sampling (Madow 1949): lay intervals of length D p(s)
   side by side; token k lies at k - u, with one random u in [0, 1) for the pass. So |a(s) - D p(s)| < 1 for every
   step, E a(s) = D p(s), and |sum of a - D| < 1.
2. The blocks that got tokens are put into a random order. Each begins at a key that is at least the begin of the block
   before it plus that one's tokens; passes follow each other on one axis without a gap. A token of a block that begins
   at key T gets the key T + U W, U uniform in [0, 1), where W <= D is the window of the pass.
3. Tokens come out in order of key. A block enters memory when all waiting tokens have keys above its begin, and leaves
   it after its last token, at most W keys later. So blocks in memory hold at most W + t waiting tokens (t: of the
   largest block), and W is chosen so that they fit the budget. While the next block does not fit, tokens further on
   come out until blocks have left, and its begin moves along with them.

**Deviation.** Let n tokens have come out, in pass j (0, 1, 2, ...), every pass with the same weights. B is how many
tokens of pass j lie in blocks that have begun, F how many tokens of begun blocks have not come out. All blocks of
earlier passes have begun, so n = (tokens of all passes before j) + B - F. The draws of step s number
c(s) = a_0(s) + ... + a_(j-1)(s) + [its block began in pass j] a_j(s) - f(s), f(s) being those of its tokens that have
not come out. With e_i = a_i(s) - D p(s) and d_i = (tokens of pass i) - D, all within (-1, 1),

    c(s) - n p(s) = sum over i < j of (e_i - d_i p(s))  +  [begun] a_j(s)  -  f(s)  -  B p(s)  +  F p(s).

The sum lies within j (1 + p(s)) of 0. F <= W + t: the waiting tokens have keys within W of the least of them, so their
blocks began within W of it, and begins are at least as far apart as the tokens between them.
From above: [begun] a_j(s) + F p(s) < 1 + (D + W + t) p(s).
From below, if no token of s waits from pass j - 1: f(s) <= [begun] a_j(s), and what is left is -B p(s) > -(D + 1) p(s).
If one waits, its key is less than W above the first key of pass j, and blocks that began since have smaller begins, so
B < W + t; and f(s) <= a_(j-1)(s) + [begun] a_j(s), so what is left is above -(1 + D p(s)) - (W + t) p(s). Hence always,
whatever the random numbers were,

    |c(s) - n p(s)|  <  (j + 1) (1 + p(s)) + (D + W + t) p(s),

and after whole passes with nothing waiting it is below j (1 + p(s)). In words: a step is off by less than one draw for
each pass, from rounding (these have mean 0), and by the draws of one pass and one window. Independent draws would be
off by about sqrt(n p(s)). A block that `shrink` puts back keeps its tokens; then D takes the place of W in the bound.

**Late data** that joins a pass gets tokens as if it had been there from the start, and its blocks get places spread
evenly over the pass. Blocks whose place is still to come are put into the queue; those whose place came less than a
window ago are in memory with the tokens that would still wait; the others wait for the next pass. So old and new steps
are in the right proportion in what waits and in what is to come, at once. The draws of a step since the join are the
difference of two counts of a sweep that had it from the start, so they are off by less than twice the bound.

Everything is a pure function of seed, stratum, pass, population, weights, and of how far the sweep has come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from cloud_learner.buffer.moves import Moves
from cloud_learner.buffer.passes import Block, Pass, PassState, Population, Tokens
from cloud_learner.buffer.pending import Pending

_DAYS = 64
"""parts of a window that are put in order at once"""


class SweepState(msgspec.Struct):
    """How far a sweep has come. Blocks are pairs of pass number and block; the newest pass is the last."""

    passes: list[PassState]
    head: int
    again: list[tuple[int, int, int]]
    """(pass, block, tokens that have come out) of blocks that were put back, the next one last"""
    begun: list[tuple[int, int, float, int]]
    """(pass, block, begin, tokens that have come out) of the blocks with waiting tokens, in the order they began"""
    cursor: float
    """begin of the next block, if nothing holds it back"""
    frontier: float
    """key of the last token"""


class _Begun(msgspec.Struct):
    """A block in memory with waiting tokens."""

    number: int
    """of the pass"""
    block: int
    begin: float
    total: int
    """tokens"""
    out: int
    """tokens that have come out"""
    segments: Block
    bytes: int


class _Next(msgspec.Struct):
    """The block that comes next."""

    number: int
    block: int
    out: int
    tokens: Tokens
    bytes: int


class Sweep:
    """Draws from one stratum, pass after pass."""

    def __init__(self, make: Callable[[], Pass], moves: Moves, keep: bool) -> None:
        """`make()` a new pass over all there is, with a higher number than all before. `moves` is written to.

        `keep`: blocks stay in memory after their last token, and one pass is all.
        """
        self._make, self._moves, self.keep = make, moves, keep
        self.bytes = 0
        """of all blocks in memory, also of those that leave after this batch"""
        self._passes: dict[int, Pass] = {}
        self._begun: dict[int, _Begun] = {}
        self._again: list[tuple[int, int, int]] = []
        self._kept: list[Block] = []
        self._next: _Next | None = None
        self._slots = self._leaving = 0
        self._used: set[int] = set()
        self._cursor = self._frontier = 0.0
        self._pending = Pending(1.0)

    @property
    def newest(self) -> Pass:
        """The pass that blocks come from."""
        return self._passes[max(self._passes)]

    @property
    def finished(self) -> bool:
        """Whether all blocks have begun; a sweep that does not keep them goes on with another pass."""
        return self.newest.head == len(self.newest.queue) and not self._again

    @property
    def largest_ahead(self) -> int:
        """Bytes of the largest block that has not begun."""
        newest = self.newest
        again = max((int(self._passes[number].bytes[block]) for number, block, _ in self._again), default=0)
        return max(again, int(newest.bytes[newest.queue[newest.head :]].max(initial=0)))

    @property
    def blocks(self) -> list[Block]:
        """All that are in memory, in the order they came."""
        return list(self._kept) if self.keep else [begun.segments for begun in self._begun.values()]

    def begin(self) -> None:
        """Begin a pass now; blocks of the running one that have not begun never will."""
        newest = self._make()
        self._again.clear()
        live = {begun.number for begun in self._begun.values()}
        self._passes = {number: one for number, one in self._passes.items() if number in live}
        self._passes[newest.state.number] = newest
        self._pending.set_width(newest.state.window / _DAYS)
        self.look_again()

    def join(self, population: Population, alive: np.ndarray) -> None:
        """Let late steps take part in the newest pass, as if they had been there from the start."""
        newest = self.newest
        now = max(self._cursor, self._frontier)
        for block, age in newest.join(population):
            begin = now - age * newest.draws
            if begin < max(0.0, now - newest.state.window):
                continue
            # it would be in memory now, with these tokens to come
            tokens = newest.draw(block)
            out = int(np.searchsorted(begin + tokens.time * newest.state.window, self._frontier, "right"))
            if alive[tokens.run[out:]].any():
                self._place(_Next(newest.state.number, block, out, tokens, int(newest.bytes[block])), begin)
        self.look_again()

    def start_batch(self) -> None:
        """What was to leave after the batch before has left."""
        self.bytes -= self._leaving
        self._leaving = 0
        self._used.clear()

    def look_again(self) -> None:
        """After a change of the blocks or of what may be drawn: choose the next block anew."""
        self._next = None

    def take(self, count: int, room: int, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64 of the next `count` draws, while the blocks in memory take at most `room` bytes.

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
            fits = ahead is not None and ahead.bytes <= room - self.bytes
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
            self._again.append((begun.number, begun.block, begun.out))
            self._moves.drop.append(begun.segments)
            self.bytes -= begun.bytes
            self._cursor = begun.begin
        self.look_again()

    def state(self) -> SweepState:
        """JSON-able through msgspec."""
        live = {number for number, _, _ in self._again} | {begun.number for begun in self._begun.values()}
        numbers = sorted(live | {self.newest.state.number})
        return SweepState(
            passes=[self._passes[number].state for number in numbers],
            head=self.newest.head,
            again=list(self._again),
            begun=[(begun.number, begun.block, begun.begin, begun.out) for begun in self._begun.values()],
            cursor=self._cursor,
            frontier=self._frontier,
        )

    def restore(self, state: SweepState, remake: Callable[[PassState], Pass]) -> None:
        """Go on from `state`; everything that was in memory is admitted again. `remake` makes a pass from its state."""
        self._passes = {one.number: remake(one) for one in state.passes}
        self.newest.head = state.head
        self._pending.set_width(self.newest.state.window / _DAYS)
        self._again = list(state.again)
        self._cursor, self._frontier = state.cursor, state.frontier
        done = self.newest.queue[: state.head].tolist() if self.keep else []
        for number, block, begin, out in state.begun:
            while done and (kept := done.pop(0)) != block:
                self._admit(self.newest.draw(kept).segments, int(self.newest.bytes[kept]))
            one = self._passes[number]
            self._place(_Next(number, block, out, one.draw(block), int(one.bytes[block])), begin)
        for kept in done:
            self._admit(self.newest.draw(kept).segments, int(self.newest.bytes[kept]))

    def _look_ahead(self, alive: np.ndarray) -> _Next | None:
        """The next block with a token that may be drawn; None when all of the pass have begun."""
        while self._next is None and not self.finished:
            newest = self.newest
            number, block, out = (
                self._again[-1] if self._again else (newest.state.number, int(newest.queue[newest.head]), 0)
            )
            one = self._passes[number]
            tokens = one.draw(block)
            if self.keep or alive[tokens.run[out:]].any():
                self._next = _Next(number, block, out, tokens, int(one.bytes[block]))
            else:
                self._advance()
        return self._next

    def _advance(self) -> None:
        if self._again:
            self._again.pop()
        else:
            self.newest.head += 1
        self.look_again()

    def _enter(self) -> None:
        """Begin the block that `_look_ahead` found."""
        entered = self._next
        assert entered is not None
        self._advance()
        begin = max(self._cursor, self._frontier)
        self._cursor = begin + len(entered.tokens.run) - entered.out
        # one that was put back goes on where it stopped
        passed = entered.tokens.time[entered.out] if entered.out else 0.0
        self._place(entered, begin - float(passed) * self._passes[entered.number].state.window)

    def _place(self, entered: _Next, begin: float) -> None:
        tokens, out = entered.tokens, entered.out
        keys = begin + tokens.time * self._passes[entered.number].state.window
        self._pending.add(keys[out:], self._slots, tokens.run[out:], tokens.offset[out:])
        self._begun[self._slots] = _Begun(
            entered.number, entered.block, begin, len(tokens.run), out, tokens.segments, entered.bytes
        )
        self._slots += 1
        self._admit(tokens.segments, entered.bytes)

    def _admit(self, segments: Block, used: int) -> None:
        self._moves.admit.append(segments)
        self.bytes += used
        if self.keep:
            self._kept.append(segments)

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
            self._leaving += begun.bytes
        else:  # nothing of this batch comes from it, so it need not wait
            self._moves.drop.append(begun.segments)
            self.bytes -= begun.bytes
