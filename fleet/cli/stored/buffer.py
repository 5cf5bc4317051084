"""`vla-fleet buffer`: what is stored, whether it is whole, and keeping it in bounds. Works beside a running fleet."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fleet.cli.offline.progress import show_progress
from fleet.cli.options import AsJson, echo_json
from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import unset
from wire.errors import ConfigError

app = typer.Typer(
    name="buffer",
    help="Look at the stored experience, check it, keep it in bounds, exchange it with LeRobot.",
    no_args_is_help=True,
)

Data = Annotated[Path, typer.Option(help="Data directory of the fleet.")]
Snapshot = Annotated[str, unset("Only what this snapshot holds.")]
Validation = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        show_default=False,
        help="Share of the episodes that is held out, by their ids: the same ones for good; default: the recipe's.",
    ),
]
HeldOut = Annotated[bool | None, typer.Option("--held-out/--training", help="Only what is held out, or only the rest.")]
DATA = Path("data") / "pixels"
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@app.command()
def stats(data: Data = DATA, as_json: AsJson = False) -> None:
    """What is stored: by task, source and outcome; bytes, shards, versions."""
    from cloud_learner.buffer.maintenance.stats import collect, render

    with DataDirectory(data).open_buffer() as (_ledger, store):
        found = collect(store)
    echo_json(found) if as_json else typer.echo(render(found))


@app.command()
def lag(
    data: Data = DATA,
    max_lag: Annotated[
        int | None,
        typer.Option(min=0, show_default=False, help="Also say how much is further behind: what S would leave out."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=0, help="Only the newest so many episodes; 0: all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """How many versions behind what the policy did was when it arrived, by robot."""
    from cloud_learner.buffer.maintenance.stats import lag_stats, render_lags

    with DataDirectory(data).open_buffer() as (ledger, _store):
        found = lag_stats(ledger.lags(episodes), max_lag)
    echo_json(found) if as_json else typer.echo(render_lags(found, max_lag))


@app.command()
def verify(
    data: Data = DATA,
    repair: Annotated[bool, typer.Option(help="Set damaged segments aside so that the rest serves on.")] = False,
) -> None:
    """Check every checksum against the ledger; exit status 1 when something is damaged."""
    import cloud_learner.buffer.maintenance.maintenance as upkeep

    damaged = 0
    with DataDirectory(data).open_buffer(write=repair) as (ledger, store), show_progress(0, "shards") as shown:
        for finding in upkeep.verify(store, repair=repair, progress=lambda done, of: shown.update(done, "", of)):
            damaged += finding.damage
            typer.echo(f"{'DAMAGED' if finding.damage else 'note'}: {finding.text}")
        total = ledger.totals()
    verdict = f"{damaged} damaged" if damaged else "all whole"
    typer.echo(f"{total.segments} segments of {total.episodes} episodes, {total.bytes / 1e6:.1f} MB: {verdict}.")
    if damaged:
        raise typer.Exit(1)


@app.command()
def prune(
    data: Data = DATA,
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
            upkeep.drop_dead(store)
    would = "would be forgotten" if dry_run else "forgotten"
    typer.echo(f"{pruned.episodes} episodes ({pruned.segments} segments, {pruned.bytes / 1e6:.1f} MB) {would}.")
    if pruned.warning:
        typer.echo(f"warning: {pruned.warning}", err=True)


@app.command()
def ask(
    episodes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EPISODE]...", show_default=False, help="Ids; default: all there are."),
    ] = None,
    data: Data = DATA,
    human: Annotated[bool, typer.Option("--human", help="Only where a person or script taught.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is held back.")] = False,
) -> None:
    """Want the pictures that relays hold back of these episodes: a gateway that runs has them sent."""
    from cloud_learner.buffer.ledger.rows import HeldState
    from cloud_learner.buffer.ledger.segments import chunks

    with DataDirectory(data).open_buffer(write=True) as (ledger, _store):
        wanted = 0
        if not dry_run:
            parts = list(chunks(episodes)) if episodes else [None]
            wanted = sum(ledger.ask_episodes(part, human) for part in parts)
        counts = ledger.held_counts()
    held, asked, gone = (counts.get(state, 0) for state in HeldState)
    typer.echo(
        f"asked for the pictures of {wanted} segments now. Of {held + asked + gone} they are not here: of {asked} they "
        f"are asked for, of {gone} the relay has them no more."
    )


@app.command()
def compact(data: Data = DATA) -> None:
    """Seal what is ripe, rewrite half-empty shards, and give the space of forgotten episodes back."""
    import cloud_learner.buffer.maintenance.maintenance as upkeep

    with DataDirectory(data).open_buffer(write=True) as (_ledger, store), show_progress(0, "shards") as shown:
        done = upkeep.compact(store, time.monotonic_ns(), progress=lambda done, of: shown.update(done, "", of))
    typer.echo(f"{done.read_shards} shards became {done.written_shards}; {done.freed_bytes / 1e6:.1f} MB given back.")


@app.command()
def tail(
    data: Data = DATA,
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
    data: Data = DATA,
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
    data: Data = DATA,
    author: Annotated[str, typer.Option(envvar="USER", help="Who says so.")] = "",
) -> None:
    """Say how an episode went; what is said last under a name counts."""
    said = {name: to_float(value, name) for name, value in pairs(labels, "label").items()}
    with DataDirectory(data).open_buffer(write=True) as (ledger, _store):
        for name, value in said.items():
            ledger.label_episode(episode, name, value, author)
        known = ledger.labels(episode)
    typer.echo(f"{episode}: {', '.join(f'{name}={value:g}' for name, value in sorted(known.items()))}")


@app.command()
def snapshot(
    name: Annotated[str, typer.Argument(help="What it is called from now on, for good.")], data: Data = DATA
) -> None:
    """Give what is stored now a name, to sample or export just that later."""
    with DataDirectory(data).open_buffer(write=True) as (ledger, _store):
        taken = ledger.take_snapshot(name)
    typer.echo(
        f"{name}: {taken.segments} segments, {taken.steps} steps, up to ledger row {taken.row}. It keeps nothing from "
        "being pruned; `vla-fleet buffer snapshots` counts what is left."
    )


@app.command()
def snapshots(data: Data = DATA, as_json: AsJson = False) -> None:
    """List the snapshots, the oldest first, and how many of their segments are still there."""
    with DataDirectory(data).open_buffer() as (ledger, _store):
        found = ledger.snapshots()
    if as_json:
        echo_json(found)
        return
    for one in found:
        taken = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.wall_ns / 1e9))
        typer.echo(
            f"{one.name:24} {taken}  row {one.row:10} {one.steps:11,} steps, {one.there:,} of {one.segments:,} "
            "segments are there"
        )


@app.command()
def sample(
    data: Data = DATA,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=SHARE]",
            help="As the trainer of this recipe would; several: each has its share of the batches. Default: the "
            "fleet's own, and its policy.",
        ),
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", help="Write a contact sheet of its pictures; of several recipes, FILE-RECIPE.png."
        ),
    ] = None,
    snapshot: Snapshot = "",
    validation: Validation = None,
    held_out: HeldOut = None,
    n_step: Annotated[
        int,
        typer.Option(min=0, help="Also what follows so many ticks later, for learning values; one window a picture."),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Another one draws another batch.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Draw a batch as the trainer would, and say what it holds."""
    from fleet.tools import sample_batch

    shares: dict[str, float] = {}
    for text in recipe or [""]:
        name, equals, share = text.partition("=")
        if name in shares or (equals and not name):
            raise ConfigError(f"--recipe {text!r}: write NAME or NAME=SHARE, each name once.")
        shares[name] = to_float(share, name) if equals else 1.0
    drawn, missing = sample_batch.draw_batches(
        data, shares, snapshot=snapshot, validation=validation, held_out=bool(held_out), n_step=n_step, seed=seed
    )
    for name, why in missing.items():
        typer.echo(f"recipe '{name}' gives its share to the others: {why}", err=True)
    found = [sample_batch.summarize(one) for one in drawn]
    if as_json:
        echo_json(found if len(shares) > 1 else found[0])
    else:
        typer.echo("\n\n".join(map(sample_batch.render, found)))
    if pictures is None:
        return
    for one in [one for one in drawn if one.batch["images"]] or drawn:
        path = pictures.with_stem(f"{pictures.stem}-{one.recipe}") if len(shares) > 1 else pictures
        sample_batch.write_picture(path, sample_batch.contact_sheet(one))
        typer.echo(f"{path} written.", err=True)


def pairs(given: Sequence[str] | None, option: str) -> dict[str, str]:
    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{option} {text!r}: write NAME=VALUE.")
        found[name] = value
    return found


def to_float(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: give a number.") from error


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
