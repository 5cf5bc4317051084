"""Inference: newest request, latents that are never mixed, weights swapped whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from robot_edge.inference import Inference
from tests import samples
from wire.clock import ManualClock
from wire.errors import PolicyError, WeightsError
from wire.memory_channel import memory_pair
from wire.messages import Applied, ChunkReply, ChunkRequest, Hello, LoadWeights
from wire.types import ActionChunk, Latent, Observation, PolicyVersion


class Scripted:
    """A policy that remembers what it was asked."""

    spec, horizon, version = samples.spec(), 4, 0

    def __init__(self) -> None:
        self.thoughts: list[int] = []
        self.fail = False

    def think(self, observation: Observation) -> Latent:
        seen = observation.images["front"].time_ns
        self.thoughts.append(seen)
        return Latent(np.zeros(1, np.float32), seen, self.version)

    def act(self, observation: Observation, latent: Latent, tick: int) -> ActionChunk:
        if self.fail:
            raise PolicyError("it cannot")
        assert latent.version == self.version
        return ActionChunk(np.zeros((4, 4), np.float32), tick, 1, self.version, 0, latent.observed_ns)

    def load(self, weights: bytes, version: int) -> None:
        if weights == b"bad":
            raise WeightsError("no weights")
        self.version = version


class Bench:
    def __init__(self, think_every_s: float = 0.0) -> None:
        self.control, control = memory_pair()
        self.uplink, uplink = memory_pair()
        self.policy = Scripted()
        self.files = {"good": b"good", "bad": b"bad"}
        self.inference = Inference(
            "robot-0", self.policy, control, uplink, ManualClock(7), think_every_s, self.files.__getitem__
        )

    def load(self, number: int, path: str = "good") -> None:
        self.uplink.send(LoadWeights(PolicyVersion(number, "s", 1, 0, 0, 0, 0), path))
        self.inference.turn()

    def ask(self, *ticks: int, frame_ns: int = 90) -> list[ChunkReply]:
        for tick in ticks:
            self.control.send(ChunkRequest(tick, samples.observation(100, frame_ns)))
        self.inference.turn()
        found = []
        while (message := self.control.recv()) is not None:
            assert isinstance(message, ChunkReply)
            found.append(message)
        return found


def test_without_weights_there_is_no_chunk_but_a_reason() -> None:
    (reply,) = Bench().ask(1)
    assert reply.chunk is None
    assert "no policy version" in reply.error


def test_only_the_newest_request_is_answered() -> None:
    bench = Bench()
    bench.load(1)
    (reply,) = bench.ask(1, 2, 3)
    assert reply.chunk is not None
    assert reply.chunk.first_tick == 3


def test_it_thinks_once_per_frame_and_again_after_a_swap() -> None:
    bench = Bench()
    bench.load(1)
    bench.ask(1)
    bench.ask(2)
    bench.ask(3, frame_ns=95)
    assert bench.policy.thoughts == [90, 95]
    bench.load(2)
    (reply,) = bench.ask(4, frame_ns=95)
    assert bench.policy.thoughts == [90, 95, 95]
    assert reply.chunk is not None
    assert reply.chunk.version == 2


def test_the_slow_path_keeps_its_own_pace() -> None:
    bench = Bench(think_every_s=20e-9)
    bench.load(1)
    for tick, frame in enumerate((10, 20, 30, 31, 60)):
        bench.ask(tick, frame_ns=frame)
    assert bench.policy.thoughts == [10, 31, 60]


def test_what_was_applied_is_told_and_bad_weights_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.inference.hello()
    assert isinstance(bench.uplink.recv(), Hello)
    bench.load(1)
    applied = bench.uplink.recv()
    assert isinstance(applied, Applied)
    assert (applied.number, applied.applied_ns) == (1, 7)
    bench.load(2, "bad")
    assert bench.uplink.recv() is None
    assert bench.policy.version == 1
    assert "stays on version 1" in caplog.text


def test_a_policy_that_fails_gives_a_reason() -> None:
    bench = Bench()
    bench.load(1)
    bench.policy.fail = True
    (reply,) = bench.ask(1)
    assert (reply.chunk, reply.error) == (None, "it cannot")


def test_a_missing_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.inference._read = lambda path: Path(path).read_bytes()
    bench.load(1, str(tmp_path / "gone"))
    assert bench.policy.version == 0
    assert "stays on version 0" in caplog.text
