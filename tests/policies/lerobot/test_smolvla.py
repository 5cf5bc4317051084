"""SmolVLA divided into thinking and acting, against lerobot's own undivided one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from policies.lerobot.partitions.fused import FusedSmolVLA
from policies.lerobot.partitions.partition import Guide
from policies.lerobot.partitions.vla import SmolVLAPartition
from policies.lerobot.tiny import build_tiny
from tests.extras import needs
from wire.errors import PolicyError
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

pytestmark = [pytest.mark.slow, needs("lerobot")]

CHUNK = 8
PARTITION = SmolVLAPartition()
STATE = (Dimension("x", "m", -1.0, 1.0), Dimension("y", "m", -1.0, 1.0), Dimension("z", "m", 0.0, 2.0))
ACTION = (Dimension("dx", "cm", -2.0, 2.0, CommandType.delta), Dimension("grip", "1", 0.0, 10.0))
ONE = RobotSpec("one", STATE, ACTION, (CameraSpec("front", 64, 64, 20.0),), 20.0)
TWO = RobotSpec("two", STATE, ACTION, (CameraSpec("left", 64, 64, 20.0), CameraSpec("wrist", 48, 64, 20.0)), 20.0)

CASES = {
    "as it comes": (ONE, {}),
    "cross-attention only": (ONE, {"self_attn_every_n_layers": 0}),
    "self-attention only": (ONE, {"attention_mode": "self_attn"}),
    "prefix of a fixed length": (ONE, {"prefix_length": 80}),
    "words of a fixed length": (ONE, {"pad_language_to": "max_length"}),
    "two cameras and special tokens": (TWO, {"add_image_special_tokens": True}),
    "a camera that is not there": (ONE, {"empty_cameras": 2}),
    "an expert of half the layers": (ONE, {"num_expert_layers": 2}),
}


class Made:
    """A tiny SmolVLA with lerobot's own processors."""

    def __init__(self, directory, spec, changes) -> None:
        from lerobot.policies.factory import make_pre_post_processors
        from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

        build_tiny("smolvla", directory, spec, ["open the drawer"], chunk=CHUNK, changes=changes)
        self.spec = spec
        self.policy = SmolVLAPolicy.from_pretrained(directory).eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for parameter in self.policy.parameters():
                # weights as they come are so small that images hardly matter
                parameter.data += 0.05 * torch.randn_like(parameter)
        self.before, _ = make_pre_post_processors(self.policy.config, pretrained_path=str(directory))

    def batch(self, seed: int, task: str = "open the drawer", size: int = 1):
        rng = np.random.default_rng(seed)
        images = {
            f"observation.images.{c.name}": torch.tensor(rng.random((size, 3, c.height, c.width)), dtype=torch.float32)
            for c in self.spec.cameras
        }
        state = torch.tensor(rng.uniform(-1, 1, (size, 3)), dtype=torch.float32)
        return self.before({**images, "observation.state": state, "task": [task] * size})

    def training_batch(self, size: int = 4):
        rng = np.random.default_rng(5)
        batch = self.batch(3, size=size)
        batch["action"] = torch.tensor(rng.uniform(-1, 1, (size, CHUNK, 2)), dtype=torch.float32)
        batch["action_is_pad"] = torch.zeros(size, CHUNK, dtype=torch.bool)
        return batch

    def noise(self, seed: int = 7):
        return torch.randn(PARTITION.noise_shape(self.policy), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("smolvla") / "one", ONE, {})


def _state_only(batch):
    return {"observation.state": batch["observation.state"]}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_thinking_and_acting_gives_the_chunk_of_the_undivided_policy(name, tmp_path) -> None:
    made = Made(tmp_path / "checkpoint", *CASES[name])
    policy, noise = made.policy, made.noise()
    shapes = set()
    for seed, task in ((0, "open the drawer"), (1, "push")):
        batch = made.batch(seed, task)
        expected = policy.predict_action_chunk(dict(batch), noise=noise)
        latent = PARTITION.think(policy, batch)
        chunk = PARTITION.act(policy, latent, _state_only(batch), noise, None)
        assert chunk.shape == (1, CHUNK, 2) and PARTITION.horizon(policy) == CHUNK
        torch.testing.assert_close(chunk, expected, atol=1e-5, rtol=1e-5)
        shapes.add(tuple(tuple(tensor.shape) for tensor in latent))
    assert len(shapes) == 1, "a latent has one shape, whatever is said"


@torch.no_grad()
def test_weights_that_are_written_to_count_from_the_next_chunk_on(made) -> None:
    policy, noise, batch = copy.deepcopy(made.policy), made.noise(), made.batch(0)
    chunks = []
    for change in (lambda p: None, lambda p: p.mul_(1.1), lambda p: p.copy_(torch.randn(p.shape) * 0.1)):
        for parameter in policy.model.parameters():
            change(parameter)
        chunks.append(PARTITION.act(policy, PARTITION.think(policy, batch), _state_only(batch), noise, None))
        expected = policy.predict_action_chunk(dict(batch), noise=noise)
        torch.testing.assert_close(chunks[-1], expected, atol=1e-5, rtol=1e-5)
    assert (chunks[0] - chunks[1]).abs().max() > 1e-3, "the change shows"


@torch.no_grad()
def test_few_operations_are_for_plain_float32_layers_alone(made) -> None:
    assert FusedSmolVLA.is_compatible(made.policy.model)
    assert not FusedSmolVLA.is_compatible(copy.deepcopy(made.policy.model).to(torch.bfloat16))

    class Louder(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    policy, noise, batch = copy.deepcopy(made.policy), made.noise(), made.batch(0)
    attention = policy.model.vlm_with_expert.lm_expert.layers[1].self_attn
    plain, attention.q_proj = attention.q_proj, Louder(*reversed(attention.q_proj.weight.shape), bias=False)
    attention.q_proj.weight.copy_(plain.weight)
    assert not FusedSmolVLA.is_compatible(policy.model)
    chunk = PARTITION.act(policy, PARTITION.think(policy, batch), _state_only(batch), noise, None)
    torch.testing.assert_close(chunk, policy.predict_action_chunk(dict(batch), noise=noise), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_state_is_of_now_and_the_images_are_those_of_the_thought(made) -> None:
    policy, noise = made.policy, made.noise()
    then, now = made.batch(0), made.batch(1)
    mixed = {**then, "observation.state": now["observation.state"]}
    latent = PARTITION.think(policy, then)
    chunk = PARTITION.act(policy, latent, _state_only(now), noise, None)
    torch.testing.assert_close(chunk, policy.predict_action_chunk(mixed, noise=noise), atol=1e-5, rtol=1e-5)
    for other in (then, now):
        assert (chunk - policy.predict_action_chunk(dict(other), noise=noise)).abs().max() > 1e-2


@torch.no_grad()
def test_a_latent_that_was_sent_as_float32_is_as_good_in_bfloat16(made) -> None:
    policy = copy.deepcopy(made.policy)
    policy.model.vlm_with_expert.to(torch.bfloat16)  # as lerobot loads a pretrained backbone
    batch, noise = made.batch(0), made.noise()
    expected = policy.predict_action_chunk(dict(batch), noise=noise)
    latent = PARTITION.think(policy, batch)
    assert latent[0].dtype == torch.bfloat16
    kept = PARTITION.act(policy, latent, _state_only(batch), noise, None)
    sent = PARTITION.act(policy, [tensor.float() for tensor in latent], _state_only(batch), noise, None)
    assert torch.equal(kept, sent)
    # sums of bfloat16 in another order
    torch.testing.assert_close(kept, expected, atol=2e-2, rtol=2e-2)


@torch.no_grad()
def test_an_alohas_joints_are_turned_as_lerobot_turns_them(tmp_path) -> None:
    joints = tuple(Dimension(f"j{i}", "rad", -1.0, 1.0) for i in range(14))
    spec = RobotSpec("aloha", joints, joints, ONE.cameras, 20.0)
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    changes = {"adapt_to_pi_aloha": True}
    directory = build_tiny("smolvla", tmp_path / "aloha", spec, [], chunk=CHUNK, changes=changes)
    policy = SmolVLAPolicy.from_pretrained(directory).eval()
    batch = {
        "observation.images.front": torch.rand(1, 3, 64, 64),
        "observation.state": 0.02 + 0.03 * torch.rand(1, 14),
        "observation.language.tokens": torch.ones(1, 5, dtype=torch.long),
        "observation.language.attention_mask": torch.ones(1, 5, dtype=torch.bool),
    }
    before = batch["observation.state"].clone()
    noise = torch.randn(PARTITION.noise_shape(policy))
    chunk = PARTITION.act(policy, PARTITION.think(policy, batch), _state_only(batch), noise, None)
    assert torch.equal(batch["observation.state"], before)
    torch.testing.assert_close(chunk, policy.predict_action_chunk(batch, noise=noise), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_guided_chunk_keeps_closer_to_what_is_decided(made, mode) -> None:
    policy, noise = made.policy, made.noise()
    with mode():
        batch = made.batch(0)
        latent = PARTITION.think(policy, batch)
        free = PARTITION.act(policy, latent, _state_only(batch), noise, None)[0]
        decided = free[:6] + torch.tensor([0.5, -0.5])
        guided = PARTITION.act(policy, latent, _state_only(batch), noise, Guide(decided, 3))[0]
    assert guided.shape == free.shape and not guided.requires_grad
    missed = (guided[:6] - decided).abs().mean(1)
    assert missed[:3].max() < 0.2 * 0.5, "committed actions are met"
    assert missed[:3].mean() < missed[3:].mean() < 0.5, "the others are leaned on"


def test_a_guide_asks_lerobot_for_the_same_as_its_own_policy(made) -> None:
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    policy = copy.deepcopy(made.policy)
    policy.config.rtc_config = RTCConfig(enabled=True, execution_horizon=5)
    policy.init_rtc_processor()
    batch, noise = made.batch(0), made.noise()
    decided = torch.full((5, 2), 0.7)
    with torch.no_grad():
        chunk = PARTITION.act(policy, PARTITION.think(policy, batch), _state_only(batch), noise, Guide(decided, 2))
    expected = policy.predict_action_chunk(
        dict(batch), noise=noise, prev_chunk_left_over=decided, inference_delay=2
    ).detach()
    torch.testing.assert_close(chunk, expected, atol=1e-5, rtol=1e-5)


def test_padded_actions_do_not_count(made) -> None:
    def loss(batch):
        torch.manual_seed(0)
        return PARTITION.loss(made.policy, PARTITION.arrange(made.policy, batch))

    batch = made.training_batch()
    batch["action_is_pad"][:, 5:] = True
    changed = {**batch, "action": batch["action"].clone()}
    changed["action"][:, 5:] = 9.0
    assert loss(batch).item() == loss(changed).item()
    changed["action"][:, 4] = 9.0
    assert loss(batch).item() != loss(changed).item()
    none = {**batch, "action_is_pad": torch.ones_like(batch["action_is_pad"])}
    assert loss(none).item() == 0.0


def test_the_loss_is_lerobots_as_a_mean_over_what_is_kept(made) -> None:
    batch = made.training_batch()
    arranged = PARTITION.arrange(made.policy, batch)
    torch.manual_seed(0)
    theirs = made.policy.forward(dict(batch))[0]
    torch.manual_seed(0)
    torch.testing.assert_close(PARTITION.loss(made.policy, arranged), theirs)
    batch["action_is_pad"][:, 2:] = True
    torch.manual_seed(0)
    theirs = made.policy.forward({**batch, "actions_id_pad": batch["action_is_pad"]})[0]
    torch.manual_seed(0)
    ours = PARTITION.loss(made.policy, PARTITION.arrange(made.policy, batch))
    torch.testing.assert_close(ours, theirs * CHUNK / 2)


def test_a_gradient_reaches_all_but_what_is_said_to_be_unreached(made, tmp_path) -> None:
    for policy in (made.policy, Made(tmp_path / "half", ONE, {"num_expert_layers": 2}).policy):
        unreached = PARTITION.unreached(policy)
        names = {name for name, _ in policy.named_parameters()}
        assert unreached < names
        policy.zero_grad()
        PARTITION.loss(policy, PARTITION.arrange(policy, made.training_batch())).backward()
        without = {n for n, p in policy.named_parameters() if p.grad is None or not bool(p.grad.any())}
        assert without == unreached
        policy.zero_grad()


def test_what_is_missing_is_named(made) -> None:
    batch = made.batch(0)
    wordless = {name: value for name, value in batch.items() if "language" not in name}
    with pytest.raises(PolicyError, match=r"policy_preprocessor\.json"):
        PARTITION.think(made.policy, wordless)
    policy = copy.deepcopy(made.policy)
    policy.config.use_cache = False
    with pytest.raises(PolicyError, match="use_cache"):
        PARTITION.think(policy, batch)


def test_adapters_go_where_the_patterns_say(made) -> None:
    from fnmatch import fnmatchcase

    linears = [n for n, part in made.policy.named_modules() if isinstance(part, torch.nn.Linear)]
    hits = {pattern: [n for n in linears if fnmatchcase(n, pattern)] for pattern in PARTITION.lora_targets}
    assert all(hits.values()), hits
    assert not any(".vlm.model." in name for names in hits.values() for name in names)


@pytest.mark.slow
def test_it_learns_where_to_go_from_the_picture(tmp_path) -> None:
    """A bright square on the left or on the right says which way; states say nothing."""
    made = Made(tmp_path / "learner", ONE, {})
    policy = made.policy.train()
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(0)

    def batch(size):
        way = torch.randint(0, 2, (size,)).float() * 2 - 1
        image = torch.zeros(size, 3, 64, 64)
        for row, side in enumerate(way):
            image[row, :, 20:44, (4 if side < 0 else 36) : (28 if side < 0 else 60)] = 1
        ready = made.before(
            {"observation.images.front": image, "observation.state": torch.zeros(size, 3), "task": ["go"] * size}
        )
        ready["action"] = way[:, None, None].expand(size, CHUNK, 2).contiguous()
        ready["action_is_pad"] = torch.zeros(size, CHUNK, dtype=torch.bool)
        return ready, way

    losses = []
    for _ in range(30):
        ready, _ = batch(8)
        loss = PARTITION.loss(policy, PARTITION.arrange(policy, ready))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    policy.eval()
    ready, way = batch(8)
    with torch.no_grad():
        noise = made.noise().expand(8, -1, -1)
        chunk = PARTITION.act(policy, PARTITION.think(policy, ready), _state_only(ready), noise, None)
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:5])
    assert (chunk.mean((1, 2)) * way).mean() > 0, "mostly the way the picture shows"
