"""`vla-fleet doctor`: is a robot, its bench and this computer fit to be driven?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.config.process_options import Config
from wire.errors import ConfigError, storage_errors

if TYPE_CHECKING:
    from rich.console import Console

    from fleet.config.recipe import Recipe
    from hal.conformance import ConformanceReport
    from hal.interfaces.robot import Robot


def doctor(
    robot: Annotated[str, typer.Option(help="A driver by name; default: only this computer.")] = "",
    robot_config: Annotated[
        str, typer.Option(help="Its configuration, and `safety`: JSON, or a file of JSON or TOML.")
    ] = "",
    recipe: Annotated[str, typer.Option(help="Take robot and configuration from this recipe.")] = "",
    config: Config = None,
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
    by_hand: Annotated[
        bool,
        typer.Option("--measure", help="Take an arm's torque away, watch how a person moves it, and propose limits."),
    ] = False,
    report: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
) -> None:
    """Examine a connected robot: spec, rates, latency, limits, stop. Exit status 1 when something fails.

    With --config first its bench: ports, calibration, servos, leader and cameras, without torque.
    """
    from rich.console import Console

    from fleet.config.recipes import get_recipe
    from fleet.config.robot_config import read_robot_config
    from fleet.tools.bench_doctor import examine_bench
    from fleet.tools.doctor import default_task, examine, show, show_computer, show_limits
    from fleet.tools.doctor_stops import standing_stops
    from hal.interfaces.robot import is_real
    from hal.registry import make_robot, read_config
    from hal.safety.limits import SafetyLimits, compile_limits
    from hal.safety.required import is_incomplete, limits_block

    console = Console()
    if not recipe and (config is not None or by_hand):
        raise ConfigError("--config and --measure are of a recipe's bench: give --recipe NAME --config FILE.toml.")
    if not (robot or recipe):
        show_computer(Path("data"), console)
        console.print("Examine a robot with: vla-fleet doctor --robot NAME [--robot-config FILE]")
        return
    driver, limits, bench = None, SafetyLimits(), None
    if recipe:
        made = get_recipe(recipe, config=config)
        limits = made.loop.safety
        robot = robot or made.robot
        driver = made.robot_config if robot == made.robot else None
        if config is not None:
            if by_hand:
                _measure(made, seconds, yes, console)
                return
            bench = examine_bench(made, seconds, lambda name: console.print(f"[dim]{name} …[/dim]", highlight=False))
            show(bench, console)
            if not (bench.passed and move):
                _write(report, robot, bench)
                raise typer.Exit(0 if bench.passed else 1)
    if by_hand:
        raise ConfigError("--measure is for the arm of a bench: give --recipe NAME --config FILE.toml.")
    if robot_config:
        given = read_robot_config(robot_config)
        limits = given.limits(limits)
        driver = read_config(robot, given.driver) if given.driver else driver

    def make() -> Robot:
        return make_robot(robot, driver)

    one = make()
    if robot_config:
        # names and numbers that the robot has not are said before it moves
        compile_limits(one.spec, limits)
    proposal = limits_block(one.spec, limits) if is_real(one) and is_incomplete(one, limits) else ""
    task = task or default_task(one)
    if move and not simulated and (stopped := standing_stops(Path("data"))):
        raise ConfigError(
            f"{'; '.join(stopped)}, on data of this directory: it may be this robot, which is not moved then. Release "
            "and start it (`vla-fleet stop NAME --release all`, then --start, while its edge runs), or say --no-move."
        )
    if move and not simulated and not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"robot '{robot}' will move: clear its workspace, then say --yes (or --no-move).")
        typer.confirm(f"'{robot}' will reset and move by 5 % of its limits. Is its workspace clear?", abort=True)
        console.print("To stop it: vla-fleet stop, in another terminal of this computer.", highlight=False)
    found = examine(make, task, simulated, move, seconds, timeout, console)
    show(found, console)
    if proposal:
        show_limits(proposal, console)
    _write(report, robot, found, *([bench] if bench else []))
    raise typer.Exit(0 if found.passed else 1)


def _measure(recipe: Recipe, seconds: float, yes: bool, console: Console) -> None:
    from fleet.tools.bench_doctor import limits_tables, measure_by_hand
    from wire.clock import MonotonicClock

    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("the arm will lose its torque: hold it, then say --yes.")
        typer.confirm("The arm will lose its torque, and what nothing holds up falls. Do you hold it?", abort=True)
    console.print(f"Move every joint as fast as the task will ever need, for {seconds:g} s …", highlight=False)
    tables = limits_tables(measure_by_hand(recipe, seconds, MonotonicClock()))
    console.print(
        "Of what was seen; think about each number. Joints that are left out hardly moved:\n", highlight=False
    )
    console.print(tables, markup=False, highlight=False, soft_wrap=True)


def _write(path: Path | None, robot: str, *reports: ConformanceReport) -> None:
    if path is None:
        return
    found = reports[0].as_json()
    for other in reports[1:]:
        more = other.as_json()
        found = {"passed": found["passed"] and more["passed"], **{k: more[k] + found[k] for k in ("checks", "figures")}}
    with storage_errors("writing the report", path):
        path.write_text(json.dumps({"robot": robot, **found}, indent=2) + "\n")
