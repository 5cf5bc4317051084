"""Datasets of several robots in turn."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest

from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.loading.mixture import DatasetMixture
from tests.cloud_learner.buffer.loading.memory_buffer import SHAPES, record, shape_buffers
from tests.cloud_learner.buffer.loading.test_dataset import config, copied, same
from wire.errors import ConfigError, InvalidDataError

SHARES = {"arm": 0.5, "base": 0.2, "hand": 0.3}


def mixture(buffers):
    datasets = {name: ReplayDataset(b, b, b.robot, config(batch=4, seed=3)) for name, b in buffers.items()}
    return DatasetMixture(datasets, SHARES)


@pytest.fixture
def buffers():
    return shape_buffers()


def test_each_robot_gets_its_share_of_the_batches_and_its_own_shapes(buffers):
    mixed = mixture(buffers)
    with pytest.raises(
        InvalidDataError,
        match=r"learn from yet\. arm: no segment .* base: no segment .* hand: no segment",
    ):
        mixed.next()
    assert mixed.refresh() == 4
    names = Counter(mixed.next()[0] for _ in range(70))
    assert names == {"arm": 50, "base": 20}, "who has no data leaves its share to the others"
    assert mixed.shares == pytest.approx({"arm": 5 / 7, "base": 2 / 7, "hand": 0.0})
    buffers["hand"].add(*record(buffers["hand"].robot, "hand-e", [20], 9))
    mixed.refresh()
    names = Counter()
    for _ in range(100):
        name, batch = mixed.next()
        names[name] += 1
        assert {c: i.shape[1:3] for c, i in batch["images"].items()} == {
            camera.name: (camera.height, camera.width) for camera in SHAPES[name].cameras
        }
    assert all(abs(names[name] - 100 * share) <= 1 for name, share in SHARES.items())
    assert mixed.shares == pytest.approx(SHARES)


def test_a_mixture_goes_on_where_it_stopped(buffers):
    first = mixture(buffers)
    first.refresh()
    for _ in range(7):
        first.next()
    state = msgspec.json.decode(msgspec.json.encode(first.state()))
    expect = [(name, copied(batch)) for name, batch in (first.next() for _ in range(10))]
    second = mixture(buffers)
    assert second.restore(state)
    for name, batch in expect:
        again, other = second.next()
        assert again == name
        assert same(batch, copied(other))
    with pytest.raises(InvalidDataError, match="the state is of"):
        mixture({"arm": buffers["arm"]} | {"base": buffers["base"], "hand": buffers["hand"]}).restore({"datasets": {}})


def test_shares_that_cannot_be_are_refused(buffers):
    dataset = ReplayDataset(buffers["arm"], buffers["arm"], SHAPES["arm"], config())
    for datasets, shares in (({}, {}), ({"arm": dataset}, {"base": 1.0}), ({"arm": dataset}, {"arm": math.nan})):
        with pytest.raises(ConfigError, match="mixture: shares"):
            DatasetMixture(datasets, shares)
