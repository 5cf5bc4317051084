"""Limits beside a driver's configuration, in JSON and TOML."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fleet.config.overrides import Overrides
from fleet.config.process_options import EdgeOptions
from fleet.config.recipes import get_recipe
from fleet.config.robot_config import read_robot_config
from fleet.launch import factories
from fleet.launch.robot_builders import edge_processes
from hal import registry
from hal.drivers.fake import FakeConfig, FakeRobot
from hal.safety.limits import SafetyLimits
from wire.clock import MonotonicClock
from wire.errors import ConfigError
from wire.transport.keys import make_keys
from wire.transport.memory_channel import memory_pair

NAMES = [dimension.name for dimension in FakeRobot(FakeConfig()).spec.action]
SAFETY = {"velocity": dict.fromkeys(NAMES, 2.0), "acceleration": dict.fromkeys(NAMES, 20.0)}


class Real(FakeRobot):
    """A driver that says it is one."""

    real = True

    def __init__(self, config: FakeConfig | None = None, clock: MonotonicClock | None = None) -> None:
        super().__init__(config, clock)


@pytest.fixture(autouse=True)
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered[registry.ROBOTS], "real", Real)


def toml(path: Path) -> str:
    lines = [f"[safety.{kind}]\n" + "".join(f"{n} = {v}\n" for n, v in table.items()) for kind, table in SAFETY.items()]
    path.write_text("control_hz = 80.0\n" + "\n".join(lines))
    return str(path)


@pytest.mark.parametrize("kind", ["json", "toml"])
def test_a_real_robot_runs_by_the_limits_beside_its_configuration(kind: str, tmp_path: Path) -> None:
    text = json.dumps({"safety": SAFETY}) if kind == "json" else toml(tmp_path / "robot.toml")
    recipe = Overrides(robot="real", robot_config=text).applied(get_recipe("fake"))
    assert recipe.loop.safety.velocity == SAFETY["velocity"]
    assert recipe.loop.safety.workspace == get_recipe("fake").loop.safety.workspace, "what is not named stays"
    make_keys(tmp_path / "keys", ["gateway", "robot-0"])
    given = {"recipe": "fake", "data": tmp_path, "gateway": "tcp://x:1"}
    assert edge_processes(EdgeOptions(**given, overrides=Overrides(robot="real", robot_config=text)))
    with pytest.raises(ConfigError, match="`safety` in --robot-config"):
        edge_processes(EdgeOptions(**given, overrides=Overrides(robot="real")))


def test_a_real_robot_in_ones_own_process_needs_them_too() -> None:
    recipe = Overrides(robot="real").applied(get_recipe("fake"))
    with pytest.raises(ConfigError, match="is real and may not run a policy"):
        factories.make_control(recipe, "robot", *memory_pair(), MonotonicClock(), operated=False)


@pytest.mark.parametrize(
    ("safety", "said"),
    [
        ({"velocities": {}}, "safety has no 'velocities'. Did you mean 'velocity'?"),
        ({"velocity": 3}, "safety: Expected `object`, got `int`"),
        ([], "must be an object of limits"),
    ],
)
def test_a_mistake_in_them_is_named(safety: object, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_robot_config(json.dumps({"safety": safety})).limits(SafetyLimits())
    assert said in str(raised.value)


def test_toml_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "robot.toml").write_text("[")
    with pytest.raises(ConfigError, match=r"robot\.toml: .*Give JSON, or a file of JSON or TOML"):
        read_robot_config(str(tmp_path / "robot.toml"))


@pytest.mark.parametrize("name", ["robot.toml", "robot.json"])
@pytest.mark.parametrize("kind", ["device", "pipe", "nested", "bytes", "huge"])
def test_a_file_that_does_not_end_or_is_none_is_named(kind: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "nested":
        path.write_text(("x = " if name.endswith("toml") else '{"x": ') + "[" * 10**5)
    else:
        path.write_bytes(b"\xff\xfe")
        if kind == "huge":
            os.truncate(path, 2**40)
    with pytest.raises(ConfigError, match=f"--robot-config {path}"):
        read_robot_config(str(path))
