"""How large, how fast and how hungry is each policy? Sizes, the slow and the fast path apart, training, memory.

    python -m benchmarks.policies [--device cuda] [--size tiny] [--quick] [--json FILE] [--write]

Every row is measured in a process of its own, with random weights: nothing is downloaded. On the CPU each uses one
thread, as the processes of a fleet do. `--device cuda` measures real sizes (SmolVLA with 450 M parameters; a slow path
of 3 B with a fast one of 300 M) and the goal that the fast path keeps 100 Hz while the slow one thinks at 2 Hz or more;
its tables go to docs/results/policies_<gpu>.md. `--size tiny` takes networks that show only that all of it works.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import table
from benchmarks.common.cpu import Others
from benchmarks.common.machine import label
from benchmarks.common.table import Goal, Result, render
from benchmarks.policies import cases
from benchmarks.policies.cases import Case, Variant
from benchmarks.policies.row import RowJob
from benchmarks.policies.together import ALONE
from policies.common.runtime import Runtime

FAST_HZ, SLOW_HZ = 100.0, 2.0
_LIMIT_S = 1800.0
_FAST = Runtime(dtype="bfloat16", compile=True)


class BenchmarkPlan(msgspec.Struct, frozen=True):
    """What is measured."""

    device: str
    rows: tuple[Case, ...]
    variants: tuple[tuple[Case, tuple[Variant, ...]], ...]
    parallel: Case
    """its two paths run at the same time"""
    runtime: Runtime
    """of `parallel`"""
    seconds: float
    """for each figure"""
    judged: bool
    """whether `parallel` has the sizes that the goal speaks of"""


def plan(device: str, size: str, quick: bool) -> BenchmarkPlan:
    """The rows for a device, in real or in tiny sizes."""
    variants: tuple[tuple[Case, tuple[Variant, ...]], ...]
    if size == "tiny" or quick:
        variants = ((cases.FLOW_SMALL, (cases.BFLOAT16, cases.INT8)),)
        return BenchmarkPlan(device, cases.QUICK, variants, cases.TINY_VLM, Runtime(dtype="bfloat16"), 0.5, False)
    if device.startswith("cuda"):
        return BenchmarkPlan(device, cases.ON_CUDA, cases.VARIANTS_ON_CUDA, cases.LARGE_3B, _FAST, 10.0, True)
    return BenchmarkPlan(device, cases.ON_CPU, cases.VARIANTS_ON_CPU, cases.FLOW_MEDIUM, Runtime(int8=True), 3.0, False)


def measure(quick: bool, device: str = "cpu", size: str = "full") -> Result:
    """All tables."""
    return survey(plan(device, size, quick))


def survey(chosen: BenchmarkPlan) -> Result:
    """Measure everything that `chosen` names; what cannot be measured is named with its reason."""
    others, notes = Others(), []
    rows: list[dict[str, Any]] = []
    effects: list[dict[str, Any]] = []
    jobs = [(RowJob(case, chosen.device, chosen.seconds), rows) for case in chosen.rows]
    jobs += [(RowJob(case, chosen.device, chosen.seconds, these), effects) for case, these in chosen.variants]
    parallel: list[dict[str, Any]] = []
    jobs.append((RowJob(chosen.parallel, chosen.device, chosen.seconds, (), True, chosen.runtime), parallel))
    for number, (job, found) in enumerate(jobs, 1):
        why = job.case.missing()
        begun = time.monotonic()
        if not why:
            try:
                found += child(job)
            except RowFailedError as error:
                why = str(error)
        if why:
            notes.append(f"Not measured: {job.case.name}{' at both paces' if job.parallel else ''}: {why}.")
        sys.stderr.write(f"{number}/{len(jobs)} {job.case.name}: {why or f'{time.monotonic() - begun:.0f} s'}\n")
    if not rows:
        raise SystemExit("benchmarks.policies: nothing could be measured. " + " ".join(notes))
    notes += [
        f"Not measured: the training step of {row['policy']}, for want of memory."
        for row in rows
        if row.get("training step ms", 0) is None
    ]
    more = {"Other ways to act, against float32 in the same process": effects, "Both paths at once": parallel}
    goals = _goals(parallel) if chosen.judged else []
    said = _explained(chosen)
    return Result("Policies: sizes, speed, memory", rows, goals, [*notes, *said, others.note()], _filled(more))


class RowFailedError(Exception):
    """A row's process did not bring a result."""


def child(job: RowJob) -> list[dict[str, Any]]:
    """Rows that a process of their own measured. Raises `RowFailedError` with the last thing it said."""
    command = [sys.executable, "-m", "benchmarks.policies.row", msgspec.json.encode(job).decode()]
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise RowFailedError(f"not done after {_LIMIT_S:.0f} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RowFailedError(f"exit {done.returncode}: {said[-1][:300] if said else 'it said nothing'}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return rows


def _goals(parallel: Sequence[dict[str, Any]]) -> list[Goal]:
    """Judged on the better of the two ways to run both paths at once."""
    both = [row for row in parallel if row["think and act"] != ALONE]
    if not both:
        missed = float("nan")
        return [Goal("fast path with a 3 B slow path", missed, f">= {FAST_HZ:.0f} Hz", False)]
    enough = [row for row in both if row["think Hz"] >= SLOW_HZ]
    best = max(enough or both, key=lambda row: row["act Hz"])
    fast, slow = best["act Hz"], best["think Hz"]
    how = best["think and act"]
    return [
        Goal(f"chunks/s of the 300 M fast path, {how}", fast, f">= {FAST_HZ:.0f}", fast >= FAST_HZ),
        Goal(f"thoughts/s of the 3 B slow path meanwhile, {how}", slow, f">= {SLOW_HZ:.0f}", slow >= SLOW_HZ),
    ]


def _explained(chosen: BenchmarkPlan) -> list[str]:
    cuda = chosen.device.startswith("cuda")
    memory = "allocated on the GPU at most" if cuda else "resident at most, beyond what the imported libraries take"
    notes = [
        "Random weights, two cameras (96x96 unless the policy brings pictures to another size), float32, "
        + ("" if cuda else "one thread; ")
        + "think: one observation of both cameras and the instruction to its latent; act: one chunk from a new state "
        "and that latent, medians unless said. chunks/s: act alone, one after the other.",
        "training step: loss, gradient, clipping and AdamW on a batch that is there already, one step behind each "
        f"image. MiB: {memory}; `to train` includes acting before it. published: one version for all robots.",
        "An inference process holds two whole policies, the one that acts and a spare into which new weights are "
        "loaded: a robot needs twice `MiB to act`.",
        "Other ways to act: both policies have the same weights and draw the same noise; the change is that of the "
        "chunk, in per cent of each action's range, over different observations. weights: of what acts, the float32 "
        "network that is loaded into stays beside it. int8: 8-bit weights of Linear layers with 64 or more inputs and "
        "outputs, one scale per output, inputs rounded at run time; first call: until the first chunk, compiling "
        "included.",
        "Both paths at once: the slow one thinks without a pause meanwhile, in a thread of the same process or in "
        f"another process; {chosen.parallel.name} runs as {_named(chosen.runtime)}."
        + ("" if chosen.judged else " The goal of 100 Hz beside a 3 B slow path is judged on a GPU alone."),
    ]
    if not cuda:
        notes.append(
            f"{cases.TINY_VLM.name}: a backbone of the SmolVLM family with "
            f"{cases.TINY.layers} text layers of width {cases.TINY.hidden}, frozen: the same way as a large one, not "
            "its cost."
        )
        notes.append(
            "int8 uses torch's own kernels. Tried on a transformer of 53 M parameters with 5 flow steps, one thread: "
            "float32 320 ms, bfloat16 192 ms, these kernels 100 ms, torchao 0.18 weight-only 289 ms and with rounded "
            "inputs 182 ms (not compiled), an own weight-only layer in bfloat16 213 ms; changes of the output between "
            "0.3% and 0.7% of its deviation for all. torchao 0.18 also keeps lerobot 0.4.4 from being imported."
        )
    return notes


def _named(runtime: Runtime) -> str:
    words = [runtime.dtype, *(name for name in ("int8", "compile") if getattr(runtime, name))]
    return ", ".join("compiled" if word == "compile" else word for word in words)


def _filled(more: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Tables without a row cannot be drawn."""
    return {title: rows for title, rows in more.items() if rows}


def main(arguments: list[str] | None = None) -> int:
    """Like the other benchmarks on the CPU; on a GPU the tables go to a file that carries its name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", add_help=False)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    options, rest = parser.parse_known_args(arguments)
    Runtime(device=options.device).require()
    if options.device == "cpu":
        return table.run("policies", partial(measure, size=options.size), rest)
    return _on_gpu(options.device, options.size, rest)


def _on_gpu(device: str, size: str, rest: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies --device cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(rest)
    name = gpu_name(device)
    result = measure(options.quick, device, size)
    result.title += f", on {name}"
    tiny, quick = " --size tiny" if size == "tiny" else "", " --quick" if options.quick else ""
    command = f"python -m benchmarks.policies --device {device}{tiny}{quick}"
    text = render(result, command)
    sys.stdout.write(text)
    if options.json is not None:
        goals = [{"name": g.name, "value": g.value, "target": g.target, "holds": g.holds} for g in result.goals]
        document: dict[str, Any] = {"machine": f"{name}; {label()}", "command": command, "rows": result.rows}
        document |= {"more": result.more, "goals": goals, "notes": result.notes}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.write:
        table.RESULTS.mkdir(parents=True, exist_ok=True)
        (table.RESULTS / f"policies_{slug(name)}.md").write_text(text)
    return 0 if all(goal.holds for goal in result.goals) else 1


def gpu_name(device: str) -> str:
    """As the driver calls it."""
    import torch

    return str(torch.cuda.get_device_name(device)) if torch.cuda.is_available() else device


def slug(name: str) -> str:
    """A name that can be in a file name."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


if __name__ == "__main__":
    raise SystemExit(main())
