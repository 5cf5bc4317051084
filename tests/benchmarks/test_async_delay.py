"""The benchmark of late actions, very small, and what it is made of."""

from __future__ import annotations

import json
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import pytest

from benchmarks.async_delay.conditions import BURSTS, FIXED, LIMITED, RANDOM, Condition, limits_of
from benchmarks.async_delay.data import Pushes, demonstrate, pushed
from benchmarks.async_delay.statistics import bootstrap
from benchmarks.async_delay.track import TrackOperator, TrackRobot, track_spec
from cloud_learner.buffer.control import HOLD, SCRIPT
from cloud_learner.buffer.location import BufferLocation
from hal.interfaces.robot import Feedback
from hal.safety.limits import SafetyLimits
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities

RTC = (("rtc_guided", "plain"), ("rtc_trained", "one for all"))


def test_the_bootstrap_counts_seeds_as_well_as_episodes() -> None:
    rng = np.random.default_rng(0)
    alike = rng.normal(0.5, 0.1, (3, 100))
    low, high = bootstrap(alike)
    assert low < alike.mean() < high and high - low < 0.08
    apart = alike + np.array([[-0.2], [0.0], [0.2]])
    wide = bootstrap(apart)
    assert wide[1] - wide[0] > 4 * (high - low)
    assert bootstrap(apart) == wide, "the same every time"
    assert bootstrap(np.ones((3, 20))) == (1.0, 1.0)


def test_a_condition_says_how_late_answers_come() -> None:
    def drawn(condition: Condition, seed: int = 1) -> list[int]:
        return list(islice(condition.delays(seed), 2000))

    assert (Condition(4).name, set(drawn(Condition(4)))) == ("delay 4", {4})
    assert (RANDOM.name, set(drawn(RANDOM))) == ("random 2-8", set(range(2, 9)))
    assert (BURSTS.name, set(drawn(BURSTS))) == ("bursts 2/12", {2, 12})
    assert drawn(BURSTS).count(12) == pytest.approx(0.15 * 2000, rel=0.15)
    assert drawn(BURSTS) == drawn(BURSTS) != drawn(BURSTS, 2)
    assert LIMITED[1].name == "bursts 2/12, limits" and drawn(LIMITED[1]) == drawn(BURSTS)


def test_pushes_come_and_go() -> None:
    pushes = Pushes(share=1.0, calm_ticks=(5, 9), push_ticks=(2, 4), strength=(0.5,))
    disturbance = pushed(pushes, np.random.default_rng(3))
    marks = "".join("." if next(disturbance) is None else "x" for _ in range(400))
    calm, shoved = ({len(run) for run in marks[:390].split(other) if run} for other in "x.")
    assert calm <= {5, 6, 7, 8, 9} | {len(marks[:390].split("x")[-1])} and len(calm) > 2
    assert shoved <= {1, 2, 3, 4} and len(shoved) > 1
    still = pushed(Pushes(share=0.0), np.random.default_rng(3))
    assert all(next(still) is None for _ in range(200))


@pytest.mark.slow
def test_a_push_is_recorded_as_held_and_not_imitated(tmp_path: Path) -> None:
    pytest.importorskip("metaworld")
    place = BufferLocation(tmp_path / "buffer")
    pushes = Pushes(share=1.0, calm_ticks=(10, 14), push_ticks=(3, 5), strength=(1.0,))
    demonstrate(place, TrackRobot, TrackOperator, episodes=2, max_ticks=60, seed=7, pushes=pushes)
    ledger, store = place.open_reader()
    try:
        index = ledger.index(0, track_spec().data_hash)
        segments = store.read(index.row.tolist()).segments.values()
        assert len(segments) == 2
        for segment in segments:
            assert segment.steps == 60 and segment.last and segment.outcome == "failure"
            assert set(segment.actor.tolist()) == {HOLD, SCRIPT}
            assert 5 < (segment.actor == HOLD).sum() < 30
            # the set-point does what was executed, pushed or not
            moved = np.diff(segment.state[:, :3], axis=0)
            assert np.allclose(moved, 0.01 * segment.executed[:-1, :3], atol=1e-6)
        moves = [segment.executed[segment.actor == SCRIPT, :3] for segment in segments]
    finally:
        store.close()
        ledger.close()
    limits, names = limits_of(place, track_spec()), ["move_x", "move_y", "move_z"]
    fastest = np.percentile(np.abs(np.concatenate(moves)), 90) / (track_spec().period_ns / 1e9)
    # the gripper stands still
    assert limits.velocity == pytest.approx(dict.fromkeys(names, fastest))
    assert sorted(limits.acceleration) == names and len(set(limits.acceleration.values())) == 1


@pytest.mark.slow
def test_limits_bind_and_late_answers_come_in_order() -> None:
    pytest.importorskip("metaworld")
    pytest.importorskip("torch")
    from benchmarks.async_delay.rollout import AtOnce, Stage

    class Fast:
        """Says which request it answers, and wants more than the limits allow."""

        spec = track_spec()
        corrector = None

        def think(self, observation: Observation) -> Latent:
            return Latent(np.zeros(1, np.float32), observation.time_ns, 1)

        def act(self, observation, latent, tick, prefix=None, seed=0) -> ActionChunk:
            return ActionChunk(np.full((6, 4), 1.0, np.float32), tick, 1, 1, observation.time_ns, latent.observed_ns)

    class Watched(TrackRobot):
        def write(self, action: np.ndarray) -> Feedback:
            did.append(float(action[0]))
            return super().write(action)

    did: list[float] = []
    policy, per_tick = Fast(), 80.0
    limits = SafetyLimits({"move_x": 0.5 * per_tick}, {"move_x": 0.1 * per_tick**2})
    stage = Stage(Watched)
    try:
        scheduler = make_scheduler(ChunkingConfig("aligned", 4), policy.spec, PolicyCapabilities(), delay=None)
        run = stage.play(policy, AtOnce(policy), scheduler, "track", 3, 30, iter([2, 9, 1, *[0] * 40]), limits)
        assert np.abs(np.diff([0.0, *did])).max() == pytest.approx(0.1, abs=1e-5)
        assert max(did) == pytest.approx(0.5, abs=1e-6)
        assert run.waited == 2 and 0 < run.starved < 10 and min(did) >= 0.0
        did.clear()
        scheduler = make_scheduler(ChunkingConfig("aligned", 4), policy.spec, PolicyCapabilities(), delay=None)
        stage.play(policy, AtOnce(policy), scheduler, "track", 3, 30, repeat(0))
        assert set(did) == {1.0}, "no limits but the robot's own"
    finally:
        stage.close()


@pytest.mark.slow
def test_a_small_run_gives_every_cell_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("metaworld")
    torch = pytest.importorskip("torch")
    from benchmarks.async_delay import __main__ as async_delay

    threads = torch.get_num_threads()
    size = async_delay.AsyncDelaySize("track", 2, 3, 1, 60, ("track",), (0,))
    columns = (*FIXED[:4], BURSTS, LIMITED[0])
    monkeypatch.setattr(async_delay, "SCENES", {"track": columns})
    begin = async_delay._cell("track", "sync", "plain", Condition(0))
    try:
        found = async_delay._seed(size, 0, tmp_path)
        assert len(found) == len(async_delay.STRATEGIES) * len(columns)
        assert all(len(scores) == 1 and 0 <= scores[0] <= 1 for scores in found.values())
        kept = tmp_path / "track-0" / "scores.json"
        known = json.loads(kept.read_text())
        gone = known.pop(async_delay._cell("track", "naive", "plain", BURSTS))
        known[begin] = [0.75]
        kept.write_text(json.dumps(known))
        monkeypatch.setattr("benchmarks.async_delay.data.demonstrate", None)
        again = async_delay._seed(size, 0, tmp_path)
        assert again[async_delay._cell("track", "naive", "plain", BURSTS)] == gone, "the same seeds, the same episodes"
        assert again[begin] == [0.75], "what was there is not measured again"
        with pytest.raises(SystemExit, match="other settings"):
            async_delay._seed(async_delay.AsyncDelaySize("track", 2, 4, 1, 60, ("track",), (0,)), 0, tmp_path)
    finally:
        torch.set_num_threads(threads)
    rows = async_delay._table(size, "track", [found])
    assert [row["strategy"] for row in rows] == [strategy for strategy, _ in async_delay.STRATEGIES]
    goals = async_delay._goals(size, {(size, 0): found})
    assert [goal.holds for goal in goals[:2]] == [False, False], "nothing is learned in 3 steps"
    burst = {one: found[async_delay._cell("track", *one, BURSTS)][0] for one in async_delay.STRATEGIES}
    behind = [burst["aligned", kind] - burst[name, kind] for name, kind in RTC]
    assert goals[2].value == pytest.approx(max(behind))
