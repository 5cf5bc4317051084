"""The flow policy keeps every promise, and the suite notices each one that is broken."""

import itertools

import msgspec
import pytest

from policies.conformance import check_policy
from policies.flow import FlowPolicy
from wire.types import ActionChunk, Trained


def broken(policy_type, spec, config):
    return {c.name for c in check_policy(lambda: policy_type(spec, config)) if not c.passed}


def test_flow_policies_conform(seeing, seeing_net, blind, blind_net):
    for spec, config in ((seeing, seeing_net), (blind, blind_net)):
        checks = check_policy(lambda spec=spec, config=config: FlowPolicy(spec, config, seed=3))
        assert len(checks) == 13
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


class Boastful(FlowPolicy):
    trained = Trained(residual_trained=True)


class Impatient(FlowPolicy):
    def act(self, observation, latent, tick, prefix=None):
        if observation.time_ns - latent.observed_ns > 3 * self.spec.period_ns:
            observation = msgspec.structs.replace(observation, state=-observation.state)
        return super().act(observation, latent, tick, prefix)


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
        (Careless, {"garbage is refused and the old weights stay"}),
        (Frozen, {"a gradient reaches every trainable tensor"}),
        (
            Random,
            {
                "the same seed gives the same actions",
                "act reads no image",
                "saving and loading changes nothing",
                "the latent's age matters only to a policy trained for delays",
            },
        ),
        (Forgetful, {"a chunk begins with what is committed", "a prefix that does not fit is refused"}),
        (Boastful, {"it says what it was trained for"}),
        (Impatient, {"the latent's age matters only to a policy trained for delays"}),
    ],
)
def test_each_broken_promise_is_noticed(seeing, seeing_net, kind, expected):
    assert broken(kind, seeing, seeing_net) == expected


def test_an_error_is_reported_with_its_words(seeing, seeing_net):
    checks = check_policy(lambda: Failing(seeing, seeing_net))
    assert any("the camera is upside down" in check.detail for check in checks)
