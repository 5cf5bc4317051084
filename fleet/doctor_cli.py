"""`vla-fleet doctor`: is a robot fit to be driven?"""

from __future__ import annotations

import typer


def add_commands(app: typer.Typer) -> None:
    """Add them to `app`."""
