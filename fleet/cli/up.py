"""`vla-fleet up`, the whole loop with one command, and `ray-node`, a computer that takes part in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleet.config.overrides import RobotConfig, RobotKind
from fleet.config.process_options import Site
from fleet.launch.options import UpOptions


def up(options: UpOptions) -> int:
    """Run the whole loop: gateway, trainer, evaluator and robots, on this machine or on a Ray cluster."""
    from fleet.launch.up import Up

    return Up(options).run()


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
