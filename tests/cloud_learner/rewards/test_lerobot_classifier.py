"""LeRobot's reward classifier judges as it does there, and nothing that its checkpoint names is run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from cloud_learner.rewards.interface import EpisodeEnd
from cloud_learner.rewards.lerobot_classifier import LeRobotClassifier
from cloud_learner.rewards.registry import open_model
from tests.cloud_learner.buffer.synthetic import fake_spec
from wire.errors import ConfigError, SpecMismatchError, WeightsError

pytest.importorskip("lerobot")
FEATURE = "observation.images.camera0"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as lerobot writes it, its encoder beside it."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.sac.reward_model.configuration_classifier import RewardClassifierConfig
    from lerobot.policies.sac.reward_model.modeling_classifier import Classifier
    from lerobot.policies.sac.reward_model.processor_classifier import make_classifier_processor
    from transformers import ResNetConfig, ResNetModel

    path = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic")
    ResNetModel(config).save_pretrained(path / "vlm")
    made = RewardClassifierConfig(
        input_features={FEATURE: PolicyFeature(type=FeatureType.VISUAL, shape=(3, 128, 128))},
        output_features={},
        num_cameras=1,
        hidden_dim=16,
        latent_dim=16,
        model_name=str(path / "vlm"),
    )
    classifier = Classifier(made)
    classifier.save_pretrained(path)
    stats = {FEATURE: {"mean": torch.full((3, 1, 1), 0.4), "std": torch.full((3, 1, 1), 0.2)}}
    make_classifier_processor(made, stats)[0].save_pretrained(path)
    picture = torch.from_numpy(end().images["camera0"]).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        expected = classifier.eval().predict([(picture - 0.4) / (0.2 + 1e-8)]).probabilities.mean()
    (path / "expected.txt").write_text(str(expected.item()))
    return path


def end() -> EpisodeEnd:
    image = np.random.default_rng(0).integers(0, 256, (2, 128, 128, 3), dtype=np.uint8)
    return EpisodeEnd("e1", "any", np.zeros((2, 4), np.float32), {"camera0": image})


def changed(saved: Path, path: Path, **values: object) -> Path:
    shutil.copytree(saved, path)
    config = json.loads((path / "config.json").read_text()) | values
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_it_says_what_it_says_in_lerobot_and_is_known_by_its_bytes(saved: Path) -> None:
    before = torch.random.get_rng_state()
    model = open_model("lerobot", saved)
    assert isinstance(model, LeRobotClassifier)
    assert model.score([end(), end()]).tolist() == pytest.approx([float((saved / "expected.txt").read_text())] * 2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert open_model("lerobot", saved).sha256 == model.sha256
    model.require(fake_spec(1, size=128))
    with pytest.raises(SpecMismatchError, match="'camera0' is missing"):
        model.require(fake_spec(0))
    small = EpisodeEnd("e1", "any", np.zeros((1, 4), np.float32), {"camera0": end().images["camera0"][:1, :64, :64]})
    assert 0 <= model.score([small])[0] <= 1


def test_what_would_run_or_cannot_be_read_is_refused(saved: Path, tmp_path: Path) -> None:
    for number, (values, said) in enumerate(
        (
            ({"type": "act"}, "no reward classifier"),
            ({"hidden_dim": 1 << 40}, "hidden_dim"),
            ({"hidden_dim": 17}, "not the weights of this|not the weights of the"),
            ({"num_classes": 3}, "num_classes"),
            ({"num_cameras": 2}, "num_cameras"),
            ({"model_name": "helper2424/none-here"}, "vlm|nothing is fetched"),
            ({"auto_map": {"AutoModel": "evil.Model"}}, "names code"),
            ({"normalization_mapping": {"VISUAL": "MIN_MAX"}}, "MEAN_STD"),
        )
    ):
        path = changed(saved, tmp_path / str(number), **values)
        if "model_name" in values:
            shutil.rmtree(path / "vlm")
        with pytest.raises((ConfigError, WeightsError), match=said):
            open_model("lerobot", path)
    code = changed(saved, tmp_path / "code")
    inner = json.loads((code / "vlm" / "config.json").read_text()) | {"auto_map": {"AutoModel": "evil.Model"}}
    (code / "vlm" / "config.json").write_text(json.dumps(inner))
    with pytest.raises(ConfigError, match="names code"):
        open_model("lerobot", code)
    torn = changed(saved, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        open_model("lerobot", torn)
    bare = changed(saved, tmp_path / "bare")
    (bare / "classifier_preprocessor.json").unlink()
    with pytest.raises(ConfigError, match=r"no classifier_preprocessor\.json"):
        open_model("lerobot", bare)
