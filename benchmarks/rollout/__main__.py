"""How often a rollout decides wrongly, how soon it decides, and how many robots a bad version ever moves.

    python -m benchmarks.rollout [--quick] [--json FILE] [--write]

Robots throw dice (`fleet.py`): an episode of a random one of five tasks takes 20 to 30 s when it succeeds and 35 to
45 s when not; in 10 % of them a person steps in, 2 % are stopped. Everything else is `cloud_learner.rollout` as the
gateway runs it, with its defaults and 20 % of the robots as canaries. Intervals are Wilson's, of 95 %. A real gateway
and a real trainer's versions: `python -m benchmarks.rollout.drill`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from benchmarks.common.table import Goal, Result, run
from benchmarks.rollout.fleet import Quality
from benchmarks.rollout.trials import LineCase, LineOutcome, TrialCase, TrialOutcome, run_line, run_trial
from cloud_learner.rollout.config import RolloutConfig
from fleet.evaluation.statistics import wilson

_CONFIG = RolloutConfig(canary=0.2)
_DECISIVE = 0.2
"""loss of success that a bad version of the goals has at least"""


def _trials() -> list[TrialCase]:
    cases = []
    for success in (0.8, 0.95):
        for name, gain in (("equal", 0.0), ("better by 4 points", 0.04)):
            cases.append(TrialCase(name, success, Quality(success + gain), is_bad=False))
        for points in (5, 10, 20):
            cases.append(TrialCase(f"worse by {points} points", success, Quality(success - points / 100), is_bad=True))
        cases.append(TrialCase("random weights", success, Quality(0.0), is_bad=True))
    return cases


def _other_trials() -> list[TrialCase]:
    equal, bad, random = Quality(0.8), Quality(0.6), Quality(0.0)
    return [
        TrialCase("equal, people step in 3 times as often", 0.8, Quality(0.8, human=0.3), is_bad=True),
        TrialCase("equal, 10 times the stops", 0.8, Quality(0.8, stops=0.2), is_bad=True),
        TrialCase("equal, everything gets harder by 20 points meanwhile", 0.8, equal, is_bad=False, harder=0.2),
        TrialCase("equal, robots differ by up to 10 points", 0.8, equal, is_bad=False, robot_spread=0.1),
        TrialCase("equal, 50 robots", 0.8, equal, is_bad=False, robots=50),
        TrialCase("random weights, 50 robots", 0.8, random, is_bad=True, robots=50),
        TrialCase("worse by 20 points, 50 robots", 0.8, bad, is_bad=True, robots=50),
        TrialCase("equal, 1000 robots", 0.8, equal, is_bad=False, robots=1000),
        TrialCase("worse by 20 points, 1000 robots", 0.8, bad, is_bad=True, robots=1000),
        TrialCase("equal, 3 robots", 0.8, equal, is_bad=False, robots=3),
        TrialCase("worse by 20 points, 3 robots", 0.8, bad, is_bad=True, robots=3),
        TrialCase("equal, 1 robot", 0.8, equal, is_bad=False, robots=1),
        TrialCase("worse by 20 points, 1 robot", 0.8, bad, is_bad=True, robots=1),
        TrialCase("random weights, 1 robot", 0.8, random, is_bad=True, robots=1),
        TrialCase("equal, 1 robot, everything gets harder meanwhile", 0.8, equal, False, robots=1, harder=0.2),
    ]


def _lines() -> list[LineCase]:
    lines = [LineCase("equal", 0.8, 0.0, 600.0), LineCase("equal", 0.95, 0.0, 600.0)]
    for first in (0.8, 0.95):
        for minutes in (10, 30):
            lines.append(LineCase("down by 2 points each", first, -0.02, 60.0 * minutes))
            name = "the same, compared with the last promoted alone"
            lines.append(LineCase(name, first, -0.02, 60.0 * minutes, is_watched=False))
    lines.append(LineCase("down by 2 points each, control 0.2", 0.8, -0.02, 600.0, control=0.2))
    lines.append(LineCase("down by 2 points each, control 0", 0.8, -0.02, 600.0, control=0.0))
    lines.append(LineCase("up by 2 points each", 0.4, 0.02, 600.0))
    return lines


def _share(wins: int, trials: int) -> str:
    low, high = wilson(wins, trials)
    return f"{100 * wins / trials:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _spread(values: list[float], digits: int = 1) -> str:
    return f"{np.median(values):.{digits}f}; {np.percentile(values, 95):.{digits}f}"


def _trial_row(case: TrialCase, outcomes: list[TrialOutcome]) -> dict[str, Any]:
    count = len(outcomes)
    promoted = sum(one.promoted for one in outcomes)
    back = [one for one in outcomes if not one.promoted]
    return {
        "version": case.name,
        "success before": case.before,
        "rolled back": _share(count - promoted, count),
        "of these at the bound": _share(sum(one.at_bound for one in outcomes), count),
        "promoted": _share(promoted, count),
        "wrong": _share(promoted if case.is_bad else count - promoted, count),
        "canary's episodes: median; p95": _spread([one.episodes for one in outcomes], 0),
        "minutes: median; p95": _spread([one.minutes for one in outcomes]),
        "most robots that acted by it, of those rolled back": max((one.share_of_robots for one in back), default=None),
    }


def _line_row(case: LineCase, outcomes: list[LineOutcome]) -> dict[str, Any]:
    found = [one for one in outcomes if one.alarm_version]
    return {
        "line of 25 versions": case.name,
        "first success": case.first,
        "a version every, min": case.every_s / 60,
        "promoted": float(np.mean([one.promoted for one in outcomes])),
        "rolled back to the reference": _share(len(found), len(outcomes)),
        "at version: median; p95": _spread([one.alarm_version for one in found], 0) if found else None,
        "loss then, points": _spread([100 * one.alarm_loss for one in found], 0) if found else None,
        "largest loss of current, points": _spread([100 * one.worst_loss for one in outcomes], 0),
        "mean loss over time": _spread([100 * one.mean_loss for one in outcomes]),
        "loss in the end": _spread([100 * one.end_loss for one in outcomes], 0),
        "reference moved": _share(sum(one.reference != 1 for one in outcomes), len(outcomes)),
    }


def measure(quick: bool) -> Result:
    """All cases, each with its own dice."""
    runs, others, lines = (40, 20, 6) if quick else (2000, 500, 200)
    rows, other_rows, line_rows, goals = [], [], [], []
    for at, case in enumerate(_trials()):
        outcomes = [run_trial(case, _CONFIG, seed) for seed in range(at * runs, (at + 1) * runs)]
        rows.append(_trial_row(case, outcomes))
        promoted = sum(one.promoted for one in outcomes)
        loss = case.before - case.after.success
        if loss <= 0:
            goals.append(_goal(f"{case.name}, {case.before}: rolled back", runs - promoted, runs, _CONFIG.alpha))
        elif loss >= _DECISIVE - 1e-9:
            goals.append(_goal(f"{case.name}, {case.before}: promoted", promoted, runs, _CONFIG.beta))
            most = max(one.share_of_robots for one in outcomes if not one.promoted)
            holds = most <= _CONFIG.canary
            goals.append(Goal(f"{case.name}, {case.before}: robots that acted by it", most, "at most 0.2", holds))
    for at, case in enumerate(_other_trials()):
        outcomes = [run_trial(case, _CONFIG, seed) for seed in range(at * others, (at + 1) * others)]
        other_rows.append(_trial_row(case, outcomes))
    for at, line in enumerate(_lines()):
        ended = [run_line(line, seed) for seed in range(at * lines, (at + 1) * lines)]
        line_rows.append(_line_row(line, ended))
        alarms = sum(one.alarm_version > 0 for one in ended)
        if not line.step:
            goals.append(_goal(f"line of equal versions, {line.first}: rolled back", alarms, lines, _CONFIG.alpha))
        elif line.step < 0 and line.is_watched and line.control == _CONFIG.control:
            worst = float(np.median([one.worst_loss for one in ended]))
            name = (
                f"line down by 2 points each, {line.first}, every {line.every_s / 60:.0f} min: median of largest loss"
            )
            goals.append(Goal(name, worst, "at most the margin, 0.2", worst <= _CONFIG.margin + 1e-9))
    notes = [
        f"{runs} runs of each version of the first table, {others} of the second, {lines} of each line; 10 robots where"
        " nothing else is said. margin 0.2, alpha 0.05, beta 0.05, at most 200 episodes of a canary.",
        "A goal on a share holds when its interval's upper end is below the target.",
        "Wrong is what is promoted though it is worse, and what is rolled back though it is not. With a margin of 20 "
        "points nothing is promised of a version that is worse by less: those rows say what is missed. People who step "
        "in 3 times as often are 5 points of the steps, 10 times the stops are 18 points of the episodes.",
        "What is rolled back wrongly as worse is bounded by alpha for robots that are alike; what is rolled back at the"
        " bound on episodes comes on top of it.",
        "A line is rolled back when it was shown to be worse than its reference, by one robot of ten that keeps acting "
        "by it. Versions go on losing 2 points each after that.",
        "A single robot is compared with its own episodes of before: when the world changes meanwhile, it blames the "
        "version; and when these are used up, it cannot decide.",
    ]
    title = "How often a rollout decides wrongly, and how soon it decides"
    more = {"Other versions, fleets and worlds": other_rows, "Slow losses over many versions": line_rows}
    return Result(title, rows, goals, notes, more)


def _goal(name: str, wrong: int, runs: int, target: float) -> Goal:
    return Goal(name, wrong / runs, f"below {target}", wilson(wrong, runs)[1] < target)


if __name__ == "__main__":
    sys.exit(run("rollout", measure))
