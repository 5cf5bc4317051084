"""The `vla-fleet` command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli import buffer, exchange, fleet, policy, stop, teleop
from fleet.cli.options import command
from fleet.config import process_options as options
from fleet.config.overrides import RobotConfig, RobotKind, unset
from fleet.launch import builders, factories, robot_builders
from wire.errors import ConfigError, FleetError, storage_errors

if TYPE_CHECKING:
    from hal.interfaces.robot import Robot

app = typer.Typer(
    name="vla-fleet",
    help="A fleet of robots that keeps learning while it works.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

exchange.add_commands(buffer.app)
app.add_typer(buffer.app)
app.add_typer(policy.app)


@command(app, options.UpOptions)
def up(asked: options.UpOptions) -> int:
    """Run the whole loop: gateway, trainer, evaluator and robots, on this machine or on a Ray cluster."""
    from fleet.launch.up import Up

    return Up(asked).run()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ray_node(
    context: typer.Context,
    address: Annotated[str, unset("Join the Ray cluster at HOST:PORT.", metavar="HOST:PORT")] = "",
    head: Annotated[bool, typer.Option("--head", help="Begin a cluster instead.")] = False,
    robots: Annotated[str, unset("Names of the robots here, NAME,NAME.")] = "",
    site: options.Site = "",
    data: Annotated[
        Path | None, typer.Option(help="Data directory on this node; default: as on the gateway's machine.")
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="Key directory on this node; default DATA/keys.")] = None,
    robot: RobotKind = "",
    robot_config: RobotConfig = "",
) -> None:
    """Make this computer a node of a Ray cluster that runs a fleet: it offers its robots.

    Every other option goes to `ray start`; with --robots its --num-cpus is 0 unless given. In --robot-config {name}
    stands for the robot's name.
    """
    from fleet.ray_backend.node import NodeSettings, robot_names, run_node

    data_root, key_root = (str(path.resolve()) if path is not None else "" for path in (data, keys))
    settings = NodeSettings(data_root, key_root, site, robot, robot_config)
    run_node(robot_names(robots), address, head, settings, context.args)


@app.command()
def recipes() -> None:
    """List the recipes."""
    from fleet.config.recipes import RECIPES

    for name, make in RECIPES.items():
        typer.echo(f"{name:10} {make().summary}")


@app.command()
def plot(
    report: Annotated[Path, typer.Argument(help="A report that `up --report` wrote.")],
    picture: Annotated[Path, typer.Argument(help="The picture to write: .png, .svg or .pdf.")],
) -> None:
    """Draw the success curve of a report."""
    from fleet.tools.plot import draw

    draw(report, picture)
    typer.echo(f"{picture} written.")


@app.command()
def keys(
    names: Annotated[list[str], typer.Argument(help="Names of robots and processes that may connect.")],
    keys: Annotated[Path, typer.Option(help="Key directory.")] = Path("keys"),
) -> None:
    """Make CURVE keys for the gateway and for NAMES; existing ones stay."""
    from wire.transport.keys import GATEWAY, make_keys

    make_keys(keys, [GATEWAY, *names])
    typer.echo(f"keys of {', '.join([GATEWAY, *names])} are in {keys}; give each machine its own .key_secret only.")


@app.command()
def replay(
    flight: Annotated[Path, typer.Argument(help="A flight file, or a robot's directory of them.")],
    first: Annotated[int | None, typer.Option("--from", help="First control tick.")] = None,
    last: Annotated[int | None, typer.Option("--to", help="Last control tick.")] = None,
    rerun: Annotated[Path | None, typer.Option(help="Also write a recording for Rerun, FILE.rrd.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Also print the ticks.")] = False,
    session: Annotated[str, typer.Option(help="Which start of the process; default: the newest.")] = "",
) -> None:
    """Decide a recorded stretch again, tick by tick; exit status 1 when anything comes out otherwise."""
    from robot_edge.flight_recorder.command import replay_command

    raise typer.Exit(replay_command(flight, factories.rebuild_control, first, last, rerun, table, session))


@app.command()
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
    from fleet.tools.doctor import default_task, examine, show, show_computer, show_limits
    from hal.interfaces.robot import is_real
    from hal.registry import make_robot, read_config
    from hal.safety.required import limits_block

    console = Console()
    if not (robot or recipe):
        show_computer(Path("data"), console)
        console.print("Examine a robot with: vla-fleet doctor --robot NAME [--robot-config FILE]")
        return
    config, limits = None, None
    if recipe:
        made = get_recipe(recipe)
        limits = made.loop.safety
        robot = robot or made.robot
        config = made.robot_config if robot == made.robot else None
    if robot_config:
        config = read_config(robot, read_json(robot_config))

    def make() -> Robot:
        return make_robot(robot, config)

    one = make()
    proposal = limits_block(one.spec, limits) if is_real(one) else ""
    task = task or default_task(one)
    if move and not simulated and not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"robot '{robot}' will move: clear its workspace, then say --yes (or --no-move).")
        typer.confirm(f"'{robot}' will reset and move by 5 % of its limits. Is its workspace clear?", abort=True)
    found = examine(make, task, simulated, move, seconds, timeout, console)
    show(found, console)
    if proposal:
        show_limits(proposal, console)
    if report is not None:
        with storage_errors("writing the report", report):
            report.write_text(json.dumps({"robot": robot, **found.as_json()}, indent=2) + "\n")
    raise typer.Exit(0 if found.passed else 1)


# One process of a fleet each; `up` starts all of them.
command(app, options.GatewayOptions, "gateway")(builders.run_gateway)
command(app, options.TrainerOptions, "trainer")(builders.run_trainer)
command(app, options.EvaluatorOptions, "evaluator")(builders.run_evaluator)
command(app, options.DemonstratorOptions, "demonstrate")(builders.run_demonstrator)
command(app, options.ThinkServerOptions, "think-server")(builders.run_think_server)
command(app, options.EdgeOptions, "edge")(robot_builders.run_robot)
command(app, options.EdgePartOptions, "edge-part", hidden=True)(robot_builders.run_edge_part)
fleet.add_commands(app)
command(app, teleop.TeleopOptions, log=False)(teleop.teleop)
app.command()(stop.stop)


def main() -> None:
    """Run the command line; errors that are ours become one line and exit status 1."""
    try:
        app()
    except FleetError as error:
        sys.stderr.write(f"vla-fleet: {error}\n")
        sys.stderr.flush()
        # Background threads of libraries must not keep a process alive that has said why it ends.
        os._exit(1)


if __name__ == "__main__":
    main()
