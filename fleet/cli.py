"""The `vla-fleet` command line."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fleet import buffer_cli, doctor_cli, fleet_cli, teleop_cli
from wire.errors import FleetError

app = typer.Typer(
    name="vla-fleet",
    help="A fleet of robots that keeps learning while it works.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(buffer_cli.app)

Recipe = Annotated[str, typer.Option(help="Which job: a name from `vla-fleet recipes`, or module:function.")]
Data = Annotated[Path | None, typer.Option(help="Data directory; default data/RECIPE.", show_default=False)]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.")]
Address = Annotated[str, typer.Option(help="The gateway, tcp://HOST:PORT.")]
Keys = Annotated[Path | None, typer.Option(help="Key directory; default DATA/keys.", show_default=False)]
Name = Annotated[str, typer.Option(help="Name of this process; its key is filed under it.")]
LedgerUrl = Annotated[
    str, typer.Option("--ledger", help="PostgreSQL URL of the ledger; default: a file in DATA.", show_default=False)
]
StoreUrl = Annotated[
    str, typer.Option("--store", help="Object store for shards, s3://BUCKET/PREFIX; default: DATA.", show_default=False)
]
Strategy = Annotated[
    str,
    typer.Option(
        help="How late actions are dealt with: auto (as the checkpoint was trained), sync, naive, aligned, ensemble, "
        "future_state, rtc_guided, rtc_trained or residual; default: the recipe's.",
        show_default=False,
    ),
]
DelayOption = Annotated[
    str,
    typer.Option(
        "--delay",
        help="Inject latency in control ticks: 4, random:2-8, or burst:2,12,0.05 (usual, long, share).",
        show_default=False,
    ),
]
SpeedUp = Annotated[int, typer.Option(help="Execute every q-th action; 0: as the recipe says.", show_default=False)]
RobotKind = Annotated[
    str,
    typer.Option("--robot", help="Another driver for the recipe's robot, such as ros2.", show_default=False),
]
RobotConfig = Annotated[
    str,
    typer.Option("--robot-config", help="That driver's configuration: JSON, or a JSON file.", show_default=False),
]
Think = Annotated[
    str,
    typer.Option(
        help="A think server, tcp://HOST:PORT, that runs the slow path; default: this computer.", show_default=False
    ),
]
Site = Annotated[str, typer.Option(help="Where the robot stands, for jobs that ask for it.", show_default=False)]
RunDir = Annotated[Path, typer.Option(hidden=True)]

_PORT = 5760
_WEB_PORT = 8080
_THINK_PORT = 5761


@app.command()
def up(
    recipe: Recipe = "pixels",
    robots: Annotated[
        int | None, typer.Option(min=1, max=64, help="How many simulated robots; default 3.", show_default=False)
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after so many minutes of robots at work; default: at Ctrl-C.")
    ] = None,
    data: Data = None,
    seed: Seed = 0,
    headless: Annotated[bool, typer.Option("--headless", help="Lines instead of a live table.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write what was measured to this JSON file.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Gateway port; 0 takes a free one.")] = _PORT,
    web_port: Annotated[int, typer.Option(min=0, max=65535, help="Page port; 0 takes a free one.")] = _WEB_PORT,
    web_host: Annotated[str, typer.Option(help="Address the page listens on.")] = "127.0.0.1",
    operator: Annotated[bool, typer.Option(help="Whether the scripted operator corrects.")] = True,
    ledger: LedgerUrl = "",
    store: StoreUrl = "",
    strategy: Strategy = "",
    delay: DelayOption = "",
    speed_up: SpeedUp = 0,
    backend: Annotated[
        str, typer.Option(help="Where parts run: local (children of this process) or ray (nodes of a Ray cluster).")
    ] = "local",
    ray_address: Annotated[
        str,
        typer.Option(
            help="The Ray cluster: auto or HOST:PORT; default: one of this machine alone.", show_default=False
        ),
    ] = "",
    host: Annotated[
        str,
        typer.Option(
            help="Address the gateway listens on; default 127.0.0.1, with Ray this node's.", show_default=False
        ),
    ] = "",
    think_server: Annotated[bool, typer.Option("--think-server", help="Robots think in one think server.")] = False,
) -> None:
    """Run the whole loop: gateway, trainer, evaluator and robots, on this machine or on a Ray cluster."""
    from fleet.tuning import Tuning
    from fleet.up import Options, run_up

    tuning = Tuning(strategy, delay, speed_up)
    options = Options(
        recipe=recipe,
        robots=robots,
        minutes=minutes,
        data=data,
        seed=seed,
        headless=headless,
        report=report,
        port=port,
        web_port=web_port,
        web_host=web_host,
        operator=operator,
        ledger=ledger,
        store=store,
        tuning=tuning,
        backend=backend,
        ray_address=ray_address,
        host=host,
        think_server=think_server,
    )
    raise typer.Exit(run_up(options))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ray_node(
    context: typer.Context,
    address: Annotated[
        str, typer.Option(help="Join the Ray cluster at HOST:PORT.", show_default=False, metavar="HOST:PORT")
    ] = "",
    head: Annotated[bool, typer.Option("--head", help="Begin a cluster instead.")] = False,
    robots: Annotated[str, typer.Option(help="Names of the robots here, NAME,NAME.", show_default=False)] = "",
    site: Site = "",
    data: Annotated[
        Path | None,
        typer.Option(help="Data directory on this node; default: as on the gateway's machine.", show_default=False),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Key directory on this node; default DATA/keys.", show_default=False)
    ] = None,
    robot: RobotKind = "",
    robot_config: RobotConfig = "",
) -> None:
    """Make this computer a node of a Ray cluster that runs a fleet: it offers its robots.

    Every other option goes to `ray start`; with --robots its --num-cpus is 0 unless given. In --robot-config {name}
    stands for the robot's name.
    """
    from fleet.ray_backend.node import robot_names, run_node
    from fleet.ray_backend.settings import NodeSettings

    data_root, key_root = (str(path.resolve()) if path is not None else "" for path in (data, keys))
    settings = NodeSettings(data_root, key_root, site, robot, robot_config)
    run_node(robot_names(robots), address, head, settings, context.args)


@app.command()
def recipes() -> None:
    """List the recipes."""
    from fleet.recipes import RECIPES

    for name, make in RECIPES.items():
        typer.echo(f"{name:10} {make().summary}")


@app.command()
def plot(
    report: Annotated[Path, typer.Argument(help="A report that `up --report` wrote.")],
    picture: Annotated[Path, typer.Argument(help="The picture to write: .png, .svg or .pdf.")],
) -> None:
    """Draw the success curve of a report."""
    from fleet.plot import draw

    draw(report, picture)
    typer.echo(f"{picture} written.")


@app.command()
def keys(
    names: Annotated[list[str], typer.Argument(help="Names of robots and processes that may connect.")],
    keys: Annotated[Path, typer.Option(help="Key directory.")] = Path("keys"),
) -> None:
    """Make CURVE keys for the gateway and for NAMES; existing ones stay."""
    from wire.keys import GATEWAY, make_keys

    make_keys(keys, [GATEWAY, *names])
    typer.echo(f"keys of {', '.join([GATEWAY, *names])} are in {keys}; give each machine its own .key_secret only.")


@app.command()
def gateway(
    recipe: Recipe = "pixels",
    data: Data = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = _PORT,
    host: Annotated[str, typer.Option(help="Address to listen on for robots.")] = "127.0.0.1",
    web_port: Annotated[int, typer.Option(min=0, max=65535)] = _WEB_PORT,
    web_host: Annotated[str, typer.Option(help="Address the page listens on.")] = "127.0.0.1",
    ledger: LedgerUrl = "",
    store: StoreUrl = "",
) -> None:
    """Run the gateway: ingest, buffer, weight server and the operator page."""
    from fleet.paths import DataDirectory
    from fleet.processes import run_gateway

    _log()
    DataDirectory(_data(data, recipe)).keep_buffer_at(ledger, store)
    run_gateway(recipe, _data(data, recipe), host, port, web_host, web_port)


@app.command()
def trainer(
    gateway: Address = f"tcp://127.0.0.1:{_PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    seed: Seed = 0,
    name: Name = "trainer",
    max_steps: Annotated[int, typer.Option(help="Stop learning after so many gradient steps; 0: never.")] = 0,
) -> None:
    """Train on the buffer in DATA and publish versions to the gateway."""
    from fleet.processes import run_trainer

    _log()
    run_trainer(recipe, _data(data, recipe), gateway, keys, seed, name, max_steps)


@app.command()
def evaluator(
    gateway: Address = f"tcp://127.0.0.1:{_PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    seed: Seed = 0,
    name: Name = "evaluator",
    version: Annotated[int, typer.Option(help="Measure only this version, then end; 0: the newest, steadily.")] = 0,
    label: Annotated[str, typer.Option(help="With --version: before, after or any word.")] = "once",
    strategy: Strategy = "",
    delay: DelayOption = "",
    speed_up: SpeedUp = 0,
) -> None:
    """Measure versions on held-out seeds."""
    from fleet.processes import run_evaluator
    from fleet.tuning import Tuning

    _log()
    tuning = Tuning(strategy, delay, speed_up)
    run_evaluator(recipe, _data(data, recipe), gateway, keys, seed, name, version, label, tuning)


@app.command()
def demonstrate(
    gateway: Address = f"tcp://127.0.0.1:{_PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    name: Name = "demonstrator",
    first_seed: Annotated[int, typer.Option(help="Seed of the first demonstration.")] = 0,
    episodes: Annotated[int, typer.Option(help="How many in all; 0: as the recipe says.")] = 0,
) -> None:
    """Record demonstrations of the scripted operator and send them to the gateway."""
    from fleet.processes import run_demonstrator

    _log()
    run_demonstrator(recipe, _data(data, recipe), gateway, keys, name, first_seed, episodes)


@app.command()
def edge(
    name: Name = "robot-0",
    gateway: Address = f"tcp://127.0.0.1:{_PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    operator: Annotated[bool, typer.Option(help="Whether the scripted operator corrects.")] = True,
    strategy: Strategy = "",
    delay: DelayOption = "",
    speed_up: SpeedUp = 0,
    robot: RobotKind = "",
    robot_config: RobotConfig = "",
    think: Think = "",
    site: Site = "",
) -> None:
    """Run one robot: its driver, control, inference and uplink processes."""
    from fleet.robot_parts import run_robot
    from fleet.tuning import Tuning

    _log()
    tuning = Tuning(strategy, delay, speed_up, robot, robot_config)
    raise typer.Exit(run_robot(recipe, _data(data, recipe), gateway, keys, name, operator, tuning, think, site))


@app.command(hidden=True)
def edge_part(
    part: Annotated[str, typer.Argument(help="robot, control, inference, thinker or uplink")],
    run_dir: RunDir,
    name: Name,
    gateway: Address,
    recipe: Recipe,
    data: Data,
    keys: Keys,
    operator: bool = True,
    strategy: Strategy = "",
    delay: DelayOption = "",
    speed_up: SpeedUp = 0,
    robot: RobotKind = "",
    robot_config: RobotConfig = "",
    think: Think = "",
    site: Site = "",
) -> None:
    """One process of a robot; started by `edge`."""
    from fleet.robot_parts import run_edge_part
    from fleet.tuning import Tuning

    _log()
    tuning = Tuning(strategy, delay, speed_up, robot, robot_config)
    run_edge_part(part, run_dir, recipe, _data(data, recipe), gateway, keys, name, operator, tuning, think, site)


@app.command()
def think_server(
    gateway: Address = f"tcp://127.0.0.1:{_PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = _THINK_PORT,
    host: Annotated[str, typer.Option(help="Address to listen on for robots.")] = "127.0.0.1",
) -> None:
    """Run the slow path for robots elsewhere: `edge --think tcp://HOST:PORT`. Its key is called `thinker`."""
    from fleet.processes import run_think_server

    _log()
    run_think_server(recipe, _data(data, recipe), gateway, keys, host, port)


@app.command()
def replay(
    flight: Annotated[Path, typer.Argument(help="A flight file, or a robot's directory of them.")],
    first: Annotated[int | None, typer.Option("--from", help="First control tick.", show_default=False)] = None,
    last: Annotated[int | None, typer.Option("--to", help="Last control tick.", show_default=False)] = None,
    rerun: Annotated[Path | None, typer.Option(help="Also write a recording for Rerun, FILE.rrd.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Also print the ticks.")] = False,
    boot: Annotated[str, typer.Option(help="Which start of the process; default: the newest.")] = "",
) -> None:
    """Decide a recorded stretch again, tick by tick; exit status 1 when anything comes out otherwise."""
    from fleet.flight import replay as replay_flight

    raise typer.Exit(replay_flight(flight, first, last, rerun, table, boot))


for commands in (doctor_cli, fleet_cli, teleop_cli):
    commands.add_commands(app)


def main() -> None:
    """Run the command line; errors that are ours become one line and exit status 1."""
    try:
        app()
    except FleetError as error:
        sys.stderr.write(f"vla-fleet: {error}\n")
        sys.stderr.flush()
        # Background threads of libraries must not keep a process alive that has said why it ends.
        os._exit(1)


def _data(data: Path | None, recipe: str) -> Path:
    return data if data is not None else Path("data") / recipe.replace(":", ".")


def _log() -> None:
    logging.basicConfig(
        level=os.environ.get("VLA_FLEET_LOG", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


if __name__ == "__main__":
    main()
