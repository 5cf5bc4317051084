"""What the import stores is what the dataset shows: our own exports come back to the bit."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.lerobot import exporter as lerobot_export
from cloud_learner.buffer.lerobot import importer as lerobot_import
from cloud_learner.buffer.lerobot.exporter import export
from cloud_learner.buffer.lerobot.importer import import_dataset
from cloud_learner.buffer.lerobot.mapping import DatasetMapping
from cloud_learner.buffer.lerobot.rows import row_spec
from cloud_learner.buffer.lerobot.selection import Selection, TransferProgress
from cloud_learner.buffer.lerobot.source import DatasetSource
from tests.cloud_learner.buffer.lerobot.lerobot_samples import (
    HUMAN,
    SPEC,
    Buffer,
    buffer,
    episodes,
    joined,
    other,
    shown,
    taken,
    two_episodes,
)
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec, same_segment
from tests.extras import needs
from wire.errors import ConfigError, CorruptDataError, StorageError
from wire.messages.gateway import Segment

pytestmark = [
    pytest.mark.slow,
    needs("lerobot"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0"),
    pytest.mark.filterwarnings("ignore:Converting input from bool"),
]
__all__ = ["buffer", "other"]


@pytest.fixture
def exported(buffer: Buffer, tmp_path: Path) -> Path:
    """An export of two episodes; each has video files of its own."""
    two_episodes(buffer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lerobot_export, "_VIDEO_FILE_MB", 1e-6)
        export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", instructions={"window-open": "open the window"})
    return tmp_path / "out"


def test_recoveries_come_back(buffer: Buffer, other: Buffer, tmp_path: Path) -> None:
    (plain,) = fake_episode(SPEC, "e", steps=24, actor=[0] * 8 + [HUMAN] * 16)
    recovers = np.arange(24) // 8 == 1
    buffer.add((msgspec.structs.replace(plain, recovery=recovers),))
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", video=False)
    import_dataset(other.ledger, other.store, tmp_path / "out")
    (copy,) = other.segments()
    assert np.array_equal(copy.recovery, recovers)


@pytest.mark.parametrize("video", [True, False])
def test_there_and_back(buffer: Buffer, other: Buffer, tmp_path: Path, video: bool) -> None:
    two_episodes(buffer, steps=300)
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", video=video)
    told: list[TransferProgress] = []
    done = import_dataset(other.ledger, other.store, tmp_path / "out", progress=told.append)
    assert (done.episodes, done.known, done.steps, done.left_out) == (2, 0, 596, ())
    assert done.spec == SPEC
    assert told == [TransferProgress(1, 2, 300), TransferProgress(2, 2, 596)]
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
            if video:
                pairs = zip(shown(stored, camera), shown(copy, camera), strict=True)
                assert max(np.abs(a.astype(int) - b).mean() for a, b in pairs) < 15
            else:
                jpegs, again = ([j for s in segments for j in s.frames[camera].encoded] for segments in (stored, copy))
                # the last one was seen after the last action, which LeRobot has no place for
                assert jpegs[: len(again)] == again
    row = other.ledger.episode(back[0][0].episode.id)
    assert row is not None
    assert (row.outcome, row.steps) == ("success", 300)


def test_twice_stores_once(exported: Path, other: Buffer) -> None:
    first = import_dataset(other.ledger, other.store, exported)
    rows = other.rows()
    again = import_dataset(other.ledger, other.store, exported)
    assert (first.episodes, again.episodes, again.known, again.steps) == (2, 0, 2, 0)
    assert other.rows() == rows
    elsewhere = exported.with_name("copy")
    shutil.copytree(exported, elsewhere)
    assert import_dataset(other.ledger, other.store, elsewhere).known == 2


def test_what_was_pruned_is_left_out_with_the_way_to_have_it_again(exported: Path, other: Buffer) -> None:
    import_dataset(other.ledger, other.store, exported)
    gone = other.segments()[0].episode.id
    other.ledger.prune([gone], 9)
    again = import_dataset(other.ledger, other.store, exported)
    assert (again.episodes, again.known) == (0, 1)
    (left,) = again.left_out
    assert left.episode == "episode 0" and "forgotten" in left.reason and "--robot NAME" in left.reason
    anew = import_dataset(other.ledger, other.store, exported, DatasetMapping(robot="anew"))
    assert (anew.episodes, anew.left_out) == (2, ())


def test_an_interrupted_import_goes_on_where_it_stopped(
    buffer: Buffer, other: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_episodes(buffer)
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out")
    monkeypatch.setattr(lerobot_import, "SEGMENT_STEPS", 5)
    whole = taken(tmp_path / "out")
    assert len(whole) == 5 + 4
    append_all = other.store.append_all
    for stop in (3, 4, 2):
        calls: list[str] = []

        def limited(
            segments: Sequence[tuple[Segment, int]], committed_ns: int, stop: int = stop
        ) -> Sequence[int | None]:
            rows = append_all(segments, committed_ns)
            if None not in rows:
                calls.append(segments[0][0].id)
                if len(calls) == stop:
                    raise StorageError("the disk went away")
            return rows

        monkeypatch.setattr(other.store, "append_all", limited)
        with pytest.raises(StorageError, match="went away"):
            import_dataset(other.ledger, other.store, tmp_path / "out")
    monkeypatch.setattr(other.store, "append_all", append_all)
    import_dataset(other.ledger, other.store, tmp_path / "out")
    stored = {segment.id: segment for segment in other.segments()}
    assert len(stored) == len(other.rows()) == len(whole)
    assert all(same_segment(stored[segment.id], segment) for segment in whole)


def test_images_are_held_one_segment_at_a_time(
    buffer: Buffer, other: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_episodes(buffer)
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out")
    monkeypatch.setattr(lerobot_import, "SEGMENT_STEPS", 5)
    pictures, drawn, at = DatasetSource.pictures, [0], []

    def counted(*arguments) -> Iterator:
        for picture in pictures(*arguments):
            drawn[0] += 1
            yield picture

    monkeypatch.setattr(DatasetSource, "pictures", counted)
    monkeypatch.setattr(other.store, "append_all", lambda some, _: at.append((drawn[0], some[0][0].steps)))
    import_dataset(other.ledger, other.store, tmp_path / "out")
    assert [count for count, _ in at] == (2 * np.cumsum([steps for _, steps in at])).tolist()


def test_the_rate_of_the_camera_comes_back_as_such(buffer: Buffer, other: Buffer, tmp_path: Path) -> None:
    two_episodes(buffer)
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", fps="camera", selection=Selection(ids=("online-0",)))
    done = import_dataset(other.ledger, other.store, tmp_path / "out")
    assert done.spec == row_spec(SPEC, 20, 4)
    stored, copy = buffer.put["online-0"], other.segments()
    assert np.array_equal(joined(copy, "state"), joined(stored, "state")[::4])
    assert np.array_equal(joined(copy, "times_ns"), joined(stored, "times_ns")[::4])
    with pytest.raises(ConfigError, match=r"has 20 rows a second, robot spec 'fake' runs at 80 Hz.*control_hz=20"):
        taken(tmp_path / "out", DatasetMapping(spec=SPEC))


def test_corrections_alone_are_episodes_without_a_known_end(buffer: Buffer, tmp_path: Path) -> None:
    actor = [0] * 8 + [HUMAN] * 8 + [0] * 8
    buffer.add(fake_episode(SPEC, "e", steps=24, actor=actor))
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", selection=Selection(actors=("human",)))
    segments = taken(tmp_path / "out")
    assert [(s.steps, s.outcome) for s in segments] == [(8, "success")]
    assert np.array_equal(segments[0].state, buffer.put["e"][0].state[8:16])


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
    with pytest.raises(
        CorruptDataError, match=rf"episode 0: video {path} (cannot be decoded|is not there|has no frame)"
    ):
        import_dataset(other.ledger, other.store, exported)
    assert other.rows() == []
    done = import_dataset(other.ledger, other.store, exported, skip_broken=True)
    assert (done.episodes, done.steps) == (1, 20)
    assert [one.episode for one in done.left_out] == ["episode 0"]
    path.write_bytes(kept)
    mended = import_dataset(other.ledger, other.store, exported)
    assert (mended.episodes, mended.known, mended.steps, mended.left_out) == (1, 1, 24, ())


def test_a_video_that_ends_too_early(exported: Path) -> None:
    shutil.copy(video_of(exported, 1), video_of(exported, 0))
    with pytest.raises(CorruptDataError, match=r"episode 0: video .*camera1.* has no frame at 0\.2\d\d s"):
        taken(exported)


def test_a_fault_in_the_middle_leaves_an_unfinished_episode_that_a_mended_dataset_completes(
    exported: Path, other: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lerobot_import, "SEGMENT_STEPS", 6)
    whole = taken(exported)
    kept = video_of(exported, 0).read_bytes()
    shutil.copy(video_of(exported, 1), video_of(exported, 0))
    done = import_dataset(other.ledger, other.store, exported, skip_broken=True)
    assert len(done.left_out) == 1
    first = other.ledger.episode(whole[0].episode.id)
    assert first is not None
    assert (first.outcome, first.steps) == ("", 18)
    video_of(exported, 0).write_bytes(kept)
    import_dataset(other.ledger, other.store, exported)
    mended = other.ledger.episode(whole[0].episode.id)
    assert mended is not None
    assert (mended.outcome, mended.steps) == ("success", 24)


def test_no_dataset_an_old_one_and_one_that_was_not_finalized(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no LeRobot dataset at .*nowhere.*info\.json is missing"):
        DatasetSource.open(tmp_path / "nowhere")
    info = exported / "meta" / "info.json"
    kept = info.read_text()
    info.write_text(kept.replace("v3.0", "v2.1"))
    with pytest.raises(ConfigError, match=r"format v2\.1.*convert_dataset_v21_to_v30"):
        DatasetSource.open(exported)
    info.write_text(kept[:100])
    with pytest.raises(CorruptDataError, match=r"info\.json: not JSON"):
        DatasetSource.open(exported)
    info.write_text(kept)
    path = exported / "meta" / "vla_fleet.json"
    good = path.read_bytes()
    path.write_bytes(b"{}")
    with pytest.raises(CorruptDataError, match=r"vla_fleet\.json cannot be read"):
        DatasetSource.open(exported)
    path.write_bytes(good)
    shutil.rmtree(exported / "meta" / "episodes")
    with pytest.raises(ConfigError, match="no episode"):
        DatasetSource.open(exported)


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
    with pytest.raises(CorruptDataError, match=rf"episode 0: {path} cannot be read"):
        taken(exported)
    path.unlink()
    with pytest.raises(CorruptDataError, match=rf"episode 0: {path}: No such file"):
        taken(exported)
    import pyarrow.parquet as parquet

    path.write_bytes(kept)
    table = parquet.read_table(path)
    parquet.write_table(table.slice(1), path)
    with pytest.raises(CorruptDataError, match=rf"episode 0: {path} has 23 rows of it, not 24"):
        taken(exported)


def test_without_the_libraries_it_says_how_to_get_them(
    exported: Path, other: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("av", "pyarrow.parquet"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ConfigError, match=r"pip install 'vla-fleet\[lerobot\]'"):
                import_dataset(other.ledger, other.store, exported)


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
