"""`vla-fleet stop` and `vla-fleet speed`: stop or slow robots on their own computer, without gateway and ROS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def stop(
    robot: Annotated[
        str, typer.Argument(help="Name of the robot; default: all that run here.", show_default=False)
    ] = "",
    release: Annotated[
        str, typer.Option(help="Take back this stop, or all, instead.", metavar="ID|all", show_default=False)
    ] = "",
    start: Annotated[bool, typer.Option("--start", help="Let a robot whose stops are released move again.")] = False,
    data: Annotated[
        Path, typer.Option(help="Where robots that do not run keep what they are: their fleets' data directories.")
    ] = Path("data"),
) -> None:
    """Stop the robots of this computer at once, or let them go on. Exit status 1 when one of them does not answer."""
    from fleet.tools import stop as tool

    robots = tool.robots_here(robot, data)
    status = 0
    if release:
        status = tool.release_robots(robots, release, typer.echo)
    if start and not status:
        status = tool.start_robots(robots, typer.echo)
    if not (release or start):
        status = tool.stop_robots(robots, typer.echo)
    raise typer.Exit(status)


def speed(
    robot: Annotated[str, typer.Argument(help="Name of the robot.")],
    share: Annotated[
        float | None,
        typer.Argument(help="Share of its velocity limits, above 0 up to 1; default: only say it.", show_default=False),
    ] = None,
    data: Annotated[
        Path, typer.Option(help="Where robots that do not run keep what they are: their fleets' data directories.")
    ] = Path("data"),
) -> None:
    """Have a robot of this computer move at most at a share of its velocity limits, from its next command on.

    The smallest limit that anybody set counts; 1 takes back this command's own. It outlives the robot's processes.
    """
    from fleet.tools import speed as tool
    from fleet.tools.stop import robots_here

    for found in robots_here(robot, data):
        typer.echo(tool.limit_speed(found, share) if share is not None else tool.speed_of(found))
