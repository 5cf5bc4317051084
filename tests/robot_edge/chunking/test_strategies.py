"""Which action each strategy executes at each tick, on lines with known delays."""

from __future__ import annotations

import numpy as np
import pytest

from hal.interfaces.dynamics import SpecMotion
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from robot_edge.chunking.scheduler import ChunkScheduler, RequestTracker
from robot_edge.chunking.strategies.ensemble import EnsembleScheduler
from tests.robot_edge.chunking.simulated import LOST, SPEC, Simulated, asked, on_time, oracle, starved
from wire.types import PolicyCapabilities

EVERYTHING = PolicyCapabilities(trained_max_delay=8, state_aligned=True, prefix_trained=True, residual_trained=True)
H, EXECUTE = 16, 8


class Still(SpecMotion):
    """The oracle's robot: nothing moves."""

    def __init__(self) -> None:
        self.rolled = np.zeros(1, bool)

    def rollout(self, state: np.ndarray, past: np.ndarray, coming: np.ndarray) -> np.ndarray:
        return state


def make(strategy: str, **options: int) -> ChunkScheduler:
    return make_scheduler(ChunkingConfig(strategy, EXECUTE, **options), SPEC, EVERYTHING, Still())


def test_sync_stands_still_while_it_waits() -> None:
    rows = Simulated(make("sync"), [3]).run(25)
    assert asked(rows) == [0, 11, 22]
    # eight actions from the beginning of each chunk, three ticks of nothing before each
    expected = [None] * 3 + [(i, 0) for i in range(8)] + [None] * 3 + [(11 + i, 11) for i in range(8)] + [None] * 3
    assert [row.said for row in rows] == expected
    assert {row.delay_ticks for row in rows[3:]} == {3}


@pytest.mark.parametrize("delay", [0, 1, 8, 12])
def test_sync_loses_the_delay_of_every_chunk(delay: int) -> None:
    rows = Simulated(make("sync"), [delay]).run(10 * (8 + delay))
    assert asked(rows) == [k * (8 + delay) for k in range(10)]
    assert len(starved(rows)) == 9 * delay


def test_naive_never_waits_and_is_always_late() -> None:
    rows = Simulated(make("naive"), [3]).run(27)
    assert asked(rows) == [0, 8, 16, 24]
    expected = [None] * 3 + [(k * 8 + i, k * 8) for k in range(3) for i in range(8)]
    assert [row.said for row in rows] == expected
    assert {row.tick - row.said[0] for row in rows if row.said} == {3}
    # the action's place in the chunk that was really executed
    assert [row.tick - row.chunk.first_tick for row in rows[3:]] == [*range(8)] * 3


@pytest.mark.parametrize("delay", [0, 1, 8, 12])
def test_naive_switches_when_the_answer_comes(delay: int) -> None:
    rows = Simulated(make("naive"), [delay]).run(100)
    assert starved(rows) == []
    assert {row.tick - row.said[0] for row in rows if row.said} == {delay}


def test_aligned_skips_what_is_late() -> None:
    rows = Simulated(make("aligned"), [3]).run(24)
    assert asked(rows) == [0, 8, 16]
    # nothing is late where the robot stood still: the first chunk begins with its first action
    first = [(t - 3, 0) for t in range(3, 11)]
    assert [row.said for row in rows] == [None] * 3 + first + [(t, (t - 3) // 8 * 8) for t in range(11, 24)]


@pytest.mark.parametrize(("delay", "every", "gap"), [(0, 8, 0), (1, 8, 0), (8, 8, 0), (10, 10, 4), (12, 12, 8)])
def test_aligned_needs_a_horizon_of_twice_the_delay(delay: int, every: int, gap: int) -> None:
    rows = Simulated(make("aligned"), [delay]).run(delay + 10 * every)
    assert asked(rows)[:10] == [k * every for k in range(10)]
    assert on_time(rows)
    # a chunk lasts until 16 ticks after it was asked for, the next one comes 2 * delay after that; what the robot waits
    # for a chunk is not skipped of it, so the one after it comes in time
    assert len(starved(rows)) == 5 * gap


@pytest.mark.parametrize("strategy", ["aligned", "ensemble", "future_state", "rtc_guided", "rtc_trained", "residual"])
def test_no_action_is_spent_while_the_robot_waits_in_mid_episode(strategy: str) -> None:
    simulated = Simulated(make(strategy, timeout_ticks=60), [0, LOST])
    simulated.run(18)
    waits = simulated.rows[-1]
    assert waits.waited and waits.action is None, "the only chunk is used up and the next one lost"
    again = next(row.request for row in simulated.run(70) if row.request)
    simulated.coming.append((simulated.now + 5, oracle(again)))
    rows = simulated.run(12)
    assert [row.said for row in rows] == [None] * 5 + [(again.first_tick + i, again.tick) for i in range(7)]


def test_aligned_asks_in_time_when_the_horizon_is_short() -> None:
    rows = Simulated(make("aligned"), [5], policy=lambda request: oracle(request, 12)).run(60)
    assert asked(rows)[:4] == [0, 8, 15, 22]
    assert starved(rows) == []


@pytest.mark.parametrize("delay", [0, 1, 3, 8])
def test_future_state_begins_each_chunk_at_its_first_action(delay: int) -> None:
    rows = Simulated(make("future_state"), [delay]).run(80)
    assert starved(rows) == []
    assert on_time(rows)
    later = [row for row in rows if row.request is not None][2:]
    assert {row.request.first_tick - row.tick for row in later} == {delay}
    # eight actions of each chunk, from its first one on
    begun = {row.chunk.first_tick for row in rows[40:] if row.chunk}
    for first in sorted(begun)[1:-1]:
        assert [row.tick - first for row in rows if row.chunk and row.chunk.first_tick == first] == [*range(8)]


def test_future_state_looks_no_further_than_it_was_trained_to() -> None:
    rows = Simulated(make("future_state"), [12]).run(80)
    assert asked(rows) == [0, 12, 24, 36, 48, 60, 72]
    assert {row.request.first_tick - row.tick for row in rows[1:] if row.request} == {8}
    # four actions of each chunk are skipped, twelve executed
    assert [row.said for row in rows[24:36]] == [(t, 12) for t in range(24, 36)]


def test_an_early_chunk_waits_for_its_moment() -> None:
    rows = Simulated(make("future_state"), [8, 8, 1, 1]).run(40)
    requests = [row.request for row in rows if row.request]
    quick = requests[2]
    assert quick.first_tick == quick.tick + 8
    # it is here one tick after it was asked for; the old chunk goes on until its own first tick
    assert [row.said[1] for row in rows[quick.tick + 1 : quick.first_tick]] == [requests[1].tick] * 7
    assert rows[quick.first_tick].said == (quick.first_tick, quick.tick)
    assert rows[quick.first_tick].delay_ticks == 1


@pytest.mark.parametrize("delay", [0, 1, 3, 8, 12])
def test_rtc_commits_what_will_be_executed_meanwhile(delay: int) -> None:
    trained = Simulated(make("rtc_trained"), [delay]).run(60)
    guided = Simulated(make("rtc_guided"), [delay]).run(60)
    for rows in (trained, guided):
        assert on_time(rows)
        assert next(row.request for row in rows if row.request).prefix is None
    for rows, guides in ((trained, False), (guided, True)):
        lengths = []
        for row in (row for row in rows[1:] if row.request):
            prefix, running = row.request.prefix, rows[row.tick - (delay == 0)].chunk
            left = running.actions[row.tick - running.first_tick :]
            lengths.append(len(left))
            committed = min(delay, 8, len(left))
            # of a guided one everything that is left of the running chunk goes along
            actions = left if guides else left[:committed]
            assert (prefix.committed if prefix else 0) == committed
            if prefix:
                assert prefix.actions.tolist() == actions.tolist()
                assert prefix.guided is guides
        # a chunk that comes later than the running one lasts, and the one after it, for which the robot waited
        assert lengths == ([8 + delay] + [8] * (len(lengths) - 1) if delay <= 8 else [16, 4, 12, 4])
        assert len(lengths) >= 4


def test_rtc_commits_no_more_than_training_knew() -> None:
    scheduler = make_scheduler(ChunkingConfig("rtc_trained", 4), SPEC, PolicyCapabilities(2, False, True))
    rows = Simulated(scheduler, [6]).run(40)
    assert {row.request.prefix.committed for row in rows[1:] if row.request} == {2}


def test_the_ensemble_weighs_the_newest_most() -> None:
    rows = Simulated(EnsembleScheduler(RequestTracker(SPEC, ChunkingConfig()), m=0.5), [2]).run(20)
    assert asked(rows) == [0, *range(2, 20, 2)]
    # the first one, which the robot waited two ticks for, is over at 18
    assert all(row.action[0] == pytest.approx(row.tick) for row in rows[18:])
    # at tick 7 there are the chunks asked for at 0, 2 and 4
    weights = np.exp(-0.5 * np.array([2, 1, 0]))
    assert rows[7].action.tolist() == pytest.approx(weights @ [[5, 0], [7, 2], [7, 4]] / weights.sum())
    assert rows[7].chunk.first_tick == 4


def test_the_ensemble_is_bounded() -> None:
    rows = Simulated(EnsembleScheduler(RequestTracker(SPEC, ChunkingConfig()), most=3), [0]).run(20)
    assert rows[10].action[1] == pytest.approx(
        np.exp(-2.0 * np.arange(3)) @ [10, 9, 8] / np.exp(-2.0 * np.arange(3)).sum()
    )


STRATEGIES = ["sync", "naive", "aligned", "ensemble", "future_state", "rtc_guided", "rtc_trained", "residual"]


@pytest.mark.parametrize("strategy", STRATEGIES)
class TestAll:
    def test_a_request_that_is_lost_is_repeated(self, strategy: str) -> None:
        simulated = Simulated(make(strategy, timeout_ticks=10), [LOST, LOST, 2])
        rows = simulated.run(40)
        assert asked(rows)[:3] == [0, 10, 20]
        assert rows[21].action is None
        assert rows[23].action is not None

    def test_a_failure_is_asked_again_once_a_tick(self, strategy: str) -> None:
        scheduler = make(strategy)
        simulated = Simulated(scheduler, [0], policy=lambda request: type(oracle(request))(None, "no", request.tick))
        assert asked(simulated.run(5)) == [0, 1, 2, 3, 4]
        simulated.policy = oracle
        assert simulated.run(3)[-1].action is not None

    def test_numbers_that_are_none_are_a_failure(self, strategy: str, caplog: pytest.LogCaptureFixture) -> None:
        simulated = Simulated(make(strategy), [0])

        def broken(request):
            reply = oracle(request)
            reply.chunk.actions[7, 1] = np.nan
            return reply

        simulated.policy = broken
        rows = simulated.run(5)
        assert asked(rows) == [0, 1, 2, 3, 4]
        assert {row.said for row in rows} == {None}
        assert caplog.text.count("not finite") == 1
        assert simulated.scheduler.delay_ticks == -1

    @pytest.mark.parametrize("shape", [(0, 2), (4, 3), (4,), (2, 2, 2)])
    def test_other_shapes_are_a_failure(self, strategy: str, shape: tuple[int, ...]) -> None:
        def wrong(request):
            reply = oracle(request)
            chunk = reply.chunk
            actions = np.zeros(shape, np.float32)
            return type(reply)(type(chunk)(actions, chunk.first_tick, 1, 1, 0, 0), tick=request.tick)

        assert {row.said for row in Simulated(make(strategy), [0], policy=wrong).run(5)} == {None}

    @pytest.mark.parametrize("horizon", [1, 2, 5, 40])
    def test_any_horizon_will_do(self, strategy: str, horizon: int) -> None:
        rows = Simulated(make(strategy), [1], policy=lambda request: oracle(request, horizon)).run(50)
        acted = [row for row in rows if row.action is not None]
        assert len(acted) >= 20 or (horizon == 1 and strategy not in ("sync", "naive", "future_state"))

    def test_an_answer_of_the_last_episode_is_void(self, strategy: str) -> None:
        simulated = Simulated(make(strategy), [5, 2])
        simulated.run(3)
        simulated.reset()
        rows = simulated.run(4)
        assert asked(rows)[0] == 3
        assert [row.said is None for row in rows[:2]] == [True, True]
        assert rows[3].chunk is not None
        assert all(round(float(row.action[1])) >= 3 for row in rows if row.action is not None)

    def test_delays_are_remembered_across_episodes(self, strategy: str) -> None:
        scheduler = make(strategy)
        Simulated(scheduler, [6]).run(40)
        tracker = getattr(scheduler, "tracker", None) or scheduler._base.tracker
        assert tracker.delay.ticks == 6
        scheduler.reset(0)
        assert tracker.delay.ticks == 6
        assert scheduler.delay_ticks == -1

    def test_an_answer_that_comes_twice_counts_once(self, strategy: str) -> None:
        simulated = Simulated(make(strategy), [2])
        rows = simulated.run(4)
        said = [row.said for row in simulated.run(3)]
        other = Simulated(make(strategy), [2])
        other.run(4)
        other.scheduler.submit(oracle(rows[0].request), 4)
        assert [row.said for row in other.run(3)] == said

    def test_an_answer_out_of_order_changes_nothing(self, strategy: str) -> None:
        simulated = Simulated(make(strategy, timeout_ticks=10), [15, 2, LOST])
        rows = simulated.run(16)
        assert asked(rows)[:2] == [0, 10]
        # the answer to the request of tick 10 came at 12, the one to tick 0 comes at 15
        assert all(round(float(row.action[1])) == 10 for row in rows[13:])


def test_a_chunk_is_made_for_the_usual_delay_and_asked_for_in_time_for_a_long_one() -> None:
    delays = [2] * 10 + [2, 2, 2, 8] * 60
    for strategy in ("rtc_guided", "rtc_trained"):
        rows = Simulated(make(strategy), delays).run(900)
        assert {row.request.prefix.committed for row in rows[1:] if row.request} == {2}, strategy
        assert on_time(rows) and starved(rows) == []
    ahead = Simulated(make("future_state"), delays).run(900)
    assert {row.request.first_tick - row.tick for row in ahead[1:] if row.request} == {2}
    assert on_time(ahead) and starved(ahead) == []
    # a chunk that is as long as it is executed: there is nothing left to wait with
    short = Simulated(make("future_state"), delays, policy=lambda request: oracle(request, 10)).run(900)
    slow = [row.tick for row in short if row.delay_ticks == 8]
    assert slow and starved(short[slow[10] :]) == []


def test_what_is_usual_follows_the_delays() -> None:
    rows = Simulated(make("future_state"), [2] * 30 + [8] * 60 + [2] * 200).run(2000)
    ahead = [row.request.first_tick - row.tick for row in rows if row.request]
    assert ahead[30] == 2
    assert ahead[80] == 8
    assert ahead[-1] == 2
