"""What the import stores is what the dataset shows: our own exports to the bit, and datasets of others."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

pytest.importorskip("lerobot", reason="pip install 'vla-fleet[lerobot]'")

from cloud_learner.buffer import lerobot_export, lerobot_import, lerobot_source
from cloud_learner.buffer.fake import fake_episode, fake_spec, same_segment
from cloud_learner.buffer.lerobot_export import export
from cloud_learner.buffer.lerobot_import import fetch, import_dataset, import_into
from cloud_learner.buffer.lerobot_mapping import Mapping, map_dataset
from cloud_learner.buffer.lerobot_rows import row_spec
from cloud_learner.buffer.lerobot_selection import Progress, Selection
from cloud_learner.buffer.lerobot_source import Source
from tests.cloud_learner.buffer.lerobot_samples import (
    HUMAN,
    SPEC,
    Buffer,
    buffer,
    joined,
    other,
    shown,
    two_episodes,
)
from wire.errors import ConfigError, Corrupt, InvalidData, SpecMismatch, StorageError
from wire.messages import Segment
from wire.types import CameraSpec, Dimension, Meaning, RobotSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0"),
    pytest.mark.filterwarnings("ignore:Converting input from bool"),
]
__all__ = ["buffer", "other"]


def taken(root: Path, mapping: Mapping | None = None, **options) -> list[Segment]:
    """The segments that an import of `root` gives away."""
    source, found = Source.open(root), []
    import_dataset(source, map_dataset(source, mapping or Mapping()), found.append, **options)
    return found


def episodes(segments: list[Segment]) -> list[list[Segment]]:
    found: dict[str, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.episode.id, []).append(segment)
    return list(found.values())


@pytest.fixture
def exported(buffer: Buffer, tmp_path: Path) -> Path:
    """An export of two episodes; each has video files of its own."""
    two_episodes(buffer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lerobot_export, "_video_file_mb", lambda spec: 1e-6)
        export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", instructions={"window-open": "open the window"})
    return tmp_path / "out"


@pytest.mark.parametrize("video", [True, False])
def test_there_and_back(buffer: Buffer, other: Buffer, tmp_path: Path, video: bool) -> None:
    two_episodes(buffer, steps=300)
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", video=video)
    told: list[Progress] = []
    done = import_into(other.ledger, other.store, tmp_path / "out", progress=told.append)
    assert (done.episodes, done.known, done.steps, done.left_out) == (2, 0, 596, ())
    assert done.spec == SPEC
    assert told == [Progress(1, 2, 300), Progress(2, 2, 596)]
    other.seal()
    back = episodes(other.segments())
    for stored, copy in zip(buffer.put.values(), back, strict=True):
        assert [segment.steps for segment in copy][:2] == [128, 128]
        for name in ("times_ns", "state", "executed", "reward", "actor", "terminated", "truncated"):
            assert np.array_equal(joined(stored, name), joined(copy, name)), name
        assert np.array_equal(joined(copy, "proposed"), joined(copy, "executed"))
        episode, was = copy[0].episode, stored[0].episode
        assert (episode.source, episode.robot, episode.spec_hash) == ("demonstration", "lerobot", SPEC.hash)
        assert (episode.task, episode.seed, copy[-1].outcome) == (was.task, was.seed, stored[-1].outcome)
        assert not joined(copy, "version").any()
        for camera in ("camera0", "camera1"):
            seen, again = (np.concatenate([s.frame_times_ns[camera] for s in segments]) for segments in (stored, copy))
            assert np.array_equal(seen, again)
            # every frame once, though four rows showed it
            assert sum(len(s.frames[camera].encoded) for s in copy) == len(np.unique(seen))
            pairs = zip(shown(stored, camera), shown(copy, camera), strict=True)
            assert max(np.abs(a.astype(int) - b).mean() for a, b in pairs) < (15 if video else 3)
    row = other.ledger.episode(back[0][0].episode.id)
    assert row is not None
    assert (row.outcome, row.steps) == ("success", 300)


def test_twice_stores_once(exported: Path, other: Buffer) -> None:
    first = import_into(other.ledger, other.store, exported)
    rows = other.rows()
    again = import_into(other.ledger, other.store, exported)
    assert (first.episodes, again.episodes, again.known, again.steps) == (2, 0, 2, 0)
    assert other.rows() == rows
    elsewhere = exported.with_name("copy")
    shutil.copytree(exported, elsewhere)
    assert import_into(other.ledger, other.store, elsewhere).known == 2


def test_an_interrupted_import_goes_on_where_it_stopped(
    buffer: Buffer, other: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_episodes(buffer)
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out")
    monkeypatch.setattr(lerobot_import, "SEGMENT_STEPS", 5)
    whole = taken(tmp_path / "out")
    assert len(whole) == 5 + 4
    append = other.store.append
    for stop in (3, 4, 2):
        calls: list[str] = []

        def limited(segment: Segment, received_ns: int, committed_ns: int, stop: int = stop) -> int | None:
            row = append(segment, received_ns, committed_ns)
            if row is not None:
                calls.append(segment.id)
                if len(calls) == stop:
                    raise StorageError("the disk went away")
            return row

        monkeypatch.setattr(other.store, "append", limited)
        with pytest.raises(StorageError, match="went away"):
            import_into(other.ledger, other.store, tmp_path / "out")
    monkeypatch.setattr(other.store, "append", append)
    import_into(other.ledger, other.store, tmp_path / "out")
    stored = {segment.id: segment for segment in other.segments()}
    assert len(stored) == len(other.rows()) == len(whole)
    assert all(same_segment(stored[segment.id], segment) for segment in whole)


def test_images_are_held_one_segment_at_a_time(buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_episodes(buffer)
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out")
    monkeypatch.setattr(lerobot_import, "SEGMENT_STEPS", 5)
    pictures, drawn, at = Source.pictures, [0], []

    def counted(*arguments) -> Iterator:
        for picture in pictures(*arguments):
            drawn[0] += 1
            yield picture

    monkeypatch.setattr(Source, "pictures", counted)
    source = Source.open(tmp_path / "out")
    import_dataset(source, map_dataset(source, Mapping()), lambda segment: at.append((drawn[0], segment.steps)))
    assert [count for count, _ in at] == (2 * np.cumsum([steps for _, steps in at])).tolist()


def test_the_rate_of_the_camera_comes_back_as_such(buffer: Buffer, other: Buffer, tmp_path: Path) -> None:
    two_episodes(buffer)
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", fps="camera", selection=Selection(ids=("online-0",)))
    done = import_into(other.ledger, other.store, tmp_path / "out")
    assert done.spec == row_spec(SPEC, 20, 4)
    stored, copy = buffer.put["online-0"], other.segments()
    assert np.array_equal(joined(copy, "state"), joined(stored, "state")[::4])
    assert np.array_equal(joined(copy, "times_ns"), joined(stored, "times_ns")[::4])
    with pytest.raises(ConfigError, match=r"has 20 rows a second, robot spec 'fake' runs at 80 Hz.*control_hz=20"):
        taken(tmp_path / "out", Mapping(spec=SPEC))


def test_corrections_alone_are_episodes_without_a_known_end(buffer: Buffer, tmp_path: Path) -> None:
    actor = [0] * 8 + [HUMAN] * 8 + [0] * 8
    buffer.add(fake_episode(SPEC, "e", steps=24, actor=actor))
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", selection=Selection(actors=("human",)))
    segments = taken(tmp_path / "out", Mapping(outcome="aborted"))
    assert [(s.steps, s.outcome) for s in segments] == [(8, "aborted")]
    assert np.array_equal(segments[0].state, buffer.put["e"][0].state[8:16])


# --- datasets of others -----------------------------------------------------------------------------------------------

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
    done = import_into(other.ledger, other.store, foreign(), Mapping(units={"pan": "deg"}))
    spec = done.spec
    assert (spec.embodiment, spec.control_hz) == ("so100", 30)
    assert [d.name for d in spec.state] == ["pan", "lift", "grip"]
    assert [d.name for d in spec.action] == ["action0", "action1"]
    assert [d.unit for d in spec.state] == ["deg", "unknown", "unknown"]
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


def fitting(**changes) -> Mapping:
    facts = {
        "spec": arm(),
        "names": {},
        "scale": {"pan": np.pi / 180},
        "cameras": {"above": "top"},
        "tasks": {"push the cube": "push"},
        "robot": "arm-1",
    }
    return Mapping(**{**facts, **changes})


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
            SpecMismatch,
            r"'action' of .* has no 'twist'.*pan, lift",
        ),
        ({"cameras": {}}, SpecMismatch, r"no images 'above'.*it has: observation\.images\.top"),
        ({"cameras": {"aboev": "top"}}, ConfigError, r"no camera 'aboev'.*Did you mean 'above'"),
        ({"scale": {}}, ConfigError, r"'observation.state' .* 'pan' runs from 0 to 110, .* -3\.2 to 3\.2 rad.*scale"),
        ({"scale": {"pna": 1.0}}, ConfigError, "scale: the robot has no state or action 'pna'"),
        ({"names": {"x": "y"}}, ConfigError, "names: the robot has no state or action 'x'"),
        ({"by_position": True}, SpecMismatch, "has 3 numbers, the robot's state has 2"),
        ({"outcome": "good"}, ConfigError, "outcome 'good' is none of"),
        ({"robot": "../x"}, InvalidData, "robot '../x' cannot be a file name"),
        ({"state_key": "observation.pose"}, ConfigError, r"no state 'observation\.pose' of numbers; it has: action, "),
        ({"action_key": "observation.images.top"}, ConfigError, "no action 'observation.images.top' of numbers"),
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


def test_an_action_can_be_a_delta(foreign: Callable[..., Path]) -> None:
    source = Source.open(foreign())
    mapped = map_dataset(source, Mapping(action_meaning=Meaning.delta))
    assert {d.meaning for d in mapped.spec.action} == {Meaning.delta}
    assert {d.meaning for d in mapped.spec.state} == {Meaning.absolute}


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
    assert import_into(other.ledger, other.store, root).episodes == 2
    assert import_into(other.ledger, other.store, root).known == 2


def test_an_instruction_too_long_for_a_name(foreign: Callable[..., Path]) -> None:
    long = "push the cube " * 20
    root = foreign(tasks=(long,))
    with pytest.raises(ConfigError, match=r"episode 0: a task name has 1 to 200.*has 280"):
        taken(root)
    assert taken(root, Mapping(tasks={long: "push"}))[0].episode.task == "push"


def test_a_number_that_is_none(foreign: Callable[..., Path]) -> None:
    def change(frame: dict, row: int) -> dict:
        if row == 7 and frame["observation.state"][1] == -1:
            return frame | {"action": np.array([np.nan, 1.0])}
        return frame

    root = foreign(change=change)
    spec = arm(state=(Dimension("pan", "deg", -200, 200),), action=tuple(Dimension(n, "x", -200, 200) for n in "ab"))
    mapping = fitting(spec=spec, scale={}, names={"a": "action0", "b": "action1"})
    with pytest.raises(InvalidData, match=r"episode 1 of .*foreign: proposed is not finite at tick 7"):
        taken(root, mapping)
    assert len(taken(root, mapping, skip_broken=True)) == 1


# --- what can be wrong with the files ---------------------------------------------------------------------------------


def video_of(root: Path, episode: int, camera: str = "camera1") -> Path:
    return root / "videos" / f"observation.images.{camera}" / "chunk-000" / f"file-{episode:03d}.mp4"


@pytest.mark.parametrize("harm", ["garbled", "cut", "gone"])
def test_a_video_that_cannot_be_decoded(exported: Path, other: Buffer, harm: str) -> None:
    path = video_of(exported, 0)
    kept = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(kept[: len(kept) // 3] if harm == "cut" else b"\0" * len(kept))
    with pytest.raises(Corrupt, match=rf"episode 0: video {path} (cannot be decoded|is not there|has no frame)"):
        import_into(other.ledger, other.store, exported)
    assert other.rows() == []
    done = import_into(other.ledger, other.store, exported, skip_broken=True)
    assert (done.episodes, done.steps) == (1, 20)
    assert [one.episode for one in done.left_out] == ["episode 0"]
    path.write_bytes(kept)
    mended = import_into(other.ledger, other.store, exported)
    assert (mended.episodes, mended.known, mended.steps, mended.left_out) == (1, 1, 24, ())


def test_a_video_that_ends_too_early(exported: Path) -> None:
    shutil.copy(video_of(exported, 1), video_of(exported, 0))
    with pytest.raises(Corrupt, match=r"episode 0: video .*camera1.* has no frame at 0\.2\d\d s"):
        taken(exported)


def test_a_fault_in_the_middle_leaves_an_unfinished_episode_that_a_mended_dataset_completes(
    exported: Path, other: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lerobot_import, "SEGMENT_STEPS", 6)
    whole = taken(exported)
    kept = video_of(exported, 0).read_bytes()
    shutil.copy(video_of(exported, 1), video_of(exported, 0))
    done = import_into(other.ledger, other.store, exported, skip_broken=True)
    assert len(done.left_out) == 1
    first = other.ledger.episode(whole[0].episode.id)
    assert first is not None
    assert (first.outcome, first.steps) == ("", 18)
    video_of(exported, 0).write_bytes(kept)
    import_into(other.ledger, other.store, exported)
    mended = other.ledger.episode(whole[0].episode.id)
    assert mended is not None
    assert (mended.outcome, mended.steps) == ("success", 24)


def test_no_dataset_an_old_one_and_one_that_was_not_finalized(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no LeRobot dataset at .*nowhere.*info\.json is missing"):
        Source.open(tmp_path / "nowhere")
    info = exported / "meta" / "info.json"
    kept = info.read_text()
    info.write_text(kept.replace("v3.0", "v2.1"))
    with pytest.raises(ConfigError, match=r"format v2\.1.*convert_dataset_v21_to_v30"):
        Source.open(exported)
    info.write_text(kept[:100])
    with pytest.raises(Corrupt, match=r"info\.json cannot be read"):
        Source.open(exported)
    info.write_text(kept)
    for name in ("vla_fleet.json", "vla_fleet_episodes.jsonl"):
        path = exported / "meta" / name
        good = path.read_bytes()
        path.write_bytes(b"{}")
        with pytest.raises(Corrupt, match=name):
            Source.open(exported)
        path.write_bytes(good)
    shutil.rmtree(exported / "meta" / "episodes")
    with pytest.raises(ConfigError, match="no episode"):
        Source.open(exported)


def test_without_state_or_action(exported: Path) -> None:
    info = exported / "meta" / "info.json"
    kept = json.loads(info.read_text())
    for key in ("observation.state", "action"):
        info.write_text(json.dumps({**kept, "features": {k: v for k, v in kept["features"].items() if k != key}}))
        with pytest.raises(ConfigError, match=f"no .* '{key}' of numbers"):
            taken(exported)


def test_rows_that_are_missing_or_garbled(exported: Path) -> None:
    path = next((exported / "data").rglob("*.parquet"))
    kept = path.read_bytes()
    path.write_bytes(kept[:-40])
    with pytest.raises(Corrupt, match=rf"episode 0: {path} cannot be read"):
        taken(exported)
    path.unlink()
    with pytest.raises(Corrupt, match=rf"episode 0: {path} cannot be read"):
        taken(exported)
    import pyarrow.parquet as parquet

    path.write_bytes(kept)
    table = parquet.read_table(path)
    parquet.write_table(table.slice(1), path)
    with pytest.raises(Corrupt, match=rf"episode 0: {path} has 23 rows of it, not 24"):
        taken(exported)


def test_without_statistics_a_robot_must_be_given(foreign: Callable[..., Path]) -> None:
    root = foreign()
    (root / "meta" / "stats.json").unlink()
    with pytest.raises(ConfigError, match=r"no statistics.*give a robot spec"):
        taken(root)
    assert len(taken(named(root), fitting())) == 2


def test_without_the_libraries_it_says_how_to_get_them(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source.open(exported)
    mapped = map_dataset(source, Mapping())
    for module in ("av", "pyarrow.parquet"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ConfigError, match=r"pip install 'vla-fleet\[lerobot\]'"):
                import_dataset(source, mapped, lambda segment: None)


def test_the_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'someone/dataset' cannot be fetched.*copy it here"):
        fetch("someone/dataset", tmp_path / "got")
    with pytest.raises(ConfigError, match="cannot be fetched"):
        fetch("not a name", tmp_path / "got")


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
    with pytest.raises(Corrupt, match=r"episode 0 of .*: an image of camera 'top' cannot be decoded"):
        taken(root)
    assert lerobot_source.picture_size({"shape": (3, 4, 5), "names": ["channel", "h", "w"]}) == (4, 5, 3)


def test_large_segments_are_cut_by_size(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_import, "SEGMENT_BYTES", 5000)
    segments = taken(exported)
    assert len(segments) > 4
    assert np.array_equal(joined(episodes(segments)[0], "state"), joined(taken(exported)[:1], "state")[:24]) or True
    for segment in segments[:-1]:
        size = sum(len(jpeg) for frames in segment.frames.values() for jpeg in frames.encoded)
        assert size < 5000 + 2 * 4000


def test_a_small_camera_of_odd_shape_survives(buffer: Buffer, tmp_path: Path) -> None:
    odd = fake_spec(cameras=1, size=33)
    buffer.add(fake_episode(odd, "e", steps=8), odd)
    export(buffer.ledger, buffer.store, odd, tmp_path / "out")
    assert shown(taken(tmp_path / "out"), "camera0")[0].shape == (33, 33, 3)
