"""The trainer and its versions: with a real gateway, killed in between, refused, held back while there is little."""

from __future__ import annotations

import logging
import os
import re
import threading
from dataclasses import replace

import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.gateway.storage.weight_store import WeightStore
from cloud_learner.training.status import TrainerPhase, VersionFault
from fleet.config.recipes import fake
from fleet.launch import learning
from tests import samples
from tests.cloud_learner.training.test_trainer import Pretrained
from tests.wire.weights.files import version_of
from wire.errors import InvalidDataError, StorageError
from wire.messages.gateway import Publish

ALONE = replace(fake(), checkpoint_every_s=1e9, training=replace(fake().training, publish_every_s=1.0, batch=8))


class Fleet(InProcessFleet):
    """A gateway and a trainer on demonstrations; what is published is noted."""

    def __init__(self, root, recipe=ALONE, robots=0):
        super().__init__(root, recipe, robots)
        self.offers = []
        self.watch()

    def watch(self):
        line = self.trainer._gateway
        send = line.send

        def noted(message):
            if isinstance(message, Publish):
                self.offers.append(message)
            return send(message)

        line.send = noted

    def step(self, count=1):
        """Steps of the trainer; the clock stands still."""
        for _ in range(count):
            self.trainer.step()
            self.gateway.poll()
            self.trainer._handle_messages()

    def publish(self):
        """The trainer's next version, after one gradient step."""
        before = self.newest.number if self.newest else 0
        for _ in range(1000):
            self.clock.advance(2 * 10**9)
            self.step()
            if self.newest is not None and self.newest.number > before:
                break
        return self.newest

    @property
    def newest(self):
        row = self.ledger.newest_version()
        return row.version if row else None

    def kill(self):
        """The trainer is gone, and another one starts."""
        self.trainer._source.close()
        line = self.server.connect("trainer")
        self.trainer = learning.make_trainer(self.recipe, "trainer", self.data, line, 0, clock=self.clock)
        self.watch()


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path)
    yield made
    made.close()


def test_versions_travel_as_deltas_and_the_gateway_has_what_the_trainer_hashed(fleet):
    for _ in range(4):
        fleet.publish()
    assert [offer.base for offer in fleet.offers] == [0, 1, 2, 3]
    assert all(0 < offer.delta_bytes < offer.version.size_bytes / 4 for offer in fleet.offers[1:])
    assert fleet.trainer.counts.publishing.whole == 1
    newest = fleet.newest
    assert (newest.number, newest.parent) == (4, 3)
    assert fleet.trainer.learner.weights() != (fleet.data.weights / fleet.ledger.newest_version().path).read_bytes()


@pytest.mark.parametrize("stored", [True, False])
def test_killed_between_a_version_and_its_checkpoint_it_makes_the_same_version_again(fleet, stored):
    for _ in range(3):
        fleet.publish()
    fleet.trainer.save()
    # what is kept for a restart is written beside the steps
    fleet.trainer.step()
    if not stored:
        fleet.gateway.poll = lambda: None
    fleet.clock.advance(2 * 10**9)
    fleet.trainer.step()
    lost = fleet.offers[-1]
    assert lost.base == 3
    if not stored:
        del fleet.gateway.poll
        fleet.server._inbox.clear()
    fleet.gateway.poll()
    assert fleet.newest.number == (4 if stored else 3)
    fleet.kill()
    for _ in range(4):
        fleet.step()
    assert fleet.newest.number == 4, "it is version 4, and not published once more"
    assert fleet.newest.sha256 == lost.version.sha256
    assert fleet.trainer._versions.number == 4
    fleet.publish()
    assert (fleet.offers[-1].base, fleet.newest.number, fleet.newest.parent) == (4, 5, 4)


def test_restarted_without_the_file_it_kept_it_sends_the_whole(fleet):
    for _ in range(2):
        fleet.publish()
    fleet.trainer.save()
    fleet.trainer.step()
    for path in fleet.data.published.iterdir():
        path.unlink()
    fleet.kill()
    fleet.publish()
    assert fleet.offers[-1].base == 0
    assert fleet.newest.parent == 2
    fleet.publish()
    assert fleet.offers[-1].base == 3


def test_after_a_refusal_by_the_gateway_the_whole_goes(fleet, caplog):
    fleet.publish()
    (fleet.data.weights / fleet.ledger.newest_version().path).unlink()
    fleet.publish()
    assert [offer.base for offer in fleet.offers] == [0, 1, 0]
    assert fleet.newest.number == 2
    fleet.publish()
    assert fleet.offers[-1].base == 2


def test_what_the_gateway_cannot_store_is_offered_again_and_not_lost(fleet, monkeypatch):
    receive, failures = WeightStore.receive, [2]

    def full(store, part):
        if failures[0]:
            failures[0] -= 1
            store._give_up("the disk is full")
            raise StorageError("the disk is full.")
        return receive(store, part)

    monkeypatch.setattr(WeightStore, "receive", full)
    fleet.publish()
    counts = fleet.trainer.counts
    assert failures == [0]
    assert (counts.published, counts.publishing.made) == (1, 1)
    assert len(fleet.offers) == 3


def test_a_version_whose_number_another_trainer_took_meanwhile_gets_the_next_one(fleet):
    fleet.publish()
    fleet.clock.advance(2 * 10**9)
    while len(fleet.offers) < 2:
        fleet.trainer.step()
    other = samples.weights(1, 300)
    fleet.ledger.commit_version(version_of(2, other), "2-other.safetensors")
    fleet.step()
    assert fleet.newest.sha256 == version_of(2, other).sha256
    fleet.publish()
    assert (fleet.newest.number, fleet.newest.parent) == (3, 1)
    assert fleet.newest.sha256 == fleet.offers[1].version.sha256
    assert fleet.trainer.counts.published == fleet.trainer.counts.publishing.made == 2


def test_weights_that_are_not_finite_are_never_published_and_training_goes_on(fleet, caplog):
    fleet.publish()
    average = next(fleet.trainer.learner.average.parameters()).view(-1)
    kept = average[0].clone()
    for _ in range(5):
        average[0] = float("nan")
        fleet.clock.advance(2 * 10**9)
        fleet.step(2)
    assert fleet.newest.number == 1
    assert len(fleet.offers) == 1
    assert fleet.trainer.learner.gradient_steps >= 10
    assert fleet.trainer.counts.publishing.refused.keys() == {VersionFault.not_finite}
    status = fleet.trainer.counts.status
    assert status.refused >= 4
    assert status.refusal.startswith("not finite: '")
    assert caplog.text.count("a version is not published") == 1
    average[0] = kept
    assert fleet.publish().number == 2
    fleet.clock.advance(10**9)
    fleet.step()
    assert fleet.trainer.counts.status.refusal == ""


def test_a_run_that_diverges_keeps_its_good_checkpoints_and_goes_back_to_them(tmp_path, caplog):
    often = replace(
        ALONE, checkpoint_every_s=20.0, training=replace(ALONE.training, pretrain_steps=5, publish_every_s=1e9)
    )
    fleet = Fleet(tmp_path, often)
    for _ in range(30):
        fleet.clock.advance(6 * 10**9)
        fleet.step()
    fleet.trainer.save()
    good = sorted(fleet.data.checkpoints.iterdir())
    fleet.recipe = replace(often, training=replace(often.training, learning_rate=1e3))
    fleet.kill()
    steps = fleet.trainer.learner.gradient_steps
    with pytest.raises(
        InvalidDataError, match=f"were not applied.* after going back 3 times.*{re.escape(str(tmp_path))}"
    ):
        for _ in range(100):
            fleet.clock.advance(6 * 10**9)
            fleet.step()
    assert fleet.trainer.counts.returns == 3
    assert caplog.text.count(f"back to gradient step {steps}") == 3
    fleet.trainer.save()
    assert sorted(fleet.data.checkpoints.iterdir()) == good
    # with what it learned by before it goes on
    fleet.recipe = often
    fleet.kill()
    for _ in range(10):
        fleet.clock.advance(6 * 10**9)
        fleet.step()
    assert fleet.trainer.learner.gradient_steps == steps + 10 and fleet.trainer.counts.returns == 0
    assert sorted(fleet.data.checkpoints.iterdir())[-1] not in good
    fleet.close()


def test_weights_that_act_at_random_are_not_let_out(fleet):
    for _ in range(60):
        fleet.step()
    fleet.publish()
    fleet.publish()
    assert 0 < fleet.trainer.counts.publishing.action_change < 0.25
    for average in fleet.trainer.learner.average.parameters():
        average.mul_(30)
    fleet.clock.advance(2 * 10**9)
    before = fleet.newest.number
    fleet.step(2)
    assert fleet.newest.number == before
    assert sum(fleet.trainer.counts.publishing.refused.values()) == 1


def test_steps_go_on_while_a_version_is_made(fleet):
    began, may_end = threading.Event(), threading.Event()
    publisher = fleet.trainer._versions._publisher
    save = publisher._save

    def slow(module):
        began.set()
        assert may_end.wait(60)
        return save(module)

    publisher._save = slow
    fleet.trainer.start()
    while fleet.trainer.phase != TrainerPhase.online:
        fleet.step()
    fleet.step()
    assert began.wait(60)
    before = fleet.trainer.learner.gradient_steps
    fleet.step(10)
    assert fleet.trainer.learner.gradient_steps == before + 10
    assert fleet.newest is None
    may_end.set()
    for _ in range(6000):
        fleet.step()
        if fleet.newest is not None:
            break
        threading.Event().wait(0.01)
    assert fleet.newest.gradient_steps <= before


# --- what is pretrained -----------------------------------------------------------------------------------------------


def pretrained(**bounds):
    plain = ALONE
    return replace(plain, make_policy=lambda spec, seed: Pretrained(plain.make_policy(spec, seed)), **bounds)


def reported(fleet):
    fleet.clock.advance(10**9)
    fleet.step()
    return fleet.trainer.counts.status.phase


def test_it_does_not_change_before_so_many_steps_can_be_imitated(tmp_path):
    fleet = Fleet(tmp_path, pretrained(demonstrations=1, min_corrected_steps=10**6))
    try:
        for _ in range(5):
            assert reported(fleet) == "waiting"
        assert fleet.trainer._source.eligible_steps > 0
        assert fleet.trainer.learner.gradient_steps == 0
        assert fleet.newest.number == 1, "it acts from the first moment on"
        fleet.trainer._config = replace(fleet.trainer._config, min_corrected_steps=fleet.trainer._source.eligible_steps)
        assert reported(fleet) == "online"
        assert fleet.trainer.learner.gradient_steps > 0
    finally:
        fleet.close()


def test_it_draws_no_more_than_so_often_what_can_be_imitated(tmp_path):
    fleet = Fleet(tmp_path, pretrained(demonstrations=1, min_corrected_steps=0, max_samples_per_insert=2.0))
    try:
        config = fleet.trainer._source.config
        drawn = config.batch * config.ticks_per_frame
        phases = []
        for _ in range(200):
            fleet.step()
        for _ in range(15):
            phases.append(reported(fleet))
        steps, eligible = fleet.trainer.learner.gradient_steps, fleet.trainer._source.eligible_steps
        assert steps == -(-2 * eligible // drawn)
        assert phases[0] == "online", "a short wait is not told of"
        assert phases[-1] == "rate limited"
        fleet.trainer.save()
        fleet.kill()
        fleet.step(20)
        assert fleet.trainer.learner.gradient_steps == steps
        fleet.demonstrate(2)
        fleet.clock.advance(10**9)
        fleet.step(20)
        assert fleet.trainer.learner.gradient_steps > steps
    finally:
        fleet.close()


@pytest.mark.parametrize("chosen", [{"max_steps": 30}, {"snapshot": "now"}])
def test_who_chose_the_data_or_the_steps_is_not_bounded(tmp_path, chosen):
    fleet = Fleet(tmp_path, pretrained(demonstrations=1, min_corrected_steps=10**6, max_samples_per_insert=0.1))
    try:
        fleet.ledger.take_snapshot("now")
        fleet.trainer._source.close()
        line = fleet.server.connect("trainer")
        fleet.trainer = learning.make_trainer(fleet.recipe, "trainer", fleet.data, line, 0, clock=fleet.clock, **chosen)
        fleet.step(20)
        assert fleet.trainer.learner.gradient_steps >= 15
    finally:
        fleet.close()


def test_what_begins_with_random_weights_is_not_bounded(fleet, caplog):
    with caplog.at_level(logging.INFO):
        assert fleet.recipe.min_corrected_steps == 200
        fleet.step(3)
    assert fleet.trainer._config.min_corrected_steps == 0
    assert fleet.trainer._config.max_samples_per_insert == 0.0
    assert fleet.trainer.learner.gradient_steps > 0


def test_no_version_is_offered_before_there_is_a_checkpoint(fleet, monkeypatch):
    trainer = fleet.trainer

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        for _ in range(200):
            fleet.clock.advance(2 * 10**9)
            fleet.step()
        assert trainer.phase == TrainerPhase.online and trainer.learner.gradient_steps > 100
        assert not fleet.offers
    assert fleet.publish().number == 1


def test_killed_between_its_first_version_and_the_next_checkpoint_it_knows_that_version_for_its_own(fleet):
    first = fleet.publish()
    fleet.kill()
    for _ in range(5):
        fleet.clock.advance(2 * 10**9)
        fleet.step()
    chain = [fleet.ledger.version(number).version for number in range(1, fleet.newest.number + 1)]
    assert chain[0] == first and len(chain) > 1
    assert [one.parent for one in chain] == list(range(len(chain))), "it goes on from that version"
