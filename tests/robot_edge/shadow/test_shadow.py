"""A shadow makes the same chunks again with another version; what it computes is measured and never acts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robot_edge.inference.server import Inference
from robot_edge.inference.slow_path import InlineSlowPath, SlowPath
from robot_edge.runtime.memory import AvailableMemory
from robot_edge.shadow import memory
from robot_edge.shadow.runner import ShadowRunner
from robot_edge.shadow.tap import ShadowTap
from tests.robot_edge.inference.thinking import Scripted, seen, version
from wire.clock import ManualClock
from wire.errors import PolicyError
from wire.messages.gateway import Hello, ShadowReport, VersionActivated
from wire.messages.local import ChunkReply, ChunkRequest, ChunkSample, LoadShadow, LoadWeights
from wire.transport.memory_channel import memory_pair
from wire.types import ActionChunk, Frame, Latent, Observation, Prefix
from wire.weights.action_difference import ActionDifference

SECOND = 1_000_000_000
LOW, HIGH = Scripted.spec.action_low(), Scripted.spec.action_high()


class Moving(Scripted):
    """Its actions lie as far into each dimension's range as its weights' first byte says, in percent, and a percent of
    the seed's last digit."""

    history = 0

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []

    def act(
        self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None, seed: int = 0
    ) -> ActionChunk:
        made = super().act(observation, latent, tick, prefix)
        seed = seed or 1 + len(self.acted) % 9
        self.seeds.append(seed)
        place = np.float32(self.weights[0] / 100 + seed / 100)
        if self.weights[0] == 200:
            place = np.float32(np.nan)
        actions = np.tile(LOW + place * (HIGH - LOW), (self.horizon, 1)).astype(np.float32)
        if prefix is not None:
            actions[: prefix.committed] = prefix.actions[: prefix.committed]
        if not np.isfinite(actions).all():
            raise PolicyError(f"version {self.version} gave actions that are not finite")
        if self.weights[0] == 201:
            raise RuntimeError("boom")
        return msgspec.structs.replace(made, actions=actions, seed=seed)


class Robot:
    """Inference and its shadow process between a test's control and uplink, all in memory."""

    def __init__(self, root: Path, remote: SlowPath | None = None) -> None:
        self.root, self.clock, self.remote = root, ManualClock(SECOND), remote
        self.control, control = memory_pair()
        self.uplink, uplink = memory_pair()
        self.shadow, self._shadow_uplink = memory_pair()
        near, self._samples = memory_pair()
        self.policy, self.standby = Moving(), Moving()
        self.inference = Inference(
            "r", self.policy, control, uplink, self.clock, standby=self.standby, tap=ShadowTap(near)
        )
        self.reports: list[ShadowReport] = []
        self.chunks: list[ActionChunk] = []
        self.told: list[int] = []
        self.made: list[Moving] = []
        self.start_shadow()

    def start_shadow(self) -> None:
        """As after a kill."""
        self.runner = ShadowRunner(
            "r",
            self._make,
            self._shadow_uplink,
            self._samples,
            self.clock,
            remote=self.remote,  # type: ignore[arg-type]
        )

    def _make(self) -> Moving:
        self.made.append(Moving())
        return self.made[-1]

    def file(self, number: int, byte: int) -> Path:
        path = self.root / f"{number}-{byte}"
        path.write_bytes(bytes([byte]))
        return path

    def act_by(self, number: int, byte: int) -> None:
        path = self.file(number, byte)
        self.uplink.send(LoadWeights(version(number, path), str(path)))
        self.inference.poll()
        while (loading := self.inference._swap._loading) is not None:
            loading[1].exception(5.0)
            self.inference.poll()

    def compute(self, number: int, byte: int) -> None:
        path = self.file(number, byte)
        self.shadow.send(LoadShadow(version(number, path), str(path)))
        self.runner.poll()

    def tick(self, count: int = 1, prefix: Prefix | None = None) -> None:
        for _ in range(count):
            self.clock.advance(SECOND // 10)
            now_ns = self.clock.now_ns()
            made = seen(now_ns, time_ns=now_ns)
            self.control.send(ChunkRequest(now_ns, made, now_ns, made.state, prefix))
            self.inference.poll()
            self.runner.poll()
            while (message := self.uplink.recv()) is not None:
                if isinstance(message, VersionActivated):
                    self.told.append(message.number)
            while (reply := self.control.recv()) is not None:
                assert isinstance(reply, ChunkReply)
                if reply.chunk is not None:
                    self.chunks.append(reply.chunk)
            while (message := self.shadow.recv()) is not None:
                if isinstance(message, ShadowReport):
                    self.reports.append(message)

    def found(self, number: int) -> tuple[ActionDifference, int, str]:
        """Of all reports of a version: how far apart, failed chunks, the newest fault."""
        mine = [report for report in self.reports if report.number == number]
        difference = ActionDifference()
        for report in mine:
            difference = difference.plus(report.difference)
        return difference, sum(report.faults for report in mine), mine[-1].fault if mine else ""


@pytest.fixture
def robot(tmp_path: Path) -> Iterator[Robot]:
    made = Robot(tmp_path)
    yield made
    made.inference.close()


def test_it_is_computed_from_the_same_observation_and_noise_and_the_difference_is_measured(robot: Robot) -> None:
    robot.act_by(1, 10)
    robot.compute(2, 30)
    robot.tick(200)
    difference, faults, fault = robot.found(2)
    assert (faults, fault) == (0, "")
    assert difference.chunks >= 10
    # every action of theirs lies a fifth of its range apart, whatever the seed
    assert difference.mean == pytest.approx(0.2, abs=1e-5)
    assert max(difference.largest) == pytest.approx(0.2, abs=1e-5) and len(difference.largest) == len(LOW)
    assert 0.2 <= difference.p95 * 1.0001 <= 0.225
    (shadow,) = robot.made
    acted = {chunk.first_tick: chunk.seed for chunk in robot.chunks}
    for (observation, _, tick, _), seed in zip(shadow.acted, shadow.seeds, strict=True):
        assert acted[tick] == seed and observation.time_ns == tick
    assert set(shadow.thoughts) <= set(robot.inference._swap.active.thoughts)  # type: ignore[attr-defined]


def test_what_is_committed_already_is_not_compared(robot: Robot) -> None:
    robot.act_by(1, 10)
    robot.compute(2, 30)
    robot.tick(100, Prefix(np.tile(LOW, (2, 1)).astype(np.float32), 2))
    difference, _, _ = robot.found(2)
    assert difference.chunks and difference.values == difference.chunks * 2 * len(LOW)


def test_it_takes_a_small_share_of_the_time(robot: Robot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of work at a time."""
    robot.act_by(1, 10)
    robot.compute(2, 30)
    think = Moving.think

    def slow(self: Moving, observation: Observation) -> Latent:
        if self in robot.made:
            robot.clock.advance(SECOND)
        return think(self, observation)

    monkeypatch.setattr(Moving, "think", slow)
    robot.tick(1000)
    difference, _, _ = robot.found(2)
    worked_s, passed_s = len(robot.made[0].acted), (robot.clock.now_ns() - SECOND) / SECOND
    assert difference.chunks >= 3 and worked_s <= 0.06 * passed_s


@pytest.mark.parametrize(("byte", "words"), [(200, "not finite"), (201, "boom")])
def test_one_that_fails_is_reported_and_harms_nothing(robot: Robot, byte: int, words: str) -> None:
    robot.act_by(1, 10)
    robot.compute(2, byte)
    robot.tick(200)
    difference, faults, fault = robot.found(2)
    assert difference.chunks == 0 and faults >= 10 and words in fault
    assert len(robot.chunks) == 200 and {chunk.version for chunk in robot.chunks} == {1}
    # another one follows
    robot.compute(3, 12)
    robot.tick(100)
    assert robot.found(3)[0].mean == pytest.approx(0.02, abs=1e-5)


@pytest.mark.parametrize("why", ["bad weights", "changed file", "no memory", "history", "no policy"])
def test_a_robot_that_cannot_compute_it_says_why(robot: Robot, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    robot.act_by(1, 10)
    path = robot.file(2, 30)
    announced = version(2, path)
    if why == "bad weights":
        path.write_bytes(b"bad")
        announced = version(2, path)
    elif why == "changed file":
        path.write_bytes(b"other")
    elif why == "no memory":
        monkeypatch.setattr(memory, "available_memory", lambda: AvailableMemory(100_000_000, "here"))
    elif why == "history":
        monkeypatch.setattr(Moving, "history", 1)
    else:

        def broken() -> Moving:
            raise ImportError("no torch")

        robot._make = broken  # type: ignore[method-assign]
        robot.start_shadow()
    robot.shadow.send(LoadShadow(announced, str(path)))
    robot.tick(100)
    difference, _, fault = robot.found(2)
    words = {
        "bad weights": "no weights",
        "changed file": "not what arrived",
        "no memory": "100 MB are available",
        "history": "earlier ticks",
        "no policy": "no torch",
    }
    assert difference.chunks == 0 and "cannot be computed here" in fault and words[why] in fault
    assert len(robot.chunks) == 100


def test_memory_is_judged_by_what_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    (tmp_path / "weights").write_bytes(b"x")
    resident = memory._resident_bytes(os.getpid())
    assert resident > 10_000_000

    def available(size: int) -> None:
        monkeypatch.setattr(memory, "available_memory", lambda: AvailableMemory(size + 256 * 2**20, "here"))

    available(resident + 10_000_000_000)
    memory.require_memory(tmp_path / "weights", os.getpid())
    available(resident // 2)
    with pytest.raises(PolicyError, match="are available"):
        memory.require_memory(tmp_path / "weights", os.getpid())
    memory.require_memory(tmp_path / "weights", 0)


def test_it_says_hello_and_ends_when_told_to(robot: Robot) -> None:
    robot.runner.hello()
    assert isinstance(robot.shadow.recv(), Hello)
    robot.act_by(1, 10)
    robot.compute(2, 30)
    robot.tick(50)
    count = robot.found(2)[0].chunks
    robot.shadow.send(LoadShadow(None))
    robot.tick(100)
    assert robot.found(2)[0].chunks in (count, count + 1, count + 2) and robot.runner._policy is None


class Elsewhere(InlineSlowPath):
    """Another machine, whose thoughts come a look later."""

    immediate = False

    def __init__(self, policy: Scripted) -> None:
        super().__init__(policy)
        self.late: list = []

    def pop(self) -> list:
        came, self.late = self.late, super().pop()
        return came


def test_it_may_be_thought_for_elsewhere(tmp_path: Path) -> None:
    thinker = Moving()
    thinker.load(bytes([30]), 2)
    robot = Robot(tmp_path, Elsewhere(thinker))
    robot.act_by(1, 10)
    robot.compute(2, 30)
    robot.tick(200)
    difference, faults, fault = robot.found(2)
    assert difference.chunks > 3 and faults == 0, fault
    assert difference.mean == pytest.approx(0.2, abs=1e-5)
    assert robot.made[0].thoughts == []
    # nobody there thinks with it
    robot.compute(3, 40)
    robot.tick(600)
    difference, faults, fault = robot.found(3)
    assert difference.chunks == 0 and faults >= 1 and "nobody thinks with this version" in fault
    robot.inference.close()


def test_frames_that_were_overwritten_are_not_compared(robot: Robot, monkeypatch: pytest.MonkeyPatch) -> None:
    from robot_edge.shadow import runner
    from wire.errors import InvalidDataError

    def gone(frame: Frame) -> Frame:
        raise InvalidDataError("overwritten")

    monkeypatch.setattr(runner, "private", gone)
    robot.act_by(1, 10)
    robot.compute(2, 30)
    robot.tick(100)
    assert robot.found(2) == (ActionDifference(), 0, "")


# --- it never acts ---------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(("tick", "tick", "act", "shadow", "promote", "restart", "end", "nothing")), st.integers(1, 9)
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_no_action_of_a_shadow_is_ever_executed(steps: list[tuple[str, int]]) -> None:
    """Whatever is loaded, started again, ended or promoted: each chunk that control gets is of the version that was
    told to act, made by one of inference's own two policies. A version's weights are its own: what acts shows in the
    actions."""
    with tempfile.TemporaryDirectory() as place:
        robot = Robot(Path(place))
        robot.act_by(1, 1)
        robot.tick()
        for what, number in steps:
            match what:
                case "tick":
                    robot.tick(3 * number)
                case "act":
                    robot.act_by(number, number)
                case "shadow":
                    robot.compute(number + 20, number + 20)
                case "promote":  # the shadow becomes the version to act by
                    if (shadow := robot.runner._version) is not None:
                        robot.act_by(shadow.number, shadow.number)
                case "restart":
                    robot.start_shadow()
                case "end":
                    robot.shadow.send(LoadShadow(None))
            before = len(robot.chunks)
            robot.tick(2)
            for chunk in robot.chunks[before:]:
                place_in_range = float((chunk.actions[0, 0] - LOW[0]) / (HIGH[0] - LOW[0]))
                assert chunk.version == robot.told[-1]
                assert place_in_range == pytest.approx(chunk.version / 100 + chunk.seed / 100, abs=1e-5)
        ours = [id(policy) for policy in (robot.policy, robot.standby)]
        assert all(id(policy) not in ours for policy in robot.made)
        robot.inference.close()


def test_inference_takes_nothing_but_requests_from_the_shadow(robot: Robot) -> None:
    """A shadow process gone mad sends chunks and weights to all it reaches."""
    robot.act_by(1, 10)
    robot.tick()
    evil = robot.file(9, 90)
    chunk = msgspec.structs.replace(robot.chunks[-1], actions=np.tile(HIGH, (4, 1)), version=9)
    request = ChunkRequest(1, seen(1), 1, seen(1).state)
    for message in (
        ChunkReply(chunk),
        LoadWeights(version(9, evil), str(evil)),
        ChunkSample(seen(1), request, chunk),
        request,
    ):
        robot._samples.send(message)
    robot.tick(20)
    assert {one.version for one in robot.chunks} == {1} and len(robot.chunks) == 21
