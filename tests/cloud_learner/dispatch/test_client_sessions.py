"""Consoles and programs at the gateway: robots they hold, jobs they hand in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fleet.cli.client import FleetClient
from tests.cloud_learner.dispatch.hall import TASKS, Hall
from tests.cloud_learner.fake_edge import SPEC
from wire.errors import RejectedError
from wire.messages import Message
from wire.messages.fleet import (
    AcquireLease,
    CancelJob,
    JobRequest,
    Preempted,
    ReleaseLease,
    RenewLease,
    Requirement,
    Response,
    SubmitJob,
)
from wire.messages.gateway import OperatorCommand


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    made = Hall(tmp_path)
    yield made
    made.ledger.close()


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
    (heard,) = hall.received(weak)
    assert isinstance(heard, Preempted)
    assert heard.lease.number == lease.number and "'console@2' took it for repair (priority 60)" in heard.reason
    assert "ended" in hall.ask(weak, RenewLease(2, "robot-0", lease.number)).refused


def test_only_consoles_and_teleoperators_call(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    edge.channel.send(AcquireLease(1, "robot-0", "check", 0, 30.0))
    edge.channel.send(OperatorCommand("robot-0", "take_over"))
    hall.gateway.poll()
    edge.poll()
    assert not any(isinstance(m, Response | OperatorCommand) for m in edge.received)
    console = hall.peer()
    console.send(OperatorCommand("robot-0", "take_over"))
    hall.gateway.poll()
    edge.poll()
    assert not any(isinstance(m, OperatorCommand) for m in edge.received)
    assert hall.lease("robot-0") == ("main", "rollout")


def test_the_client_class_speaks_to_a_gateway(hall: Hall) -> None:
    hall.edge("robot-0")
    client = FleetClient("memory", channel=_Turning(hall, "console"), answer_s=5.0)
    with client as fleet:
        assert [robot.name for robot in fleet.robots()] == ["robot-0"]
        assert [job.request.id for job in fleet.jobs()] == ["main"]
        assert list(fleet.fleet().specs.values()) == [SPEC]
        lease = fleet.lease("robot-0", 30.0)
        assert fleet.renew(lease).number == lease.number
        with pytest.raises(RejectedError, match="ttl_s"):
            fleet.lease("robot-0", -1.0)
        fleet.release("robot-0")
        with pytest.raises(RejectedError, match="is held by 'main'"):
            fleet.release("robot-0")
        with pytest.raises(RejectedError, match="no job 'x'"):
            fleet.cancel("x")


class _Turning:
    """A line whose gateway works while its client waits."""

    def __init__(self, hall: Hall, name: str) -> None:
        self._hall = hall
        self._line = hall.server.connect(name)

    def send(self, message: Message) -> bool:
        return self._line.send(message)

    def recv(self) -> Message | None:
        self._hall.gateway.poll()
        return self._line.recv()

    def close(self) -> None:
        self._line.close()


def test_a_lease_is_renewed_by_its_own_number_and_its_own_key(hall: Hall) -> None:
    hall.edge("robot-0")
    hall.pass_time(1.0)
    console, teleoperator = hall.peer(), hall.peer("teleoperator")
    for number in (0, -1, 2**62):
        assert "has ended; 'main' holds it" in hall.ask(console, RenewLease(1, "robot-0", number)).refused
    lease = hall.ask(teleoperator, AcquireLease(2, "robot-0", "teleoperation", 0, 2.0)).lease
    assert lease is not None
    for _ in range(3):
        hall.pass_time(1.0)
        assert "has ended" in hall.ask(console, RenewLease(3, "robot-0", 0)).refused
        said = hall.ask(console, RenewLease(4, "robot-0", lease.number)).refused
        assert f"lease {lease.number} of 'robot-0' belongs to 'teleoperator'" in said or "has ended" in said
    # nobody kept it alive but its holder, and the holder hears of its end
    assert hall.lease("robot-0") == ("main", "rollout")
    assert [m.lease.number for m in hall.received(teleoperator) if isinstance(m, Preempted)] == [lease.number]
    assert not any(isinstance(m, Preempted) for m in hall.received(console))


RESERVED = ["console", "console-7", "teleoperator", "web-1", "dropped", "operator", "gateway", "estop", "rest", "main"]
ODD = ["", "dropped:x", "a@2", "a:b", "a/b", "a b", "a\n", ".a", "beside the robot", "ä", "a" * 65]


@pytest.mark.parametrize("id", [*RESERVED, *ODD])
def test_a_job_cannot_be_called_like_a_holder(hall: Hall, id: str) -> None:
    hall.edge("robot-0")
    refused = hall.ask(hall.peer(), SubmitJob(1, JobRequest(id, "rollout", TASKS, 1, 5))).refused
    assert refused.startswith("id: ") and len(refused) < 400
    assert list(hall.jobs(hall.peer())) == ["main"]


def test_usual_names_of_jobs_are_taken(hall: Hall) -> None:
    console = hall.peer()
    for id in ("teleoperation-0a1b2c", "rollout-0a1b2c", "Canary_2.1", "main-2", "a" * 64):
        assert hall.ask(console, SubmitJob(1, JobRequest(id, "rollout", TASKS, 1, 5))).refused == ""


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"submitter": "s" * 101}, "submitter"),
        ({"kind": "k" * 101}, "kind"),
        ({"tasks": ("t" * 101,)}, "tasks"),
        ({"tasks": ("reach",) * 257}, "tasks"),
        ({"requirement": Requirement(embodiment="e" * 101)}, "requirement.embodiment"),
        ({"requirement": Requirement(spec_hash="e" * 101)}, "requirement.spec_hash"),
        ({"requirement": Requirement(site="e" * 101)}, "requirement.site"),
        ({"requirement": Requirement(robots=("r" * 101,))}, "requirement.robots"),
        ({"requirement": Requirement(cameras=("c",) * 257)}, "requirement.cameras"),
        ({"requirement": Requirement(tasks=("c",) * 257)}, "requirement.tasks"),
        ({"requirement": Requirement(meanings=("c",) * 257)}, "requirement.meanings"),
    ],
)
def test_what_is_too_long_is_refused_with_the_field(hall: Hall, more: dict, field: str) -> None:
    request = msgspec.structs.replace(JobRequest("job", "rollout", TASKS, 1, 5), **more)
    refused = hall.ask(hall.peer(), SubmitJob(1, request)).refused
    assert refused.startswith(f"{field}: ") and len(refused) < 200


def test_long_names_are_not_repeated(hall: Hall) -> None:
    hall.edge("robot-0")
    teleoperator, name = hall.peer("teleoperator"), "x" * 100_000
    for call in (
        AcquireLease(1, name, "check", 0, 5.0),
        AcquireLease(1, "robot-0", name, 0, 5.0),
        RenewLease(1, name, 0),
        ReleaseLease(1, name, 0),
        CancelJob(1, name),
        OperatorCommand(name, "estop"),
        OperatorCommand(name, "take_over"),
        OperatorCommand("robot-0", name),
    ):
        refused = hall.ask(teleoperator, call).refused
        assert 0 < len(refused) < 300, call


def test_a_job_of_an_older_gateway_that_cannot_be_taken_up_does_not_keep_it_from_starting(hall: Hall) -> None:
    hall.edge("robot-0")
    for id in ("console", "fine"):
        assert hall.ledger.add_job(JobRequest(id, "rollout", TASKS, 1, 5), 1)
    hall = hall.killed()
    phases = {id: job.phase for id, job in hall.jobs(hall.peer()).items()}
    assert phases == {"console": "cancelled", "fine": "waiting", "main": "waiting"}
    hall = hall.killed()
    assert hall.jobs(hall.peer())["console"].phase == "cancelled"
    hall.ledger.close()


def test_a_key_wishes_as_often_as_programs_do_and_stops_drives_and_renews_beside_that(hall: Hall) -> None:
    edge, bad, good = hall.edge("robot-0"), hall.peer("teleoperator"), hall.peer("teleoperator-2")
    lease = hall.ask(bad, AcquireLease(1, "robot-0", "teleoperation", 0, 60.0)).lease
    assert lease is not None
    for number in range(700):
        bad.send(OperatorCommand("robot-0", "hand_back" if number % 2 else "take_over", lease=lease.number))
        hall.gateway.poll()
    edge.poll()
    heard = [m.kind for m in edge.received if isinstance(m, OperatorCommand)]
    assert len(heard) == 499, "of 500 one was the lease's"
    assert hall.gateway.refused == {"too_often": 201}
    refused = [m for m in hall.received(bad) if isinstance(m, Response) and m.refused]
    assert len(refused) == 201 and refused[-1].refused.startswith("OperatorCommand: this key asks for more")
    answer = hall.ask(bad, AcquireLease(7, "robot-0", "teleoperation", 0, 60.0))
    assert answer.call == 7 and "Wait a moment" in answer.refused
    # It keeps what it has, and stops; others are none of the matter.
    assert hall.ask(bad, RenewLease(8, "robot-0", lease.number)).lease is not None
    edge.received.clear()
    bad.send(OperatorCommand("robot-0", "estop", stop="t-1"))
    hall.gateway.poll()
    edge.poll()
    assert next(m.kind for m in edge.received if isinstance(m, OperatorCommand)) == "estop"
    assert "stopped by teleoperator" in hall.ask(good, AcquireLease(1, "robot-0", "teleoperation", 0, 60.0)).refused
    hall.clock.advance(1_000_000_000)
    answer = hall.ask(bad, AcquireLease(9, "robot-0", "teleoperation", 0, 60.0))
    assert "stopped by" in answer.refused
