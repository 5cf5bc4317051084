"""What the edge node fills in of a ROS 2 driver's configuration, and what it then looks for in the graph."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.config.overrides import Overrides
from fleet.config.recipes import get_recipe
from fleet.ros2 import main as ros2
from fleet.ros2.main import absolute_name, complete_config, required_endpoints, write_config
from hal.drivers.ros2.config import ImageTopic, Ros2Config
from hal.registry import read_config
from robot_edge.ros2.parameters import EdgeParameters
from robot_edge.ros2.topics import Endpoint
from tests.ros import needs_ros
from wire.errors import ConfigError, NotWritableError
from wire.transport.keys import make_keys

OUTSIDE = "tests.e2e.outside_recipe:recipe"


def test_what_the_recipe_knows_need_not_be_said() -> None:
    recipe = get_recipe("fake")
    config = complete_config(recipe, '{"stop": true}', "/left")
    assert config.spec == recipe.spec
    assert config.tasks == recipe.instructions
    assert config.namespace == "/left"
    assert config.stop
    assert not config.reset


def test_what_is_given_wins() -> None:
    recipe = get_recipe(OUTSIDE)
    assert recipe.robot_config.reset
    config = complete_config(
        recipe, '{"reset": false, "namespace": "/right", "tasks": {"sway": "to and fro"}}', "/left"
    )
    assert (config.reset, config.stop, config.namespace) == (False, True, "/right")
    assert config.tasks == {"sway": "to and fro"}


@pytest.mark.parametrize("namespace", ["/", "/left", "/cell/left"])
def test_the_driver_is_where_its_node_is(namespace: str) -> None:
    config = complete_config(get_recipe(OUTSIDE), "", namespace)
    assert config.namespace == namespace.rstrip("/")
    assert required_endpoints(config)[0].name == f"{namespace.rstrip('/')}/joint_states"


def test_a_field_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match="no 'stepp'"):
        complete_config(get_recipe("fake"), '{"stepp": true}', "/")


def test_only_what_is_used_must_be_there() -> None:
    config = replace(complete_config(get_recipe(OUTSIDE), "", "/left"), reset=False, stop=False)
    assert required_endpoints(config) == (
        Endpoint("publisher", "/left/joint_states", "sensor_msgs/msg/JointState"),
        Endpoint("subscription", "/left/joint_trajectory", "trajectory_msgs/msg/JointTrajectory"),
    )


def test_all_that_is_used_must_be_there() -> None:
    config = complete_config(get_recipe("fake"), '{"executed": true, "reset": true, "stop": true}', "/left")
    found = {(one.kind, one.name): one.type for one in required_endpoints(config)}
    assert found["publisher", "/left/executed"] == "sensor_msgs/msg/JointState"
    assert found["publisher", "/left/camera/front/image_raw"] == "sensor_msgs/msg/Image"
    assert found["service", "/left/reset"] == found["service", "/left/stop"] == "std_srvs/srv/Trigger"
    small = replace(config, cameras={"front": ImageTopic("/eye", compressed=True)})
    assert Endpoint("publisher", "/eye", "sensor_msgs/msg/CompressedImage") in required_endpoints(small)


def test_of_a_robot_on_controllers_each_must_be_there_and_no_other_command_topic() -> None:
    names = [d.name for d in get_recipe("fake").spec.action]
    outputs = [
        {"kind": "forward", "topic": "arm/commands", "dimensions": names[3:]},
        {"kind": "trajectory", "topic": "base/joint_trajectory", "dimensions": names[:3]},
    ]
    targets = {name: {"state": name[-1]} for name in names[:3]}
    wrenches = [{"topic": "ft", "axes": {"gripper_opening": "force.z"}}]
    given = {"outputs": outputs, "targets": targets, "wrenches": wrenches}
    found = required_endpoints(complete_config(get_recipe("fake"), json.dumps(given), "/left"))
    assert {
        (one.kind, one.name, one.type) for one in found if one.kind == "subscription" or one.name == "/left/ft"
    } == {
        ("subscription", "/left/arm/commands", "std_msgs/msg/Float64MultiArray"),
        ("subscription", "/left/base/joint_trajectory", "trajectory_msgs/msg/JointTrajectory"),
        ("publisher", "/left/ft", "geometry_msgs/msg/WrenchStamped"),
    }


@pytest.mark.parametrize(
    ("name", "namespace", "whole"),
    [("a", "", "/a"), ("a", "/left", "/left/a"), ("a/b", "left", "/left/a/b"), ("/a", "/left", "/a")],
)
def test_names_resolve_as_ros_resolves_them(name: str, namespace: str, whole: str) -> None:
    assert absolute_name(name, namespace) == whole


def test_what_was_completed_is_what_the_edge_reads(tmp_path: Path) -> None:
    recipe = get_recipe("fake")
    config = complete_config(recipe, '{"stop": true}', "/left")
    write_config(config, tmp_path / "edges" / "left" / "robot.json")
    driven = Overrides(robot="ros2", robot_config=str(tmp_path / "edges" / "left" / "robot.json")).applied(recipe)
    assert driven.robot == "ros2"
    assert isinstance(driven.robot_config, Ros2Config)
    assert driven.robot_config == config


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="noting the driver's configuration") as caught:
        write_config(complete_config(get_recipe("fake"), "", "/"), tmp_path / "file" / "robot.json")
    assert not isinstance(caught.value, NotWritableError | OSError)


def parameters(place: Path, **given: object) -> EdgeParameters:
    plain = {"name": "left", "recipe": OUTSIDE, "data": str(place / "data"), "keys": str(place / "keys")}
    return EdgeParameters(**{**plain, **given})  # type: ignore[arg-type]


@needs_ros
def test_an_edge_is_prepared_from_parameters_without_starting_anything(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["gateway", "left"])
    prepared = ros2.prepare(parameters(tmp_path), "/left")
    assert prepared.edge.name == "left"
    assert len(prepared.endpoints) == 4
    written = json.loads((tmp_path / "data" / "edges" / "left" / "robot.json").read_text())
    assert written["namespace"] == "/left"


@needs_ros
def test_a_robot_that_is_not_on_ros_needs_no_topics(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["gateway", "left"])
    assert ros2.prepare(parameters(tmp_path, recipe="fake"), "/left").endpoints == ()
    moved = ros2.prepare(parameters(tmp_path, recipe="fake", robot="ros2", robot_config='{"simulated": true}'), "/left")
    assert "/left/camera/front/image_raw" in {endpoint.name for endpoint in moved.endpoints}


@needs_ros
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recipe": "fakee"}, "Did you mean 'fake'"),
        ({"robot": "ross2"}, "no robot 'ross2'"),
        ({"name": "right"}, "no usable secret key for 'right'"),
        ({"strategy": "magic"}, "magic"),
        ({"robot_config": "/nowhere.json"}, "/nowhere.json"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, given: dict[str, str], said: str) -> None:
    make_keys(tmp_path / "keys", ["gateway", "left"])
    with pytest.raises(ConfigError) as refused:
        ros2.prepare(parameters(tmp_path, **given), "/left")
    assert said in str(refused.value)


@needs_ros
def test_without_data_the_spool_is_in_the_ros_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROS_HOME", str(tmp_path / "home"))
    make_keys(tmp_path / "keys", ["gateway", "left"])
    ros2.prepare(parameters(tmp_path, data=""), "/left")
    name = OUTSIDE.replace(":", ".")
    assert (tmp_path / "home" / "vla_fleet" / name / "edges" / "left" / "robot.json").exists()


def test_help_needs_no_ros(capsys: pytest.CaptureFixture[str]) -> None:
    ros2.edge_node_main(["edge_node", "--help"])
    assert "wait_for_robot_s" in capsys.readouterr().out


@needs_ros
def test_an_operator_that_there_is_not_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["gateway", "left"])
    with pytest.raises(ConfigError, match="robot 'ros2' has no scripted operator"):
        ros2.prepare(parameters(tmp_path, operator=True), "/left")
    assert ros2.prepare(parameters(tmp_path, recipe="fake", operator=True), "/left").edge.name == "left"


def test_a_simulated_robot_may_be_a_recipes() -> None:
    given = ["--recipe", "fake", "--describe", "--ros-args", "-r", "__ns:=/left"]
    found = ros2.sim_robot_arguments(given)
    assert found[:2] == ["--robot", "fake"]
    assert read_config("fake", json.loads(found[3])) == get_recipe("fake").robot_config
    assert found[4:] == given[2:]
    for same in ([], ["--robot", "fake"], ["--ros-args", "--recipe", "fake"], ["--recipe"]):
        assert ros2.sim_robot_arguments(same) == same
    with pytest.raises(ConfigError, match="no recipe 'fakee'"):
        ros2.sim_robot_arguments(["--recipe", "fakee"])


@pytest.mark.parametrize("recipe", ["pixels", "state", "fake"])
def test_every_recipes_robot_can_be_told_in_json(recipe: str) -> None:
    found = ros2.sim_robot_arguments(["--recipe", recipe])
    config = read_config(found[1], json.loads(found[3]))
    assert config == get_recipe(recipe).robot_config
