"""Thinking elsewhere: in another process, on another machine, slowly; and what happens when that one dies."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.paced_slow_path import PacedSlowPath
from robot_edge.inference.latent_server import LatentEncoder, LatentServer, LatentWorker
from robot_edge.inference.server import Inference, SlowConfig
from robot_edge.inference.slow_path import InlineSlowPath, ProcessSlowPath, RemoteSlowPath
from tests.robot_edge.inference.thinking import Scripted, seen, version
from wire.clock import ManualClock, MonotonicClock
from wire.errors import ConfigError
from wire.messages.gateway import (
    FetchWeights,
    Heartbeat,
    Hello,
    HelloAck,
    ReintroduceRequest,
    Rejection,
    ThinkVersions,
    VersionAvailable,
    WeightBytes,
)
from wire.messages.local import ChunkReply, ChunkRequest, LoadWeights, ThinkReply, ThinkRequest
from wire.transport.channel import Channel
from wire.transport.frame_ring import FrameRing
from wire.transport.keys import make_keys
from wire.transport.memory_channel import MemoryServer, memory_pair
from wire.transport.shared_channel import SharedChannel
from wire.transport.zmq_channel import ZmqClient, ZmqServer
from wire.types import Frame, Observation, PolicyVersion

MS = 1_000_000


# --- a given pace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hz", [1.0, 2.0, 5.0])
def test_a_given_pace_on_a_simulated_clock(hz: float) -> None:
    clock, policy = ManualClock(), Scripted()
    policy.load(b"good", 1)
    slow = PacedSlowPath(InlineSlowPath(policy), clock, hz)
    asked: dict[int, int] = {}
    for _ in range(1000):
        now = clock.now_ns()
        before = len(policy.thoughts)
        slow.request(seen(now), (1,))
        if len(policy.thoughts) > before:
            asked[now] = now
        for thought in slow.pop():
            # Visible a period after it was asked for, at the next moment that somebody looks.
            assert 0 <= now - asked.pop(thought.seen_ns) - round(1e9 / hz) < 10 * MS
        clock.advance(10 * MS)
    assert abs(len(policy.thoughts) - 10 * hz) <= 1
    assert len(asked) <= 2


def test_latency_and_pace_are_apart() -> None:
    clock, policy = ManualClock(), Scripted()
    policy.load(b"good", 1)
    slow = PacedSlowPath(InlineSlowPath(policy), clock, 10.0, latency_s=0.25)
    came = []
    for _ in range(100):
        slow.request(seen(clock.now_ns()), (1,))
        came += [(clock.now_ns() - thought.seen_ns) // MS for thought in slow.pop()]
        clock.advance(10 * MS)
    assert came == [250] * 8


@pytest.mark.parametrize(("hz", "latency_s"), [(0.0, None), (-1.0, 0.1), (1.0, -0.1)])
def test_a_pace_that_cannot_be(hz: float, latency_s: float | None) -> None:
    with pytest.raises(ConfigError, match="positive pace"):
        PacedSlowPath(InlineSlowPath(), ManualClock(), hz, latency_s)


# --- another process, by hand ----------------------------------------------------------------------------------------


class Beside:
    """A slow path and a thinking process, turned by hand."""

    def __init__(self) -> None:
        near, self.far = memory_pair()
        self.clock = ManualClock(1000)
        self.slow = ProcessSlowPath(near, self.clock, timeout_s=1.0)
        self._held = tempfile.TemporaryDirectory()
        for name, data in (("v1", b"1"), ("v2", b"2"), ("v3", b"3"), ("other", b"X"), ("bad", b"bad")):
            self.path(name).write_bytes(data)
        self.restart()

    def restart(self) -> None:
        self.thinker = LatentEncoder(Scripted)
        self.process = LatentWorker(self.far, self.thinker)

    def path(self, name: str) -> Path:
        return Path(self._held.name) / name

    def adopt(self, number: int) -> None:
        self.slow.adopt(Scripted(), version(number, self.path(f"v{number}")), str(self.path(f"v{number}")))


def test_a_thought_comes_back_with_what_was_asked() -> None:
    beside = Beside()
    beside.adopt(1)
    beside.slow.request(seen(70, "push"), (1,))
    assert beside.slow.pop() == []
    beside.process.poll()
    (thought,) = beside.slow.pop()
    assert (thought.seen_ns, thought.made_from_ns, thought.task) == (70, 80, "push")
    assert (thought.latent.version, thought.latent.data[0]) == (1, ord("1"))
    assert beside.slow.pop() == []


def test_one_thought_at_a_time_and_again_when_it_is_lost() -> None:
    beside = Beside()
    beside.adopt(1)
    for frame in (10, 20, 30):
        beside.slow.request(seen(frame), (1,))
    lost = [beside.far.recv() for _ in range(4)]
    assert [type(message) for message in lost] == [LoadWeights, ThinkRequest, type(None), type(None)]
    beside.clock.advance(1000 * MS)
    beside.slow.request(seen(40), (1,))
    assert beside.slow.problem == "no answer within 1 s"
    # An answer to the question that was given up is not taken for one to the new question.
    request = lost[1]
    assert isinstance(request, ThinkRequest)
    late = Scripted()
    late.load(b"1", 1)
    beside.far.send(ThinkReply(request.number, late.think(seen(10)), (1,)))
    assert beside.slow.pop() == []
    beside.process.poll()
    beside.process.poll()
    assert beside.slow.pop() == []
    assert "but has none" in beside.slow.problem


def test_a_thinker_that_forgot_everything_is_told_again() -> None:
    beside = Beside()
    beside.adopt(1)
    beside.slow.request(seen(10), (1,))
    beside.process.poll()
    assert len(beside.slow.pop()) == 1
    beside.restart()
    beside.slow.request(seen(20), (1,))
    beside.process.poll()
    assert beside.slow.pop() == []
    assert beside.slow.problem == "asked to think with version 1, but has none."
    beside.slow.request(seen(30), (1,))
    beside.process.poll()
    (thought,) = beside.slow.pop()
    assert thought.seen_ns == 30
    assert beside.slow.problem == ""


def test_the_wanted_version_first_and_the_old_one_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    beside = Beside()
    thinker, path = beside.thinker, beside.path
    thinker.load(version(1, path("v1")), path("v1"))
    assert thinker.answer(ThinkRequest(1, (2, 1), seen(10))).latent.version == 1  # type: ignore[union-attr]
    assert not thinker.load(version(2, path("bad")), path("bad"))
    assert "version 2 is not thought with: no weights" in caplog.text
    assert not thinker.load(version(2), Path("/nowhere/at/all"))
    assert thinker.load(version(2, path("v2")), path("v2"))
    assert not thinker.load(version(3, path("bad")), path("bad"))
    assert thinker.versions == (1, 2)
    for wanted in ((2, 1), (1,), (2,)):
        latent = thinker.answer(ThinkRequest(1, wanted, seen(10))).latent
        assert latent is not None
        assert (latent.version, latent.data[0]) == (wanted[0], ord(str(wanted[0])))
    thinker.load(version(3, path("v3")), path("v3"))
    assert thinker.versions == (2, 3)
    reply = thinker.answer(ThinkRequest(9, (1,), seen(10)))
    assert (reply.number, reply.latent, reply.versions) == (9, None, (2, 3))
    assert reply.error == "asked to think with version 1, but has 2 or 3."
    # The same number from another history takes the place of the one that had it.
    thinker.load(version(3, path("other")), path("other"))
    latent = thinker.answer(ThinkRequest(1, (3,), seen(10))).latent
    assert latent is not None
    assert (thinker.versions, latent.data[0]) == ((2, 3), ord("X"))


BOMB = b"\xff\xd8\xff\xc0\x00\x0b\x08\xff\xff\xff\xff\x01\x01\x11\x00\xff\xd9"
"""a JPEG file of a few bytes that claims 65535x65535 pixels"""


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ThinkRequest(1, (1,), Observation(1, np.zeros(3, np.float32), {}, "")), "state of shape"),
        (ThinkRequest(1, (1,), Observation(1, np.zeros(4, np.float32), {}, "")), "no image of camera 'front'"),
        (ThinkRequest(1, (1,), seen(1), {"front": b"no picture"}), "'front' is no JPEG"),
        (ThinkRequest(1, (1,), seen(1), {"front": b""}), "'front' is no JPEG"),
        (ThinkRequest(1, (1,), seen(1), {"front": BOMB}), "'front' is no JPEG of a size that is decoded"),
        (ThinkRequest(1, (1,), seen(1), {"wrist": b"x"}), "camera 'wrist' without its time"),
    ],
)
def test_a_request_that_makes_no_sense_is_answered_with_the_reason(request_: ThinkRequest, words: str) -> None:
    beside = Beside()
    beside.thinker.load(version(1, beside.path("v1")), beside.path("v1"))
    assert words in beside.thinker.answer(request_).error


# --- a think server --------------------------------------------------------------------------------------------------


def smooth(frame_ns: int, value: int) -> Observation:
    image = np.full((8, 8, 3), value, np.uint8)
    return Observation(frame_ns, np.zeros(4, np.float32), {"front": Frame(frame_ns, image, image)}, "reach")


class Served:
    """A think server between a gateway and robots, all in memory."""

    def __init__(self, weights: Path, most: int = 2) -> None:
        self.gateway, end = memory_pair()
        self.robots = MemoryServer()
        self.clock = ManualClock()
        self.made: list[Scripted] = []
        self.server = LatentServer("thinker-0", self.robots, end, LatentEncoder(self.make, most), weights, self.clock)
        self.data = b"weights of version 7"

    def make(self) -> Scripted:
        self.made.append(Scripted())
        return self.made[-1]

    def line(self, name: str) -> RemoteSlowPath:
        return RemoteSlowPath(self.robots.connect(name), self.clock)

    def publish(self) -> None:
        made = PolicyVersion(7, hashlib.sha256(self.data).hexdigest(), len(self.data), 0, 0, 0, 0)
        self.gateway.send(ThinkVersions((7,)))
        self.gateway.send(VersionAvailable(made, 1))
        self.server.poll()
        while (message := self.gateway.recv()) is not None:
            if isinstance(message, FetchWeights):
                self.gateway.send(WeightBytes(7, message.offset, self.data[message.offset :]))
        self.server.poll()


def test_a_think_server_follows_the_gateway(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.server.poll()
    hello = served.gateway.recv()
    assert isinstance(hello, Hello)
    assert (hello.name, hello.role) == ("thinker-0", "thinker")
    served.gateway.send(Rejection("no"))
    served.server.poll()
    assert served.server.subscriber.session.rejection == "no"
    served.gateway.send(HelloAck("gateway", 1, 2))
    served.clock.advance(2_000 * MS)
    served.server.poll()
    assert served.server.subscriber.session.rejection == ""
    assert isinstance(served.gateway.recv(), Heartbeat)
    served.gateway.send(ReintroduceRequest())
    served.server.poll()
    assert isinstance(served.gateway.recv(), Hello)
    served.publish()
    assert served.server._encoder.versions == (7,)


def offer(served: Served, number: int, data: bytes) -> None:
    made = PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), 0, 0, 0, 0)
    served.gateway.send(VersionAvailable(made, 1))


def serve(served: Served, files: dict[int, bytes], seconds: float = 1.0) -> None:
    """Answer what the think server asks for."""
    for _ in range(round(100 * seconds)):
        served.clock.advance(10 * MS)
        served.server.poll()
        while (message := served.gateway.recv()) is not None:
            if isinstance(message, FetchWeights) and message.number in files:
                served.gateway.send(
                    WeightBytes(message.number, message.offset, files[message.number][message.offset :])
                )


def test_it_thinks_with_as_many_versions_as_may_act(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served, files = Served(tmp_path, most=3), {number: bytes([number]) * 9 for number in range(1, 7)}
    served.gateway.send(ThinkVersions((3, 1, 2)))
    for number in (1, 2, 3):
        offer(served, number, files[number])
    serve(served, files)
    encoder = served.server._encoder
    assert encoder.versions == (3, 1, 2), "the most wanted first, and each of them"
    # the one that nobody acts by any more stays until its place is needed
    served.gateway.send(ThinkVersions((4, 2)))
    offer(served, 4, files[4])
    serve(served, files)
    assert encoder.versions == (1, 2, 4)
    served.gateway.send(ThinkVersions((4, 2, 5)))
    offer(served, 5, files[5])
    serve(served, files)
    assert encoder.versions == (2, 4, 5)
    # one called back to
    served.gateway.send(ThinkVersions((1, 5)))
    offer(served, 1, files[1])
    serve(served, files)
    assert set(encoder.versions) == {4, 5, 1}
    assert len(served.made) == 3, "policies are used again"
    # more than fit
    served.gateway.send(ThinkVersions((5, 1, 6, 2)))
    for number in (6, 2):
        offer(served, number, files[number])
    serve(served, files)
    assert set(encoder.versions) == {5, 1, 6}
    said = "robots may act by 4 versions at once, and this think server keeps 3: version 2 is not thought with."
    assert said in caplog.text
    for number, robot in ((6, "robot-0"), (2, "robot-1")):
        line = served.line(robot)
        line.request(smooth(100, 40), (number,))
        served.server.poll()
        assert bool(line.pop()) == (number == 6)
        assert (said in line.problem and "--versions 4" in line.problem) == (number == 2)
    # and again none too many
    served.gateway.send(ThinkVersions((5, 2)))
    offer(served, 2, files[2])
    serve(served, files)
    assert {5, 2} <= set(encoder.versions)


def test_a_version_that_cannot_be_had_keeps_no_other_one_waiting(tmp_path: Path) -> None:
    served, files = Served(tmp_path, most=3), {1: b"1" * 9, 2: b"bad", 3: b"3" * 9}
    served.gateway.send(ThinkVersions((2, 7, 3, 1)))
    for number, data in files.items():
        offer(served, number, data)
    serve(served, files)
    assert served.server._encoder.versions == (3,), "the fourth has no place"
    # announced again, it is right
    files[2] = b"2" * 9
    offer(served, 2, files[2])
    serve(served, files)
    assert set(served.server._encoder.versions) == {3, 2}


def test_several_robots_are_served_in_turn(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.publish()
    lines = {name: served.line(name) for name in ("robot-0", "robot-1", "robot-2")}
    for at, line in enumerate(lines.values()):
        line.request(smooth(100 + at, 40 * at), (7,))
    for _ in lines:
        served.server.poll()
    assert not served.server._waiting
    for at, line in enumerate(lines.values()):
        (thought,) = line.pop()
        assert thought.seen_ns == 100 + at
        assert abs(thought.latent.data[2] - 40 * at) <= 2
    assert served.made[-1].thoughts == [100, 101, 102]


def test_what_can_wait_comes_after_all_others(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.publish()
    shadow, acting = served.robots.connect("robot-0@2"), served.robots.connect("robot-0")
    shadow.send(ThinkRequest(1, (7,), seen(1), can_wait=True))
    for number in (2, 3):
        acting.send(ThinkRequest(number, (7,), seen(number)))
        served.server.poll()
    assert served.made[-1].thoughts == [2, 3]
    served.server.poll()
    assert served.made[-1].thoughts == [2, 3, 1]


@pytest.mark.slow
def test_a_robot_and_its_shadow_ask_by_one_key(tmp_path: Path) -> None:
    """Real ZeroMQ: the answer to one never goes to the other."""
    make_keys(tmp_path / "keys", ["gateway", "robot-0"])
    robots = ZmqServer("tcp://127.0.0.1:*", tmp_path / "keys", apart=True)
    thinker = LatentEncoder(Scripted)
    for number in (1, 2):
        (tmp_path / f"v{number}").write_bytes(bytes([number]))
        thinker.load(version(number, tmp_path / f"v{number}"), tmp_path / f"v{number}")
    server = LatentServer("thinker", robots, memory_pair()[0], thinker, tmp_path / "cache", MonotonicClock())
    lines = [ZmqClient(robots.endpoint, "robot-0", tmp_path / "keys") for _ in range(2)]
    paths = [RemoteSlowPath(line, MonotonicClock(), can_wait=bool(number)) for number, line in enumerate(lines)]
    got: list[list[int]] = [[], []]
    deadline = time.monotonic() + 60
    while min(map(len, got)) < 50:
        assert time.monotonic() < deadline, got
        assert not any("no answer" in path.problem for path in paths)
        for number, path in enumerate(paths, 1):
            now = time.monotonic_ns()
            path.request(smooth(now, 40), (number,))
            got[number - 1] += [thought.latent.version for thought in path.pop()]
        time.sleep(0.005)
        for _ in range(2):
            server.poll()
    assert [set(one) for one in got] == [{1}, {2}]
    for path in paths:
        path.close()
    robots.close()


def test_nobody_but_robots_is_thought_for(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.publish()
    for name in ("trainer", "console", "demonstrator", "gateway"):
        other = served.robots.connect(name)
        other.send(ThinkRequest(1, (7,), seen(1)))
        served.server.poll()
        answer = other.recv()
        assert isinstance(answer, Rejection) and "questions of robots alone" in answer.reason
    assert all(made.thoughts == [] for made in served.made)


def test_a_robot_that_asks_much_does_not_push_in(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.publish()
    eager, patient = served.robots.connect("eager"), served.robots.connect("patient")
    eager.send(ThinkRequest(1, (7,), seen(1)))
    patient.send(ThinkRequest(1, (7,), seen(2)))
    for number in range(2, 6):
        eager.send(ThinkRequest(number, (7,), seen(number)))
    eager.send(Heartbeat(1))
    served.server.poll()
    served.server.poll()
    assert served.made[-1].thoughts == [5, 2]
    assert isinstance(eager.recv(), Rejection)


# --- real processes --------------------------------------------------------------------------------------------------


@contextmanager
def running(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()  # type: ignore[union-attr]


class Robot:
    """Inference with a slow path elsewhere, asked about new frames as control would."""

    def __init__(self, slow: ProcessSlowPath, fallback: str, ring: FrameRing | None = None, place: Path | None = None):
        near: Channel
        far: Channel
        near, far = memory_pair()
        if ring is not None and place is not None:
            written = FrameRing(place / "frames", Scripted.spec, write=True)
            near = SharedChannel(place / "control", bind=False, ring=written)
            far = SharedChannel(place / "control", bind=True, ring=ring)
        self.control = near
        self.uplink, uplink = memory_pair()
        self.policy = Scripted()
        config = SlowConfig(max_age_s=0.4, fallback=fallback)
        self.inference = Inference("r", self.policy, far, uplink, MonotonicClock(), slow=slow, config=config)
        self.tick = 0

    def load(self, number: int, path: Path) -> None:
        path.write_bytes(bytes([number]))
        self.uplink.send(LoadWeights(version(number, path), str(path)))
        self.inference.poll()

    def ask(self) -> ChunkReply:
        self.tick += 1
        now = time.monotonic_ns()
        made = seen(now, time_ns=now)
        self.control.send(ChunkRequest(self.tick, made, self.tick, made.state))
        self.inference.poll()
        reply = self.control.recv()
        assert isinstance(reply, ChunkReply)
        return reply

    @property
    def slow_path_stands(self) -> bool:
        """Whether the last chunk was made from a thought of elsewhere."""
        last, number = self.inference._seen, self.policy.version
        return last is not None and self.inference._fresh(last, number) is not None

    def until(self, wanted: Callable[[ChunkReply], bool], within_s: float = 60.0) -> ChunkReply:
        deadline = time.monotonic() + within_s
        while not wanted(reply := self.ask()):
            assert time.monotonic() < deadline, reply
            time.sleep(0.01)
        return reply


BESIDE = """
import sys
from pathlib import Path
from robot_edge.inference.latent_server import LatentEncoder, LatentWorker
from tests.robot_edge.inference.thinking import Scripted
from wire.transport.frame_ring import FrameRing
from wire.transport.shared_channel import SharedChannel
from wire.transport.zmq_channel import wait_any
place = Path(sys.argv[1])
ring = FrameRing(place / "frames", Scripted.spec, write=False)
line = SharedChannel(place / "think", bind=True, ring=ring)
process = LatentWorker(line, LatentEncoder(Scripted))
print("ready", flush=True)
while True:
    wait_any([line], 0.1)
    process.poll()
"""


def test_a_thinking_process_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Frames lie in shared memory, weights on disk: the successor needs neither a word from control nor a restart."""
    ring = FrameRing(tmp_path / "frames", Scripted.spec, write=False)
    line = SharedChannel(tmp_path / "think", bind=False, ring=ring)
    robot = Robot(ProcessSlowPath(line, MonotonicClock(), timeout_s=0.3), "hold", ring, tmp_path)
    with running(BESIDE, str(tmp_path)) as process:
        robot.load(3, tmp_path / "weights")
        assert robot.until(lambda reply: reply.chunk is not None).chunk.version == 3  # type: ignore[union-attr]
        process.kill()
        process.wait(60)
        silent = robot.until(lambda reply: reply.chunk is None)
        assert "the slow path is silent for 0.4" in silent.error
        robot.until(lambda reply: "not there" in reply.error)
    with running(BESIDE, str(tmp_path)):
        robot.until(lambda reply: reply.chunk is not None)
    assert robot.policy.thoughts == [], "nothing was thought here"
    robot.inference.close()


SERVER = """
import sys
from pathlib import Path
from robot_edge.inference.latent_server import LatentEncoder, LatentServer
from tests.robot_edge.inference.thinking import Scripted, version
from wire.clock import MonotonicClock
from wire.transport.memory_channel import memory_pair
from wire.transport.zmq_channel import ZmqServer
place, endpoint, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
thinker = LatentEncoder(Scripted)
(place / f"v{number}").write_bytes(bytes([number]))
thinker.load(version(number, place / f"v{number}"), place / f"v{number}")
robots = ZmqServer(endpoint, place / "keys")
server = LatentServer("thinker-0", robots, memory_pair()[0], thinker, place / "cache", MonotonicClock())
print("ready", flush=True)
while True:
    robots.socket.poll(20)
    server.poll()
"""


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
def test_the_link_to_a_think_server_dies_and_is_mended(tmp_path: Path) -> None:
    """Real ZeroMQ with keys on loopback: chunks from there, then the fallbacks, then chunks from there again."""
    keys, endpoint = tmp_path / "keys", free_endpoint()
    make_keys(keys, ["gateway", "robot-hold", "robot-local"])
    robots = {}
    for fallback in ("hold", "local"):
        name = f"robot-{fallback}"
        line = ZmqClient(endpoint, name, keys)
        robots[fallback] = robot = Robot(RemoteSlowPath(line, MonotonicClock(), timeout_s=1.5), fallback)
        robot.load(3, tmp_path / "weights")
    holding, local = robots["hold"], robots["local"]
    thoughts = local.policy.thoughts

    with running(SERVER, str(tmp_path), endpoint, "3") as server:
        holding.until(lambda reply: reply.chunk is not None)
        local.until(lambda _: local.slow_path_stands)
        here = len(thoughts)
        for _ in range(10):
            assert holding.ask().chunk is not None
            assert local.ask().chunk is not None
            time.sleep(0.01)
        assert len(thoughts) == here, "nothing is thought here while the link stands"
        server.kill()
        server.wait(60)
        holding.until(lambda reply: "the slow path is silent" in reply.error)
        holding.until(lambda reply: "link to the think server is down" in reply.error)
        local.until(lambda reply: reply.chunk is not None and len(thoughts) > here + 5)
        assert local.ask().chunk is not None
    with running(SERVER, str(tmp_path), endpoint, "3"):
        holding.until(lambda reply: reply.chunk is not None)
        local.until(lambda _: local.slow_path_stands)
    assert holding.policy.thoughts == []
    for robot in robots.values():
        robot.inference.close()


def test_a_new_version_waits_for_a_think_server_that_has_it(tmp_path: Path) -> None:
    """The server is slower to fetch it: the robot goes on with the old version and both switch together."""
    served = Served(tmp_path)
    thinker = served.server._encoder
    for number in (1, 2):
        (tmp_path / str(number)).write_bytes(bytes([number]))
    thinker.load(version(1, tmp_path / "1"), tmp_path / "1")
    near, far = memory_pair()
    uplink, inference_uplink = memory_pair()
    clock = MonotonicClock()
    inference = Inference(
        "r",
        Scripted(),
        far,
        inference_uplink,
        clock,
        standby=Scripted(),
        slow=served.line("robot-0"),
    )
    made: list[int] = []

    def ask(tick: int) -> None:
        observation = seen(1000 + tick, time_ns=2000 + tick)
        near.send(ChunkRequest(tick, observation, tick, observation.state))
        inference.poll()
        served.server.poll()
        reply = near.recv()
        assert isinstance(reply, ChunkReply)
        made.append(reply.chunk.version if reply.chunk else 0)

    uplink.send(LoadWeights(version(1, tmp_path / "1"), str(tmp_path / "1")))
    deadline = time.monotonic() + 60
    while not made or made[-1] != 1:
        ask(len(made))
        assert time.monotonic() < deadline
    uplink.send(LoadWeights(version(2, tmp_path / "2"), str(tmp_path / "2")))
    while inference._swap.waiting is None:
        ask(len(made))
        assert time.monotonic() < deadline
    started = len(made)
    for _ in range(20):
        ask(len(made))
    assert set(made[started:]) == {1}
    thinker.load(version(2, tmp_path / "2"), tmp_path / "2")
    for _ in range(4):
        ask(len(made))
    assert made[-1] == 2
    assert 0 not in made[started:]
    inference.close()
