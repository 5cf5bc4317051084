"""A disk that stands still keeps nothing waiting but what has to lie on it: no beat, no command, no status."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from robot_edge.runtime.process_group import POLL_S, record_channel
from robot_edge.uplink import episode_recorder
from robot_edge.uplink.server import Uplink
from robot_edge.uplink.spool import Spool
from robot_edge.uplink.spool_index import is_kept
from tests import samples
from tests.robot_edge.uplink.deliveries import World
from tests.robot_edge.uplink.test_episode_recorder import UPLINK, running, spooled, until
from tests.robot_edge.uplink.test_server import SECOND, Desk, fetch, segments, version
from tests.robot_edge.uplink.test_spool import SIZE, episode
from wire.clock import MonotonicClock, clock_name
from wire.messages.gateway import (
    Ack,
    EdgeStatus,
    FetchWeights,
    Heartbeat,
    Hello,
    HelloAck,
    Nack,
    OperatorCommand,
    Segment,
    VersionAvailable,
    WeightBytes,
)
from wire.messages.local import EpisodeEnded, EpisodeStarted, FrameRecorded, LoadWeights, StepRecorded
from wire.task_thread import TaskQueue
from wire.transport.keys import make_keys
from wire.transport.memory_channel import MemoryPairEnd, memory_pair
from wire.transport.session import SILENT_AFTER_S
from wire.transport.zmq_channel import ZmqClient, ZmqServer, wait_any
from wire.types import Frame


class Disk:
    """Stands still between `stop` and `go_on`; no thread is needed for that."""

    def __init__(self, tasks: TaskQueue) -> None:
        self._tasks, self._step = tasks, tasks.step

    def stop(self) -> None:
        self._tasks.step = lambda: False  # type: ignore[method-assign]

    def go_on(self) -> None:
        self._tasks.step = self._step  # type: ignore[method-assign]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    made.hello()
    made.to_control()
    made.received()
    yield made
    made.uplink.close()


@pytest.fixture
def disk(desk: Desk) -> Disk:
    return Disk(desk.uplink._disk)


def status(desk: Desk) -> EdgeStatus:
    now_ns, state = desk.clock.now_ns(), samples.step(0).state
    return EdgeStatus("robot-0", now_ns, "policy", "", "reach", "e", 1, state, 1, 1, 0, 0.0, 0, 0, 0, 0, 0)


def reasons(desk: Desk) -> list[str]:
    """What control was told of the disk."""
    return [message.reason for message in desk.to_control() if isinstance(message, Nack)]


def test_while_the_disk_stands_still_people_are_served_and_the_robot_holds_in_time(desk: Desk, disk: Disk) -> None:
    disk.stop()
    desk.record(25)
    told: list[str] = []
    for second in range(20):
        desk.control.send(status(desk))
        desk.server.send("robot-0", OperatorCommand("robot-0", "take_over"))
        desk.pass_time(1)
        heard = desk.to_control()
        assert [message.kind for message in heard if isinstance(message, OperatorCommand)] == ["take_over"]
        told += [message.reason for message in heard if isinstance(message, Nack)]
        assert bool(told) == (second >= 10)
        received = desk.received()
        assert len([message for message in received if isinstance(message, Heartbeat)]) == 1
        (shown,) = (message for message in received if isinstance(message, EdgeStatus))
        assert (shown.spooled, shown.steps_recorded) == (3, 0), "nothing is said to be recorded that is not"
        assert segments(received) == []
        assert ("too slow" in shown.detail) == (second >= 10)
    assert len(told) == 1 and "3 segments" in told[0]
    disk.go_on()
    desk.pass_time(1)
    assert reasons(desk) == [""], "and that it is over"
    assert [s.index for s in segments(desk.received())] == [0, 1, 2]
    assert desk.uplink.spool.steps_recorded == 25


def test_a_disk_that_stands_still_for_a_while_holds_no_robot(desk: Desk, disk: Disk) -> None:
    for number in range(5):
        disk.stop()
        desk.record(25, number)
        desk.pass_time(9)
        disk.go_on()
        desk.pass_time(1)
    assert reasons(desk) == []
    assert len(segments(desk.received())) == 15


def test_what_waits_for_the_disk_is_bounded_and_nothing_of_it_is_lost(
    desk: Desk, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_recorder, "_HOLD_BYTES", 40 * 1024)
    monkeypatch.setattr(episode_recorder, "_MOST_BYTES", 80 * 1024)
    disk.stop()
    said = samples.episode()
    desk.control.send(EpisodeStarted(said))
    for tick in range(200):
        desk.control.send(StepRecorded(said.id, samples.step(tick)))
        desk.uplink.poll()
    (reason,) = reasons(desk)
    assert "too slow" in reason
    assert desk.uplink._recorder.unspooled == 9, "the rest is left with control, which holds for that as well"
    for _ in range(60):
        desk.pass_time(1)
    disk.go_on()
    desk.control.send(EpisodeEnded(said.id, "success", 5))
    for _ in range(30):
        desk.pass_time(1)
    assert reasons(desk) == [""]
    sent = {segment.index: segment for segment in segments(desk.received())}
    assert [sent[index].first_tick for index in range(20)] == list(range(0, 200, 10))
    assert sent[19].outcome == "success", "no step came for a minute, for none was taken"


def test_an_acknowledgement_during_a_stall_is_not_lost_and_nothing_is_sent_twice_for_want_of_a_disk(
    desk: Desk, disk: Disk
) -> None:
    desk.record(25)
    sent = segments(desk.received())
    disk.stop()
    desk.server.send("robot-0", Ack(tuple(segment.id for segment in sent[:2])))
    for _ in range(3):
        desk.pass_time(1)
    assert len(desk.uplink.spool) == 3
    for _ in range(4):
        desk.pass_time(1)
    assert {s.id for s in segments(desk.received())} == {sent[2].id}, "what is overdue is in memory"
    disk.go_on()
    desk.pass_time(0.1)
    assert len(desk.uplink.spool) == 1
    desk.server.send("robot-0", Ack((sent[2].id,)))
    desk.uplink.poll()
    assert len(desk.uplink.spool) == 0
    assert not desk.uplink.sender._under_way and not desk.uplink.sender._ready


def test_what_is_dropped_while_it_was_to_be_read_leaves_no_trace(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite", 10 * SIZE)
    for number in range(3):
        for segment in episode(number, 2):
            spool.put(segment)
    handed_out = [spool.index.pop() for _ in range(3)]
    spool.make_room(100 * SIZE)
    loaded = [spool.load(*found) for found in handed_out if found is not None]
    assert [one and one.episode.seed % 10 for one in loaded] == [2, 2, None], "of the newest all was handed out"
    begun = {name for (name,) in spool._db.execute("SELECT episode FROM begun")}
    assert begun <= {name for (name,) in spool._db.execute("SELECT episode FROM segments")}
    spool.close()


def test_weights_wait_for_the_disk_by_themselves(desk: Desk) -> None:
    assert fetch(desk, 1, b"one") == [1]
    disk = Disk(desk.uplink.weights.tasks)
    disk.stop()
    data = bytes(range(256)) * 2000
    desk.server.send("robot-0", VersionAvailable(version(2, data), 5))
    for _ in range(5):
        desk.pass_time(1)
    received = desk.received()
    assert len([message for message in received if isinstance(message, Heartbeat)]) == 5
    assert not any(isinstance(message, FetchWeights) for message in received)
    disk.go_on()
    offered = []
    for _ in range(10):
        desk.pass_time(0.1)
        for request in desk.received(FetchWeights):
            assert isinstance(request, FetchWeights)
            part = data[request.offset : request.offset + request.size]
            desk.server.send("robot-0", WeightBytes(2, request.offset, part))
        offered += [message for message in desk.heard(desk.inference) if isinstance(message, LoadWeights)]
    assert [message.version.number for message in offered] == [2]


# --- real threads and sockets ---------------------------------------------------------------------------------------


class Loop:
    """The uplink's loop as its process runs it, with a gateway on a real socket that answers from a thread."""

    def __init__(self, root: Path) -> None:
        make_keys(root / "keys", ["gateway", "robot-0"])
        self.server = ZmqServer("tcp://127.0.0.1:*", root / "keys")
        self.line = ZmqClient(self.server.endpoint, "robot-0", root / "keys")
        self.control, control = memory_pair()
        self.uplink = Uplink("robot-0", root / "edge", self.line, control, memory_pair()[0], MonotonicClock(), 10)
        self.beats_ns: list[int] = []
        self.came: list[Segment] = []
        self.to_send: list[OperatorCommand] = []
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._serve), threading.Thread(target=self._run)]

    def __enter__(self) -> Loop:
        self.uplink.start()
        for thread in self._threads:
            thread.start()
        self.control.send(Hello("robot-0", "edge", "c", 1, 77, samples.spec(), ("reach",)))
        until(lambda: self.uplink.accepted)
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        self.uplink.close()
        self.line.close()
        self.server.close()

    def _run(self) -> None:
        early = False
        while not self._ends.is_set():
            wait_any([self.line, self.uplink.wakeup.fd], 0.0 if early else POLL_S)
            early = self.uplink.poll()

    def _serve(self) -> None:
        while not self._ends.is_set():
            wait_any([self.server], 0.002)
            while self.to_send:
                self.server.send("robot-0", self.to_send.pop(0))
            while (received := self.server.recv()) is not None:
                message = received[1]
                match message:
                    case Hello(sent_ns=sent_ns) | Heartbeat(sent_ns=sent_ns):
                        self.beats_ns.append(time.monotonic_ns())
                        self.server.send("robot-0", HelloAck(clock_name(), time.monotonic_ns(), sent_ns))
                    case Segment():
                        self.came.append(message)
                        self.server.send("robot-0", Ack((message.id,)))

    def command_s(self) -> float:
        """How long a person's command takes from the gateway to control."""
        began_s = time.monotonic()
        self.to_send.append(OperatorCommand("robot-0", "take_over"))
        while not any(isinstance(message, OperatorCommand) for message in iter(self.control.recv, None)):
            assert time.monotonic() < began_s + 30, "it did not come"
            time.sleep(0.0005)
        return time.monotonic() - began_s


def record(control: MemoryPairEnd, number: int, steps: int = 40) -> None:
    said = samples.episode(number=number)
    control.send(EpisodeStarted(said))
    for tick in range(steps):
        if tick % 4 == 0:
            control.send(FrameRecorded(said.id, "front", Frame(10 * tick + 1, samples.image(tick))))
        control.send(StepRecorded(said.id, samples.step(tick, frame_ns=10 * (tick - tick % 4) + 1)))
    control.send(EpisodeEnded(said.id, "success", 5))


@pytest.mark.slow
@pytest.mark.parametrize("blocked", ["put", "load", "forget"])
def test_beats_and_commands_pass_a_disk_that_blocks_for_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    really = getattr(Spool, blocked)
    stall_s, stalls = 5.0, [True]

    def slow(*args: object) -> object:
        if stalls:
            stalls.clear()
            time.sleep(stall_s)
        return really(*args)

    monkeypatch.setattr(Spool, blocked, slow)
    if blocked == "load":
        monkeypatch.setattr(Spool, "at_hand", lambda *args: None)
    with Loop(tmp_path) as loop:
        began_ns = time.monotonic_ns()
        for number in range(5):
            record(loop.control, number)
        until(lambda: not stalls)
        took = []
        while time.monotonic_ns() - began_ns < stall_s * SECOND:
            took.append(loop.command_s())
            time.sleep(0.05)
        until(lambda: len(loop.came) == 20 and len(loop.uplink.spool) == 0)
        beats_ns = [began_ns, *(beat for beat in loop.beats_ns if beat > began_ns), time.monotonic_ns()]
    assert len(took) > 20
    # Half of them, for tests share their computer; a loop that waited would take seconds for the first.
    assert statistics.median(took) < 0.02 and max(took) < 1.0, sorted(took)
    assert max(b - a for a, b in itertools.pairwise(beats_ns)) < SILENT_AFTER_S * SECOND
    order = [(segment.episode.seed, segment.index) for segment in loop.came]
    assert sorted(order) == [(500_000 + number, index) for number in range(5) for index in range(4)], "each once"
    for number in range(5):
        assert [index for seed, index in order if seed == 500_000 + number] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_with_threads_nothing_is_lost_doubled_or_torn_while_there_is_too_little_room(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    world = World(tmp_path, seed, spool_bytes=60_000)
    put: dict[str, Segment] = {}
    spool, really_put = world.uplink.spool, world.uplink.spool.put

    def put_slowly(segment: Segment, ending: Segment | None = None) -> None:
        time.sleep(draw.choice((0.0, 0.0, 0.003)))
        really_put(segment, ending)
        put[segment.id] = segment

    spool.put = put_slowly  # type: ignore[method-assign]
    world.uplink.start()
    for _ in range(1500):
        if not world.script:
            steps = draw.randrange(5, 45)
            world.record(steps, range(2, 4) if draw.random() < 0.1 else range(0))
        if draw.random() < 0.005:
            world.gateway.stands_still = not world.gateway.stands_still
        world.tick()
        time.sleep(0.0003)
    deadline_s = time.monotonic() + 60
    # How full the spool got hangs on how fast the threads were; too full it gets here at the latest.
    world.gateway.stands_still = True
    while not spool.dropped.steps:
        assert time.monotonic() < deadline_s
        if not world.script:
            world.record(40, range(0))
        world.tick()
        time.sleep(0.0003)
    world.gateway.stands_still = False
    world.uplink.control_gone()
    while len(spool) or world.uplink._recorder.unspooled:
        assert time.monotonic() < deadline_s
        world.tick()
        time.sleep(0.001)
    world.close()
    stored = world.gateway.stored
    missing = [segment for name, segment in put.items() if name not in stored]
    assert spool.dropped.steps == sum(segment.steps for segment in missing) > 0
    assert spool.steps_recorded == sum(segment.steps for segment in put.values())
    assert not any(is_kept(segment) for segment in missing)
    for name in {segment.episode.id for segment in put.values()}:
        there = [segment.index for segment in stored.values() if segment.episode.id == name]
        assert there in ([], sorted(s.index for s in put.values() if s.episode.id == name)), "whole, and in order"


SLOW = """
import random, time
from robot_edge.uplink.spool import Spool
from robot_edge.uplink.spool_index import is_kept
really = Spool.put
def put(self, segment, ending=None):
    time.sleep(random.uniform(0, 0.2))
    really(self, segment, ending)
    time.sleep(random.uniform(0, 0.2))
Spool.put = put
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_kill_while_segments_wait_for_the_disk_leaves_a_beginning_and_one_end(tmp_path: Path, seed: int) -> None:
    control, said = record_channel(tmp_path, samples.spec(), uplink=False), samples.episode()
    with running(SLOW + UPLINK, tmp_path):
        until(lambda: control.send(Hello("robot-0", "edge", "c", 1, os.getpid(), samples.spec(), ("reach",))))
        for message in (EpisodeStarted(said), *(StepRecorded(said.id, samples.step(tick)) for tick in range(100))):
            until(lambda message=message: control.send(message))
        until(lambda: len(spooled(tmp_path)) >= 1)
        time.sleep(random.Random(seed).uniform(0, 0.6))
    left = spooled(tmp_path)
    assert left == [(index, 10, "") for index in range(len(left))] and len(left) < 9, "a beginning without a hole"
    for _ in range(2):
        with running(UPLINK, tmp_path):
            until(lambda: len(spooled(tmp_path)) > len(left))
            time.sleep(0.3)
        assert spooled(tmp_path) == [*left, (len(left), 1, "aborted")]
    control.close()
