"""`vla-fleet train`: from a buffer or a LeRobotDataset to a weights file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.offline.progress import show_progress
from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.overrides import Overrides, unset
from fleet.config.process_options import LEARNING, NOTHING, ProcessOptions, Seed
from fleet.config.recipe import Recipe
from fleet.launch.run_record import keep_record, make_record
from wire.errors import ConfigError, InvalidDataError

if TYPE_CHECKING:
    from cloud_learner.training.offline.offline_trainer import OfflineTrainer

_RECENT = 50
"""losses that the mean which is shown is of"""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ProcessOptions):
    data: Annotated[
        Path | None,
        typer.Option(help="Data directory of a fleet, whose buffer is trained on; default data/RECIPE."),
    ] = None
    snapshot: Annotated[str, unset("Train on what this snapshot of the buffer holds; default: on all.")] = ""
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="Train on this LeRobotDataset v3 instead, which is taken into OUT. Its names and rate have to be the "
            "robot's; where they are not, use `vla-fleet buffer import-lerobot` and --data."
        ),
    ] = None
    steps: Annotated[
        int, typer.Option(min=0, help="Gradient steps in all; 0: the recipe's training.pretrain_steps.")
    ] = 0
    out: Annotated[
        Path,
        typer.Option(help="Directory of this training: checkpoints, and trained.safetensors in the end."),
    ]
    seed: Seed = 0
    threads: Annotated[
        int,
        typer.Option(
            min=1, help="Processor threads of torch. More help large networks, on cores that nobody else uses."
        ),
    ] = 1
    overrides: Annotated[Overrides, LEARNING] = NOTHING


def train(options: TrainOptions) -> None:
    """Train on what is recorded, without a fleet; the same command goes on where it was interrupted.

    Ctrl-C saves and ends. The weights are for `vla-fleet eval`, `compare`, and `up --from OUT`.
    """
    from fleet.launch.builders import limit_threads
    from fleet.launch.factories import open_offline_trainer
    from robot_edge.runtime.lifecycle import ShutdownSignal

    limit_threads(options.threads)
    recipe, choice = options.overrides.applied(options.make_recipe(options.seed)), options.overrides.choice()
    steps = options.steps or recipe.training.pretrain_steps
    if not steps:
        raise ConfigError(f"recipe '{recipe.name}' pretrains nothing: say --steps N.")
    run = DataDirectory(options.out.resolve())
    data = _buffer_of(options, run)
    identity = RunIdentity(recipe.name, options.seed, recipe.spec.data_hash, choice, str(recipe.config or ""))
    with run.prepare(identity):
        shutdown = ShutdownSignal()
        record = make_record(
            "train",
            recipe,
            options.seed,
            choice,
            options.overrides.set_,
            data=str(data.root) if data != run else "",
            snapshot=options.snapshot,
            dataset=str(options.dataset.resolve()) if options.dataset is not None else "",
            steps=steps,
        )
        keep_record(run, record)
        if options.dataset is not None:
            _take_in(options.dataset, recipe, run)
        try:
            with open_offline_trainer(recipe, data, run, options.seed, steps, options.snapshot) as trainer:
                _train(trainer, run, steps, lambda: shutdown.requested)
        except InvalidDataError as error:
            raise InvalidDataError(f"{data.root}: {error}") from error


def _buffer_of(options: TrainOptions, run: DataDirectory) -> DataDirectory:
    """Where the buffer lies that is trained on. Raises `ConfigError` when there is none."""
    if options.dataset is not None:
        if options.data is not None or options.snapshot:
            raise ConfigError("--dataset is trained on alone: leave --data and --snapshot out.")
        return run
    data = DataDirectory(options.root.resolve())
    if not data.root.is_dir() or not data.buffer.exists():
        raise ConfigError(
            f"no fleet has recorded anything in {data.root}. Choose another --data, or say --dataset to train on a "
            "LeRobotDataset."
        )
    return data


def _take_in(dataset: Path, recipe: Recipe, run: DataDirectory) -> None:
    """Store the dataset in the run's own buffer; what is there already is not stored twice."""
    from cloud_learner.buffer.lerobot.importer import import_dataset
    from cloud_learner.buffer.lerobot.mapping import DatasetMapping

    tasks = {sentence: name for name, sentence in recipe.instructions.items()}
    with run.open_buffer(write=True, create=True) as (ledger, store):
        done = import_dataset(ledger, store, dataset, DatasetMapping(spec=recipe.spec, tasks=tasks))
    typer.echo(f"{dataset}: {done.episodes} episodes taken in, {done.known} were there.", err=True)


def _train(trainer: OfflineTrainer, run: DataDirectory, steps: int, stopped: Callable[[], bool]) -> None:
    from cloud_learner.buffer.files import write_durably

    learner, began = trainer.learner, trainer.learner.gradient_steps
    if began:
        typer.echo(f"resumed at gradient step {began}.", err=True)
    losses: deque[float] = deque(maxlen=_RECENT)
    with show_progress(steps, "steps", began) as progress:
        while not (trainer.finished or stopped()):
            losses.append(trainer.step()["loss"])
            progress.update(learner.gradient_steps, f"loss {_mean(losses):.4g}")
    if learner.gradient_steps > began:
        trainer.save()
    if not trainer.finished:
        typer.echo(f"stopped and saved at gradient step {learner.gradient_steps} of {steps}: the same command goes on.")
        return
    write_durably(run.trained, trainer.weights(), "writing the weights")
    loss = f", loss {_mean(losses):.4g}" if losses else ""
    typer.echo(f"{run.trained}: after {learner.gradient_steps} gradient steps{loss}.")


def _mean(losses: Collection[float]) -> float:
    return sum(losses) / len(losses)
