"""What a robot could not start with is said before any of its processes is."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.config.process_options import EdgeOptions
from fleet.launch.robot_builders import edge_processes, relay_text
from wire.errors import FleetError
from wire.transport.keys import load_public, make_keys


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop_key": ["no such pedal"]}, "--stop-key no such pedal: no such device"),
        ({"stop_key": ["/dev/null/pedal:KEY_BB"]}, "no key 'KEY_BB'"),
        ({"stop_line": ["gpiochip99:17"]}, "--stop-line gpiochip99:17: No such file"),
        ({"stop_line": ["17"]}, "say CHIP:LINE"),
        ({"key": ["/dev/x:KEY_B=begin"]}, "no command 'begin'"),
        ({"speed_limit": 0.5}, "no velocity limit of gripper_effort"),
        ({"speed_limit": 0.0}, "above 0 up to 1"),
        ({"speed_limit": float("nan")}, "above 0 up to 1"),
    ],
)
def test_what_is_beside_it_must_be_there_and_must_be_meant(tmp_path: Path, given: dict[str, object], said: str) -> None:
    make_keys(tmp_path / "keys", ["gateway", "robot-0"])
    with pytest.raises(FleetError) as refused:
        edge_processes(EdgeOptions(recipe="fake", data=tmp_path, **given))  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_what_fits_reaches_the_robots_process(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["gateway", "robot-0"])
    options = EdgeOptions(recipe="pixels", data=tmp_path, speed_limit=0.5)
    edge = edge_processes(options)
    assert "--speed-limit" in edge._commands["robot"]


def test_a_relay_is_named_by_its_address_and_key(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["relay"])
    text = relay_text(EdgeOptions(recipe="fake", data=tmp_path, relay="tcp://site:5763"))
    key = load_public(tmp_path / "keys", "relay").decode()
    assert text == f"the relay at tcp://site:5763 with key {key}"
