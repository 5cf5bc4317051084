"""What the export writes is what was stored, as lerobot itself reads it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.lerobot import exporter as lerobot_export
from cloud_learner.buffer.lerobot.exporter import export
from cloud_learner.buffer.lerobot.selection import Selection, TransferProgress, select
from tests.cloud_learner.buffer.lerobot.lerobot_samples import (
    HUMAN,
    SPEC,
    Buffer,
    buffer,
    hub_cache,
    joined,
    shown,
    two_episodes,
)
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from tests.extras import needs
from wire.errors import ConfigError, DiskFullError, StorageError
from wire.messages.gateway import CameraFrames

__all__ = ["buffer", "hub_cache"]
CAMERAS = ("camera0", "camera1")
pytestmark = [
    pytest.mark.slow,
    needs("lerobot"),
    pytest.mark.filterwarnings("ignore:The video decoding and encoding capabilities of torchvision"),
]


def opened(root: Path, **options):
    """As lerobot reads it."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset("local/dataset", root=root, video_backend="pyav", **options)


def picture(item: dict, camera: str) -> np.ndarray:
    """uint8[h, w, 3] of the float[3, h, w] that lerobot gives."""
    return np.rint(item[f"observation.images.{camera}"].numpy().transpose(1, 2, 0) * 255).astype(np.uint8)


@pytest.mark.parametrize("video", [True, False])
def test_lerobot_reads_what_was_stored(buffer: Buffer, tmp_path: Path, hub_cache: None, video: bool) -> None:
    two_episodes(buffer)
    told: list[TransferProgress] = []
    urgency = os.sched_getscheduler(0)
    done = export(
        buffer.ledger,
        buffer.store,
        SPEC,
        tmp_path / "out",
        instructions={"window-open": "open the window"},
        video=video,
        progress=told.append,
    )
    assert (done.episodes, done.rows, done.fps, done.video, done.left_out) == (2, 44, 80, video, ())
    assert told == [TransferProgress(1, 2, 24), TransferProgress(2, 2, 44)]
    assert os.sched_getscheduler(0) == urgency, "the encoder makes the thread that opens it real-time"
    dataset = opened(tmp_path / "out")
    assert dataset.fps == 80
    assert dataset.meta.robot_type == "fake"
    assert dataset.meta.info["features"]["action"]["names"] == ["a0", "a1", "a2", "a3"]
    assert len(dataset) == 44
    at = 0
    for number, (name, task) in enumerate((("online-0", "drawer-open"), ("demo-0", "open the window"))):
        stored = buffer.put[name]
        pictures = {camera: shown(stored, camera) for camera in CAMERAS}
        distinct = {camera: list({p.tobytes(): p for p in pictures[camera]}.values()) for camera in CAMERAS}
        steps = len(joined(stored, "times_ns"))
        for step in range(steps):
            item = dataset[at]
            at += 1
            assert item["task"] == task
            assert (int(item["episode_index"]), int(item["frame_index"])) == (number, step)
            assert float(item["timestamp"]) == pytest.approx(step / 80, abs=1e-5)
            assert np.array_equal(item["observation.state"].numpy(), joined(stored, "state")[step])
            assert np.array_equal(item["action"].numpy(), joined(stored, "executed")[step])
            assert float(item["next.reward"]) == joined(stored, "reward")[step]
            assert bool(item["next.done"]) == bool(item["next.success"]) == (step == steps - 1)
            assert int(item["actor"]) == joined(stored, "actor")[step]
            assert int(item["policy_version"]) == 1
            assert int(item["policy_version_lag"]) == 0
            for camera in CAMERAS:
                got, wanted = picture(item, camera), pictures[camera][step]
                if video:
                    errors = [np.abs(got.astype(int) - p).mean() for p in distinct[camera]]
                    assert distinct[camera][int(np.argmin(errors))] is next(
                        p for p in distinct[camera] if np.array_equal(p, wanted)
                    )
                    assert min(errors) < 15
                else:
                    assert np.array_equal(got, wanted)
    assert not (tmp_path / "out" / "images").exists()
    assert (tmp_path / "out" / "videos").exists() == video


@pytest.mark.parametrize("video", [True, False])
def test_the_statistics_are_those_of_the_pictures(buffer: Buffer, tmp_path: Path, video: bool) -> None:
    two_episodes(buffer)
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", video=video)
    stats = json.loads((tmp_path / "out" / "meta" / "stats.json").read_text())
    by_episode = [np.stack(shown(stored, "camera1")).reshape(-1, 3) / 255 for stored in buffer.put.values()]
    pixels = np.concatenate(by_episode)
    found = stats["observation.images.camera1"]
    assert np.ravel(found["mean"]) == pytest.approx(pixels.mean(axis=0), abs=1e-9)
    assert np.ravel(found["std"]) == pytest.approx(pixels.std(axis=0), abs=1e-9)
    assert np.ravel(found["min"]) == pytest.approx(pixels.min(axis=0))
    assert np.ravel(found["max"]) == pytest.approx(pixels.max(axis=0))
    assert np.shape(found["mean"]) == np.shape(found["std"]) == (3, 1, 1)
    actions = np.concatenate([joined(stored, "executed") for stored in buffer.put.values()])
    assert stats["action"]["min"] == pytest.approx(actions.min(axis=0))
    import pyarrow.parquet as parquet

    table = parquet.read_table(next((tmp_path / "out" / "meta" / "episodes").rglob("*.parquet"))).to_pylist()
    for row, pixels in zip(table, by_episode, strict=True):
        said = {name: np.ravel(row[f"stats/observation.images.camera1/{name}"]) for name in ("std", "q50", "q99")}
        assert said["std"] == pytest.approx(pixels.std(axis=0), abs=1e-9)
        # lerobot takes them from a histogram
        assert said["q50"] == pytest.approx(np.quantile(pixels, 0.5, axis=0), abs=1 / 255)
        assert said["q99"] == pytest.approx(np.quantile(pixels, 0.99, axis=0), abs=1 / 255)


def test_the_rate_of_the_camera(buffer: Buffer, tmp_path: Path, hub_cache: None) -> None:
    two_episodes(buffer)
    done = export(
        buffer.ledger, buffer.store, SPEC, tmp_path / "out", fps="camera", selection=Selection(ids=("online-0",))
    )
    assert (done.rows, done.fps) == (6, 20)
    dataset = opened(tmp_path / "out")
    stored = buffer.put["online-0"]
    for row in range(6):
        item = dataset[row]
        assert np.array_equal(item["observation.state"].numpy(), joined(stored, "state")[4 * row])
        assert np.array_equal(item["action"].numpy(), joined(stored, "executed")[4 * row + 3])
        assert float(item["next.reward"]) == pytest.approx(joined(stored, "reward")[4 * row : 4 * row + 4].sum())
    about = json.loads((tmp_path / "out" / "meta" / "vla_fleet.json").read_text())
    assert about["ticks_per_row"] == 4
    assert about["spec"]["control_hz"] == 20


def test_only_the_corrections(buffer: Buffer, tmp_path: Path, hub_cache: None) -> None:
    two_episodes(buffer)
    done = export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", selection=Selection(actors=("human",)))
    assert (done.episodes, done.rows) == (2, 12 + 20)
    dataset = opened(tmp_path / "out")
    assert {int(dataset[i]["actor"]) for i in range(len(dataset))} == {HUMAN}
    notes = json.loads((tmp_path / "out" / "meta" / "vla_fleet.json").read_text())["episodes"]
    assert [(note["episode"], note["first_tick"], note["ticks"]) for note in notes] == [
        ("online-0", 12, 12),
        ("demo-0", 0, 20),
    ]
    assert [note["outcome"] for note in notes] == ["success", "success"]


def test_selection_by_everything(buffer: Buffer) -> None:
    two_episodes(buffer)
    buffer.add(fake_episode(SPEC, "open-0", steps=10, finished=False))
    buffer.add(fake_episode(SPEC, "evaluated", steps=10, source="evaluation"))
    other = fake_spec(cameras=1)
    buffer.add(fake_episode(other, "elsewhere", robot="r3", steps=10), other)

    def ids(**asked) -> list[str]:
        return [row.id for row in select(buffer.ledger, SPEC, Selection(**asked))]

    assert ids() == ["online-0", "demo-0"]
    assert ids(sources=()) == ["online-0", "demo-0", "evaluated"]
    assert ids(outcomes=("unfinished",)) == ["open-0"]
    assert ids(tasks=("window-open",)) == ids(sources=("demonstration",)) == ["demo-0"]
    assert ids(outcomes=(), newest=2, sources=()) == ["open-0", "evaluated"]
    assert [row.id for row in select(buffer.ledger, other, Selection())] == ["elsewhere"]
    with pytest.raises(ConfigError, match=r"no episode matches tasks: reach.*there are 4 \(tasks: drawer-open, window"):
        ids(tasks=("reach",))
    with pytest.raises(ConfigError, match=r"'sucess' is none of.*Did you mean 'success'"):
        ids(outcomes=("sucess",))
    with pytest.raises(ConfigError, match=r"actor 'humen' is none of.*Did you mean 'human'"):
        ids(actors=("humen",))
    with pytest.raises(ConfigError, match="source 'demo' is none of"):
        ids(sources=("demo",))


def test_nothing_is_written_when_nothing_matches_or_the_place_is_taken(buffer: Buffer, tmp_path: Path) -> None:
    two_episodes(buffer)
    with pytest.raises(ConfigError, match="no episode matches"):
        export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", selection=Selection(tasks=("reach",)))
    assert not list(tmp_path.glob("out*"))
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out exists already"):
        export(buffer.ledger, buffer.store, SPEC, tmp_path / "out")
    (tmp_path / "new.part").mkdir()
    with pytest.raises(ConfigError, match=r"new\.part exists already"):
        export(buffer.ledger, buffer.store, SPEC, tmp_path / "new")
    with pytest.raises(ConfigError, match="fps 33 does not divide"):
        export(buffer.ledger, buffer.store, SPEC, tmp_path / "other", fps=33)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_export_leaves_nothing(buffer: Buffer, tmp_path: Path, error: type[BaseException]) -> None:
    two_episodes(buffer)

    def stop(progress: TransferProgress) -> None:
        raise error

    with pytest.raises(error):
        export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", progress=stop)
    assert not list(tmp_path.glob("out*"))
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out")
    assert (tmp_path / "out" / "meta" / "info.json").exists()


def test_without_lerobot_it_says_how_to_get_it(buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_episodes(buffer)
    monkeypatch.setitem(sys.modules, "lerobot.datasets.lerobot_dataset", None)
    with pytest.raises(ConfigError, match=r"pip install 'vla-fleet\[lerobot\]'"):
        export(buffer.ledger, buffer.store, SPEC, tmp_path / "out")


def test_importing_the_modules_is_light() -> None:
    code = (
        "import sys, cloud_learner.buffer.lerobot.exporter, cloud_learner.buffer.lerobot.importer\n"
        "heavy = {'lerobot', 'torch', 'av', 'pyarrow', 'datasets', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_damaged_segment_is_named_and_the_rest_exported(buffer: Buffer, tmp_path: Path) -> None:
    two_episodes(buffer)
    row = buffer.ledger.segments_of("online-0")[1].row
    buffer.ledger.mark_damaged([row])
    done = export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", selection=Selection(ids=("online-0",)))
    assert [(one.episode, "damaged" in one.reason) for one in done.left_out] == [("online-0", True)]
    assert f"row {row}:" in done.left_out[0].reason
    # ten ticks are gone, and the next segment's first four saw no frame of it
    assert (done.episodes, done.rows) == (2, 10 + 4)


def test_when_nothing_is_left_of_what_was_selected(buffer: Buffer, tmp_path: Path) -> None:
    two_episodes(buffer)
    buffer.ledger.mark_damaged(buffer.rows())
    with pytest.raises(ConfigError, match="no step of the 2 selected episodes"):
        export(buffer.ledger, buffer.store, SPEC, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_piece_of_one_row_is_an_episode_too(buffer: Buffer, tmp_path: Path, hub_cache: None) -> None:
    stored = fake_episode(SPEC, "e", steps=12, actor=[0] * 5 + [HUMAN] + [0] * 3 + [HUMAN] * 3)
    buffer.add(stored)
    done = export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", selection=Selection(actors=("human",)))
    assert (done.episodes, done.rows, done.left_out) == (2, 4, ())
    dataset = opened(tmp_path / "out")
    for row, step in enumerate((5, 9, 10, 11)):
        assert np.array_equal(dataset[row]["action"].numpy(), stored[0].executed[step])
        error = picture(dataset[row], "camera1").astype(int) - shown(stored, "camera1")[step]
        assert np.abs(error).mean() < 15
    assert np.isfinite(dataset.meta.stats["action"]["std"]).all()


def test_small_cameras_become_images(buffer: Buffer, tmp_path: Path, hub_cache: None) -> None:
    small = fake_spec(cameras=1, size=32)
    buffer.add(fake_episode(small, "e", steps=8), small)
    assert not export(buffer.ledger, buffer.store, small, tmp_path / "out").video
    assert np.array_equal(picture(opened(tmp_path / "out")[7], "camera0"), shown(buffer.put["e"], "camera0")[7])
    with pytest.raises(ConfigError, match=r"camera 'camera0' \(32x32\): a side is shorter"):
        export(buffer.ledger, buffer.store, small, tmp_path / "video", video=True)


def test_cameras_of_an_odd_size_and_rates_that_no_video_has(buffer: Buffer, tmp_path: Path) -> None:
    odd = fake_spec(cameras=1, size=65)
    buffer.add(fake_episode(odd, "e", steps=8), odd)
    assert export(buffer.ledger, buffer.store, odd, tmp_path / "odd").video
    fast = msgspec.structs.replace(odd, control_hz=500.0)
    buffer.add(fake_episode(fast, "f", steps=8), fast)
    assert not export(buffer.ledger, buffer.store, fast, tmp_path / "fast").video
    with pytest.raises(ConfigError, match="500 frames a second are more than 240"):
        export(buffer.ledger, buffer.store, fast, tmp_path / "video", video=True)


def test_a_robot_without_cameras_or_without_state(buffer: Buffer, tmp_path: Path, hub_cache: None) -> None:
    blind = fake_spec(cameras=0)
    buffer.add(fake_episode(blind, "e", steps=8), blind)
    export(buffer.ledger, buffer.store, blind, tmp_path / "out")
    assert np.array_equal(opened(tmp_path / "out")[3]["action"].numpy(), joined(buffer.put["e"], "executed")[3])
    numb = fake_spec(cameras=1, state_dim=0)
    buffer.add(fake_episode(numb, "n", robot="r2", steps=8), numb)
    export(buffer.ledger, buffer.store, numb, tmp_path / "numb")
    assert "observation.state" not in opened(tmp_path / "numb")[0]


def test_a_stored_frame_that_is_none(buffer: Buffer, tmp_path: Path) -> None:
    segment = fake_episode(SPEC, "e", steps=8)[0]
    frames = segment.frames["camera1"]
    broken = CameraFrames(frames.times_ns, (frames.encoded[0], b"\xff\xd8\xff no picture", *frames.encoded[2:]))
    buffer.add((msgspec.structs.replace(segment, frames={**segment.frames, "camera1": broken}),))
    with pytest.raises(ConfigError, match="e: a stored frame of camera 'camera1' cannot be decoded"):
        export(buffer.ledger, buffer.store, SPEC, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    # The others are exported, and their statistics know nothing of it.
    buffer.add(fake_episode(SPEC, "f", steps=8, seed=1))
    done = export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", video=False)
    assert [(one.episode, "cannot be decoded" in one.reason) for one in done.left_out] == [("e", True)]
    assert (done.episodes, done.rows) == (1, 8)


def test_a_video_that_lost_frames_is_noticed(buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_episodes(buffer)
    from lerobot.datasets import lerobot_dataset

    encode = lerobot_dataset.encode_video_frames

    def forgetful(directory: Path, *arguments, **options) -> None:
        sorted(directory.iterdir())[6].unlink()
        encode(directory, *arguments, **options)

    monkeypatch.setattr(lerobot_dataset, "encode_video_frames", forgetful)
    with pytest.raises(StorageError, match=r"online-0: the video of '.*camera0' has 23\.0 frames for 24 rows"):
        export(buffer.ledger, buffer.store, SPEC, tmp_path / "out")


def test_many_video_files(buffer: Buffer, tmp_path: Path, hub_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    two_episodes(buffer)
    monkeypatch.setattr(lerobot_export, "_VIDEO_FILE_MB", 1e-6)
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out")
    assert len(list((tmp_path / "out").rglob("*.mp4"))) == 4
    item = opened(tmp_path / "out")[24 + 11]
    assert np.abs(picture(item, "camera0").astype(int) - shown(buffer.put["demo-0"], "camera0")[11]).mean() < 15


@pytest.mark.parametrize("video", [True, False])
def test_a_full_disk(buffer: Buffer, tmp_path: Path, video: bool) -> None:
    two_episodes(buffer)
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "none", place], capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    try:
        with pytest.raises(DiskFullError, match="no space left"):
            export(buffer.ledger, buffer.store, SPEC, place / "out", video=video)
        assert os.listdir(place) == []
        # lerobot's objects write when they go
        gc.collect()
        assert os.listdir(place) == []
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_an_act_policy_learns_from_it(buffer: Buffer, tmp_path: Path, hub_cache: None) -> None:
    import torch
    from lerobot.configs.types import FeatureType
    from lerobot.datasets.utils import dataset_to_policy_features
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors

    two_episodes(buffer)
    export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", fps="camera")
    plain = opened(tmp_path / "out")
    features = dataset_to_policy_features(plain.meta.features)
    config = ACTConfig(
        input_features={key: f for key, f in features.items() if f.type is not FeatureType.ACTION},
        output_features={key: f for key, f in features.items() if f.type is FeatureType.ACTION},
        chunk_size=4,
        n_action_steps=4,
        dim_model=32,
        n_heads=2,
        dim_feedforward=32,
        n_encoder_layers=1,
        n_vae_encoder_layers=1,
        latent_dim=8,
        pretrained_backbone_weights=None,
        device="cpu",
    )
    assert set(config.input_features) == {"observation.state", *(f"observation.images.{c}" for c in CAMERAS)}
    assert set(config.output_features) == {"action"}
    dataset = opened(tmp_path / "out", delta_timestamps={"action": [i / 20 for i in config.action_delta_indices]})
    batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=4)))
    before, _ = make_pre_post_processors(config, dataset_stats=plain.meta.stats)
    torch.manual_seed(0)
    policy = ACTPolicy(config)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    losses = []
    for _ in range(3):
        loss, _ = policy.forward(before(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
