"""Do robots of two shapes learn as well in one run as each alone, and does a third that joins later need less?

    python -m benchmarks.embodiments [--quick] [--keep DIR] [--json FILE] [--write]

MetaWorld's arm and a Fetch arm that pushes share one network (recipe `shapes`); another Fetch arm, which measures less
and is told in another unit how to move (`benchmarks.embodiments.lab_fetch`), joins when both have learned. All learn
from demonstrations of scripted operators in a real buffer.

- `alone`: one shape. `together`: both, the same demonstrations and as many updates; each update has a batch of each.
- `from scratch`: the third one alone, from so many demonstrations of its own. `joined`: the run of both goes on with it
  for as many updates. Each is measured after several numbers of updates, and judged by its own best one.

Training, recording and evaluating are those of `vla-fleet train` and `vla-fleet eval`; runs are beside each other, one
process for each core. `--keep` remembers each in DIR when it is done, so that what was stopped goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.common.keeping import keep_settings, run_keeping
from benchmarks.common.pool import process_pool
from benchmarks.common.table import Goal, Result, interval, require_simulation
from benchmarks.embodiments import runs
from benchmarks.embodiments.runs import JOB, PAIR, THIRD, EmbodimentsSize
from fleet.config.recipes import get_recipe
from fleet.evaluation.held_out import MeasuredEpisode, rate
from fleet.evaluation.statistics import paired_difference

ENOUGH, WORSE = 0.8, 0.03
"""success that the third one is to reach; what a shape may lose by the other one"""
Found: TypeAlias = Mapping[tuple[int, str, str], list[list[MeasuredEpisode]]]
"""by seed, run and member, of each number of updates"""


def measure(quick: bool, keep: Path) -> Result:
    """All runs of all seeds."""
    size = runs.QUICK if quick else runs.FULL
    began = time.monotonic()
    keep_settings(keep / "size.json", asdict(size))
    with process_pool(len(size.seeds) * len(size.own), runs.begin_process) as pool:

        def all_of(work: Callable[..., Any], arguments: Iterable[Any], what: str) -> dict[Any, Any]:
            jobs = {one: pool.submit(work, size, one, keep) for one in arguments}
            found = {}
            for number, (one, job) in enumerate(jobs.items(), 1):
                found[one] = job.result()
                _say(began, f"{what}: {number} of {len(jobs)}")
            return found

        all_of(runs.record, size.seeds, "recorded")
        first = [one for seed in size.seeds for one in runs.first_runs(size, seed)]
        found = all_of(runs.train_and_measure, first, "both, each alone, and the third from scratch")
        later = [one for seed in size.seeds for one in runs.later_runs(size, seed)]
        found |= all_of(runs.train_and_measure, later, "the third joined")
    return report(
        size, {(one.seed, one.name, name): outcomes for one, by in found.items() for name, outcomes in by.items()}
    )


def report(size: EmbodimentsSize, found: Found) -> Result:
    """The tables."""

    def shares(run_name: str, member: str, at: int = 0) -> list[float]:
        return [rate(found[seed, run_name, member][at]).share for seed in size.seeds]

    rows, goals = [], []
    for member in PAIR:
        alone, both = shares(f"alone {member}", member), shares("together", member)
        low, high = _difference(size, found, member)
        gain = float(np.mean(both) - np.mean(alone))
        rows.append(
            {
                "robot": get_recipe(f"{JOB}@{member}").spec.embodiment,
                "demonstrations": size.demonstrations[member],
                "alone": interval(alone),
                "together": interval(both),
                "together minus alone": f"{gain:+.3f} ({low:+.3f} to {high:+.3f})",
            }
        )
        goals.append(Goal(f"{member}: together minus alone, success", gain, f"at least -{WORSE}", gain >= -WORSE))
    more: list[dict[str, Any]] = [{"demonstrations of its own": own} for own in size.own]
    enough: dict[str, int | None] = {}
    for how in ("from scratch", "joined"):
        least = []
        for at, updates in enumerate(size.own_updates):
            reached = {own: shares(f"{how} {own}", THIRD, at) for own in size.own}
            for row in more:
                row[f"{how}, {updates} updates"] = interval(reached[row["demonstrations of its own"]])
            short = [own for own in size.own if np.mean(reached[own]) < ENOUGH]
            least += [own for own in size.own if own > max(short, default=0)]
        enough[how] = min(least, default=None)
    needed = {how: float("inf") if least is None else float(least) for how, least in enough.items()}
    less = needed["joined"] < needed["from scratch"]
    scratch = enough["from scratch"] or f"more than {max(size.own)}"
    goals.append(
        Goal(
            f"demonstrations of its own from which on success is {ENOUGH}, joined",
            needed["joined"],
            f"less than {scratch}",
            less,
        )
    )
    kept = {member: shares(f"joined {max(size.own)}", member, -1) for member in PAIR}
    notes = [
        f"{len(size.seeds)} seed(s): other first weights, batches and demonstrations; mean (lowest to highest). "
        f"{size.episodes} held-out scenes for each, {size.own_episodes} of the third one; of the difference the 95 % "
        "interval on the same scenes (Newcombe).",
        f"{size.updates} updates, a batch of {size.batch} of each robot in each. An update with the third one has "
        f"three such batches, of which it has {_share():.0%} on average; one of it alone has one.",
        "Few demonstrations are soon learned by heart: each way to learn is judged by that number of updates with "
        "which it needs the fewest.",
        f"When the third one had joined with {max(size.own)} demonstrations, {max(size.own_updates)} updates later: "
        + "; ".join(f"{member} {interval(values)}" for member, values in kept.items())
        + ".",
    ]
    third = get_recipe(f"{JOB}@{THIRD}").spec.embodiment
    return Result("Robots of several shapes share weights", rows, goals, notes, {f"A third robot, {third}": more})


def _difference(size: EmbodimentsSize, found: Found, member: str) -> tuple[float, float]:
    """95 % interval of together minus alone, over the scenes of all seeds."""
    counts = {(True, True): 0, (True, False): 0, (False, True): 0, (False, False): 0}
    for seed in size.seeds:
        (both,), (alone,) = found[seed, "together", member], found[seed, f"alone {member}", member]
        for one, other in zip(both, alone, strict=True):
            counts[one.success, other.success] += 1
    return paired_difference(*counts.values())


def _share() -> float:
    """Of the batches, that the third one has once all have joined."""
    members = get_recipe(JOB).members
    return members[THIRD].share / sum(one.share for one in members.values())


def _say(began: float, text: str) -> None:
    sys.stderr.write(f"{time.monotonic() - began:5.0f} s  {text}\n")


if __name__ == "__main__":
    require_simulation("gymnasium_robotics")
    sys.exit(run_keeping("embodiments", measure))
