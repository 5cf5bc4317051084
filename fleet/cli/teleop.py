"""`vla-fleet teleop`: drive a robot of the fleet with a device of one's own."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wire.errors import RobotError

if TYPE_CHECKING:
    from fleet.tools.teleop import Teleop
    from hal.interfaces.teleop import TeleopDevice
    from wire.clock import Clock

_LINES_PER_S = 5


def add_commands(app: typer.Typer) -> None:
    """Add them to `app`."""
    app.command()(teleop)


def teleop(
    robot: Annotated[str, typer.Argument(help="Name of the robot.")],
    device: Annotated[
        str, typer.Option(help="keyboard, gamepad, lerobot, script, or one that a package adds.")
    ] = "keyboard",
    device_config: Annotated[
        str, typer.Option(help="The device's configuration: JSON, or a JSON file.", show_default=False)
    ] = "",
    gateway: Annotated[
        str,
        typer.Option(help="The gateway, tcp://HOST:PORT; default: the one that runs on DATA here.", show_default=False),
    ] = "",
    recipe: Annotated[str, typer.Option(help="Which fleet, when --data is not given: data/RECIPE.")] = "pixels",
    data: Annotated[
        Path | None, typer.Option(help="Data directory of the fleet; default data/RECIPE.", show_default=False)
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="Key directory; default DATA/keys.", show_default=False)] = None,
    name: Annotated[str, typer.Option(help="Name of the key; it begins with teleoperator.")] = "teleoperator",
    hz: Annotated[float, typer.Option(help="Commands a second.")] = 30.0,
    armed: Annotated[
        bool, typer.Option("--armed", help="Let the device drive without Enter being pressed first.")
    ] = False,
) -> None:
    """Drive a robot: it is yours while this runs, and works on when you hand it back."""
    from fleet.cli.client import gateway_of
    from fleet.config.data_directory import DataDirectory
    from fleet.launch.supplies import client
    from fleet.tools.teleop import Teleop
    from wire.clock import MonotonicClock

    place = DataDirectory(data if data is not None else Path("data") / recipe.replace(":", "."))
    driver = make_device(device, device_config, armed)
    clock = MonotonicClock()
    channel = client(gateway or gateway_of(place.root), name, keys or place.keys)
    # Both: a shell that starts a program in the background lets it ignore Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _as_interrupt)
    try:
        teleop = Teleop(channel, driver, robot, name, clock, hz=hz, say=_say)
        _run(teleop, clock)
    finally:
        driver.close()
        channel.close()
        _show("")


def make_device(kind: str, config: str, armed: bool) -> TeleopDevice:
    """The device, with keys for taking over, stopping and quitting beside it where there is a terminal."""
    from fleet.config.overrides import read_json
    from hal.registry import TELEOPERATORS, make_teleoperator, read_config
    from hal.teleop.terminal import WithKeys

    device = make_teleoperator(kind, read_config(kind, read_json(config), TELEOPERATORS) if config else None)
    if kind == "keyboard" or not sys.stdin.isatty():
        return device
    return WithKeys(device, os.ttyname(sys.stdin.fileno()), armed)


def _run(teleop: Teleop, clock: Clock) -> None:
    """Until the person is done. The robot is handed back, except after a device that failed: then it holds."""
    due_ns = clock.now_ns()
    shown_ns = 0
    try:
        while teleop.turn():
            now_ns = clock.now_ns()
            if now_ns - shown_ns > 1e9 / _LINES_PER_S:
                shown_ns = now_ns
                _show(teleop.line())
            due_ns = max(due_ns + teleop.period_ns, now_ns)
            clock.sleep_until(due_ns)
    except KeyboardInterrupt:
        teleop.close()
    except RobotError as error:
        raise RobotError(f"{error} {teleop.robot} is left holding; take it over again or hand it back.") from error
    except BaseException:
        teleop.close()
        raise
    else:
        teleop.close()


def _show(line: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[2K{line[:width]}")
        sys.stderr.flush()


def _say(sentence: str) -> None:
    _show("")
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


def _as_interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
