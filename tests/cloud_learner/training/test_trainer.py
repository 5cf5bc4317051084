"""The trainer with a policy that can act already: published as it is, then learning from corrections alone."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.buffer.sampling.segment_index import on_side
from cloud_learner.training.checkpoints import checkpoint
from fleet.config.recipes import fake
from fleet.launch import learning
from policies.common.weights import unpack
from wire.errors import ConfigError, InvalidDataError, StorageError


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
        min_corrected_steps=0,
        checkpoint_every_s=0.0,
        training=replace(plain.training, publish_every_s=0.1, batch=8),
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


def test_without_a_step_since_the_last_checkpoint_there_is_nothing_to_save(fleet):
    for _ in range(4):
        fleet.trainer.step()
        fleet.gateway.poll()
        fleet.clock.advance(10**9)
    kept = sorted(fleet.data.checkpoints.iterdir())
    assert kept and fleet.trainer._checkpoints.there
    for _ in range(4):
        fleet.trainer.step()
        fleet.clock.advance(10**9)
    fleet.trainer.save()
    assert sorted(fleet.data.checkpoints.iterdir()) == kept


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


def test_it_asks_for_pictures_that_are_held_back(fleet, monkeypatch):
    monkeypatch.setattr(fleet.trainer._source, "pop_wanted_pictures", lambda: ("e1/0", "e1/1"))
    monkeypatch.setattr(fleet.ledger, "ask_pictures", lambda segments: asked.append(segments))
    asked = []
    for _ in range(3):
        fleet.trainer.step()
        fleet.clock.advance(10**9)
        fleet.gateway.poll()
    assert asked and set(asked) == {("e1/0", "e1/1")}


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
    assert fleet.ledger.version(2).version.gradient_steps < fleet.recipe.training.pretrain_steps


def again(fleet):
    line = fleet.server.connect("trainer")
    return learning.make_trainer(fleet.recipe, "trainer", fleet.data, line, 0, clock=fleet.clock)


def test_stopped_before_its_first_checkpoint_it_goes_on_from_its_first_version(fleet):
    for _ in range(4):
        fleet.trainer.step()
        fleet.gateway.poll()
    for path in fleet.data.checkpoints.glob("*"):
        shutil.rmtree(path)
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


@pytest.mark.slow
def test_online_it_draws_no_more_than_robots_bring_and_pretraining_does_not_count(tmp_path):
    plain = fake()
    training = replace(plain.training, pretrain_steps=60, publish_every_s=0.1)
    limited = replace(plain, samples_per_insert=1.0, training=training)
    fleet = InProcessFleet(tmp_path, limited)
    try:
        drawn_per_step = training.batch * training.ticks_per_frame
        while fleet.trainer.phase != "online":
            fleet.turn(1, 1.0)
        before = fleet.trainer.learner.gradient_steps, fleet.ledger.totals().steps
        # more was drawn by now than is recorded
        assert before[0] * drawn_per_step > 1.5 * before[1]
        for restarted in (False, True):
            if restarted:
                fleet.trainer.save()
                fleet.trainer.close()
                fleet.trainer = again(fleet)
            began = fleet.trainer.learner.gradient_steps
            for _ in range(200):
                fleet.turn(1, 1.0)
                drawn = (fleet.trainer.learner.gradient_steps - before[0]) * drawn_per_step
                # the batch that reaches the limit may pass it
                assert drawn < fleet.ledger.totals().steps - before[1] + drawn_per_step
            assert fleet.trainer.learner.gradient_steps > began
    finally:
        fleet.close()


def test_a_ledger_and_a_store_that_are_away_are_said_once_and_batches_go_on(fleet, monkeypatch, caplog):
    fleet.demonstrate(1)
    trainer, source = fleet.trainer, fleet.trainer._source
    for _ in range(3):
        fleet.clock.advance(10**9)
        trainer.step()
    asked = []

    def away(what):
        asked.append(what)
        raise StorageError(f"the {what} is away.")

    def steps():
        before = trainer.learner.gradient_steps
        for _ in range(20):
            fleet.clock.advance(25 * 10**7)
            trainer.step()
        return trainer.learner.gradient_steps - before

    with monkeypatch.context() as patch:
        patch.setattr(source, "refresh", lambda limit: away("ledger"))
        assert steps() == 20
        # 5 s: after 0.1, 0.2, ... 1.6, 3.2 s
        assert 1 < len(asked) <= 7
        patch.setattr(source, "next", lambda: away("store"))
        assert steps() == 0
        assert asked.count("store") <= 7
    assert caplog.text.count("the ledger is away") == caplog.text.count("the store is away") == 1
    fleet.clock.advance(30 * 10**9)
    assert steps() == 20


def _drawn(fleet, trainer):
    """Ids of the episodes of some batches."""
    for _ in range(20):
        fleet.clock.advance(10**9)
        trainer.step()
    trainer._versions.note_drawn()
    drawn = trainer._versions._trained_on
    return {row.id for row in fleet.ledger.episodes() if row.number in drawn}


def test_what_the_recipe_holds_out_is_not_trained_on_and_nobody_waits_for_more_in_its_place(tmp_path):
    fleet = InProcessFleet(tmp_path, replace(fake(), validation=0.5), robots=0)
    try:
        everything = held_out = set()
        while held_out == everything or not held_out:
            # their names are drawn at random
            fleet.demonstrate(int(bool(everything)))
            everything = {row.id for row in fleet.ledger.episodes()}
            held_out = {name for name in everything if on_side(name, 0.5, held_out=True)}
        assert _drawn(fleet, fleet.trainer) == everything - held_out
    finally:
        fleet.close()


def test_it_trains_on_a_snapshot_and_on_nothing_later(tmp_path):
    fleet = InProcessFleet(tmp_path, fake(), robots=0)
    try:
        first = {row.id for row in fleet.ledger.episodes()}
        fleet.ledger.take_snapshot("first")
        fleet.demonstrate(3)
        line = fleet.server.connect("trainer")
        with pytest.raises(InvalidDataError, match=r"no snapshot 'frist'.*Did you mean 'first'"):
            learning.make_trainer(fleet.recipe, "trainer", fleet.data, line, 0, clock=fleet.clock, snapshot="frist")
        trainer = learning.make_trainer(
            fleet.recipe, "trainer", fleet.data, line, 0, clock=fleet.clock, snapshot="first"
        )
        assert _drawn(fleet, trainer) == first
        trainer.close()
    finally:
        fleet.close()
