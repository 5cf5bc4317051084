"""How fast a policy acts while it thinks: the slow path in a thread with a stream of its own, or in another process."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from benchmarks.policies.cases import Case, prepare
from benchmarks.policies.models import TASK
from policies.common.runtime import Runtime
from policies.conformance.data import example_observation

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from policies.interface.policy import LearnedPolicy
    from wire.types import Latent

ALONE, THREADS, PROCESSES = "each alone", "two threads", "two processes"
_START_S, _FOREVER = 1800.0, float("inf")
T = TypeVar("T")


class TogetherFigures(Protocol):
    """An event of threads or of processes."""

    def is_set(self) -> bool: ...


def together(case: Case, place: Path, written: str, runtime: Runtime, seconds: float) -> list[dict[str, Any]]:
    """Rates of both paths: each alone, then together in one process, then in two."""
    policy = case.make(place, written, runtime)
    _settle(runtime.device)
    seen = example_observation(policy.spec, 0, TASK)
    done = threading.Event()
    # one thread thinks from the first time on: what torch records as a graph belongs to the thread that recorded it
    with _Thinker(runtime.device) as thinker, _prior(runtime.device):
        latent = thinker.submit(_warm, lambda: policy.think(seen)).result()
        _warm(lambda: policy.act(seen, latent, 0))
        thoughts = thinker.submit(_thinking, policy, seconds, done).result()
        acts = _acting(policy, latent, seconds)
        rows = [_row(case, runtime, ALONE, thoughts, acts)]
        running = thinker.submit(_thinking, policy, _FOREVER, done)
        try:
            acts = _acting(policy, latent, seconds)
        finally:
            done.set()
        rows.append(_row(case, runtime, THREADS, running.result(), acts))
    rows.append(_apart(case, place, written, runtime, seconds, policy, latent))
    return rows


def _apart(
    case: Case, place: Path, written: str, runtime: Runtime, seconds: float, policy: LearnedPolicy, latent: Latent
) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ready, done, answers = context.Event(), context.Event(), context.Queue()
    process = context.Process(
        target=think_process, args=(case, place, written, runtime, ready, done, answers), name="think"
    )
    process.start()
    try:
        end = time.monotonic() + _START_S
        while not ready.wait(0.2):
            if not process.is_alive() or time.monotonic() > end:
                raise RuntimeError(f"the thinking process of '{case.name}' did not start (exit {process.exitcode})")
        acts = _acting(policy, latent, seconds)
        done.set()
        thoughts = answers.get(timeout=120)
    finally:
        done.set()
        process.join(30)
        if process.is_alive():
            process.terminate()
    return _row(case, runtime, PROCESSES, thoughts, acts)


def think_process(
    case: Case, place: Path, written: str, runtime: Runtime, ready: Event, done: Event, answers: Any
) -> None:
    """Think until `done`, then say how long each thought took."""
    prepare(runtime.device)
    policy = case.make(place, written, runtime)
    seen = example_observation(policy.spec, 0, TASK)
    _warm(lambda: policy.think(seen))
    ready.set()
    answers.put(_thinking(policy, _FOREVER, done))


def _row(case: Case, runtime: Runtime, how: str, thoughts: list[float], acts: list[float]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "policy": case.name,
        "think and act": how,
        "act Hz": 1 / statistics.mean(acts),
        "act p50 ms": 1e3 * statistics.median(acts),
        "act p99 ms": 1e3 * float(np.percentile(acts, 99)),
        "think Hz": 1 / statistics.mean(thoughts),
        "think p50 ms": 1e3 * statistics.median(thoughts),
    }
    if runtime.device.startswith("cuda"):
        import torch

        row["GiB of the acting process"] = torch.cuda.max_memory_allocated(runtime.device) / 2**30
    return row


def _warm(call: Callable[[], T]) -> T:
    """What `call` gives, when it has run often enough to be compiled and recorded."""
    for _ in range(3):
        call()
    return call()


def _thinking(policy: LearnedPolicy, seconds: float, done: TogetherFigures) -> list[float]:
    """Seconds of each thought, one after the other; at least one."""
    seen = [example_observation(policy.spec, seed, TASK) for seed in range(4)]
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or (time.perf_counter() < end and not done.is_set()):
        begun = time.perf_counter()
        policy.think(seen[len(found) % 4])
        found.append(time.perf_counter() - begun)
    return found


def _acting(policy: LearnedPolicy, latent: Latent, seconds: float) -> list[float]:
    """Seconds of each chunk, one after the other."""
    seen = [example_observation(policy.spec, seed, TASK) for seed in range(4)]
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 5:
        begun = time.perf_counter()
        policy.act(seen[len(found) % 4], latent, len(found))
        found.append(time.perf_counter() - begun)
    return found


class _Thinker(ThreadPoolExecutor):
    """One thread. On CUDA its work goes into a stream that yields to the acting thread's."""

    def __init__(self, device: str) -> None:
        super().__init__(1, thread_name_prefix="think", initializer=_yielding, initargs=(device,))


def _yielding(device: str) -> None:
    """Give the calling thread a CUDA stream of the lowest priority."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_stream(torch.cuda.Stream(torch.device(device), priority=0))


def _settle(device: str) -> None:
    """Wait until the weights are where other streams will read them."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def _prior(device: str) -> contextlib.AbstractContextManager[Any]:
    """A stream of high priority for the calling thread."""
    if not device.startswith("cuda"):
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream(torch.device(device), priority=-1))
