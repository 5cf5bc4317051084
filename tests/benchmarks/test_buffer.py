"""The buffer's benchmarks: that they run, and that what they compare and check is what they say."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.buffer import __main__ as buffer
from benchmarks.buffer import load as buffer_load
from benchmarks.buffer import made_ledger
from benchmarks.buffer import scale as buffer_scale
from benchmarks.buffer.data import CAMERAS, HORIZON, Scale, make
from benchmarks.buffer.growth import At, Growth, flatness, measure_growth
from benchmarks.buffer.ours import Ours, cache_for_all, feed_config, fill, smallest_cache
from benchmarks.buffer.peers import Contender, Flat, TorchRL, folder_bytes
from benchmarks.common import table
from benchmarks.common.cpu import Others, cpu_seconds
from cloud_learner.buffer.check import CommittedHistory, check_frames, check_names, check_order, check_steps
from cloud_learner.buffer.location import BufferLocation
from wire.messages.gateway import Segment

SCALE = Scale(episodes=2, frames=8, steps_per_frame=4, size=64)


def test_the_data_are_segments_that_a_gateway_would_take() -> None:
    before: dict[str, CommittedHistory] = {}

    def take(segment: Segment) -> None:
        known = before.setdefault(segment.episode.id, CommittedHistory())
        check_names(segment, "robot-0")
        check_steps(segment, SCALE.spec())
        check_order(segment, known)
        check_frames(segment, SCALE.spec(), known.frames_until(segment.index))
        known.add(segment)

    raw = make(replace(SCALE, frames=30), take)
    assert len(before) == 2
    assert raw.frames[0].shape == (60, 64, 64, 3)
    # the pictures move
    assert (raw.frames[0][0] != raw.frames[0][29]).any()


def samples(one: Contender, episode_steps: int, batches: int = 8) -> list[tuple[int, np.ndarray]]:
    """(step, flat sample) of what a contender gives; the step as its state says."""
    found = []
    for _ in range(batches):
        batch = one.batch()
        states = np.asarray(batch["state"])
        for i in range(len(states)):
            images = [np.asarray(batch["images"][camera][i]).astype(np.float32).ravel() for camera in CAMERAS]
            mask = np.asarray(batch["mask"][i]).astype(np.float32)
            actions = np.asarray(batch["actions"][i]) * mask[:, None]
            step = int(states[i, 0]) * episode_steps + int(states[i, 1])
            found.append((step, np.concatenate([*images, states[i], actions.ravel(), mask])))
    return found


@pytest.mark.parametrize("who", ["ours", "memory", "mapped", pytest.param("torchrl", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_all_contenders_give_the_same_samples(who: str, tmp_path: Path) -> None:
    place = BufferLocation(tmp_path / "ours")
    raw = fill(place, SCALE)
    if who == "torchrl" and importlib.util.find_spec("torchrl") is None:
        pytest.skip("torchrl is not installed: the extra 'peers'")
    one: Contender
    if who == "ours":
        one = Ours("ours", place, SCALE.spec(), feed_config(32 << 20, 16, 8.0, prefetch=0))
    elif who == "torchrl":
        one = TorchRL(raw, 16, tmp_path / "torchrl", 10**6)
    else:
        one = Flat.in_memory(raw, 16) if who == "memory" else Flat.mapped(raw, 16, tmp_path / "mapped")
    windows, mask = raw.windows(np.arange(SCALE.steps))
    drawn = samples(one, SCALE.episode_steps)
    for step, got in drawn:
        images = [frames[raw.frame[step]].astype(np.float32).ravel() for frames in raw.frames]
        actions = raw.actions[windows[step]] * mask[step][:, None]
        np.testing.assert_array_equal(got, np.concatenate([*images, raw.state[step], actions.ravel(), mask[step]]))
    assert len({step for step, _ in drawn}) > SCALE.steps / 2
    assert any(got[-HORIZON:].sum() < HORIZON for _, got in drawn), "no window ends with its episode"
    one.close()


def test_sizes_of_caches_and_folders(tmp_path: Path) -> None:
    place = BufferLocation(tmp_path / "ours")
    scale = replace(SCALE, episodes=6, frames=64)
    fill(place, scale)
    config = feed_config(0, 16, 8.0)
    least = smallest_cache(place, scale.spec(), config)
    assert least < scale.decoded_bytes <= cache_for_all(place, scale.spec(), scale, config)
    assert not list(place.journal.glob("*.journal"))
    (tmp_path / "ours" / "more").write_bytes(b"x" * 100_000)
    assert folder_bytes(tmp_path / "ours" / "more") == 0
    assert folder_bytes(tmp_path / "ours") > 100_000


@pytest.mark.slow
def test_growth_is_measured_at_each_size(tmp_path: Path) -> None:
    found = measure_growth(tmp_path, Growth(sizes=(2, 4), rounds=1, appends=3, openings=1))
    assert [(at.episodes, at.segments, len(at.append_s)) for at in found] == [(2, 6, 3), (4, 12, 3)]
    assert all(min(*at.append_s, *at.append_sealing_s, *at.seal_s, *at.read_s, *at.write_s) > 0 for at in found)
    assert flatness([At(1, append_s=[1.0, 2.0, 9.0]), At(9, append_s=[3.0, 4.0, 5.0])], 0.5) == 2.0


def test_painted_numbers_survive_jpeg() -> None:
    from benchmarks.buffer.data import JPEG_QUALITY, decode
    from robot_edge.uplink.segments import encode_jpeg

    rng = np.random.default_rng(0)
    wanted = rng.integers(0, 1 << 16, (50, 2))
    noise = rng.integers(0, 256, (128, 128, 3), dtype=np.uint8)
    got = np.stack([decode(encode_jpeg(buffer_load.paint_numbers(noise, *pair), JPEG_QUALITY)) for pair in wanted])
    np.testing.assert_array_equal(np.stack(buffer_load.read_numbers(got), 1), wanted)


def whole_batch() -> dict[str, object]:
    scale, ticks = buffer_load.SCALE, np.array([4, 9])
    painter = buffer_load.PicturePainter()
    first, second = (painter.episode(number, "r", "online")[0] for number in (7, 8))
    from benchmarks.buffer.data import decode

    return {
        "state": np.stack([first.state[4], second.state[9]]),
        "actions": np.stack([first.executed[4:20], second.executed[9:25]]),
        "mask": np.ones((2, HORIZON), np.float32),
        "tick": ticks,
        "episode": np.array([1, 2]),
        "images": {
            camera: np.stack(
                [
                    decode(segment.frames[camera].encoded[tick // scale.steps_per_frame])
                    for segment, tick in zip((first, second), ticks, strict=True)
                ]
            )
            for camera in CAMERAS
        },
    }


@pytest.mark.slow
def test_a_sample_that_is_not_whole_is_counted() -> None:
    def mixed(batch: dict[str, object]) -> int:
        checked = buffer_load.Checked()
        buffer_load.check(batch, checked)
        assert checked.samples == 2
        return checked.mixed

    assert mixed(whole_batch()) == 0
    for key, at in (("state", (0, 0)), ("state", (1, 1)), ("actions", (0, 15, 0)), ("actions", (1, 3, 1))):
        batch = whole_batch()
        batch[key][at] += 1  # type: ignore[index]
        assert mixed(batch) == 1, key
    for camera in CAMERAS:
        batch = whole_batch()
        batch["images"][camera] = batch["images"][camera][::-1]  # type: ignore[index]
        assert mixed(batch) == 2
    batch = whole_batch()
    batch["episode"][:] = 1  # type: ignore[index]
    assert mixed(batch) > 0
    batch = whole_batch()
    batch["mask"][0, 3] = 0  # type: ignore[index]
    assert mixed(batch) == 1


def test_processor_time_counts_children() -> None:
    import subprocess
    import sys

    before = cpu_seconds()
    child = subprocess.Popen(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    during = cpu_seconds()
    child.communicate(b"\n")
    assert during - before >= 0.25
    # it ended, and what it used is not forgotten
    assert cpu_seconds() >= during
    assert 0 <= Others().cores() < 1000


@pytest.mark.slow
def test_the_quick_runs_keep_the_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    table.run("buffer", buffer.measure, ["--quick", "--write", "--json", str(tmp_path / "buffer.json")])
    found = json.loads((tmp_path / "buffer.json").read_text())
    assert {row["data"] for row in found["rows"]} == set(buffer.KINDS.values())
    assert all(row["samples/s"] > 0 for row in found["rows"])
    assert len(found["goals"]) == 10
    assert [row["episodes"] for row in found["more"]["Appending and opening as the buffer grows"]] == [5, 10]
    assert "## Appending" in (tmp_path / "buffer.md").read_text()


@pytest.mark.slow
def test_sampling_beside_a_writing_process_finds_whole_samples() -> None:
    result = buffer_load.measure(quick=True)
    goals = {goal.name: goal for goal in result.goals}
    assert goals["samples that are not whole"].holds
    assert goals["steps missing for the sampler in the end"].holds
    assert goals["segments refused"].holds
    assert goals["sampling while writing, of sampling alone"].value > 0


def test_made_rows_are_those_of_a_ledger(tmp_path: Path) -> None:
    place = BufferLocation(tmp_path)
    made_ledger.fill(place, 900)
    with buffer_scale._opened(place) as dataset:
        index = dataset.universe
        assert len(index) == dataset._ledger.totals().segments == 900
        assert int(index.steps.sum()) == dataset._ledger.totals().steps == dataset.eligible_steps
        assert dataset.finished("demonstration") + dataset.finished("online") == 30
        assert ((index.following >= 0) | index.last).all()
        made_ledger.add_new(place)
        made_ledger.publish(place)
        assert dataset.refresh() == made_ledger.NEW
        assert dataset.sampler.next().newest_version == made_ledger.VERSIONS + 1


def test_a_row_is_as_flat_as_it_must_be_or_within_its_bound() -> None:
    def holds(who: str, kind: str, small: float, large: float) -> bool | None:
        goal = buffer_scale._goal(who, f"{kind}, ms", "few", small, large)
        return None if goal is None else goal.holds

    assert holds("once", "open", 1, 100) is None
    assert [holds("again and again", "x", 10, large) for large in (15, 16)] == [True, False]
    assert [holds("now and then", "x", 10, large) for large in (30, 31)] == [True, False]
    assert holds("again and again", "x", 0.1, 0.5)
    # a stated bound stands in place of a factor
    (bounded, bound), *_ = buffer_scale._BOUNDS_MS.items()
    assert [holds("now and then", bounded, 1, large) for large in (bound, bound + 1)] == [True, False]
    assert [holds("longest write transaction", "x", 0, large) for large in (50, 51)] == [True, False]


@pytest.mark.slow
def test_both_sizes_are_measured() -> None:
    result = buffer_scale.measure(quick=True)
    assert len(result.goals) > 20
    goals = {goal.name for goal in result.goals}
    assert {*buffer_scale._BOUNDS_MS} <= {name.removesuffix(", ms") for name in goals}
    assert len([name for name in goals if name.startswith("longest write transaction: ")]) == 3
    assert all(row["20,000 segments"] > 0 and row["40,000 segments"] > 0 for row in result.rows if "MB" in row["what"])
