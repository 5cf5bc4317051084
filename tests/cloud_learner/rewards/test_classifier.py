"""A classifier learns to tell, says what it is worth, and is refused where it cannot tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch

from cloud_learner.rewards.classifier import SuccessClassifier, open_classifier
from cloud_learner.rewards.classifier_training import ClassifierConfig, JudgedEnds, read_judged, train_classifier
from cloud_learner.rewards.interface import EpisodeEnd
from tests.cloud_learner.buffer.synthetic import fake_spec
from tests.cloud_learner.rewards.told import SPEC, TASKS, episode, label, opened
from wire.errors import ConfigError, InvalidDataError, SpecMismatchError, WeightsError
from wire.types import RobotSpec

pytestmark = pytest.mark.slow
SEEING = fake_spec(1, size=16)
QUICK = ClassifierConfig(updates=60, width=16, batch=32, steps=3)
TWO = ("drawer-open", "door-open")


def judged(n: int, share: float = 0.5, spec: RobotSpec = SPEC, seed: int = 0, noise: float = 0.0) -> JudgedEnds:
    """Successes are bright, and their first state is positive; of `noise` of them it is told the other way round."""
    rng = np.random.default_rng(seed)
    ends, succeeded = [], rng.random(n) < share
    for number, good in enumerate(succeeded):
        state = rng.normal(size=(3, spec.state_dim)).astype(np.float32)
        if not spec.cameras:
            state[:, 0] = 1 if good else -1
        light = rng.integers(150, 256, (3, 16, 16, 3)) if good else rng.integers(0, 100, (3, 16, 16, 3))
        images = {camera.name: light.astype(np.uint8) for camera in spec.cameras}
        ends.append(EpisodeEnd(f"e{number}", TWO[number % 2], state, images))
    return JudgedEnds(ends, succeeded ^ (rng.random(n) < noise))


@pytest.fixture(scope="module")
def trained() -> SuccessClassifier:
    return train_classifier(judged(500), SPEC, TWO, QUICK, 0)


def test_it_learns_from_state_and_is_measured_on_others(trained: SuccessClassifier) -> None:
    found, thresholds = trained.header.measured, trained.header.thresholds
    assert thresholds.success_at is not None and thresholds.failure_at is not None
    assert 60 < found.episodes < 140
    assert found.right_success == found.said_success > 0.8 * found.successes
    assert found.right_failure == found.said_failure
    new = judged(40, seed=5)
    assert ((trained.score(new.ends) > 0.5) == new.succeeded).all()


def test_it_learns_from_pictures_and_the_same_seed_makes_the_same_file() -> None:
    made = [train_classifier(judged(120, spec=SEEING), SEEING, TWO, QUICK, seed) for seed in (0, 0, 1)]
    new = judged(30, spec=SEEING, seed=7)
    assert ((made[0].score(new.ends) > 0.5) == new.succeeded).mean() > 0.9
    assert made[0].save() == made[1].save()
    assert made[0].sha256 == made[1].sha256 != made[2].sha256


def test_its_scores_are_chances_where_successes_are_rare() -> None:
    longer = replace(QUICK, updates=400)
    made = train_classifier(judged(800, share=0.2, noise=0.15), SPEC, TWO, longer, 0)
    assert made.header.measured.calibration_error < 0.1


def test_one_class_only_is_refused_and_too_few_to_show_a_precision_are_told() -> None:
    for share in (0.0, 1.0):
        with pytest.raises(InvalidDataError, match=r"\b0 (of these failed|succeeded).*; 8 of each are the least"):
            train_classifier(judged(100, share), SPEC, TWO, QUICK, 0)
    made = train_classifier(judged(60), SPEC, TWO, QUICK, 0)
    assert made.header.thresholds.success_at is None
    assert "22 that it calls so" in made.header.thresholds.notes[0]


def test_it_learns_from_people_and_the_record_and_never_from_a_model(tmp_path: Path) -> None:
    names = {"e1": "success", "e2": "failure", "e3": "unjudged", "e4": "unjudged", "e5": "discarded", "e6": "aborted"}
    with opened(tmp_path, *(episode(*one) for one in names.items())) as (ledger, store):
        label(ledger, "classifier", {"e4": 1.0})
        label(ledger, "lerobot", {"e4": 1.0})
        ledger.label_episode("e3", "success", 1, "anna")
        ledger.label_episode("e2", "success", 1, "anna")
        found = read_judged(ledger, store, SPEC, list(TASKS), 5)
    assert [end.episode for end in found.ends] == ["e1", "e2", "e3"]
    assert found.succeeded.tolist() == [True, True, True]
    assert found.ends[0].state.shape == (5, SPEC.state_dim)


def test_the_end_is_what_was_seen_last_with_its_pictures(tmp_path: Path) -> None:
    spec = fake_spec(2, size=16)
    parts = episode("e1", "success", spec=spec)
    with opened(tmp_path, parts, spec=spec) as (ledger, store):
        (end,) = read_judged(ledger, store, spec, list(TASKS), 6).ends
        assert {name: one.shape for name, one in end.images.items()} == dict.fromkeys(
            ("camera0", "camera1"), (6, 16, 16, 3)
        )
    np.testing.assert_array_equal(end.state, np.concatenate([one.state for one in parts])[-6:])


def test_another_robot_or_other_cameras_are_refused(trained: SuccessClassifier) -> None:
    trained.require(SPEC)
    with pytest.raises(SpecMismatchError, match=r"its cameras are none, the robot's \{'camera0': \(16, 16\)\}"):
        trained.require(SEEING)
    with pytest.raises(ConfigError, match="never saw task 'fly'"):
        trained.score([EpisodeEnd("e", "fly", np.zeros((1, 4), np.float32), {})])


def changed(data: bytes, **header: object) -> bytes:
    tensors = safetensors.torch.load(data)
    made = SuccessClassifier.load(data, "x").header
    text = msgspec.json.encode(msgspec.to_builtins(made) | header).decode()
    return safetensors.torch.save(tensors, {"vla_fleet_success_classifier": text})


def test_a_file_that_cannot_be_read_is_refused_by_its_name(trained: SuccessClassifier, tmp_path: Path) -> None:
    data, path = trained.save(), tmp_path / "classifier-000001.safetensors"
    tensors = safetensors.torch.load(data)
    for wrong in (
        b"",
        b"\x80\x04 a pickle",
        data[:-7],
        data[: len(data) // 2],
        safetensors.torch.save(tensors),
        changed(data, width=10**9),
        changed(data, width=32),
        changed(data, steps=0),
        changed(data, spec={}),
        safetensors.torch.save(
            {name: torch.full_like(one, torch.nan) for name, one in tensors.items()},
            {"vla_fleet_success_classifier": msgspec.json.encode(trained.header).decode()},
        ),
    ):
        path.write_bytes(wrong)
        with pytest.raises(WeightsError, match="classifier-000001"):
            open_classifier(path)
    path.write_bytes(data)
    assert open_classifier(tmp_path).sha256 == trained.sha256
    with pytest.raises(ConfigError, match="no success classifier yet"):
        open_classifier(tmp_path.parent)
