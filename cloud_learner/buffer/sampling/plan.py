"""Which steps make up each batch, and which segments must lie in memory for it.

`SamplingPlanner.next()` answers with plans in order. For plan k the reader, in this order, may drop `drop`, must have
`admit` in memory, gathers the batch, and may then drop `release`. A block is a tuple of segment numbers that enters and
leaves as it is; a segment may be in several blocks that are held at once, so a reader counts how many holders a segment
has.

The target probability of a step is (share of its stratum) * (its weight) / (weights of the stratum), and a part
`recent.share` of every task's draws goes to its newest steps instead, by weight. Strata get their draws to within a
draw or two over any number of batches (`budget.apportion`); within a stratum `windowed_shuffle.py` states
the bound.
"""

from __future__ import annotations

import itertools
import logging
import math
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.budget import allot, apportion
from cloud_learner.buffer.sampling.cache_ops import CacheOps, CacheUsage
from cloud_learner.buffer.sampling.epoch import Block, generator
from cloud_learner.buffer.sampling.recent import RecentSampler
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.snapshot import Cost, SamplingSnapshot
from cloud_learner.buffer.sampling.stratum import FILLING, RESIDENT, SWEEPING, Stratum, StratumState
from cloud_learner.buffer.sampling.target import Losses, OnlineShare, SamplingDistribution, strata_shares
from wire.errors import ConfigError, InvalidDataError, suggest

__all__ = ["Block", "Cost", "PlannerStats", "SamplingPlan", "SamplingPlanner"]

log = logging.getLogger(__name__)
_FORMAT = 1
_SLACK = 1.1
"""a sweeping stratum becomes whole again when so many times what it needs fits"""


class SamplingPlan(msgspec.Struct, frozen=True, eq=False):
    """One batch."""

    number: int
    """0, 1, 2, ..."""
    drop: tuple[Block, ...]
    """may leave memory before `admit` enters it: superfluous since a refresh or rebuild (mostly empty)"""
    admit: tuple[Block, ...]
    """must be in memory before the batch is gathered; in order of need"""
    segments: np.ndarray
    """int64[b] segment numbers"""
    offsets: np.ndarray
    """int64[b] step within its segment"""
    release: tuple[Block, ...]
    """may leave memory after the batch was gathered; each was admitted before, by this or an earlier plan"""


class PlannerStats(msgspec.Struct, frozen=True):
    """What the planner is doing."""

    eligible_steps: int
    """that may begin a window"""
    admitted_bytes: int
    """by `cost`, each segment once, after the last plan"""
    resident_strata: int
    """(task, online or not) pairs that lie in memory whole, or are on the way to it"""
    sweeping_strata: int
    passes: int
    """begun so far, over all strata"""
    late_segments: int
    """in memory because they came after the pass began"""
    repeated: int
    """draws that had to repeat a step of their batch because the budget had no room for the next block"""


class _State(msgspec.Struct, frozen=True):
    """What `restore` needs. Rows and versions, but no segment numbers."""

    format: int
    settings: dict[str, Any]
    """with which the same plans follow"""
    number: int
    watermark: int
    newest_version: int
    content: int
    """checksum of the ledger rows"""
    credit: list[list[float]]
    losses: dict[str, list[list[float]]]
    strata: list[StratumState]
    repeated: int


class SamplingPlanner:
    """Plans batches over one universe. Not for several threads at once."""

    def __init__(
        self,
        universe: SegmentIndex,
        target: SamplingDistribution,
        cost: Cost,
        budget_bytes: int,
        batch: int,
        seed: int,
        echo: float = 8.0,
        newest_version: int = 0,
    ) -> None:
        """Sees what is in `universe` now; what is added later counts from the next `refresh`.

        `echo`: how often a step is drawn, on average, while its block is in memory. Raises `ConfigError` for settings
        that cannot work, also if `budget_bytes` is too small for the largest segments.
        """
        if batch < 1 or seed < 0 or not 0 < echo < math.inf:
            raise ConfigError(f"planner: batch {batch} and echo {echo} must be positive, seed {seed} not negative.")
        for task in target.mix.shares or ():
            if task not in universe.tasks:
                raise ConfigError(
                    f"planner: the mix names task '{task}', which is none of {universe.tasks}."
                    f"{suggest(task, universe.tasks)}"
                )
        self._universe, self._target, self._cost = universe, target, cost
        self._budget, self._batch, self._seed, self._echo = budget_bytes, batch, seed, echo
        adaptive = target.mix.online
        self._losses = Losses(adaptive) if isinstance(adaptive, OnlineShare) else None
        self._number = self._repeated = 0
        self._reset()
        self.refresh(newest_version)

    def _reset(self) -> None:
        self._moves = CacheOps()
        self._scope = SamplingSnapshot(self._universe, self._target, self._cost, self._batch, self._echo, self._seed)
        self._strata = [Stratum(self._scope, number, self._moves) for number in range(self._scope.strata)]
        self._newest = RecentSampler(self._scope, self._target.recent, self._moves)
        self._mass: np.ndarray = np.zeros((len(self._universe.tasks), 2))
        self._credit: np.ndarray = np.zeros((len(self._universe.tasks), 5))
        self._memory = CacheUsage()
        self._content: int | None = None

    # --- between batches ------------------------------------------------------------------------------------------

    def refresh(self, newest_version: int) -> None:
        """Between two batches: take in what `universe.extend` added, and the newest policy version.

        Raises `ConfigError` if the budget is too small for what came.
        """
        self._look(self._universe.watermark, newest_version)
        shares = self._usual_shares().ravel()
        active = np.flatnonzero(shares > 0).tolist()
        need = np.array([self._strata[number].need() for number in active], np.int64)
        slack = np.array([_SLACK if self._strata[number].mode == SWEEPING else 1.0 for number in active])
        most = np.ceil(need * slack).astype(np.int64)
        recent_bytes = self._newest.find(self._usual_shares() > 0)
        allotted = self._allot(shares[active], most, active, recent_bytes)
        self._newest.hold()
        for number, stratum in enumerate(self._strata):
            if number not in active and stratum.mode:
                stratum.clear()
        for position, number in enumerate(active):
            self._strata[number].refresh(int(allotted[position]), whole=bool(allotted[position] >= most[position]))

    def rebuild(self, newest_version: int) -> None:
        """Between two batches, after `universe.rebuild`: like `refresh`, but every pass begins again."""
        for stratum in self._strata:
            if stratum.mode:
                stratum.clear()
        self.refresh(newest_version)

    def note(self, task: str, online: bool, loss: float) -> None:
        """A loss of one update on that part of the data, for `OnlineShare`; other mixes have no use for it.

        Raises `InvalidDataError` for a loss that is no number.
        """
        if self._losses:
            self._losses.note(task, online, loss)

    def _look(self, watermark: int, newest_version: int) -> None:
        scope = self._scope
        scope.look(watermark, newest_version)
        self._mass = np.array([view.choice.mass() for view in scope.views]).reshape(-1, 2)
        self._memory.grow(scope.segments)
        self._content = None

    def _usual_shares(self) -> np.ndarray:
        """float64[tasks, 2] of the strata, an adaptive online share counted as 0.5: what memory is divided by."""
        return strata_shares(self._target.mix, self._universe.tasks, self._mass, None)

    def _allot(self, shares: np.ndarray, most: np.ndarray, active: list[int], recent_bytes: int) -> np.ndarray:
        """int64[active] bytes for each stratum. What is recent lies in its stratum, if that is whole."""
        if most.sum() <= self._budget:
            return most
        least = np.array([self._scope.views[number].largest for number in active], np.int64)
        allotted = allot(self._budget - recent_bytes, shares, least, most)
        if allotted is None:
            raise ConfigError(
                f"planner: a memory of {self._budget} bytes does not hold the largest segment of each part of the data"
                f"{' and the newest steps' if recent_bytes else ''}. Set cache_bytes to at least "
                f"{int(least.sum()) + recent_bytes}, several times that to mix well."
            )
        return allotted

    # --- batches --------------------------------------------------------------------------------------------------

    def next(self) -> SamplingPlan:
        """The next batch. Raises `InvalidDataError` while there is no step to learn from."""
        mix, tasks = self._target.mix, self._universe.tasks
        shares = strata_shares(mix, tasks, self._mass, self._losses)
        if not shares.any():
            raise InvalidDataError(f"there is no step to learn from yet: {self._scope.why_nothing()}")
        for stratum in self._strata:
            if stratum.mode:
                stratum.start_batch()
        parts = self._parts(shares)
        draws, credit = apportion(self._batch, parts.ravel(), self._credit.ravel())
        self._credit = credit.reshape(parts.shape)
        rng = generator(self._seed, 1, self._number)
        runs, offsets = self._draw(draws.reshape(parts.shape), rng)
        order = np.argsort(rng.random(self._batch), kind="stable")
        self._moves.settle()
        plan = SamplingPlan(
            number=self._number,
            drop=tuple(sorted(self._moves.drop)),
            admit=tuple(self._moves.admit),
            segments=self._universe.run_segment[runs[order]],
            offsets=offsets[order],
            release=tuple(sorted(self._moves.release)),
        )
        for blocks, holders in ((plan.drop, -1), (plan.admit, 1), (plan.release, -1)):
            self._memory.count(blocks, holders, self._scope.cost)
        self._moves.clear()
        self._number += 1
        return plan

    def _parts(self, shares: np.ndarray) -> np.ndarray:
        """float64[tasks, 5] probability of: the newest steps, offline (not late, late), online (not late, late)."""
        parts = np.zeros((len(shares), 5))
        for number in np.flatnonzero(shares).tolist():
            task, online = divmod(number, 2)
            masses = np.array(self._strata[number].masses())
            parts[task, 1 + 2 * online : 3 + 2 * online] = shares[task, online] * masses / (masses.sum() or 1.0)
            if self._newest.choice(task) is not None:
                parts[task, 0] += shares[task, online] * self._target.recent.share
                parts[task, 1 + 2 * online : 3 + 2 * online] *= 1 - self._target.recent.share
        return parts / parts.sum()

    def _draw(self, draws: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64[batch] from int64[tasks, 5] draws."""
        found: list[tuple[np.ndarray, np.ndarray]] = []
        missing = 0
        # what is late first: it may join a pass that begins with this batch
        for part, task in itertools.product((0, 2, 4, 1, 3), range(len(draws))):
            if not (count := int(draws[task, part])):
                continue
            if part == 0:
                choice = self._newest.choice(task)
                assert choice is not None
                found.append(choice.draw(count, rng))
                continue
            stratum = self._strata[2 * task + (part - 1) // 2]
            got = stratum.take_late(count, rng) if part in (2, 4) else stratum.take(count, rng)
            if short := count - len(got[0]):
                self._repeated += short
                again = rng.integers(0, max(1, len(got[0])), short if len(got[0]) else 0)
                missing += short - len(again)
                got = np.append(got[0], got[0][again]), np.append(got[1], got[1][again])
            found.append(got)
        runs, offsets = (np.concatenate(columns) for columns in zip(*found, strict=True))
        if missing:
            if not len(runs):
                raise InvalidDataError(
                    "there is no step to learn from in memory, and no room for the next; raise cache_bytes."
                )
            again = rng.integers(0, len(runs), missing)
            runs, offsets = np.append(runs, runs[again]), np.append(offsets, offsets[again])
        return runs, offsets

    # --- going on later, and looking in ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON-able: everything that `restore` needs to go on with the plan after the last one."""
        strata = [stratum.state() for stratum in self._strata]
        losses = self._losses.state() if self._losses else {}
        state = _State(
            format=_FORMAT,
            settings=self._settings(),
            number=self._number,
            watermark=self._scope.watermark,
            newest_version=self._scope.newest_version,
            content=self._checksum(),
            credit=self._credit.tolist(),
            losses=losses,
            strata=strata,
            repeated=self._repeated,
        )
        return msgspec.to_builtins(state)

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Go on where `state` was taken, on a universe that holds at least what it held then; on a fresh Planner.

        The first plan drops nothing and admits again all that must be in memory; all else is what the other planner
        would have planned. False if that cannot be, since segments were pruned or settings changed meanwhile: then it
        goes on with new passes. Raises `InvalidDataError` for what is no state of a planner.
        """
        if self._number:
            raise InvalidDataError("planner: a state can only be restored before the first plan; make a new Planner.")
        try:
            known = msgspec.convert(dict(state), _State)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise InvalidDataError(f"planner: this is no state of a planner, {error}; begin without it.") from error
        if known.format != _FORMAT:
            raise InvalidDataError(f"planner: a state of format {known.format}, not {_FORMAT}; begin without it.")
        self._reset()
        self._number, self._repeated = known.number, known.repeated
        if self._losses:
            self._losses.restore(known.losses)
        self._look(known.watermark, known.newest_version)
        if known.settings != self._settings() or known.content != self._checksum():
            log.warning(
                "planner: settings or data changed since its state was taken; sampling goes on with new passes."
            )
            if known.settings["tasks"] == list(self._universe.tasks):
                for stratum, then in zip(self._strata, known.strata, strict=True):
                    stratum.passes = then.passes
            self.refresh(known.newest_version)
            return False
        self._credit = np.array(known.credit)
        self._newest.find(self._usual_shares() > 0)
        self._newest.hold()
        for stratum, then in zip(self._strata, known.strata, strict=True):
            stratum.restore(then)
        return True

    def _settings(self) -> dict[str, Any]:
        return {
            "tasks": list(self._universe.tasks),
            "ranks": [self._universe.rank, self._universe.world],
            "budget": self._budget,
            "batch": self._batch,
            "seed": self._seed,
            "echo": self._echo,
        }

    def _checksum(self) -> int:
        """Of the ledger rows in scope."""
        if self._content is None:
            here = ~self._universe.gone[: self._scope.segments]
            self._content = zlib.crc32(self._universe.row[: self._scope.segments][here].tobytes())
        return self._content

    @property
    def stats(self) -> PlannerStats:
        modes = [stratum.mode for stratum in self._strata]
        return PlannerStats(
            eligible_steps=sum(view.steps for view in self._scope.views),
            admitted_bytes=self._memory.bytes,
            resident_strata=modes.count(RESIDENT) + modes.count(FILLING),
            sweeping_strata=modes.count(SWEEPING),
            passes=sum(stratum.passes for stratum in self._strata),
            late_segments=sum(stratum.late_segments for stratum in self._strata),
            repeated=self._repeated,
        )

    def probabilities(self) -> np.ndarray:
        """float64[runs]: the target probability that a draw is one given eligible step of each run in scope.

        As of the last refresh; times `run_count` it sums to 1, but for the runs that the newest steps begin within.
        """
        scope, recent = self._scope, self._target.recent
        shares = strata_shares(self._target.mix, self._universe.tasks, self._mass, self._losses)
        found = np.zeros(len(scope.weight))
        for number in range(scope.strata):
            task, online = divmod(number, 2)
            runs = scope.views[number].runs
            choice = self._newest.choice(task)
            part = shares[task, online] * (1 - recent.share if choice is not None else 1.0)
            if len(runs):
                found[runs] += part * scope.weight[runs] / self._mass[task, online]
            if choice is not None and online:
                found[choice.runs] += recent.share * shares[task].sum() * scope.weight[choice.runs] / choice.mass()
        return found
