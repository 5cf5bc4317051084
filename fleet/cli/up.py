"""`vla-fleet up`, the whole loop with one command, and `ray-node`, a computer that takes part in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.options import (
    CHUNKING,
    POLICY,
    PORT,
    WEB_PORT,
    Data,
    LedgerUrl,
    Recipe,
    RobotConfig,
    RobotKind,
    Seed,
    Site,
    StoreUrl,
    tuning_options,
)

if TYPE_CHECKING:
    from fleet.config.overrides import Tuning


def add_commands(app: typer.Typer) -> None:
    """Add them to `app`."""
    app.command()(up)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(ray_node)


@tuning_options(*CHUNKING, *POLICY)
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
    measure_at: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            metavar="MIN",
            show_default=False,
            help="For the report, also measure what is the newest version after MIN minutes, once the run is over; may "
            "be repeated.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Gateway port; 0 takes a free one.")] = PORT,
    web_port: Annotated[int, typer.Option(min=0, max=65535, help="Page port; 0 takes a free one.")] = WEB_PORT,
    web_host: Annotated[str, typer.Option(help="Address the page listens on.")] = "127.0.0.1",
    operator: Annotated[bool, typer.Option(help="Whether the scripted operator corrects.")] = True,
    ledger: LedgerUrl = "",
    store: StoreUrl = "",
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
    *,
    tuning: Tuning,
) -> None:
    """Run the whole loop: gateway, trainer, evaluator and robots, on this machine or on a Ray cluster."""
    from fleet.launch.options import Options
    from fleet.launch.up import run_up

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
        measure_at=tuple(measure_at or ()),
    )
    raise typer.Exit(run_up(options))


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
