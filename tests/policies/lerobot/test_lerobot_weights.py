"""Weights and statistics of lerobot policies: published, refused, read from checkpoints and written back."""

from __future__ import annotations

import copy
import json
import shutil

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from policies.common.runtime import Runtime
from policies.common.weights import unpack
from policies.conformance.check import example_batch, example_observation
from policies.interface.policy import NormalizationData
from policies.interface.trainable import FinetuneConfig, Lora
from policies.lerobot.checkpoint import LeRobotCheckpoint, load_weights
from policies.lerobot.factory import make
from policies.lerobot.options import LeRobotOptions
from tests.extras import needs
from tests.policies.lerobot.lerobot_side import PICTURE, STATE, as_lerobot
from wire.errors import ConfigError, SpecMismatchError, WeightsError
from wire.types import CameraSpec, PolicyCapabilities, RobotSpec

pytestmark = [pytest.mark.slow, needs("lerobot")]


def setup_module() -> None:
    global LeRobotPolicy, export
    # lerobot itself: 16 s, in the process that runs these tests alone
    from policies.lerobot.export import export
    from policies.lerobot.policy import LeRobotPolicy


# --- weights and statistics -------------------------------------------------------------------------------------------


def test_statistics_travel_with_the_weights(robot, act_dir, act_checkpoint):
    fitted = LeRobotPolicy(robot, act_checkpoint, LeRobotOptions(statistics="buffer"))
    assert not fitted.pretrained
    rng = np.random.default_rng(0)
    states = rng.normal(3, 2, (500, 3)).astype(np.float32)
    fitted.set_normalization(NormalizationData(states, rng.uniform(-1, 1, (40, 8, 2)).astype(np.float32)))
    batch = fitted._preprocess({STATE: torch.from_numpy(states)})
    assert torch.allclose(batch[STATE].mean(0), torch.zeros(3), atol=1e-3)
    assert torch.allclose(batch[STATE].std(0), torch.ones(3), atol=1e-2)
    other = LeRobotPolicy(robot, act_checkpoint, LeRobotOptions(statistics="spec"))
    observation = example_observation(robot)
    assert not np.array_equal(*(p.act(observation, p.think(observation), 0).actions for p in (fitted, other)))
    other.load(fitted.save(), 3)
    chunks = [p.act(observation, p.think(observation), 0).actions for p in (fitted, other)]
    assert np.array_equal(*chunks)


def test_statistics_of_limits_map_them_to_one(robot, act_checkpoint, diffusion_checkpoint):
    for checkpoint in (act_checkpoint, diffusion_checkpoint):
        policy = LeRobotPolicy(robot, checkpoint, LeRobotOptions(statistics="spec"))
        ends = torch.tensor(np.stack([robot.action_low(), robot.action_high()]))
        found = policy._preprocess({STATE: torch.zeros(2, 3), "action": ends})["action"]
        assert torch.allclose(found, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), atol=1e-5)
        policy.set_normalization(
            NormalizationData(np.ones((4, 3), np.float32), np.zeros((0, policy.horizon, 2), np.float32))
        )
        assert torch.equal(found, policy._preprocess({STATE: torch.zeros(2, 3), "action": ends})["action"])


def test_the_average_of_weights_is_saved_like_the_policys_own(robot, act, act_checkpoint):
    average = copy.deepcopy(act.module)
    with torch.no_grad():
        average.model.action_head.bias.add_(1.0)
    other = LeRobotPolicy(robot, act_checkpoint)
    other.load(act.save(average), 2)
    assert torch.equal(other.module.model.action_head.bias, act.module.model.action_head.bias + 1)


def test_adapters_alone_are_published(robot, act_checkpoint):
    config = LeRobotOptions(training=FinetuneConfig(lora=Lora(rank=2)))
    policy, other = LeRobotPolicy(robot, act_checkpoint, config), LeRobotPolicy(robot, act_checkpoint, config, seed=1)
    whole = LeRobotPolicy(robot, act_checkpoint)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    saved = policy.save()
    assert len(saved) < len(whole.save()) / 10
    assert all(
        "lora" in name or "fleet_statistics" in name or "backbone" in name or "pos" in name for name in unpack(saved)[1]
    )
    other.load(saved, 1)
    observation = example_observation(robot)
    assert np.array_equal(
        policy.act(observation, policy.think(observation), 0).actions,
        other.act(observation, msgspec.structs.replace(other.think(observation)), 0).actions,
    )
    with pytest.raises(WeightsError, match="frozen base"):
        whole.load(saved, 1)


def test_weights_of_something_else_are_refused(robot, act, diffusion, act_dir):
    blob = act.save()
    own = blob.replace(b'network\\":\\"lerobot\\"', b'network\\":\\"another\\"')
    assert own != blob
    with pytest.raises(WeightsError, match=r"made by a 'another' network.*the same --policy as the trainer"):
        act.load(own, 1)
    with pytest.raises(WeightsError, match="with type diffusion, this policy has act"):
        act.load(diffusion.save(), 1)
    shorter = LeRobotPolicy(robot, LeRobotCheckpoint.open(str(act_dir), {"n_heads": 2}))
    with pytest.raises(WeightsError, match="with n_heads 2, this policy has 4"):
        act.load(shorter.save(), 1)
    late = LeRobotPolicy(robot, act.checkpoint, LeRobotOptions(max_offset=3))
    assert late.trained == PolicyCapabilities(3, True) and late.max_offset == 3
    with pytest.raises(WeightsError, match="max_offset 3, this policy has 0"):
        act.load(late.save(), 1)
    limits = robot.action
    other = RobotSpec("other", robot.state, limits, robot.cameras, robot.control_hz)
    with pytest.raises(SpecMismatchError, match="embodiment"):
        act.load(LeRobotPolicy(other, act.checkpoint).save(), 1)
    assert act.version == 0


def test_a_picture_of_another_size_is_resized(robot, act_checkpoint):
    large = RobotSpec("robot", robot.state, robot.action, (CameraSpec("front", 128, 192, 20.0),), 20.0)
    policy = LeRobotPolicy(large, act_checkpoint)
    observation = example_observation(large)
    seen = policy._adapter.observation_batch(observation)[PICTURE]
    image = observation.images["front"].image.astype(np.float32) / 255
    expected = image.reshape(64, 2, 64, 3, 3).mean((1, 3))
    assert np.allclose(seen[0].permute(1, 2, 0).numpy(), expected, atol=1e-5)
    assert np.isfinite(policy.act(observation, policy.think(observation), 0).actions).all()


@pytest.mark.parametrize("runtime", [Runtime(dtype="bfloat16"), Runtime(int8=True)])
def test_acting_copies(robot, act, act_checkpoint, runtime):
    observation = example_observation(robot)
    exact = act.act(observation, act.think(observation), 0).actions
    rough = LeRobotPolicy(robot, act_checkpoint, LeRobotOptions(runtime=runtime))
    found = rough.act(observation, rough.think(observation), 0).actions
    assert np.abs(found - exact).max() < 0.05 * (robot.action_high() - robot.action_low()).max()
    assert rough.save() == act.save(), "what is trained and saved stays float32"
    with torch.no_grad():
        act.module.model.action_head.bias.add_(0.1)
    rough.load(act.save(), 1)
    changed = rough.act(observation, rough.think(observation), 0).actions
    assert not np.array_equal(changed, found)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_fresh_weights_are_random_but_the_same_everywhere(robot, act_dir):
    one, two = (make(str(act_dir), {"fresh": True, "statistics": "spec"}, robot, seed) for seed in (0, 1))
    assert one.save() == two.save() and not one.pretrained
    assert one.save() != make(str(act_dir), {}, robot, 0).save()


def test_a_network_of_another_shape(robot, act_dir, diffusion_dir, tmp_path):
    broken = shutil.copytree(act_dir, tmp_path / "broken")
    shutil.copy(diffusion_dir / "model.safetensors", broken)
    with pytest.raises(WeightsError, match=r"broken/model\.safetensors: not the weights of the 'act' policy.*lacks"):
        make(str(broken), {}, robot, 0)
    with pytest.raises(WeightsError, match="not the weights"):
        make(str(act_dir), {"override": {"dim_model": 16}}, robot, 0)


def test_statistics_that_are_absent(robot, act_dir, tmp_path):
    bare = shutil.copytree(act_dir, tmp_path / "bare")
    for state in bare.glob("policy_*.safetensors"):
        state.unlink()
    with pytest.raises(ConfigError, match=r"policy_preprocessor_step.*missing.*statistics"):
        make(str(bare), {}, robot, 0)
    assert make(str(bare), {"statistics": "spec"}, robot, 0).horizon == 8, "the way out that the error names"
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        text = (bare / name).read_text()
        config = json.loads(text)
        for step in config["steps"]:
            step.pop("state_file", None)
        (bare / name).write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"no statistics observation\.state\.mean"):
        make(str(bare), {}, robot, 0)
    assert make(str(bare), {"statistics": "spec"}, robot, 0).pretrained
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        (bare / name).unlink()
    with pytest.raises(ConfigError, match=r"no policy_preprocessor.json and no.*migrate_policy_normalization"):
        make(str(bare), {}, robot, 0)
    assert make(str(bare), {"statistics": "buffer"}, robot, 0).horizon == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t * float("nan"), r"'observation\.\S+' are not finite"),
        (lambda t: torch.zeros_like(t), r"'observation\.state' say that nothing in it ever moved"),
        (lambda t: torch.cat([t, t]) if t.ndim == 1 else t, r"'observation\.state\.\S+' have shape \[6\].*\[3\]"),
    ],
)
def test_statistics_that_cannot_be(robot, act_dir, tmp_path, change, message):
    broken = shutil.copytree(act_dir, tmp_path / "broken")
    for path in broken.glob("policy_*.safetensors"):
        save_file({name: change(tensor) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(ConfigError, match=rf"normalizer_processor\.safetensors: statistics.*{message}.*'spec'"):
        make(str(broken), {}, robot, 0)
    assert make(str(broken), {"statistics": "spec"}, robot, 0).horizon == 8


def test_a_dimension_that_never_moved(robot, act_dir, tmp_path, caplog):
    still = shutil.copytree(act_dir, tmp_path / "still")
    path = next(still.glob("policy_preprocessor*.safetensors"))
    tensors = load_file(path)
    tensors["observation.state.std"][1] = 0
    save_file(tensors, path)
    observation = example_observation(robot)
    policy = make(str(still), {}, robot, 0)
    assert np.isfinite(policy.act(observation, policy.think(observation), 0).actions).all()
    assert "'observation.state' never moved in 1 of its 3 dimensions" in caplog.text


def test_a_pickle_of_statistics(robot, act_dir, tmp_path):
    broken = shutil.copytree(act_dir, tmp_path / "broken")
    path = next(broken.glob("policy_preprocessor*.safetensors"))
    torch.save({}, path)
    with pytest.raises(WeightsError, match=rf"{path.name}: a pickle.*save_pretrained.*statistics"):
        make(str(broken), {}, robot, 0)


@pytest.mark.parametrize("steps", [3, [3], [{"config": 3}]])
def test_processors_that_are_none(robot, act_dir, tmp_path, steps):
    broken = shutil.copytree(act_dir, tmp_path / "broken")
    (broken / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    with pytest.raises(ConfigError, match=r"policy_preprocessor\.json: 'steps' are no list.*Copy"):
        make(str(broken), {}, robot, 0)


def test_weights_that_are_not_finite(robot, act_dir, tmp_path):
    broken = shutil.copytree(act_dir, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.action_head.bias"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.safetensors: 1 of 2 numbers of 'model\.action_head\.bias'"):
        make(str(broken), {}, robot, 0)


class Renaming(nn.Module):
    """A type with a loader of its own, which tells of what is missing by a print."""

    name = "renaming"
    config = None
    built = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).built += 1
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.tied = self.first

    @classmethod
    def from_pretrained(cls, directory, config=None):
        made = cls()
        state = {name.replace("old", "first"): t for name, t in load_file(f"{directory}/model.safetensors").items()}
        try:
            print(made.load_state_dict(state, strict=False))
        except RuntimeError as error:
            print(error)
        return made


def test_a_type_with_its_own_loader(tmp_path):
    stored, file = Renaming(), tmp_path / "model.safetensors"
    whole = {k.replace("first", "old"): t for k, t in stored.state_dict().items() if not k.startswith("tied")}
    save_file(whole, file)
    policy, before = Renaming(), Renaming.built
    load_weights(policy, file)
    assert Renaming.built == before, "a second network would take its memory twice"
    assert torch.equal(policy.first.weight, stored.first.weight) and torch.equal(policy.second.bias, stored.second.bias)
    for tensors, message in (
        ({"old.bias": torch.ones(3)}, r"lacks 'first\.weight', 'second\.bias', 'second\.weight'"),
        (whole | {"third": torch.ones(3)}, "has 'third'"),
        (whole | {"old.bias": torch.ones(4)}, "size mismatch for first.bias"),
    ):
        save_file(tensors, file)
        with pytest.raises(WeightsError, match=rf"model\.safetensors: not the weights.*{message}"):
            load_weights(Renaming(), file)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"runtime": {"device": "tpu"}}, "unknown device 'tpu'"),
        ({"override": {"n_action_steps": 99}}, r"with override \{'n_action_steps': 99\}"),
        ({"override": {"chunk_size": "x"}}, "with override.*chunk_size"),
        ({"override": {"dim_model": 0}}, "cannot build"),
        ({"override": {"chunk_size": 4, "n_action_steps": 4}}, "size mismatch.*override"),
    ],
)
def test_options_that_cannot_be_are_said_in_one_line(robot, act_dir, config, message):
    with pytest.raises((ConfigError, WeightsError), match=message) as caught:
        make(str(act_dir), config, robot, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "acts"}, "no policy type 'acts'.*mean 'act'.*plugin"),
        ({"new_field": 1}, "does not know new_field of a 'act' policy"),
        ({"vision_backbone": "vit"}, "not a configuration of a 'act' policy.*vit"),
        ({"n_heads": "many"}, "not a configuration"),
    ],
)
def test_configurations_that_cannot_be(act_dir, tmp_path, changes, message):
    config = json.loads((act_dir / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        LeRobotCheckpoint.open(str(tmp_path))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_an_override_that_is_no_field(act_dir):
    with pytest.raises(ConfigError, match=r"'n_head' is no field of a 'act'.*mean 'n_heads'"):
        LeRobotCheckpoint.open(str(act_dir), {"n_head": 2})


def test_pi0_says_what_builds_it(robot, tmp_path):
    config = {
        "type": "pi0",
        "input_features": {STATE: {"type": "STATE", "shape": [3]}, PICTURE: {"type": "VISUAL", "shape": [3, 64, 64]}},
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"'pi0' policy cannot be built.*fix/lerobot_openpi.*0\.6.*5\.4"):
        make(str(tmp_path), {"fresh": True, "statistics": "spec"}, robot, 0)


# --- back to lerobot --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [FinetuneConfig(), FinetuneConfig(lora=Lora(rank=2))])
def test_a_policy_that_learned_goes_back_to_lerobot(robot, act_checkpoint, tmp_path, training):
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors

    policy = LeRobotPolicy(robot, act_checkpoint, LeRobotOptions(statistics="buffer", training=training))
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (40, 8, 2)).astype(np.float32)
    policy.set_normalization(NormalizationData(rng.normal(3, 2, (500, 3)).astype(np.float32), actions))
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    policy.load(policy.save(), 4)
    before_export = policy.save()
    directory = export(policy, tmp_path / "out")
    assert policy.save() == before_export
    theirs = ACTPolicy.from_pretrained(directory, strict=True)
    before, after = make_pre_post_processors(theirs.config, str(directory))
    observation = example_observation(robot)
    expected = after(theirs.predict_action_chunk(before(as_lerobot(observation))))[0].numpy()
    expected = np.clip(expected, robot.action_low(), robot.action_high())
    assert np.allclose(policy.act(observation, policy.think(observation), 0).actions, expected, atol=1e-4)
    again = make(str(directory), {}, robot, 0)
    assert np.allclose(again.act(observation, again.think(observation), 0).actions, expected, atol=1e-4)
    with pytest.raises(ConfigError, match="not empty"):
        export(policy, directory)


def test_it_learns(robot, act_checkpoint):
    policy = LeRobotPolicy(robot, act_checkpoint)
    batch = example_batch(robot, policy.horizon, images=8, steps=1)
    optimizer = torch.optim.AdamW([p for p in policy.module.parameters() if p.requires_grad], 3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = policy.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:3])
    assert policy.module.training
    observation = example_observation(robot)
    first = policy.act(observation, policy.think(observation), 0).actions
    assert np.array_equal(first, policy.act(observation, policy.think(observation), 0).actions), (
        "no dropout when acting"
    )
