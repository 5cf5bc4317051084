"""`vla-fleet buffer export-* | import-*`: what is stored as a LeRobot dataset or a file, and datasets taken in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.offline.progress import show_progress
from fleet.cli.stored.buffer import DATA, Data, HeldOut, Snapshot, Validation, pairs, to_float
from fleet.config.data_directory import DataDirectory
from fleet.config.process_options import Config
from wire.errors import ConfigError

if TYPE_CHECKING:
    from cloud_learner.buffer.ledger.ledger import Ledger
    from cloud_learner.buffer.lerobot.selection import LeftOut, TransferProgress
    from fleet.config.recipe import Recipe
    from wire.types import RobotSpec

_OUTCOMES = (
    "Only success, failure, aborted, unjudged, discarded or unfinished; default: all that ended and were not discarded."
)

_OTHERS_S = 60.0
"""for gateways that seal"""


def add_commands(app: typer.Typer) -> None:
    """Add them to `vla-fleet buffer`."""
    for command in (export_lerobot, import_lerobot, export_episode):
        app.command()(command)


def export_lerobot(
    out: Annotated[Path, typer.Argument(help="The new directory for the dataset.")],
    data: Data = DATA,
    recipe: Annotated[str, typer.Option(help="Recipe whose sentences name the tasks; empty: the task names.")] = "",
    config: Config = None,
    spec: Annotated[str, typer.Option(help="Robot spec hash, or how it begins, when there are several.")] = "",
    task: Annotated[list[str] | None, typer.Option(help="Only these tasks.")] = None,
    source: Annotated[list[str] | None, typer.Option(help="Only online, demonstration or evaluation.")] = None,
    outcome: Annotated[list[str] | None, typer.Option(help=_OUTCOMES)] = None,
    actor: Annotated[list[str] | None, typer.Option(help="Only the steps of human, script or policy.")] = None,
    newest: Annotated[int, typer.Option(min=0, help="Only so many of the newest episodes; 0: all.")] = 0,
    fps: Annotated[str, typer.Option(help="control, camera, or a rate that divides the control rate.")] = "control",
    video: Annotated[
        bool | None, typer.Option(help="Video or images as stored; default: video where possible.")
    ] = None,
    snapshot: Snapshot = "",
    validation: Validation = None,
    held_out: HeldOut = None,
) -> None:
    """Write episodes as a LeRobotDataset v3 that `lerobot-train` takes."""
    from cloud_learner.buffer.lerobot.exporter import export
    from cloud_learner.buffer.lerobot.selection import Selection

    given = {"tasks": task, "sources": source, "outcomes": outcome, "actors": actor}
    only = {name: tuple(values) for name, values in given.items() if values}
    rate: int | str = int(fps) if fps.isdecimal() and fps.isascii() else fps
    found = _recipe(recipe, config)
    with DataDirectory(data).open_buffer() as (ledger, store), _transfer_progress() as progress:
        robot = _only_spec(ledger, spec)
        chosen = Selection(
            newest=newest,
            until_row=ledger.snapshot_row(snapshot) if snapshot else 0,
            validation=_held_out_share(data, recipe, config, validation, held_out),
            held_out=bool(held_out),
            **only,
        )
        done = export(
            ledger,
            store,
            robot,
            out,
            selection=chosen,
            instructions=found.instructions if found else {},
            fps=rate,
            video=video,
            progress=progress,
        )
    _say_left_out(done.left_out)
    typer.echo(f"{done.path}: {done.episodes} episodes, {done.rows} rows at {done.fps} Hz.")


def import_lerobot(
    root: Annotated[Path, typer.Argument(help="Directory of a LeRobotDataset v3.")],
    data: Data = DATA,
    recipe: Annotated[str, typer.Option(help="Recipe whose robot the data is for; empty: as the data says.")] = "",
    config: Config = None,
    robot: Annotated[str, typer.Option(help="Name under which the episodes are stored.")] = "lerobot",
    by_position: Annotated[bool, typer.Option(help="Take dimensions in their order, whatever their names.")] = False,
    rename: Annotated[list[str] | None, typer.Option(help="ROBOT_DIMENSION=DATASET_NAME, repeatable.")] = None,
    scale: Annotated[list[str] | None, typer.Option(help="ROBOT_DIMENSION=FACTOR, repeatable.")] = None,
    camera: Annotated[list[str] | None, typer.Option(help="ROBOT_CAMERA=DATASET_KEY, repeatable.")] = None,
    resample: Annotated[
        bool, typer.Option("--resample", help="Take rows at another rate than the recipe's robot.")
    ] = False,
    skip_broken: Annotated[bool, typer.Option(help="Leave out what cannot be read and go on.")] = False,
) -> None:
    """Store a LeRobotDataset v3 as offline data; doing it twice stores it once."""
    from cloud_learner.buffer.lerobot.importer import import_dataset
    from cloud_learner.buffer.lerobot.mapping import DatasetMapping
    from cloud_learner.buffer.maintenance.shard_writer import seal

    found = _recipe(recipe, config)
    mapping = DatasetMapping(
        spec=found.spec if found else None,
        robot=robot,
        by_position=by_position,
        names=pairs(rename, "--rename"),
        scale={name: to_float(value, f"--scale {name}") for name, value in pairs(scale, "--scale").items()},
        cameras=pairs(camera, "--camera"),
        resample=resample,
        tasks={sentence: name for name, sentence in found.instructions.items()} if found else {},
    )
    data.mkdir(parents=True, exist_ok=True)
    with DataDirectory(data).open_buffer(write=True, create=True) as (ledger, store), _transfer_progress() as progress:
        done = import_dataset(ledger, store, root, mapping, skip_broken=skip_broken, progress=progress)
        if len(ledger.gateway_names()) > 1:
            # nobody else can read the journal of this data directory, and no gateway may ever run here
            seal(store, time.monotonic_ns(), force=True, wait_s=_OTHERS_S)
    _say_left_out(done.left_out)
    typer.echo(f"{done.episodes} episodes, {done.steps} steps stored as robot '{done.robot}'; {done.known} were known.")


def export_episode(
    episode: Annotated[str, typer.Argument(help="Its id; `buffer tail` names some.")],
    file: Annotated[Path, typer.Argument(help="The new file.")],
    data: Data = DATA,
    recipe: Annotated[str, typer.Option(help="Recipe whose sentence says the task; empty: the task's name.")] = "",
    config: Config = None,
) -> None:
    """Write one episode as a file that the robot `replay` shows again."""
    from cloud_learner.buffer.export_episode import export_episode as export

    found = _recipe(recipe, config)
    with DataDirectory(data).open_buffer() as (ledger, store):
        row = ledger.episode(episode)
        sentence = found.instructions.get(row.task, "") if found and row is not None else ""
        done = export(ledger, store, episode, file, sentence)
    ended = f"ended with {done.outcome}" if done.outcome else "not ended"
    typer.echo(f"{done.path}: {done.steps} steps, {done.frames} pictures, {done.bytes / 1e6:.1f} MB, {ended}.")


@contextlib.contextmanager
def _transfer_progress() -> Iterator[Callable[[TransferProgress], None]]:
    with show_progress(0, "episodes") as shown:
        yield lambda one: shown.update(one.episodes, f"{one.steps} steps", one.of_episodes)


def _say_left_out(left_out: Sequence[LeftOut]) -> None:
    for one in left_out:
        typer.echo(f"left out: {one.episode}: {one.reason}", err=True)


def _recipe(name: str, config: Path | None) -> Recipe | None:
    """The recipe that was named, if one was."""
    if not name:
        if config is not None:
            raise ConfigError(f"--config {config} is for a recipe: give --recipe NAME, too.")
        return None
    from fleet.config.recipes import get_recipe

    return get_recipe(name, config=config)


def _held_out_share(data: Path, recipe: str, config: Path | None, given: float | None, held_out: bool | None) -> float:
    """What was given, else what the recipe holds out if one side of the split is asked for, else nothing."""
    if given is not None or held_out is None:
        return given or 0.0
    from fleet.config.recipes import get_recipe

    if not recipe and (identity := DataDirectory(data).identity()) is not None:
        recipe, config = identity.recipe, identity.config_path
    if not recipe:
        raise ConfigError(f"--data {data}: no fleet has worked there, nor held anything out. Give --validation SHARE.")
    found = get_recipe(recipe, config=config)
    if not found.validation:
        raise ConfigError(f"recipe '{found.name}' holds nothing out: give --validation SHARE.")
    return found.validation


def _only_spec(ledger: Ledger, wanted: str) -> RobotSpec:
    """The robot spec whose hash begins with `wanted`, or the only one there is."""
    hashes = ledger.spec_hashes()
    matching = [name for name in hashes if name.startswith(wanted)]
    if len(matching) != 1:
        known = ", ".join(hashes) or "none"
        raise ConfigError(f"--spec must name one robot spec of this buffer; it has: {known}.")
    return ledger.spec(matching[0])
