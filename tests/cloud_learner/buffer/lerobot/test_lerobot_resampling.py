"""Rows at another rate than the robot's: refused, or resampled by the meaning of each number."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.lerobot.mapping import DatasetMapping
from cloud_learner.buffer.lerobot.resampling import Steps, resampled
from tests.cloud_learner.buffer.lerobot.lerobot_samples import joined, taken
from tests.extras import needs
from wire.errors import ConfigError
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

ACTION = tuple(
    Dimension(meaning.value, "m", -9.0, 9.0, meaning)
    for meaning in (CommandType.absolute, CommandType.delta, CommandType.velocity)
)
ABSOLUTE, DELTA, VELOCITY = range(3)
SIZE, ROWS = 16, 6


def episode(action: np.ndarray, fps: float, **columns: np.ndarray) -> Steps:
    """R rows with the given actions, float32[R, 3]; the episode ends with the last one."""
    rows = len(action)
    steps = Steps(
        times_ns=10**18 + np.rint(np.arange(rows) * 1e9 / fps).astype(np.int64),
        state=action,
        action=action,
        reward=np.zeros(rows, np.float32),
        actor=np.arange(rows).astype(np.uint8),
        version=np.arange(rows).astype(np.int32),
        lag=np.arange(rows, 0, -1).astype(np.int32),
        done=np.arange(rows) == rows - 1,
        truncated=np.zeros(rows, bool),
        frame_times_ns=np.arange(rows)[:, None],
        row=np.arange(rows),
        recovery=np.arange(rows) % 2 > 0,
    )
    return msgspec.structs.replace(steps, **columns)


def test_twice_the_rate_by_hand() -> None:
    action = np.array([[1, 4, 1], [3, -2, 5]], np.float32)
    state, times, reward = np.array([[0], [4]], np.float32), np.array([7, 7 + 10**8]), np.array([0.5, 2.0], np.float32)
    found = resampled(episode(action, 10, state=state, times_ns=times, reward=reward), 10, 20, ACTION)
    # reached at the ends of the rows; the first has none before it
    assert found.action[:, ABSOLUTE].tolist() == [1, 1, 2, 3]
    assert found.action[:, DELTA].tolist() == [2, 2, -1, -1]
    assert found.action[:, VELOCITY].tolist() == [1, 1, 5, 5]
    assert found.state.ravel().tolist() == [0, 2, 4, 4]
    assert found.times_ns.tolist() == [7, 7 + 5 * 10**7, 7 + 10**8, 7 + 15 * 10**7]
    assert found.row.tolist() == found.actor.tolist() == found.frame_times_ns.ravel().tolist() == [0, 0, 1, 1]
    assert found.recovery.tolist() == [False, False, True, True]
    assert found.reward.tolist() == [0, 0.5, 0, 2]


def test_half_the_rate_by_hand() -> None:
    action = np.array([[1, 4, 1], [3, -2, 5], [7, 1, 2]], np.float32)
    state, reward = np.array([[0], [4], [5]], np.float32), np.array([1.0, 2.0, 4.0], np.float32)
    found = resampled(episode(action, 20, state=state, reward=reward), 20, 10, ACTION)
    assert found.action[:, ABSOLUTE].tolist() == [3, 7]
    assert found.action[:, DELTA].tolist() == [2, 1]
    assert found.action[:, VELOCITY].tolist() == [3, 2], "the last tick ends with the last row"
    assert found.state.ravel().tolist() == [0, 5]
    assert (found.row.tolist(), found.actor.tolist(), found.version.tolist()) == ([0, 2], [1, 2], [1, 2])
    assert found.reward.tolist() == [3, 4]


@pytest.mark.parametrize(("fps", "control_hz"), [(30, 60), (30, 50), (50, 30), (15, 80), (29.97, 60), (60, 7)])
def test_sums_ways_ends_and_times_stay(fps: float, control_hz: float) -> None:
    rng = np.random.default_rng(0)
    action, reward = rng.normal(size=(97, 3)).astype(np.float32), rng.normal(size=97).astype(np.float32)
    found = resampled(episode(action, fps, reward=reward), fps, control_hz, ACTION)
    ticks = np.arange(len(found))
    assert found.action.dtype == np.float32 and len(found) == int(np.ceil(round(97 * control_hz / fps, 6)))
    assert found.action[:, DELTA].sum() == pytest.approx(action[:, DELTA].sum(), abs=1e-4)
    length_s = np.minimum((ticks + 1) / control_hz, 97 / fps) - ticks / control_hz
    assert found.action[:, VELOCITY] @ length_s == pytest.approx(action[:, VELOCITY].sum() / fps, abs=1e-4)
    assert found.action[-1, ABSOLUTE] == action[-1, ABSOLUTE]
    assert found.reward.sum() == pytest.approx(reward.sum(), abs=1e-5)
    assert np.flatnonzero(found.done).tolist() == [len(found) - 1]
    assert np.abs(found.times_ns - 10**18 - ticks * 1e9 / control_hz).max() < 100, "a millionth of a row"


def test_up_and_down_again_is_what_it_was() -> None:
    rng = np.random.default_rng(1)
    action, state = rng.normal(size=(2, 20, 3)).astype(np.float32)
    rows = episode(action, 10, state=state)
    again = resampled(resampled(rows, 10, 20, ACTION), 20, 10, ACTION)
    assert np.allclose(again.action, action, atol=1e-6)
    assert np.array_equal(again.state, state) and np.array_equal(again.times_ns, rows.times_ns)
    assert resampled(rows, 10, 10, ACTION) is rows


# --- through the import -----------------------------------------------------------------------------------------------


def robot(control_hz: float) -> RobotSpec:
    state = (Dimension("position", "m", -9.0, 9.0),)
    return RobotSpec("arm", state, ACTION, (CameraSpec("top", SIZE, SIZE, 10.0),), control_hz)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """One episode of `ROWS` rows at 10 Hz, each with a picture of its own, as small as the format allows."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    features = {
        "observation.state": {"dtype": "float32", "shape": [1], "names": ["position"]},
        "action": {"dtype": "float32", "shape": [3], "names": [dimension.name for dimension in ACTION]},
        "observation.images.top": {
            "dtype": "image",
            "shape": [SIZE, SIZE, 3],
            "names": ["height", "width", "channels"],
        },
        **{name: {"dtype": "float32", "shape": [1]} for name in ("timestamp", "next.reward")},
        **{name: {"dtype": "int64", "shape": [1]} for name in ("task_index", "episode_index")},
        "next.done": {"dtype": "bool", "shape": [1]},
    }
    place = "{}/chunk-{{chunk_index:03d}}/file-{{file_index:03d}}.parquet"
    info = {"codebase_version": "v3.0", "fps": 10, "data_path": place.format("data"), "features": features}
    pictures = [cv2.imencode(".jpg", np.full((SIZE, SIZE, 3), 40 * row, np.uint8))[1].tobytes() for row in range(ROWS)]
    rows = {
        "observation.state": [[float(row)] for row in range(ROWS)],
        "action": pa.array([[row + 1.0, 2.0, row - 2.0] for row in range(ROWS)], pa.list_(pa.float32())),
        "observation.images.top": [{"bytes": picture, "path": ""} for picture in pictures],
        "timestamp": [row / 10 for row in range(ROWS)],
        "next.reward": [0.0] * (ROWS - 1) + [1.0],
        "next.done": [False] * (ROWS - 1) + [True],
        "task_index": [0] * ROWS,
        "episode_index": [0] * ROWS,
    }
    tasks = {"task_index": [0], "task": ["push"]}
    episodes = {"episode_index": [0], "length": [ROWS], "data/chunk_index": [0], "data/file_index": [0]}
    root = tmp_path / "dataset"
    for name, table in (
        ("data/chunk-000/file-000", rows),
        ("meta/tasks", tasks),
        ("meta/episodes/chunk-000/file-000", episodes),
    ):
        path = root / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table(table), path)
    (root / "meta" / "info.json").write_text(json.dumps(info))
    return root


@needs("pyarrow")
def test_another_rate_is_refused_with_both_rates_and_the_remedy(dataset: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 10 rows a second, robot spec 'arm' runs at 40 Hz.*\(--resample\)"):
        taken(dataset, DatasetMapping(spec=robot(40)))


@needs("pyarrow")
@pytest.mark.parametrize("control_hz", [10, 20, 40, 25])
def test_a_faster_robot_sees_every_frame_at_its_own_time(dataset: Path, control_hz: float) -> None:
    (segment,) = taken(dataset, DatasetMapping(spec=robot(control_hz), resample=True))
    steps = round(ROWS * control_hz / 10)
    assert segment.steps == steps
    assert np.array_equal(segment.times_ns, np.rint(np.arange(steps) * 1e9 / control_hz).astype(np.int64))
    frames = segment.frames["top"]
    assert np.array_equal(frames.times_ns, np.arange(ROWS) * 10**8), "every frame once"
    newest = frames.times_ns[np.searchsorted(frames.times_ns, segment.times_ns, "right") - 1]
    assert np.array_equal(segment.frame_times_ns["top"], newest)
    assert segment.executed[:, DELTA].sum() == pytest.approx(2 * ROWS)
    assert segment.executed[[0, -1], ABSOLUTE].tolist() == [1, ROWS]
    assert segment.reward.tolist() == [0] * (steps - 1) + [1]
    assert segment.terminated.tolist() == [False] * (steps - 1) + [True]
    assert (segment.outcome, segment.episode.spec_hash) == ("success", robot(control_hz).hash)


@needs("pyarrow")
def test_a_slower_robot_has_no_frame_that_it_never_saw(dataset: Path) -> None:
    (segment,) = taken(dataset, DatasetMapping(spec=robot(5), resample=True))
    assert segment.state.ravel().tolist() == [0, 2, 4]
    assert segment.executed.tolist() == [[2, 4, -1.5], [4, 4, 0.5], [6, 4, 2.5]]
    assert (
        segment.frames["top"].times_ns.tolist() == segment.frame_times_ns["top"].tolist() == [0, 2 * 10**8, 4 * 10**8]
    )
    shades = [cv2.imdecode(np.frombuffer(jpeg, np.uint8), 0).mean() for jpeg in segment.frames["top"].encoded]
    assert shades == pytest.approx([0, 80, 160], abs=3)
    assert joined([segment], "reward").tolist() == [0, 0, 1]


@needs("pyarrow")
def test_a_delta_is_held_against_the_limits_of_a_tick(dataset: Path) -> None:
    """A row's delta of 2 is far beyond what the robot does in a tick, and four ticks share it."""
    stats = {"min": [0.0, 2.0, -2.0], "max": [1.0, 2.0, 4.0]}
    (dataset / "meta" / "stats.json").write_text(json.dumps({"action": stats}))
    small = msgspec.structs.replace(ACTION[DELTA], low=-0.1, high=0.1)
    spec = msgspec.structs.replace(robot(40), action=(ACTION[ABSOLUTE], small, ACTION[VELOCITY]))
    assert taken(dataset, DatasetMapping(spec=spec, resample=True))[0].executed[0, DELTA] == 0.5
    slow = msgspec.structs.replace(spec, control_hz=10.0)
    with pytest.raises(ConfigError, match="'delta' runs from 2 to 2"):
        taken(dataset, DatasetMapping(spec=slow))
