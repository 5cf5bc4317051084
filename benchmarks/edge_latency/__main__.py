"""Three edges, one robot, one policy: how late are ticks, how often is there no action, how fast is a reaction?

    python -m benchmarks.edge_latency [--quick] [--json FILE] [--write]

The same tiny SmolVLA (lerobot's class, 1.3 M parameters, random weights, nothing downloaded) drives the same stand-in
arm at 50 Hz with two 96x96 cameras at 25 Hz, behind

- lerobot 0.4.4's `policy_server` and `robot_client`, as two processes over gRPC, once with its own settings and once
  with those that react fastest;
- a synchronous loop: observe, predict 50 actions, execute 25, observe;
- this project's control and inference processes.

All times are taken inside the arm (`edge.arm`), all figures are computed by the same code (`edge.measure`). The policy
marks each chunk with what its observation showed of a lamp that switches at random moments, in the same way in all
edges (`edge.vla.mark`), so the arm can tell when the first action arrives that was made from it.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.common.cpu import Others
from benchmarks.common.table import Goal, Result, end_in_order, require, run
from benchmarks.edge_latency.arm import PERIOD_NS, ArmRecord
from benchmarks.edge_latency.children import Children, trainers
from benchmarks.edge_latency.measure import Measured, measure
from benchmarks.edge_latency.ours import WRITE_AFTER_S

if TYPE_CHECKING:
    from benchmarks.edge_latency.runs import Own

log = logging.getLogger("edge_latency")

IDLE, LOADED, SWAPS = "idle", "trainer on every core", "weights swapped"
SYNC, OURS = "synchronous, 25 of 50 executed", "this project"
SWAP_EVERY_S = 3.0


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds each edge is measured."""

    ours_idle: float = 602.0
    sync_idle: float = 300.0
    """its reaction is spread evenly over half a second, so the median of fewer stimuli says little"""
    other_idle: float = 50.0
    loaded: float = 40.0
    swaps: float = 45.0


QUICK = Durations(12.0, 12.0, 12.0, 12.0, 12.0)


def measure_edges(quick: bool) -> Result:
    """Every edge under every condition."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    require("lerobot", extra="lerobot")
    end_in_order()
    from benchmarks.edge_latency.ours import real_time_permitted
    from benchmarks.edge_latency.vla import build

    durations = QUICK if quick else Durations()
    others, permitted = Others(), real_time_permitted()
    place = Path(tempfile.mkdtemp(prefix="edge-latency-"))
    log.info("building the policy; logs of all processes are in %s", place)
    try:
        parameters = build(place / "model")
        found = _all(place, durations)
    except BaseException:
        log.error("the logs stay in %s", place)
        raise
    shutil.rmtree(place, ignore_errors=True)
    return result(found, parameters, permitted, others.note())


Found = dict[tuple[str, str], tuple[Measured, "Own"]]
"""by edge and condition: figures, and what ours says of itself"""


def _all(place: Path, durations: Durations) -> Found:
    from benchmarks.edge_latency.runs import (
        FASTEST,
        USUAL,
        LeRobotSettings,
        Moving,
        Own,
        run_lerobot,
        run_ours,
        run_sync,
    )

    model = place / "model"
    found: Found = {}
    load: Children | None = None

    def one(edge: str, condition: str, go: Callable[[Path, Moving], tuple[ArmRecord, Own]]) -> None:
        here = place / f"{len(found):02d}"
        here.mkdir()
        begun = time.monotonic()
        # The trainers stand still while the edge starts: loading its policy is not what is measured.
        if load is not None:
            load.pause()
        record, own = go(here, load.resume if load is not None else lambda: None)
        figures = measure(record)
        found[edge, condition] = figures, own
        log.info(
            "%s, %s (%.0f s): late p99 %.2f ms, missed %d and starved %d of %d, reaction %.0f ms",
            *(edge, condition, time.monotonic() - begun, np.percentile(figures.lateness_ms, 99)),
            *(figures.missed, figures.starved, figures.slots, np.median(figures.touch_ms)),
        )

    def theirs(settings: LeRobotSettings, seconds: float) -> Callable[[Path, Moving], tuple[ArmRecord, Own]]:
        return lambda here, moving: (run_lerobot(here, model, seconds, moving, settings), Own())

    def each(condition: str, sync: float, usual: float, own: float) -> None:
        one(SYNC, condition, lambda here, moving: (run_sync(here, model, sync, moving), Own()))
        for settings in (USUAL, FASTEST):
            one(settings.name, condition, theirs(settings, usual))
        one(OURS, condition, lambda here, moving: run_ours(here, model, own, moving))

    each(IDLE, durations.sync_idle, durations.other_idle, durations.ours_idle)
    one(OURS, SWAPS, lambda here, moving: run_ours(here, model, durations.swaps, moving, SWAP_EVERY_S))
    log.info("starting the trainers")
    with trainers(place, model) as crowd:
        load = crowd
        each(LOADED, durations.loaded, durations.loaded, durations.loaded)
    return found


def result(found: Found, parameters: int, permitted: bool, note: str) -> Result:
    """The table, the goals and what one must know to read them."""
    idle, sync = found[OURS, IDLE][0], found[SYNC, IDLE][0]
    late = float(np.percentile(idle.lateness_ms, 99)) / (PERIOD_NS / 1e6)
    faster = float(np.median(sync.touch_ms) / np.median(idle.touch_ms))
    seen = float(np.median(sync.light_ms) / np.median(idle.light_ms))
    minutes, write_ms = idle.seconds / 60, 1e3 * WRITE_AFTER_S
    unanswered = {f"{e}, {c}": m.unanswered for (e, c), (m, _) in found.items() if m.unanswered}
    return Result(
        title="The edge: lateness, starvation and reaction",
        rows=[figures.row(edge, condition) for (edge, condition), (figures, _) in found.items()],
        goals=[
            Goal(f"missed ticks of ours, idle, in {minutes:.1f} minutes", float(idle.missed), "0", idle.missed == 0),
            Goal("lateness p99 of ours, idle, share of the period", late, "< 0.05", late < 0.05),
            Goal("reaction of ours faster than synchronous, idle", faster, ">= 10", faster >= 10),
        ],
        notes=[
            f"SmolVLA of lerobot 0.4.4 with {parameters:,} parameters, chunks of 50 actions, 5 flow steps, on the CPU "
            "with one thread a process; 50 Hz control.",
            "By its own count "
            + "; ".join(
                f"this project's control, {condition}: missed {own.missed} ticks and woke up to "
                f"{own.late_p99_ms:.1f} ms late in 99% of them"
                for (edge, condition), (_, own) in found.items()
                if edge == OURS
            )
            + ". Its driver runs in a process of its own (hal.driver_host.server), as robots of the fleet do.",
            f"Real-time priority was {'permitted' if permitted else 'not permitted'}; only this project's control "
            "process asks for it. lerobot's processes and the synchronous loop run as they come.",
            "late: from the beginning of each 20 ms slot of the ideal grid until the next action arrives; uneven: "
            "|time between two actions - 20 ms|, which knows no grid. missed: neither read nor written in the slot; "
            "starved: no action newly made by the policy in it.",
            "reaction: from a switch of the lamp, at a random moment, to the first action made from an observation "
            "that shows it, by a state dimension (touch) or in the 25 Hz camera's image (light, the wait for the next "
            f"frame included). By image ours is {seen:.1f} times as fast as the synchronous loop, idle.",
            "lerobot 'as it comes': chunk_size_threshold 0.5, weighted_average, inference_latency 1/30 s; 'made fast': "
            "1.0, latest_only, 0 s. Its client sleeps a period after its work, so it drifts through the grid.",
            "This project splits the same weights into a slow path (image and words, in a process of its own) and a "
            "fast one, asks for a chunk every tick and denoises in fewer operations than lerobot's "
            f"predict_action_chunk, which the others call: part of the difference. Commands go out {write_ms:g} ms "
            "after the beginning of a tick, so that a quick answer counts in the tick it was asked in.",
            f"weights swapped: a new version every {SWAP_EVERY_S:.0f} s, {found[OURS, SWAPS][1].swaps} in all; neither "
            "lerobot's policy_server nor the synchronous loop can change weights while it runs.",
            f"Of a reaction by touch the wait for the next tick is 10 ms in the mean, and {write_ms:g} ms lie between "
            "reading and command where the answer comes in time.",
            "trainer on every core: one process per core trains the same SmolVLA, nice 5, as `vla-fleet up` does.",
            *(f"{who}: {n} switches of the lamp were not answered before the next." for who, n in unanswered.items()),
            note,
        ],
    )


if __name__ == "__main__":
    raise SystemExit(run("edge_latency", measure_edges))
