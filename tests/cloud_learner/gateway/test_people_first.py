"""The gateway's loop waits for nothing: people are heard while disk and database are blocked, away or flooded."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cloud_learner.gateway.storage.weight_store import WeightStore
from hal.resource.admitted_robots import AdmittedRobots
from tests import samples
from tests.cloud_learner.dispatch.hall import TASKS, Hall, canary, commands, page
from tests.cloud_learner.fake_edge import SPEC
from tests.cloud_learner.gateway.test_permissions import KINDS, sent
from wire import codec
from wire.errors import RejectedError, StorageError
from wire.identity.refusals import RefusalReason
from wire.messages import Message
from wire.messages.fleet import AcquireLease, ListFleet, Response, SubmitJob
from wire.messages.gateway import (
    Ack,
    EdgeEvent,
    FetchWeights,
    Heartbeat,
    Hello,
    HelloAck,
    Nack,
    OperatorCommand,
    Segment,
)
from wire.transport.memory_channel import MemoryClient
from wire.transport.zmq_channel import wait_any
from wire.types import CameraSpec, Role

PATIENCE_S = 20.0


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    made = Hall(tmp_path)
    yield made
    made.ledger.close()


@contextlib.contextmanager
def threads(hall: Hall) -> Iterator[None]:
    hall.gateway.start()
    try:
        yield
    finally:
        hall.gateway.close()


def until(hall: Hall, true: Callable[[], bool]) -> None:
    """Poll until it is `true`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s
        wait_any([hall.gateway.wakeup.fd], 0.05)
        hall.gateway.poll()
        for edge in hall.edges:
            edge.poll()


def acquired(hall: Hall, name: str, robot: str, purpose: str = "teleoperation") -> tuple[MemoryClient, list[Response]]:
    """Somebody who asked for a robot, and what they were answered within one poll."""
    peer = hall.peer(name)
    peer.send(AcquireLease(1, robot, purpose, 0, 60.0))
    hall.gateway.poll()
    return peer, [message for message in hall.received(peer) if isinstance(message, Response)]


class Blocked:
    """A disk that answers nobody until it is let go."""

    def __init__(self, hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        append = hall.ingest._store.append_all

        def wait(*arguments: object) -> object:
            self.entered.set()
            assert self.let_go.wait(PATIENCE_S)
            return append(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(hall.ingest._store, "append_all", wait)


def test_people_are_heard_while_storage_is_blocked(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    edges = [hall.edge(f"robot-{n}") for n in range(3)]
    disk = Blocked(hall, monkeypatch)
    with threads(hall):
        edges[2].episode()
        until(hall, disk.entered.is_set)
        page(hall, 1, "take_over")
        assert commands(edges[0]) == ["take_over"], "of the page, in one poll"
        operator, answers = acquired(hall, "teleoperator", "robot-1")
        (lease,) = [answer.lease for answer in answers]
        assert lease is not None, "of a person, in one poll"
        operator.send(OperatorCommand("robot-1", "take_over", sequence=1, lease=lease.number))
        hall.gateway.poll()
        edges[1].poll()
        assert commands(edges[1]) == ["take_over"]
        assert hall.lease("robot-0") == ("web-1", "operator")
        # whoever only looks, and what robots say of themselves
        assert {robot.name for robot in hall.ask(operator, ListFleet(2)).robots} == {edge.name for edge in edges}
        edges[0].status()
        edges[0].channel.send(Heartbeat(5))
        hall.gateway.poll()
        edges[0].poll()
        assert any(isinstance(message, HelloAck) and message.echo_ns == 5 for message in edges[0].received)
        assert hall.view.observe().robots["robot-0"][1] is not None
        assert edges[2].spool, "nothing is acknowledged before it is stored"
        disk.let_go.set()
        until(hall, lambda: not edges[2].spool)
        until(hall, lambda: {lease.robot for lease in hall.ledger.kept_leases()} == {"robot-0", "robot-1"})
    assert hall.ledger.totals().segments == 1


def test_a_command_of_the_page_waits_for_a_slice_of_what_came_not_for_all(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge, other = hall.edge("robot-0"), hall.edge("robot-1")
    recv, handled, forwarded = hall.server.recv_unless, 0, 0

    def count(kinds: set) -> object:
        nonlocal handled, forwarded
        edge.poll()
        if not forwarded and commands(edge):
            forwarded = handled
        if (received := recv(kinds)) is not None:
            handled += 1
        if handled == 40:
            hall.view.submit_command(OperatorCommand("robot-0", "take_over", operator="web-1"))
        return received

    for _ in range(300):
        other.channel.send(Heartbeat(1))
    monkeypatch.setattr(hall.gateway._channel._channel, "recv_unless", count)
    hall.gateway.poll()
    assert handled == 300
    assert 40 < forwarded <= 40 + 16
    assert commands(edge) == ["take_over"]


def test_what_people_do_at_the_page_wakes_the_loop(hall: Hall) -> None:
    hall.gateway.wakeup.silence()
    hall.view.submit_command(OperatorCommand("robot-0", "take_over", operator="web-1"))
    began_s = time.monotonic()
    wait_any([hall.gateway.wakeup.fd], PATIENCE_S)
    assert time.monotonic() - began_s < PATIENCE_S / 2


class Away:
    """A database that refuses everything while it is away."""

    def __init__(self, hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away = False
        for name in ("reading", "writing"):
            real = getattr(hall.ledger, name)

            @contextlib.contextmanager
            def ask(real: Callable = real) -> Iterator[object]:
                if self.away:
                    raise StorageError("ledger: nobody answers.")
                with real() as connection:
                    yield connection

            monkeypatch.setattr(hall.ledger, name, ask)


@pytest.mark.parametrize("inline", [True, False])
def test_a_database_away_is_a_state_and_not_an_end(hall: Hall, monkeypatch: pytest.MonkeyPatch, inline: bool) -> None:
    database = Away(hall, monkeypatch)
    edge, other = hall.edge("robot-0"), hall.edge("robot-1")
    hall.publish(1)
    with contextlib.nullcontext() if inline else threads(hall):
        edge.episode()
        until(hall, lambda: not edge.spool)
        database.away = True
        edge.episode()
        until(hall, lambda: any(isinstance(message, Nack) for message in edge.received))
        until(hall, lambda: bool(hall.view.snapshot()["storage"]["fault"]))
        assert "nobody answers" in hall.view.snapshot()["storage"]["fault"]
        assert b"vla_fleet_storage_away_seconds" in hall.gateway.metrics.text()
        assert edge.spool
        # robots are told to send one at a time
        edge.received.clear()
        edge.channel.send(Heartbeat(5))
        hall.gateway.poll()
        edge.poll()
        (beat,) = [message for message in edge.received if isinstance(message, HelloAck)]
        assert beat.credit_bytes == 1
        # people go on, and so does whoever fetches what is on the disk
        page(hall, 1, "take_over")
        assert "take_over" in commands(edge)
        _, (answer,) = acquired(hall, "teleoperator", "robot-1")
        assert answer.lease is not None
        edge.channel.send(FetchWeights(1, 0, 300))
        until(hall, lambda: any(getattr(message, "data", b"") == samples.weights(1, 300) for message in edge.received))
        # what has to outlive this process is refused with the reason
        console, answers = acquired(hall, "console", "robot-1", "maintenance")
        until(
            hall, lambda: bool(answers.extend(m for m in hall.received(console) if isinstance(m, Response)) or answers)
        )
        assert "nobody answers" in answers[0].refused
        console.send(SubmitJob(2, canary(version=1)))
        answers.clear()
        until(
            hall, lambda: bool(answers.extend(m for m in hall.received(console) if isinstance(m, Response)) or answers)
        )
        assert "nobody answers" in answers[0].refused
        # a robot that is new meanwhile can be had by people
        third = hall.edge("robot-2")
        until(hall, lambda: third.welcomed)
        page(hall, 2, "take_over", "robot-2")
        assert commands(third) == ["take_over"]
        for n in range(10):
            other.channel.send(EdgeEvent("robot-1", 1, "hold", f"number {n}"))
        hall.gateway.poll()
        database.away = False
        until(hall, lambda: not hall.view.snapshot()["storage"]["fault"])
        edge.welcomed = False
        edge.hello()
        until(hall, lambda: not edge.spool)
        until(hall, lambda: len(hall.ledger.kept_leases()) == 3)
        details = [event.detail for event in hall.ledger.events() if event.robot == "robot-1"]
        assert [detail for detail in details if detail.startswith("number")] == [f"number {n}" for n in range(10)]
        assert hall.ledger.robot("robot-2") is not None
    texts = [event["text"] for event in hall.view.snapshot()["events"]]
    assert any(text.startswith("storage is back after") for text in texts)


def test_killed_between_commit_and_acknowledgement_it_stores_once(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = hall.edge("robot-0")
    edge.episode()
    with monkeypatch.context() as patch:
        patch.setattr(hall.gateway._storage, "hand_back", lambda *results: None)
        hall.gateway.poll()
    edge.poll()
    assert hall.ledger.totals().segments == 1 and len(edge.spool) == 1
    again = hall.killed()
    again.edges.remove(edge)
    edge.welcomed = False
    edge.hello()
    for _ in range(3):
        again.gateway.poll()
        edge.poll()
    assert edge.spool == {}
    assert again.ledger.totals().segments == 1
    again.ledger.close()


def test_numbers_of_leases_are_given_once_whatever_was_noted(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = hall.edge("robot-0")
    database = Away(hall, monkeypatch)
    numbers = []
    for _ in range(3):
        database.away = True
        page(hall, 1, "take_over")
        lease = hall.gateway._dispatcher.leases.of("robot-0")
        assert lease is not None and "take_over" in commands(edge), "it acts before it is noted"
        numbers.append(lease.number)
        hall.ledger.close()
        hall = Hall(hall.root, hall.clock, hall.server)
        database = Away(hall, monkeypatch)
        hall.edges = [edge]
        edge.welcomed = False
        edge.hello()
        hall.gateway.poll()
        edge.poll()
    assert numbers == sorted(set(numbers))
    hall.ledger.close()


class Guard:
    """Nobody but the threads of storage may ask the ledger, or touch weights, while the gateway is at work."""

    def __init__(self, hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: set[str] = set()
        loop = threading.current_thread()

        def guarded(name: str, real: Callable) -> Callable:
            def call(*arguments: object, **options: object) -> object:
                assert threading.current_thread() is not loop, f"the loop calls {name}"
                self.asked.add(name)
                return real(*arguments, **options)

            return call

        for name in ("reading", "writing", "together", "exclusive"):
            monkeypatch.setattr(hall.ledger, name, guarded(name, getattr(hall.ledger, name)))
        for name in ("begin", "receive", "serve", "version"):
            monkeypatch.setattr(WeightStore, name, guarded(name, getattr(WeightStore, name)))
        monkeypatch.setattr(hall.ingest, "accept_all", guarded("accept_all", hall.ingest.accept_all))


@pytest.mark.parametrize("seed", range(2))
def test_the_loop_never_asks_the_ledger_nor_touches_a_file(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    roles = [role for role in Role if role not in (Role.gateway, Role.inference)]
    guard = Guard(hall, monkeypatch)
    with threads(hall):
        peers = {role: hall.server.connect(f"{role}-1", role) for role in roles}
        for role, peer in peers.items():
            peer.send(named(sent(Hello, role), f"{role}-1"))
        hall.gateway.poll()
        todo = [(role, kind) for role in roles for kind in KINDS for _ in range(2)]
        draw.shuffle(todo)
        for number, (role, kind) in enumerate(todo):
            try:
                message = named(sent(kind, role), f"{role}-1")
                peers[role].send(message)
            except Exception:  # noqa: BLE001 - not all kinds can be made up
                continue
            if number % 5 == 0:
                with contextlib.suppress(RejectedError):
                    page(hall, 1, draw.choice(["take_over", "hand_back", "estop"]), f"{Role.edge}-1")
            hall.clock.advance(50_000_000)
            hall.gateway.poll()
        until(hall, lambda: hall.gateway._storage.queued_bytes == 0)
    assert hall.gateway.refused[RefusalReason.failed] == 0
    assert guard.asked >= {"writing", "together", "accept_all", "begin", "serve"}


def named(message: Message, name: str) -> Message:
    """As `name` would send it."""
    if isinstance(message, Hello):
        return msgspec.structs.replace(message, name=name)
    if isinstance(message, Segment):
        episode = msgspec.structs.replace(message.episode, robot=name, id=f"{name}-1")
        return msgspec.structs.replace(message, id=f"{name}-1/0", episode=episode)
    if "robot" in message.__struct_fields__:
        return msgspec.structs.replace(message, robot=name)
    return message


def test_a_flood_keeps_neither_a_poll_going_nor_the_memory_growing(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    recv_all = 32 * 16
    for _ in range(3000):
        edge.channel.send(Heartbeat(1))
    hall.gateway.poll()
    answered = [message for message in hall.received(edge.channel) if isinstance(message, HelloAck)]
    assert len(answered) <= recv_all
    for _ in range(6):
        hall.gateway.poll()
    assert hall.gateway.refused[RefusalReason.too_often] >= 3000 - 2000
    hall.clock.advance(60_000_000_000)
    edge.channel.send(Heartbeat(77))
    hall.gateway.poll()
    assert any(isinstance(m, HelloAck) and m.echo_ns == 77 for m in hall.received(edge.channel))


def test_a_segment_that_is_none_is_counted_and_its_sender_told(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    edge.episode()
    data = codec.encode(next(iter(edge.spool.values())))
    assert isinstance(edge.channel, MemoryClient)
    for torn in (data[: len(data) // 2], data[:30]):
        edge.channel.send_bytes(torn)
    hall.gateway.poll()
    edge.poll()
    assert hall.gateway.refused == {"malformed": 2}
    assert edge.refused and hall.ledger.totals().segments == 1
    assert edge.spool == {} and any(isinstance(message, Ack) for message in edge.received)


def test_a_robot_without_room_is_told_to_come_again(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    edge, other = hall.edge("robot-0"), hall.edge("robot-1")
    monkeypatch.setattr("cloud_learner.gateway.storage.storage_thread.ONE_PEER_BYTES", 4000)
    for _ in range(20):
        edge.episode()
    other.episode()
    hall.gateway.poll()
    edge.poll(), other.poll()  # type: ignore[func-returns-value]
    assert any(isinstance(message, Nack) for message in edge.received)
    assert other.spool == {}, "one robot cannot take the room of others"
    for _ in range(25):
        edge.welcomed = False
        edge.hello()
        hall.gateway.poll()
        edge.poll()
    assert edge.spool == {} and hall.ledger.totals().segments == 21
    assert hall.gateway._storage.queued_bytes == 0


def test_pictures_for_people_are_as_many_however_many_robots_there_are(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(SPEC, cameras=tuple(CameraSpec(name, 64, 64, 20.0) for name in ("front", "wrist")))
    hall = Hall(tmp_path, robots=AdmittedRobots.of_one(spec, TASKS))

    def pause_s(robots: int) -> float:
        for number in range(len(hall.edges), robots):
            hall.edge(f"robot-{number}", spec=spec)
        hall.gateway.poll()
        edge = hall.edges[0]
        edge.poll()
        edge.received.clear()
        edge.channel.send(Heartbeat(5))
        hall.gateway.poll()
        edge.poll()
        return next(message.preview_s for message in edge.received if isinstance(message, HelloAck))

    assert pause_s(1) == 1.0, "nobody looks"
    hall.view.pages = 1
    assert pause_s(2) == 0.1
    assert 2 * 50 / pause_s(50) == pytest.approx(200)
    hall.view.pages = 0
    assert pause_s(50) == 1.0
    hall.ledger.close()
