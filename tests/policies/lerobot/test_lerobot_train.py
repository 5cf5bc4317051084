"""Checkpoints made by `lerobot-train` itself, on a tiny dataset written here."""

from __future__ import annotations

import logging
import shutil

import numpy as np
import pytest
import torch

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.learner import Learner
from policies.conformance.check import example_batch, example_observation
from policies.lerobot.checkpoint_path import locate
from policies.lerobot.factory import defaults, make
from tests.cloud_learner.training.batches import Batches
from tests.extras import needs
from wire.errors import ConfigError, WeightsError

pytestmark = [pytest.mark.slow, needs("lerobot")]


@pytest.fixture(scope="module")
def run(robot, tiny_act, tmp_path_factory):
    """What `lerobot-train` wrote: four steps, two checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        yield trained(robot, tiny_act, tmp_path_factory.mktemp("lerobot_train"), patch)


def trained(robot, tiny_act, place, patch):
    import datasets
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.scripts.lerobot_train import train

    patch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
    camera = robot.cameras[0]
    described = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["dx", "grip"]},
        "observation.images.front": {
            "dtype": "image",
            "shape": (camera.height, camera.width, 3),
            "names": ["height", "width", "channels"],
        },
    }
    dataset = LeRobotDataset.create("local/tiny", 20, described, place / "data", use_videos=False)
    rng = np.random.default_rng(0)
    for _ in range(2):
        for _ in range(12):
            frame = {
                "observation.state": rng.normal(2, 1, 3).astype(np.float32),
                "action": rng.uniform(robot.action_low(), robot.action_high()).astype(np.float32),
                "observation.images.front": rng.integers(0, 256, (camera.height, camera.width, 3), np.uint8),
                "task": "open the drawer",
            }
            dataset.add_frame(frame)
        dataset.save_episode()
    dataset.finalize()
    config = TrainPipelineConfig(
        dataset=DatasetConfig("local/tiny", root=str(place / "data"), video_backend="pyav"),
        policy=tiny_act,
        output_dir=place / "run",
        num_workers=0,
        batch_size=4,
        steps=4,
        save_freq=2,
        eval_freq=0,
        optimizer=tiny_act.get_optimizer_preset(),
    )
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    patch.setattr(TrainPipelineConfig, "validate", lambda self: None)  # it would read the command line of the tests
    train(config)
    root.handlers[:], root.level = handlers, level
    return place / "run"


def test_what_lerobot_train_wrote_acts_and_learns(robot, run):
    assert locate(str(run)).resolve() == (run / "checkpoints" / "000004" / "pretrained_model").resolve()
    assert defaults(str(run), {}, robot).horizon == 8
    policy = make(str(run), {}, robot, 0)
    observation = example_observation(robot)
    chunk = policy.act(observation, policy.think(observation), 0)
    assert chunk.actions.shape == (8, 2) and policy.pretrained
    state = policy._preprocess({"observation.state": torch.full((1, 3), 2.0)})["observation.state"]
    assert state.abs().max() < 1, "normalised with the statistics of the dataset"
    other = make(str(run / "checkpoints" / "last"), {"statistics": "spec"}, robot, 0)
    other.load(policy.save(), 1)
    assert np.array_equal(other.act(observation, other.think(observation), 0).actions, chunk.actions)
    batch = example_batch(robot, 8, images=8, steps=1)
    learner = Learner(policy, HGDagger(), TrainingConfig(learning_rate=3e-3, warmup_steps=1), seed=0)
    losses = [learner.step(Batches(batch))["loss"] for _ in range(40)]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:3])
    other.load(learner.weights(), 2)
    assert not np.array_equal(other.act(observation, other.think(observation), 0).actions, chunk.actions)


def test_adapters_of_lerobot_are_merged(robot, run, tmp_path):
    from lerobot.policies.act.modeling_act import ACTPolicy

    base = locate(str(run))
    network = ACTPolicy.from_pretrained(base)
    network.config.pretrained_path = base
    targets = ["linear1", "linear2"]
    adapted = network.wrap_with_peft(peft_cli_overrides={"method_type": "LORA", "target_modules": targets, "r": 2})
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    shutil.copytree(base, tmp_path / "peft", ignore=shutil.ignore_patterns("config.json", "model.safetensors"))
    adapted.save_pretrained(tmp_path / "peft")
    network.config.save_pretrained(tmp_path / "peft")
    policy, plain = make(str(tmp_path / "peft"), {}, robot, 0), make(str(base), {}, robot, 0)
    before = policy._preprocess(policy._adapter.observation_batch(example_observation(robot)))
    with torch.no_grad():
        expected = network.predict_action_chunk(before)
        assert torch.allclose(policy.module.predict_action_chunk(before), expected, atol=1e-5)
        assert not torch.allclose(plain.module.predict_action_chunk(before), expected, atol=1e-3)
    (tmp_path / "peft" / "adapter_model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"adapter_config\.json without adapter_model\.safetensors"):
        make(str(tmp_path / "peft"), {}, robot, 0)
    (tmp_path / "peft" / "adapter_model.safetensors").write_bytes(b"")
    text = (tmp_path / "peft" / "adapter_config.json").read_text()
    (tmp_path / "peft" / "adapter_config.json").write_text(text.replace(str(base), "/elsewhere/run"))
    with pytest.raises(ConfigError, match=r"adapter_config\.json: base_model_name_or_path is '/elsewhere/run'"):
        make(str(tmp_path / "peft"), {}, robot, 0)
