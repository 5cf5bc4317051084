"""A slow eye and a fast hand: what is left of a policy when looking takes a second.

    python -m benchmarks.fast_slow [--quick] [--keep DIR] [--json FILE] [--write]

MetaWorld's drawer, button, window and door from a 64x64 camera, with 80 control ticks a second. Where things stand
changes little while the hand moves; where the hand is changes at every tick: so the slow path (images and words) may be
slow if the fast one (the hand, the newest latent and its age) is not. The slow path is made to take 1, 1/2 or 1/5 s for
each thought, one after the other.

- `fast and slow`: the fast path makes a chunk every eight ticks, from the newest latent there is.
- `single rate`: the same network without ages, trained as long on the same demonstrations, has to think before each
  act. Its robot executes a chunk to the end, then stands and waits for the next.

Both wait for their first thought, and their time runs meanwhile. Time is simulated, except for what an act really
takes, which is measured.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.async_delay.statistics import shown
from benchmarks.common.keeping import keep_settings, run_keeping
from benchmarks.common.pool import process_pool
from benchmarks.common.table import Goal, Result, require_simulation
from cloud_learner.buffer.location import BufferLocation
from fleet.evaluation.statistics import wilson
from hal.drivers.metaworld.dynamics import HandMotion
from hal.drivers.metaworld.expert import MetaWorldExpert
from hal.drivers.metaworld.robot import CONTROL_HZ, MetaWorldConfig, MetaWorldRobot, metaworld_spec
from hal.drivers.metaworld.tasks import PIXEL_TASKS, instruction
from wire.clock import Clock
from wire.types import Latent, Observation

if TYPE_CHECKING:
    from benchmarks.async_delay.rollout import SimulatedThinker, Stage
    from policies.flow.policy import FlowPolicy

HELD_OUT = 3_000_000
KINDS = ("fast and slow", "single rate")
MAX_OFFSET = 80
"""ticks, a second: what an episode lasts. Older latents count as that old"""
EXECUTE_TICKS = 8
"""of a chunk of the fast path: half of it"""
HURRY_S = 2.0
"""twice what an operator needs: who succeeds later has stood and waited"""
ACT_DELAY_TICKS = 1
"""of the fast path: an act that begins in a tick can be used in the next"""


@dataclass(frozen=True, slots=True)
class FastSlowSize:
    """How much of everything."""

    tasks: tuple[str, ...]
    demonstrations: int
    """per task"""
    gradient_steps: int
    episodes: int
    """held out, for each seed, task and pace"""
    max_ticks: int = 320
    """four seconds, three more than an operator needs"""
    seeds: tuple[int, ...] = (0, 1)
    paces_hz: tuple[float, ...] = (1.0, 2.0, 5.0)

    @property
    def config(self) -> MetaWorldConfig:
        return MetaWorldConfig(tasks=self.tasks, observation="pixels")

    def robot(self, clock: Clock) -> MetaWorldRobot:
        """Stamped by `clock`."""
        return MetaWorldRobot(self.config, clock)


FULL = FastSlowSize(PIXEL_TASKS, 15, 8_000, 10)
"""until more steps change nothing: after 2,500 ages are not understood yet"""
QUICK = FastSlowSize(("drawer-open",), 4, 40, 1, 120, (0,), (2.0,))


class Paced:
    """A slow path that looks when its last thought is done, and is never waited for."""

    def __init__(self, policy: FlowPolicy, stage: Stage, hz: float) -> None:
        self._policy, self._stage, self._hz = policy, stage, hz
        self.begin()

    def begin(self) -> None:
        from benchmarks.common.paced_slow_path import PacedSlowPath
        from robot_edge.inference.slow_path import InlineSlowPath, LatentBuffer

        clock = self._stage.clock
        self._path = PacedSlowPath(InlineSlowPath(self._policy), clock, self._hz)
        self._latents = LatentBuffer()

    def look(self, observation: Observation) -> None:
        self._path.request(observation, (self._policy.version,))
        for thought in self._path.pop():
            self._latents.put(thought)

    def newest(self, observation: Observation) -> Latent | None:
        thought = self._latents.newest(self._policy.version, observation.task)
        return None if thought is None else thought.latent


def measure(quick: bool, keep: Path) -> Result:
    """Both kinds at all paces, a process for each seed."""
    size = QUICK if quick else FULL
    with process_pool(len(size.seeds)) as pool:
        runs = list(pool.map(_seed, [size] * len(size.seeds), size.seeds, [keep] * len(size.seeds)))
    rows, means, late, idle = [], {}, {}, {}
    for kind in KINDS:
        for hz in size.paces_hz:
            episodes = [one for found in runs for one in found[_cell(kind, hz)]]
            wins = sum(int(one["success"]) for one in episodes)
            means[kind, hz] = wins / len(episodes)
            times = [one["ticks"] / CONTROL_HZ for one in episodes if one["success"]]
            rows.append(
                {
                    "slow path, Hz": hz,
                    "policy": kind,
                    "chunks a second": float(np.mean([one["chunks"] / one["ticks"] * CONTROL_HZ for one in episodes])),
                    "wait for the first action, s": float(np.mean([one["waited"] for one in episodes])) / CONTROL_HZ,
                    "ticks without an action after it": f"{starved(episodes):.1%}",
                    "success": shown(means[kind, hz], wilson(wins, len(episodes))),
                    f"within {HURRY_S:g} s": hurried(episodes),
                    "by seed": ", ".join(f"{np.mean([e['success'] for e in f[_cell(kind, hz)]]):.2f}" for f in runs),
                    "seconds to success": float(np.median(times)) if times else None,
                }
            )
            late[kind, hz] = hurried(episodes)
            idle[kind, hz] = starved(episodes)
    act_ms = [found["act_ms"][0]["p50"] for found in runs]
    goals = []
    for hz in size.paces_hz:
        for what, found in (("success", means), (f"success within {HURRY_S:g} s", late)):
            gain = found[KINDS[0], hz] - found[KINDS[1], hz]
            # above a single rate that nearly always succeeds there is less to gain: then all of it
            least = min(0.05, 1 - found[KINDS[1], hz])
            name = f"slow path at {hz:g} Hz: {what}, fast and slow minus single rate"
            goals.append(Goal(name, gain, f">= {least:.3g}", gain > least - 1e-9))
        share = idle[KINDS[0], hz]
        goals.append(
            Goal(f"slow path at {hz:g} Hz: ticks of fast and slow without an action", share, "< 0.03", share < 0.03)
        )
    return Result(
        "Fast and slow against a single rate",
        rows,
        goals,
        [
            f"{len(size.tasks)} task(s): {', '.join(size.tasks)}; {len(size.seeds)} training seed(s), {size.episodes} "
            f"held-out episodes for each seed and task of at most {size.max_ticks / CONTROL_HZ:g} s; in brackets "
            "Wilson's 95 % interval over all of them.",
            f"{size.demonstrations} demonstrations of each task and {size.gradient_steps} gradient steps for each of "
            "the two networks, which have the same layers.",
            f"An act really takes {np.median(act_ms):.2f} ms (median, one thread), so {1000 / np.median(act_ms):.0f} a "
            f"second are possible; the control loop asks for {CONTROL_HZ:g}.",
        ],
    )


def starved(episodes: list[dict[str, float]]) -> float:
    """Share of the ticks after the first action that had none."""
    return sum(one["starved"] for one in episodes) / max(1.0, sum(one["ticks"] - one["waited"] for one in episodes))


def hurried(episodes: list[dict[str, float]]) -> float:
    """Share of the episodes that succeeded within `HURRY_S`, the wait for the first thought included."""
    return float(np.mean([one["success"] and one["ticks"] <= HURRY_S * CONTROL_HZ for one in episodes]))


def _cell(kind: str, hz: float) -> str:
    return f"{kind}, {hz:g} Hz"


def _seed(size: FastSlowSize, seed: int, root: Path) -> dict[str, list[dict[str, float]]]:
    """Every episode by cell; what is already in `root` is not measured again."""
    import torch

    torch.set_num_threads(1)
    home = root / f"seed-{seed}"
    home.mkdir(exist_ok=True)
    keep_settings(home / "size.json", asdict(size))
    weights = {kind: _checkpoint(size, seed, kind, home) for kind in KINDS}
    kept = home / "episodes.json"
    found: dict[str, list[dict[str, float]]] = json.loads(kept.read_text()) if kept.exists() else {}
    if "act_ms" not in found:
        found["act_ms"] = [{"p50": _act_ms(size, weights[KINDS[0]])}]
    for kind in KINDS:
        for hz in size.paces_hz:
            name = _cell(kind, hz)
            if name in found:
                continue
            begun = time.monotonic()
            found[name] = evaluate(size, weights[kind], kind, hz)
            kept.write_text(json.dumps(found))
            success = np.mean([one["success"] for one in found[name]])
            sys.stderr.write(f"seed {seed}: {name}: {success:.2f} ({time.monotonic() - begun:.0f} s)\n")
    return found


def _checkpoint(size: FastSlowSize, seed: int, kind: str, home: Path) -> bytes:
    from benchmarks.async_delay.data import Pushes, demonstrate
    from benchmarks.async_delay.policy import Training, train
    from cloud_learner.training.config import pixels_training
    from policies.flow.factory import pixels_network

    kept = home / f"{kind.replace(' ', '-')}.safetensors"
    if kept.exists():
        return kept.read_bytes()
    spec = metaworld_spec(size.config)
    recorded = home / "demonstrations"
    begun = time.monotonic()
    if not (home / "recorded").exists():
        pushes = Pushes(share=0.6, strength=(0.3, 0.6))
        demonstrate(
            BufferLocation(recorded), size.robot, MetaWorldExpert, size.demonstrations, 150, 10_000 * seed, pushes
        )
        (home / "recorded").touch()
        sys.stderr.write(f"seed {seed}: demonstrations ({time.monotonic() - begun:.0f} s)\n")
    begun = time.monotonic()
    network = pixels_network(spec, max_offset=MAX_OFFSET if kind == KINDS[0] else 0)
    training = Training(size.gradient_steps, pixels_training())
    tasks = {task: instruction(task) for task in size.tasks}
    weights = train(BufferLocation(recorded), spec, tasks, network, HandMotion(spec), training, seed)
    kept.write_bytes(weights)
    sys.stderr.write(f"seed {seed}: trained '{kind}' ({time.monotonic() - begun:.0f} s)\n")
    return weights


def evaluate(size: FastSlowSize, weights: bytes, kind: str, hz: float) -> list[dict[str, float]]:
    """Success, ticks, of them before the first action and without one after it, and chunks of each held-out episode."""
    from benchmarks.async_delay.policy import policy_of
    from benchmarks.async_delay.rollout import AtOnce, Stage
    from robot_edge.chunking.config import ChunkingConfig
    from robot_edge.chunking.factory import make_scheduler
    from robot_edge.chunking.scheduler import DelayEstimator

    spec = metaworld_spec(size.config)
    policy = policy_of(weights, spec)
    stage = Stage(size.robot)
    fast = kind == KINDS[0]
    delay = ACT_DELAY_TICKS if fast else round(CONTROL_HZ / hz)
    if fast:
        config = ChunkingConfig("future_state", EXECUTE_TICKS, timeout_ticks=4 * delay)
    else:
        config = ChunkingConfig("sync", policy.horizon, timeout_ticks=4 * delay)
    scheduler = make_scheduler(config, spec, policy.trained, HandMotion(spec), delay=DelayEstimator(first=delay))
    thinker: SimulatedThinker = Paced(policy, stage, hz) if fast else AtOnce(policy)
    found = []
    try:
        for task in size.tasks:
            for number in range(size.episodes):
                episode = stage.play(policy, thinker, scheduler, task, HELD_OUT + number, size.max_ticks, repeat(delay))
                found.append(
                    {
                        "success": float(episode.success),
                        "ticks": len(episode.rewards),
                        "waited": episode.waited,
                        "starved": episode.starved,
                        "chunks": episode.chunks,
                    }
                )
    finally:
        stage.close()
    return found


def _act_ms(size: FastSlowSize, weights: bytes, acts: int = 200) -> float:
    """Median time of an act of the fast path."""
    from benchmarks.async_delay.policy import policy_of
    from benchmarks.async_delay.rollout import Stage

    policy = policy_of(weights, metaworld_spec(size.config))
    stage = Stage(size.robot)
    try:
        stage.robot.reset(size.tasks[0], HELD_OUT)
        observation = stage.robot.read()
        latent = policy.think(observation)
        times = []
        for tick in range(acts):
            begun = time.perf_counter()
            policy.act(observation, latent, tick)
            times.append(1e3 * (time.perf_counter() - begun))
    finally:
        stage.close()
    return float(np.median(times))


def main(arguments: list[str] | None = None) -> int:
    """See the head of this file."""
    require_simulation()
    return run_keeping("fast_slow", measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
