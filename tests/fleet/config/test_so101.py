"""The recipe of a bench: its file, what a mistake in it says, and that every process makes the same of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.overrides import Overrides
from fleet.config.process_options import EdgeOptions, EvaluatorOptions, GatewayOptions, TrainerOptions, UpOptions
from fleet.config.recipes import get_recipe
from fleet.launch.builders import run_evaluator
from fleet.launch.process_specs import ProcessSpecs, modules_by_role
from fleet.launch.robot_builders import edge_processes
from fleet.launch.up import Up
from hal.registry import make_robot
from hal.stop_devices.config import StopDevicesConfig
from tests.extras import needs
from tests.hal.drivers.lerobot.feetech_bus import FeetechBus
from tests.hal.drivers.lerobot.so_arm import JOINTS, calibrated
from wire.errors import ConfigError
from wire.transport.keys import make_keys
from wire.types import Role

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "bench.toml"
SMALLEST = """
[robot]
port = "/dev/ttyACM0"
id = "bench"
[cameras.front]
kind = "pattern"
[tasks]
pick = "pick up the cube"
"""


def bench(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "bench.toml"
    path.write_text(text)
    return path


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        get_recipe("so101", config=bench(tmp_path, text))
    assert str(tmp_path / "bench.toml") in str(raised.value)
    return str(raised.value)


def test_the_example_is_a_whole_bench() -> None:
    recipe = get_recipe("so101", config=EXAMPLE)
    assert [(d.name, d.unit) for d in recipe.spec.action] == [
        *((f"{joint}.pos", "deg") for joint in JOINTS[:5]),
        ("gripper.pos", "%"),
    ]
    assert [camera.name for camera in recipe.spec.cameras] == ["front", "wrist"]
    assert set(recipe.loop.safety.velocity) == set(recipe.loop.safety.acceleration) == {f"{j}.pos" for j in JOINTS}
    assert recipe.people_only and recipe.teleoperator is not None
    assert recipe.teleoperator.config["type"] == "so101_leader"
    assert recipe.loop.max_ticks == 900


def test_what_the_file_says_is_taken(tmp_path: Path) -> None:
    text = SMALLEST + (
        'place = "put it down"\n[episodes]\nseconds = 4\ndemonstrations = 3\n[rest_pose]\n'
        "[limits.velocity]\nelbow_flex = 12\n[limits.acceleration]\nelbow_flex = 900\n"
    )
    recipe = get_recipe("so101", config=bench(tmp_path, text))
    assert recipe.instructions == {"pick": "pick up the cube", "place": "put it down"}
    assert (recipe.loop.max_ticks, recipe.demonstrations, recipe.teleoperator) == (120, 3, None)
    safety = recipe.loop.safety
    assert (safety.velocity["elbow_flex.pos"], safety.velocity["wrist_flex.pos"]) == (12, 90)
    assert safety.stop_deceleration["elbow_flex.pos"] == 900, "a stop is never softer"
    assert recipe.robot_config.robot_config["rest_pose"] == {}
    assert recipe.config == (tmp_path / "bench.toml").resolve()
    assert (recipe.speed_limit, recipe.loop.episodes.reset_s) == (1.0, 0.0)


def test_what_the_person_beside_the_arm_has_is_of_the_bench(tmp_path: Path) -> None:
    beside = '[beside]\nspeed_limit = 0.25\nstop_keys = ["foot:KEY_B"]\nstop_lines = ["gpiochip0:17"]\n'
    beside += 'keys = ["foot:KEY_C=next"]\n[episodes]\nreset_seconds = 20\n'
    recipe = get_recipe("so101", config=bench(tmp_path, SMALLEST + beside))
    assert recipe.stop_devices == StopDevicesConfig(("foot:KEY_B",), ("gpiochip0:17",), ("foot:KEY_C=next",))
    assert (recipe.speed_limit, recipe.loop.episodes.reset_s) == (0.25, 20.0)
    assert "no command 'nxt'. Did you mean 'next'" in refused(tmp_path, SMALLEST + beside.replace("=next", "=nxt"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("port =", "prot ="), "there is no 'robot.prot'. Did you mean 'port'?"),
        (("[tasks]", "[taks]"), "there is no 'taks'. Did you mean 'tasks'?"),
        (('"pattern"', '"pattern"\nfsp = 3'), "there is no 'cameras.front.fsp'. Did you mean 'fps'?"),
        (('"/dev/ttyACM0"', "3"), "Expected `str`, got `int` - at `$.robot.port`"),
        (('id = "bench"\n', ""), "missing required field `id` - at `$.robot`"),
        (("[robot]", "[robot"), "is no TOML"),
        (("[tasks]", "[limits.velocity]\nelbow = 3\n[tasks]"), "names 'elbow'. Did you mean 'elbow_flex'?"),
        (("[tasks]", "[rest_pose]\nshoulder_pam = 3\n[tasks]"), "names 'shoulder_pam'. Did you mean 'shoulder_pan'?"),
        (("[tasks]", "[limits.velocity]\nelbow_flex = 0\n[tasks]"), "Expected `float` > 0"),
        (('kind = "pattern"', ""), "cameras.front has no device"),
    ],
)
def test_a_mistake_names_key_and_file_and_the_nearest(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path, SMALLEST.replace(*change, 1))


def test_without_a_file_it_says_what_to_write() -> None:
    with pytest.raises(ConfigError) as raised:
        get_recipe("so101")
    for words in ("needs --config", 'port = "/dev/ttyACM0"', "lerobot-find-port", "lerobot-find-cameras", "bench.toml"):
        assert words in str(raised.value)
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        get_recipe("so101", config=Path("nowhere.toml"))
    with pytest.raises(ConfigError, match="takes none"):
        get_recipe("fake", config=EXAMPLE)


def test_every_part_is_told_of_it_and_makes_the_same_robot() -> None:
    parts = ProcessSpecs("so101", "tcp://x:1", 0, operator=False, overrides=Overrides(), config=EXAMPLE)
    told = (parts.make_gateway("h", 0, "h", 0), parts.make_trainer(), parts.make_thinker(), parts.make_edge("arm"))
    assert all(f"--config {EXAMPLE}" in " ".join(part.argv) for part in told)
    made = {kind(recipe="so101", config=EXAMPLE).make_recipe().spec.hash for kind in (GatewayOptions, TrainerOptions)}
    assert made == {get_recipe("so101", config=EXAMPLE).spec.hash}
    modules = modules_by_role(get_recipe("so101", config=EXAMPLE), "")
    assert "lerobot.robots.so_follower" in modules[Role.edge]
    assert "lerobot.robots.so_follower" not in modules[Role.gateway]


def test_the_data_directory_knows_the_newest_file(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path / "d")
    for config in ("", "/a/bench.toml", "/b/bench.toml"):
        data.prepare(RunIdentity("so101", 0, "hash", None, config)).close()
        found = data.identity()
        assert found is not None and found.config_path == (Path(config) if config else None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"report": "r.json"}, "has no simulator to measure versions in"),
        ({"robots": "2"}, "describes one robot"),
    ],
)
def test_up_refuses_what_needs_a_simulator(given: dict, said: str, tmp_path: Path) -> None:
    if "report" in given:
        given = {"report": tmp_path / given["report"]}
    options = UpOptions(recipe="so101", config=EXAMPLE, data=tmp_path / "d", headless=True, **given)
    with pytest.raises(ConfigError, match=said):
        Up(options).run()
    assert not (tmp_path / "d").exists()


def test_nobody_evaluates_on_the_arm_that_people_drive(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no simulator"):
        run_evaluator(EvaluatorOptions(recipe="so101", config=EXAMPLE, data=tmp_path))


@needs("lerobot")
@pytest.mark.slow
def test_the_driver_has_the_spec_that_gateway_and_trainer_were_told(tmp_path: Path) -> None:
    with FeetechBus() as bus:
        fields = calibrated(bus, tmp_path)
        lines = "".join(f'{name} = "{value}"\n' for name, value in fields.items())
        config = bench(tmp_path, SMALLEST.replace('port = "/dev/ttyACM0"\nid = "bench"\n', lines))
        recipe = get_recipe("so101", config=config)
        assert make_robot(recipe.robot, recipe.robot_config).spec.hash == recipe.spec.hash
        make_keys(tmp_path / "keys", ["gateway", "robot-0"])
        edge = edge_processes(EdgeOptions(recipe="so101", config=config, data=tmp_path))
        assert edge.name == "robot-0", "its limits are complete"
