"""The gateway: who is let in, what is stored, what is announced, whose command is passed on."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.gateway.server import Gateway
from cloud_learner.gateway.storage import storage_thread
from cloud_learner.gateway.storage.ingest import Ingest
from cloud_learner.gateway.storage.weight_store import WeightStore
from cloud_learner.operator.view import FleetView
from hal.resource.admitted_robots import AdmittedRobots
from tests import samples
from wire import codec
from wire.clock import ManualClock, clock_name
from wire.errors import DiskFullError
from wire.messages import Message
from wire.messages.gateway import (
    Ack,
    CameraFrames,
    EdgeEvent,
    EdgeStatus,
    Evaluate,
    Evaluation,
    FetchWeights,
    Heartbeat,
    Hello,
    HelloAck,
    Job,
    Nack,
    OperatorCommand,
    Preview,
    Publish,
    Published,
    ReintroduceRequest,
    Rejection,
    Segment,
    SegmentCommitted,
    VersionActivated,
    VersionAvailable,
    WeightBytes,
)
from wire.transport.memory_channel import MemoryClient, MemoryServer
from wire.types import CameraSpec, Episode, PolicyVersion


class Hall:
    """A gateway on a data directory, and the test as everybody else."""

    def __init__(self, root: Path) -> None:
        self.clock = ManualClock(10**9)
        self.server = MemoryServer()
        self.ledger, store = BufferLocation(root).open_writer()
        self.ingest = Ingest(self.ledger, store, self.clock, self.server.may_teach)
        self.ingest.open()
        self.view = FleetView(self.clock)
        self.gateway = Gateway(
            self.server,
            self.ledger,
            self.ingest,
            WeightStore.open(root / "weights", self.ledger),
            self.view,
            AdmittedRobots.of_one(samples.spec(), ("reach", "push")),
            self.clock,
            lambda: 5,
        )

    def ask(self, peer: MemoryClient, *messages: Message) -> list[Message]:
        for message in messages:
            peer.send(message)
        self.gateway.poll()
        return self.received(peer)

    def received(self, peer: MemoryClient) -> list[Message]:
        found = []
        while (message := peer.recv()) is not None:
            found.append(message)
        return found

    def robot(self, name: str = "robot-0") -> MemoryClient:
        peer = self.server.connect(name)
        self.ask(peer, Hello(name, "edge", clock_name(), 1, 7, samples.spec(), ("reach", "push")))
        return peer

    def trainer(self) -> MemoryClient:
        peer = self.server.connect("trainer")
        self.ask(peer, Hello("trainer", "trainer", clock_name(), 1))
        return peer

    def publish(self, trainer: MemoryClient, number: int, data: bytes = samples.weights()) -> list[Message]:
        sha256 = hashlib.sha256(data).hexdigest()
        version = PolicyVersion(number, sha256, len(data), number - 1, 10, 20, 3)
        return self.ask(trainer, Publish(version), WeightBytes(number, 0, data))


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    made = Hall(tmp_path)
    yield made
    made.ledger.close()


def kinds(messages: list[Message]) -> list[type]:
    return [type(message) for message in messages]


def test_a_robot_is_welcomed_and_given_work(hall: Hall) -> None:
    peer = hall.server.connect("robot-0")
    hello = Hello("robot-0", "edge", clock_name(), 77, 7, samples.spec(), ("reach", "push"))
    answer = hall.ask(peer, hello)
    assert kinds(answer) == [HelloAck, Job]
    assert answer[0].echo_ns == 77
    assert set(answer[1].tasks) == {"reach", "push"}
    again = hall.ask(peer, hello)
    assert again[1].id == answer[1].id


def test_robots_never_share_seeds(hall: Hall) -> None:
    jobs = []
    for name in ("robot-0", "robot-1", "robot-2"):
        peer = hall.server.connect(name)
        jobs += [m for m in hall.ask(peer, Hello(name, "edge", "c", 1, 7, samples.spec())) if isinstance(m, Job)]
    firsts = sorted(job.first_seed for job in jobs)
    assert all(500_000 <= first < 1_000_000 for first in firsts)
    assert min(b - a for a, b in itertools.pairwise(firsts)) >= 5_000


def test_whoever_did_not_introduce_himself_is_asked_to(hall: Hall) -> None:
    peer = hall.server.connect("robot-0")
    assert kinds(hall.ask(peer, samples.segment())) == [ReintroduceRequest]
    assert hall.ledger.totals().steps == 0


def test_a_robot_of_another_spec_is_refused_with_the_difference(hall: Hall) -> None:
    other = msgspec.structs.replace(samples.spec(), cameras=(CameraSpec("wrist", 8, 8, 20.0),))
    peer = hall.server.connect("robot-0")
    answer = hall.ask(peer, Hello("robot-0", "edge", "c", 1, 7, other))
    assert kinds(answer) == [Rejection]
    assert "'cameras' differs: ['front'] against ['wrist']" in answer[0].reason
    assert kinds(hall.ask(peer, samples.segment())) == [ReintroduceRequest]
    assert any("refused" in event["text"] for event in hall.view.snapshot()["events"])


def test_nobody_speaks_for_another(hall: Hall) -> None:
    robot = hall.robot("robot-1")
    status = EdgeStatus("robot-0", 1, "policy", "", "", "", 1, samples.step(0).state, 1, 1, 0, 0.0, 0, 0, 0, 0, 0)
    hall.ask(robot, status)
    assert [r["name"] for r in hall.view.snapshot()["robots"]] == ["robot-1"]
    assert kinds(hall.ask(hall.server.connect("robot-2"), Hello("robot-1", "edge", "c", 1))) == [Rejection]


def test_only_the_trainer_publishes_and_only_the_evaluator_asks(hall: Hall) -> None:
    robot = hall.robot()
    assert hall.publish(robot, 1) == []
    assert hall.ledger.newest_version() is None
    assert hall.ask(robot, Evaluate(1, 1, 1, "once")) == []


def test_a_segment_is_acknowledged_when_it_is_stored_and_once(hall: Hall) -> None:
    robot = hall.robot()
    segment = valid_segment()
    answer = hall.ask(robot, segment)
    assert kinds(answer) == [Ack]
    assert answer[0].segments == (segment.id,)
    assert hall.ask(robot, segment)[0].segments == (segment.id,)
    assert hall.ledger.totals().steps == segment.steps
    assert hall.view.snapshot()["totals"]["steps_stored"] == segment.steps


def test_an_invalid_segment_is_put_aside_and_the_next_one_is_stored(hall: Hall) -> None:
    robot = hall.robot()
    good = valid_segment()
    bad = msgspec.structs.replace(good, id=f"{good.episode.id}/9", index=9, state=good.state * float("nan"))
    answer = hall.ask(robot, bad, good)
    assert kinds(answer) == [Ack, Ack]
    assert answer[0].quarantined == (bad.id,)
    assert answer[1].segments == (good.id,)


def test_segments_that_lie_in_the_socket_are_committed_together_then_acknowledged(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    robots = [hall.robot(f"robot-{n}") for n in range(3)]
    commit, committed = hall.ledger.commit_segments, []

    def watch(segments: list, *more: object) -> list[int | None]:
        assert not any(isinstance(m, Ack) for robot in robots for m in hall.received(robot))
        committed.append(len(segments))
        return commit(segments, *more)

    monkeypatch.setattr(hall.ledger, "commit_segments", watch)
    for n, robot in enumerate(robots):
        robot.send(of_robot(n))
        robot.send(Heartbeat(1))
    hall.gateway.poll()
    assert committed == [3]
    assert [[m.segments for m in hall.received(robot) if isinstance(m, Ack)] for robot in robots] == [
        [(f"episode-{n}/0",)] for n in range(3)
    ]
    # what a hello makes of it depends on what was stored
    robots[0].send(msgspec.structs.replace(of_robot(0), id="more/0", episode=episode_of(0, "more")))
    robots[0].send(Hello("robot-0", "edge", clock_name(), 1, 8, samples.spec()))
    hall.gateway.poll()
    assert kinds(hall.received(robots[0]))[0] == Ack


def test_not_more_is_taken_at_once_than_a_bound(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    robots = [hall.robot(f"robot-{n}") for n in range(5)]
    taken = []
    accept = hall.ingest.accept_all
    monkeypatch.setattr(hall.ingest, "accept_all", lambda some: taken.append(len(some)) or accept(some))
    encoded = len(codec.encode(of_robot(0)))
    for count, size, expected in ((2, 10**9, [2, 2, 1]), (100, 2 * encoded + 8, [2, 2, 1])):
        monkeypatch.setattr(storage_thread, "SEGMENTS_AT_ONCE", count)
        monkeypatch.setattr(storage_thread, "BYTES_AT_ONCE", size)
        taken.clear()
        for n, robot in enumerate(robots):
            robot.send(of_robot(n))
        hall.gateway.poll()
        assert taken == expected


def episode_of(number: int, name: str) -> Episode:
    return msgspec.structs.replace(samples.episode(), id=name, robot=f"robot-{number}")


def of_robot(number: int) -> Segment:
    name = f"episode-{number}"
    return msgspec.structs.replace(valid_segment(), id=f"{name}/0", episode=episode_of(number, name))


def test_a_full_disk_is_said_and_the_robot_keeps_its_data(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    robot = hall.robot()

    def full(*arguments: object) -> None:
        raise DiskFullError("no space left")

    monkeypatch.setattr(hall.ingest._store, "append_all", full)
    answer = hall.ask(robot, valid_segment())
    assert kinds(answer) == [Nack]
    assert "no space left" in answer[0].reason
    monkeypatch.undo()
    assert kinds(hall.ask(robot, valid_segment())) == [Ack]


def test_a_version_is_confirmed_announced_served_and_its_use_noted(hall: Hall) -> None:
    robot, trainer = hall.robot(), hall.trainer()
    assert kinds(hall.publish(trainer, 1)) == [Published]
    announced = hall.received(robot)
    assert kinds(announced) == [VersionAvailable]
    served = hall.ask(robot, FetchWeights(1, 3, 100))
    assert served[0].data == samples.weights()[3:103]
    hall.ask(robot, VersionActivated("robot-0", 1, hall.clock.now_ns() + 5))
    assert [(row.robot, row.version) for row in hall.ledger.applied()] == [("robot-0", 1)]
    # whoever comes later hears of it at once
    late = hall.server.connect("robot-1")
    assert VersionAvailable in kinds(hall.ask(late, Hello("robot-1", "edge", "c", 1, 7, samples.spec())))


def test_a_version_with_a_wrong_hash_or_number_is_refused(hall: Hall) -> None:
    trainer = hall.trainer()
    version = PolicyVersion(1, "0" * 64, 4, 0, 1, 1, 1)
    assert kinds(hall.ask(trainer, Publish(version), WeightBytes(1, 0, b"abcd"))) == [Rejection]
    assert Rejection in kinds(hall.publish(trainer, 7))
    assert hall.ledger.newest_version() is None
    assert kinds(hall.publish(trainer, 1)) == [Published]


def test_a_trainer_that_asks_hears_that_a_version_is_there_before_its_heartbeat_is_answered(hall: Hall) -> None:
    trainer, data = hall.trainer(), samples.weights()
    hall.publish(trainer, 1)
    known = PolicyVersion(1, hashlib.sha256(data).hexdigest(), len(data), 0, 10, 20, 3)
    assert kinds(hall.ask(trainer, Publish(known), Heartbeat(9))) == [Published, HelloAck]
    other = msgspec.structs.replace(known, number=2, parent=1, sha256="0" * 64)
    assert kinds(hall.ask(trainer, Publish(other), Heartbeat(10))) == [HelloAck]


def test_weights_that_do_not_exist_are_refused(hall: Hall) -> None:
    assert kinds(hall.ask(hall.robot(), FetchWeights(5, 0, 10))) == [Rejection]


def test_commands_go_to_their_robot_and_into_the_ledger(hall: Hall) -> None:
    robot = hall.robot()
    hall.view.submit_command(OperatorCommand("robot-0", "take_over", operator="web-1"))
    hall.gateway.poll()
    assert [m.kind for m in hall.received(robot) if isinstance(m, OperatorCommand)] == ["take_over"]
    assert [event.kind for event in hall.ledger.events()] == ["take_over"]


def test_clock_offsets_are_measured_and_stored_not_applied_to_data(hall: Hall) -> None:
    peer = hall.server.connect("robot-0")
    now = hall.clock.now_ns()
    hall.ask(peer, Hello("robot-0", "edge", "another clock", now - 5_000, 7, samples.spec()))
    stored = [hall.ledger.robot("robot-0")]
    # the answer took 1 us, the heartbeat 4
    hall.ask(peer, Heartbeat(now - 4_000, now, now + 1_000))
    stored.append(hall.ledger.robot("robot-0"))
    assert [row and row.clock_offset_ns for row in stored] == [5_000, 1_500]


def valid_segment() -> Segment:
    """A segment whose frames are real pictures."""
    from robot_edge.uplink.segments import SegmentBuilder

    builder = SegmentBuilder(samples.episode(), 100)
    builder.frame("front", 5, samples.image())
    for tick in range(6):
        builder.step(samples.step(tick, frame_ns=5))
    segment = builder.end("success", 10**7)
    assert segment is not None
    return segment


def test_trainers_hear_of_what_was_stored_once_it_is_durable(hall: Hall) -> None:
    robot, trainer = hall.robot(), hall.server.connect("trainer")
    hall.ask(trainer, Hello("trainer", "trainer", clock_name(), 1))
    segment = valid_segment()
    hall.ask(robot, segment, segment)
    (fresh,) = [m for m in hall.received(trainer) if isinstance(m, SegmentCommitted)]
    committed = codec.decode(fresh.record)
    assert isinstance(committed, Segment)
    assert hall.ledger.places([fresh.row])[fresh.row].id == committed.id == segment.id
    # what must stay held out is not passed on
    of = msgspec.structs.replace(samples.episode(), id="held-out", source="evaluation")
    examined = msgspec.structs.replace(segment, id="held-out/0", episode=of)
    assert kinds(hall.ask(robot, examined)) == [Ack]
    assert [m for m in hall.received(trainer) if isinstance(m, SegmentCommitted)] == []


def test_a_version_remembers_which_episodes_it_was_first_trained_on(hall: Hall) -> None:
    robot, trainer = hall.robot(), hall.server.connect("trainer")
    hall.ask(trainer, Hello("trainer", "trainer", clock_name(), 1))
    hall.ask(robot, valid_segment())
    weights = samples.weights()
    version = PolicyVersion(1, hashlib.sha256(weights).hexdigest(), len(weights), 0, 10, 6, 1)
    hall.ask(trainer, Publish(version, (1,)), WeightBytes(1, 0, weights))
    assert list(hall.ledger.episodes_of_version(1)) == [samples.episode().id]
    assert list(hall.ledger.versions_of_episode(samples.episode().id)) == [1]


def malformed() -> list[Segment]:
    good = valid_segment()
    camera = good.frames["front"]
    return [
        msgspec.structs.replace(good, frame_times_ns={"front": good.frame_times_ns["front"][:-1]}),
        msgspec.structs.replace(good, times_ns=np.array(5, np.int64)),
        msgspec.structs.replace(good, frames={"front": CameraFrames(camera.times_ns.astype("f8"), camera.encoded)}),
        msgspec.structs.replace(good, frames={"front": CameraFrames(camera.times_ns[None], camera.encoded)}),
        msgspec.structs.replace(good, frame_times_ns={}),
    ]


@pytest.mark.parametrize("number", range(5))
def test_malformed_segments_are_put_aside_and_the_gateway_goes_on(hall: Hall, number: int) -> None:
    robot = hall.robot()
    bad = malformed()[number]
    answer = hall.ask(robot, bad)
    assert kinds(answer) == [Ack]
    assert answer[0].quarantined == (bad.id,)
    good = msgspec.structs.replace(valid_segment(), id=f"{samples.episode().id}/0")
    assert hall.ask(robot, good)[-1].segments == (good.id,)


def test_numbers_no_ledger_can_hold_do_not_end_the_gateway(hall: Hall) -> None:
    robot = hall.robot()
    hall.ask(robot, FetchWeights(2**63, 0, 10))
    hall.ask(robot, Hello("robot-0", "edge", "other", 2**64 - 1, 7, samples.spec()))
    assert kinds(hall.ask(robot, valid_segment())) == [Ack]


def test_a_robots_key_cannot_be_a_trainer(hall: Hall) -> None:
    peer = hall.server.connect("robot-0")
    answer = hall.ask(peer, Hello("robot-0", "trainer", clock_name(), 1))
    assert kinds(answer) == [Rejection]
    assert "was made for role edge, not for 'trainer'" in answer[0].reason


def test_a_control_process_that_is_new_gets_seeds_that_were_not_used(hall: Hall) -> None:
    peer = hall.robot()
    hall.ask(peer, valid_segment())
    hello = Hello("robot-0", "edge", clock_name(), 1, 8, samples.spec(), ("reach", "push"))
    (job,) = [m for m in hall.ask(peer, hello) if isinstance(m, Job)]
    assert job.first_seed % 5_000 != 0
    (same,) = [m for m in hall.ask(peer, hello) if isinstance(m, Job)]
    assert (same.id, same.first_seed) == (job.id, job.first_seed)


def test_pictures_are_of_cameras_that_the_robot_has(hall: Hall) -> None:
    peer = hall.robot()
    assert kinds(hall.ask(peer, Preview("robot-0", "front", 1, b"jpeg"))) == []
    for number in range(5):
        assert kinds(hall.ask(peer, Preview("robot-0", f"{number}" * 1000, 1, b"jpeg"))) == [Rejection]
    assert [camera for _, camera, _ in hall.view.previews(0)[1]] == ["front"]
    assert hall.gateway.refused == {"rejected": 5}


def test_events_are_kept_as_fast_as_a_robot_may_have_them_and_no_longer_than_one_reads(hall: Hall) -> None:
    peer = hall.robot()
    hall.ask(peer, *[EdgeEvent("robot-0", 1, "k" * 1000, "d" * 10_000)] * 150)
    # Introducing itself again gives it no more of them.
    hall.ask(peer, Hello("robot-0", "edge", clock_name(), 1, 7, samples.spec(), ("reach", "push")))
    hall.ask(peer, *[EdgeEvent("robot-0", 1, "k", "d")] * 100)
    assert hall.gateway.refused == {"too_often": 50}
    first = hall.ledger.events()[0]
    assert (len(first.kind), len(first.detail)) == (64, 2000)
    hall.clock.advance(10**9)
    hall.ask(peer, *[EdgeEvent("robot-0", 1, "k", "d")] * 20)
    assert hall.gateway.refused == {"too_often": 60}


@pytest.mark.parametrize(
    "wrong", [{"clock": "c" * 1000}, {"sent_ns": 2**64 - 1}, {"pid": -1}, {"tasks": ("t",) * 2000}]
)
def test_a_hello_that_cannot_be_kept_is_named_and_changes_nothing(hall: Hall, wrong: dict) -> None:
    peer = hall.server.connect("robot-0")
    hello = Hello("robot-0", "edge", "elsewhere", 1, 7, samples.spec(), ("reach", "push"))
    (rejected,) = hall.ask(peer, msgspec.structs.replace(hello, **wrong))
    assert isinstance(rejected, Rejection) and rejected.reason.startswith(next(iter(wrong)))
    assert hall.ledger.robot("robot-0") is None


@pytest.mark.parametrize(
    "wrong",
    [{"duration_s": math.nan}, {"label": "l" * 1000}, {"success": {"t" * 1000: 1.0}}, {"success": {"t": 7.0}}],
)
def test_an_evaluation_that_cannot_be_kept_is_refused(hall: Hall, wrong: dict) -> None:
    peer = hall.server.connect("evaluator-0")
    hall.ask(peer, Hello("evaluator-0", "evaluator", clock_name(), 1))
    measured = Evaluation(1, {"reach": 0.5}, 5, 1, "after", 1, 2.0)
    assert kinds(hall.ask(peer, msgspec.structs.replace(measured, **wrong))) == [Rejection]
    assert hall.view.snapshot()["measured"] == {}
