"""A pedal beside a robot, through its real processes: a FIFO of the kernel's bytes stands for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.config.process_options import EdgeOptions
from fleet.launch.robot_builders import edge_processes
from hal.driver_host.stop_line import StopOrder, send_order
from hal.stop_devices.evdev_keys import key_bytes
from robot_edge.runtime.process_group import EdgeProcesses, uplink_channel
from robot_edge.runtime.robot_host import HOST
from tests.hal.stop_devices.test_evdev_keys import Pedal, pedal  # noqa: F401
from wire.errors import RobotError
from wire.messages.gateway import EdgeStatus
from wire.stop_state import StopState
from wire.transport.keys import make_keys

pytestmark = pytest.mark.slow


def until(edge: EdgeProcesses, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline, edge.fault
        edge.poll()
        time.sleep(0.02)


def test_it_stops_a_robot_and_its_key_takes_it_over(tmp_path: Path, pedal: Pedal) -> None:  # noqa: F811
    make_keys(tmp_path / "keys", ["gateway", "robot-0"])
    path = str(pedal.path)
    options = EdgeOptions(recipe="fake", data=tmp_path, operator=False, stop_key=[f"{path}:KEY_B"])
    options.key.append(f"{path}:KEY_ENTER=take_over")
    with edge_processes(options) as edge:
        host = edge.directory / HOST
        channel = uplink_channel(edge.directory, "operator")
        shown: list[EdgeStatus] = []

        def status() -> EdgeStatus | None:
            while (message := channel.recv()) is not None:
                if isinstance(message, EdgeStatus):
                    shown.append(message)
            return shown[-1] if shown else None

        def state() -> StopState:
            try:
                return send_order(host, StopOrder("ask"), 0.5)
            except RobotError:
                return StopState(ready=True)

        until(edge, lambda: state().free and status() is not None)
        pedal.say(key_bytes("KEY_ENTER", True) + key_bytes("KEY_ENTER", False))
        until(edge, lambda: bool(status() and status().interventions))
        pedal.say(key_bytes("KEY_B", True) + key_bytes("KEY_B", False))
        until(edge, lambda: list(status().stop.stops.values()) == [f"pedal {path}"])
        channel.close()
