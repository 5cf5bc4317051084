"""`vla-fleet versions list | show | promote | rollback | pin | shadow | freeze`: which version robots run, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.fleet import ConsoleOptions, ListOptions, show_table, table_of
from fleet.cli.options import command, echo_json
from fleet.config.overrides import unset
from wire.errors import ConfigError
from wire.messages.fleet import VersionAction

if TYPE_CHECKING:
    from rich.table import Table

    from wire.messages.fleet import VersionStatus

app = typer.Typer(
    name="versions",
    help="Policy versions: which robots run them, how they do, and which they may.",
    no_args_is_help=True,
)
_STYLES = {"promoted": "green", "canary": "yellow", "candidate": "cyan", "rolled_back": "bold red", "refused": "red"}


@dataclass(frozen=True, kw_only=True)
class VersionOptions(ConsoleOptions):
    number: Annotated[int, typer.Argument(min=1, help="Number of the version.")]


@dataclass(frozen=True, kw_only=True)
class RollbackOptions(ConsoleOptions):
    number: Annotated[
        int,
        typer.Argument(
            min=0, help="Where to; 0: undo the newest step, the canary if there is one, else the newest promotion."
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class PinOptions(ConsoleOptions):
    number: Annotated[int, typer.Argument(min=0, help="Number of the version; 0: pinned no more.")]
    robot: Annotated[str, unset("Only this robot; default: all.")] = ""


@dataclass(frozen=True, kw_only=True)
class ShadowOptions(ConsoleOptions):
    number: Annotated[int, typer.Argument(min=0, help="Number of the version; 0: no shadow any more.")]
    robot: Annotated[list[str], unset("A robot that computes it; several times for several. Default: a few.")] = field(
        default_factory=list
    )


@dataclass(frozen=True, kw_only=True)
class FreezeOptions(ConsoleOptions):
    off: Annotated[bool, typer.Option("--off", help="Let versions come again.")] = False


@command(app, ListOptions, "list", log=False)
def list_versions(options: ListOptions) -> None:
    """The newest versions, and all that are needed."""
    found = _changed(options, VersionAction.list)
    if options.as_json:
        echo_json(found)
    else:
        show_table(_version_table(found))


@command(app, VersionOptions, log=False)
def show(options: VersionOptions) -> None:
    """All that is known of one version."""
    found = next((one for one in _changed(options, VersionAction.list) if one.version.number == options.number), None)
    if found is None:
        raise ConfigError(f"version {options.number} is not among the newest; `vla-fleet versions list` shows them.")
    echo_json(found)


@command(app, VersionOptions, log=False)
def promote(options: VersionOptions) -> None:
    """Have all robots run it."""
    _say(_changed(options, VersionAction.promote, options.number))


@command(app, RollbackOptions, log=False)
def rollback(options: RollbackOptions) -> None:
    """Go back to an older version; nothing newer acts by itself until `freeze --off`."""
    _say(_changed(options, VersionAction.rollback, options.number))


@command(app, PinOptions, log=False)
def pin(options: PinOptions) -> None:
    """Have a robot, or all, run one version whatever comes."""
    _changed(options, VersionAction.pin, options.number, options.robot)
    what = f"pinned to version {options.number}" if options.number else "pinned no more"
    typer.echo(f"{options.robot or 'all robots'}: {what}")


@command(app, ShadowOptions, log=False)
def shadow(options: ShadowOptions) -> None:
    """Have robots compute a version that does not act; `show N` says how far its actions are from those that act."""
    found = _changed(options, VersionAction.shadow, options.number, robots=tuple(options.robot))
    robots = next((one.shadow.robots for one in found if one.shadow is not None and one.shadow.robots), ())
    on = f"computed by {', '.join(robots)}" if robots else "computed once there are robots"
    typer.echo(f"version {options.number}: {on}" if options.number else "no version is computed beside what acts")


@command(app, FreezeOptions, log=False)
def freeze(options: FreezeOptions) -> None:
    """Let no version be tried or promoted by itself, until `--off`."""
    _changed(options, VersionAction.thaw if options.off else VersionAction.freeze)
    typer.echo("versions come as they pass" if options.off else "versions are frozen: only `promote` changes what runs")


# --- inside ---------------------------------------------------------------------------------------------------------


def _changed(
    options: ConsoleOptions, action: VersionAction, number: int = 0, robot: str = "", robots: tuple[str, ...] = ()
) -> tuple[VersionStatus, ...]:
    with options.client() as fleet:
        return fleet.versions(action, number, robot, robots)


def _say(found: tuple[VersionStatus, ...]) -> None:
    current = next((one for one in found if one.current), None)
    frozen = " Versions are frozen." if current is not None and current.frozen else ""
    typer.echo(f"robots run version {current.version.number}.{frozen}" if current is not None else "nothing runs yet")


def _version_table(found: tuple[VersionStatus, ...]) -> Table:
    from rich.text import Text

    frozen = ", frozen" if found and found[0].frozen else ""
    table = table_of(
        f"{len(found)} versions{frozen}",
        *("version", "state", "robots", "pinned", "episodes", "success", "unjudged", "MB", "delta MB", "why"),
        right=("version", "episodes", "success", "unjudged", "MB", "delta MB"),
    )
    for one in reversed(found):
        state = one.state.replace("_", " ") + (", runs" if one.current else "") + (", best" if one.reference else "")
        state += ", shadow" if one.shadow is not None and one.shadow.robots else ""
        table.add_row(
            Text(str(one.version.number), style="bold" if one.current else ""),
            Text(state, style=_STYLES.get(one.state, "")),
            Text(", ".join(one.robots) or "–"),
            Text(", ".join(one.pinned) or "–"),
            str(one.episodes),
            f"{one.successes / one.episodes:.0%}" if one.episodes else "–",
            str(one.unjudged or "–"),
            f"{one.version.size_bytes / 1e6:.2f}" if one.here else "gone",
            f"{one.delta_bytes / 1e6:.3f}" if one.delta_bytes else "–",
            Text(one.note),
        )
    return table
