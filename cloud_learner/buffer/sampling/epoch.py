"""One pass over a stratum: which steps get how many draws, in which blocks and order; `windowed_shuffle` says why."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import msgspec
import numpy as np

Block = tuple[int, ...]
"""segment numbers that enter and leave memory together, growing by place in the ledger"""
BLOCK_STEPS = 256
"""eligible steps after which a block is full"""
_VISITS, _LEAST_VISIT = 4, 64
"""a visit has at most one such part of a window's tokens, or so many tokens if that is more"""
_SHIFT, _ORDER, _TIMES, _PARTS = range(4)
"""what random numbers are for"""


class Population(msgspec.Struct, frozen=True, eq=False):
    """K runs of eligible steps, in the order of episodes and in it of ticks; the runs of a segment lie together."""

    run: np.ndarray
    """int64[K] number in the universe"""
    segment: np.ndarray
    """int64[K] segment number"""
    first: np.ndarray
    """int64[K] offset of the run's first step in its segment"""
    count: np.ndarray
    """int64[K] steps, above 0"""
    weight: np.ndarray
    """float64[K] of each step, above 0"""
    cost: np.ndarray
    """int64[K] bytes that the run's segment takes"""

    @property
    def mass(self) -> float:
        """Sum of the weights of all steps."""
        return float(self.weight @ self.count)


class EpochState(msgspec.Struct):
    """What a pass is made of; with the same universe it makes the same pass."""

    number: int
    newest_version: int
    """when its weights were taken"""
    scale: float
    """draws per unit of weight"""
    window_bytes: int
    """what the blocks of a window may take; 0: the window is the whole pass"""
    block_bytes: int
    legs: list[tuple[int, int]]
    """(ledger watermark, visits of the queue that had begun) of the pass itself and of each later join"""


class Tokens(msgspec.Struct, frozen=True, eq=False):
    """The t tokens of one visit, in order of time."""

    segments: Block
    """those that got tokens"""
    run: np.ndarray
    """int64[t] number in the universe"""
    offset: np.ndarray
    """int64[t] step within its segment"""
    time: np.ndarray
    """float64[t] in [0, 1), growing: when, in windows after the visit begins"""


def generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on nothing but `key`, integers of 0 or more."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def cut(segment: np.ndarray, count: np.ndarray, cost: np.ndarray, block_bytes: int) -> np.ndarray:
    """int64[B + 1]: where among K runs the blocks begin and end.

    A block is full with the segment that brings it to `BLOCK_STEPS` steps, or before the one that would bring it above
    `block_bytes`; a segment above that is a block of its own.
    """
    first = _first_of_segments(segment)
    if not len(first):
        return np.zeros(1, np.int64)
    steps = np.cumsum(np.add.reduceat(count, first)).tolist()
    used = np.cumsum(cost[first]).tolist()
    bounds, at = [0], 0
    while at < len(first):
        done_steps, done_bytes = (steps[at - 1], used[at - 1]) if at else (0, 0)
        full = bisect_left(steps, done_steps + BLOCK_STEPS, at) + 1
        fits = bisect_right(used, done_bytes + block_bytes, at)
        at = min(len(first), max(at + 1, min(full, fits)))
        bounds.append(at)
    return np.append(first, len(segment))[bounds]


def block_mass(population: Population, bounds: np.ndarray) -> np.ndarray:
    """float64[B] sum of the weights of each block's steps."""
    return np.diff(np.concatenate([[0.0], np.cumsum(population.weight * population.count)])[bounds])


class _Leg(msgspec.Struct, frozen=True, eq=False):
    """A population and its tokens."""

    population: Population
    each: np.ndarray
    """float64[K] expected tokens of each step of a run"""
    ends: np.ndarray
    """float64[K] expected tokens of all steps up to the end of a run"""
    until: np.ndarray
    """int64[K + 1] tokens up to the begin of each run, and of all"""
    shift: float
    """u: token k lies where k - u tokens are expected"""


class Epoch:
    """The visits of one pass and the order they come in.

    A visit is a block entering memory with its tokens. A block with more than a quarter of a window's tokens is visited
    several times, with some of its tokens each, at even distances.
    """

    def __init__(self, state: EpochState, key: tuple[int, ...]) -> None:
        """Empty until `join`. `key` names the seed and the stratum."""
        self.state = state
        self.draws = 0.0
        """D: expected sum of all tokens"""
        self.window = 0.0
        """W, in draws"""
        self.head = 0
        """how many visits of the queue have begun"""
        self.queue: np.ndarray = np.zeros(0, np.int64)
        """visits in the order they come"""
        self.tokens: np.ndarray = np.zeros(0, np.int64)
        """int64[visits]"""
        self.bytes: np.ndarray = np.zeros(0, np.int64)
        """int64[visits] that the block's segments with tokens take"""
        self.runs: np.ndarray = np.zeros(0, np.int64)
        """int64 numbers of all runs in the pass"""
        self.weights: np.ndarray = np.zeros(0)
        """float64 of the steps of each of `runs`"""
        self._key = (*key, state.number)
        self._legs: list[_Leg] = []
        self._visits = np.zeros((0, 5), np.int64)
        """of each visit: leg, first and last run of its block, part, parts"""

    def join(self, population: Population) -> list[tuple[int, float]]:
        """Let `population` take part; if the pass has begun, as if it had been there from the start.

        Its visits get places spread evenly over the pass, in random order. Those with places still to come are put
        into the queue among the others. Answers with (visit, age) of all its visits: the age is how long ago, in
        passes, its last place came.
        """
        number = len(self._legs)
        done = 1 - min(1.0, int(self.tokens[self.queue[self.head :]].sum()) / self.draws) if number else 0.0
        self.draws += self.state.scale * population.mass
        each = population.weight * self.state.scale
        ends = np.cumsum(each * population.count)
        shift = float(generator(*self._key, _SHIFT, number).random())
        # systematic sampling: how many tokens lie at or before the end of each run
        until = np.concatenate([[0], np.floor(ends + shift).astype(np.int64)])
        self._legs.append(_Leg(population, each, ends, until, shift))
        bounds = cut(population.segment, population.count, population.cost, self.state.block_bytes)
        tokens = np.diff(until[bounds])
        size = _bytes_with_tokens(population, until, bounds)
        if not number:
            fits = self.state.window_bytes / max(1, int(size.sum())) if self.state.window_bytes else 1.0
            self.window = max(1.0, self.draws * min(1.0, fits))
        parts = -(-tokens // max(_LEAST_VISIT, int(self.window / _VISITS)))
        block = np.repeat(np.arange(len(tokens)), parts)
        part = np.arange(len(block)) - np.repeat(np.cumsum(parts) - parts, parts)
        several, total = parts[block], tokens[block]
        rng = generator(*self._key, _ORDER, number)
        place = (part + rng.random(len(parts))[block]) / several
        once = np.flatnonzero(several == 1)
        place[once] = (np.argsort(rng.random(len(once)), kind="stable") + rng.random()) / max(1, len(once))
        self._put_into_queue(np.arange(len(self.tokens), len(self.tokens) + len(block)), place, done)
        self.tokens = np.append(self.tokens, (part + 1) * total // several - part * total // several)
        self.bytes = np.append(self.bytes, size[block])
        legs = np.full(len(block), number)
        visits = np.stack([legs, bounds[:-1][block], bounds[1:][block], part, several], 1)
        self._visits = np.concatenate([self._visits, visits])
        self.runs, self.weights = np.append(self.runs, population.run), np.append(self.weights, population.weight)
        first = len(self.tokens) - len(block)
        return [(first + at, age) for at, age in enumerate(((done - place) % 1.0).tolist())]

    def _put_into_queue(self, new: np.ndarray, place: np.ndarray, done: float) -> None:
        old = self.queue[self.head :]
        there = done + (1 - done) * (np.arange(len(old)) + 0.5) / max(1, len(old))
        to_come = place >= done
        order = np.argsort(np.append(there, place[to_come]), kind="stable")
        self.queue = np.append(self.queue[: self.head], np.append(old, new[to_come])[order])

    def draw(self, visit: int) -> Tokens:
        """The tokens of one visit."""
        number, begin, end, part, parts = self._visits[visit].tolist()
        leg = self._legs[number]
        population, until, ends = leg.population, leg.until, leg.ends
        token = np.arange(until[begin], until[end])
        at = np.repeat(np.arange(begin, end), np.diff(until[begin : end + 1]))
        if parts > 1:
            order = np.argsort(generator(*self._key, _PARTS, visit - part).random(len(token)), kind="stable")
            mine = np.sort(order[part * len(token) // parts : (part + 1) * len(token) // parts])
            token, at = token[mine], at[mine]
        start = ends[at - 1] if begin else np.concatenate([[0.0], ends[: end - 1]])[at]
        step = np.ceil((token + 1 - leg.shift - start) / leg.each[at]).astype(np.int64) - 1
        offset = population.first[at] + np.clip(step, 0, population.count[at] - 1)
        time = generator(*self._key, _TIMES, visit).random(len(at))
        order = np.argsort(time, kind="stable")
        segments = tuple(dict.fromkeys(population.segment[at].tolist()))
        return Tokens(segments, population.run[at][order], offset[order], time[order])


def _bytes_with_tokens(population: Population, until: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """int64[B] bytes of the segments of each block that got tokens."""
    first = np.append(_first_of_segments(population.segment), len(population.segment))
    used = population.cost[first[:-1]] * (np.diff(until[first]) > 0)
    return np.diff(np.concatenate([[0], np.cumsum(used)])[np.searchsorted(first, bounds)])


def _first_of_segments(segment: np.ndarray) -> np.ndarray:
    """int64[segments] where each segment's runs begin."""
    return np.flatnonzero(np.diff(segment, prepend=-1))
