"""The commands for robots, jobs and leases, against a real gateway over ZeroMQ with CURVE, and fake robots."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.gateway.server import Gateway
from cloud_learner.gateway.storage.ingest import Ingest
from cloud_learner.gateway.storage.weight_store import WeightStore
from cloud_learner.operator.view import FleetView
from fleet.cli.__main__ import app
from fleet.cli.client import FleetClient
from fleet.config.data_directory import DataDirectory
from hal.resource.admitted_robots import AdmittedRobots
from tests import samples
from tests.cloud_learner.fake_edge import SPEC, FakeEdge
from wire.clock import MonotonicClock
from wire.errors import ConfigError, RejectedError, WireError
from wire.transport.keys import GATEWAY, make_keys
from wire.transport.zmq_channel import ZmqClient, ZmqServer, wait_any
from wire.types import PolicyVersion

ROOT = Path(__file__).resolve().parents[3]
ROBOTS = ("robot-0", "robot-1")


class House:
    """A gateway and two robots, at work in two threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.keys = root / "keys"
        make_keys(self.keys, [GATEWAY, "console", "teleoperator", *ROBOTS])
        self.address = "tcp://127.0.0.1:*"
        self.clock = MonotonicClock()
        self.edges: list[FakeEdge] = []
        self.working = threading.Event()
        """set while robots run episodes"""
        self._ends = threading.Event()
        self._kill = threading.Event()
        self._up = threading.Event()
        self._error: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self.start_gateway()
        for name in ROBOTS:
            self.add_robot(name)

    def start_gateway(self) -> None:
        self._kill.clear()
        self._up.clear()
        self._server = self._start(self._serve)
        assert self._up.wait(60)

    def kill_gateway(self) -> None:
        """End it between two messages; nobody hears a word."""
        self._kill.set()
        self._server.join(60)

    def add_robot(self, name: str, site: str = "lab", pid: int = 7) -> FakeEdge:
        line = ZmqClient(self.address, name, self.keys)
        edge = FakeEdge(name, line, self.clock, site=site, pid=pid)
        self.edges.append(edge)
        if len(self.edges) == 1:
            self._start(self._work)
        return edge

    def close(self) -> None:
        self._ends.set()
        self._kill.set()
        for thread in self._threads:
            thread.join(60)
        for edge in self.edges:
            edge.channel.close()
        assert self._error == []

    def wait(self, what: str, until: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
            time.sleep(0.02)

    def _start(self, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._watched, args=(run,), daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _watched(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self._error.append(error)
            raise

    def _serve(self) -> None:
        channel = ZmqServer(self.address, self.keys, apart=True)
        self.address = channel.endpoint
        DataDirectory(self.root).note_gateway(channel.endpoint)
        ledger, store = BufferLocation(self.root).open_writer()
        ingest = Ingest(ledger, store, may_teach=channel.may_teach)
        ingest.open()
        if ledger.newest_version() is None:
            file = samples.weights(1, 300)
            (self.root / "weights").mkdir(parents=True, exist_ok=True)
            (self.root / "weights" / "1.safetensors").write_bytes(file)
            version = PolicyVersion(1, hashlib.sha256(file).hexdigest(), len(file), 0, 1, 1, 0)
            ledger.commit_version(version, "1.safetensors")
        weights = WeightStore.open(self.root / "weights", ledger)
        robots = AdmittedRobots.of_one(SPEC, ("reach", "push"))
        gateway = Gateway(channel, ledger, ingest, weights, FleetView(), robots, MonotonicClock())
        self._up.set()
        while not self._kill.is_set():
            wait_any([channel], 0.02)
            gateway.poll()
        channel.close()
        ledger.close()

    def _work(self) -> None:
        while not self._ends.is_set():
            for edge in list(self.edges):
                edge.poll()
                edge.between()
                if not edge.welcomed:
                    edge.hello()
                else:
                    edge.status()
                    if self.working.is_set():
                        edge.episode()
            time.sleep(0.05)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    try:
        with FleetClient(made.address, made.keys) as fleet:
            made.wait("both robots are ready", lambda: [r.health for r in fleet.robots()] == ["ready", "ready"])
        yield made
    finally:
        made.close()


def run(house: House, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--data", str(house.root)], env={"COLUMNS": "200"})


def run_until(house: House, words: str, *arguments: str) -> Result:
    """The same command until its answer has `words`: on a machine that stalls, robots report late now and then."""
    answers: list[Result] = []

    def said() -> bool:
        answers.append(run(house, *arguments))
        return words in answers[-1].output

    try:
        house.wait(words, said, 60.0)
    except AssertionError as error:
        raise AssertionError(f"{error}; last seen: {answers[-1].output}") from None
    return answers[-1]


def test_robots_and_jobs_are_listed(house: House) -> None:
    shown = run_until(house, "2 robots, 2 ready", "robots")
    assert shown.exit_code == 0, shown.output
    row = next(line for line in shown.output.splitlines() if "robot-0" in line)
    for word in ("sample", "lab", "ready", "main (rollout, priority 10)"):
        assert word in row
    found = json.loads(run(house, "robots", "--json").output)
    assert [robot["name"] for robot in found["robots"]] == list(ROBOTS)
    assert found["specs"][SPEC.hash]["control_hz"] == 80.0
    assert "1 jobs, 1 running" in run(house, "jobs").output
    assert [job["request"]["id"] for job in json.loads(run(house, "jobs", "--json").output)] == ["main"]


def test_an_evaluation_is_handed_in_done_and_listed(house: House) -> None:
    said = run(house, "submit", "--kind", "evaluation", "--episodes", "2", "--id", "check", "--task", "reach")
    assert said.exit_code == 0 and "job check is waiting" in said.output, said.output
    house.working.set()
    with FleetClient(house.address, house.keys) as fleet:
        house.wait("it is done", lambda: {j.request.id: j.phase for j in fleet.jobs()}["check"] == "done")
    row = next(line for line in run(house, "jobs").output.splitlines() if "check" in line)
    for word in ("evaluation v1", "done", "2/2", "100%", "reach"):
        assert word in row


def test_a_job_that_waits_says_why_and_is_cancelled(house: House) -> None:
    far = ("submit", "--kind", "evaluation", "--episodes", "2", "--id", "far", "--site", "moon")
    said = run_until(house, "job far is waiting: site: ", *far)
    assert "stands at 'lab', not at 'moon'" in said.output  # of the robot that came first
    assert run(house, "cancel", "far").output == "job far is cancelled after 0 episodes\n"
    with pytest.raises(RejectedError, match=r"there is no job 'fat'\. Did you mean 'far'"):
        CliRunner().invoke(app, ["cancel", "fat", "--data", str(house.root)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["submit", "--kind", "evaluation"], ConfigError, "needs --episodes"),
        (["submit", "--kind", "explore", "--task", "reach"], RejectedError, "kind: there is no 'explore'"),
        (["submit", "--kind", "rollout", "--task", "reech"], RejectedError, "Did you mean 'reach'"),
        (["lease", "robot-7"], RejectedError, "no robot 'robot-7'"),
        (["release", "robot-0"], RejectedError, r"held by 'main' \(rollout\), not by 'console'"),
        (["release", "robot-0", "--force"], RejectedError, "works on job 'main'. Cancel the job"),
        (["robots", "--name", "robot-0"], ConfigError, "was made for role edge"),
        (["robots", "--name", "console-9"], ConfigError, "no usable secret key for 'console-9'"),
    ],
)
def test_what_cannot_be_done_is_said(house: House, arguments: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        CliRunner().invoke(app, [*arguments, "--data", str(house.root)], catch_exceptions=False)


def lease_command(house: House, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fleet.cli", "lease", "robot-1", "--data", str(house.root), *options]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )


def holder(house: House, robot: str = "robot-1") -> str:
    with FleetClient(house.address, house.keys) as fleet:
        lease = next(one.lease for one in fleet.robots() if one.name == robot)
    return lease.holder.partition("@")[0] if lease else ""


@pytest.mark.slow
def test_a_lease_is_held_by_heartbeats_until_ctrl_c(house: House) -> None:
    edge = house.edges[1]
    command = lease_command(house, "--ttl", "4")
    try:
        assert command.stdout is not None
        # it knows it before it is interrupted
        assert "robot-1 is yours" in command.stdout.readline()
        house.wait("the robot rests", lambda: edge.job is not None and edge.job.tasks == ())
        time.sleep(4.5)  # longer than its time to live
        assert holder(house) == "console" and command.poll() is None
        assert holder(house, "robot-0") == "main"
        command.send_signal(signal.SIGINT)
        output, errors = command.communicate(timeout=120)
    finally:
        command.kill()
    assert command.returncode == 0, errors
    assert "robot-1 is given back" in output
    house.wait("it works again", lambda: edge.job is not None and bool(edge.job.tasks))


@pytest.mark.slow
def test_whoever_is_preempted_hears_for_whom(house: House) -> None:
    command = lease_command(house)
    try:
        house.wait("it is held", lambda: holder(house) == "console")
        with FleetClient(house.address, house.keys, "teleoperator") as fleet:
            lease = fleet.lease("robot-1", 60.0, "teleoperation")
            _, errors = command.communicate(timeout=120)
            assert command.returncode == 1
            assert "robot-1 is not yours any more: 'teleoperator' took it for teleoperation" in errors
            fleet.release(lease)
    finally:
        command.kill()
    house.wait("the job has it again", lambda: holder(house) == "main")


def test_a_lease_outlives_a_gateway_that_is_killed(house: House) -> None:
    with FleetClient(house.address, house.keys) as fleet:
        lease = fleet.lease("robot-1", 120.0)
        house.kill_gateway()
        house.start_gateway()
        assert fleet.renew(lease).number == lease.number
        house.wait("both robots are back", lambda: len(fleet.robots()) == 2)
        fleet.release(lease)
        house.wait("a job has it", lambda: holder(house) == "main")
        with pytest.raises(RejectedError, match="ended"):
            fleet.renew(lease)


def test_a_second_robot_of_one_name_is_refused_over_the_wire(house: House) -> None:
    first = house.edges[0]
    house.wait("it has its job", lambda: first.job)
    job = first.job
    second = house.add_robot("robot-0", site="kitchen", pid=8)
    house.wait("it is refused", lambda: second.refused)
    assert second.refused.startswith("name: there is a robot 'robot-0' already, at 127.0.0.1 (lab), process 7")
    assert "this one is at 127.0.0.1 (kitchen), process 8" in second.refused
    time.sleep(0.5)
    assert first.welcomed and first.job is job and second.job is None
    with FleetClient(house.address, house.keys) as fleet:
        assert next(r for r in fleet.robots() if r.name == "robot-0").capabilities.site == "lab"
    house.edges.remove(first)  # it ends: the other one may come
    first.channel.close()
    house.wait("it is let in", lambda: second.welcomed and second.job is not None)


def test_nobody_there_is_said_with_the_way_out(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", [GATEWAY, "console"])
    assert DataDirectory(tmp_path).gateway == "tcp://127.0.0.1:5760"
    with pytest.raises(WireError, match=r"no gateway answers at tcp://127\.0\.0\.1:9"):
        FleetClient("tcp://127.0.0.1:9", tmp_path / "keys", answer_s=0.3).connect()
    with pytest.raises(ConfigError, match="is no address"):
        FleetClient("here", tmp_path / "keys").connect()
