"""One row of the tables, in a process of its own, so that its memory and its caches are its own.

python -m benchmarks.policies.row JSON      (prints one line of JSON)
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from benchmarks.policies.cases import Case, Variant, on, prepare
from benchmarks.policies.models import TASK
from benchmarks.policies.together import together
from policies.common.runtime import Runtime
from policies.conformance.data import example_batch, example_observation

if TYPE_CHECKING:
    from policies.interface.policy import LearnedPolicy

_MIB = 2**20


class RowJob(msgspec.Struct, frozen=True):
    """What the process is to do."""

    case: Case
    device: str = "cpu"
    seconds: float = 4.0
    """for each figure"""
    variants: tuple[Variant, ...] = ()
    """compare these with float32 instead"""
    parallel: bool = False
    """think and act at the same time instead"""
    runtime: Runtime = Runtime()


def main(argument: str) -> int:
    """Do the job in `argument` and print what was found."""
    job = msgspec.json.decode(argument, type=RowJob)
    prepare(job.device)
    with tempfile.TemporaryDirectory(prefix="policies-") as directory:
        found = work(job, Path(directory))
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def work(job: RowJob, place: Path) -> list[dict[str, Any]]:
    """Rows of whichever table the job is for."""
    written = job.case.write(place)
    if job.parallel:
        return together(job.case, place, written, on(job.device, job.runtime), job.seconds)
    if job.variants:
        return list(compare(job, place, written))
    return [measure(job, place, written)]


def measure(job: RowJob, place: Path, written: str) -> dict[str, Any]:
    """Sizes, times and memory of one policy in float32."""
    case, runtime = job.case, on(job.device, job.runtime)
    before = MemoryFigures(job.device)
    policy = case.make(place, written, runtime)
    parameters = list(policy.module.parameters())
    thinking, acting = paces(policy, job.seconds)
    acted = before.peak_mib()
    able = runtime.device != "cpu" or available_gib() >= case.train_gib
    batch_ms = training_step_ms(policy, case, job.seconds) if able else None
    # before the weights are packed, which takes memory too
    trained = before.peak_mib() if able else None
    return {
        "policy": case.name,
        "parameters (M)": sum(p.numel() for p in parameters) / 1e6,
        "trained (M)": sum(p.numel() for p in parameters if p.requires_grad) / 1e6,
        "published (MB)": len(policy.save()) / 1e6,
        "H": policy.horizon,
        "think ms": 1e3 * statistics.median(thinking),
        "act ms": 1e3 * statistics.median(acting),
        "act p99 ms": 1e3 * float(np.percentile(acting, 99)),
        "chunks/s": 1 / statistics.median(acting),
        "batch": case.batch,
        "training step ms": batch_ms,
        "MiB to act": acted,
        "MiB to train": trained,
    }


def compare(job: RowJob, place: Path, written: str) -> Iterator[dict[str, Any]]:
    """Each variant against float32, acting in turn, with the same noise."""
    for variant in job.variants:
        sys.stderr.write(f"  {job.case.name}: {variant.name}\n")
        exact = job.case.make(place, written, on(job.device, Runtime()))
        other = job.case.make(place, written, on(job.device, variant.runtime))
        spec = exact.spec
        seen = [example_observation(spec, seed, TASK) for seed in range(8)]
        # what is compiled is compiled here, and both have drawn as much noise afterwards
        first = _timed(lambda policy=other, one=seen[0]: policy.act(one, policy.think(one), 0))  # type: ignore[misc]
        exact.act(seen[0], exact.think(seen[0]), 0)
        spent: dict[str, tuple[list[float], list[float]]] = {"think": ([], []), "act": ([], [])}
        changes: list[np.ndarray] = []
        end = time.perf_counter() + job.seconds
        while time.perf_counter() < end or len(changes) < 4:
            one, chunks = seen[len(changes) % len(seen)], []
            for which, policy in enumerate((exact, other)):
                begun = time.perf_counter()
                latent = policy.think(one)
                between = time.perf_counter()
                chunks.append(policy.act(one, latent, 0).actions)
                spent["act"][which].append(time.perf_counter() - between)
                spent["think"][which].append(between - begun)
            changes.append(np.abs(chunks[0] - chunks[1]) / (spec.action_high() - spec.action_low()))
        medians = {name: [statistics.median(times) for times in both] for name, both in spent.items()}
        yield {
            "policy": job.case.name,
            "runs as": variant.name,
            "float32 act ms": 1e3 * medians["act"][0],
            "act ms": 1e3 * medians["act"][1],
            "act, times as fast": medians["act"][0] / medians["act"][1],
            "think, times as fast": medians["think"][0] / medians["think"][1],
            "float32 weights MB": network_bytes(exact) / 1e6,
            "weights MB": network_bytes(other) / 1e6,
            "mean change (% of range)": 100 * float(np.mean(changes)),
            "largest (%)": 100 * float(np.max(changes)),
            "first call s": first,
        }


def paces(policy: LearnedPolicy, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of each thought and of each chunk, with new images and new states every time."""
    spec = policy.spec
    latent = policy.think(example_observation(spec, 0, TASK))
    policy.act(example_observation(spec, 0, TASK), latent, 0)
    seen = [example_observation(spec, seed, TASK) for seed in range(8)]
    thinking = _repeat(lambda i: policy.think(seen[i % 8]), seconds / 2, 3)
    acting = _repeat(lambda i: policy.act(seen[i % 8], latent, i), seconds, 10)
    return thinking, acting


def training_step_ms(policy: LearnedPolicy, case: Case, seconds: float) -> float:
    """Median milliseconds of loss, gradient and AdamW step on one batch that is there already."""
    import torch

    ahead, history = policy.ticks_ahead, policy.history
    batch = example_batch(policy.spec, policy.horizon, 0, case.batch, 1, ahead, history)
    trained = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-4)

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = policy.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        loss.item()

    step(0)
    return 1e3 * statistics.median(_repeat(step, seconds, 2))


class MemoryFigures:
    """Peak of what a process, or the device it uses, holds beyond what it held when this was made."""

    def __init__(self, device: str) -> None:
        self._device, self._cuda = device, device.startswith("cuda")
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats(device)
        self._held = 0.0 if self._cuda else _resident_mib()

    def peak_mib(self) -> float:
        if self._cuda:
            import torch

            return torch.cuda.max_memory_allocated(self._device) / _MIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - self._held


def network_bytes(policy: LearnedPolicy) -> int:
    """Bytes of the tensors that act."""
    from policies.common.int8 import Int8Linear

    network = getattr(policy, "_acting", policy.module)
    seen = {id(t): t.numel() * t.element_size() for t in (*network.parameters(), *network.buffers())}
    packed = [part for part in network.modules() if isinstance(part, Int8Linear) and part.packed is not None]
    return sum(seen.values()) + sum(part.out_features * (part.in_features + 8) for part in packed)


def _repeat(call: Callable[[int], object], seconds: float, least: int) -> list[float]:
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < least or (time.perf_counter() < end and len(found) < 2000):
        found.append(_timed(lambda: call(len(found))))
    return found


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def available_gib() -> float:
    """Memory that this machine can still give; endless where it does not say."""
    return _from_proc("meminfo", "MemAvailable:", float("inf")) / 2**20


def _resident_mib() -> float:
    return _from_proc("self/status", "VmRSS:", float("nan")) / 1024


def _from_proc(name: str, field: str, otherwise: float) -> float:
    """KiB in a line of a file below /proc."""
    place = Path("/proc") / name
    for line in place.read_text().splitlines() if place.is_file() else ():
        if line.startswith(field):
            return int(line.split()[1])
    return otherwise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
