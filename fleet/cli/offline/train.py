"""`vla-fleet train`: from a buffer or a LeRobotDataset to a weights file."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from fleet.cli.offline.population import Population, noted, train_population
from fleet.cli.offline.progress import (
    NotedProgress,
    ProgressSink,
    WorkProgress,
    read_progress,
    request_stop,
    say_beside,
    show_noted_progress,
    show_progress,
)
from fleet.cli.offline.tuned_settings import read_tuned
from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.overrides import Overrides, unset
from fleet.config.process_options import LEARNING, NOTHING, ProcessOptions, Seed
from fleet.config.recipe import Recipe
from fleet.launch.run_record import keep_record, make_record, newest_record, require_same_training
from wire.errors import ConfigError, InvalidDataError

if TYPE_CHECKING:
    from cloud_learner.training.offline.held_out_loss import HeldOutLoss
    from cloud_learner.training.offline.offline_trainer import OfflineTrainer
    from cloud_learner.training.ranks.group import RankGroup
    from robot_edge.runtime.lifecycle import ShutdownSignal

_RECENT = 50
"""losses that the mean which is shown is of"""
_CURVE_S = 1.0
"""between two points of a curve"""
_HELD_OUT = 0.1
"""of the episodes, where a population is tuned and the recipe holds none out"""


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
    ranks: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes that share weights and batches, by Ray Train: one for each graphics card, or each a "
            "processor. They see OUT and the data under the same names.",
        ),
    ] = 1
    population: Annotated[
        int | None,
        unset(
            "Trainings beside each other, by Ray Tune, that differ by what --tune names; every so often the worst "
            "becomes a copy of the best, with settings near its. 0: none; default: the recipe's population.members.",
            min=0,
        ),
    ] = None
    tune: Annotated[
        list[str],
        typer.Option(
            metavar="PATH=VALUES",
            show_default=False,
            help="Of a population: a field of training or algorithm with LOW..HIGH or VALUE,VALUE,... such as "
            "training.learning_rate=1e-4..1e-2; may be repeated. Default: the recipe's population.tune.",
        ),
    ] = field(default_factory=list)
    ray_address: Annotated[
        str,
        unset("With --ranks or --population: the Ray cluster, auto or HOST:PORT; default: one of this machine alone."),
    ] = ""
    overrides: Annotated[Overrides, LEARNING] = NOTHING

    def with_needs_of_recipe(self) -> TrainOptions:
        """See `Overrides.with_needs_of`."""
        return replace(self, overrides=self.overrides.with_needs_of(self.make_recipe(self.seed)))

    def with_settings(self, given: list[str]) -> TrainOptions:
        """As if --set had said these as well."""
        return replace(self, overrides=replace(self.overrides, set_=[*self.overrides.set_, *given]))


def train(options: TrainOptions) -> None:
    """Train on what is recorded, without a fleet; the same command goes on where it was interrupted.

    Other settings and more steps go on, too; other data, another --from or another --seed needs another OUT. Ctrl-C
    saves and ends. `tensorboard --logdir OUT/curves` draws it. The weights are for `vla-fleet eval`, `compare`, and `up
    --from OUT`.
    """
    from fleet.launch.builders import limit_threads
    from robot_edge.runtime.lifecycle import ShutdownSignal

    limit_threads(options.threads)
    options = _with_population(options).with_needs_of_recipe()
    recipe, choice = options.overrides.applied(options.make_recipe(options.seed)), options.overrides.choice()
    steps, tuned = options.steps or recipe.training.pretrain_steps, read_tuned(recipe, recipe.population.tune)
    members = recipe.population.members
    if options.ray_address and options.ranks == 1 and not members:
        raise ConfigError(f"--ray-address {options.ray_address} needs --ranks N, of 2 or more, or --population N.")
    _check_population(options, recipe)
    if options.ranks > 1 and recipe.members:
        raise ConfigError(
            f"recipe '{recipe.name}' is for robots of several shapes, which one rank trains: leave --ranks out."
        )
    recipe.algorithm.require_ranks(options.ranks)
    if recipe.training.batch % options.ranks:
        raise ConfigError(
            f"{options.ranks} ranks cannot share a batch of {recipe.training.batch} evenly; say --set training.batch=N "
            "with a multiple."
        )
    if not steps:
        raise ConfigError(f"recipe '{recipe.name}' pretrains nothing: say --steps N.")
    run = DataDirectory(options.out.resolve())
    data = _buffer_of(options, recipe, run)
    identity = RunIdentity.of(recipe, options.seed, choice)
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
        if _has_begun(run) and (before := newest_record(run, "train")) is not None:
            require_same_training(run, before, record)
        keep_record(run, record)
        if options.dataset is not None:
            _take_in(options.dataset, recipe, run)
        training = _Training(options, data, run, steps)
        if members:
            every = recipe.population.every or max(1, steps // 10)
            population = Population(run, steps, every, training.train_member, training.open_held_out_loss)
            said = train_population(
                population, members, tuned, options.seed, lambda: shutdown.requested, options.ray_address
            )
        elif options.ranks == 1:
            with show_progress(steps, "steps") as progress:
                said = training.go_on(None, progress, lambda: shutdown.requested)
        else:
            said = _train_on_ranks(training, shutdown)
        typer.echo(said)


@dataclass(frozen=True)
class _Training:
    """What a process of it needs to know; it goes to ranks on other nodes."""

    options: TrainOptions
    data: DataDirectory
    run: DataDirectory
    steps: int

    def go_on(
        self, group: RankGroup | None, progress: ProgressSink, stopped: Callable[[], bool] = lambda: False
    ) -> str:
        """Train from the newest checkpoint on; what became of it, for people. Of several ranks each calls this."""
        from fleet.launch.learning import open_offline_trainer

        options = self.options
        recipe = options.overrides.applied(options.make_recipe(options.seed))
        where = recipe, self.data, self.run, options.seed, self.steps, options.snapshot
        try:
            with open_offline_trainer(*where, group) as trainer:
                if group is None or not group.rank:
                    return _train(trainer, self.run, self.steps, progress, stopped)
                trainer.follow()
                return ""
        except InvalidDataError as error:
            raise InvalidDataError(f"{self.data.root}: {error}") from error

    # --- as RankedWork --------------------------------------------------------------------------------------------

    @property
    def noted(self) -> Path:
        """Where the first rank says how far it is."""
        return self.run.root / "ranks" / "progress.json"

    def run_rank(self, group: RankGroup) -> None:
        """`go_on` in a process of its own."""
        from fleet.launch.builders import limit_threads

        limit_threads(self.options.threads)
        if group.rank:
            self.go_on(group, WorkProgress(self.steps, "steps"))
            return
        progress = NotedProgress(self.noted)
        progress.end(self.go_on(group, progress, lambda: progress.stop_requested))

    def reached(self) -> int:
        """Gradient steps of the newest checkpoint, 0 when there is none."""
        from cloud_learner.training.checkpoints.checkpoint import newest_gradient_steps

        return newest_gradient_steps(self.run.training)

    def say(self, text: str) -> None:
        """To whoever is shown the progress."""
        say_beside(self.noted, text)

    def request_stop(self) -> None:
        """Have the first rank save and end."""
        request_stop(self.noted)

    # --- of a population ------------------------------------------------------------------------------------------

    def train_member(self, run: DataDirectory, steps: int, settings: list[str]) -> None:
        """As `TrainMember`."""
        from fleet.launch.builders import limit_threads

        options = self.options.with_settings(settings)
        limit_threads(options.threads)
        recipe, choice = options.overrides.applied(options.make_recipe(options.seed)), options.overrides.choice()
        with run.prepare(RunIdentity.of(recipe, options.seed, choice)):
            found, given = newest_record(run), options.overrides.set_
            if found is None or found.given != given:
                about = {"data": str(self.data.root), "snapshot": options.snapshot, "steps": self.steps}
                record = make_record("train", recipe, options.seed, choice, given, **about)
                # that of the process is Ray's
                keep_record(run, msgspec.structs.replace(record, command_line=[]))
            member = replace(self, options=options, run=run, steps=steps)
            member.go_on(None, NotedProgress(noted(run)))

    def open_held_out_loss(self) -> HeldOutLoss:
        """By which members are compared: it has nothing of what they differ by."""
        from fleet.launch.learning import open_held_out_loss

        options = self.options
        recipe = options.overrides.applied(options.make_recipe(options.seed))
        return open_held_out_loss(recipe, self.data, options.seed, options.snapshot)


def _with_population(options: TrainOptions) -> TrainOptions:
    """What --population and --tune say as settings; a population holds something out."""
    given = [] if options.population is None else [f"population.members={options.population}"]
    given += [f"population.tune={json.dumps(options.tune)}"] if options.tune else []
    options = options.with_settings(given)
    recipe = options.overrides.applied(options.make_recipe(options.seed))
    held_out = recipe.validation or not recipe.population.members
    return options if held_out else options.with_settings([f"validation={_HELD_OUT}"])


def _check_population(options: TrainOptions, recipe: Recipe) -> None:
    """Raises `ConfigError` for one that cannot be trained."""
    if not recipe.population.members:
        if options.tune:
            raise ConfigError("--tune needs --population N, of 2 or more: one training keeps its settings.")
        return
    if not recipe.population.tune:
        raise ConfigError("a population needs something to tune: say --tune PATH=LOW..HIGH, of training or algorithm.")
    if options.ranks > 1:
        raise ConfigError("each of a population is one process: leave --ranks out, or --population.")
    recipe.require_one_shape("a population")


def _train_on_ranks(training: _Training, shutdown: ShutdownSignal) -> str:
    from fleet.ray_backend.ranks import train_on_ranks

    options, directory = training.options, training.noted.parent
    with show_noted_progress(training.noted, training.steps, "steps"):
        # what a rank computes is where its policy is
        gpus = options.overrides.uses_gpu
        train_on_ranks(training, options.ranks, directory, options.ray_address, gpus, lambda: shutdown.count)
    return read_progress(training.noted).ended


def _buffer_of(options: TrainOptions, recipe: Recipe, run: DataDirectory) -> DataDirectory:
    """Where the buffer lies that is trained on. Raises `ConfigError` when there is none."""
    if options.dataset is not None:
        if options.data is not None or options.snapshot:
            raise ConfigError("--dataset is trained on alone: leave --data and --snapshot out.")
        recipe.require_one_shape("a LeRobotDataset")
        return run
    data = DataDirectory(options.root.resolve())
    if not data.root.is_dir() or not data.buffer.exists():
        raise ConfigError(
            f"no fleet has recorded anything in {data.root}. Choose another --data, or say --dataset to train on a "
            "LeRobotDataset."
        )
    return data


def _has_begun(run: DataDirectory) -> bool:
    """Whether something is there that a training would go on with: weights, a checkpoint, or a dataset, if in part."""
    if run.trained.exists() or any(run.training.glob("*-*")) or any(run.population.glob("*/training/*-*")):
        return True
    if not run.buffer.exists():
        return False
    with run.open_buffer() as (ledger, _store):
        return ledger.totals().episodes > 0


def _take_in(dataset: Path, recipe: Recipe, run: DataDirectory) -> None:
    """Store the dataset in the run's own buffer; what is there already is not stored twice."""
    from cloud_learner.buffer.lerobot.importer import import_dataset
    from cloud_learner.buffer.lerobot.mapping import DatasetMapping

    tasks = {sentence: name for name, sentence in recipe.instructions.items()}
    with run.open_buffer(write=True, create=True) as (ledger, store):
        done = import_dataset(ledger, store, dataset, DatasetMapping(spec=recipe.spec, tasks=tasks))
    typer.echo(f"{dataset}: {done.episodes} episodes taken in, {done.known} were there.", err=True)


def _train(
    trainer: OfflineTrainer, run: DataDirectory, steps: int, progress: ProgressSink, stopped: Callable[[], bool]
) -> str:
    from cloud_learner.buffer.files import write_durably
    from cloud_learner.training.reporting.run_log import RunLog, algorithm_curves

    learner, began = trainer.learner, trainer.learner.gradient_steps
    if began:
        progress.say(f"resumed at gradient step {began}.")
    progress.begin(began)
    losses: deque[float] = deque(maxlen=_RECENT)
    curves, drawn_s = RunLog.open(run.curves, f"train {run.root.name}", began, {}), 0.0
    with contextlib.closing(curves):
        while not (trainer.finished or stopped()):
            metrics = trainer.step()
            losses.append(metrics["loss"])
            progress.update(learner.gradient_steps, f"loss {_mean(losses):.4g}")
            if trainer.finished or time.monotonic() - drawn_s > _CURVE_S:
                curves.write(learner.gradient_steps, {"loss": _mean(losses), **dict(algorithm_curves(metrics))})
                drawn_s = time.monotonic()
    if learner.gradient_steps > began:
        trainer.save()
    if not trainer.finished:
        return f"stopped and saved at gradient step {learner.gradient_steps} of {steps}: the same command goes on."
    write_durably(run.trained, trainer.weights(), "writing the weights")
    loss = f", loss {_mean(losses):.4g}" if losses else ""
    return f"{run.trained}: after {learner.gradient_steps} gradient steps{loss}."


def _mean(losses: Collection[float]) -> float:
    return sum(losses) / len(losses)
