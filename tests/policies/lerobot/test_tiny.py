"""Checkpoints that are built here are the ones lerobot itself writes and reads."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from policies.interface.policy import NormalizationData
from policies.lerobot.checkpoint import LeRobotCheckpoint
from policies.lerobot.tiny import build_tiny
from tests.extras import needs
from wire.errors import ConfigError
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

pytestmark = [pytest.mark.slow, needs("lerobot")]

SPEC = RobotSpec(
    "built",
    (Dimension("x", "m", -1.0, 3.0), Dimension("y", "m", -1.0, 1.0)),
    (Dimension("dx", "cm", -2.0, 2.0, CommandType.delta), Dimension("grip", "1", 0.0, 10.0)),
    (CameraSpec("front", 48, 64, 20.0), CameraSpec("wrist", 64, 64, 20.0)),
    20.0,
)
FILES = ("config.json", "model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json")


@pytest.fixture(scope="module", params=["smolvla", "act"])
def built(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny") / request.param
    before = torch.get_rng_state()
    assert build_tiny(request.param, directory, SPEC, ["open the drawer"], chunk=6, seed=3) == directory
    assert torch.equal(torch.get_rng_state(), before)
    return request.param, directory


def _observation(seed=0):
    rng = np.random.default_rng(seed)
    images = {
        f"observation.images.{c.name}": torch.tensor(rng.random((3, c.height, c.width)), dtype=torch.float32)
        for c in SPEC.cameras
    }
    return {**images, "observation.state": torch.tensor([1.0, 0.0]), "task": "open the drawer"}


def test_it_has_the_files_of_save_pretrained_and_lerobot_reads_them(built) -> None:
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    kind, directory = built
    assert all((directory / name).is_file() for name in FILES)
    policy = get_policy_class(kind).from_pretrained(directory)
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(directory))
    ready = before(_observation())
    # limits of the spec are what is normalised to [-1, 1]
    assert torch.allclose(ready["observation.state"], torch.tensor([[0.0, 0.0]]))
    chunk = policy.predict_action_chunk(ready)
    assert chunk.shape == (1, 6, 2) and bool(chunk.isfinite().all())
    assert torch.allclose(after(torch.tensor([[1.0, -1.0]])), torch.tensor([[2.0, 0.0]]))


def test_a_copy_elsewhere_is_as_good(built, tmp_path) -> None:
    kind, directory = built
    moved = tmp_path / "elsewhere"
    shutil.copytree(directory, moved)
    if kind == "smolvla":
        config = json.loads((moved / "config.json").read_text())
        config["vlm_model_name"] = str(tmp_path / "gone" / "vlm")
        (moved / "config.json").write_text(json.dumps(config))
    checkpoint = LeRobotCheckpoint.open(str(moved))
    before, _ = checkpoint.processors()
    first, second = LeRobotCheckpoint.open(str(directory)).policy(), checkpoint.policy()
    ready = before(_observation())
    chunks = []
    for policy in (first, second):
        torch.manual_seed(0)
        chunks.append(policy.predict_action_chunk(dict(ready)))
    assert torch.equal(*chunks)


def test_the_same_seed_gives_the_same_weights(tmp_path) -> None:
    from safetensors.torch import load_file

    made = [
        load_file(build_tiny("smolvla", tmp_path / str(i), SPEC, ["go"], seed=seed) / "model.safetensors")
        for i, seed in enumerate((0, 0, 1))
    ]
    name = "model.state_proj.weight"
    assert all(torch.equal(made[0][n], made[1][n]) for n in made[0])
    assert not torch.equal(made[0][name], made[2][name])


def test_statistics_are_those_of_the_examples(tmp_path) -> None:
    rng = np.random.default_rng(0)
    states = rng.normal((5.0, -2.0), (1.0, 3.0), (4000, 2)).astype(np.float32)
    chunks = rng.normal((0.5, 4.0), (0.25, 2.0), (500, 6, 2)).astype(np.float32)
    directory = build_tiny("smolvla", tmp_path / "s", SPEC, [], chunk=6, examples=NormalizationData(states, chunks))
    before, after = LeRobotCheckpoint.open(str(directory)).processors()
    ready = before({**_observation(), "observation.state": torch.tensor([6.0, 1.0])})
    torch.testing.assert_close(ready["observation.state"], torch.ones(1, 2), atol=0.1, rtol=0)
    torch.testing.assert_close(after(torch.ones(1, 2)), torch.tensor([[0.75, 6.0]]), atol=0.1, rtol=0)


def test_a_random_act_does_not_grow_from_layer_to_layer(tmp_path) -> None:
    policy = LeRobotCheckpoint.open(str(build_tiny("act", tmp_path / "a", SPEC))).policy()
    with torch.no_grad():
        features = policy.model.backbone(torch.randn(4, 3, 64, 64))["feature_map"]
    assert 0.1 < features.std() < 10


def test_a_long_instruction_in_any_letters_can_be_read(tmp_path) -> None:
    before, _ = LeRobotCheckpoint.open(str(build_tiny("smolvla", tmp_path / "s", SPEC, ["go"]))).processors()
    long = "Öffne die Schublade, bitte: 打开抽屉! " * 5
    tokens = [before({**_observation(), "task": text})["observation.language.tokens"] for text in ("go", long)]
    assert tokens[0].shape[1] < tokens[1].shape[1] == 24


def test_what_cannot_be_built_is_said(tmp_path) -> None:
    blind = RobotSpec("blind", SPEC.state, SPEC.action, (), 20.0)
    for kind, spec, chunk, message in (
        ("pi0", SPEC, 4, "'pi0'.*act, smolvla"),
        ("act", blind, 4, "'blind'.*no camera"),
        ("act", SPEC, 0, "at least 1 action"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_tiny(kind, tmp_path / "new", spec, chunk=chunk)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="no empty directory"):
        build_tiny("act", tmp_path / "full", SPEC)
