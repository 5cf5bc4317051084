"""What late actions cost, and what each strategy saves: strategies x delays, on a target that moves and on push.

    python -m benchmarks.async_delay [--quick] [--keep DIR] [--json FILE] [--write]

`track` is a goal on a circle: an episode's score is the share of the time (after settling) that the hand is within 2 cm
of it. `push` is MetaWorld's push-v3 from object poses: the share of episodes that succeed. A delay of d control ticks
means that a chunk can be used d ticks after the observation it was asked with. Everything else is the fleet's own:
policy, learner, feed from a buffer on disk, schedules, simulated robots; only time is simulated.

Two checkpoints are trained for each task and seed, by imitation of the same demonstrations for the same number of
steps: `plain`, and `one for all`, with temporal offsets, committed prefixes and a corrector. `--keep` remembers what is
done in DIR, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from benchmarks.async_delay.statistics import bootstrap, shown, wilson
from benchmarks.async_delay.track import (
    EPISODE_TICKS,
    TRACK,
    TRACK_INSTRUCTION,
    TrackOperator,
    TrackRobot,
    track_motion,
    track_score,
    track_spec,
)
from benchmarks.common.table import Goal, Result, require_simulation, run
from cloud_learner.buffer.location import BufferLocation
from hal.drivers.metaworld.dynamics import HandMotion
from hal.drivers.metaworld.expert import MetaWorldExpert
from hal.drivers.metaworld.robot import MetaWorldConfig, MetaWorldRobot, metaworld_spec
from hal.drivers.metaworld.tasks import instruction
from hal.interfaces.dynamics import DynamicsModel
from wire.clock import Clock
from wire.types import RobotSpec

if TYPE_CHECKING:
    from benchmarks.async_delay.rollout import Stage

HELD_OUT = 3_000_000
MAX_OFFSET = 12
EXECUTE_TICKS = 8
HORIZON = 24
"""long enough to skip 12 late actions and still have the 12 that are executed until the next chunk is here"""
STRATEGIES = (
    ("sync", "plain"),
    ("naive", "plain"),
    ("aligned", "plain"),
    ("ensemble", "plain"),
    ("rtc_guided", "plain"),
    ("aligned", "one for all"),
    ("rtc_trained", "one for all"),
    ("future_state", "one for all"),
    ("residual", "one for all"),
)
TASKS = (TRACK, "push")


@dataclass(frozen=True, slots=True)
class AsyncDelaySize:
    """How much of everything, for one task."""

    task: str
    demonstrations: int
    gradient_steps: int
    episodes: int
    """held out, for each seed, strategy and delay"""
    max_ticks: int
    seeds: tuple[int, ...] = (0, 1, 2)
    delays: tuple[int, ...] = (0, 2, 4, 8, 12)

    @property
    def moving(self) -> bool:
        """Whether the target moves."""
        return self.task == TRACK

    @property
    def spec(self) -> RobotSpec:
        return track_spec() if self.moving else metaworld_spec(self._config)

    @property
    def motion(self) -> DynamicsModel:
        return track_motion() if self.moving else HandMotion(self.spec)

    @property
    def instruction(self) -> str:
        return TRACK_INSTRUCTION if self.moving else instruction(self.task)

    def robot(self, clock: Clock) -> MetaWorldRobot | TrackRobot:
        """Stamped by `clock`."""
        return TrackRobot(clock) if self.moving else MetaWorldRobot(self._config, clock)

    @property
    def _config(self) -> MetaWorldConfig:
        return MetaWorldConfig(tasks=(self.task,), observation="state")


FULL = (AsyncDelaySize(TRACK, 300, 4_000, 40, EPISODE_TICKS), AsyncDelaySize("push", 150, 4_000, 40, 200))
QUICK = (
    AsyncDelaySize(TRACK, 30, 300, 2, EPISODE_TICKS, (0,), (0, 4)),
    AsyncDelaySize("push", 10, 300, 2, 120, (0,), (0, 4)),
)


def measure(quick: bool, keep: Path | None = None) -> Result:
    """All cells, a process for each task and seed."""
    sizes = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
        root = keep or Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        # the seeds of both tasks in turn: a run that is stopped has some of everything
        work = sorted(((size, seed) for size in sizes for seed in size.seeds), key=lambda one: one[1])
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(len(work), os.cpu_count() or 1), mp_context=context) as pool:
            done = list(pool.map(_seed, *zip(*work, strict=True), [root] * len(work)))
        found = dict(zip(work, done, strict=True))
    tables = {size.task: _table(size, [found[size, seed] for seed in size.seeds]) for size in sizes}
    goals = [goal for size in sizes if size.moving for goal in _goals(size, found)]
    first, *others = sizes
    return Result(
        "Late actions: strategies and delays",
        [{"task": first.task, **row} for row in tables[first.task]],
        goals,
        _notes(sizes),
        {_title(size): tables[size.task] for size in others},
    )


def _title(size: AsyncDelaySize) -> str:
    return f"{size.task}: share of episodes that succeed"


def _table(size: AsyncDelaySize, runs: list[dict[str, list[float]]]) -> list[dict[str, Any]]:
    rows = []
    for strategy, checkpoint in STRATEGIES:
        row: dict[str, Any] = {"strategy": strategy, "checkpoint": checkpoint}
        for delay in size.delays:
            scores = np.array([one[_cell(strategy, checkpoint, delay)] for one in runs])
            interval = bootstrap(scores) if size.moving else wilson(int(scores.sum()), scores.size)
            row[f"delay {delay}"] = shown(float(scores.mean()), interval)
        rows.append(row)
    return rows


def _goals(size: AsyncDelaySize, found: dict[tuple[AsyncDelaySize, int], dict[str, list[float]]]) -> list[Goal]:
    """Of the moving target."""
    runs = [found[size, seed] for seed in size.seeds]

    def mean(row: tuple[str, str], delay: int) -> float:
        return float(np.mean([one[_cell(*row, delay)] for one in runs]))

    late = max(delay for delay in size.delays if delay <= 8)
    best = max(STRATEGIES, key=lambda one: mean(one, late))
    all_delays = [delay for delay in size.delays if delay <= 8]
    worst = {one: min(mean(one, delay) for delay in all_delays) for one in STRATEGIES}
    steady = max(STRATEGIES, key=lambda one: worst[one])
    return [
        Goal(
            f"moving target at delay {late}, best strategy ({best[0]}, {best[1]})",
            mean(best, late),
            "at least 0.95",
            mean(best, late) >= 0.95,
        ),
        Goal(
            f"moving target at every delay from 0 to {late}, one checkpoint and strategy ({steady[0]}, {steady[1]})",
            worst[steady],
            "at least 0.90",
            worst[steady] >= 0.90,
        ),
    ]


def _notes(sizes: tuple[AsyncDelaySize, ...]) -> list[str]:
    return [
        *(
            f"`{size.task}`: {len(size.seeds)} training seed(s), {size.episodes} held-out episodes for each seed and "
            f"cell, {size.demonstrations} demonstrations and {size.gradient_steps} gradient steps for each checkpoint."
            for size in sizes
        ),
        f"A chunk has {HORIZON} actions; {EXECUTE_TICKS} are executed before the next takes over, more when that is "
        "late. The forecast of the delay knows it from the first request on.",
        "In brackets 95 % intervals: for the moving target a bootstrap over seeds and then episodes, for push Wilson's "
        "over all episodes.",
    ]


# --- one seed of one task ---------------------------------------------------------------------------------------------


def _cell(strategy: str, checkpoint: str, delay: int) -> str:
    return f"{strategy}, {checkpoint}, {delay}"


def _seed(size: AsyncDelaySize, seed: int, root: Path) -> dict[str, list[float]]:
    """Scores of every episode by cell; what is already in `root` is not measured again."""
    import torch

    from benchmarks.async_delay.rollout import Stage

    torch.set_num_threads(1)
    home = root / f"{size.task}-{seed}"
    home.mkdir(exist_ok=True)
    keep_settings(home / "size.json", asdict(size))
    weights = {checkpoint: _checkpoint(size, seed, checkpoint, home) for checkpoint in ("plain", "one for all")}
    scores = home / "scores.json"
    found: dict[str, list[float]] = json.loads(scores.read_text()) if scores.exists() else {}
    stage = Stage(size.robot)
    try:
        for strategy, checkpoint in STRATEGIES:
            begun, before = time.monotonic(), len(found)
            for delay in size.delays:
                name = _cell(strategy, checkpoint, delay)
                if name not in found:
                    found[name] = evaluate(size, stage, weights[checkpoint], strategy, delay)
                    scores.write_text(json.dumps(found))
            if len(found) > before:
                means = ", ".join(f"{d}: {np.mean(found[_cell(strategy, checkpoint, d)]):.2f}" for d in size.delays)
                _say(size, seed, f"{strategy} ({checkpoint}) by delay {means}", begun)
    finally:
        stage.close()
    return found


def keep_settings(path: Path, settings: dict[str, Any]) -> None:
    """Refuse to go on in a folder where something was made in another way."""
    text = json.dumps(settings)
    if path.exists() and path.read_text() != text:
        raise SystemExit(f"{path} is of a run with other settings ({path.read_text()}); choose another --keep.")
    path.write_text(text)


def _checkpoint(size: AsyncDelaySize, seed: int, checkpoint: str, home: Path) -> bytes:
    from benchmarks.async_delay.data import demonstrate
    from benchmarks.async_delay.policy import Training, train
    from policies.flow.factory import state_network

    kept = home / f"{checkpoint.replace(' ', '-')}.safetensors"
    if kept.exists():
        return kept.read_bytes()
    spec = size.spec
    begun = time.monotonic()
    recorded = home / "demonstrations"
    if not (home / "recorded").exists():
        operator = TrackOperator if size.moving else MetaWorldExpert
        location = BufferLocation(recorded)
        demonstrate(location, size.robot, operator, size.demonstrations, size.max_ticks, 10_000 * seed)
        (home / "recorded").touch()
        _say(size, seed, f"{size.demonstrations} demonstrations", begun)
    begun = time.monotonic()
    offset = MAX_OFFSET if checkpoint == "one for all" else 0
    network = state_network(spec, horizon=HORIZON, max_offset=offset, prefix=offset > 0, residual=offset > 0)
    # One operator, who always does the same at the same place: error of an action 0.03 after 2,000 steps, with velocity
    # still 0.2 after 4,000.
    network = msgspec.structs.replace(network, predict="action")
    training = Training(size.gradient_steps)
    tasks = {size.task: size.instruction}
    weights = train(BufferLocation(recorded), spec, tasks, network, size.motion, training, seed)
    kept.write_bytes(weights)
    _say(size, seed, f"{size.gradient_steps} gradient steps ({checkpoint})", begun)
    return weights


def evaluate(size: AsyncDelaySize, stage: Stage, weights: bytes, strategy: str, delay: int) -> list[float]:
    """The score of each held-out episode. The same arguments give the same scores."""
    from benchmarks.async_delay.policy import policy_of
    from benchmarks.async_delay.rollout import AtOnce
    from robot_edge.chunking.config import ChunkingConfig
    from robot_edge.chunking.factory import make_scheduler
    from robot_edge.chunking.scheduler import DelayEstimator

    spec = size.spec
    policy = policy_of(weights, spec)
    scheduler = make_scheduler(
        ChunkingConfig(strategy, EXECUTE_TICKS),
        spec,
        policy.trained,
        size.motion,
        delay=DelayEstimator(first=delay),
    )
    scores = []
    for number in range(size.episodes):
        episode = stage.play(policy, AtOnce(policy), scheduler, size.task, HELD_OUT + number, size.max_ticks, delay)
        scores.append(track_score(list(episode.rewards)) if size.moving else float(episode.success))
    return scores


def _say(size: AsyncDelaySize, seed: int, what: str, begun: float) -> None:
    sys.stderr.write(f"{size.task}, seed {seed}: {what} ({time.monotonic() - begun:.0f} s)\n")
    sys.stderr.flush()


def main(arguments: list[str] | None = None) -> int:
    """See the head of this file."""
    require_simulation()
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--keep", type=Path)
    own, others = parser.parse_known_args(arguments)
    return run("async_delay", lambda quick: measure(quick, own.keep), others)


if __name__ == "__main__":
    # A spawned process finds what it is given by the name of its module, and `__main__` is another one there.
    from benchmarks.async_delay.__main__ import main as importable

    sys.exit(importable())
