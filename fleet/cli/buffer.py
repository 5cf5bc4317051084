"""`vla-fleet buffer`: what is stored, whether it is whole, and keeping it in bounds. Works beside a running fleet."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.options import AsJson, echo_json
from fleet.config.data_directory import DataDirectory
from wire.errors import ConfigError, InvalidDataError

if TYPE_CHECKING:
    from cloud_learner.buffer.ledger.ledger import Ledger
    from cloud_learner.buffer.lerobot.selection import LeftOut, TransferProgress
    from wire.types import RobotSpec

app = typer.Typer(
    name="buffer",
    help="Look at the stored experience, check it, keep it in bounds, exchange it with LeRobot.",
    no_args_is_help=True,
)

Data = Annotated[Path, typer.Option(help="Data directory of the fleet.")]
_DATA = Path("data") / "pixels"
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@app.command()
def stats(data: Data = _DATA, as_json: AsJson = False) -> None:
    """What is stored: by task, source and outcome; bytes, shards, versions."""
    from cloud_learner.buffer.maintenance.stats import collect, render

    with DataDirectory(data).open_buffer() as (ledger, store):
        found = collect(ledger, store)
    echo_json(found) if as_json else typer.echo(render(found))


@app.command()
def verify(
    data: Data = _DATA,
    repair: Annotated[bool, typer.Option(help="Set damaged segments aside so that the rest serves on.")] = False,
) -> None:
    """Check every checksum against the ledger; exit status 1 when something is damaged."""
    import cloud_learner.buffer.maintenance.maintenance as upkeep

    damaged = 0
    with DataDirectory(data).open_buffer(write=repair) as (ledger, store):
        for finding in upkeep.verify(store, ledger, repair=repair):
            damaged += finding.damage
            typer.echo(f"{'DAMAGED' if finding.damage else 'note'}: {finding.text}")
        total = ledger.totals()
    verdict = f"{damaged} damaged" if damaged else "all whole"
    typer.echo(f"{total.segments} segments of {total.episodes} episodes, {total.bytes / 1e6:.1f} MB: {verdict}.")
    if damaged:
        raise typer.Exit(1)


@app.command()
def prune(
    data: Data = _DATA,
    max_size: Annotated[str, typer.Option(help="Keep at most so much, oldest episodes go first: 20G, 500M.")] = "",
    max_age: Annotated[str, typer.Option(help="Forget episodes older than this: 30d, 12h.")] = "",
    task: Annotated[list[str] | None, typer.Option(help="Size and age are those of this task.")] = None,
    source: Annotated[list[str] | None, typer.Option(help="Size and age are those of this source: online.")] = None,
    min_episodes: Annotated[int, typer.Option(min=0, help="Keep at least so many episodes of each task.")] = 0,
    drop_outcome: Annotated[list[str] | None, typer.Option(help="Forget episodes that ended so: failure.")] = None,
    keep_outcome: Annotated[list[str] | None, typer.Option(help="Keep episodes that ended so: success.")] = None,
    keep_human: Annotated[
        bool, typer.Option(help="Keep every episode in which a person or script acted; without it they go last.")
    ] = True,
    keep_demonstrations: Annotated[bool, typer.Option(help="Keep demonstrations; without it they go last.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Forget whole episodes by size, age and outcome; disk space comes back with `compact` at the latest."""
    import cloud_learner.buffer.maintenance.maintenance as upkeep

    sizes = (_number(max_size, _UNITS, "--max-size"), _number(max_age, _TIMES, "--max-age"))
    some = bool(task or source)
    retention = upkeep.Retention(
        *((None, None) if some else sizes),
        by_task=dict.fromkeys(task or (), upkeep.Bound(*sizes)),
        by_source=dict.fromkeys(source or (), upkeep.Bound(*sizes)),
        min_episodes_per_task=min_episodes,
        drop_outcomes=tuple(drop_outcome or ()),
        keep_outcomes=tuple(keep_outcome or ()),
        keep_human=keep_human,
        keep_demonstrations=keep_demonstrations,
    )
    if sizes == (None, None) and not retention.drop_outcomes:
        raise ConfigError("nothing to forget by: give --max-size, --max-age or --drop-outcome.")
    with DataDirectory(data).open_buffer(write=not dry_run) as (ledger, store):
        pruned = upkeep.prune(ledger, retention, time.time_ns(), dry_run=dry_run)
        if not dry_run:
            upkeep.drop_dead(store, ledger)
    would = "would be forgotten" if dry_run else "forgotten"
    typer.echo(f"{pruned.episodes} episodes ({pruned.segments} segments, {pruned.bytes / 1e6:.1f} MB) {would}.")
    if pruned.warning:
        typer.echo(f"warning: {pruned.warning}", err=True)


@app.command()
def compact(data: Data = _DATA) -> None:
    """Seal what is ripe, rewrite half-empty shards, and give the space of forgotten episodes back."""
    import cloud_learner.buffer.maintenance.maintenance as upkeep

    with DataDirectory(data).open_buffer(write=True) as (ledger, store):
        done = upkeep.compact(store, ledger, time.monotonic_ns())
    typer.echo(f"{done.read_shards} shards became {done.written_shards}; {done.freed_bytes / 1e6:.1f} MB given back.")


@app.command()
def quarantine(
    data: Data = _DATA,
    show: Annotated[str, typer.Option(metavar="ID", help="Say what is in it.")] = "",
    submit: Annotated[
        str, typer.Option(metavar="ID", help="Submit it again, such as after its robot's spec became known.")
    ] = "",
) -> None:
    """List what was refused as invalid or found damaged, the oldest first: id, robot, age, size and reason."""
    from cloud_learner.buffer.store.quarantine import describe
    from cloud_learner.gateway.ingest import Ingest, IngestOutcome

    with DataDirectory(data).open_buffer(write=bool(submit)) as (ledger, store):
        if show:
            typer.echo(describe(*store.quarantine.read(show)))
        elif submit:
            result = Ingest(ledger, store).submit_again(submit, time.monotonic_ns())
            if result.outcome not in (IngestOutcome.stored, IngestOutcome.duplicate):
                raise InvalidDataError(f"{submit} stays in quarantine: {result.reason}")
            typer.echo(f"{submit}: {result.outcome}; it is no longer in quarantine.")
        else:
            for entry in store.quarantine.entries():
                age_h = (time.time_ns() - entry.wall_ns) / 3600e9
                size = f"{age_h:8.1f} h {entry.bytes / 1e6:9.3f} MB"
                typer.echo(f"{entry.id:50} {entry.robot or '-':14} {size}  {entry.reason}")


@app.command()
def tail(
    data: Data = _DATA,
    lines: Annotated[int, typer.Option("-n", min=0, help="Begin with so many of the newest segments.")] = 10,
    follow: Annotated[bool, typer.Option("-f/-F", "--follow/--no-follow", help="Go on until Ctrl-C.")] = True,
) -> None:
    """Show segments as they are stored."""
    from cloud_learner.buffer.maintenance.stats import tail_line

    with DataDirectory(data).open_buffer() as (ledger, _store):
        row = ledger.row_before(lines)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                for segment in ledger.segments_after(row):
                    typer.echo(tail_line(segment))
                    row = segment.row
                sys.stdout.flush()
                if not follow:
                    return
                time.sleep(0.5)


@app.command()
def lineage(
    data: Data = _DATA,
    version: Annotated[int, typer.Option(min=0, max=2**31, help="Which episodes trained this version?")] = 0,
    episode: Annotated[str, typer.Option(help="Which policy versions have seen this episode?")] = "",
) -> None:
    """Which episodes trained a version, or which versions have seen an episode; one per line."""
    if bool(version) == bool(episode):
        raise ConfigError("give either --version NUMBER or --episode ID.")
    with DataDirectory(data).open_buffer() as (ledger, _store):
        if version:
            if ledger.version(version) is None:
                raise ConfigError(f"there is no policy version {version} in {data}.")
            found = [str(name) for name in ledger.episodes_of_version(version)]
        else:
            if ledger.episode(episode) is None:
                raise ConfigError(f"there is no episode '{episode}' in {data}; `vla-fleet buffer tail` names some.")
            found = [str(number) for number in ledger.versions_of_episode(episode)]
    typer.echo("\n".join(found))


@app.command()
def label(
    episode: Annotated[str, typer.Argument(help="Its id; `buffer tail` names some.")],
    labels: Annotated[list[str], typer.Argument(help="NAME=NUMBER: success=0 or 1, quality=0 to 1, or your own name.")],
    data: Data = _DATA,
    author: Annotated[str, typer.Option(envvar="USER", help="Who says so.")] = "",
) -> None:
    """Say how an episode went; what is said last under a name counts."""
    said = {name: _float(value, name) for name, value in _pairs(labels, "label").items()}
    with DataDirectory(data).open_buffer(write=True) as (ledger, _store):
        for name, value in said.items():
            ledger.label_episode(episode, name, value, author)
        known = ledger.labels(episode)
    typer.echo(f"{episode}: {', '.join(f'{name}={value:g}' for name, value in sorted(known.items()))}")


@app.command()
def export_lerobot(
    out: Annotated[Path, typer.Argument(help="The new directory for the dataset.")],
    data: Data = _DATA,
    recipe: Annotated[str, typer.Option(help="Recipe whose sentences name the tasks; empty: the task names.")] = "",
    spec: Annotated[str, typer.Option(help="Robot spec hash, or how it begins, when there are several.")] = "",
    task: Annotated[list[str] | None, typer.Option(help="Only these tasks.")] = None,
    source: Annotated[list[str] | None, typer.Option(help="Only online, demonstration or evaluation.")] = None,
    outcome: Annotated[list[str] | None, typer.Option(help="Only success, failure, aborted or unfinished.")] = None,
    actor: Annotated[list[str] | None, typer.Option(help="Only the steps of human, script or policy.")] = None,
    newest: Annotated[int, typer.Option(min=0, help="Only so many of the newest episodes; 0: all.")] = 0,
    fps: Annotated[str, typer.Option(help="control, camera, or a rate that divides the control rate.")] = "control",
    video: Annotated[bool | None, typer.Option(help="Video or lossless images; default: video where possible.")] = None,
) -> None:
    """Write episodes as a LeRobotDataset v3 that `lerobot-train` takes."""
    from cloud_learner.buffer.lerobot.exporter import export
    from cloud_learner.buffer.lerobot.selection import Selection

    given = {"tasks": task, "sources": source, "outcomes": outcome, "actors": actor}
    chosen = Selection(newest=newest, **{name: tuple(only) for name, only in given.items() if only})
    rate: int | str = int(fps) if fps.isdecimal() and fps.isascii() else fps
    with DataDirectory(data).open_buffer() as (ledger, store):
        robot = _only_spec(ledger, spec)
        done = export(
            ledger,
            store,
            robot,
            out,
            selection=chosen,
            instructions=_instructions(recipe),
            fps=rate,
            video=video,
            progress=_progress,
        )
    _finish_progress(done.left_out)
    typer.echo(f"{done.path}: {done.episodes} episodes, {done.rows} rows at {done.fps} Hz.")


@app.command()
def import_lerobot(
    root: Annotated[Path, typer.Argument(help="Directory of a LeRobotDataset v3.")],
    data: Data = _DATA,
    recipe: Annotated[str, typer.Option(help="Recipe whose robot the data is for; empty: as the data says.")] = "",
    robot: Annotated[str, typer.Option(help="Name under which the episodes are stored.")] = "lerobot",
    by_position: Annotated[bool, typer.Option(help="Take dimensions in their order, whatever their names.")] = False,
    rename: Annotated[list[str] | None, typer.Option(help="ROBOT_DIMENSION=DATASET_NAME, repeatable.")] = None,
    scale: Annotated[list[str] | None, typer.Option(help="ROBOT_DIMENSION=FACTOR, repeatable.")] = None,
    camera: Annotated[list[str] | None, typer.Option(help="ROBOT_CAMERA=DATASET_KEY, repeatable.")] = None,
    skip_broken: Annotated[bool, typer.Option(help="Leave out what cannot be read and go on.")] = False,
) -> None:
    """Store a LeRobotDataset v3 as offline data; doing it twice stores it once."""
    from cloud_learner.buffer.lerobot.importer import import_dataset
    from cloud_learner.buffer.lerobot.mapping import DatasetMapping

    tasks: dict[str, str] = {}
    spec = None
    if recipe:
        from fleet.config.recipes import get_recipe

        found = get_recipe(recipe)
        spec = found.spec
        tasks = {sentence: name for name, sentence in found.instructions.items()}
    mapping = DatasetMapping(
        spec=spec,
        robot=robot,
        by_position=by_position,
        names=_pairs(rename, "--rename"),
        scale={name: _float(value, f"--scale {name}") for name, value in _pairs(scale, "--scale").items()},
        cameras=_pairs(camera, "--camera"),
        tasks=tasks,
    )
    data.mkdir(parents=True, exist_ok=True)
    with DataDirectory(data).open_buffer(write=True, create=True) as (ledger, store):
        done = import_dataset(ledger, store, root, mapping, skip_broken=skip_broken, progress=_progress)
    _finish_progress(done.left_out)
    typer.echo(f"{done.episodes} episodes, {done.steps} steps stored as robot '{done.robot}'; {done.known} were known.")


@app.command()
def export_episode(
    episode: Annotated[str, typer.Argument(help="Its id; `buffer tail` names some.")],
    file: Annotated[Path, typer.Argument(help="The new file.")],
    data: Data = _DATA,
    recipe: Annotated[str, typer.Option(help="Recipe whose sentence says the task; empty: the task's name.")] = "",
) -> None:
    """Write one episode as a file that the robot `replay` shows again."""
    from cloud_learner.buffer.export_episode import export_episode as export

    with DataDirectory(data).open_buffer() as (ledger, store):
        row = ledger.episode(episode)
        sentence = _instructions(recipe).get(row.task, "") if row is not None else ""
        done = export(ledger, store, episode, file, sentence)
    ended = f"ended with {done.outcome}" if done.outcome else "not ended"
    typer.echo(f"{done.path}: {done.steps} steps, {done.frames} pictures, {done.bytes / 1e6:.1f} MB, {ended}.")


def _progress(progress: TransferProgress) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{progress.episodes} of {progress.of_episodes} episodes, {progress.steps} steps")
        sys.stderr.flush()


def _finish_progress(left_out: Sequence[LeftOut]) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    for one in left_out:
        typer.echo(f"left out: {one.episode}: {one.reason}", err=True)


def _instructions(recipe: str) -> dict[str, str]:
    if not recipe:
        return {}
    from fleet.config.recipes import get_recipe

    return get_recipe(recipe).instructions


def _pairs(given: Sequence[str] | None, option: str) -> dict[str, str]:
    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{option} {text!r}: write NAME=VALUE.")
        found[name] = value
    return found


def _float(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: give a number.") from error


def _only_spec(ledger: Ledger, wanted: str) -> RobotSpec:
    """The robot spec whose hash begins with `wanted`, or the only one there is."""
    hashes = ledger.spec_hashes()
    matching = [name for name in hashes if name.startswith(wanted)]
    if len(matching) != 1:
        known = ", ".join(hashes) or "none"
        raise ConfigError(f"--spec must name one robot spec of this buffer; it has: {known}.")
    spec = ledger.spec(matching[0])
    assert spec is not None
    return spec


def _number(text: str, units: dict[str, float], option: str) -> float | None:
    """`20G` as a number; None for an empty text."""
    if not text:
        return None
    scale = units.get(text[-1].lower(), 0.0)
    try:
        value = float(text[:-1]) * scale if scale else float(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: give a number with one of {', '.join(units)} after it.") from error
    if value < 0:
        raise ConfigError(f"{option} {text!r} is negative.")
    return value
