"""A script that drives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hal.drivers.fake import FakeConfig, fake_spec
from hal.interfaces.teleop import TeleopCommand, TeleopDevice
from hal.registry import TELEOPERATORS, make_teleoperator, read_config
from hal.teleop.pose import pose_of
from hal.teleop.script import ScriptConfig, ScriptedDevice
from wire.clock import ManualClock
from wire.errors import ConfigError, RobotError

SPEC = fake_spec(FakeConfig())


def play(config: ScriptConfig, times: list[float]) -> list[TeleopCommand]:
    clock = ManualClock(5)
    script = ScriptedDevice(config, clock)
    assert isinstance(script, TeleopDevice)
    script.connect(SPEC)
    seen = []
    for time_s in times:
        clock.sleep_until(5 + round(time_s * 1e9))
        seen.append(script.read(pose_of(SPEC, None), True))
    script.close()
    return seen


def actions(intents: list[TeleopCommand]) -> list[list[float] | None]:
    return [None if i.action is None else [round(float(a), 3) for a in i.action] for i in intents]


def test_json_rows_hold_until_the_next(tmp_path: Path) -> None:
    file = tmp_path / "way.json"
    file.write_text(
        json.dumps(
            [
                {"time_s": 0, "action": [0.1, 0, 0, 1]},
                {"time_s": 1, "move_y": 0.5, "gripper_effort": -1},
                {"time_s": 2},
            ]
        )
    )
    seen = play(ScriptConfig(str(file)), [0, 0.9, 1.0, 2.5, 3.0, 4.0])
    assert actions(seen) == [[0.1, 0, 0, 1], [0.1, 0, 0, 1], [0, 0.5, 0, -1], None, None, None]
    assert [i.engaged for i in seen] == [True, True, True, True, False, False]
    assert [i.quit for i in seen] == [False, False, False, False, True, True]


def test_csv_rows_with_gaps_and_a_repeat(tmp_path: Path) -> None:
    file = tmp_path / "way.csv"
    file.write_text("time_s,move_x,gripper_effort\n0.0,1,-1\n0.5,,1\n1.0,,\n")
    seen = play(ScriptConfig(str(file), repeat=2), [0, 0.6, 1.2, 1.6, 3.0])
    assert actions(seen) == [[1, 0, 0, -1], [0, 0, 0, 1], None, [1, 0, 0, -1], None]
    assert seen[-1].quit


def test_a_function_drives(tmp_path: Path) -> None:
    seen = play(ScriptConfig(function="tests.hal.teleop.own_script:go"), [0, 0.6, 1.1])
    assert actions(seen) == [[0.5, 0, 0, 1], None, None]
    assert seen[2].quit


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("[]", "has no row"),
        ("{", "not a JSON list of rows"),
        ('[{"action": [0,0,0,0]}]', "row 1: no time_s"),
        ('[{"time_s": 0, "action": [0,0,0]}]', "row 1: 'action' must be 4 numbers: move_x, move_y"),
        ('[{"time_s": 0, "mov_x": 1}]', "Did you mean 'move_x'"),
        ('[{"time_s": 0, "move_x": 1}]', "'gripper_effort' is an absolute target"),
        ('[{"time_s": 0, "action": [2,0,0,0]}]', r"'move_x' is outside its limits \[-1, 1\]"),
        ('[{"time_s": 0, "action": ["fast",0,0,0]}]', "'move_x' is 'fast', which is no number"),
        ('[{"time_s": 1}, {"time_s": 1}]', "row 2: time_s 1 is not after 1"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, rows: str, message: str) -> None:
    file = tmp_path / "way.json"
    file.write_text(rows)
    with pytest.raises(ConfigError, match=message):
        ScriptedDevice(ScriptConfig(str(file))).connect(SPEC)


def test_a_missing_file_or_function_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json cannot be read"):
        ScriptedDevice(ScriptConfig(str(tmp_path / "nothing.json"))).connect(SPEC)
    with pytest.raises(ConfigError, match=r"'own_scrip:go' cannot be loaded.*PYTHONPATH"):
        ScriptedDevice(ScriptConfig(function="own_scrip:go")).connect(SPEC)
    with pytest.raises(ConfigError, match="either path or function"):
        ScriptConfig()
    with pytest.raises(ConfigError, match="'script' needs a configuration"):
        make_teleoperator("script")


def test_a_function_that_fails_is_named() -> None:
    with pytest.raises(RobotError, match=r"own_script:broken failed: ZeroDivisionError"):
        play(ScriptConfig(function="tests.hal.teleop.own_script:broken"), [0])


def test_devices_are_configured_by_plain_values() -> None:
    assert read_config("script", {"path": "a.csv", "repeat": 2}, TELEOPERATORS) == ScriptConfig("a.csv", repeat=2)
    with pytest.raises(ConfigError, match="Did you mean 'deadzone'"):
        read_config("gamepad", {"dead_zone": 0.1}, TELEOPERATORS)
    assert read_config("keyboard", {"keys": {"p": "+dx"}}, TELEOPERATORS).keys == {"p": "+dx"}
