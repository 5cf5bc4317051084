"""`vla-fleet doctor`: is a robot fit to be driven, and this computer fit to drive one?"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wire.errors import ConfigError, storage_error

if TYPE_CHECKING:
    from fleet.tools.doctor import Visit


def add_commands(app: typer.Typer) -> None:
    """Add it to `app`."""
    app.command()(doctor)


def doctor(
    robot: Annotated[str, typer.Option(help="A driver by name; default: only this computer.")] = "",
    robot_config: Annotated[str, typer.Option(help="Its configuration: JSON, or a JSON file.")] = "",
    recipe: Annotated[str, typer.Option(help="Take robot and configuration from this recipe.")] = "",
    task: Annotated[str, typer.Option(help="Task to reset to; default: the robot's first.")] = "",
    simulated: Annotated[
        bool, typer.Option("--simulated", help="A simulator: command its limits and check that seeds repeat.")
    ] = False,
    move: Annotated[bool, typer.Option(help="--no-move connects and does no more.")] = True,
    seconds: Annotated[float, typer.Option(min=0.5, help="How long rates are measured.")] = 5.0,
    patience: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a check means a driver that blocks.")
    ] = 120.0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the robot moves.")] = False,
    report: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.", show_default=False)
    ] = None,
) -> None:
    """Examine a connected robot: spec, rates, latency, limits, stop. Exit status 1 when something fails."""
    from rich.console import Console

    from fleet.tools import doctor as surgery

    console = Console()
    if not (robot or recipe):
        surgery.show_computer(surgery.computer(Path("data")), console)
        console.print("Examine a robot with: vla-fleet doctor --robot NAME [--robot-config FILE]")
        return
    visit = _visit(robot, robot_config, recipe, task, simulated, move, seconds, patience)
    visit = surgery.prepared(visit)
    if move and not simulated and not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"robot '{visit.robot}' will move: clear its workspace, then say --yes (or --no-move).")
        typer.confirm(f"'{visit.robot}' will reset and move by 5 % of its limits. Is its workspace clear?", abort=True)

    def give_up(reason: str) -> None:
        # The driver sits in a call that does not return: no tidy end is possible.
        sys.stderr.write(f"vla-fleet: {reason}\n")
        sys.stderr.flush()
        os._exit(1)

    found = surgery.examine(visit, lambda name: console.print(f"[dim]{name} …[/dim]", highlight=False), give_up)
    surgery.show(found, console)
    if report is not None:
        try:
            report.write_text(json.dumps({"robot": visit.robot, **found.as_json()}, indent=2) + "\n")
        except OSError as error:
            raise storage_error(error, "writing the report", report) from error
    raise typer.Exit(0 if found.passed else 1)


def _visit(
    robot: str, robot_config: str, recipe: str, task: str, simulated: bool, move: bool, seconds: float, patience: float
) -> Visit:
    from fleet.config.overrides import read_json
    from fleet.config.recipes import get_recipe
    from fleet.tools import doctor as surgery
    from hal.registry import read_config

    config = None
    if recipe:
        made = get_recipe(recipe)
        robot = robot or made.robot
        config = made.robot_config if robot == made.robot else None
    if robot_config:
        config = read_config(robot, read_json(robot_config))
    return surgery.Visit(robot, config, task, 0, seconds, simulated, move, patience)
