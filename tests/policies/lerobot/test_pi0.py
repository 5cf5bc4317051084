"""PI0 and PI05 divided into thinking and acting, against lerobot's own `sample_actions`.

lerobot 0.4.4 cannot build their backbone with the transformers that is installed here. So the two networks inside,
PaliGemma and its Gemma expert, are replaced by small ones of the same interface; all the rest is lerobot's own code.
What this cannot show is that the real networks behave as these do.
"""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from torch import nn

from policies.lerobot.checkpoint import LeRobotCheckpoint
from policies.lerobot.partitions.partition import Guide
from policies.lerobot.partitions.vla import PI0Partition, PI05Partition
from tests.extras import needs
from wire.errors import ConfigError, PolicyError

pytestmark = [pytest.mark.slow, needs("lerobot")]

CHUNK, WIDTH, HEADS, LAYERS, SIDE = 6, 16, 2, 3, 28


class Stream(nn.Module):
    """One of two transformers whose layers attend to each other's tokens; stands for both PaliGemma's and Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(_attn_implementation="")
        self.embed_tokens = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "input_layernorm": nn.LayerNorm(WIDTH),
                    "self_attn": nn.ModuleDict({f"{n}_proj": nn.Linear(WIDTH, WIDTH) for n in "qkvo"}),
                    "post_attention_layernorm": nn.LayerNorm(WIDTH),
                    "mlp": nn.ModuleDict({"up_proj": nn.Linear(WIDTH, WIDTH)}),
                }
            )
            for _ in range(LAYERS)
        )
        for layer in self.layers:
            layer.self_attn = layer["self_attn"]
            layer.self_attn.q_proj = layer["self_attn"]["q_proj"]
        self.norm = nn.LayerNorm(WIDTH)

    def project(self, index, hidden, positions):
        """Queries, keys and values [b, heads, tokens, width / heads]; positions turn the first two."""
        layer = self.layers[index]
        normed = layer["input_layernorm"](hidden)
        q, k, v = (layer["self_attn"][f"{n}_proj"](normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
        turn = torch.cos(0.3 * positions)[:, None, :, None]
        return q * turn, k * turn, v

    def rest(self, index, hidden, attended, condition):
        layer = self.layers[index]
        hidden = hidden + layer["self_attn"]["o_proj"](attended)
        if condition is not None:
            hidden = hidden * (1 + condition[:, None])
        return hidden + layer["mlp"]["up_proj"](layer["post_attention_layernorm"](hidden))


class Backbone(nn.Module):
    """The methods of lerobot's `PaliGemmaWithExpertModel` that PI0 and PI05 use, with its names for the parts."""

    def __init__(self, *_args, **_kwargs) -> None:
        super().__init__()
        self.paligemma = nn.Module()
        self.paligemma.model = nn.Module()
        self.paligemma.model.language_model = Stream()
        self.paligemma.model.vision = nn.Linear(3, WIDTH)
        self.paligemma.lm_head = nn.Linear(WIDTH, 4)
        object.__setattr__(self.paligemma, "language_model", self.paligemma.model.language_model)
        self.gemma_expert = nn.Module()
        self.gemma_expert.model = Stream()
        self.gemma_expert.model.embed_tokens = None
        self.gemma_expert.lm_head = nn.Linear(WIDTH, 4)

    def embed_image(self, image):
        return self.paligemma.model.vision(image.unflatten(2, (2, -1)).mean((3, 4)).transpose(1, 2))

    def embed_language_tokens(self, tokens):
        return self.paligemma.language_model.embed_tokens(tokens)

    def forward(self, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, adarms_cond=None):
        from transformers import DynamicCache

        streams = (self.paligemma.language_model, self.gemma_expert.model)
        used = [i for i in (0, 1) if inputs_embeds[i] is not None]
        assert all(streams[i].config._attn_implementation == "eager" for i in used) or len(used) == 2
        conditions, hidden = adarms_cond or [None, None], list(inputs_embeds)
        cache = DynamicCache() if use_cache else None
        for index in range(LAYERS):
            begin, projected = 0, []
            for i in used:
                end = begin + hidden[i].shape[1]
                projected.append(streams[i].project(index, hidden[i], position_ids[:, begin:end]))
                begin = end
            q, k, v = (torch.cat(parts, 2) for parts in zip(*projected, strict=True))
            if cache is not None:
                cache.update(k, v, index)
            if past_key_values is not None:  # read, and not added to
                before = past_key_values.layers[index]
                k, v = torch.cat([before.keys, k], 2), torch.cat([before.values, v], 2)
            out = torch.softmax(q @ k.mT * 0.5 + attention_mask, -1) @ v
            out, begin = out.transpose(1, 2).flatten(2), 0
            for i in used:
                end = begin + hidden[i].shape[1]
                hidden[i] = streams[i].rest(index, hidden[i], out[:, begin:end], conditions[i])
                begin = end
        return [streams[i].norm(hidden[i]) if i in used else None for i in (0, 1)], cache


class Made:
    """A policy of either kind with the small networks inside, and its partition."""

    def __init__(self, kind: str, monkeypatch) -> None:
        import importlib

        from lerobot.configs.types import FeatureType, PolicyFeature

        stub = types.ModuleType("transformers.models.siglip.check")
        stub.check_whether_transformers_replace_is_installed_correctly = lambda: True
        import transformers.models.siglip as siglip

        monkeypatch.setitem(sys.modules, stub.__name__, stub)
        monkeypatch.setattr(siglip, "check", stub, raising=False)
        module = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
        monkeypatch.setattr(module, "PaliGemmaWithExpertModel", Backbone)
        monkeypatch.setattr(module, "get_gemma_config", lambda _: types.SimpleNamespace(width=WIDTH))
        name = kind.upper()
        settings = importlib.import_module(f"lerobot.policies.{kind}.configuration_{kind}")
        config = getattr(settings, f"{name}Config")(
            input_features={
                "observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE)),
                "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
            },
            output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
            chunk_size=CHUNK,
            n_action_steps=CHUNK,
            num_inference_steps=4,
            max_state_dim=8,
            max_action_dim=8,
            image_resolution=(SIDE, SIDE),
            tokenizer_max_length=10,
            empty_cameras=1,
            device="cpu",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.policy = getattr(module, f"{name}Policy")(config).eval()
        self.partition = PI0Partition() if kind == "pi0" else PI05Partition()

    def batch(self, seed: int, size: int = 1, said: int = 6):
        drawn = torch.Generator().manual_seed(seed)
        return {
            "observation.images.front": torch.rand(size, 3, SIDE, SIDE, generator=drawn),
            "observation.state": torch.randn(size, 3, generator=drawn),
            "observation.language.tokens": torch.randint(0, 64, (size, said), generator=drawn),
            "observation.language.attention_mask": torch.ones(size, said, dtype=torch.bool),
        }

    def noise(self):
        return torch.randn(self.partition.noise_shape(self.policy), generator=torch.Generator().manual_seed(9))


@pytest.fixture(params=["pi0", "pi05"])
def made(request, monkeypatch) -> Made:
    return Made(request.param, monkeypatch)


def _state_only(batch):
    return {"observation.state": batch["observation.state"]}


@torch.no_grad()
def test_thinking_and_acting_gives_the_chunk_of_the_undivided_policy(made) -> None:
    policy, partition, noise = made.policy, made.partition, made.noise()
    shapes = set()
    for said in (10, 6):
        batch = made.batch(said, said=said)
        expected = policy.predict_action_chunk(dict(batch), noise=noise)
        latent = partition.think(policy, batch)
        chunk = partition.act(policy, latent, _state_only(batch), noise, None)
        assert chunk.shape == (1, CHUNK, 2) and partition.horizon(policy) == CHUNK
        torch.testing.assert_close(chunk, expected, atol=1e-5, rtol=1e-5)
        again = partition.act(policy, latent, _state_only(batch), noise, None)
        assert torch.equal(chunk, again), "acting leaves the latent as it was"
        shapes.add(tuple(tuple(tensor.shape) for tensor in latent))
    assert len(shapes) == 1


@torch.no_grad()
def test_pi0_sees_the_newest_state_and_pi05_the_one_in_its_words(made) -> None:
    policy, partition, noise = made.policy, made.partition, made.noise()
    then, now = made.batch(0), made.batch(1)
    latent = partition.think(policy, then)
    chunk = partition.act(policy, latent, _state_only(now), noise, None)
    mixed = {**then, "observation.state": now["observation.state"]}
    torch.testing.assert_close(chunk, policy.predict_action_chunk(mixed, noise=noise), atol=1e-5, rtol=1e-5)
    moved = (chunk - policy.predict_action_chunk(dict(then), noise=noise)).abs().max()
    assert moved > 1e-3 if isinstance(partition, PI0Partition) else moved < 1e-5


def test_a_guided_chunk_keeps_closer_to_what_is_decided(made) -> None:
    policy, partition, noise = made.policy, made.partition, made.noise()
    with torch.no_grad():
        batch = made.batch(0)
        latent = partition.think(policy, batch)
        free = partition.act(policy, latent, _state_only(batch), noise, None)[0]
        decided = free[:4] + 0.5
        guided = partition.act(policy, latent, _state_only(batch), noise, Guide(decided, 2))[0]
    missed = (guided[:4] - decided).abs().mean(1)
    assert missed[:2].max() < 0.1 and missed.max() < 0.5


def test_padded_actions_do_not_count(made) -> None:
    batch = made.batch(2, size=3, said=10)
    batch["action"] = torch.randn(3, CHUNK, 2, generator=torch.Generator().manual_seed(1))

    def loss(batch):
        torch.manual_seed(0)
        return made.partition.loss(made.policy, made.partition.arrange(made.policy, batch))

    torch.manual_seed(0)
    theirs = made.policy.forward(batch)[0]
    torch.testing.assert_close(loss(batch), theirs)
    pad = torch.zeros(3, CHUNK, dtype=torch.bool)
    torch.testing.assert_close(loss({**batch, "action_is_pad": pad}), theirs)
    pad[1] = True
    changed = {**batch, "action": batch["action"].clone()}
    changed["action"][1] = 9.0
    assert loss({**batch, "action_is_pad": pad}).item() == loss({**changed, "action_is_pad": pad}).item()
    assert loss({**batch, "action_is_pad": torch.ones_like(pad)}).item() == 0.0


def test_a_gradient_reaches_all_but_what_is_said_to_be_unreached(made) -> None:
    batch = made.batch(2, size=3, said=10) | {"action": torch.randn(3, CHUNK, 2)}
    unreached = made.partition.unreached(made.policy)
    made.partition.loss(made.policy, batch).backward()
    without = {n for n, p in made.policy.named_parameters() if p.grad is None or not bool(p.grad.any())}
    # what adds the same to every key of a softmax changes nothing, up to rounding
    without -= {name for name in without if name.endswith("k_proj.bias")}
    assert without == unreached


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_the_names_are_those_of_the_real_networks(kind, monkeypatch) -> None:
    """Built without memory, in full size."""
    import importlib
    from fnmatch import fnmatchcase

    module = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    real, kept = module.PaliGemmaWithExpertModel, module.get_gemma_config
    made = Made(kind, monkeypatch)
    monkeypatch.setattr(module, "PaliGemmaWithExpertModel", real)
    monkeypatch.setattr(module, "get_gemma_config", kept)
    with torch.device("meta"):
        made.policy.config.device = "meta"
        policy = type(made.policy)(made.policy.config)
    names = {name for name, _ in policy.named_parameters()}
    unreached = made.partition.unreached(policy)
    assert {name.rpartition("language_model.")[2] for name in unreached} >= {
        "norm.weight",
        "layers.17.self_attn.q_proj.weight",
        "layers.17.mlp.down_proj.weight",
        "layers.17.post_attention_layernorm.weight",
    }
    assert unreached < names and not any(".16." in name or "k_proj" in name for name in unreached)
    linears = [name for name, part in policy.named_modules() if isinstance(part, nn.Linear)]
    for pattern in made.partition.lora_targets:
        assert any(fnmatchcase(name, pattern) for name in linears), pattern


def test_a_batch_without_words_is_refused(made) -> None:
    batch = {name: value for name, value in made.batch(0).items() if "language" not in name}
    with pytest.raises(PolicyError, match=f"{made.policy.config.type}.*policy_preprocessor"):
        made.partition.think(made.policy, batch)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_a_checkpoint_opens_and_says_which_versions_build_it(kind, tmp_path) -> None:
    features = {"observation.state": {"type": "STATE", "shape": [3]}}
    config = {
        "type": kind,
        "input_features": features,
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
        "chunk_size": 20,
        "n_action_steps": 20,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = LeRobotCheckpoint.open(str(tmp_path))
    assert checkpoint.type == kind and checkpoint.config.chunk_size == 20
    with pytest.raises(ConfigError, match=rf"'{kind}'.*transformers"):
        checkpoint.policy(seed=0)
