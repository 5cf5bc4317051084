"""`vla-fleet quarantine`: what the gateway keeps apart, for a person to decide on. Works beside a running fleet."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.options import AsJson, echo_json
from fleet.cli.stored.buffer import DATA, Data
from fleet.config.data_directory import DataDirectory
from wire.errors import ConfigError, InvalidDataError, WireError

if TYPE_CHECKING:
    from cloud_learner.buffer.store.quarantine import Quarantine, QuarantineEntry
    from wire.transport.keys import Teaching

app = typer.Typer(
    name="quarantine",
    help="What is kept apart: invalid, damaged, not believed. Look at it, take it in, or drop it.",
    no_args_is_help=True,
)
Robot = Annotated[str, typer.Option(help="Only what this robot sent.")]
Reason = Annotated[
    str, typer.Option(help="Only for this reason: invalid, unconfirmed, out_of_range, damaged, or words of its text.")
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="As `list` names it.", show_default=False)]


@app.command("list")
def list_entries(data: Data = DATA, robot: Robot = "", reason: Reason = "", as_json: AsJson = False) -> None:
    """What is kept apart, the oldest first: id, robot, age, size and why."""
    with DataDirectory(data).open_buffer() as (_ledger, store):
        found = _chosen(store.quarantine, None, robot, reason)
    if as_json:
        echo_json(found)
        return
    for entry in found:
        age_h = (time.time_ns() - entry.wall_ns) / 3600e9
        size = f"{age_h:8.1f} h {entry.bytes / 1e6:9.3f} MB"
        typer.echo(f"{entry.id:50} {entry.robot or '-':14} {size}  {', '.join(entry.reasons)}: {entry.reason}")


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="ID", help="As `list` names it.")], data: Data = DATA) -> None:
    """Say what is in it, field by field."""
    from cloud_learner.buffer.store.quarantine import describe

    with DataDirectory(data).open_buffer() as (_ledger, store):
        typer.echo(describe(*store.quarantine.read(name)))


@app.command()
def admit(
    names: Ids = None,
    data: Data = DATA,
    robot: Robot = "",
    reason: Reason = "",
    author: Annotated[str, typer.Option(envvar="USER", help="Who says so; the ledger keeps it.")] = "",
) -> None:
    """Take it in as if it came now: you say that it is right. All but what it is kept apart for is checked again.

    Exit status 1 when some of it cannot be stored: that stays where it is.
    """
    from cloud_learner.gateway.storage.ingest import KNOWN, Ingest, IngestOutcome

    where, stay = DataDirectory(data), 0
    with where.open_buffer(write=True) as (ledger, store):
        ingest = Ingest(ledger, store, may_teach=lambda peer: _may_teach(where.keys, peer))
        # The segments of an episode in turn, so that each finds what it refers to.
        for entry in sorted(_asked(store.quarantine, names, robot, reason), key=_in_turn):
            try:
                result = ingest.admit(entry.id, time.monotonic_ns(), author)
            except InvalidDataError as error:
                stay += 1
                typer.echo(str(error), err=True)
                continue
            if result.outcome in (IngestOutcome.stored, *KNOWN):
                typer.echo(f"{entry.id}: {result.outcome}; it is no longer in quarantine.")
            else:
                stay += 1
                typer.echo(f"{entry.id} stays in quarantine: {result.reason}", err=True)
    if stay:
        raise typer.Exit(1)


@app.command()
def drop(names: Ids = None, data: Data = DATA, robot: Robot = "", reason: Reason = "") -> None:
    """Delete it for good."""
    with DataDirectory(data).open_buffer(write=True) as (_ledger, store):
        for entry in _asked(store.quarantine, names, robot, reason):
            store.quarantine.remove(entry.id)
            typer.echo(
                f"{entry.id} of {entry.robot or 'this disk'} ({entry.bytes / 1e6:.3f} MB) is deleted, which was kept "
                f"apart as {', '.join(entry.reasons)}: {entry.reason}"
            )


def _asked(quarantine: Quarantine, names: list[str] | None, robot: str, reason: str) -> list[QuarantineEntry]:
    """Raises `ConfigError` when nothing was asked for by name, robot or reason."""
    if not (names or robot or reason):
        raise ConfigError("say which: IDs, --robot or --reason. `vla-fleet quarantine list` says what there is.")
    return _chosen(quarantine, names, robot, reason)


def _chosen(quarantine: Quarantine, names: list[str] | None, robot: str, reason: str) -> list[QuarantineEntry]:
    """Those of these names, or all, that the robot sent and that are there for that reason; each '' is any.

    Raises `InvalidDataError` for a name that is not there.
    """
    found = [quarantine.read(name)[0] for name in names] if names else quarantine.entries()
    return [
        entry
        for entry in found
        if robot in ("", entry.robot) and (not reason or reason in entry.reasons or reason in entry.reason)
    ]


def _in_turn(entry: QuarantineEntry) -> tuple[str, int, int]:
    """`EPISODE-INDEX-HASH`: the segments of an episode by their index."""
    stem, _, _ = entry.id.rpartition("-")
    episode, _, index = stem.rpartition("-")
    return episode, int(index) if index.isdecimal() else 0, entry.wall_ns


def _may_teach(keys: Path, robot: str) -> frozenset[Teaching]:
    """What the robot's key lets it say by its own word; nothing where its record is not here."""
    from wire.transport.keys import public_path, read_record

    try:
        return read_record(public_path(keys, robot)).may_teach
    except (OSError, WireError, ConfigError):
        return frozenset()
