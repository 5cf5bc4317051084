"""Whatever the line does, these hold for every strategy."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hal.interfaces.dynamics import SpecMotion
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from tests.robot_edge.chunking.simulated import SPEC, Simulated, Tick, asked, on_time, oracle
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import PolicyCapabilities

STRATEGIES = ["sync", "naive", "aligned", "ensemble", "future_state", "rtc_guided", "rtc_trained", "residual"]
IN_TIME = {"aligned", "future_state", "rtc_guided", "rtc_trained", "residual"}
"""these execute an action at the tick it is meant for, but for the ticks the robot waited, or never"""
TIMEOUT = 12


class Still(SpecMotion):
    def __init__(self) -> None:
        self.rolled = np.zeros(1, bool)

    def rollout(self, state: np.ndarray, past: np.ndarray, coming: np.ndarray) -> np.ndarray:
        assert np.isfinite(coming).all()
        return state


@dataclass(frozen=True)
class Fate:
    """What becomes of one request."""

    delay: int | None
    kind: str
    horizon: int
    twice: int


fates = st.builds(
    Fate,
    delay=st.one_of(st.none(), st.integers(0, 3), st.integers(0, 30)),
    kind=st.sampled_from(["good"] * 6 + ["failed", "nan", "empty", "elsewhere"]),
    horizon=st.integers(1, 24),
    twice=st.integers(0, 4),
)


class Weather:
    """Answers requests as their fates say, then well."""

    def __init__(self, plan: list[Fate]) -> None:
        self._plan = plan
        self.asked = 0

    def fate(self) -> Fate:
        return self._plan[self.asked] if self.asked < len(self._plan) else Fate(1, "good", 16, 0)

    def __call__(self, request: ChunkRequest) -> ChunkReply:
        reply = oracle(request, self.fate().horizon)
        assert reply.chunk is not None
        match self.fate().kind:
            case "failed":
                return ChunkReply(None, "no", request.tick)
            case "nan":
                reply.chunk.actions[-1] = np.nan
            case "empty":
                return msgspec.structs.replace(reply, chunk=_with(reply, actions=np.zeros((0, 2), np.float32)))
            case "elsewhere":
                return msgspec.structs.replace(reply, chunk=_with(reply, first_tick=request.first_tick + 1))
        return reply


def _with(reply: ChunkReply, **changes):
    return msgspec.structs.replace(reply.chunk, **changes)


class Stormy(Simulated):
    """A line whose every answer has a fate."""

    def __init__(self, scheduler, weather: Weather, takeover: dict[int, np.ndarray]) -> None:
        self.weather = weather
        super().__init__(scheduler, self._fated(), policy=weather, takeover=takeover)

    def _fated(self):
        while True:
            yield self.weather.fate().delay

    def _tick(self) -> Tick:
        before = len(self.coming)
        fate = self.weather.fate()
        row = super()._tick()
        if row.request is not None:
            self.weather.asked += 1
            if fate.twice and len(self.coming) > before:
                at, reply = self.coming[-1]
                self.coming.append((at + fate.twice, reply))
        return row


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("speed_up", [1, 3])
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    # finding the smallest case takes minutes; the parameters of a failing one are printed anyway
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    plan=st.lists(fates, max_size=20),
    resets=st.lists(st.integers(1, 79), max_size=3),
    others=st.lists(st.integers(0, 79), max_size=20),
    execute=st.integers(1, 12),
)
@pytest.mark.slow
def test_whatever_the_line_does(
    strategy: str, speed_up: int, plan: list[Fate], resets: list[int], others: list[int], execute: int
) -> None:
    scheduler = make_scheduler(
        ChunkingConfig(strategy, execute, speed_up, TIMEOUT), SPEC, PolicyCapabilities(8, True, True, True), Still()
    )
    simulated = Stormy(scheduler, Weather(plan), {tick: np.full(2, -5.0) for tick in others})
    episodes: list[list[Tick]] = []
    for until in [*sorted(set(resets)), 80]:
        episodes.append(simulated.run(until - simulated.now))
        simulated.reset()
    simulated.weather.asked = len(plan)
    calm = simulated.run(60)
    for rows in [*episodes, calm]:
        check(strategy, speed_up, rows)
    # the storm is over: as soon as a lost request has been repeated it acts again
    last = calm[TIMEOUT + 10 :]
    assert any(row.action is not None for row in last[:10])
    if strategy != "sync" and speed_up == 1:
        assert all(row.action is not None for row in last)


def check(strategy: str, speed_up: int, rows: list[Tick]) -> None:
    start = rows[0].tick
    assert len(asked(rows)) == len(set(asked(rows)))
    used: set[tuple[int, int]] = set()
    for row in rows:
        if row.request is not None and row.request.prefix is not None:
            prefix = row.request.prefix
            assert 0 <= prefix.committed <= len(prefix.actions)
            assert np.isfinite(prefix.actions).all()
        if row.action is None:
            continue
        assert row.chunk is not None
        assert np.isfinite(row.action).all()
        assert row.delay_ticks >= 0
        if strategy == "ensemble":
            if speed_up == 1:
                waited = sum(other.waited for other in rows if other.tick < row.tick)
                assert row.tick - waited - 1e-3 <= row.action[0] <= row.tick + 1e-3
            assert row.action[1] >= start - 1e-3
            continue
        meant, of = row.said
        # nothing of an earlier episode, nothing of the future, nothing twice
        assert start <= of <= row.tick
        assert (of, meant) not in used
        used.add((of, meant))
        index = row.tick - row.chunk.first_tick
        assert 0 <= index < len(row.chunk.actions)
        assert row.chunk.actions[index].tolist() == row.action.tolist()
    if strategy in IN_TIME and speed_up == 1:
        assert on_time(rows)
    newest = [row.said[1] for row in rows if row.action is not None]
    if strategy != "ensemble":
        # an older chunk never replaces a newer one
        assert newest == sorted(newest)
