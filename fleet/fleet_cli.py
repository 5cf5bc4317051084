"""`vla-fleet robots | jobs | lease | release`: the fleet as resources."""

from __future__ import annotations

import typer


def add_commands(app: typer.Typer) -> None:
    """Add them to `app`."""
