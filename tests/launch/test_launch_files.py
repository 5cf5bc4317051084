"""What the launch files would start, against stand-ins of `launch` and `launch_ros`, which no package index has."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
import typer

from fleet.cli.__main__ import app
from fleet.config.recipes import get_recipe
from fleet.ros2.main import complete_config, sim_robot_arguments
from hal.drivers.fake import FakeRobot
from hal.drivers.ros2.sim_node import describe as describe_robot
from hal.registry import read_config
from robot_edge.ros2.parameters import DEFAULTS, read_parameters
from tests.launch.description import FILES, ROOT, Described, Started, describe

ALL = sorted(path.name for path in FILES.glob("*.launch.py"))
EXECUTABLES = {"edge_node", "sim_robot_node", "vla-fleet"}


def check_command(process: Started) -> None:
    """Its command line is one that `vla-fleet` takes."""
    program, command, *options = process.what
    assert program == "lib:vla_fleet/vla-fleet"
    commands = typer.main.get_command(app).commands
    assert command in commands
    commands[command].make_context(command, list(options))


def test_there_are_three() -> None:
    assert ALL == ["edge.launch.py", "learner.launch.py", "sim_fleet.launch.py"]


@pytest.mark.parametrize("file", ALL)
def test_a_file_is_plain_python_that_knows_only_launch(file: str) -> None:
    tree = ast.parse((FILES / file).read_text())
    modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module.split(".")[0] for module in modules} - {"json"} == {"launch", "launch_ros"}
    first = next(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    assert first == "generate_launch_description"


@pytest.mark.parametrize("file", ALL)
def test_every_argument_has_a_default_and_a_description(file: str) -> None:
    declared = describe(file).declared
    assert len(declared) > 5
    for name, (default, text) in declared.items():
        assert isinstance(default, str) and text, name


@pytest.mark.parametrize("file", ALL)
@pytest.mark.parametrize("arguments", [{}, {"learner": "true", "demonstrate": "true"}, {"demonstrate": "true"}])
def test_every_executable_is_one_that_the_package_installs(file: str, arguments: dict[str, str]) -> None:
    known = describe(file).declared
    described = describe(file, **{name: value for name, value in arguments.items() if name in known})
    scripts = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[1].split("[")[0]
    assert {line.split(" = ")[0] for line in scripts.splitlines() if " = " in line} == EXECUTABLES
    assert described.started
    for one in described.started:
        if one.kind == "ExecuteProcess":
            check_command(one)
        else:
            assert one.what[0] == "vla_fleet"
            assert one.what[1] in EXECUTABLES


def the_edge(described: Described) -> Started:
    (edge,) = described.named("edge_node")
    return edge


def test_the_edge_is_a_managed_node_with_exactly_the_parameters_the_node_declares() -> None:
    edge = the_edge(describe("edge.launch.py"))
    assert edge.kind == "LifecycleNode"
    assert edge.what == ("vla_fleet", "edge_node")
    assert set(edge.parameters) == set(DEFAULTS)
    for name, value in edge.parameters.items():
        assert type(value) is type(DEFAULTS[name]), name
    differs = {name for name, value in edge.parameters.items() if value != DEFAULTS[name]}
    assert differs == {"autostart", "wait_for_robot_s"}, "a launched edge starts itself and is patient"
    assert edge.parameters["autostart"] is True


def test_what_the_edge_is_given_reaches_the_node_as_text_even_if_it_looks_like_a_number() -> None:
    given = {"namespace": "left", "delay": "4", "name": "7", "robot_config": '{"a": 1}', "speed_up": "2"}
    edge = the_edge(describe("edge.launch.py", **given, operator="true", respawn="false", log_level="debug"))
    assert edge.namespace == "left"
    assert edge.parameters["delay"] == "4"
    assert edge.parameters["robot_config"] == '{"a": 1}'
    assert edge.parameters["speed_up"] == 2
    assert edge.parameters["operator"] is True
    assert not edge.respawn
    assert edge.arguments == ("--ros-args", "--log-level", "debug")
    assert read_parameters(edge.parameters, "/left").name == "7"


def test_an_edge_may_take_its_time_to_end() -> None:
    from robot_edge.runtime.process_group import DRAIN_S

    edge = the_edge(describe("edge.launch.py"))
    assert edge.respawn
    assert edge.stop_s > DRAIN_S + 10.0, "launch must not kill an edge that drains"


def test_a_profile_of_ones_own_is_set_under_both_names_and_otherwise_nothing_is() -> None:
    assert describe("edge.launch.py").environment == {}
    assert describe("edge.launch.py", fastdds_profile="/etc/own.xml").environment == {
        "FASTDDS_DEFAULT_PROFILES_FILE": "/etc/own.xml",
        "FASTRTPS_DEFAULT_PROFILES_FILE": "/etc/own.xml",
    }


@pytest.mark.parametrize("robots", [0, 1, 3, 12])
def test_a_fleet_is_n_robots_each_in_its_own_namespace(robots: int) -> None:
    described = describe("sim_fleet.launch.py", robots=str(robots), prefix="arm_", recipe="fake", data="here")
    names = [f"arm_{number}" for number in range(robots)]
    simulated = described.named("sim_robot")
    assert [one.namespace for one in simulated] == names
    for one in simulated:
        assert one.what == ("vla_fleet", "sim_robot_node")
        assert sim_robot_arguments(list(one.arguments))[:2] == ["--robot", "fake"]
    edges = described.named("edge_node")
    assert [one.namespace for one in edges] == names
    assert [one.parameters["name"] for one in edges] == names
    assert len(described.started) == 2 * robots
    for edge in edges:
        assert edge.parameters["robot"] == "ros2"
        assert edge.parameters["recipe"] == "fake"
        assert edge.parameters["data"] == "here"
        assert read_parameters(edge.parameters, f"/{edge.namespace}")
        config = complete_config(get_recipe("fake"), edge.parameters["robot_config"], f"/{edge.namespace}")
        says = read_config("ros2", {**describe_robot(FakeRobot()), "namespace": f"/{edge.namespace}"})
        assert replace(config, tasks=says.tasks) == says, "the driver is told what the simulated robot says of itself"
        assert set(config.tasks) == set(says.tasks)


def test_a_number_of_robots_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="robots:=many: give a whole number"):
        describe("sim_fleet.launch.py", robots="many")


def test_a_fleet_brings_its_learner_when_asked() -> None:
    described = describe(
        "sim_fleet.launch.py", robots="2", learner="true", demonstrate="true", gateway="tcp://127.0.0.1:7001"
    )
    (keys,) = described.named("keys")
    assert {"robot_0", "robot_1", "trainer", "evaluator", "demonstrator"} <= set(keys.what)
    (gateway,) = described.named("gateway")
    assert gateway.what[gateway.what.index("--port") + 1] == "7001"
    assert described.named("demonstrate")
    assert len(described.named("edge_node")) == 2


def test_the_learner_starts_when_the_keys_are_there_and_stays() -> None:
    described = describe("learner.launch.py", names="left right", data="/srv/fleet", recipe="state", seed="3")
    assert [one.name for one in described.started] == ["gateway", "trainer", "evaluator", "keys"]
    *processes, keys = described.started
    assert keys.what[2:] == ("trainer", "evaluator", "demonstrator", "left", "right", "--keys", "/srv/fleet/keys")
    assert not keys.respawn
    assert not keys.after
    for process in processes:
        assert process.after == "keys"
        assert process.respawn
        assert process.what[process.what.index("--data") + 1] == "/srv/fleet"
        assert process.what[process.what.index("--recipe") + 1] == "state"
        assert process.stop_s >= 30.0
    assert "--seed" in described.named("trainer")[0].what


def test_another_policy_reaches_robots_and_learner_and_nobody_else() -> None:
    given = {"policy": "lerobot:/srv/act", "policy_config": '{"fresh": true}'}
    described = describe("sim_fleet.launch.py", robots="1", learner="true", demonstrate="true", **given)
    edge = the_edge(described)
    assert {name: edge.parameters[name] for name in given} == given
    for name in ("trainer", "evaluator"):
        (part,) = described.named(name)
        assert part.what[part.what.index("--policy") + 1] == "lerobot:/srv/act"
        assert part.what[part.what.index("--policy-config") + 1] == '{"fresh": true}'
    for name in ("gateway", "demonstrate"):
        assert "--policy" not in described.named(name)[0].what


def test_parts_of_the_learner_may_be_elsewhere() -> None:
    described = describe("learner.launch.py", trainer="false", evaluator="false", host="0.0.0.0", demonstrate="true")
    assert [one.name for one in described.started] == ["gateway", "demonstrate", "keys"]
    (demonstrate,) = described.named("demonstrate")
    assert demonstrate.what[demonstrate.what.index("--gateway") + 1] == "tcp://127.0.0.1:5760"
    assert not demonstrate.respawn, "demonstrations are recorded once"


def test_the_stores_are_named_only_when_given() -> None:
    (plain,) = describe("learner.launch.py").named("gateway")
    assert "--ledger" not in plain.what
    (given,) = describe("learner.launch.py", ledger="postgresql://db/fleet", store="s3://b/p").named("gateway")
    assert given.what[-4:] == ("--ledger", "postgresql://db/fleet", "--store", "s3://b/p")
