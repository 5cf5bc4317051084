"""Robots of several shapes in one run: who takes part, whose turn it is, and that it goes on where it stopped."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.embodiment_mix import EmbodimentMix, MixMember
from tests.cloud_learner.buffer.loading.memory_buffer import SHAPES, record, shape_buffers
from tests.cloud_learner.buffer.loading.test_dataset import config, copied, same
from wire.errors import InvalidDataError


class Waits:
    """As a `DemonstrationCount`."""

    complete = False


def mixed(buffers, names=tuple(SHAPES), waits=None, **options):
    members = {}
    for name in names:
        buffer = buffers[name]
        dataset = ReplayDataset(buffer, buffer, buffer.robot, config(batch=4, seed=3))
        members[name] = MixMember(buffer.robot, dataset, 1.0, (waits or {}).get(name))
    return EmbodimentMix(members, **options)


@pytest.fixture
def buffers():
    return shape_buffers()


def joined(mix):
    return [examples.spec for examples in iter(mix.pop_newcomer, None)]


def apart(batch):
    return batch["spec_hash"], copied({name: value for name, value in batch.items() if name != "spec_hash"})


def test_who_has_data_and_demonstrations_takes_part(buffers):
    waits = {"base": Waits()}
    mix = mixed(buffers, waits=waits)
    mix.refresh()
    assert mix.eligible_steps == 0, "nobody has joined"
    examples = mix.pop_newcomer()
    assert examples.spec == SHAPES["arm"] and examples.states.shape[1] == SHAPES["arm"].state_dim
    assert mix.pop_newcomer() is None
    assert (mix.joined, mix.batches_per_update) == (["arm"], 1)
    assert mix.eligible_steps == mix.datasets["arm"].eligible_steps > 0
    assert {mix.next()["spec_hash"] for _ in range(3)} == {SHAPES["arm"].hash}
    waits["base"].complete = True
    buffers["hand"].add(*record(buffers["hand"].robot, "hand-e", [20], 9))
    mix.refresh()
    assert joined(mix) == [SHAPES["base"], SHAPES["hand"]]
    assert mix.batches_per_update == 3
    turns = Counter(mix.next()["spec_hash"] for _ in range(30))
    assert set(turns.values()) == {10}
    batches = [mix.next() for _ in range(3)]
    assert {one["spec_hash"] for one in batches} == {spec.hash for spec in SHAPES.values()}, "one of each in an update"


def test_who_joined_is_said_to_have_learned_after_so_many_batches(buffers):
    told = []
    mix = mixed(buffers, learn_batches=2, on_learned=told.append)
    mix.refresh()
    joined(mix)
    mix.next(), mix.next()
    assert told == []
    mix.next(), mix.next()
    assert sorted(told) == sorted([SHAPES["arm"].hash, SHAPES["base"].hash])
    mix.next()
    assert len(told) == 2


def test_who_has_had_as_many_is_told_of_after_the_number_was_lowered(buffers):
    first, told = mixed(buffers, ("arm",), learn_batches=9), []
    first.refresh()
    joined(first)
    for _ in range(5):
        first.next()
    second = mixed(buffers, ("arm",), learn_batches=3, on_learned=told.append)
    second.restore(first.state())
    second.next(), second.next()
    assert told == [SHAPES["arm"].hash]


def test_who_joined_since_joins_again_when_the_network_goes_back(buffers, caplog):
    told, waits = [], {"base": Waits()}
    mix = mixed(buffers, ("arm", "base"), waits, learn_batches=2, on_learned=told.append)
    mix.refresh()
    joined(mix)
    mix.next()
    state = msgspec.json.decode(msgspec.json.encode(mix.state()))
    waits["base"].complete = True
    assert joined(mix) == [SHAPES["base"]]
    for _ in range(4):
        mix.next()
    assert sorted(told) == sorted([SHAPES["arm"].hash, SHAPES["base"].hash])
    told.clear()
    mix.go_back(state)
    assert mix.joined == ["arm"]
    assert {mix.next()["spec_hash"] for _ in range(3)} == {SHAPES["arm"].hash}
    assert told == [SHAPES["arm"].hash], "the network may have forgotten it"
    assert joined(mix) == [SHAPES["base"]]
    mix.next(), mix.next()
    assert len(told) == 1, "it begins anew"
    mix.next(), mix.next()
    assert told[1:] == [SHAPES["base"].hash]
    mix.go_back({})
    assert mix.joined == [] and "all robots join again" in caplog.text
    assert joined(mix) == [SHAPES["arm"], SHAPES["base"]]


def test_figures_are_of_all_together(buffers):
    mix = mixed(buffers)
    assert mix.refresh() == 2
    joined(mix)
    batches = [mix.next() for _ in range(4)]
    assert mix.stats.batches == 4 and mix.stats.newest_row == mix.newest_row == 2
    assert mix.drawn_episodes() == {1}, "each buffer numbers its own"
    assert not mix.drawn_episodes()
    assert not mix.ahead_of_data and mix.echo == 1.0
    for batch in batches:
        mix.note_losses(batch, np.ones(4, np.float32))
    assert list(mix.config.tasks) == list(mix.datasets["arm"].config.tasks)


def test_it_goes_on_where_it_stopped(buffers):
    first = mixed(buffers, ("arm", "base"))
    first.refresh()
    joined(first)
    for _ in range(5):
        first.next()
    state = msgspec.json.decode(msgspec.json.encode(first.state()))
    expect = [apart(first.next()) for _ in range(8)]
    second = mixed(buffers, ("arm", "base"))
    assert second.restore(state)
    assert joined(second) == []
    for spec_hash, batch in expect:
        again_hash, again = apart(second.next())
        assert again_hash == spec_hash and same(batch, again)


def test_a_member_may_be_added_to_a_run_and_none_taken_away(buffers):
    first = mixed(buffers, ("arm", "base"))
    first.refresh()
    joined(first)
    first.next()
    state = first.state()
    buffers["hand"].add(*record(buffers["hand"].robot, "hand-e", [20], 9))
    more = mixed(buffers)
    assert more.restore(state)
    more.refresh()
    assert joined(more) == [SHAPES["hand"]]
    assert {more.next()["spec_hash"] for _ in range(6)} == {spec.hash for spec in SHAPES.values()}
    with pytest.raises(InvalidDataError, match=r"also of \['base'\]; there are \['arm'\]"):
        mixed(buffers, ("arm",)).restore(state)
    with pytest.raises(InvalidDataError, match="cannot be read"):
        mixed(buffers).restore({})
