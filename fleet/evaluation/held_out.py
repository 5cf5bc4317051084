"""How a policy does on scenes that nobody trained on, one episode after the other or in several processes.

An episode follows from its task, its seed and the weights alone: latency and the noise of the policy's chunks are drawn
from the episode's seed. So two policies meet the same scenes, and it does not matter which process has an episode.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from inspect import signature
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fleet.config.overrides import Overrides
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe
from fleet.config.weights_source import WeightsSource
from fleet.evaluation.evaluator import rollout
from fleet.evaluation.statistics import wilson
from hal.scheduler.episodes import HELD_OUT_SEEDS
from policies.interface.capabilities import Explores
from wire.errors import ConfigError, CorruptDataError, FleetError

if TYPE_CHECKING:
    from policies.interface.policy import LearnedPolicy
    from wire.types import ActionChunk, Latent, Observation, Prefix

_PR_SET_PDEATHSIG = 1
_MOST_SEED = 2**31 - 1


class MeasuredEpisode(msgspec.Struct, frozen=True):
    """What came of an episode."""

    task: str
    seed: int
    success: bool
    steps: int
    """control ticks it took"""


class SuccessRate(msgspec.Struct, frozen=True):
    """Of some episodes."""

    episodes: int
    successes: int
    low: float
    """95 % interval of the share of successes (Wilson)"""
    high: float
    steps: float | None
    """control ticks of an episode that succeeded, on average; None without one"""

    @property
    def share(self) -> float:
        return self.successes / self.episodes


@dataclass(frozen=True, slots=True)
class PolicyUnderTest:
    """What is measured, in words that another process understands."""

    source: WeightsSource
    recipe: str
    config: Path | None = None
    overrides: Overrides = field(default_factory=Overrides)
    """its policy among them, where that is not the recipe's"""
    sha256: str = ""
    """of the weights; '' for a policy's first ones"""
    version: int = 0

    def make_recipe(self) -> Recipe:
        """Raises `ConfigError`."""
        return self.overrides.applied(get_recipe(self.recipe, config=self.config))


def pin(under_test: PolicyUnderTest) -> PolicyUnderTest:
    """`under_test` with the weights it has now: its version's number and their hash. Raises as `WeightsSource.read`."""
    weights = under_test.source.read()
    if weights is None:
        return under_test
    source = under_test.source
    if weights.version:
        source = replace(source, version=str(weights.version))
    return replace(under_test, source=source, sha256=weights.sha256, version=weights.version)


def plan_episodes(recipe: Recipe, episodes: int) -> list[tuple[str, int]]:
    """(task, seed) of so many episodes of each task, the tasks in turn: every prefix of it is balanced.

    Raises `ConfigError` when there are not so many held-out seeds.
    """
    first = recipe.evaluator.final_first_seed
    if first + episodes > HELD_OUT_SEEDS.stop:
        raise ConfigError(f"--episodes {episodes}: from seed {first} on there are {HELD_OUT_SEEDS.stop - first}.")
    return [(task, first + number) for number in range(episodes) for task in recipe.measured_tasks]


def rate(outcomes: Iterable[MeasuredEpisode]) -> SuccessRate:
    """Of at least one episode."""
    found = list(outcomes)
    steps = [one.steps for one in found if one.success]
    low, high = wilson(len(steps), len(found))
    return SuccessRate(len(found), len(steps), low, high, sum(steps) / len(steps) if steps else None)


class HeldOutRunner:
    """Runs a policy's episodes in the recipe's simulator, in this process. Close it in the end."""

    def __init__(self, under_test: PolicyUnderTest) -> None:
        """Raises `ConfigError` for a recipe without a simulator or a policy that does not fit, `CorruptDataError` for
        weights that changed since they were pinned; and as `WeightsSource.read` and the policy's `load` do."""
        # the factories import all rooms, which who only names a policy does not need
        from fleet.launch.builders import limit_threads, simulated
        from fleet.launch.factories import scheduler_factory
        from hal.registry import make_robot
        from hal.safety.required import require_limits
        from robot_edge.chunking.scheduler import ChunkSchedulerSelector
        from wire.clock import SimulatedClock

        limit_threads()
        self._recipe = recipe = simulated(under_test.make_recipe())
        recipe.require_one_shape("what is measured")
        policy = recipe.make_policy(recipe.spec, 0)
        weights = under_test.source.read()
        if weights is not None:
            if under_test.sha256 not in ("", weights.sha256):
                raise CorruptDataError(f"{under_test.source} changed meanwhile. Measure it again.")
            policy.load(weights.data, weights.version)
        if isinstance(policy, Explores):
            policy.stop_exploring()
        self._policy = _SeededPolicy(policy)
        chunks = ChunkSchedulerSelector(scheduler_factory(recipe))
        chunks.select(policy.trained)
        if chunks.refused:
            raise ConfigError(chunks.refused)
        self._scheduler = chunks.scheduler
        self._clock = SimulatedClock()
        self._robot = make_robot(recipe.robot, recipe.unpaced_config, self._clock)
        require_limits(self._robot, recipe.loop.safety)
        self._robot.connect()

    def run(self, task: str, seed: int) -> MeasuredEpisode:
        """One episode."""
        from fleet.launch.factories import make_conditions

        self._policy.begin(seed)
        conditions = make_conditions(self._recipe, self._clock, seed)
        ticks = self._recipe.evaluator.max_ticks
        done = rollout(self._robot, self._policy, self._scheduler, task, seed, ticks, conditions)
        return MeasuredEpisode(task, seed, done.success, done.steps)

    def close(self) -> None:
        self._robot.close()


class _SeededPolicy:
    """A policy whose chunks' noise follows from the episode's seed. One whose `act` takes no seed draws as it does."""

    def __init__(self, policy: LearnedPolicy) -> None:
        self._policy: Any = policy
        self._takes_seed = "seed" in signature(policy.act).parameters
        self._noise = np.random.default_rng(0)

    def begin(self, seed: int) -> None:
        self._noise = np.random.default_rng(seed)

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        if not self._takes_seed:
            return self._policy.act(observation, latent, tick, prefix)
        seed = int(self._noise.integers(1, _MOST_SEED))
        return self._policy.act(observation, latent, tick, prefix, seed=seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


# --- several processes ------------------------------------------------------------------------------------------------


def measure(
    under_test: PolicyUnderTest, episodes: Sequence[tuple[str, int]], processes: int = 1
) -> Iterator[MeasuredEpisode]:
    """The outcome of each episode, in no particular order. Raises what `HeldOutRunner` raises."""
    if processes == 1:
        with contextlib.closing(HeldOutRunner(under_test)) as runner:
            for task, seed in episodes:
                yield runner.run(task, seed)
        return
    workers = min(processes, len(episodes))
    # Spawned: a fork of a process with torch in it may hang, or have a GPU that it cannot use.
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin, (under_test,)) as pool:
        try:
            for done in as_completed([pool.submit(_run, task, seed) for task, seed in episodes]):
                yield done.result()
        except BrokenProcessPool as error:
            raise FleetError(
                "a process that measured was killed. Give it less memory to share: --processes 1."
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_runner: list[HeldOutRunner] = []
"""of a worker"""
_under_test: list[PolicyUnderTest] = []


def _begin(under_test: PolicyUnderTest) -> None:
    # Who started it says when it ends: Ctrl-C reaches all of them, and a kill only the first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _under_test.append(under_test)


def _run(task: str, seed: int) -> MeasuredEpisode:
    # Made here rather than at the beginning: what it raises is told as it is.
    if not _runner:
        _runner.append(HeldOutRunner(_under_test[0]))
    return _runner[0].run(task, seed)
