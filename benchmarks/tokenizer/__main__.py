"""Whole-body action chunks as tokens: how many for one second, and how far the actions are off afterwards.

Chunks of one second of three robots (`benchmarks.tokenizer.data` says how they come about), fitted on some episodes
and measured on others:

- `bins`: each number one of 256 bins of its dimension's range, as RT-2 (arXiv 2307.15818) and OpenVLA (arXiv
  2406.09246) do at every step: H * da tokens.
- `DCT, no byte pairs`: FAST's integers (scale 10), each a token, without the zeros at the end.
- `FAST, as published`: scale 10, plain rounding, 1024 tokens in the vocabulary (arXiv 2501.09747).
- `FAST, goal X`: scale and dead zone searched for a mean absolute error of X, a larger vocabulary.
- `residual VQ, goal 0.95 %`: as many stages as that takes, 256 codes each for the 4 components that are worst.
- `residual VQ, dense`: as many stages, whose codes are for all components at once (SoundStream's quantiser, arXiv
  2107.03312, on the same linear basis).

Errors are shares of each dimension's range, which is from the 1 % to the 99 % quantile of what was fitted on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.pool import process_pool
from benchmarks.common.table import Goal, Result, interval, require, run
from benchmarks.tokenizer import data
from benchmarks.tokenizer.bins import Bins
from policies.tokens.config import FastConfig, ResidualVQConfig
from policies.tokens.fast import FastTokenizer
from policies.tokens.residual_vq import ResidualVQ
from policies.tokens.tokenizer import ActionTokenizer, TokenizerReport, report
from wire.errors import ConfigError

GOAL_TOKENS, GOAL_ERROR = 60, 0.01
AIM = 0.0095
"""what fitting aims at, so that chunks it never saw stay below the goal"""
FINER_AIM = 0.0075
VOCABULARY = 4096
JITTER = 0.002
"""of the range: what a teleoperation device adds, in the table of all robots"""
HELD_OUT = 1000
"""added to a seed for the episodes that are measured on"""


@dataclass(frozen=True, slots=True)
class TokenizerSize:
    """How much of everything."""

    seeds: tuple[int, ...]
    metaworld: tuple[int, int]
    """episodes to fit on, and to measure on"""
    aloha: tuple[int, int]
    whole_body: tuple[int, int]
    aloha_s: float
    """seconds of an episode"""
    whole_body_s: float
    jitters: tuple[float, ...]
    """besides `JITTER`"""
    stages: int
    """of residual VQ, at most"""


FULL = TokenizerSize((0, 1, 2), (48, 24), (30, 10), (50, 12), 20.0, 60.0, (0.0, 0.001, 0.003), 60)
QUICK = TokenizerSize((0,), (6, 6), (2, 1), (6, 2), 8.0, 30.0, (0.0,), 8)


@dataclass(frozen=True, slots=True)
class TokenizedRobot:
    """A row's data."""

    name: str
    dimensions: int
    hz: int
    episodes: Callable[[TokenizerSize, int, int], list[np.ndarray]]
    """of so many episodes and a seed"""
    counts: Callable[[TokenizerSize], tuple[int, int]]
    overlap: int = 5
    """a chunk to fit on begins at every so many-th part of one"""


ROBOTS = (
    TokenizedRobot(
        "MetaWorld's experts", 4, 80, lambda size, n, seed: data.metaworld(n, seed), lambda size: size.metaworld, 20
    ),
    TokenizedRobot(
        "ALOHA, two arms", 14, 50, lambda size, n, seed: data.aloha(n, size.aloha_s, seed), lambda size: size.aloha
    ),
    TokenizedRobot(
        "whole body", 25, 50, lambda size, n, seed: _body(size, n, 50, JITTER, seed), lambda size: size.whole_body
    ),
    TokenizedRobot(
        "whole body", 25, 30, lambda size, n, seed: _body(size, n, 30, JITTER, seed), lambda size: size.whole_body
    ),
)


def _body(size: TokenizerSize, episodes: int, hz: int, jitter: float, seed: int) -> list[np.ndarray]:
    return data.whole_body(episodes, size.whole_body_s, hz, jitter, seed)


SEARCHED, FINER, VQ, DENSE = "FAST, goal 0.95 %", "FAST, goal 0.75 %", "residual VQ, goal 0.95 %", "residual VQ, dense"
PROMISED = (SEARCHED, VQ)


def fitted(chunks: np.ndarray, stages: int) -> Iterator[tuple[str, ActionTokenizer]]:
    """Each row's tokeniser of chunks, residual quantisers with up to `stages` stages."""
    yield "bins", Bins.fit(chunks)
    published = FastTokenizer.fit(chunks, FastConfig())
    yield "DCT, no byte pairs", unmerged(published)
    yield "FAST, as published", published
    yield SEARCHED, searched(chunks, AIM)
    yield FINER, searched(chunks, FINER_AIM)
    # of few dimensions all frequencies are kept: edges need them
    frequencies = max(16, 400 // chunks.shape[2])
    made = quantiser(chunks, ResidualVQConfig(tokens=stages, frequencies=frequencies, error_goal=AIM))
    yield VQ, made
    yield (
        DENSE,
        ResidualVQ.fit(chunks, ResidualVQConfig(len(made.encode(chunks[0])), group=256, frequencies=frequencies)),
    )


def searched(chunks: np.ndarray, aim: float) -> FastTokenizer:
    """FAST with the fewest bits for a mean absolute error of `aim`."""
    return FastTokenizer.fit(chunks, FastConfig(vocabulary=VOCABULARY, error_goal=aim))


def unmerged(fast: FastTokenizer) -> FastTokenizer:
    """The same without its byte pairs."""
    return FastTokenizer(fast.scaling, fast.horizon, fast.scale, fast.dead_zone, fast.least, fast.most)


def quantiser(chunks: np.ndarray, config: ResidualVQConfig) -> ResidualVQ:
    """For the error goal if that can be met, else with all stages."""
    try:
        return ResidualVQ.fit(chunks, config)
    except ConfigError:
        return ResidualVQ.fit(chunks, msgspec.structs.replace(config, error_goal=None))


@dataclass(frozen=True, slots=True)
class TokenizerTrial:
    """One tokeniser on one seed."""

    report: TokenizerReport
    encode_ms: float
    """per chunk, many at once"""
    decode_ms: float
    kilobytes: float
    vocabulary: int


def measure(quick: bool) -> Result:
    """All robots, then the whole body with more and less jitter."""
    require("scipy", "tokenizers", extra="vlm")
    return compare(QUICK if quick else FULL)


def compare(size: TokenizerSize) -> Result:
    """Both tables."""
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    # the whole body with the jitter of the first table is in it already
    usual = len(ROBOTS) - 2
    work: list[tuple[TokenizerSize, int, int, float | None]] = [
        (size, which, seed, None) for which in range(len(ROBOTS)) for seed in size.seeds
    ]
    work += [(size, usual, seed, jitter) for jitter in size.jitters for seed in size.seeds]
    with process_pool(len(work)) as pool:
        done = list(pool.map(one_seed, *zip(*work, strict=True)))
    found: dict[tuple[int, float | None], dict[str, list[TokenizerTrial]]] = {}
    for (_, which, _, jitter), one in zip(work, done, strict=True):
        for name, measured in one.items():
            found.setdefault((which, jitter), {}).setdefault(name, []).append(measured)
    for which, robot in enumerate(ROBOTS):
        mine = found[which, None]
        rows += [_row(robot, name, many) for name, many in mine.items()]
        if robot.dimensions == 25:
            goals += [goal for name in PROMISED for goal in _goals(robot, name, mine[name])]
    jitters = {JITTER: found[usual, None]} | {jitter: found[usual, jitter] for jitter in size.jitters}
    return Result(
        "One second of actions as tokens",
        rows,
        goals,
        [
            f"{len(size.seeds)} seed(s) of the data: mean (lowest to highest); `longest` is the longest chunk of any. "
            "Episodes that are measured are never those that were fitted on; measured chunks do not overlap.",
            "Errors are shares of each dimension's range, from the 1 % to the 99 % quantile of its actions.",
            "4 dimensions: what MetaWorld's scripted experts did in its simulator (increments that mostly saturate, "
            "and grippers that switch: edges, for which cosines are a poor basis). 14: the joints of gym-aloha's "
            "MuJoCo model as its servos followed random via points at minimum jerk, contacts off. 25: no simulator; "
            "two 7-joint arms, two grippers, head, torso and base velocity that reach at minimum jerk, each part at "
            f"its own times, plus white noise of {JITTER:.1%} of the range. No teleoperation was recorded for it.",
            "A joint that is off by 1 % of its range at each single step is below what the noise and the servo do; "
            "but an rms error is larger than the mean one, and 1 % of all numbers are off by more than `p99`.",
            f"`residual VQ, dense` has as many stages as `{VQ}`. Times are of one thread, of many chunks at once.",
        ],
        {"25 dimensions at 50 Hz: what jitter costs": _jitters(jitters)},
    )


def one_seed(size: TokenizerSize, which: int, seed: int, jitter: float | None) -> dict[str, TokenizerTrial]:
    """Every tokeniser on the data of one seed of robot `which`; with another `jitter` than the usual, only FAST."""
    robot = ROBOTS[which]
    horizon = round(robot.hz * data.CHUNK_S)
    train, test = (
        data.chunks(
            robot.episodes(size, count, seed + added)
            if jitter is None
            else _body(size, count, robot.hz, jitter, seed + added),
            horizon,
            stride,
        )
        for count, added, stride in zip(
            robot.counts(size), (0, HELD_OUT), (max(1, horizon // robot.overlap), horizon), strict=True
        )
    )
    made = fitted(train, size.stages) if jitter is None else iter([(SEARCHED, searched(train, AIM))])
    found = {}
    for name, tokenizer in made:
        found[name] = _measured(tokenizer, test)
        sys.stderr.write(f"{robot.name}, {robot.hz} Hz, seed {seed}, jitter {jitter}: {name}: {found[name]}\n")
    return found


def _measured(tokenizer: ActionTokenizer, chunks: np.ndarray) -> TokenizerTrial:
    begun = time.perf_counter()
    tokens = tokenizer.encode_batch(chunks)
    between = time.perf_counter()
    for one in tokens:
        tokenizer.decode(one)
    ended = time.perf_counter()
    return TokenizerTrial(
        report(tokenizer, chunks),
        1e3 * (between - begun) / len(chunks),
        1e3 * (ended - between) / len(chunks),
        len(tokenizer.to_bytes()) / 1024,
        tokenizer.vocabulary,
    )


def _row(robot: TokenizedRobot, name: str, many: list[TokenizerTrial]) -> dict[str, Any]:
    reports = [one.report for one in many]
    return {
        "robot": robot.name,
        "dimensions": robot.dimensions,
        "Hz": robot.hz,
        "tokens by": name,
        "vocabulary": max(one.vocabulary for one in many),
        "tokens": interval([one.tokens_mean for one in reports]),
        "p99": max(one.tokens_p99 for one in reports),
        "longest": max(one.tokens_max for one in reports),
        "mean abs error, %": interval([100 * one.mean_abs for one in reports]),
        "rms, %": interval([100 * one.rms for one in reports]),
        "p99, %": interval([100 * one.p99 for one in reports]),
        "encode, ms": float(np.median([one.encode_ms for one in many])),
        "decode, ms": float(np.median([one.decode_ms for one in many])),
        "kB": float(np.median([one.kilobytes for one in many])),
    }


def _goals(robot: TokenizedRobot, name: str, many: list[TokenizerTrial]) -> list[Goal]:
    what = f"{robot.dimensions} dimensions at {robot.hz} Hz, {name}"
    longest = max(one.report.tokens_max for one in many)
    error = max(one.report.mean_abs for one in many)
    return [
        Goal(f"{what}: tokens of the longest chunk", longest, f"<= {GOAL_TOKENS}", longest <= GOAL_TOKENS),
        Goal(f"{what}: mean absolute error, % of range", 100 * error, "< 1", error < GOAL_ERROR),
    ]


def _jitters(found: dict[float, dict[str, list[TokenizerTrial]]]) -> list[dict[str, Any]]:
    rows = []
    for jitter, by in sorted(found.items()):
        reports = [one.report for one in by[SEARCHED]]
        rows.append(
            {
                "jitter, % of range": 100 * jitter,
                "tokens by": SEARCHED,
                "tokens": interval([one.tokens_mean for one in reports]),
                "longest": max(one.tokens_max for one in reports),
                "mean abs error, %": interval([100 * one.mean_abs for one in reports]),
                "rms, %": interval([100 * one.rms for one in reports]),
                "p99, %": interval([100 * one.p99 for one in reports]),
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(run("tokenizer", measure))
