"""`vla-fleet rewards`: models that judge episodes: train one, see what it is worth, label with it, see what it said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.offline.progress import show_progress
from fleet.cli.options import AsJson, echo_json, take_interrupts
from fleet.cli.stored.buffer import DATA, Data
from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import unset
from fleet.evaluation.statistics import wilson
from wire.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from cloud_learner.buffer.ledger.ledger import Ledger
    from cloud_learner.buffer.store.store import SegmentStore
    from cloud_learner.rewards.calibration import SuccessMeasurement, Thresholds
    from cloud_learner.rewards.interface import SuccessModel
    from cloud_learner.rewards.model_labels import LabelModel
    from wire.types import RobotSpec

app = typer.Typer(
    name="rewards",
    help="Models that judge episodes: train, measure, label with them. docs/rewards.md has which to choose when.",
    no_args_is_help=True,
)

Robot = Annotated[str, unset("Hash of a robot's spec, where robots of several shapes recorded; default: the newest's.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="Only these tasks; default: all there are.")]
Precision = Annotated[
    float, typer.Option(help="Share of what it calls a success, and of what it calls a failure, that must be right.")
]
Confidence = Annotated[float, typer.Option(help="With which that must be shown on episodes that were held out.")]
_POLL_S = 2.0
_NAMED = 20


@app.command()
def train(
    data: Data = DATA,
    task: Tasks = None,
    robot: Robot = "",
    precision: Precision = 0.9,
    confidence: Confidence = 0.9,
    last_steps: Annotated[int, typer.Option(min=1, max=1024, help="Of each episode it looks at so many.")] = 8,
    updates: Annotated[int, typer.Option(min=1, help="Gradient steps.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="Another one makes another network of the same episodes.")] = 0,
) -> None:
    """Train a success classifier on the episodes that people or the record judged, and say what it is worth."""
    from cloud_learner.buffer.files import write_durably
    from cloud_learner.rewards.classifier_training import ClassifierConfig, read_judged, train_classifier
    from cloud_learner.rewards.model_labels import ModelLabels
    from cloud_learner.rewards.registry import CLASSIFIER
    from fleet.launch.builders import limit_threads

    limit_threads()
    config = ClassifierConfig(steps=last_steps, updates=updates, precision=precision, confidence=confidence)
    directory = DataDirectory(data)
    with directory.open_buffer(write=True) as (ledger, store):
        spec, tasks = _robot(ledger, robot, task)
        judged = read_judged(ledger, store, spec, tasks, config.steps, config.most)
        for reason, count in judged.left_out.items():
            typer.echo(f"{count} judged episodes are left out: {reason}.", err=True)
        with show_progress(updates, "updates") as shown:
            made = train_classifier(
                judged, spec, tasks, config, seed, lambda done, loss: shown.update(done, f"loss {loss:.3g}")
            )
        models = ModelLabels(ledger, CLASSIFIER).models()
        number = len(models) + (not models or models[-1].sha256 != made.sha256)
        path = directory.rewards / f"classifier-{number:06}.safetensors"
        path.parent.mkdir(exist_ok=True)
        write_durably(path, made.save(), "writing a success classifier")
        adopted = _adopt(ledger, store, spec, tasks, CLASSIFIER, made, precision, confidence, True)
    failures, successes = made.header.learned_from
    typer.echo(f"{path}: learned from {successes} successes and {failures} failures of {', '.join(tasks)}.")
    typer.echo(f"model {adopted.number}, {adopted.about}")
    typer.echo("`vla-fleet rewards relabel` has it judge what is recorded.")


@app.command()
def relabel(
    model: Annotated[
        str, typer.Argument(metavar="KIND[:PATH]", help="classifier, lerobot:DIRECTORY, or another package's.")
    ] = "classifier",
    data: Data = DATA,
    task: Tasks = None,
    robot: Robot = "",
    precision: Precision = 0.9,
    confidence: Confidence = 0.9,
    as_newest: Annotated[
        bool, typer.Option("--as-newest", help="An older model is to count again: label all by it.")
    ] = False,
    follow: Annotated[bool, typer.Option("-f/-F", "--follow/--no-follow", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Have a model judge the episodes in the buffer, beside the fleet; the same command goes on after a stop.

    A model from elsewhere is measured first, on episodes that people or the record judged.
    """
    from cloud_learner.rewards.registry import CLASSIFIER, open_model
    from cloud_learner.rewards.relabelling import Relabelling
    from fleet.launch.builders import limit_threads

    limit_threads()
    kind, _, place = model.partition(":")
    directory = DataDirectory(data)
    if not place and kind != CLASSIFIER:
        raise ConfigError(f"model '{kind}' lies somewhere: say {kind}:PATH.")
    opened = open_model(kind, Path(place) if place else directory.rewards)
    with directory.open_buffer(write=True) as (ledger, store):
        spec, tasks = _robot(ledger, robot, task)
        opened.require(spec)
        adopted = _adopt(ledger, store, spec, tasks, kind, opened, precision, confidence, as_newest)
        job = Relabelling(ledger, store, spec, tasks, kind, opened, adopted)
        if follow:
            take_interrupts()
        try:
            left = job.poll()
            with show_progress(left, "episodes") as shown:
                while left or follow:
                    if not left:
                        time.sleep(_POLL_S)
                    try:
                        left = job.poll()
                    except StorageError as error:
                        if not follow:
                            raise
                        shown.say(f"{error} It is tried again.")
                        left = 0
                    shown.update(job.labelled, "", job.labelled + left)
        except KeyboardInterrupt:
            typer.echo("stopped: the same command goes on.", err=True)
    typer.echo(f"{job.labelled} episodes labelled by {kind} model {adopted.number}.")
    for reason, count in job.left_out.items():
        typer.echo(f"{count} are left out: {reason}.")


@app.command()
def show(data: Data = DATA, task: Tasks = None, robot: Robot = "", as_json: AsJson = False) -> None:
    """What models said, by which model, what that is worth, and where it is not what people or the record say."""
    from cloud_learner.rewards.registry import known
    from cloud_learner.rewards.verdicts import summarize

    with DataDirectory(data).open_buffer() as (ledger, _store):
        spec, tasks = _robot(ledger, robot, task)
        found = {kind: summarize(ledger, spec, tasks, kind) for kind in sorted(known())}
    found = {kind: one for kind, one in found.items() if one.models}
    if as_json:
        echo_json(found)
        return
    if not found:
        typer.echo("no model has judged anything: `vla-fleet rewards train` makes one.")
    for kind, one in found.items():
        newest = one.models[-1]
        typer.echo(f"{kind}: model {newest.number} counts; {newest.about}")
        done = one.by_model.get(newest.number, 0)
        typer.echo(
            f"it has labelled {done} of {one.ended} episodes: {one.says_success} successes, {one.says_failure} "
            f"failures, nothing of {done - one.says_success - one.says_failure}."
        )
        if old := {number: count for number, count in one.by_model.items() if number != newest.number}:
            said = ", ".join(f"{count} of model {number}" for number, count in old.items())
            typer.echo(
                f"labels of old models, which do not count: {said}. `vla-fleet rewards relabel {kind}` renews them."
            )
        typer.echo(
            f"it agrees with people and the record in {one.agrees} episodes and contradicts {len(one.contradicts)}."
        )
        for name in one.contradicts[:_NAMED]:
            typer.echo(f"  {name}")


def render(measured: SuccessMeasurement, thresholds: Thresholds) -> str:
    """For people: precision, recall and calibration, with intervals of 95 %."""
    failures = measured.episodes - measured.successes
    lines = [
        f"measured on {measured.successes} successes and {failures} failures that were held out (intervals of 95 %):",
        _said(
            "success", thresholds.success_at, "from", measured.said_success, measured.right_success, measured.successes
        ),
        _said("failure", thresholds.failure_at, "up to", measured.said_failure, measured.right_failure, failures),
        f"  calibration error {measured.calibration_error:.3f}; successes by score:",
    ]
    for one in measured.bins:
        share = _share(one.successes, one.episodes)
        lines.append(f"    {one.low:.1f} to {one.high:.1f}, on average {one.mean_score:.2f}: {share}")
    return "\n".join([*lines, *(f"  {note}" for note in thresholds.notes)])


def _said(word: str, at: float | None, side: str, said: int, right: int, there: int) -> str:
    if at is None:
        return f"  {word}: never said."
    return f"  {word}, {side} {at:.3f}: precision {_share(right, said)}, recall {_share(right, there)}"


def _share(count: int, of: int) -> str:
    if not of:
        return "of none"
    low, high = wilson(count, of)
    return f"{count / of:.2f} [{low:.2f}, {high:.2f}] ({count} of {of})"


def _adopt(
    ledger: Ledger,
    store: SegmentStore,
    spec: RobotSpec,
    tasks: list[str],
    kind: str,
    model: SuccessModel,
    precision: float,
    confidence: float,
    as_newest: bool,
) -> LabelModel:
    """The model as the labels know it: measured on what is judged, unless it was before."""
    from cloud_learner.rewards.classifier_training import measure_model, read_judged
    from cloud_learner.rewards.model_labels import ModelLabels

    labels = ModelLabels(ledger, kind)
    models = labels.models()
    if models and models[-1].sha256 == model.sha256:
        return models[-1]
    if before := [one for one in models if one.sha256 == model.sha256]:
        thresholds, about = before[-1].thresholds, before[-1].about
    elif model.thresholds is not None and model.measured is not None:
        thresholds, about = model.thresholds, render(model.measured, model.thresholds)
    else:
        covered = [task for task in tasks if not model.tasks or task in model.tasks]
        judged = read_judged(ledger, store, spec, covered, model.steps)
        thresholds, measured = measure_model(model, judged, precision, confidence)
        about = f"measured on this buffer.\n{render(measured, thresholds)}"
        typer.echo(about, err=True)
    return labels.adopt(model.sha256, thresholds, about, as_newest)


def _robot(ledger: Ledger, wanted: str, tasks: list[str] | None) -> tuple[RobotSpec, list[str]]:
    """Whose episodes are meant, and of which tasks."""
    episodes = ledger.episodes(limit=1)
    if not episodes:
        raise ConfigError("there is no episode in the buffer yet.")
    spec = ledger.spec(wanted or episodes[0].spec_hash)
    there = sorted({task for task, *_ in ledger.shares()})
    if unknown := sorted(set(tasks or ()) - set(there)):
        raise ConfigError(f"there is no episode of task '{unknown[0]}': there are {', '.join(there)}.")
    return spec, tasks or there
