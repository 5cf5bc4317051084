"""`vla-fleet speed`: slow a robot on its own computer, without gateway and ROS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
