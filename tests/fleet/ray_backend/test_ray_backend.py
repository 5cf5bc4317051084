"""Who is placed where on a Ray cluster, and how its backend follows actors: with no cluster."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet.config.data_directory import DataDirectory
from fleet.launch.backend import LocalBackend, ProcessSpec, ProcessState
from fleet.ray_backend import backend as backend_module
from fleet.ray_backend.backend import RayBackend
from fleet.ray_backend.cluster import ActorLost, robots
from fleet.ray_backend.host import TOKEN, probe_node
from fleet.ray_backend.node import NodeSettings, check_keys, robot_names, start_arguments
from fleet.ray_backend.resources import (
    Node,
    ResourceRequest,
    choose_node,
    discover,
    living,
    robot_resource,
)
from robot_edge.uplink.spool import Spool
from wire.errors import ConfigError
from wire.messages.fleet import Capabilities, RobotState
from wire.transport.keys import make_keys

HOME = Node("h", "home", {"CPU": 2.0}, home=True, shares_data=True)
ARM = Node("a", "arm", {"robot:robot-0": 1.0, "CPU": 0.0})
BOX = Node("b", "box", {"CPU": 4.0})
GPUS = Node("g", "gpus", {"CPU": 8.0, "GPU": 2.0})

TRAINER = ProcessSpec("trainer", "trainer", ("trainer",))
EVALUATOR = ProcessSpec("evaluator", "evaluator", ("evaluator",))
THINKER = ProcessSpec("thinker", "thinker", ("think-server",))
EDGE = ProcessSpec("robot-0", "edge", ("edge",), give_up_after=0)


def _nodes(*nodes: Node) -> dict[str, Node]:
    return {node.id: node for node in nodes}


class TestResources:
    def test_robots_are_custom_resources_of_their_nodes(self) -> None:
        assert robot_resource("arm-1") == "robot:arm-1"
        node = Node("1", "one", {"CPU": 4, "robot:b": 1, "robot:a": 1.0, "robot:c": 0, "node:10.0.0.1": 1})
        assert discover([node]) == ({"a": "one", "b": "one"}, [])
        with pytest.raises(ConfigError, match="'a b' cannot be a name"):
            robot_resource("a b")

    def test_only_living_nodes_count(self) -> None:
        told = [
            {"NodeID": "1", "Alive": True, "NodeManagerHostname": "one", "Resources": {"CPU": 2.0}},
            {"NodeID": "2", "Alive": False, "NodeManagerHostname": "two", "Resources": {}},
        ]
        assert living(told) == {"1": Node("1", "one", {"CPU": 2.0})}

    def test_discovery_names_what_is_wrong(self) -> None:
        robots, complaints = discover(
            [
                Node("1", "one", {"robot:a": 1.0, "robot:b": 2.0}),
                Node("2", "two", {"robot:a": 1.0, "robot:bad name": 1.0}),
            ]
        )
        assert robots == {"a": "one", "b": "one"}
        twice, amount, name = sorted(complaints, key=lambda text: "two robots" not in text)
        assert "robot:a is offered by one and by two" in twice
        assert "node one offers 2 of robot:b" in amount
        assert "node two offers robot:bad name" in name


class TestPlacing:
    def test_an_edge_goes_where_its_robot_is_and_two_cannot_hold_one(self) -> None:
        assert choose_node(EDGE, _nodes(HOME, ARM), {}) == ResourceRequest(resources={"robot:robot-0": 1.0})

    def test_a_trainer_takes_a_gpu_that_sees_the_data(self) -> None:
        nodes = _nodes(HOME, replace(GPUS, shares_data=True), BOX)
        assert choose_node(TRAINER, nodes, {}) == ResourceRequest(cpus=1.0, gpus=1.0, node="g")

    def test_without_a_gpu_it_stays_at_home(self) -> None:
        assert choose_node(TRAINER, _nodes(BOX, HOME, GPUS), {}) == ResourceRequest(cpus=1.0, node="h")
        assert choose_node(TRAINER, _nodes(replace(BOX, shares_data=True), HOME), {}) == ResourceRequest(
            cpus=1.0, node="h"
        )

    def test_gpus_that_are_taken_are_not_given_again(self) -> None:
        nodes = _nodes(HOME, replace(GPUS, shares_data=True, resources={"CPU": 8.0, "GPU": 1.0}))
        taken = {"trainer": ResourceRequest(cpus=1.0, gpus=1.0, node="g")}
        assert choose_node(THINKER, nodes, taken) == ResourceRequest(cpus=1.0, node="h")

    def test_evaluators_spread_over_the_nodes_that_have_their_key(self) -> None:
        nodes = _nodes(HOME, replace(BOX, keys=frozenset({"evaluator", "evaluator-after"})), GPUS)
        first = choose_node(EVALUATOR, nodes, {})
        assert first == ResourceRequest(cpus=1.0, node="b")
        second = replace(EVALUATOR, name="evaluator-after")
        assert choose_node(second, nodes, {"evaluator": ResourceRequest(cpus=1.0, node="b")}) == ResourceRequest(
            cpus=1.0, node="h"
        )
        assert choose_node(replace(EVALUATOR, name="other"), nodes, {}) == ResourceRequest(cpus=1.0, node="h")

    def test_where_nobody_has_room_a_part_waits_and_says_for_what(self) -> None:
        full = {"a": ResourceRequest(cpus=1.0, node="h"), "b": ResourceRequest(cpus=1.0, node="h")}
        found = choose_node(TRAINER, _nodes(HOME, BOX), full)
        assert isinstance(found, str)
        assert "trainer waits for a node that sees the gateway's data directory and has 1 CPU free" in found


class TestNode:
    def test_a_computer_with_robots_offers_them_and_no_cpu(self) -> None:
        words = start_arguments(("a", "b"), "10.0.0.1:6379", False, ["--temp-dir", "/tmp/x"])
        assert words[:2] == ["--address", "10.0.0.1:6379"]
        assert json.loads(words[words.index("--resources") + 1]) == {"robot:a": 1, "robot:b": 1}
        assert words[words.index("--num-cpus") + 1] == "0"
        assert words[-2:] == ["--temp-dir", "/tmp/x"]

    def test_what_is_given_wins(self) -> None:
        words = start_arguments(("a",), "", True, ["--num-cpus=4", "--object-store-memory", "1"])
        assert [word for word in words if word.startswith("--num-cpus")] == ["--num-cpus=4"]
        assert words.count("--object-store-memory") == 1
        assert "--head" in words
        assert "--num-cpus" not in start_arguments((), "", True, [])

    @pytest.mark.parametrize(("address", "head"), [("", False), ("a:1", True)])
    def test_it_joins_or_begins(self, address: str, head: bool) -> None:
        with pytest.raises(ConfigError, match="give --address HOST:PORT to join a cluster, or --head"):
            start_arguments((), address, head, [])

    def test_two_robots_with_one_name_are_refused(self) -> None:
        assert robot_names("a, b") == ("a", "b")
        assert robot_names("") == ()
        with pytest.raises(ConfigError, match="--robots a,b,a: 'a' is there twice"):
            robot_names("a,b,a")
        for text, words in ((",", "no name in it"), ("evaluator", "another part of a fleet")):
            with pytest.raises(ConfigError, match=words):
                robot_names(text)

    def test_resources_are_said_in_one_way(self) -> None:
        with pytest.raises(ConfigError, match="--robots and --resources exclude each other"):
            start_arguments(("a",), "h:1", False, ["--resources={}"])

    def test_settings_pass_through_the_environment(self) -> None:
        said = NodeSettings("/data", "/keys", "lab", "ros2", "arms/{name}.json")
        assert NodeSettings.of(said.environment()) == said
        assert NodeSettings().environment() == {}
        words = ["--site", "lab", "--robot", "ros2", "--robot-config", "arms/a.json"]
        assert said.edge_arguments("a") == words
        assert (said.data_root("/x"), said.key_directory("/x")) == (Path("/data"), Path("/keys"))
        assert NodeSettings().key_directory("/x") == Path("/x/keys")
        assert NodeSettings(data="/d").key_directory("/x") == Path("/d/keys")

    def test_a_robot_without_its_key_is_named_before_ray_starts(self, tmp_path: Path) -> None:
        make_keys(tmp_path, ["gateway", "a"])
        check_keys(NodeSettings(keys=str(tmp_path)), ("a",))
        with pytest.raises(ConfigError, match="no usable secret key for 'b'"):
            check_keys(NodeSettings(keys=str(tmp_path)), ("a", "b"))

    def test_a_node_says_whose_keys_it_has_and_whether_it_sees_the_data(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = tmp_path / "data"
        make_keys(data / "keys", ["evaluator"])
        (data / TOKEN).write_text("this run\n")
        assert probe_node(str(data), "this run") == (True, ["evaluator"])
        assert probe_node(str(data), "another run") == (False, ["evaluator"])
        assert probe_node(str(tmp_path / "absent"), "this run") == (False, [])
        monkeypatch.setenv("VLA_FLEET_KEYS", str(tmp_path))
        assert probe_node(str(data), "this run") == (True, [])


def test_what_a_robot_recorded_is_asked_where_its_spool_is(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path)
    assert data.steps_recorded("robot-0") is None
    data.edge("robot-0").mkdir(parents=True)
    Spool(data.edge("robot-0") / "spool.sqlite").close()
    assert data.steps_recorded("robot-0") == 0


def test_both_views_of_robots_side_by_side() -> None:
    known = [RobotState(name, Capabilities("arm", "", 1, 1, (), 10.0), "ready") for name in ("a", "b")]
    cluster = FakeCluster(_nodes(Node("x", "box", {"robot:b": 1.0, "robot:c": 1.0})))
    found = robots(cluster, type("Fleet", (), {"robots": lambda self: known})())  # type: ignore[arg-type]
    assert found == {"a": ("", known[0]), "b": ("box", known[1]), "c": ("box", None)}


# --- following actors, with a cluster that does as it is told ---------------------------------------------------------


@dataclass
class FakeCluster:
    """Answers questions with what `says` holds for the actor, or leaves them open."""

    known: dict[str, Node]
    home: str = "h"
    says: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[str, ResourceRequest]] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    looks: dict[str, tuple[bool, list[str]]] = field(default_factory=dict)

    def nodes(self) -> dict[str, Node]:
        return self.known

    def probe(self, node: Node, data: str, token: str) -> str:
        return f"look {node.id}"

    def start(self, part: ProcessSpec, request: ResourceRequest, data: str, environment: dict[str, str]) -> str:
        self.requests.append((part.name, request))
        return part.name

    def ask(self, actor: str) -> str:
        return f"ask {actor}"

    def stop(self, actor: str, grace_s: float) -> str:
        return f"stop {actor}"

    def kill(self, actor: str) -> None:
        self.killed.append(actor)

    def ready(self, questions: list[str], timeout_s: float = 0.0) -> set[str]:
        return {question for question in questions if self.answer(question) is not None}

    def answer(self, question: str) -> Any:
        verb, _, name = question.partition(" ")
        if verb == "look":
            return self.looks.get(name)
        said = self.says.get(name)
        return dict(said) if isinstance(said, dict) else said


def _says(host_pid: int = 1, **state: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(ProcessState(**{"running": True, "starts": 1, **state})), "host_pid": host_pid}


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(backend_module, "time", made)
    return made


def _backend(cluster: FakeCluster, tmp_path: Path) -> RayBackend:
    return RayBackend(cluster, tmp_path, LocalBackend(tmp_path, tmp_path / "logs"))  # type: ignore[arg-type]


def _turn(backend: RayBackend, clock: Clock, seconds: float = 1.1, times: int = 2) -> list[str]:
    said = []
    for _ in range(times):
        clock.now_s += seconds
        said += backend.poll()
    return said


def test_a_robot_is_followed_while_its_node_goes_and_returns(tmp_path: Path, clock: Clock) -> None:
    cluster = FakeCluster(_nodes(HOME, ARM))
    backend = _backend(cluster, tmp_path)
    assert backend.robots() == {"robot-0": "arm"}
    backend.start(EDGE)
    cluster.says["robot-0"] = _says()
    _turn(backend, clock)
    assert backend.parts["robot-0"].running

    cluster.known = _nodes(HOME)
    cluster.says["robot-0"] = ActorLost("its node does not answer", comes_back=True)
    said = _turn(backend, clock)
    assert said == ["robot-0: its node does not answer"]
    assert not backend.parts["robot-0"].running
    assert backend.robots() == {}
    assert cluster.killed == [], "Ray brings the edge back where its robot is"

    cluster.known = _nodes(HOME, ARM)
    cluster.says["robot-0"] = _says(host_pid=2)
    assert _turn(backend, clock) == []
    state = backend.parts["robot-0"]
    assert (state.running, state.starts, state.fault) == (True, 2, "")
    assert len(cluster.requests) == 1


def test_a_trainer_whose_node_is_gone_is_placed_on_another(tmp_path: Path, clock: Clock) -> None:
    gpus = replace(GPUS, shares_data=False)
    cluster = FakeCluster(_nodes(HOME, gpus), looks={"g": (True, [])})
    backend = _backend(cluster, tmp_path)
    backend.start(TRAINER)
    cluster.says["trainer"] = _says()
    _turn(backend, clock)
    assert cluster.requests == [("trainer", ResourceRequest(cpus=1.0, gpus=1.0, node="g"))]

    cluster.known = _nodes(HOME)
    cluster.says["trainer"] = ActorLost("its node does not answer", comes_back=True)
    _turn(backend, clock)
    cluster.says["trainer"] = _says(host_pid=3)
    _turn(backend, clock, times=5)
    assert cluster.requests[1:] == [("trainer", ResourceRequest(cpus=1.0, node="h"))]
    assert cluster.killed == ["trainer"]
    assert backend.parts["trainer"].starts == 2


def test_nobody_is_placed_before_a_new_node_has_said_what_it_has(tmp_path: Path, clock: Clock) -> None:
    cluster = FakeCluster(_nodes(HOME, GPUS))
    backend = _backend(cluster, tmp_path)
    backend.start(TRAINER)
    said = _turn(backend, clock)
    assert said == ["trainer waits until the nodes have said what they have."]
    assert cluster.requests == []
    _turn(backend, clock, seconds=31.0)
    assert cluster.requests == [("trainer", ResourceRequest(cpus=1.0, node="h"))], "one that says nothing has nothing"


def test_an_actor_that_is_not_started_for_a_minute_is_placed_anew(tmp_path: Path, clock: Clock) -> None:
    cluster = FakeCluster(_nodes(HOME))
    backend = _backend(cluster, tmp_path)
    backend.start(TRAINER)
    _turn(backend, clock)
    assert _turn(backend, clock, seconds=31.0, times=1) == ["Ray has not started trainer on home yet"]
    _turn(backend, clock, seconds=31.0)
    assert cluster.killed == ["trainer"]
    assert [name for name, _ in cluster.requests] == ["trainer", "trainer"]


def test_a_silent_robot_is_waited_for_and_nothing_else(tmp_path: Path, clock: Clock) -> None:
    cluster = FakeCluster(_nodes(HOME, ARM), says={"robot-0": _says()})
    backend = _backend(cluster, tmp_path)
    backend.start(EDGE)
    _turn(backend, clock)
    cluster.says["robot-0"] = None
    assert "robot-0 does not answer" in _turn(backend, clock, seconds=6.0, times=3)
    _turn(backend, clock, seconds=60.0, times=3)
    assert (cluster.killed, len(cluster.requests)) == ([], 1)


def test_a_part_that_ran_once_gives_its_place_back(tmp_path: Path, clock: Clock) -> None:
    cluster = FakeCluster(_nodes(replace(HOME, resources={"CPU": 1.0})))
    backend = _backend(cluster, tmp_path)
    for name in ("evaluator-before", "evaluator-after"):
        backend.start(ProcessSpec(name, "evaluator", ("evaluator",), restart=False))
    cluster.says["evaluator-before"] = _says()
    said = _turn(backend, clock)
    assert [name for name, _ in cluster.requests] == ["evaluator-before"]
    assert "evaluator-after waits for a node" in said[0]
    cluster.says["evaluator-before"] = _says(running=False)
    _turn(backend, clock)
    assert cluster.killed == ["evaluator-before"]
    assert [name for name, _ in cluster.requests] == ["evaluator-before", "evaluator-after"]
    state = backend.parts["evaluator-before"]
    assert (state.running, state.starts, state.failed) == (False, 1, "")


def test_parts_are_asked_to_end_before_their_actors_do(tmp_path: Path, clock: Clock) -> None:
    cluster = FakeCluster(_nodes(HOME, ARM), says={"robot-0": _says(), "trainer": _says()})
    backend = _backend(cluster, tmp_path)
    for part in (EDGE, TRAINER):
        backend.start(part)
    _turn(backend, clock)
    cluster.says["robot-0"] = _says(running=False, steps_recorded=120)
    backend.stop(["robot-0", "nobody"], 5.0)
    assert cluster.killed == ["robot-0"]
    assert backend.parts["robot-0"].steps_recorded == 120
    assert backend.parts["trainer"].running
    assert _turn(backend, clock) == [], "a part that was stopped is not missed"
    assert [name for name, _ in cluster.requests] == ["robot-0", "trainer"]


def test_two_robots_with_one_name_are_said_once(tmp_path: Path, clock: Clock) -> None:
    cluster = FakeCluster(_nodes(HOME, ARM, replace(ARM, id="c", host="copy")))
    said = _turn(_backend(cluster, tmp_path), clock, times=3)
    assert len(said) == 1
    assert "robot:robot-0 is offered by arm and by copy" in said[0]
