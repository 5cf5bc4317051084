import copy
import sys

import msgspec
import pytest
import torch
from torch import nn

from policies.common.weights import (
    Header,
    base_sha256,
    load_into,
    load_published,
    pack_module,
    read_header,
    trainable_state_dict,
    unpack,
)
from policies.interface.trainable import FinetuneConfig, Lora, apply_finetuning, initial_seed
from wire.errors import ConfigError, WeightsError


class Net(nn.Module):
    """A backbone and a head, statistics, two names for one tensor and a part its own constructor freezes."""

    config = "something that peft must not read"

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.backbone = nn.ModuleDict(
                {"q_proj": nn.Linear(6, 6), "v_proj": nn.Linear(6, 6), "mlp": nn.Linear(6, 6)}
            )
            self.head = nn.Linear(6, 2)
            self.tied = nn.Linear(6, 6, bias=False)
            self.tied.weight = self.backbone["mlp"].weight
            self.odd = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        b = self.backbone
        return self.head(b["mlp"](b["q_proj"](x - self.mean) * b["v_proj"](x)).tanh() + self.tied(x))


LORA = FinetuneConfig(lora=Lora(rank=2, targets=("*_proj",)))


@pytest.fixture
def header(blind):
    return Header(network="test", config={}, spec=blind, spec_hash=blind.hash)


def make(training, seed=0, targets=()):
    net = Net()
    apply_finetuning(net, training, targets, seed)
    return net


def learn(net, steps=2):
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
    net.mean += 1
    return net


def trained(net):
    return sorted(n for n, p in net.named_parameters() if p.requires_grad)


def test_by_default_everything_but_what_the_network_froze_itself_is_trained():
    net = make(FinetuneConfig())
    assert "odd" not in trained(net) and "backbone.mlp.weight" in trained(net)
    assert "odd" not in trainable_state_dict(net) and "mean" in trainable_state_dict(net)
    everything = make(FinetuneConfig(train=("*", "odd")))
    assert "odd" in trained(everything)
    assert base_sha256(everything) == "" and len(base_sha256(net)) == 64


def test_everything_is_published_once_when_nothing_is_frozen_or_prepared():
    for net in (Net(), make(FinetuneConfig(train=("*", "odd")))):
        assert set(trainable_state_dict(net)) == set(net.state_dict()) - {"tied.weight"}
        assert trainable_state_dict(net)["head.weight"] is net.head.weight


def test_patterns_choose_what_is_trained_and_what_of_it_is_not():
    net = make(FinetuneConfig(train=("head.*", "backbone.q_proj.*"), freeze=("*.bias",)))
    assert trained(net) == ["backbone.q_proj.weight", "head.weight"]
    assert set(trainable_state_dict(net)) == {"backbone.q_proj.weight", "head.weight", "mean"}


@pytest.mark.parametrize(
    ("training", "says"),
    [
        (FinetuneConfig(train=("haed.*",)), r"train 'haed\.\*' matches none of 9 names; near ones: .*head"),
        (FinetuneConfig(freeze=("zzzz",)), "freeze 'zzzz' matches none"),
        (
            FinetuneConfig(lora=Lora(targets=("*qproj",))),
            r"lora target '\*qproj' matches none of 5.*near ones: .*q_proj",
        ),
        (FinetuneConfig(train=("head.*",), freeze=("head.*",)), "leave nothing to train"),
    ],
)
def test_a_pattern_that_matches_nothing_is_named_with_what_is_near(training, says):
    with pytest.raises(ConfigError, match=says):
        make(training)


def test_numbers_that_no_adapter_can_have_are_refused():
    for wrong in ({"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}):
        with pytest.raises(ConfigError, match="lora"):
            Lora(**wrong)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"lora": {"rnk": 4}}, FinetuneConfig)


def test_adapters_alone_are_trained_and_change_nothing_at_first():
    net, x = make(LORA), torch.randn(3, 6)
    expected = [f"backbone.{p}_proj.lora_{ab}.default.weight" for p in "qv" for ab in "AB"]
    assert sorted(trained(net)) == sorted(expected)
    assert set(trainable_state_dict(net)) == {*expected, "mean"}
    assert torch.equal(net(x), Net()(x))
    assert net.config == "something that peft must not read" and not hasattr(net, "peft_config")


def test_adapters_and_what_train_names():
    lora = Lora(rank=2, targets=("backbone.q_proj",))
    net = make(FinetuneConfig(train=("head.*",), lora=lora))
    assert trained(net) == [f"backbone.q_proj.lora_{ab}.default.weight" for ab in "AB"] + ["head.bias", "head.weight"]
    # a Linear that has adapters may itself be named, by the name it had
    net = make(FinetuneConfig(train=("backbone.q_proj.weight",), lora=lora))
    assert "backbone.q_proj.base_layer.weight" in trained(net)


def test_the_policys_own_targets_and_else_every_linear():
    assert {n.split(".")[1] for n in trained(make(FinetuneConfig(lora=Lora()), targets=("*v_proj",)))} == {"v_proj"}
    assert len(trained(make(FinetuneConfig(lora=Lora())))) == 2 * 5


def test_adapters_are_drawn_under_the_seed_and_no_random_stream_moves():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    nets = [make(LORA, seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    a = [trainable_state_dict(net)["backbone.q_proj.lora_A.default.weight"] for net in nets]
    assert torch.equal(a[0], a[1]) and not torch.equal(a[0], a[2])


def test_a_network_with_adapters_takes_no_others():
    with pytest.raises(ConfigError, match="has adapters already"):
        apply_finetuning(make(LORA), LORA)


def test_without_peft_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"vla-fleet\[vlm\]"):
        make(LORA)


def test_a_deepcopy_publishes_the_same_whatever_its_gradients():
    net = make(LORA)
    twin = copy.deepcopy(net).requires_grad_(False)
    assert trainable_state_dict(twin).keys() == trainable_state_dict(net).keys()
    assert base_sha256(twin) == base_sha256(net)
    learn(net)
    assert not torch.equal(net.backbone.q_proj.lora_B.default.weight, twin.backbone.q_proj.lora_B.default.weight)


def test_the_base_is_hashed_once_and_again_when_it_changes(monkeypatch):
    import hashlib

    calls = []
    real = hashlib.sha256
    monkeypatch.setattr("policies.common.weights.hashlib.sha256", lambda: calls.append(1) or real())
    net = make(LORA)
    first = base_sha256(net)
    assert base_sha256(learn(net)) == first and len(calls) == 1
    with torch.no_grad():
        net.head.weight[0, 0] += 1
    assert base_sha256(net) != first and len(calls) == 2


@pytest.mark.parametrize(
    "training", [FinetuneConfig(train=("*", "odd")), FinetuneConfig(), LORA, FinetuneConfig(train=("head.*",))]
)
def test_what_was_trained_travels_and_the_base_stays(training, header):
    net, x = learn(make(training)), torch.randn(3, 6)
    data = pack_module(net, header)
    other = make(training, seed=9)
    assert not torch.equal(other(x), net(x))
    got, tensors = unpack(data)
    assert got.base == base_sha256(net)
    load_published(other, got, tensors)
    assert torch.equal(other(x), net(x))
    assert pack_module(other, header) == data


def test_a_file_of_adapters_is_small(header):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(512, 512)

    wide = Wide()
    apply_finetuning(wide, FinetuneConfig(lora=Lora(rank=4)))
    assert len(pack_module(wide, header)) < 512 * 4 * 2 * 4 + 4000 < 512 * 512 * 4 / 10


def test_another_base_is_refused_with_both_hashes_and_the_way_out(header):
    net = learn(make(LORA))
    file = unpack(pack_module(net, header))
    other = Net(seed=3)
    apply_finetuning(other, LORA)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(WeightsError, match=r"same --policy and --policy-config.*`training`.*same files") as error:
        load_published(other, *file, "weights of version 3")
    for part in ("weights of version 3", base_sha256(net)[:12], base_sha256(other)[:12]):
        assert part in str(error.value)
    assert all(torch.equal(t, before[n]) for n, t in other.state_dict().items())


def test_adapters_of_another_scale_are_refused_although_all_their_tensors_fit(header):
    def scaled(rank, alpha, train=()):
        return make(FinetuneConfig(train=train, lora=Lora(rank, alpha, ("*_proj",))), seed=0)

    net = learn(scaled(2, 16.0))
    file = unpack(pack_module(net, header))
    other = scaled(2, 64.0)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(WeightsError, match=r"another alpha / rank.*`training` options"):
        load_published(other, *file)
    assert all(torch.equal(t, before[n]) for n, t in other.state_dict().items())
    with pytest.raises(WeightsError, match=r"lora_A.*`training` options"):
        load_published(scaled(4, 32.0), *file)  # the same factor, more rows
    # where nothing is frozen beside the adapters, too
    whole = [scaled(2, alpha, ("?*",)) for alpha in (16.0, 64.0)]
    assert all(parameter.requires_grad for parameter in whole[0].parameters())
    with pytest.raises(WeightsError, match="another alpha / rank"):
        load_published(whole[1], *unpack(pack_module(whole[0], header)))


def test_a_scale_that_is_changed_later_is_hashed_again():
    net = make(LORA)
    first = base_sha256(net)
    net.backbone.q_proj.scaling["default"] *= 2
    assert base_sha256(net) != first
    net.backbone.q_proj.scaling["default"] /= 2
    assert base_sha256(net) == first


def test_a_base_without_adapters_has_the_hash_it_always_had():
    """Recorded when only tensors were hashed: files from then are still read."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    net[0].scaling = 0.5  # as attention has one
    apply_finetuning(net, FinetuneConfig(train=("1.*",)))
    assert base_sha256(net) == "dd3333323c270ba8e6f75d3fa18c8fd103249f1c0cd214ff80f6632163fee4a1"


def test_only_where_something_is_frozen_the_first_weights_do_not_depend_on_the_seed():
    assert [initial_seed(FinetuneConfig(), seed) for seed in (0, 7)] == [0, 7]
    assert initial_seed(FinetuneConfig(train=("*", "slow.backbone.*")), 7) == 7
    for training in (LORA, FinetuneConfig(train=("head.*",)), FinetuneConfig(freeze=("head.*",))):
        assert initial_seed(training, 7) == initial_seed(training, 0)


def test_part_and_whole_are_not_mistaken_for_each_other(header):
    part, whole = make(LORA), make(FinetuneConfig(train=("*", "odd")))
    with pytest.raises(WeightsError, match="nothing is frozen in this policy"):
        load_published(whole, *unpack(pack_module(part, header)))
    with pytest.raises(WeightsError, match="it has every tensor"):
        load_published(part, *unpack(pack_module(whole, header)))


def test_all_or_nothing(header):
    net = make(LORA)
    got, tensors = unpack(pack_module(learn(make(LORA)), header))
    before = copy.deepcopy(net.state_dict())
    tensors["backbone.v_proj.lora_B.default.weight"] = torch.zeros(6, 3)
    tensors["more"] = tensors.pop("mean")
    with pytest.raises(WeightsError) as error:
        load_published(net, got, tensors)
    for part in ("missing 'mean'", "not expected 'more'", "lora_B"):
        assert part in str(error.value)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())


def test_a_file_from_before_there_was_a_base(header):
    net = nn.Linear(2, 2)
    data = pack_module(net, header)
    old = data.replace(b',\\"base\\":\\"\\"', b" " * len(b',\\"base\\":\\"\\"'))
    assert old != data and read_header(old) == header
    twin = nn.Linear(2, 2)
    load_into(twin, unpack(old)[1])
    assert torch.equal(twin.weight, net.weight)
    load_published(twin, *unpack(old))
