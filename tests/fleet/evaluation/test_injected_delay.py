"""Injected latency: what `--delay` understands, and that an answer is held for so many ticks and no more."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import pytest

from fleet.evaluation.injected_delay import DelayedChannel, parse_delay
from tests import samples
from wire.clock import ManualClock
from wire.errors import ConfigError
from wire.messages.gateway import Stop
from wire.messages.local import ChunkReply, ChunkRequest
from wire.transport.memory_channel import memory_pair

PERIOD_NS = 10_000_000


def test_what_is_understood() -> None:
    assert [next(parse_delay("4")) for _ in range(3)] == [4, 4, 4]
    drawn = [next(parse_delay("random:2-8", seed=1)) for _ in range(3)]
    assert drawn == [drawn[0]] * 3, "the same seed draws the same"
    many = parse_delay("random:2-8")
    assert {next(many) for _ in range(300)} == set(range(2, 9))


def test_bursts_come_in_runs_of_ten_and_as_often_as_asked() -> None:
    burst = parse_delay("burst:2,12,0.05")
    drawn = np.array([next(burst) for _ in range(20_000)])
    assert set(drawn) == {2, 12}
    edges = np.flatnonzero(np.diff((drawn == 12).astype(int)))
    lengths = np.diff(edges)[:: 2 if drawn[0] == 2 else 1]
    assert min(lengths) >= 10 or lengths.min() % 10 == 0
    # one in twenty usual requests begins ten slow answers
    assert np.mean(drawn == 12) == pytest.approx(10 * 0.05 / (0.95 + 10 * 0.05), abs=0.05)


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "2.5", "random:", "random:8-2", "random:1", "burst:2,12", "burst:9,2,0.1", "burst:1,2,3"]
)
def test_anything_else_is_refused_with_what_is_possible(text: str) -> None:
    with pytest.raises(ConfigError, match=r"random:2-8"):
        parse_delay(text)


@pytest.mark.parametrize("ticks", [0, 1, 4, 12])
def test_an_answer_is_usable_that_many_ticks_after_its_request(ticks: int) -> None:
    clock = ManualClock()
    near, far = memory_pair()
    line = DelayedChannel(near, repeat(ticks), PERIOD_NS, clock)
    came = {}
    observation = samples.observation()
    for tick in range(40):
        while (message := line.recv()) is not None:
            assert isinstance(message, ChunkReply)
            came[message.tick] = tick
        if tick % 5 == 0:
            clock.advance(200_000)  # a request leaves a little after its tick has begun
            assert line.send(ChunkRequest(tick, observation, tick, observation.state))
            assert isinstance(far.recv(), ChunkRequest)
            far.send(ChunkReply(None, tick=tick))
            clock.advance(PERIOD_NS - 200_000)
        else:
            clock.advance(PERIOD_NS)
        if ticks == 0:
            while (message := line.recv()) is not None:
                came[message.tick] = tick
    assert came == {tick: tick + ticks for tick in range(0, 40 - ticks, 5)}


def test_other_messages_are_not_held_and_answers_stay_in_order() -> None:
    clock = ManualClock()
    near, far = memory_pair()
    line = DelayedChannel(near, repeat(3), PERIOD_NS, clock)
    observation = samples.observation()
    line.send(ChunkRequest(1, observation, 1, observation.state))
    far.send(ChunkReply(None, tick=1))
    far.send(ChunkReply(None, tick=0))
    far.send(Stop())
    assert isinstance(line.recv(), Stop)
    assert line.recv() is None
    clock.advance(3 * PERIOD_NS)
    assert [line.recv().tick, line.recv().tick] == [1, 0]  # type: ignore[union-attr]
    assert line.recv() is None
