"""`vla-fleet doctor`: is a robot fit to be driven, and this computer fit to drive one?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wire.errors import ConfigError, storage_errors

if TYPE_CHECKING:
    from hal.interfaces.robot import Robot


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
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a check means a driver that blocks.")
    ] = 120.0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the robot moves.")] = False,
    report: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
) -> None:
    """Examine a connected robot: spec, rates, latency, limits, stop. Exit status 1 when something fails."""
    from rich.console import Console

    from fleet.config.overrides import read_json
    from fleet.config.recipes import get_recipe
    from fleet.tools.doctor import default_task, examine, show, show_computer
    from hal.registry import make_robot, read_config

    console = Console()
    if not (robot or recipe):
        show_computer(Path("data"), console)
        console.print("Examine a robot with: vla-fleet doctor --robot NAME [--robot-config FILE]")
        return
    config = None
    if recipe:
        made = get_recipe(recipe)
        robot = robot or made.robot
        config = made.robot_config if robot == made.robot else None
    if robot_config:
        config = read_config(robot, read_json(robot_config))

    def make() -> Robot:
        return make_robot(robot, config)

    task = task or default_task(make())
    if move and not simulated and not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"robot '{robot}' will move: clear its workspace, then say --yes (or --no-move).")
        typer.confirm(f"'{robot}' will reset and move by 5 % of its limits. Is its workspace clear?", abort=True)
    found = examine(make, task, simulated, move, seconds, timeout, console)
    show(found, console)
    if report is not None:
        with storage_errors("writing the report", report):
            report.write_text(json.dumps({"robot": robot, **found.as_json()}, indent=2) + "\n")
    raise typer.Exit(0 if found.passed else 1)
