"""Where the command `vla-fleet` begins. A stop must not wait for what the other commands import."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["stop"]:
        _stop(sys.argv[2:])
    else:
        from fleet.cli.__main__ import main as all_commands

        all_commands()


def _stop(words: list[str]) -> None:
    import typer

    from fleet.cli.stop import stop
    from wire.errors import FleetError

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(stop)
    try:
        app(words, prog_name="vla-fleet stop")
    except FleetError as error:
        sys.exit(f"vla-fleet: {error}")


if __name__ == "__main__":
    main()
