"""`vla-fleet teleop`: drive a robot of the fleet with a device of one's own."""

from __future__ import annotations

import typer


def add_commands(app: typer.Typer) -> None:
    """Add them to `app`."""
