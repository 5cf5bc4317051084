"""The `vla-fleet` command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fleet.cli import doctor, fleet, keys, plan, policy, stop, teleop, versions
from fleet.cli.offline.evaluate import CompareOptions, EvalOptions, compare, evaluate
from fleet.cli.offline.train import TrainOptions, train
from fleet.cli.options import command
from fleet.cli.stored import buffer, exchange, quarantine, rewards
from fleet.config import process_options as options
from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import RobotConfig, RobotKind, unset
from fleet.launch import builders, factories, robot_builders
from robot_edge.runtime.log_format import report_end
from wire.errors import FleetError

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
app.add_typer(quarantine.app)
app.add_typer(rewards.app)
app.add_typer(policy.app)
app.add_typer(keys.app)
app.add_typer(versions.app)


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
def recipes(
    name: Annotated[str, typer.Argument(help="Show what --set may set of this one.", show_default=False)] = "",
    config: options.Config = None,
) -> None:
    """List the recipes, or what can be set of one."""
    from fleet.config.recipes import RECIPES, get_recipe
    from fleet.config.settings import settings_of

    if name:
        for one in settings_of(get_recipe(name, config=config)):
            typer.echo(f"{one.path}={one.text}  ({one.type})")
        return
    for name, make in RECIPES.items():
        typer.echo(f"{name:10} {(make.__doc__ or '').partition(chr(10))[0]}")


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
def trace(
    robot: Annotated[str, typer.Argument(help="Name of the robot.")],
    data: buffer.Data = buffer.DATA,
    episode: Annotated[str, typer.Option(help="Of this episode; default: the newest that came all the way.")] = "",
    tick: Annotated[int | None, typer.Option(min=0, help="This step of it; default: the first with an action.")] = None,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write an OpenTelemetry trace (OTLP/JSON).")
    ] = None,
) -> None:
    """Follow one step of a robot: seen, decided, recorded, stored, learned from, published, acted by."""
    from rich.console import Console

    from cloud_learner.buffer.step_path import follow_step
    from fleet.tools.trace import path_table, write_otlp

    with DataDirectory(data).open_buffer() as (ledger, store):
        path = follow_step(ledger, store, robot, episode, tick)
    Console().print(path_table(path))
    if file is not None:
        write_otlp(path, file)
        typer.echo(f"{file} written.")


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


# One process of a fleet each; `up` starts all of them.
command(app, options.GatewayOptions, "gateway")(builders.run_gateway)
command(app, options.TrainerOptions, "trainer")(builders.run_trainer)
command(app, options.EvaluatorOptions, "evaluator")(builders.run_evaluator)
command(app, options.DemonstratorOptions, "demonstrate")(builders.run_demonstrator)
command(app, options.ThinkServerOptions, "think-server")(builders.run_think_server)
command(app, options.RelayOptions, "relay")(builders.run_relay)
command(app, options.EdgeOptions, "edge")(robot_builders.run_robot)
command(app, options.EdgePartOptions, "edge-part", hidden=True)(robot_builders.run_edge_part)
fleet.add_commands(app)
command(app, TrainOptions)(train)
command(app, EvalOptions, "eval")(evaluate)
command(app, CompareOptions)(compare)
command(app, teleop.TeleopOptions, log=False)(teleop.teleop)
app.command()(plan.plan)
app.command()(stop.stop)
app.command()(stop.speed)
app.command()(doctor.doctor)


def main() -> None:
    """Run the command line; errors that are ours become one line and exit status 1."""
    try:
        app()
    except FleetError as error:
        report_end("vla-fleet", str(error))
        # Background threads of libraries must not keep a process alive that has said why it ends.
        os._exit(1)


if __name__ == "__main__":
    main()
