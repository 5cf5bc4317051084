"""One pass over a stratum: which steps get how many draws, in which blocks, in which order. `sweep.py` says why."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import msgspec
import numpy as np

Block = tuple[int, ...]
"""segment numbers that enter and leave memory together, growing by place in the ledger"""
BLOCK_STEPS = 256
"""eligible steps after which a block is full"""
_SHIFT, _ORDER, _TIMES = range(3)
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


class PassState(msgspec.Struct):
    """What a pass is made of; with the same universe it makes the same pass."""

    number: int
    newest_version: int
    """when its weights were taken"""
    scale: float
    """draws per unit of weight"""
    window: float
    """W, in draws"""
    block_bytes: int
    legs: list[tuple[int, int]]
    """(ledger watermark, blocks of the queue that had begun) of the pass itself and of each later join"""


class Tokens(msgspec.Struct, frozen=True, eq=False):
    """The t tokens of one block, in order of time."""

    segments: Block
    """those that got tokens"""
    run: np.ndarray
    """int64[t] number in the universe"""
    offset: np.ndarray
    """int64[t] step within its segment"""
    time: np.ndarray
    """float64[t] in [0, 1), growing: when, in windows after the block begins"""


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


class Pass:
    """The blocks of one pass and the order they come in."""

    def __init__(self, state: PassState, key: tuple[int, ...]) -> None:
        """Empty until `join`. `key` names the seed and the stratum."""
        self.state = state
        self.head = 0
        """how many blocks of the queue have begun"""
        self.queue: np.ndarray = np.zeros(0, np.int64)
        """blocks with tokens in the order they come"""
        self.tokens: np.ndarray = np.zeros(0, np.int64)
        """int64[blocks]"""
        self.bytes: np.ndarray = np.zeros(0, np.int64)
        """int64[blocks] of the segments that got tokens"""
        self.runs: np.ndarray = np.zeros(0, np.int64)
        """int64 numbers of all runs in the pass"""
        self.weights: np.ndarray = np.zeros(0)
        """float64 of the steps of each of `runs`"""
        self._key = (*key, state.number)
        self._legs: list[tuple[Population, np.ndarray, np.ndarray, np.ndarray, float]] = []
        self._block = np.zeros((0, 3), np.int64)
        self.draws = 0.0
        """D, expected sum of the tokens of all blocks"""

    def join(self, population: Population) -> list[tuple[int, float]]:
        """Let `population` take part; if the pass has begun, as if it had been there from the start.

        Its blocks get places spread evenly over the pass, in random order. Those with places still to come are put into
        the queue among the others. Answers with (block, age) of all its blocks with tokens: the age is how long ago,
        in passes, its last place came.
        """
        leg = len(self._legs)
        done = 1 - min(1.0, int(self.tokens[self.queue[self.head :]].sum()) / self.draws) if leg else 0.0
        self.draws += self.state.scale * population.mass
        each = population.weight * self.state.scale
        ends = np.cumsum(each * population.count)
        shift = float(generator(*self._key, _SHIFT, leg).random())
        # systematic sampling: how many tokens lie at or before the end of each run
        until = np.concatenate([[0], np.floor(ends + shift).astype(np.int64)])
        self._legs.append((population, each, ends, until, shift))
        bounds = cut(population.segment, population.count, population.cost, self.state.block_bytes)
        tokens = np.diff(until[bounds])
        first = np.append(_first_of_segments(population.segment), len(population.segment))
        used = population.cost[first[:-1]] * (np.diff(until[first]) > 0)
        size = np.diff(np.concatenate([[0], np.cumsum(used)])[np.searchsorted(first, bounds)])
        new = len(self.tokens) + np.flatnonzero(tokens)
        rng = generator(*self._key, _ORDER, leg)
        place = (np.argsort(rng.random(len(new)), kind="stable") + rng.random()) / max(1, len(new))
        left = np.concatenate([self.queue[self.head :], new[place >= done]])
        order = np.argsort(rng.random(len(left)), kind="stable")
        self.queue = np.concatenate([self.queue[: self.head], left[order]])
        self.tokens, self.bytes = np.append(self.tokens, tokens), np.append(self.bytes, size)
        legs = np.full(len(tokens), leg)
        self._block = np.concatenate([self._block, np.stack([legs, bounds[:-1], bounds[1:]], 1)])
        self.runs, self.weights = np.append(self.runs, population.run), np.append(self.weights, population.weight)
        return list(zip(new.tolist(), ((done - place) % 1.0).tolist(), strict=True))

    def draw(self, block: int) -> Tokens:
        """The tokens of one block."""
        leg, begin, end = self._block[block].tolist()
        population, each, ends, until, shift = self._legs[leg]
        counts = np.diff(until[begin : end + 1])
        at = np.repeat(np.arange(begin, end), counts)
        place = np.arange(until[begin] + 1, until[end] + 1) - shift
        start = ends[at - 1] if begin else np.concatenate([[0.0], ends[: end - 1]])[at]
        step = np.ceil((place - start) / each[at]).astype(np.int64) - 1
        offset = population.first[at] + np.clip(step, 0, population.count[at] - 1)
        time = generator(*self._key, _TIMES, block).random(len(at))
        order = np.argsort(time, kind="stable")
        segments = tuple(dict.fromkeys(population.segment[at].tolist()))
        return Tokens(segments, population.run[at][order], offset[order], time[order])


def _first_of_segments(segment: np.ndarray) -> np.ndarray:
    """int64[segments] where each segment's runs begin."""
    return np.flatnonzero(np.diff(segment, prepend=-1))
