"""The scheduler in the gateway: robots come and go, jobs are handed out and counted once, people hold robots."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cloud_learner.buffer.place import BufferPlace
from cloud_learner.gateway import Gateway
from cloud_learner.ingest import Ingest
from cloud_learner.operator.desk import Desk
from cloud_learner.operator.view import FleetView
from cloud_learner.weight_store import WeightStore
from fleet.console import FleetClient
from hal.scheduler.scheduler import job_of
from tests.cloud_learner.fake_edge import SPEC, FakeEdge
from wire.clock import ManualClock
from wire.errors import DiskFull, Refused
from wire.fleet_messages import JobRequest, JobState, Requirement, RobotState
from wire.memory_channel import MemoryClient, MemoryServer
from wire.messages import (
    AcquireLease,
    Announce,
    Answer,
    CancelJob,
    Hello,
    Job,
    ListFleet,
    Message,
    Operator,
    Preempted,
    Publish,
    ReleaseLease,
    RenewLease,
    SubmitJob,
    WeightBytes,
)
from wire.types import PolicyVersion

TASKS = ("reach", "push")


class Hall:
    """A gateway on a data directory with a clock that the test moves."""

    def __init__(self, root: Path, clock: ManualClock | None = None, server: MemoryServer | None = None) -> None:
        self.root = root
        self.clock = clock or ManualClock(10**9)
        self.server = server or MemoryServer()
        self.ledger, store = BufferPlace(root).open_writer()
        ingest = Ingest(root, self.ledger, store, self.clock)
        ingest.open()
        self.view = FleetView(self.clock)
        self.desk = Desk(self.view, clock=self.clock)
        weights = WeightStore.open(root / "weights", self.ledger)
        self.gateway = Gateway(
            self.server, self.ledger, ingest, weights, self.view, TASKS, SPEC, self.clock, lambda: self.clock.now_ns()
        )
        self.edges: list[FakeEdge] = []
        self.calls = 0

    def killed(self) -> Hall:
        """Another gateway on the same data, as after a kill -9."""
        self.ledger.close()
        again = Hall(self.root, self.clock, self.server)
        again.edges = self.edges
        return again

    def edge(self, name: str, **options: object) -> FakeEdge:
        edge = FakeEdge(name.partition("@")[0], self.server.connect(name), self.clock, **options)  # type: ignore[arg-type]
        edge.hello()
        self.edges.append(edge)
        self.gateway.turn()
        edge.turn()
        edge.between()
        return edge

    def pass_time(self, seconds: float, work: bool = False) -> None:
        """Robots report five times a second; with `work` each runs an episode every second."""
        for tick in range(round(5 * seconds)):
            self.clock.advance(200_000_000)
            for edge in self.edges:
                edge.turn()
                edge.between()
                if edge.welcomed:
                    edge.status()
                if work and tick % 5 == 0:
                    edge.episode()
            self.gateway.turn()
        for edge in self.edges:
            edge.turn()

    def peer(self, name: str = "console") -> MemoryClient:
        peer = self.server.connect(name)
        key = name.partition("@")[0]
        peer.send(Hello(key, key.partition("-")[0].rstrip("0123456789"), "c", 1, 99))
        self.gateway.turn()
        assert self.hear(peer)
        return peer

    def hear(self, peer: MemoryClient) -> list[Message]:
        found = []
        while (message := peer.recv()) is not None:
            found.append(message)
        return found

    def ask(self, peer: MemoryClient, message: Message) -> Answer:
        peer.send(message)
        self.gateway.turn()
        return next(m for m in self.hear(peer) if isinstance(m, Answer))

    def robots(self, peer: MemoryClient) -> dict[str, RobotState]:
        return {robot.name: robot for robot in self.ask(peer, ListFleet(1)).robots}

    def jobs(self, peer: MemoryClient) -> dict[str, JobState]:
        return {job.request.id: job for job in self.ask(peer, ListFleet(1)).jobs}

    def publish(self, number: int) -> None:
        trainer = self.server.connect("trainer")
        trainer.send(Hello("trainer", "trainer", "c", 1))
        data = b"weights %d" % number
        version = PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), number - 1, 10, 20, 3)
        trainer.send(Publish(version))
        trainer.send(WeightBytes(number, 0, data))
        self.gateway.turn()

    def lease(self, robot: str) -> tuple[str, str] | None:
        lease = self.gateway._dispatcher.leases.of(robot, self.clock.now_ns())
        return (lease.holder, lease.purpose) if lease else None


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    made = Hall(tmp_path)
    yield made
    made.ledger.close()


def canary(version: int = 0, episodes: int = 3, **more: object) -> JobRequest:
    fields: dict = {"id": "canary", "kind": "evaluation", "tasks": (), "robots": 1, "episodes": episodes}
    return JobRequest(**(fields | {"version": version} | more))


# --- robots and the standing job --------------------------------------------------------------------------------------


def test_a_robot_works_on_the_standing_job_by_a_lease_that_its_reports_renew(hall: Hall) -> None:
    edge = hall.edge("robot-0", site="lab")
    assert edge.job is not None and job_of(edge.job.id) == "main" and set(edge.job.tasks) == set(TASKS)
    hall.pass_time(60.0)
    state = hall.robots(hall.peer())["robot-0"]
    assert (state.health, state.job, state.capabilities.site) == ("ready", "main", "lab")
    assert state.lease is not None
    assert (state.lease.holder, state.lease.purpose, state.lease.number) == ("main", "rollout", edge.job.lease)
    assert hall.jobs(hall.peer())["main"].robots == ("robot-0",)


def test_a_lost_robots_lease_returns_and_so_does_the_robot(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(2.0)
    hall.edges.clear()
    hall.pass_time(6.0)
    assert hall.robots(hall.peer())["robot-0"].health == "lost"
    hall.pass_time(12.0)
    assert hall.lease("robot-0") is None
    assert hall.jobs(hall.peer())["main"].phase == "waiting"
    hall.edges.append(edge)
    hall.pass_time(30.0)
    assert hall.lease("robot-0") == ("main", "rollout")
    assert edge.job is not None and job_of(edge.job.id) == "main"


def test_an_unwell_robot_is_told_to_rest_and_gets_work_again(hall: Hall) -> None:
    edge, other = hall.edge("robot-0"), hall.edge("robot-1")
    edge.trouble = "the driver does not answer"
    hall.pass_time(30.0)
    assert edge.job is not None and edge.job.tasks == ()
    state = hall.robots(hall.peer())["robot-0"]
    assert (state.health, state.reason, state.lease) == ("draining", "the driver does not answer", None)
    card = next(c for c in hall.view.snapshot()["robots"] if c["name"] == "robot-0")
    assert (card["health"], card["health_reason"]) == ("draining", "the driver does not answer")
    edge.trouble = ""
    hall.pass_time(20.0)
    assert edge.job.tasks and other.job is not None and other.job.tasks
    assert hall.lease("robot-0") == ("main", "rollout")


def test_seeds_stay_apart_and_go_on_after_a_restart_of_the_gateway(hall: Hall) -> None:
    first, second = hall.edge("robot-0"), hall.edge("robot-1")
    hall.pass_time(5.0, work=True)
    assert len(first.done) == 5
    hall = hall.killed()
    # the second one comes back first
    for edge in (second, first):
        edge.pid += 1
        edge.welcomed = False
        edge.hello()
    hall.pass_time(5.0, work=True)
    for edge, lane in ((first, 500_000), (second, 505_000)):
        seeds = [seed for _, _, seed in edge.done]
        assert sorted(seeds) == list(range(lane, lane + 10))
    hall.ledger.close()


def test_a_robot_that_can_do_none_of_the_tasks_is_refused_with_the_nearest(hall: Hall) -> None:
    edge = hall.edge("robot-0", tasks=("reech",))
    assert "tasks: robot 'robot-0' can do reech" in edge.refused
    assert "Did you mean 'reach'?" in edge.refused


def test_a_job_that_was_not_heard_is_told_again(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    told = edge.job
    edge.job = None
    hall.clock.advance(4_000_000_000)
    edge.status(episode="another")
    hall.gateway.turn()
    edge.turn()
    assert edge.coming is not None and told is not None and edge.coming.id == told.id


# --- two robots of one name -------------------------------------------------------------------------------------------


def test_a_second_robot_of_one_name_is_refused_and_the_first_works_on(hall: Hall) -> None:
    first = hall.edge("robot-0")
    hall.pass_time(1.0, work=True)
    heard = len(first.heard)
    second = hall.edge("robot-0@2", pid=8, site="kitchen")
    assert second.refused.startswith("name: there is a robot 'robot-0' already")
    assert "process 7" in second.refused and "(kitchen), process 8" in second.refused
    assert second.job is None and not second.welcomed
    hall.edges.remove(second)
    hall.pass_time(2.0, work=True)
    assert [type(m).__name__ for m in first.heard[heard:] if isinstance(m, Job | Hello)] == []
    assert len(first.done) == 3 and hall.lease("robot-0") == ("main", "rollout")
    refusals = [e for e in hall.view.snapshot()["events"] if e["kind"] == "refused"]
    second.hello()
    hall.gateway.turn()
    assert [e for e in hall.view.snapshot()["events"] if e["kind"] == "refused"] == refusals


def test_the_second_one_is_let_in_when_the_first_is_gone(hall: Hall) -> None:
    first = hall.edge("robot-0")
    hall.pass_time(1.0)
    hall.edges.remove(first)
    second = hall.edge("robot-0@2", pid=8)
    assert second.refused
    for _ in range(4):
        hall.clock.advance(1_000_000_000)
        second.hello()
        hall.gateway.turn()
        second.turn()
    assert second.welcomed and second.coming is not None and job_of(second.coming.id) == "main"


def test_the_same_robot_comes_back_by_another_line_at_once(hall: Hall) -> None:
    first = hall.edge("robot-0")
    hall.pass_time(1.0)
    hall.edges.remove(first)
    again = hall.edge("robot-0@2", pid=7)
    assert again.welcomed and again.job is not None and first.job is not None
    assert again.job.id == first.job.id


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_a_canary_pins_its_version_examines_held_out_seeds_once_and_becomes_a_measurement(hall: Hall) -> None:
    edge, other = hall.edge("robot-0"), hall.edge("robot-1")
    for number in (1, 2, 3):
        hall.publish(number)
    hall.pass_time(1.0)
    console = hall.peer()
    request = canary(2, requirement=Requirement(robots=("robot-0",)))
    assert hall.ask(console, SubmitJob(5, request)).refused == ""
    hall.pass_time(1.0)
    assert edge.job is not None and other.job is not None
    assert (edge.job.kind, edge.job.version, edge.version) == ("evaluation", 2, 2)
    assert (other.job.kind, other.version) == ("rollout", 3)
    hall.publish(4)
    hall.pass_time(0.4)
    assert (edge.version, other.version) == (2, 4)
    hall.pass_time(20.0, work=True)
    state = hall.jobs(console)["canary"]
    assert (state.phase, state.episodes, state.successes) == ("done", 6, 6)
    examined = [(task, seed) for job, task, seed in edge.done if job_of(job) == "canary"]
    assert Counter(examined) == {(task, 1_000_000 + n): 1 for task in TASKS for n in range(3)}
    # afterwards it follows the newest version and practises again
    assert edge.version == 4 and job_of(edge.job.id) == "main" and edge.job.kind == "rollout"
    (row,) = hall.ledger.evaluations()
    assert (row.label, row.number, row.episodes, row.success) == ("canary", 2, 3, {"push": 1.0, "reach": 1.0})
    assert hall.view.snapshot()["measured"]["canary"]["mean"] == 1.0
    assert hall.view.snapshot()["curve"] == []


def test_what_a_person_did_is_no_measurement(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.publish(1)
    console = hall.peer()
    hall.ask(console, SubmitJob(1, canary(episodes=2, tasks=("reach",))))
    hall.pass_time(1.0)
    edge.episode(human=True)
    hall.pass_time(1.0)
    assert hall.jobs(console)["canary"].episodes == 0
    hall.pass_time(60.0, work=True)
    assert hall.jobs(console)["canary"].phase == "done"
    assert hall.ledger.evaluations()[0].success == {"reach": 1.0}


def test_requests_that_cannot_be_met_are_refused_with_the_field(hall: Hall) -> None:
    hall.edge("robot-0")
    console = hall.peer()
    for request, words in (
        (canary(), "version: there is none yet"),
        (canary(tasks=("reech",)), "tasks: this fleet does not know 'reech'. Did you mean 'reach'?"),
        (canary(kind="evaluate"), "kind"),
        (canary(kind="rollout", version=3), "version: only an evaluation"),
    ):
        assert words in hall.ask(console, SubmitJob(1, request)).refused
    hall.publish(1)
    assert "version: there is no policy version 7" in hall.ask(console, SubmitJob(1, canary(7))).refused
    assert "episodes" in hall.ask(console, SubmitJob(1, canary(1, episodes=0))).refused
    assert "no job 'canary'" in hall.ask(console, CancelJob(1, "canary")).refused
    assert "it ends with the gateway" in hall.ask(console, CancelJob(1, "main")).refused
    assert list(hall.jobs(console)) == ["main"]


def test_a_job_waits_with_the_reason_and_submitting_it_again_changes_nothing(hall: Hall) -> None:
    hall.edge("robot-0", site="lab")
    hall.publish(1)
    console = hall.peer()
    request = canary(1, requirement=Requirement(site="kitchen"))
    hall.ask(console, SubmitJob(1, request))
    hall.ask(console, SubmitJob(2, msgspec.structs.replace(request, episodes=99)))
    state = hall.jobs(console)["canary"]
    assert (state.phase, state.request.episodes) == ("waiting", 3)
    assert "site: 'robot-0' stands at 'lab', not at 'kitchen'" in state.note
    assert hall.ask(console, CancelJob(3, "canary")).jobs[0].phase == "cancelled"


def test_an_episode_counts_once_however_often_it_comes(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.publish(1)
    console = hall.peer()
    hall.ask(console, SubmitJob(1, canary(episodes=5, tasks=("reach",))))
    hall.pass_time(1.0)
    segment = edge.episode()
    assert segment is not None
    for _ in range(3):
        edge.channel.send(segment)
    hall.pass_time(1.0)
    assert hall.jobs(console)["canary"].episodes == 1
    hall = hall.killed()
    edge.channel.send(segment)
    hall.pass_time(1.0)
    edge.channel.send(segment)
    hall.pass_time(1.0)
    assert hall.jobs(hall.peer())["canary"].episodes == 1
    hall.ledger.close()


def test_a_full_disk_stops_neither_robots_nor_the_count(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = hall.edge("robot-0")
    hall.publish(1)
    console = hall.peer()
    hall.ask(console, SubmitJob(1, canary(episodes=2, tasks=("reach",))))
    hall.pass_time(1.0)

    def full(*arguments: object) -> None:
        raise DiskFull("no space left")

    for name in ("count_for_job", "end_job", "add_evaluation", "keep_leases"):
        monkeypatch.setattr(hall.ledger, name, full)
    hall.pass_time(10.0, work=True)
    assert hall.ledger.evaluations() == ()
    assert "no space left" in hall.ask(console, AcquireLease(2, "robot-0", "maintenance", 0, 5.0)).refused
    assert edge.done
    monkeypatch.undo()
    hall.pass_time(1.0)
    assert [row.label for row in hall.ledger.evaluations()] == ["canary"]
    assert hall.ledger.jobs()[0].phase == "done"


# --- killed in the middle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_kills_lose_no_job_count_nothing_twice_and_give_no_number_twice(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    hall = Hall(tmp_path)
    edges = [hall.edge(f"robot-{n}") for n in range(2)]
    hall.publish(1)
    hall.publish(2)
    client = hall.peer()
    for name, version in (("one", 1), ("two", 2)):
        request = canary(version, episodes=3, id=name, robots=2, first_seed=2_000_000)
        assert not hall.ask(client, SubmitJob(1, request)).refused
    numbers: list[int] = []
    for _ in range(25):
        hall.pass_time(draw.uniform(0.2, 2.0), work=True)
        event = draw.random()
        if event < 0.25:
            hall = hall.killed()
        elif event < 0.35:
            edge = draw.choice(edges)
            edge.pid += 10
            edge.job = edge.coming = None
            edge.welcomed = False
            edge.hello()
        elif event < 0.5:
            lease = hall.ask(hall.peer(), AcquireLease(1, draw.choice(edges).name, "check", 0, 1.0)).lease
            if lease is not None:
                numbers.append(lease.number)
    hall.pass_time(80.0, work=True)
    states = hall.jobs(hall.peer())
    for name, version in (("one", 1), ("two", 2)):
        assert (states[name].phase, states[name].episodes) == ("done", 6), states[name]
        counted = hall.ledger.episodes_of_job(name)
        assert Counter((row.task, row.seed) for row in counted) == {
            (task, 2_000_000 + n): 1 for task in TASKS for n in range(3)
        }
        assert [row.number for row in hall.ledger.evaluations()].count(version) == 1
    assert numbers == sorted(set(numbers))
    assert all(hall.lease(edge.name) == ("main", "rollout") for edge in edges)
    hall.ledger.close()


def test_leases_outlive_the_gateway_under_their_own_numbers(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    console = hall.peer()
    lease = hall.ask(console, AcquireLease(1, "robot-0", "maintenance", 0, 10.0)).lease
    assert lease is not None
    hall.pass_time(1.0)
    assert edge.job is not None and edge.job.tasks == ()
    hall = hall.killed()
    hall.pass_time(3.0)
    assert edge.job.tasks == () and hall.lease("robot-0") == ("console", "maintenance")
    console = hall.peer()
    renewed = hall.ask(console, RenewLease(2, "robot-0", lease.number)).lease
    assert renewed is not None and renewed.number == lease.number
    hall.pass_time(12.0)  # no heartbeat any more
    assert [m.lease.number for m in hall.hear(console) if isinstance(m, Preempted)] == [lease.number]
    assert hall.lease("robot-0") == ("main", "rollout") and edge.job.tasks
    assert edge.job.lease > lease.number
    hall.ledger.close()


# --- consoles ---------------------------------------------------------------------------------------------------------


def test_a_lease_holds_a_robot_at_rest_until_it_is_released(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    console, other = hall.peer(), hall.peer("console@2")
    lease = hall.ask(console, AcquireLease(1, "robot-0", "maintenance", 0, 30.0)).lease
    assert lease is not None and (lease.priority, lease.holder) == (50, "console")
    hall.pass_time(20.0)
    assert edge.job is not None and edge.job.tasks == ()
    refused = hall.ask(other, AcquireLease(1, "robot-0", "maintenance", 0, 30.0)).refused
    assert "is held by 'console' for maintenance (priority 50)" in refused
    assert "has ended" in hall.ask(console, ReleaseLease(2, "robot-0", lease.number + 5)).refused
    assert hall.ask(other, ReleaseLease(2, "robot-0", lease.number)).refused == ""  # the same key
    hall.pass_time(1.0)
    assert edge.job.tasks and hall.lease("robot-0") == ("main", "rollout")
    assert "lease" in hall.ask(console, RenewLease(3, "robot-0", lease.number)).refused


def test_bad_leases_are_refused_with_the_field(hall: Hall) -> None:
    hall.edge("robot-0")
    console = hall.peer()
    for call, words in (
        (AcquireLease(1, "robot-1", "check", 0, 5.0), "no robot 'robot-1'. Did you mean 'robot-0'?"),
        (AcquireLease(1, "robot-0", "check", 0, 0.0), "ttl_s: 0 s is not possible"),
        (AcquireLease(1, "robot-0", "check", 0, float("nan")), "ttl_s: nan s is not possible"),
        (AcquireLease(1, "robot-0", "check", 90, 5.0), "priority: 90 is not possible"),
        (AcquireLease(1, "robot-0", "estop", 0, 5.0), "purpose: 'estop'"),
        (AcquireLease(1, "robot-0", "", 0, 5.0), "purpose: say"),
        (ReleaseLease(1, "robot-0", 0), "works on job 'main'. Cancel the job"),
        (ReleaseLease(1, "robot-7", 0), "not held by anybody"),
    ):
        assert words in hall.ask(console, call).refused
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_stronger_lease_takes_the_robot_and_the_weaker_holder_hears_of_it(hall: Hall) -> None:
    hall.edge("robot-0")
    weak, strong = hall.peer(), hall.peer("console@2")
    lease = hall.ask(weak, AcquireLease(1, "robot-0", "check", 0, 30.0)).lease
    assert lease is not None
    assert hall.ask(strong, AcquireLease(1, "robot-0", "repair", 60, 30.0)).lease is not None
    (heard,) = hall.hear(weak)
    assert isinstance(heard, Preempted)
    assert heard.lease.number == lease.number and "'console@2' took it for repair (priority 60)" in heard.reason
    assert "ended" in hall.ask(weak, RenewLease(2, "robot-0", lease.number)).refused


def test_only_consoles_and_teleoperators_call(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    edge.channel.send(AcquireLease(1, "robot-0", "check", 0, 30.0))
    edge.channel.send(Operator("robot-0", "take_over"))
    hall.gateway.turn()
    edge.turn()
    assert not any(isinstance(m, Answer | Operator) for m in edge.heard)
    console = hall.peer()
    console.send(Operator("robot-0", "take_over"))
    hall.gateway.turn()
    edge.turn()
    assert not any(isinstance(m, Operator) for m in edge.heard)
    assert hall.lease("robot-0") == ("main", "rollout")


def test_the_client_class_speaks_to_a_gateway(hall: Hall) -> None:
    hall.edge("robot-0")
    client = FleetClient("memory", channel=_Turning(hall, "console"), answer_s=5.0)
    with client as fleet:
        assert [robot.name for robot in fleet.robots()] == ["robot-0"]
        assert [job.request.id for job in fleet.jobs()] == ["main"]
        assert list(fleet.specs().values()) == [SPEC]
        lease = fleet.lease("robot-0", 30.0)
        assert fleet.renew(lease).number == lease.number
        with pytest.raises(Refused, match="ttl_s"):
            fleet.lease("robot-0", -1.0)
        fleet.release("robot-0")
        with pytest.raises(Refused, match="is held by 'main'"):
            fleet.release("robot-0")
        with pytest.raises(Refused, match="no job 'x'"):
            fleet.cancel("x")


class _Turning:
    """A line whose gateway works while its client waits."""

    def __init__(self, hall: Hall, name: str) -> None:
        self._hall = hall
        self._line = hall.server.connect(name)

    def send(self, message: Message) -> bool:
        return self._line.send(message)

    def recv(self, timeout_s: float = 0.0) -> Message | None:
        self._hall.gateway.turn()
        return self._line.recv()

    def close(self) -> None:
        self._line.close()


# --- people -----------------------------------------------------------------------------------------------------------


def page(hall: Hall, operator: int, kind: str, robot: str = "robot-0", **more: object) -> None:
    hall.desk.hear(operator, msgspec.json.encode({"type": kind, "robot": robot, **more}))
    hall.gateway.turn()
    for edge in hall.edges:
        edge.turn()


def wishes(edge: FakeEdge) -> list[str]:
    return [message.kind for message in edge.heard if isinstance(message, Operator)]


def test_taking_over_at_the_page_is_a_lease_and_handing_back_gives_the_job_back(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me = hall.desk.join()
    told = edge.job
    page(hall, me, "take_over")
    assert hall.lease("robot-0") == (f"web-{me}", "operator")
    hall.pass_time(40.0)
    assert hall.lease("robot-0") == (f"web-{me}", "operator")
    assert edge.job is told  # its episodes go on under the person's hand
    page(hall, me, "command", action=[0, 0, 0, 0])
    page(hall, me, "hand_back")
    hall.pass_time(1.0)
    assert wishes(edge) == ["take_over", "command", "hand_back"]
    assert hall.lease("robot-0") == ("main", "rollout")
    assert told is not None and edge.job is not None and edge.job.id == told.id


def test_a_page_that_leaves_leaves_the_robot_to_people(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me, you = hall.desk.join(), hall.desk.join()
    page(hall, me, "take_over")
    hall.desk.leave(me)
    hall.pass_time(40.0)
    assert wishes(edge) == ["take_over", "drop_link"]
    assert hall.lease("robot-0") == (f"dropped:web-{me}", "operator")
    assert hall.desk.control(you) == {"robot-0": "dropped"}
    page(hall, you, "take_over")
    assert hall.lease("robot-0") == (f"web-{you}", "operator")
    page(hall, you, "hand_back")
    hall.pass_time(1.0)
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_page_of_before_a_kill_has_dropped_its_robot(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me = hall.desk.join()
    page(hall, me, "take_over")
    hall = hall.killed()
    hall.pass_time(30.0)
    assert wishes(edge) == ["take_over", "drop_link"]
    assert hall.lease("robot-0") == (f"dropped:web-{me}", "operator")
    again = hall.desk.join()
    assert hall.desk.control(again) == {"robot-0": "dropped"}
    page(hall, again, "hand_back")
    hall.pass_time(1.0)
    assert hall.lease("robot-0") == ("main", "rollout") and wishes(edge)[-1] == "hand_back"
    hall.ledger.close()


def test_a_stop_outranks_everybody_until_it_is_released(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    teleoperator = hall.peer("teleoperator")
    lease = hall.ask(teleoperator, AcquireLease(1, "robot-0", "teleoperation", 80, 1000.0)).lease
    assert lease is not None
    teleoperator.send(Operator("robot-0", "take_over"))
    hall.pass_time(1.0)
    hall.hear(teleoperator)
    me = hall.desk.join()
    page(hall, me, "estop")
    assert hall.lease("robot-0") == (f"web-{me}", "estop")
    (ended,) = [m for m in hall.hear(teleoperator) if isinstance(m, Preempted)]
    assert ended.lease.number == lease.number and "for estop" in ended.reason
    hall.pass_time(30.0)
    assert edge.mode == "estop" and hall.lease("robot-0") == (f"web-{me}", "estop")
    assert hall.robots(hall.peer())["robot-0"].health == "stopped"
    refused = hall.ask(teleoperator, AcquireLease(2, "robot-0", "teleoperation", 80, 1.0)).refused
    assert f"is stopped by 'web-{me}'. Release the stop first." in refused
    page(hall, me, "take_over")
    assert hall.desk.refused(me) == [f"robot-0 is stopped by 'web-{me}'. Release the stop first."]
    assert hall.desk.control(me) == {}
    page(hall, me, "release_estop")
    # it was being driven, by somebody who has lost it: it waits for a person
    assert hall.lease("robot-0") == ("dropped:teleoperator", "operator")
    page(hall, me, "hand_back")
    hall.pass_time(10.0)
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_stop_beside_the_robot_is_a_lease_too(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    edge.mode = "estop"
    hall.pass_time(30.0)
    assert hall.lease("robot-0") == ("beside the robot", "estop")
    edge.mode = "policy"
    hall.pass_time(10.0)
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_teleoperator_drives_only_what_it_holds(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    teleoperator = hall.peer("teleoperator")
    rest = (0.0, 0.0, 0.0, 0.0)
    assert "is held by 'main'" in hall.ask(teleoperator, Operator("robot-0", "take_over")).refused
    lease = hall.ask(teleoperator, AcquireLease(1, "robot-0", "teleoperation", 0, 1.0)).lease
    assert lease is not None and lease.priority == 80
    assert "has not taken" in hall.ask(teleoperator, Operator("robot-0", "command", rest)).refused
    teleoperator.send(Operator("robot-0", "take_over", operator="forged"))
    teleoperator.send(Operator("robot-0", "command", rest))
    hall.gateway.turn()
    for bad, words in (
        (Operator("robot-0", "command", (9.0, 0.0, 0.0, 0.0)), "outside [-1, 1]"),
        (Operator("robot-0", "command", (0.0,)), "1 numbers"),
        (Operator("robot-0", "command", (float("nan"), 0.0, 0.0, 0.0)), "no number to act on"),
        (Operator("robot-0", "drop_link"), "kind: a teleoperator cannot ask for 'drop_link'"),
    ):
        assert words in hall.ask(teleoperator, bad).refused
    hall.pass_time(0.4)
    assert [type(m).__name__ for m in hall.hear(teleoperator)] == ["EdgeStatus"] * 2  # it sees what it drives
    # another one cannot, but anybody may stop
    other = hall.peer("teleoperator-2")
    assert "is held by 'teleoperator'" in hall.ask(other, Operator("robot-0", "command", rest)).refused
    hall.ask(teleoperator, ReleaseLease(2, "robot-0", lease.number))
    hall.pass_time(1.0)
    assert wishes(edge) == ["take_over", "command", "hand_back"]
    assert all(m.operator == "teleoperator" for m in edge.heard if isinstance(m, Operator))
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_teleoperator_that_vanishes_leaves_the_robot_holding(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    teleoperator = hall.peer("teleoperator")
    hall.ask(teleoperator, AcquireLease(1, "robot-0", "teleoperation", 80, 1.0))
    teleoperator.send(Operator("robot-0", "take_over"))
    hall.pass_time(2.0)
    assert wishes(edge) == ["take_over", "drop_link"]
    assert hall.lease("robot-0") == ("dropped:teleoperator", "operator")
    assert any(isinstance(m, Preempted) for m in hall.hear(teleoperator))
    # the next one finds it free for people
    other = hall.peer("teleoperator-2")
    assert hall.ask(other, AcquireLease(1, "robot-0", "teleoperation", 80, 1.0)).lease is not None
    hall.pass_time(3.0)
    assert hall.lease("robot-0") == ("dropped:teleoperator", "operator")
    me = hall.desk.join()
    page(hall, me, "hand_back")
    hall.pass_time(5.0)
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_teleoperator_that_comes_back_drives_on(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    teleoperator = hall.peer("teleoperator")
    hall.ask(teleoperator, AcquireLease(1, "robot-0", "teleoperation", 80, 1.0))
    teleoperator.send(Operator("robot-0", "take_over"))
    hall.pass_time(3.0)
    lease = hall.ask(teleoperator, AcquireLease(2, "robot-0", "teleoperation", 80, 30.0)).lease
    assert lease is not None
    teleoperator.send(Operator("robot-0", "take_over"))
    hall.pass_time(5.0)
    assert hall.ask(teleoperator, RenewLease(3, "robot-0", lease.number)).refused == ""
    assert wishes(edge) == ["take_over", "drop_link", "take_over"]
    # it may stop the robot itself, and let it go on
    teleoperator.send(Operator("robot-0", "estop"))
    hall.pass_time(5.0)
    assert hall.lease("robot-0") == ("teleoperator", "estop")
    assert "stopped by 'teleoperator'" in hall.ask(teleoperator, AcquireLease(4, "robot-0", "drive", 80, 1.0)).refused
    teleoperator.send(Operator("robot-0", "release_estop"))
    hall.pass_time(1.0)
    assert hall.lease("robot-0") == ("dropped:teleoperator", "operator")
    assert wishes(edge)[3:] == ["estop", "drop_link", "release_estop"] or wishes(edge)[3:] == [
        "drop_link",
        "estop",
        "release_estop",
    ]


def test_a_page_cannot_take_what_a_teleoperator_drives_and_a_console_can_end_it(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    teleoperator, console, me = hall.peer("teleoperator"), hall.peer(), hall.desk.join()
    hall.ask(teleoperator, AcquireLease(1, "robot-0", "teleoperation", 80, 100.0))
    teleoperator.send(Operator("robot-0", "take_over"))
    hall.pass_time(1.0)
    assert hall.desk.control(me) == {"robot-0": "other"}
    with pytest.raises(Refused, match=r"held by 'teleoperator' \(teleoperation\)"):
        page(hall, me, "take_over")
    hall.hear(teleoperator)
    assert hall.ask(console, ReleaseLease(1, "robot-0", 0)).refused == ""
    (ended,) = [m for m in hall.hear(teleoperator) if isinstance(m, Preempted)]
    assert "'console' released it by force" in ended.reason
    hall.pass_time(1.0)
    assert wishes(edge)[-1] == "hand_back" and hall.lease("robot-0") == ("main", "rollout")


def test_an_examination_goes_on_elsewhere_when_somebody_takes_the_robot(hall: Hall) -> None:
    first, second = hall.edge("robot-0"), hall.edge("robot-1")
    hall.publish(1)
    console = hall.peer()
    hall.ask(console, SubmitJob(1, canary(episodes=4, tasks=("reach",))))
    hall.pass_time(2.0, work=True)
    examined = next(e for e in (first, second) if e.job and e.job.kind == "evaluation")
    me = hall.desk.join()
    page(hall, me, "take_over", examined.name)
    hall.pass_time(30.0, work=True)
    assert hall.jobs(console)["canary"].phase == "done"
    assert hall.lease(examined.name) == (f"web-{me}", "operator")
    counted = hall.ledger.episodes_of_job("canary")
    assert Counter(row.seed for row in counted) == {1_000_000 + n: 1 for n in range(4)}
    assert len({row.robot for row in counted}) == 2


def test_a_version_that_is_announced_late_reaches_everybody_but_the_examined(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.publish(1)
    hall.pass_time(1.0)
    hall.ask(hall.peer(), SubmitJob(1, canary(1, episodes=50, tasks=("reach",))))
    hall.pass_time(1.0)
    hall.publish(2)
    hall = hall.killed()
    hall.pass_time(2.0)
    announced = [m.version.number for m in edge.heard if isinstance(m, Announce)]
    assert edge.job is not None and edge.job.version == 1 and edge.version == 1, announced
    hall.ledger.close()
