"""The control loop with a hosted robot: its pictures lie where its host put them once, for whoever looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hal.drivers.fake import FAKE_TASKS, FakeConfig, FakeRobot
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from robot_edge.control.config import LoopConfig
from robot_edge.control.loop import ControlLoop
from robot_edge.control.mode import HoldReason, Mode
from robot_edge.runtime.process_group import record_channel
from tests.hal.driver_host.test_proxy import hosted, place  # noqa: F401 - a fixture
from wire.clock import ManualClock
from wire.messages import Message
from wire.messages.gateway import EdgeEvent, EdgeStatus, Job, VersionActivated
from wire.messages.local import ChunkReply, ChunkRequest, EpisodeEnded, FrameRecorded, SharedFrameEnvelope, StepRecorded
from wire.transport.frame_ring import FrameRing, SharedFrame, intact, ring_path
from wire.transport.shared_channel import SharedChannel
from wire.types import ActionChunk, Frame, Observation


class Drawing(FakeRobot):
    """Remembers what its camera drew; while `turned`, its pictures have another shape than its spec says."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(FakeConfig(image_px=16, preview_px=24), clock)
        self.drawn: dict[int, list[Frame]] = {}
        """by time: its host may hold it, and it draws again, while the loop's clock stands"""
        self._count = 0
        self.turned = False

    def read(self) -> Observation:
        seen = super().read()
        if self.turned:
            image = np.zeros((16, 12, 3), np.uint8)
            return Observation(seen.time_ns, seen.state, {"front": Frame(seen.time_ns, image)}, seen.task)
        return seen

    def _film(self) -> Frame:
        frame = super()._film()
        # so that no two pictures are alike
        self._count += 1
        frame.image[0, 0] = self._count % 256, self._count // 256, 7
        self.drawn.setdefault(frame.time_ns, []).append(frame)
        return frame

    def drew(self, frame: Frame) -> Frame:
        """What it drew, by the picture."""
        return next(drawn for drawn in self.drawn[frame.time_ns] if np.array_equal(drawn.image, frame.image))


class Bench:
    """A loop, its robot's host in a thread; the test plays inference, which is asked with numbers, and uplink."""

    def __init__(self, socket: Path) -> None:
        self.clock = ManualClock(1_000_000)
        self.driver = Drawing(self.clock)
        spec, run = self.driver.spec, socket.parent
        self._hosted = hosted(self.driver, socket)
        robot = self._hosted.__enter__()
        robot.connect()
        self.uplink, uplink = (record_channel(run, spec, uplink=side) for side in (True, False))
        self.rings = [FrameRing(ring_path(socket, spec), spec, write=False) for _ in range(2)]
        self.inference, inference = (
            SharedChannel(run / "inference-control", bind=bind, ring=ring)
            for bind, ring in zip((True, False), self.rings, strict=True)
        )
        self.loop = ControlLoop(
            "robot-0",
            "session",
            robot,
            uplink,
            inference,
            lambda trained: make_scheduler(ChunkingConfig("aligned"), spec, trained),
            self.clock,
            LoopConfig(max_ticks=40, tail_ticks=2),
        )
        self.said: list[Message] = []
        self.requests: list[ChunkRequest] = []
        self.uplink.send(Job("j", FAKE_TASKS, 500_000))
        self.uplink.send(VersionActivated("robot-0", 3, 0))

    def tick(self, count: int) -> Bench:
        for _ in range(count):
            self.loop.tick()
            while (request := self.inference.recv()) is not None:
                if isinstance(request, ChunkRequest):
                    self.requests.append(request)
                    actions = np.full((16, 4), 0.2, np.float32)
                    chunk = ActionChunk(actions, request.first_tick, self.driver.spec.period_ns, 3, 0, 0)
                    self.inference.send(ChunkReply(chunk, tick=request.tick))
            while (message := self.uplink.recv()) is not None:
                self.said.append(message)
        return self

    def of(self, kind: type) -> list:
        return [message for message in self.said if isinstance(message, kind)]

    def close(self) -> None:
        self.loop.close()
        self._hosted.__exit__(None, None, None)


@pytest.fixture
def bench(place: Path) -> Iterator[Bench]:  # noqa: F811
    made = Bench(place)
    yield made
    made.close()


def test_everybody_sees_what_the_driver_drew_and_inference_where_it_lies(bench: Bench) -> None:
    bench.tick(100)
    assert len(bench.requests) > 8
    for request in bench.requests[-3:]:
        frame = request.observation.images["front"]
        assert isinstance(frame, SharedFrame)
        assert frame.preview is None
        assert intact(request.observation)
        assert bench.driver.drew(frame)
    taken = bench.of(FrameRecorded)
    assert len(taken) > 20
    for message in taken:
        assert np.array_equal(message.frame.preview, bench.driver.drew(message.frame).preview)
    recorded = {message.frame.time_ns for message in taken}
    assert all(set(step.step.frames.values()) <= recorded for step in bench.of(StepRecorded))
    ends = bench.of(EpisodeEnded)
    assert len(ends) == 2
    for end in ends:
        last = [step.step for step in bench.of(StepRecorded) if step.episode_id == end.episode_id][-1]
        assert end.terminal.time_ns > last.time_ns and set(end.terminal.frame_times_ns.values()) <= recorded
        np.testing.assert_allclose(end.terminal.state[:3], last.state[:3] + 0.01 * last.executed[:3], atol=1e-6)


def test_no_pixel_is_sent_to_inference(bench: Bench) -> None:
    bench.tick(3)
    bench.inference._ring = None  # as it lies there
    raw: list[Message] = []
    for _ in range(20):
        bench.loop.tick()
        while (message := bench.inference.recv()) is not None:
            raw.append(message)
    framed = [message for message in raw if isinstance(message, SharedFrameEnvelope)]
    assert framed
    assert all(message.message.observation.images == {} for message in framed)
    assert not any(isinstance(message, ChunkRequest) for message in raw)


def test_pictures_of_another_shape_hold_the_robot_by_name_and_it_goes_on_afterwards(bench: Bench) -> None:
    bench.tick(10)
    assert bench.loop.mode is Mode.policy
    before = len(bench.of(StepRecorded))
    bench.driver.turned = True
    bench.tick(20)
    assert (bench.loop.mode, bench.loop.hold.reason) == (Mode.hold, HoldReason.bad_observation)
    named = "camera 'front': uint8[16, 12, 3], expected uint8[16, 16, 3]"
    assert named in bench.loop.hold.detail
    assert [named in event.detail for event in bench.of(EdgeEvent)] == [True], "people are told once"
    assert named in bench.of(EdgeStatus)[-1].fault
    assert len(bench.of(StepRecorded)) == before
    bench.driver.turned = False
    bench.tick(20)
    assert bench.loop.mode is Mode.policy


def test_a_frame_that_is_lost_before_it_is_recorded_ends_its_episode(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.tick(10)
    with monkeypatch.context() as patched:
        patched.setattr(SharedFrame, "intact", False)
        while not bench.of(EpisodeEnded):
            bench.tick(1)
    assert bench.of(EpisodeEnded)[0].outcome == "aborted"
    assert "overwritten in shared memory before it was copied" in bench.of(EdgeEvent)[-1].detail
    recorded = {message.frame.time_ns for message in bench.of(FrameRecorded)}
    assert all(set(step.step.frames.values()) <= recorded for step in bench.of(StepRecorded))
    bench.tick(20)
    assert bench.loop.mode is Mode.policy
    assert bench.of(StepRecorded)[-1].step.tick < 20, "another episode"
