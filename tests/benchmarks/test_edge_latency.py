"""The edge's benchmark: that its figures are right for robots that are late, starved or slow in known ways."""

from __future__ import annotations

import importlib.util
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.table import render
from benchmarks.edge_latency import __main__ as edge_latency
from benchmarks.edge_latency.arm import CAMERAS, LAMP_PX, LIT, PERIOD_NS, PX, Arm, ArmRecord, arm_spec, switches
from benchmarks.edge_latency.children import ChildFailedError, Children
from benchmarks.edge_latency.measure import measure, phase_ns, reactions
from benchmarks.edge_latency.runs import Own

START = 1_000_000_000_000
NEEDS_LEROBOT = pytest.mark.skipif(importlib.util.find_spec("lerobot") is None, reason="the extra 'lerobot'")


def lamp(switched: np.ndarray, at_ns: np.ndarray) -> np.ndarray:
    return np.where(np.searchsorted(switched, at_ns, "right") % 2, 1.0, -1.0)


def record(writes: np.ndarray, delay_ns: int, holds: tuple[int, ...] = ()) -> ArmRecord:
    """Actions at `writes`, each made from what was seen `delay_ns` before."""
    switched = START + switches(3, 60.0)
    mark = lamp(switched, writes - delay_ns)
    mark[list(holds)] = 0.0
    marks = [(float(m), float(m)) for m in mark]
    return ArmRecord(switched, (writes - 1000).tolist(), writes.tolist(), marks)


def grid(n: int, jitter_ns: int = 100_000) -> np.ndarray:
    rng = np.random.default_rng(0)
    return START + 7_000_000 + PERIOD_NS * np.arange(n) + rng.integers(0, jitter_ns, n)


def test_a_punctual_robot() -> None:
    found = measure(record(grid(1500), 30_000_000))
    assert found.missed == found.starved == found.unanswered == 0
    assert 1398 <= found.slots <= 1401
    assert found.lateness_ms.max() < 0.11
    assert np.abs(found.interval_ms).max() < 0.11
    # 30 ms old when it is sent: at most a period later it is sent
    assert len(found.touch_ms) > 10
    assert found.touch_ms.min() >= 30.0
    assert found.touch_ms.max() <= 50.2


def test_late_missed_and_starved_ticks_are_told_apart() -> None:
    writes = grid(1500, 1)
    writes[700] += 3_000_000
    found = measure(record(writes, 0, holds=(800, 801)))
    assert found.lateness_ms.max() == pytest.approx(3.0, abs=0.01)
    assert (found.missed, found.starved) == (0, 2)

    # three periods without a call, then on in the old rhythm
    found = measure(record(np.delete(writes, [900, 901, 902]), 0))
    assert (found.missed, found.starved) == (3, 3)
    assert found.lateness_ms.max() == pytest.approx(60.0, abs=0.01)

    # the same, but the robot is read meanwhile: the loop did run, it had no action
    read = record(np.delete(writes, [900, 901, 902]), 0)
    read.reads_ns += writes[[900, 901, 902]].tolist()
    found = measure(read)
    assert (found.missed, found.starved) == (0, 3)


def test_a_loop_that_drifts_is_even_but_not_punctual() -> None:
    n = 3000
    drifting = record(START + np.arange(n) * (PERIOD_NS + 200_000), 0)
    drifting.reads_ns.clear()
    found = measure(drifting)
    assert np.abs(found.interval_ms).max() == pytest.approx(0.2)
    assert np.percentile(found.lateness_ms, 50) == pytest.approx(5.0, abs=0.5)
    assert found.lateness_ms.max() < 15.1
    # every hundredth slot is passed over
    assert 27 <= found.missed <= 30


def test_the_phase_is_that_of_the_earliest_actions_even_over_the_end_of_the_period() -> None:
    offsets = PERIOD_NS * np.arange(1000) + np.random.default_rng(1).integers(-300_000, 300_000, 1000)
    assert abs((phase_ns(offsets) + PERIOD_NS // 2) % PERIOD_NS - PERIOD_NS // 2 + 300_000) < 20_000


def test_reactions() -> None:
    switched = np.array([100, 200, 300, 400])
    writes = np.arange(0, 500, 10)
    mark = lamp(switched + 25, writes)
    took, unanswered = reactions(switched, writes, mark)
    assert took.tolist() == [30, 30, 30]
    assert unanswered == 0
    # holds in between are no answer, a blend of chunks leans to the newest
    mark[11:14] = 0.0
    mark[14:16] = 0.4
    took, _ = reactions(switched, writes, mark)
    assert took.tolist() == [40, 30, 30]
    # the second switch is never seen: it counts until the third, which finds nothing to answer
    took, unanswered = reactions(switched, writes, np.where(writes < 130, -1.0, 1.0))
    assert (took.tolist(), unanswered) == ([30, 100, 100], 2)


def test_a_robot_that_never_acted_is_an_error() -> None:
    with pytest.raises(ValueError, match="too short"):
        measure(record(grid(60), 0))


def test_the_arm_shows_its_lamp_in_state_and_image(tmp_path: Path) -> None:
    arm = Arm(tmp_path / "r.npz")
    _, state, frame_ns, frames = arm.read()
    assert state[-1] == -1.0
    assert {image.shape for image in frames.values()} == {(PX, PX, 3)}
    assert frames[LIT][:LAMP_PX, :LAMP_PX].max() == 0
    first = int(arm.record.switches_ns[0])
    assert (arm.lamp(first - 1), arm.lamp(first)) == (-1.0, 1.0)
    assert arm._film(LIT, first)[:LAMP_PX, :LAMP_PX].min() == 255
    # no camera repeats its picture
    assert all((arm._film(name, frame_ns) != arm._film(name, frame_ns + 40_000_000)).any() for name in CAMERAS)
    spec = arm_spec()
    assert (spec.state_dim, spec.action_dim) == (7, 8)
    assert arm.record.writes_ns == []
    arm.write(np.ones(8, np.float32))
    arm.save()
    again = ArmRecord.load(tmp_path / "r.npz")
    assert again.marks == [(1.0, 1.0)]
    assert again.writes_ns == arm.record.writes_ns


def test_no_child_outlives_its_context(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError, match="broken ended by itself with status 1"), Children(tmp_path) as children:
        sleeper = children.start("sleeper", "timeit", "-n", "1", "-s", "import time", "time.sleep(60)")
        assert sleeper.exists()
        process = children._running["sleeper"]
        children.pause()
        log = children.start("broken", "timeit", "-n", "1", "print('words'); raise SystemExit(3)")
        children.wait_for("broken", log, "words", 20.0)
        children.rest(20.0)
    assert process.returncode == -signal.SIGTERM


def test_a_child_finds_this_tree_and_not_a_benchmark_of_the_same_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with Children(tmp_path) as children:
        found = "import policies.interface.policy as c, time; print('found', c.__file__, flush=True); time.sleep(60)"
        log = children.start("importer", "timeit", "-n", "1", "-r", "1", found)
        children.wait_for("importer", log, "found", 60.0)
        assert str(Path(edge_latency.__file__).parents[2] / "policies") in log.read_text()


def test_the_table_names_goals_and_limits() -> None:
    quick, slow = measure(record(grid(1500), 20_000_000)), measure(record(grid(1500), 320_000_000))
    edges = (edge_latency.SYNC, edge_latency.OURS)
    found = {(edge, edge_latency.IDLE): (slow if edge == edge_latency.SYNC else quick, Own()) for edge in edges}
    found[edge_latency.OURS, edge_latency.SWAPS] = (quick, Own(swaps=19, missed=2))
    result = edge_latency.result(found, 1_300_000, False, "Meanwhile.")
    assert [goal.holds for goal in result.goals] == [True, True, True]
    assert "not permitted" in render(result, "x")
    assert "19 in all" in render(result, "x")
    assert "missed 2 ticks" in render(result, "x")
    found[edge_latency.OURS, edge_latency.IDLE] = (replace(quick, missed=1), Own())
    assert [goal.holds for goal in edge_latency.result(found, 1, True, "").goals] == [False, True, True]


def test_without_lerobot_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lerobot", None)
    with pytest.raises(SystemExit, match=r"\.\[lerobot\]"):
        edge_latency.measure_edges(True)


@NEEDS_LEROBOT
@pytest.mark.slow
def test_our_two_paths_give_the_actions_of_lerobots_one(tmp_path: Path) -> None:
    from benchmarks.edge_latency import vla

    parameters = vla.build(tmp_path)
    assert 1_200_000 < parameters < 1_400_000
    import torch

    from benchmarks.edge_latency.policy import EdgeVla
    from wire.errors import PolicyError
    from wire.types import Frame, Observation

    policy = EdgeVla(tmp_path)
    weights = (tmp_path / "version.safetensors").read_bytes()
    policy.load(weights, 1)
    plain, before, after = vla.load(tmp_path)
    arm = Arm(tmp_path / "r.npz")
    now_ns, state, frame_ns, frames = arm.read()
    images = {name: Frame(frame_ns, image) for name, image in frames.items()}
    seen = Observation(now_ns, state, images, vla.TASK)
    later = Observation(now_ns, state * np.float32(0.5), images, vla.TASK)
    latent = policy.think(seen)
    for observation in (seen, later):
        chunk = policy.act(observation, latent, 7)
        noise = torch.randn(1, policy.horizon, 8, generator=torch.Generator().manual_seed(chunk.seed))
        pictures = {vla.HEAD + n: torch.tensor(f.image).permute(2, 0, 1) / 255 for n, f in images.items()}
        batch = before({**pictures, "observation.state": torch.tensor(observation.state), "task": vla.TASK})
        with torch.no_grad():
            whole = after(plain.predict_action_chunk(batch, noise=noise))
        np.testing.assert_allclose(chunk.actions, whole[0].numpy(), atol=2e-5)
        assert chunk.first_tick == 7
    # marks: the lamp is off
    assert (chunk.actions[:, -2:] == -1.0).all()
    lit = Observation(now_ns, np.append(state[:-1], np.float32(1)), images, vla.TASK)
    assert (policy.act(lit, latent, 0).actions[:, -2:] == [1.0, -1.0]).all()
    policy.load(weights, 2)
    with pytest.raises(PolicyError, match="version 1"):
        policy.act(seen, latent, 0)
