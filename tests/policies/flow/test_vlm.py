"""A vision-language model as the slow path: read from a directory, frozen or trained, refused if it is another one."""

import json
import shutil

import msgspec
import numpy as np
import pytest
import torch

from policies.common.runtime import Runtime
from policies.common.weights import trainable_state_dict
from policies.conformance.check import check_policy, example_batch, example_observation
from policies.flow import factory
from policies.flow.config import AttentionPoolerConfig, Transformer
from policies.flow.networks.backbone import describe, require_backbone
from policies.flow.policy import FlowPolicy
from policies.interface.trainable import FinetuneConfig, Lora
from tests.policies.flow.test_strategies import train
from tests.policies.flow.vlm_directory import IMAGE, build
from wire.errors import ConfigError, WeightsError


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build(tmp_path_factory.mktemp("models") / "vlm")


@pytest.fixture
def net(seeing_net, directory):
    tokens = {
        "transformer": Transformer(32, 2, 2),
        "pooler": AttentionPoolerConfig(queries=4, width=16, inner=16, heads=2),
    }
    return msgspec.structs.replace(seeing_net, **tokens, stem=(), vlm=describe(directory))


@pytest.fixture
def copy(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "copy")


def backbone(policy):
    return {name: tensor.clone() for name, tensor in policy.module.slow.backbone.state_dict().items()}


@pytest.mark.slow
def test_it_conforms_and_only_what_learns_travels(seeing, net, directory):
    def make():
        return FlowPolicy(seeing, net, 3, vlm=directory)

    checks = check_policy(make)
    assert [f"{c.name}: {c.detail}" for c in checks if not c.passed] == []
    policy = make()
    assert not any("backbone" in name for name in trainable_state_dict(policy.module))
    before = backbone(policy)
    train(policy, lambda: example_batch(seeing, 4), steps=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone(policy).items())
    robot = make()
    robot.load(policy.save(), 1)
    observation = example_observation(seeing)
    assert np.array_equal(robot.think(observation).data, policy.think(observation).data)


@pytest.mark.parametrize(
    ("change", "made"),
    [
        ({"train": True}, {}),
        ({"layers": 1}, {"training": FinetuneConfig(train=("fast.*", "slow.pooler.*"), lora=Lora(rank=2))}),
    ],
    ids=["trained", "adapters"],
)
@pytest.mark.slow
def test_its_own_weights_learn_when_asked_to(seeing, net, directory, change, made):
    config = msgspec.structs.replace(net, vlm=describe(directory, **change))

    def make(seed=3):
        return FlowPolicy(seeing, config, seed, vlm=directory, **made)

    policy, robot = make(), make(4321)
    before = backbone(policy)
    train(policy, lambda: example_batch(seeing, 4), steps=3)
    changed = {name for name, tensor in backbone(policy).items() if not torch.equal(tensor, before[name])}
    assert any(name.startswith("text.") for name in changed)
    if made:
        assert all("lora" in name for name in changed)
    robot.load(policy.save(), 1)
    observation = example_observation(seeing)
    assert np.array_equal(robot.think(observation).data, policy.think(observation).data)
    assert not np.array_equal(robot.think(observation).data, make().think(observation).data)


def test_pictures_and_words_reach_the_latent_and_padding_does_not(seeing, net, directory):
    policy = FlowPolicy(seeing, net, vlm=directory)
    observation = example_observation(seeing, task="open the drawer")
    frame = observation.images["front"]
    changed = {"front": msgspec.structs.replace(frame, image=255 - frame.image)}
    latents = [
        policy.think(observation).data,
        policy.think(msgspec.structs.replace(observation, images=changed)).data,
        policy.think(msgspec.structs.replace(observation, task="press the button")).data,
    ]
    assert not any(np.allclose(a, b, atol=1e-4) for i, a in enumerate(latents) for b in latents[:i])
    longer = msgspec.structs.replace(net, vlm=describe(directory, words=12))
    other = FlowPolicy(seeing, longer, vlm=directory)
    np.testing.assert_allclose(other.think(observation).data, latents[0], atol=1e-5)


def test_it_sees_what_its_own_library_would_show_it(seeing, net, directory):
    """The same hidden states as the whole model gives for the prompt and the prepared picture of one camera."""
    from transformers import AutoModel, AutoTokenizer

    slow = FlowPolicy(seeing, net, vlm=directory).module.slow.backbone
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, IMAGE, IMAGE, 3), np.uint8))
    words = AutoTokenizer.from_pretrained(directory)
    text = f"<fake_token_around_image><global-img>{'<image>' * 4}<fake_token_around_image>open the drawer\n"
    ids = torch.tensor([words(text, add_special_tokens=False)["input_ids"]])
    pixels = image.permute(0, 3, 1, 2)[None].float() / 127.5 - 1
    said = torch.tensor([words("open the drawer\n", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        whole = AutoModel.from_pretrained(directory)(input_ids=ids, pixel_values=pixels).last_hidden_state
        hidden, real = slow([image], said)
    assert real.all()
    torch.testing.assert_close(hidden, whole, atol=1e-5, rtol=1e-4)


def test_pictures_of_any_shape_become_its_square(seeing, net, directory):
    square = FlowPolicy(seeing, net, vlm=directory).module.slow.backbone.square
    for height, width in ((16, 16), (10, 40), (64, 48), (IMAGE, IMAGE)):
        found = square(torch.full((2, height, width, 3), 255, dtype=torch.uint8))
        assert found.shape == (2, 3, IMAGE, IMAGE)
        scale = IMAGE / max(height, width)
        seen = found[0, 0] > 0.99
        assert seen[: round(height * scale), : round(width * scale)].all()
        assert seen.sum() == round(height * scale) * round(width * scale)
        assert (found[0, 0][~seen] == -1).all()


def test_random_weights_are_the_same_everywhere(seeing, net, directory, tmp_path):
    bare = build(tmp_path / "bare", weights=False)
    config = msgspec.structs.replace(net, vlm=describe(bare))
    policy, robot = (FlowPolicy(seeing, config, seed, vlm=bare, random_vlm=True) for seed in (0, 1))
    assert policy.save() != robot.save()
    robot.load(policy.save(), 1)
    with pytest.raises(ConfigError, match=r"bare: no weights \(\*\.safetensors\)"):
        FlowPolicy(seeing, config, vlm=bare)
    half = FlowPolicy(seeing, config, vlm=bare, random_vlm=True, runtime=Runtime(dtype="bfloat16"))
    observation = example_observation(seeing)
    exact, rounded = policy.think(observation).data, half.think(observation).data
    assert 0 < np.abs(exact - rounded).max() < 0.1 * np.abs(exact).max()


# --- what is refused -----------------------------------------------------------------------------------------------


def test_a_robot_with_another_base_says_so(seeing, net, directory, copy):
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in tensors if "q_proj" in name)
    save_file(tensors | {name: tensors[name] + 1}, copy / "model.safetensors", {"format": "pt"})
    policy, robot = FlowPolicy(seeing, net, vlm=directory), FlowPolicy(seeing, net, vlm=copy)
    with pytest.raises(WeightsError, match="frozen base of sha256"):
        robot.load(policy.save(), 1)
    assert robot.version == 0


def test_another_model_is_refused_by_its_fingerprint(seeing, net, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"scale_factor": 4}))
    with pytest.raises(
        ConfigError, match=f"copy has fingerprint .* this network was made for {net.vlm.fingerprint[:12]}"
    ):
        FlowPolicy(seeing, net, vlm=copy)
    with pytest.raises(ConfigError, match="say where it lies on this machine"):
        FlowPolicy(seeing, net)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "preprocessor_config.json"])
def test_a_missing_file_is_named(copy, net, name):
    (copy / name).unlink()
    for ask in (lambda: describe(copy), lambda: require_backbone(copy, net.vlm)):
        with pytest.raises(ConfigError, match=rf"copy/{name}: No such file.*save_pretrained"):
            ask()


def test_a_pickle_is_refused(seeing, net, copy):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: a pickle.*safe_serialization"):
        FlowPolicy(seeing, net, vlm=copy)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        ("not json", "config.json: not JSON"),
        ("[]", "config.json: not a JSON object"),
        ('{"model_type": "llama"}', "model_type 'llama'.*smolvlm"),
        ('{"model_type": "smolvlm", "text_config": {"num_hidden_layers": "many"}}', "sizes cannot be read"),
    ],
)
def test_a_configuration_that_is_none_is_named(copy, write, says):
    (copy / "config.json").write_text(write)
    with pytest.raises(ConfigError, match=says):
        describe(copy)


def test_sizes_that_cannot_be_are_refused(seeing, net, copy):
    config = json.loads((copy / "config.json").read_text())
    config["vision_config"]["patch_size"] = 0
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="copy: the vision-language model cannot be read"):
        FlowPolicy(seeing, msgspec.structs.replace(net, vlm=describe(copy)), vlm=copy)


def test_weights_of_another_model_are_refused(seeing, net, directory, copy, tmp_path):
    wider = build(tmp_path / "wider", hidden=64)
    shutil.copy(wider / "model.safetensors", copy)
    with pytest.raises(ConfigError, match="copy"):
        FlowPolicy(seeing, net, vlm=copy)
    (copy / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(WeightsError, match=r"copy/model\.safetensors: 4 bytes that are no safetensors"):
        FlowPolicy(seeing, net, vlm=copy)


def test_what_cannot_fit_is_refused(seeing, blind, net, directory, tmp_path):
    with pytest.raises(ConfigError, match="at least one camera"):
        FlowPolicy(seeing, msgspec.structs.replace(net, cameras=()), vlm=directory)
    with pytest.raises(ConfigError, match=r"3 layers of the text model .* which has 2"):
        describe(directory, layers=3)
    with pytest.raises(ConfigError, match="no such directory"):
        describe(tmp_path / "nowhere")
    told = {"vlm": str(directory)}
    with pytest.raises(ConfigError, match="at least one camera"):
        factory.defaults("small", told, blind)
    with pytest.raises(ConfigError, match="'pixels' has no latent tokens"):
        factory.defaults("pixels", told, seeing)


def test_the_factory_makes_it_from_a_directory(seeing, directory):
    told = {"vlm": str(directory), "vlm_layers": 1, "max_offset": 4, "horizon": 4}
    policy = factory.make("small", told, seeing, 0)
    assert policy.config.vlm.layers == 1
    assert factory.defaults("small", told, seeing).horizon == policy.horizon == 4
    assert policy.act(example_observation(seeing), policy.think(example_observation(seeing)), 0).actions.shape == (4, 2)
