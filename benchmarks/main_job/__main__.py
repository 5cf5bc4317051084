"""The main job, run as a user would: how well the fleet learns, how quickly, and what it costs.

    python -m benchmarks.main_job [--recipe pixels|state] [--algorithm NAME] [--minutes M] [--seeds 0 1 2] [--robots 3]
                                  [--quick] [--json FILE] [--write]

docs/results/main_job.json keeps one row for each commit that was measured; `--write` adds this one, and keeps the
report of the first seed as docs/results/demo_RECIPE.json for `vla-fleet plot`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import table
from benchmarks.common.cpu import Others
from benchmarks.common.machine import calibration_ms, commit, label
from benchmarks.common.table import Goal, Result, end_in_order, render, require_simulation
from benchmarks.main_job.run import MainJobOptions, run_once
from fleet.config.machine import describe_machine

NAME, COMMAND = "main_job", "python -m benchmarks.main_job"
MINUTES = {"pixels": 10.0, "state": 5.0}
"""that the goals of a recipe are for"""
DURING = 4.0
"""minutes"""
_ROW_IS = ("commit", "recipe", "minutes", "robots", "machine")
Report = dict[str, Any]


def measure(quick: bool) -> Result:
    """One short run of `state`, or three of `pixels`."""
    if quick:
        return survey(MainJobOptions("state", 0.5, 2, None), [0])[0]
    return survey(MainJobOptions("pixels", MINUTES["pixels"], 3, DURING), [0, 1, 2])[0]


def survey(wanted: MainJobOptions, seeds: list[int]) -> tuple[Result, list[Report]]:
    """This commit's row with its goals, and the reports it was made from."""
    commit()  # it may be another one afterwards
    calibration_ms()  # before anything else runs
    others, runs = Others(), []
    for seed in seeds:
        sys.stderr.write(f"--- {wanted.name}, seed {seed}: {wanted.minutes:g} minutes\n")
        runs.append(run_once(wanted, seed))
        sys.stderr.write(f"--- {json.dumps(row_of(wanted, runs[-1:]))}\n")
    row = row_of(wanted, runs)
    notes = [
        "Success: held-out scenes, mean over seeds (lowest to highest). Delays, missed ticks, versions behind and "
        "memory: the worst seed. Everything else: mean over seeds, of the time robots worked.",
        "Publish: the gateway announces a version. Trained: before that, its delta was made, sent and rebuilt there.",
        "On their own: share of the episodes of a quarter in which a robot succeeded with nobody's help.",
        others.note(),
    ]
    return Result("The main job, by commit", [row], goals_of(wanted, runs), notes, costs_of([row])), runs


def row_of(wanted: MainJobOptions, runs: list[Report]) -> dict[str, Any]:
    """What is kept of a commit."""
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "calibration ms": round(calibration_ms(), 1),
        "meanwhile ms": _mean(runs, lambda run: run["outside"]["machine_ms"]),
        "recipe": wanted.name,
        "minutes": wanted.minutes,
        "robots": wanted.robots,
        "seeds": " ".join(str(run["seed"]) for run in runs),
        "success at start": _spread([run["success_before"] for run in runs]),
        f"at {DURING:g} min": _spread([run["success_during"][0]["mean"] for run in runs if run["success_during"]]),
        "at the end": _spread([run["success_after"] for run in runs]),
        "on their own, first/last quarter": _ends(runs, "unaided_success"),
        "gradient steps": round(_mean(runs, lambda run: run["outside"]["gradient_steps"])),
        "per s": _mean(runs, lambda run: run["outside"]["gradient_steps_per_s"]),
        "trainer, cores": _mean(runs, lambda run: run["outside"]["trainer_cores"]),
        "human share, first/last quarter": _ends(runs, "human_share"),
        "interventions per episode, first/last": _ends(runs, "interventions_per_episode"),
        "ingest p50/p99 s": _delay(runs, "ingest_latency_s"),
        "publish to applied p50/p99 s": _delay(runs, "publish_to_applied_s"),
        "trained to applied p50/p99 s": _delay(runs, "trained_to_applied_s"),
        "missed ticks %": max(map(_missed_percent, runs)),
        "lost": sum(run["steps_lost"] for run in runs),
        "doubled": sum(run["steps_duplicated"] for run in runs),
        "versions behind at most": max(map(_behind, runs)),
        "memory GiB (PSS)": max(run["outside"]["memory_bytes"] for run in runs) / 2**30,
        "cpu_ms_per_tick": _mean_by_kind(runs, "cpu_ms_per_tick"),
        "cpu_s": _mean_by_kind(runs, "cpu_s"),
    }


def goals_of(wanted: MainJobOptions, runs: list[Report]) -> list[Goal]:
    """The goals of a recipe; those of success only for runs that take as long as they are for."""
    found = []
    end = [run["success_after"] or 0.0 for run in runs]
    if wanted.minutes >= MINUTES.get(wanted.recipe, np.inf):
        least = 0.9 if wanted.recipe == "pixels" else 0.93
        found.append(_at_least("mean success at the end", float(np.mean(end)), least))
        if wanted.recipe == "pixels":
            found.append(_at_least("lowest success of a seed", min(end), 0.8))
            during = [run["success_during"][0]["mean"] for run in runs if run["success_during"]]
            found.append(_at_least(f"mean success after {DURING:g} minutes", float(np.mean(during or [0.0])), 0.75))
    ratios = [_quarter(run, -1, "interventions_per_episode") / first for run in runs if (first := _first(run)) > 0]
    found += [
        _at_most("interventions per episode, last quarter over first", float(np.mean(ratios or [0.0])), 1 / 3),
        _at_most("missed ticks %", max(map(_missed_percent, runs)), 0.5),
        _at_least("trainer's share of a core", min(run["outside"]["trainer_cores"] for run in runs), 0.6),
    ]
    for name, key, p50, p99 in (
        ("ingest", "ingest_latency_s", 0.1, 1.0),
        ("publish to applied", "publish_to_applied_s", 0.3, 1.5),
    ):
        for quantile, most in (("p50", p50), ("p99", p99)):
            found.append(_at_most(f"{name} {quantile}, s", _worst(runs, key, quantile), most))
    for name, key in (("lost steps", "steps_lost"), ("doubled steps", "steps_duplicated")):
        found.append(_at_most(name, sum(run[key] for run in runs), 0))
    return found


def costs_of(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Further tables: processor time by kind of process."""
    found = {}
    for title, key in (
        ("Processor time by kind of process, ms per control tick of one robot", "cpu_ms_per_tick"),
        ("The same, seconds", "cpu_s"),
    ):
        kinds = sorted({kind for row in rows for kind in row[key]})
        found[title] = [
            {name: row.get(name) for name in ("commit", "recipe", "calibration ms", "meanwhile ms")}
            | {kind: row[key].get(kind) for kind in kinds}
            for row in rows
        ]
    return found


def keep(result: Result) -> None:
    """Add the row of `result` to docs/results/main_job.json, in place of an earlier one of the same, and write the
    table of all."""
    path = table.RESULTS / f"{NAME}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in rows if any(row[name] != result.rows[0][name] for name in _ROW_IS)] + result.rows
    table.RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    every = Result(result.title, list(map(_plain, rows)), result.goals, [*result.notes, _goals_are_of(result)])
    every.more = costs_of(rows)
    (table.RESULTS / f"{NAME}.md").write_text(render(every, COMMAND))


def main(arguments: list[str] | None = None) -> int:
    """1 when a goal does not hold."""
    require_simulation("fastapi")
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("--recipe", default="pixels")
    parser.add_argument("--algorithm", default="", help="another than the recipe's")
    parser.add_argument("--minutes", type=float, help="of robots at work; default: 10, of `state` 5")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--robots", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small run that shows the benchmark works")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--write", action="store_true", help="keep this commit's row in docs/results")
    options = parser.parse_args(arguments)
    recipe, minutes = options.recipe, options.minutes
    if options.quick:
        recipe, minutes = "state", 0.5
    minutes = MINUTES.get(recipe, 10.0) if minutes is None else minutes
    end_in_order()
    during = DURING if minutes > DURING else None
    wanted = MainJobOptions(recipe, minutes, options.robots, during, options.algorithm)
    result, runs = survey(wanted, options.seeds)
    shown = Result(result.title, list(map(_plain, result.rows)), result.goals, result.notes, result.more)
    sys.stdout.write(render(shown, COMMAND))
    if options.json is not None:
        goals = [{"name": g.name, "value": g.value, "target": g.target, "holds": g.holds} for g in result.goals]
        document = {"machine": label(), "calibration_ms": round(calibration_ms(), 1), "command": COMMAND}
        document |= {"rows": result.rows, "goals": goals, "notes": result.notes, "runs": runs}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.write:
        keep(result)
    if options.write and not options.algorithm:
        report = {name: value for name, value in runs[0].items() if name not in ("outside", "seed")}
        (table.RESULTS / f"demo_{recipe}.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(goal.holds for goal in result.goals) else 1


# --- figures ------------------------------------------------------------------------------------------------------


def _mean(runs: list[Report], figure: Callable[[Report], float]) -> float:
    return round(float(np.mean([figure(run) for run in runs])), 3)


def _mean_by_kind(runs: list[Report], key: str) -> dict[str, float]:
    kinds = sorted({kind for run in runs for kind in run["outside"][key]})
    return {kind: round(sum(run["outside"][key].get(kind, 0.0) for run in runs) / len(runs), 4) for kind in kinds}


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return table.interval(known) if len(known) > 1 else f"{known[0]:.2f}"


def _ends(runs: list[Report], key: str) -> str:
    return "/".join(f"{np.mean([_quarter(run, which, key) for run in runs]):.2f}" for which in (0, -1))


def _quarter(run: Report, which: int, key: str) -> float:
    """Of the first quarter (0) or the last (-1); nan when it has none."""
    value = run["quarters"][which][key] if run["quarters"] else None
    return float("nan") if value is None else float(value)


def _first(run: Report) -> float:
    return _quarter(run, 0, "interventions_per_episode")


def _worst(runs: list[Report], key: str, quantile: str) -> float:
    known = [run[key][quantile] for run in runs if run[key][quantile] is not None]
    return max(known, default=float("nan"))


def _delay(runs: list[Report], key: str) -> str:
    return "/".join(f"{_worst(runs, key, quantile):.2f}" for quantile in ("p50", "p99"))


def _missed_percent(run: Report) -> float:
    return round(100 * run["missed_ticks"] / max(1, run["ticks"]), 3)


def _behind(run: Report) -> int:
    return max(map(int, run["version_lag"]), default=0)


def _at_least(name: str, value: float, least: float) -> Goal:
    return Goal(name, value, f"at least {least:g}", bool(value >= least))


def _at_most(name: str, value: float, most: float) -> Goal:
    return Goal(name, value, f"at most {most:.3g}", bool(value <= most))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not isinstance(value, dict)}


def _goals_are_of(result: Result) -> str:
    row = result.rows[0]
    return f"The goals are those of commit {row['commit']}, recipe `{row['recipe']}`."


if __name__ == "__main__":
    raise SystemExit(main())
