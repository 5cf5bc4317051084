"""The trainer with a policy that can act already: published as it is, then learning from corrections alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.training import checkpoint
from fleet.config.recipes import fake
from fleet.launch import factories
from policies.common.weights import unpack
from wire.errors import ConfigError, InvalidDataError


class Pretrained:
    """A policy with whatever the recipe's own gives, but which says that it can act."""

    def __init__(self, policy):
        self._policy = policy
        self.fitted = 0

    pretrained = True

    def set_normalization(self, examples):
        self.fitted += 1

    def __getattr__(self, name):
        return getattr(self._policy, name)


def recipe():
    plain = fake()
    return replace(
        plain,
        make_policy=lambda spec, seed: Pretrained(plain.make_policy(spec, seed)),
        demonstrations=0,
        checkpoint_every_s=0.0,
        algorithm=replace(plain.algorithm, publish_every_s=0.1, batch=8),
    )


@pytest.fixture
def fleet(tmp_path):
    rehearsal = InProcessFleet(tmp_path, recipe())
    yield rehearsal
    rehearsal.close()


def test_its_first_version_is_its_own_weights_and_needs_no_data(fleet):
    first = fleet.trainer.learner.policy.save()
    assert fleet.trainer.phase == "online"
    for _ in range(4):
        assert not fleet.trainer.step()
        fleet.gateway.poll()
    version = fleet.ledger.newest_version().version
    assert (version.number, version.parent, version.gradient_steps) == (1, 0, 0)
    assert (fleet.data.weights / fleet.ledger.newest_version().path).read_bytes() == first
    for _ in range(20):
        fleet.turn(1, 0)
        fleet.clock.advance(10**9)
        fleet.trainer.step()
    assert fleet.ledger.newest_version().version.number == 1, "the same weights are not published again"


def test_it_goes_on_with_what_there_was_when_the_cache_is_too_small_for_more(fleet, monkeypatch, caplog):
    source = fleet.trainer._source
    tries = []

    def refresh(limit):
        tries.append(limit)
        raise ConfigError("Set cache_bytes to at least 7.")

    monkeypatch.setattr(source, "refresh", refresh)
    fleet.clock.advance(10**10)
    with pytest.raises(ConfigError, match="at least 7"):
        fleet.trainer.step()
    monkeypatch.setattr(type(source), "eligible_steps", property(lambda self: 100))
    monkeypatch.setattr(source, "next", lambda: (_ for _ in ()).throw(InvalidDataError("nothing to draw")))
    fleet.clock.advance(10**10)
    fleet.trainer.step()
    assert len(tries) == 2
    said = [record.getMessage() for record in caplog.records if "cache_bytes" in record.getMessage()]
    assert said == ["learning goes on without the newest segments: Set cache_bytes to at least 7."]
    assert "nothing to draw" in caplog.text, "a batch was asked for"


@pytest.mark.slow
def test_it_learns_from_the_first_correction_on(fleet):
    fleet.turn(400, 0.05)
    newest = fleet.ledger.newest_version().version
    assert newest.number >= 2 and newest.gradient_steps > 0 and newest.human_steps > 0
    assert newest.parent == newest.number - 1
    policy = fleet.trainer.learner.policy
    assert policy.fitted == 0
    first = unpack((fleet.data.weights / fleet.ledger.version(1).path).read_bytes())[1]
    last = unpack((fleet.data.weights / fleet.ledger.newest_version().path).read_bytes())[1]
    assert any(not first[name].equal(tensor) for name, tensor in last.items())
    # far from `pretrain_steps`, which are for those that know nothing
    assert fleet.ledger.version(2).version.gradient_steps < fleet.recipe.algorithm.pretrain_steps


def again(fleet):
    line = fleet.server.connect("trainer")
    return factories.make_trainer(fleet.recipe, "trainer", fleet.data, line, 0, clock=fleet.clock)


def test_stopped_before_its_first_checkpoint_it_goes_on_from_its_first_version(fleet):
    for _ in range(4):
        fleet.trainer.step()
        fleet.gateway.poll()
    for path in fleet.data.checkpoints.glob("*"):
        path.unlink()
    second = again(fleet)
    for _ in range(4):
        second.step()
        fleet.gateway.poll()
    assert fleet.ledger.newest_version().version.number == 1
    second.close()


def test_killed_before_its_first_version_was_stored_it_publishes_it_again(fleet):
    fleet.trainer.save()
    assert checkpoint.load_newest(fleet.data.checkpoints).meta["version"] == 0
    second = again(fleet)
    for _ in range(4):
        second.step()
        fleet.gateway.poll()
    assert fleet.ledger.newest_version().version.gradient_steps == 0
    second.close()


@pytest.mark.slow
def test_it_resumes_where_it_was(fleet):
    fleet.turn(250, 0.03)
    fleet.trainer.save()
    second = again(fleet)
    assert second.phase == "online"
    assert second.learner.gradient_steps == fleet.trainer.learner.gradient_steps > 0
    assert second.learner.weights() == fleet.trainer.learner.weights()
    second.close()


def test_random_weights_still_wait_for_demonstrations(tmp_path):
    plain = fake()
    rehearsal = InProcessFleet(tmp_path, replace(plain, demonstrations=0))
    try:
        assert rehearsal.trainer.phase == "waiting"
    finally:
        rehearsal.close()
