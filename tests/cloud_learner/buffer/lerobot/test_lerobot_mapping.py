"""Datasets that others recorded become data of a robot that is made of them, or of one that is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from cloud_learner.buffer.lerobot import source as lerobot_source
from cloud_learner.buffer.lerobot.importer import import_dataset
from cloud_learner.buffer.lerobot.mapping import DatasetMapping
from tests.cloud_learner.buffer.lerobot.lerobot_samples import (
    HUMAN,
    Buffer,
    buffer,
    episodes,
    joined,
    other,
    shown,
    taken,
)
from tests.extras import needs
from wire.errors import ConfigError, CorruptDataError, InvalidDataError, SpecMismatchError
from wire.types import CameraSpec, Dimension, RobotSpec

pytestmark = [
    pytest.mark.slow,
    needs("lerobot"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0"),
    pytest.mark.filterwarnings("ignore:Converting input from bool"),
]
__all__ = ["buffer", "other"]


HEIGHT, WIDTH = 48, 64


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[..., Path]:
    """Writes a dataset as others record it: two episodes of 12 rows, angles in degrees, an image a row."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    def write(name: str = "foreign", *, tasks=("push the cube",), change=lambda frame, row: frame, **features) -> Path:
        dataset = LeRobotDataset.create(
            "someone/dataset",
            30,
            {
                "observation.state": {"dtype": "float32", "shape": (3,), "names": {"motors": ["pan", "lift", "grip"]}},
                "action": {"dtype": "float64", "shape": (2,), "names": None},
                "observation.images.top": {
                    "dtype": "image",
                    "shape": (3, HEIGHT, WIDTH),
                    "names": ["channels", "height", "width"],
                },
                **features,
            },
            root=tmp_path / name,
            robot_type="so100",
            use_videos=False,
        )
        rng = np.random.default_rng(0)
        for episode in range(2):
            for row in range(12):
                image = np.full((HEIGHT, WIDTH, 3), 20 * (row // 2) + 3, np.uint8)
                image[:, :, 0] = 100 * episode
                frame = {
                    "observation.state": np.array([10 * row, -episode, rng.uniform()], np.float32),
                    "action": np.array([10 * row + 1, 100 - row], np.float64),
                    "observation.images.top": image,
                    "task": tasks[row * len(tasks) // 12],
                }
                dataset.add_frame(change(frame, row))
            dataset.save_episode()
        dataset.finalize()
        return tmp_path / name

    return write


def test_a_robot_is_made_of_what_the_dataset_says(foreign: Callable[..., Path], other: Buffer) -> None:
    done = import_dataset(other.ledger, other.store, foreign())
    spec = done.spec
    assert (spec.embodiment, spec.control_hz) == ("so100", 30)
    assert [d.name for d in spec.state] == ["pan", "lift", "grip"]
    assert [d.name for d in spec.action] == ["action0", "action1"]
    assert [d.unit for d in spec.state] == ["unknown"] * 3
    assert [(d.low, d.high) for d in spec.action] == [(1, 111), (89, 100)]
    assert spec.cameras == (CameraSpec("top", HEIGHT, WIDTH, 30),)
    first, second = episodes(other.segments())
    assert first[0].episode.task == "push the cube"
    assert joined(first, "state")[:, 0].tolist() == [10 * row for row in range(12)]
    assert joined(second, "executed")[:, 1].tolist() == [100 - row for row in range(12)]
    assert set(joined(first, "actor")) == {HUMAN}
    assert first[-1].outcome == "success"
    assert first[-1].terminated.tolist()[-2:] == [False, True]
    times = joined(first, "times_ns")
    assert np.array_equal(times, np.rint(np.arange(12) * 1e9 / 30).astype(np.int64))
    # two rows show the same picture, which is kept once, with the time it was new
    frames = first[0].frames["top"]
    assert np.array_equal(frames.times_ns, times[::2])
    assert np.array_equal(first[0].frame_times_ns["top"], np.repeat(times[::2], 2))
    assert [round(p[:, :, 1].mean()) for p in shown(second, "top")] == [20 * (row // 2) + 3 for row in range(12)]
    assert max(abs(p[:, :, 0].mean() - 100) for p in shown(second, "top")) < 2


def arm(**changes) -> RobotSpec:
    """A robot that the foreign dataset could be of, if one says what is what."""
    facts = {
        "embodiment": "arm",
        "state": (Dimension("lift", "deg", -90, 90), Dimension("pan", "rad", -3.2, 3.2)),
        "action": (Dimension("pan", "rad", -3.2, 3.2), Dimension("lift", "deg", -110, 110)),
        "cameras": (CameraSpec("above", 24, 24, 30.0),),
        "control_hz": 30.0,
    }
    return RobotSpec(**{**facts, **changes})


def fitting(**changes) -> DatasetMapping:
    facts = {
        "spec": arm(),
        "names": {},
        "scale": {"pan": np.pi / 180},
        "cameras": {"above": "top"},
        "tasks": {"push the cube": "push"},
        "robot": "arm-1",
    }
    return DatasetMapping(**{**facts, **changes})


def named(root: Path) -> Path:
    """Give the dataset's actions the names that a robot would know."""
    info = json.loads((root / "meta" / "info.json").read_text())
    info["features"]["action"]["names"] = ["pan", "lift"]
    (root / "meta" / "info.json").write_text(json.dumps(info))
    return root


def test_a_given_robot_takes_what_it_knows(foreign: Callable[..., Path]) -> None:
    segments = taken(named(foreign()), fitting())
    first = episodes(segments)[0]
    assert np.array_equal(joined(first, "state")[:, 0], np.zeros(12))
    assert joined(first, "state")[:, 1] == pytest.approx(np.deg2rad(np.arange(12) * 10))
    assert joined(first, "executed")[:, 0] == pytest.approx(np.deg2rad(np.arange(12) * 10 + 1))
    assert first[0].episode.task == "push"
    assert first[0].episode.robot == "arm-1"
    assert shown(first, "above")[5].shape == (24, 24, 3)


def test_state_and_action_may_share_a_name_that_means_two_things(foreign: Callable[..., Path]) -> None:
    names = {"state.lift": "grip", "action.lift": "pan", "action.pan": "lift"}
    segments = taken(named(foreign()), fitting(names=names, scale={"pan": np.pi / 180, "state.lift": 3.0}))
    plain = taken(named(foreign("plain")))
    assert joined(segments, "state")[:, 0] == pytest.approx(3 * joined(plain, "state")[:, 2])
    assert np.array_equal(joined(segments, "executed")[:, 1], joined(plain, "executed")[:, 0])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"spec": arm(control_hz=50.0)}, ConfigError, r"30 rows a second, robot spec 'arm' runs at 50 Hz"),
        (
            {"spec": arm(action=(Dimension("twist", "rad", -1, 1),))},
            SpecMismatchError,
            r"'action' of .* has no 'twist'.*pan, lift",
        ),
        ({"cameras": {}}, SpecMismatchError, r"no images 'above'.*it has: observation\.images\.top"),
        ({"cameras": {"aboev": "top"}}, ConfigError, r"no camera 'aboev'.*Did you mean 'above'"),
        ({"scale": {}}, ConfigError, r"'observation.state' .* 'pan' runs from 0 to 110, .* -3\.2 to 3\.2 rad.*scale"),
        ({"scale": {"pna": 1.0}}, ConfigError, "scale: the robot has no state or action 'pna'"),
        ({"names": {"x": "y"}}, ConfigError, "names: the robot has no state or action 'x'"),
        ({"by_position": True}, SpecMismatchError, "has 3 numbers, the robot's state has 2"),
        ({"robot": "../x"}, InvalidDataError, "robot '../x' cannot be a file name"),
    ],
)
def test_what_does_not_fit_is_named(
    foreign: Callable[..., Path], changes: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        taken(named(foreign()), fitting(**changes))


def test_by_position(foreign: Callable[..., Path]) -> None:
    spec = arm(state=tuple(Dimension(name, "deg", -200, 200) for name in "abc"))
    segments = taken(foreign(), fitting(spec=spec, by_position=True, scale={"pan": 0.01}))
    assert segments[0].state[:, 0].tolist() == [10 * row for row in range(12)]
    assert segments[0].executed[:, 0] == pytest.approx((np.arange(12) * 10 + 1) * 0.01)


def test_rewards_and_outcomes_of_others(foreign: Callable[..., Path]) -> None:
    def change(frame: dict, row: int) -> dict:
        success = row == 11 and frame["observation.state"][1] == 0
        return frame | {
            "next.reward": np.array([row / 2], np.float32),
            "next.done": np.array([row == 11]),
            "next.success": np.array([success]),
        }

    features = {
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    }
    first, second = episodes(taken(foreign(change=change, **features)))
    assert joined(first, "reward").tolist() == [row / 2 for row in range(12)]
    assert (first[-1].outcome, second[-1].outcome) == ("success", "failure")
    assert first[-1].terminated.tolist() == second[-1].terminated.tolist() == [False] * 11 + [True]


def test_an_episode_of_two_tasks_becomes_two(foreign: Callable[..., Path]) -> None:
    segments = taken(foreign(tasks=("push the cube", "go home")))
    assert [(s.episode.task, s.steps, s.last) for s in segments] == [
        ("push the cube", 6, True),
        ("go home", 6, True),
    ] * 2
    assert segments[1].executed[:, 0].tolist() == [10 * row + 1 for row in range(6, 12)]
    assert [round(p[:, :, 1].mean()) for p in shown([segments[1]], "top")] == [63, 63, 83, 83, 103, 103]
    assert segments[1].times_ns[0] == segments[1].episode.started_ns


def test_equal_episodes_stay_two(foreign: Callable[..., Path], other: Buffer) -> None:
    def same(frame: dict, row: int) -> dict:
        return frame | {"observation.state": np.array([row, 0, 0], np.float32)}

    root = foreign(change=same)
    first, second = episodes(taken(root))
    assert second[0].episode.id == first[0].episode.id + "-2"
    assert import_dataset(other.ledger, other.store, root).episodes == 2
    assert import_dataset(other.ledger, other.store, root).known == 2


def test_an_instruction_too_long_for_a_name(foreign: Callable[..., Path]) -> None:
    long = "push the cube " * 20
    root = foreign(tasks=(long,))
    with pytest.raises(ConfigError, match=r"episode 0: a task name has 1 to 200.*has 280"):
        taken(root)
    assert taken(root, DatasetMapping(tasks={long: "push"}))[0].episode.task == "push"


def test_a_number_that_is_none(foreign: Callable[..., Path]) -> None:
    def change(frame: dict, row: int) -> dict:
        if row == 7 and frame["observation.state"][1] == -1:
            return frame | {"action": np.array([np.nan, 1.0])}
        return frame

    root = foreign(change=change)
    spec = arm(state=(Dimension("pan", "deg", -200, 200),), action=tuple(Dimension(n, "x", -200, 200) for n in "ab"))
    mapping = fitting(spec=spec, scale={}, names={"a": "action0", "b": "action1"})
    with pytest.raises(InvalidDataError, match=r"episode 1 of .*foreign: proposed is not finite at tick 7"):
        taken(root, mapping)
    assert len(taken(root, mapping, skip_broken=True)) == 1


def test_without_statistics_a_robot_must_be_given(foreign: Callable[..., Path]) -> None:
    root = foreign()
    (root / "meta" / "stats.json").unlink()
    with pytest.raises(ConfigError, match=r"no statistics.*give a robot spec"):
        taken(root)
    assert len(taken(named(root), fitting())) == 2


def test_jpeg_images_of_the_right_size_are_kept_as_they_are(foreign: Callable[..., Path]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    root = foreign()
    path = next((root / "data").rglob("*.parquet"))
    table = parquet.read_table(path)
    rng = np.random.default_rng(0)
    images = [
        cv2.imencode(".jpg", rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))[1].tobytes() for _ in range(24)
    ]
    at = table.column_names.index("observation.images.top")
    cells = pa.array([{"bytes": image, "path": None} for image in images], table.schema.field(at).type)
    parquet.write_table(table.set_column(at, table.schema.field(at), cells), path)
    segments = taken(root)
    assert [jpeg for segment in segments for jpeg in segment.frames["top"].encoded] == images
    cells = pa.array([{"bytes": images[0][:99], "path": None}] * 24, table.schema.field(at).type)
    parquet.write_table(table.set_column(at, table.schema.field(at), cells), path)
    with pytest.raises(CorruptDataError, match=r"episode 0: an image in .*top' of .* is no PNG or JPEG"):
        taken(root)
    assert lerobot_source.picture_size({"shape": (3, 4, 5), "names": ["channel", "h", "w"]}) == (4, 5, 3)
