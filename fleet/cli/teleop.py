"""`vla-fleet teleop`: drive a robot of the fleet with a device of one's own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.fleet import ConsoleOptions, Robot
from fleet.cli.options import take_interrupts
from fleet.config.overrides import unset
from wire.errors import RobotError

if TYPE_CHECKING:
    from fleet.tools.teleop import Teleop
    from hal.interfaces.teleop import TeleopDevice
    from wire.clock import Clock

_LINES_PER_S = 5


@dataclass(frozen=True, kw_only=True)
class TeleopOptions(ConsoleOptions):
    robot: Robot
    device: Annotated[
        str,
        unset(
            "keyboard, gamepad, lerobot, script, or one that a package adds; default: with --config the recipe's "
            "leader arm, else the keyboard."
        ),
    ] = ""
    device_config: Annotated[str, unset("The device's configuration: JSON, or a file of JSON or TOML.")] = ""
    name: Annotated[str, typer.Option(help="Name of the key, a teleoperator's.")] = "teleoperator"
    hz: Annotated[float, typer.Option(help="Commands a second.")] = 30.0
    armed: Annotated[bool, typer.Option("--armed", help="Let the device drive without Enter being pressed first.")] = (
        False
    )


def teleop(options: TeleopOptions) -> None:
    """Drive a robot: it is yours while this runs, and works on when you hand it back."""
    from fleet.config.data_directory import DataDirectory
    from fleet.tools.teleop import Teleop
    from wire.clock import MonotonicClock
    from wire.transport.keys import load_pair
    from wire.transport.stop_connection import StopConnection
    from wire.transport.zmq_channel import ZmqClient

    name, gateway = options.name, options.gateway or DataDirectory(options.root).gateway
    device = make_device(*choose_device(options), options.armed)
    clock = MonotonicClock()
    role = load_pair(options.key_directory, name).role
    channel = ZmqClient(gateway, name, options.key_directory)
    stops = StopConnection(gateway, lambda address: ZmqClient(address, name, options.key_directory), clock)
    take_interrupts()
    try:
        person = Teleop(channel, device, options.robot, name, clock, hz=options.hz, notify=_say, stops=stops, role=role)
        _run(person, clock)
    finally:
        device.close()
        stops.close()
        channel.close()
        _show("")


def choose_device(options: TeleopOptions) -> tuple[str, str]:
    """(kind, configuration) of what was asked for, else of what the recipe of --config names. Raises `ConfigError`."""
    usual = options.make_recipe().teleoperator if options.config is not None and not options.device else None
    if usual is None:
        return options.device or "keyboard", options.device_config
    return usual.kind, options.device_config or json.dumps(usual.config)


def make_device(kind: str, config: str, armed: bool) -> TeleopDevice:
    """The device, with keys for taking over, stopping and quitting beside it where there is a terminal."""
    from fleet.config.robot_config import read_json
    from hal.registry import TELEOPERATORS, make_teleoperator, read_config
    from hal.teleop.terminal import WithKeys

    made = read_config(kind, read_json(config, "--device-config"), TELEOPERATORS) if config else None
    device = make_teleoperator(kind, made)
    if kind == "keyboard" or not sys.stdin.isatty():
        return device
    return WithKeys(device, os.ttyname(sys.stdin.fileno()), armed)


def _run(teleop: Teleop, clock: Clock) -> None:
    """Until the person is done. The robot is handed back, except after a device that failed: then it holds."""
    due_ns = clock.now_ns()
    shown_ns = 0
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while teleop.step():
                now_ns = clock.now_ns()
                if now_ns - shown_ns > 1e9 / _LINES_PER_S:
                    shown_ns = now_ns
                    _show(teleop.status_line())
                due_ns = max(due_ns + teleop.period_ns, now_ns)
                clock.sleep_until(due_ns)
    except RobotError as error:
        raise RobotError(f"{error} {teleop.robot} is left holding; take it over again or hand it back.") from error
    except BaseException:
        teleop.close()
        raise
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
