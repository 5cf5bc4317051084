"""Two ranks on gloo are one rank with the same batches together: noise, losses, weights, averages and checkpoints."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.training.checkpoints import checkpoint
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.learner import Learner
from cloud_learner.training.ranks.group import ALONE, ProcessRanks
from policies.common.batches import count_kept
from policies.common.weights import pack_module, trainable_state_dict, unpack
from policies.flow.config import FlowConfig
from policies.flow.policy import FlowPolicy
from tests.cloud_learner.training.checkpoints.test_checkpoint import SPEC
from wire.errors import InvalidDataError

TRAINING = TrainingConfig(batch=12, learning_rate=1e-2, gradient_clip=0.5, ema_decay=0.9)
STEPS = 40


class Line:
    """A policy whose loss draws all that a policy may draw, and is a mean over some of the batch."""

    def __init__(self):
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.module[0].bias.requires_grad_(False)
        self._flow = FlowPolicy(SPEC, FlowConfig(state_dim=1, action_dim=1, horizon=2, width=8, layers=2), 0)

    def loss(self, batch):
        x = torch.from_numpy(batch["state"])
        noise = 0.1 * torch.randn_like(x) + 0.1 * torch.rand(*x.shape) + 0.01 * torch.randint(0, 9, x.shape)
        noise = noise + 0.1 * torch.empty_like(x).exponential_() + torch.normal(0.0, 0.1, size=x.shape)
        guess = self.module(functional.dropout(x + noise, 0.1))
        # one for the whole batch
        scale = 1 + 0.1 * torch.rand(())
        # ranks have unevenly many of those that count
        kept = x[:, :1] > 0.3
        return scale * ((guess - x.sum(1, keepdim=True)) ** 2 * kept).sum() / count_kept(kept.sum())

    def save(self, module=None):
        return pack_module(self.module if module is None else module, self._flow._header)


class Dealt:
    """The same global batches for any number of ranks, each of which has its part; `bad`: a batch of the last rank."""

    def __init__(self, rank, world, first=0, bad=-1):
        self.rank, self.world, self.number, self.bad = rank, world, first, bad
        self.seen = []

    def next(self):
        whole = np.random.default_rng(self.number).standard_normal((12, 3)).astype(np.float32)
        mine = np.array_split(whole, self.world)[self.rank]
        if self.number == self.bad and self.rank == self.world - 1:
            mine = mine * np.float32("nan")
        self.number += 1
        self.seen.append(mine)
        return {"state": mine}


def make(group=ALONE):
    torch.set_num_threads(1)
    return Learner(Line(), HGDagger(), TRAINING, 0, group)


def run(learner, source, count):
    return [learner.step(source)["loss"] for _ in range(count)]


def start(work, world, where):
    """`work(group, where)` on each rank of a world of its own."""
    mp.spawn(_rank, args=(work, world, str(where)), nprocs=world)
    return torch.load(f"{where}/out.pt", weights_only=True)


def _rank(rank, work, world, where):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{where}/meeting-{world}-{work.__name__}", rank=rank, world_size=world
    )
    found = work(ProcessRanks("cpu"), where)
    if rank == 0:
        torch.save(found, f"{where}/out.pt")
    dist.barrier()
    dist.destroy_process_group()


def trains(group, where):
    learner, source = make(group), Dealt(group.rank, group.world)
    losses = run(learner, source, STEPS)
    checkpoint.save(f_path(where), learner.state(), {"version": 3}, {"rank": group.rank}, group=group)
    weights = unpack(learner.weights())[1]
    sharded = [one for one in learner.state().tensors.values() if isinstance(one, DTensor)]
    seen = sum(float(np.abs(one).sum()) for one in source.seen)
    return {
        "losses": losses,
        "weights": weights,
        "seen": group.mean(seen) * group.world,
        "more": run(learner, source, 4),
        "numbers": sum(one.numel() for one in sharded),
        "here": sum(one.to_local().numel() for one in sharded),
    }


def resumes(group, where):
    learner = make(group)
    found = checkpoint.load_newest(f_path(where), learner.empty_shards, group.rank)
    assert found.meta == {"version": 3}
    learner.restore(found.state)
    more = run(learner, Dealt(group.rank, group.world, STEPS), 4)
    return {"more": more, "weights": unpack(learner.weights())[1], "sampling": found.sampling["rank"]}


def refuses(group, where):
    learner, source = make(group), Dealt(group.rank, group.world, bad=2)
    run(learner, source, 2)
    before = unpack(learner.weights())[1]
    with pytest.raises(InvalidDataError, match="the loss is nan"):
        learner.step(source)
    same = all(torch.equal(one, before[name]) for name, one in unpack(learner.weights())[1].items())
    return {"same": same, "more": run(learner, source, 3), "steps": learner.gradient_steps}


def f_path(where):
    from pathlib import Path

    return Path(where) / "checkpoints"


def alone(first=0, count=STEPS):
    learner, source = make(), Dealt(0, 1)
    return learner, source, run(learner, source, count)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    where = tmp_path_factory.mktemp("ranks")
    return where, start(trains, 2, where)


def test_two_ranks_are_one_with_the_batches_of_both(two):
    learner, source, losses = alone()
    _, found = two
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) / 2
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["seen"] == pytest.approx(sum(float(np.abs(one).sum()) for one in source.seen), rel=1e-5)
    mine = unpack(learner.weights())[1]
    assert found["weights"].keys() == mine.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-4, atol=1e-6)


def test_each_rank_has_its_part_of_weights_averages_and_moments(two):
    _, found = two
    # 5 x 3, 1 x 5 and 1 numbers, the first bias being frozen; of rows the first rank has three, and one
    assert (found["numbers"], found["here"]) == (4 * (15 + 5 + 1), 4 * (9 + 5 + 1))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_two_ranks_saved_any_number_goes_on_with(two, world, tmp_path):
    where, found = two
    if world == 1:
        learner = make()
        read = checkpoint.load_newest(where / "checkpoints")
        assert read.sampling == {"rank": 0}
        learner.restore(read.state)
        assert run(learner, Dealt(0, 1, STEPS), 4) == pytest.approx(found["more"], rel=1e-5)
        return
    (tmp_path / "checkpoints").symlink_to(where / "checkpoints", target_is_directory=True)
    again = start(resumes, world, tmp_path)
    # the same number of ranks goes on bit for bit
    assert again["more"] == (found["more"] if world == 2 else pytest.approx(found["more"], rel=1e-5))


def test_a_loss_that_is_not_finite_on_one_rank_is_no_ranks_step(tmp_path):
    found = start(refuses, 2, tmp_path)
    assert found["same"] and found["steps"] == 5 and np.isfinite(found["more"]).all()


def test_a_network_alone_is_not_touched():
    learner = make()
    names = trainable_state_dict(learner.policy.module)
    assert {type(one) for one in names.values()} == {nn.Parameter}
