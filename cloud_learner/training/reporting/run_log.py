"""A training run's curves: TensorBoard's event files, and Weights & Biases where a person has set it up.

Nothing that goes wrong here stops training: it is said once, and that way of showing is given up.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from cloud_learner.algorithms.interface import Metrics
from cloud_learner.training.status import TrainerCounts

log = logging.getLogger(__name__)

PROJECT = "vla-fleet"
_KEY, _MODE = "WANDB_API_KEY", "WANDB_MODE"


class CurveWriter(Protocol):
    """Where curves go."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardWriter:
    """Event files below a directory: `tensorboard --logdir DIRECTORY`."""

    def __init__(self, directory: Path, step: int) -> None:
        """Curves go on at gradient step `step`; what a process that was killed wrote behind it is not shown."""
        from tensorboardX import SummaryWriter

        # what another trainer of this directory wrote last is newer than its checkpoint
        self._writer = SummaryWriter(str(directory), purge_step=step or None, flush_secs=10)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases, which goes on after a restart."""

    def __init__(self, directory: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        place = directory / "wandb-run"
        known = place.read_text().strip() if place.exists() else ""
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name,
            id=known or None,
            resume="allow",
            dir=str(directory),
            config=dict(config),
        )
        place.write_text(self._run.id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class RunLog:
    """Looks at a trainer's counts and writes what is new."""

    def __init__(self, writers: list[CurveWriter]) -> None:
        self._writers = writers
        self._written = -1

    @classmethod
    def open(cls, directory: Path, name: str, step: int, config: Mapping[str, Any]) -> RunLog:
        """Below `directory`; `step`: the gradient step that the run goes on from."""
        writers: list[CurveWriter] = []
        wanted: list[tuple[str, Any]] = [("TensorBoard", lambda: TensorBoardWriter(directory, step))]
        if os.environ.get(_KEY) or os.environ.get(_MODE):
            if importlib.util.find_spec("wandb") is None:
                log.warning("Weights & Biases: %s is set, and the package is not installed: pip install wandb.", _KEY)
            else:
                wanted.append(("Weights & Biases", lambda: WandbWriter(directory, name, config)))
        for what, make in wanted:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                writers.append(make())
            except Exception as error:  # noqa: BLE001 - a curve is never worth a run
                log.warning("%s: no curves there: %s", what, error)
        return cls(writers)

    def poll(self, counts: TrainerCounts) -> None:
        """Write what `counts` has, once for each gradient step at most."""
        status = counts.status
        if status is None or status.gradient_steps <= self._written:
            return
        self._written = status.gradient_steps
        self.write(status.gradient_steps, dict(curves(counts)))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """What is known at gradient step `step`, by the names of curves."""
        for writer in list(self._writers):
            try:
                writer.write(step, values)
            except Exception as error:  # noqa: BLE001 - a curve is never worth a run
                log.warning("%s: no curves any more: %s", type(writer).__name__, error)
                self._writers.remove(writer)

    def close(self) -> None:
        """Write what waits."""
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:  # noqa: BLE001 - a curve is never worth a run
                log.warning("%s: the last curves are lost: %s", type(writer).__name__, error)
        self._writers.clear()


def curves(counts: TrainerCounts) -> Iterator[tuple[str, float]]:
    """What there is to draw, by name."""
    if (status := counts.status) is None:
        return
    yield from (
        ("loss", status.loss),
        ("throughput/gradient_steps_per_second", status.steps_per_s),
        ("data/steps_that_may_be_drawn", status.imitated_steps),
        ("data/draws_of_a_step_while_in_memory", status.echo),
        ("versions/newest", counts.version),
        ("versions/not_let_out", status.refused),
    )
    if status.rollout_steps:
        yield "data/stale_share_of_rollouts", status.stale_steps / status.rollout_steps
    yield from further_curves(counts)


def further_curves(counts: TrainerCounts) -> Iterator[tuple[str, float]]:
    """Of these, what a trainer's status does not say."""
    yield from algorithm_curves(counts.metrics)
    yield from ((f"drawn/{name}", share) for name, share in counts.shares.items())
    if worked_s := counts.batch_wait_s + counts.gradient_step_s:
        yield "time/share_waiting_for_batches", counts.batch_wait_s / worked_s
    if counts.published:
        yield "time/seconds_to_publish", counts.publish_s / counts.published
    if counts.publishing.action_change is not None:
        yield "versions/change_of_actions", counts.publishing.action_change
    if counts.publishing.quantization_change is not None:
        yield "versions/change_by_quantisation", counts.publishing.quantization_change


def algorithm_curves(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """What an update said of itself, beside its loss."""
    yield from ((f"algorithm/{name}", value) for name, value in metrics.items() if name != "loss")
