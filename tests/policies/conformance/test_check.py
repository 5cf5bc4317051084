"""The flow policy keeps every promise, and the suite notices each one that is broken."""

import itertools

import msgspec
import numpy as np
import pytest
import torch

from policies.common.weights import pack, read_header, unpack
from policies.conformance.check import CHECKS, check_policy, example_batch
from policies.conformance.data import flattened, moved, random_state, seeded
from policies.flow.policy import FlowPolicy
from policies.interface.policy import require_prefix
from wire.types import ActionChunk, Frame, PolicyCapabilities


def broken(policy_type, spec, config):
    return {c.name for c in check_policy(lambda: policy_type(spec, config)) if not c.passed}


@pytest.mark.slow
def test_flow_policies_conform(seeing, seeing_net, blind, blind_net):
    for spec, config in ((seeing, seeing_net), (blind, blind_net)):
        checks = check_policy(lambda spec=spec, config=config: FlowPolicy(spec, config, seed=3))
        assert len(checks) == len(CHECKS) == 30
        assert [f"{c.name}: {c.detail}" for c in checks if not c.passed] == []


class Wide(FlowPolicy):
    def act(self, observation, latent, tick, prefix=None):
        chunk = super().act(observation, latent, tick, prefix)
        return ActionChunk(
            chunk.actions * 100, tick + 1, chunk.step_ns, chunk.version, chunk.observed_ns, chunk.latent_observed_ns
        )


class Peeking(FlowPolicy):
    def act(self, observation, latent, tick, prefix=None):
        fresh = self.think(observation)
        return super().act(observation, fresh, tick, prefix)


class Careless(FlowPolicy):
    def load(self, weights, version):
        self.version = version


class Frozen(FlowPolicy):
    def loss(self, batch):
        return self.module.slow.words.weight.square().mean()


class Failing(FlowPolicy):
    def think(self, observation):
        raise RuntimeError("the camera is upside down")


class Random(FlowPolicy):
    made = itertools.count()

    def __init__(self, *arguments):
        super().__init__(*arguments, seed=next(self.made))


class Forgetful(FlowPolicy):
    def act(self, observation, latent, tick, prefix=None):
        return super().act(observation, latent, tick)


class Copying(FlowPolicy):
    """Puts what is committed in front of a chunk that knows nothing of it."""

    def act(self, observation, latent, tick, prefix=None):
        if prefix is None:
            return super().act(observation, latent, tick)
        require_prefix(self.horizon, self.spec, prefix)
        chunk = super().act(observation, latent, tick)
        actions = np.concatenate([prefix.actions[: prefix.committed], chunk.actions[prefix.committed :]])
        return msgspec.structs.replace(chunk, actions=actions)


class Boastful(FlowPolicy):
    trained = PolicyCapabilities(residual_trained=True)


class Impatient(FlowPolicy):
    def act(self, observation, latent, tick, prefix=None):
        if observation.time_ns - latent.observed_ns > 3 * self.spec.period_ns:
            observation = msgspec.structs.replace(observation, state=-observation.state)
        return super().act(observation, latent, tick, prefix)


class Loud(FlowPolicy):
    def act(self, observation, latent, tick, prefix=None):
        torch.rand(1)
        return super().act(observation, latent, tick, prefix)


class Gambling(FlowPolicy):
    def think(self, observation):
        latent = super().think(observation)
        return msgspec.structs.replace(latent, data=latent.data + np.random.default_rng().normal(0, 0.1))


class Numb(FlowPolicy):
    def act(self, observation, latent, tick, prefix=None):
        numb = msgspec.structs.replace(observation, state=0 * observation.state)
        return super().act(numb, latent, tick, prefix)


class Feeling(FlowPolicy):
    def think(self, observation):
        latent = super().think(observation)
        return msgspec.structs.replace(latent, data=latent.data + observation.state.sum())


class Candid(Feeling):
    think_reads_state = True


class Zeroed(FlowPolicy):
    """Whose last layer begins with zeros, so that at first nothing behind it matters or learns."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        torch.nn.init.zeros_(self.module.fast.head[-1].weight)
        torch.nn.init.zeros_(self.module.fast.head[-1].bias)


class Remembering(FlowPolicy):
    seen = None

    def think(self, observation):
        self.seen = super().think(observation)
        return self.seen

    def act(self, observation, latent, tick, prefix=None):
        if self.seen is not None:
            latent = msgspec.structs.replace(latent, data=self.seen.data)
        return super().act(observation, latent, tick, prefix)


class Unsendable(FlowPolicy):
    def think(self, observation):
        latent = super().think(observation)
        return msgspec.structs.replace(latent, data=latent.data.astype(np.float16))

    def act(self, observation, latent, tick, prefix=None):
        latent = msgspec.structs.replace(latent, data=latent.data.astype(np.float32))
        return super().act(observation, latent, tick, prefix)


class Restless(FlowPolicy):
    def act(self, observation, latent, tick, prefix=None):
        chunk = super().act(observation, latent, tick, prefix)
        self.module.normalizer.mean.add_(0.1)
        return chunk


class Hospitable(FlowPolicy):
    def think(self, observation):
        dark = {camera.name: Frame(900, np.zeros((16, 16, 3), np.uint8)) for camera in self.spec.cameras}
        return super().think(msgspec.structs.replace(observation, images={**dark, **observation.images}))


class Stubborn(FlowPolicy):
    def load(self, weights, version):
        kept = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        super().load(weights, version)
        self.module.load_state_dict(kept)


class Gullible(FlowPolicy):
    def load(self, weights, version):
        own = read_header(self.save())
        super().load(pack(unpack(weights)[1], own), version)


class Chatty(FlowPolicy):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.module.slow.words.weight.requires_grad_(False)


class Thawing(Chatty):
    def loss(self, batch):
        self.module.requires_grad_(True)
        return super().loss(batch)


class Local(FlowPolicy):
    middle = 0.0

    def set_normalization(self, examples):
        super().set_normalization(examples)
        self.middle = examples.states.mean(0)

    def act(self, observation, latent, tick, prefix=None):
        shifted = msgspec.structs.replace(observation, state=observation.state - self.middle)
        return super().act(shifted, latent, tick, prefix)


class Overflowing(FlowPolicy):
    def loss(self, batch):
        return super().loss(batch) * (float("inf") if torch.is_autocast_enabled("cpu") else 1)


class Padded(FlowPolicy):
    def loss(self, batch):
        mask = np.asarray(batch["mask"])
        return super().loss({**batch, "mask": np.ones_like(mask) if mask.any() else mask})


class Crowded(FlowPolicy):
    def loss(self, batch):
        return super().loss({**batch, "state": batch["state"] - 3 * batch["state"].mean(0)})


class Grouping(FlowPolicy):
    def loss(self, batch):
        return super().loss(batch) * batch["state"].ndim


class Trusting(FlowPolicy):
    def loss(self, batch):
        dark = {camera.name: np.zeros((len(batch["state"]), 16, 16, 3), np.uint8) for camera in self.spec.cameras}
        return super().loss({**batch, "images": {**dark, **batch["images"]}})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            Wide,
            {
                "actions are finite and within the spec's limits",
                "a chunk carries its tick, times and version",
                "a chunk begins with what is committed",
            },
        ),
        (Peeking, {"act reads no image", "a latent of another version is refused"}),
        (
            Careless,
            {
                "garbage is refused and the old weights stay",
                "weights of another robot or network are refused",
                "loaded weights take effect",
                "statistics travel with the weights",
            },
        ),
        (Frozen, {"a gradient reaches every trainable tensor", "training data that does not fit is refused"}),
        (
            Random,
            {
                "the same seed gives the same actions",
                "act reads no image",
                "saving and loading changes nothing",
                "the latent's age matters only to a policy trained for delays",
                "think reads no state, or says so",
                "loaded weights take effect",
                "a latent can be sent to another process",
                "act goes by the latent it is given",
                "statistics travel with the weights",
            },
        ),
        (Forgetful, {"a chunk begins with what is committed", "a prefix that does not fit is refused"}),
        (Boastful, {"it says what it was trained for"}),
        (Impatient, {"the latent's age matters only to a policy trained for delays"}),
        (Loud, {"no global random stream is moved"}),
        (
            Gambling,
            {
                "the same seed gives the same actions",
                "think reads no state, or says so",
                "act goes by the latent it is given",
                "loaded weights take effect",
                "saving and loading changes nothing",
                "statistics travel with the weights",
            },
        ),
        (Numb, {"act reads the newest state"}),
        (Feeling, {"think reads no state, or says so"}),
        (Candid, set()),
        (Zeroed, set()),
        (Remembering, {"act goes by the latent it is given"}),
        (Unsendable, {"a latent can be sent to another process"}),
        (Restless, {"acting changes no weights"}),
        (Hospitable, {"an observation that does not fit is refused"}),
        (Stubborn, {"loaded weights take effect", "statistics travel with the weights"}),
        (Gullible, {"weights of another robot or network are refused"}),
        (Chatty, {"what is frozen is not published"}),
        (Thawing, {"what is frozen is not published", "a gradient reaches every trainable tensor"}),
        (Local, {"statistics travel with the weights"}),
        (Overflowing, {"the loss is finite in bfloat16"}),
        (Padded, {"masked actions do not matter"}),
        (Crowded, {"samples of a batch do not see each other"}),
        (Grouping, {"a batch may come flat or grouped"}),
        (Trusting, {"training data that does not fit is refused"}),
    ],
)
@pytest.mark.slow
def test_each_broken_promise_is_noticed(seeing, seeing_net, kind, expected):
    assert broken(kind, seeing, seeing_net) == expected


@pytest.mark.slow
def test_a_policy_that_only_copies_what_is_committed_is_noticed(seeing, seeing_net):
    config = msgspec.structs.replace(seeing_net, max_offset=2, prefix=True)
    assert broken(FlowPolicy, seeing, config) == set()
    assert broken(Copying, seeing, config) == {"the rest of a chunk goes by what is committed"}


def test_an_error_is_reported_with_its_words(seeing, seeing_net):
    checks = check_policy(lambda: Failing(seeing, seeing_net))
    assert any("the camera is upside down" in check.detail for check in checks)


def test_examples_fit_what_a_policy_asks_for(seeing):
    batch = example_batch(seeing, 4, images=3, steps=2, ticks_ahead=(1, 2), history=5)
    assert batch["ahead"].shape == (3, 2, 2, 2)
    assert batch["past_state"].shape == (3, 2, 5, 2)
    assert batch["past_images"]["front"].shape == (3, 5, 16, 16, 3)
    grouped, flat = flattened(batch)
    assert grouped["past_state"].shape == (3, 1, 5, 2)
    assert flat["past_state"].shape == (3, 5, 2)
    assert flat["images"]["front"].shape == (3, 16, 16, 3)
    assert "past_state" not in example_batch(seeing, 4)


def test_a_seeded_stretch_leaves_the_random_streams_where_they_were():
    before = random_state()
    with seeded(1):
        first = torch.rand(1), np.random.rand()
        assert moved(before) == ["torch", "numpy", "random"]
    with seeded(1):
        assert (torch.rand(1), np.random.rand()) == first
    assert moved(before) == []
