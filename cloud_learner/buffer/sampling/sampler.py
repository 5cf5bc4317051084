"""Which steps make up each batch, and which segments must lie in memory for it: pure functions of seed and ledger.

`Sampler.next` answers with plans in order. Whoever carries one out lets its `drop` leave memory, has its `load` enter
it, and gathers the batch.

The due probability of a step is (share of its stratum) * (its weight) / (weights of the stratum); a part `recent.share`
of every task's draws goes to its newest steps instead, by weight. A stratum is the online or the offline part of a
task. Each gets its draws to within a draw or two over any number of batches (`apportion`), and its part of the bytes.
Where all of it fits, every draw is independent, from the first batch on; what is drawn is loaded and stays. Where it
does not, `sweep` draws from segments that come and go. What came since a sweep's epoch began is held beside it and
drawn independently until it joins; so new data has its share at once, and what is in memory stays when one way becomes
the other.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.eligible import Cost, EligibleSteps
from cloud_learner.buffer.sampling.memory import LoadedSegments
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.shares import Losses, allot, apportion, strata_shares
from cloud_learner.buffer.sampling.stratum import Stratum, StratumState
from cloud_learner.buffer.sampling.target import SamplingDistribution
from cloud_learner.buffer.sampling.visit import generator
from wire.errors import ConfigError, InvalidDataError, suggest

log = logging.getLogger(__name__)
_MOST_ECHO = 100.0
_TINY = 1e-300


class BatchPlan(msgspec.Struct, frozen=True, eq=False):
    """One batch: what leaves memory, what enters it, what is drawn."""

    number: int
    """0, 1, 2, ..."""
    drop: np.ndarray
    """int64 segment numbers that leave memory before `load` enters it"""
    load: np.ndarray
    """int64 segment numbers that must enter memory before the batch is gathered, growing"""
    segments: np.ndarray
    """int64[b] segment numbers"""
    offsets: np.ndarray
    """int64[b] step within its segment"""
    probability: np.ndarray
    """float64[b] of each step, by the target"""
    newest_version: int
    """as of when weights were taken"""


class SamplerStats(msgspec.Struct, frozen=True):
    """What a sampler is doing."""

    eligible_steps: int
    """that may begin a window, base data aside"""
    loaded_bytes: int
    """by `cost`, after the last plan"""
    whole_strata: int
    """(task, online or not) pairs that fit and are drawn independently"""
    sweeping_strata: int
    epochs: int
    """begun so far, over all strata"""
    repeated: int
    """draws that had to repeat a step of their batch because the budget had no room for the next block"""
    rollout_steps: int
    """that there are: what the policy did by itself"""
    stale_steps: int
    """of those: arrived later than the target's `staleness` allows"""


class SamplerState(msgspec.Struct, frozen=True):
    """What `restore` needs. Rows and versions, but no segment numbers."""

    settings: dict[str, Any]
    """with which the same plans follow"""
    number: int
    watermark: int
    newest_version: int
    content: int
    """checksum of the ledger rows and of whom they were dealt to"""
    labels: int
    """checksum of the labels that weights were taken with"""
    credit: list[list[float]]
    losses: dict[str, list[list[float]]]
    strata: list[StratumState]
    repeated: int
    echo: float


class Sampler:
    """Plans batches over one index. Not for several threads at once."""

    def __init__(
        self,
        index: SegmentIndex,
        target: SamplingDistribution,
        cost: Cost,
        budget_bytes: int,
        batch: int,
        seed: int,
        echo: float = 1.0,
        newest_version: int = 0,
    ) -> None:
        """Sees what is in `index` now; what is added later counts from the next `refresh`.

        `echo`: how often a step is drawn, on average, while its block is held. Raises `ConfigError` for settings that
        cannot work, also if `budget_bytes` is too small for the largest segments.
        """
        if batch < 1 or seed < 0 or not 1 <= echo <= _MOST_ECHO:
            raise ConfigError(
                f"sampler: batch {batch} must be positive, seed {seed} not negative, echo {echo} 1 to {_MOST_ECHO:.0f}."
            )
        for task in target.mix.shares or ():
            if task not in index.tasks:
                raise ConfigError(
                    f"sampler: the mix names task '{task}', which is none of {index.tasks}.{suggest(task, index.tasks)}"
                )
        self._index, self._target, self._cost = index, target, cost
        self._budget, self._batch, self._seed, self.echo = budget_bytes, batch, seed, echo
        adaptive = target.mix.follows_losses
        self._losses = Losses(adaptive) if adaptive is not None else None
        self._number = self._repeated = 0
        self._reset()
        self.refresh(newest_version)

    def _reset(self) -> None:
        self._memory = LoadedSegments()
        self._known = EligibleSteps(self._index, self._target, self._cost)
        self._strata = [
            Stratum(number, self._known, self._memory, self._seed) for number in range(2 * len(self._index.tasks))
        ]
        """number 2 * task + online"""
        self._mass: np.ndarray = np.zeros((len(self._index.tasks), 2))
        self._credit: np.ndarray = np.zeros((2 * len(self._index.tasks), 3))
        self._refused = False
        """whether what the last refresh found does not fit"""

    # --- between batches ------------------------------------------------------------------------------------------

    def refresh(self, newest_version: int) -> None:
        """Between two batches: take in what the index added and forgot, and the newest policy version.

        Raises `ConfigError` if the budget is too small for what came; so does `next` then, until a refresh does not.
        """
        self._refused = True
        self._look(self._index.watermark, newest_version)
        shares = self._usual_shares()
        recent_bytes = self._find_recent(shares > 0)
        active = np.flatnonzero(shares.ravel() > 0).tolist()
        allotted = dict(zip(active, self._allot(shares.ravel()[active], active, recent_bytes).tolist(), strict=True))
        for number, stratum in enumerate(self._strata):
            if number in allotted:
                stratum.refresh(allotted[number], self.echo)
            else:
                stratum.clear()
        self._refused = False

    def note(self, task: str, online: bool, loss: float) -> None:
        """A loss of one update on that part of the data, for a mix that follows losses; others have no use for it.

        Raises `InvalidDataError` for a loss that is no number.
        """
        if self._losses:
            self._losses.note(task, online, loss)

    def _look(self, watermark: int, newest_version: int) -> None:
        came, changed = self._known.look(watermark, newest_version)
        self._memory.grow(self._known.segments)
        of_came, of_changed = (self._known.strata(self._index.run_segment[runs]) for runs in (came, changed))
        for number, stratum in enumerate(self._strata):
            stratum.look(came[of_came == number], changed[of_changed == number])
        self._mass = np.array([stratum.mass for stratum in self._strata]).reshape(-1, 2)

    def _usual_shares(self) -> np.ndarray:
        """float64[tasks, 2] of the strata, an adaptive online share counted as 0.5: what memory is divided by."""
        return strata_shares(self._target.mix, self._index.tasks, self._mass, None)

    def _find_recent(self, drawn: np.ndarray) -> int:
        """Hold the newest steps of each task, of the strata bool[tasks, 2] that are drawn from; bytes of them."""
        recent, used = self._target.recent, 0
        for task, here in enumerate(drawn):
            first = np.full(2, self._known.segments)
            if recent.share and here.any():
                found = [self._strata[2 * task + part].newest(recent.newest) for part in np.flatnonzero(here)]
                runs = np.sort(np.concatenate(found))[::-1]
                enough = np.cumsum(self._index.run_count[runs], dtype=np.int64).searchsorted(recent.newest)
                first[here] = self._index.run_segment[runs[min(int(enough), len(runs) - 1)]]
            used += sum(self._strata[2 * task + part].prefer(int(first[part])) for part in (0, 1))
        return used

    def _allot(self, shares: np.ndarray, active: list[int], recent_bytes: int) -> np.ndarray:
        """int64[active] bytes for each stratum. What is recent lies in its stratum, if that is whole."""
        need = np.array([self._strata[number].bytes for number in active], np.int64)
        if need.sum() <= self._budget:
            return need
        least = np.array([self._strata[number].largest for number in active], np.int64)
        allotted = allot(self._budget - recent_bytes, shares, least, need)
        if allotted is None:
            raise ConfigError(
                f"sampler: a memory of {self._budget} bytes does not hold the largest segment of each part of the data"
                f"{' and the newest steps' if recent_bytes else ''}. Set cache_bytes to at least "
                f"{int(least.sum()) + recent_bytes}, several times that to mix well."
            )
        return allotted

    # --- batches --------------------------------------------------------------------------------------------------

    def next(self) -> BatchPlan:
        """The next batch. Raises `InvalidDataError` while there is no step to learn from."""
        if self._refused:
            self.refresh(self._known.newest_version)
        shares = strata_shares(self._target.mix, self._index.tasks, self._mass, self._losses)
        if not shares.any():
            raise InvalidDataError(f"there is no step to learn from yet: {self.why_nothing()}")
        for stratum in self._strata:
            stratum.start_batch(self.echo)
        parts, each = self._parts(shares)
        draws, credit = apportion(self._batch, parts.ravel(), self._credit.ravel())
        self._credit = credit.reshape(parts.shape)
        rng = generator(self._seed, 1, self._number)
        runs, offsets = self._draw(draws.reshape(parts.shape), rng)
        order = rng.permutation(self._batch)
        segments = self._index.run_segment[runs[order]]
        drop, load = self._memory.settle(segments, self._known.cost, self._drawable)
        self._number += 1
        probability = self._probability(runs[order], each)
        newest = self._known.newest_version
        return BatchPlan(self._number - 1, drop, load, segments, offsets[order], probability, newest)

    def _drawable(self, segments: np.ndarray) -> np.ndarray:
        """bool[k]: whether independent draws may come to each of int64[k] growing segments."""
        first = np.array([min(stratum.joined, stratum.recent) for stratum in self._strata])
        return (segments >= first[self._known.strata(segments)]) & self._known.may_be_drawn(segments)

    def _parts(self, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Probability of the steps of each stratum that are swept, held, or recent, from float64[tasks, 2] `shares`.

        Twice float64[strata, 3]: of all of these, and of each by unit of its weight.
        """
        masses = np.array([stratum.masses() for stratum in self._strata])
        newest = masses[:, 2].reshape(-1, 2).sum(1).repeat(2)
        recent = self._target.recent.share * (newest > 0)
        usual = shares.ravel() * (1 - recent) / np.maximum(masses[:, :2].sum(1), _TINY)
        of_recent = recent * shares.sum(1).repeat(2) / np.maximum(newest, _TINY)
        each = np.stack([usual, usual, of_recent], 1)
        total = (masses * each).sum()
        return masses * each / total, each / total

    def _probability(self, runs: np.ndarray, each: np.ndarray) -> np.ndarray:
        """float64[k] of drawing one step of each of int64[k] runs: what is due, whatever is held now."""
        segments = self._index.run_segment[runs]
        number = self._known.strata(segments)
        recent = segments >= np.array([stratum.recent for stratum in self._strata])[number]
        return self._known.weight[runs] * (each[number, 0] + each[number, 2] * recent)

    def _draw(self, draws: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64[batch] from int64[strata, 3] draws."""
        found: list[tuple[np.ndarray, np.ndarray]] = []
        # what is held first: it may join an epoch that begins with this batch
        for kind, (number, stratum) in itertools.product((2, 1, 0), enumerate(self._strata)):
            if count := int(draws[number, kind]):
                if kind == 0 and stratum.sweep:
                    found.append(stratum.sweep.draw(count, rng))
                else:
                    first = stratum.recent if kind == 2 else stratum.joined
                    found.append(stratum.draw_since(first, count, rng))
        runs, offsets = (np.concatenate(columns) for columns in zip(*found, strict=True))
        if not len(runs):
            raise InvalidDataError(
                "there is no step to learn from in memory, and no room for the next; raise cache_bytes."
            )
        missing = self._batch - len(runs)
        self._repeated += missing
        again = rng.integers(0, len(runs), missing)
        return np.append(runs, runs[again]), np.append(offsets, offsets[again])

    def why_nothing(self) -> str:
        """Why no step may be drawn, when none may, and what to do about it."""
        tasks, known = self._index.tasks, self._known
        here = int((~self._index.gone[: known.segments]).sum())
        if not here:
            return (
                f"no segment of {tasks} is in the buffer. Record a demonstration, or let a robot work on one of these "
                "tasks."
            )
        if not self._mass.any():
            return (
                f"the target gives no weight to any of {here} segments at policy version {known.newest_version}. "
                "Record a demonstration, take a robot over, or allow data of older versions."
            )
        some = ", ".join(stratum.name for stratum in self._strata if stratum.steps)
        return f"the mix gives no share to {some}, the only data there is. Change the shares, or record other data."

    # --- going on later, and looking in ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON-able: everything that `restore` needs to go on with the plan after the last one."""
        state = SamplerState(
            settings=self._settings(),
            number=self._number,
            watermark=self._known.watermark,
            newest_version=self._known.newest_version,
            content=self._known.content,
            labels=self._known.labels,
            credit=self._credit.tolist(),
            losses=self._losses.state() if self._losses else {},
            strata=[stratum.state() for stratum in self._strata],
            repeated=self._repeated,
            echo=self.echo,
        )
        return msgspec.to_builtins(state)

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Go on where `state` was taken, on an index that holds at least what it held then; on a fresh sampler.

        What must be in memory is loaded again as it is drawn; all else is what the other sampler would have planned.
        False if that cannot be, since segments were pruned, or settings or labels changed meanwhile: then it goes on
        with new epochs. Raises `InvalidDataError` for what is no state of a sampler.
        """
        if self._number:
            raise InvalidDataError("sampler: a state can only be restored before the first plan; make a new one.")
        try:
            then = msgspec.convert(dict(state), SamplerState)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise InvalidDataError(f"sampler: this is no state of a sampler, {error}; begin without it.") from error
        self._reset()
        self._number, self._repeated, self.echo = then.number, then.repeated, then.echo
        if self._losses:
            self._losses.restore(then.losses)
        self._look(then.watermark, then.newest_version)
        now = self._settings(), self._known.content, self._known.labels
        if (then.settings, then.content, then.labels) != now:
            log.warning("sampler: settings, data or labels changed since its state was taken; it begins new epochs.")
            if then.settings["tasks"] == list(self._index.tasks):
                for stratum, was in zip(self._strata, then.strata, strict=True):
                    stratum.epochs = was.epochs
            self.refresh(then.newest_version)
            return False
        self._credit = np.array(then.credit)
        self._find_recent(self._usual_shares() > 0)
        for stratum, was in zip(self._strata, then.strata, strict=True):
            stratum.restore(was)
        return True

    def _settings(self) -> dict[str, Any]:
        return {
            "tasks": list(self._index.tasks),
            "budget": self._budget,
            "batch": self._batch,
            "seed": self._seed,
            "staleness": [bound.max_lag, bound.weight] if (bound := self._target.staleness) else None,
        }

    @property
    def stats(self) -> SamplerStats:
        return SamplerStats(
            eligible_steps=sum(
                stratum.steps
                for number, stratum in enumerate(self._strata)
                if self._index.tasks[number // 2] not in self._target.mix.base
            ),
            loaded_bytes=self._memory.bytes,
            whole_strata=sum(stratum.sweep is None and stratum.masses()[1] > 0 for stratum in self._strata),
            sweeping_strata=sum(stratum.sweep is not None for stratum in self._strata),
            epochs=sum(stratum.epochs for stratum in self._strata),
            repeated=self._repeated,
            rollout_steps=self._known.rollouts,
            stale_steps=self._known.stale,
        )
