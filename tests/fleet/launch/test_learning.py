"""What learns from robots of several shapes: offline to the byte, and in a fleet that a further one joins."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cloud_learner.training.spike_guard import LEAST_BEFORE, RECENT
from cloud_learner.training.status import TrainerPhase
from cloud_learner.training.trainer import Trainer
from fleet.config.data_directory import DataDirectory
from fleet.config.recipe import Recipe, share_policy
from fleet.config.recipes import fake
from fleet.config.weights_source import parse_source
from fleet.evaluation.demonstrations import demonstrate
from fleet.launch import factories, learning
from hal.drivers.fake import FAKE_INSTRUCTIONS, FakeConfig, fake_spec
from policies.common.weights import read_header
from policies.conformance.check import example_observation
from policies.flow.config import CameraEncoderConfig, Conv
from policies.flow.shared.config import SharedConfig
from policies.flow.shared.policy import SharedFlowPolicy
from wire.clock import ManualClock
from wire.errors import ConfigError, SpecMismatchError
from wire.transport.memory_channel import MemoryServer

STEPS, PRETRAIN = 6, 4
NET = SharedConfig(
    state_dim=6,
    action_dim=5,
    capacity=3,
    horizon=10,
    width=16,
    layers=2,
    cameras=(CameraEncoderConfig("front", 16, 16),),
    stem=(Conv(4, 4, 4),),
    points=2,
)


def member(px: int, *tasks: str) -> Recipe:
    """A point that sees `px` pixels: another shape for each."""
    config, plain = FakeConfig(tasks=tasks, image_px=px), fake()
    return replace(
        plain,
        tasks=tasks,
        instructions={task: FAKE_INSTRUCTIONS[task] for task in tasks},
        robot_config=config,
        unpaced_config=config,
        spec=fake_spec(config),
        motion=None,
        demonstrations=2,
        make_policy=lambda spec, seed: SharedFlowPolicy(spec, NET, seed),
        training=replace(plain.training, batch=4, pretrain_steps=PRETRAIN, publish_every_s=0.1),
        checkpoint_every_s=1e6,
    )


def job(*names: str) -> Recipe:
    known = {"small": member(16, "go-left"), "wide": member(24, "go-right", "go-up"), "late": member(32, "go-away")}
    return share_policy("points", {name: known[name] for name in names or known})


def show(data: DataDirectory, recipe: Recipe, episodes: int, first_seed: int = 0) -> None:
    """Record demonstrations of a member."""
    server = MemoryServer()
    gateway, _, ledger, _ = factories.make_gateway(recipe, data, server, ManualClock())
    name = f"demonstrator-{recipe.name.partition('@')[2]}-{first_seed}"
    demonstrate(recipe, name, data.edge(name), server.connect(name), episodes, first_seed, gateway.poll)
    gateway.poll()
    ledger.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataDirectory:
    """Demonstrations of two of the three."""
    found = DataDirectory(tmp_path_factory.mktemp("data"))
    for name in ("small", "wide"):
        show(found, job().members[name], 4)
    return found


def trained(recipe: Recipe, data: DataDirectory, run: Path, steps: int = STEPS, stop: int = 0) -> bytes:
    with learning.open_offline_trainer(recipe, data, DataDirectory(run), 0, steps) as trainer:
        while not trainer.finished and (not stop or trainer.learner.gradient_steps < stop):
            trainer.step()
        trainer.save()
        return trainer.weights()


def known(weights: bytes) -> list[tuple[int, bool]]:
    table = read_header(weights).embodiments
    return [(one.spec.cameras[0].width, one.ready) for one in table.rows]


def test_offline_it_learns_from_both_and_resumes_to_the_byte(data: DataDirectory, tmp_path: Path) -> None:
    recipe = job("small", "wide")
    whole = trained(recipe, data, tmp_path / "whole")
    assert known(whole) == [(16, True), (24, True)]
    half = trained(recipe, data, tmp_path / "halves", stop=3)
    assert trained(recipe, data, tmp_path / "halves") == whole != half
    for one in recipe.members.values():
        policy = one.make_policy(one.spec, 1)
        policy.load(whole, 1)
        observation = example_observation(one.spec)
        policy.act(observation, policy.think(observation), 0)
    mean = policy.module.mean
    assert mean[0].any() and mean[1].any() and not mean[2].any()
    assert not (mean[0] == mean[1]).all(), "each has its own statistics"


def test_weights_are_drawn_back_only_to_what_has_learned(tmp_path: Path, data: DataDirectory) -> None:
    plain = fake()
    scratch = replace(plain, training=replace(plain.training, reference_pull=1.0))
    started = DataDirectory(tmp_path / "a")
    show(started, plain, 1)
    with (
        pytest.raises(ConfigError, match=r"begin --from weights, or set training\.reference_decay"),
        learning.open_offline_trainer(scratch, started, started, 0, 1),
    ):
        pass
    following = replace(plain, training=replace(scratch.training, reference_decay=0.99))
    with learning.open_offline_trainer(following, started, started, 0, 1) as trainer:
        trainer.step()
    shapes = job("small", "wide")
    shapes = replace(shapes, training=replace(shapes.training, reference_pull=1.0, reference_decay=0.99))
    with (
        pytest.raises(ConfigError, match="for robots of several shapes"),
        learning.open_offline_trainer(shapes, data, DataDirectory(tmp_path / "b"), 0, 1),
    ):
        pass


def test_a_member_that_is_added_later_begins_with_what_the_others_know(data: DataDirectory, tmp_path: Path) -> None:
    trained(job("small", "wide"), data, tmp_path / "run")
    recipe = job()
    late = recipe.members["late"].make_policy(recipe.members["late"].spec, 0)
    with pytest.raises(SpecMismatchError, match="no version for this robot yet"):
        late.load(trained(recipe, data, tmp_path / "run"), 1)
    show(data, recipe.members["late"], 2)
    weights = trained(recipe, data, tmp_path / "run", STEPS + 2)
    assert known(weights) == [(16, True), (24, True), (32, True)]
    late.load(weights, 2)
    assert late.embodiments.rows[2].state == (0, 1, 2, 3), "the names are the others'"


def test_a_member_that_is_newer_than_the_checkpoint_joins_again_after_a_return(
    data: DataDirectory, tmp_path: Path
) -> None:
    trained(job("small"), data, tmp_path / "run")
    run = DataDirectory(tmp_path / "run")
    with learning.open_offline_trainer(job("small", "wide"), data, run, 0, STEPS + 9) as trainer:
        note, trainer._spikes.note = trainer._spikes.note, lambda loss: note(100.0)  # type: ignore[method-assign]
        for _ in range(LEAST_BEFORE):
            note(1.0)
        for _ in range(RECENT):
            trainer.step()
        assert trainer._spikes.count == 1
        assert known(trainer.learner.weights()) == [(16, True), (24, True)]
        trainer.step()


def test_a_policy_for_one_shape_is_refused(data: DataDirectory, tmp_path: Path) -> None:
    recipe = replace(job("small", "wide"), make_policy=fake().make_policy)
    with (
        pytest.raises(ConfigError, match="'points', which is for robots of several shapes, needs a policy that lets"),
        learning.open_offline_trainer(recipe, data, DataDirectory(tmp_path), 0, STEPS),
    ):
        pass


@contextmanager
def fleet_trainer(recipe: Recipe, data: DataDirectory) -> Iterator[Trainer]:
    """A trainer at a gateway that stores what it publishes."""
    server, clock = MemoryServer(), ManualClock()
    gateway, _, ledger, _ = factories.make_gateway(recipe, data, server, clock)
    trainer = learning.make_trainer(recipe, "trainer", data, server.connect("trainer"), 0, clock=clock)
    take = trainer.step

    def step() -> bool:
        clock.advance(50_000_000)
        gateway.poll()
        return take()

    trainer.step = step  # type: ignore[method-assign]
    try:
        yield trainer
    finally:
        trainer.close()
        ledger.close()


def test_with_weights_to_begin_with_who_joins_learns_before_it_acts(data: DataDirectory, tmp_path: Path) -> None:
    begin = tmp_path / "begin.safetensors"
    begin.write_bytes(trained(job("small"), data, tmp_path / "run"))
    copy = DataDirectory(tmp_path / "fleet")
    shutil.copytree(data.root, copy.root)
    recipe = replace(job("small", "wide"), start=parse_source(str(begin)))
    with fleet_trainer(recipe, copy) as trainer:
        trainer.step()
        assert known(trainer.learner.weights()) == [(16, True), (24, False)]


def newest(data: DataDirectory) -> bytes:
    return parse_source(f"{data.root}:newest").read().data  # type: ignore[union-attr]


def test_a_robot_that_joins_a_running_fleet_gets_a_version_once_it_has_learned(tmp_path: Path) -> None:
    recipe, data = job(), DataDirectory(tmp_path)
    show(data, recipe.members["small"], 2)
    show(data, recipe.members["wide"], 1)
    with fleet_trainer(recipe, data) as trainer:
        for _ in range(3):
            trainer.step()
        # the second one has not all of its demonstrations
        assert trainer.phase == TrainerPhase.pretraining
        while trainer.counts.published < 1:
            trainer.step()
        assert known(newest(data)) == [(16, True)]
    show(data, recipe.members["wide"], 3, 1)
    with fleet_trainer(recipe, data) as trainer:
        seen = []
        for _ in range(60):
            trainer.step()
            if (found := known(newest(data))) not in seen:
                seen.append(found)
        assert seen == [[(16, True)], [(16, True), (24, False)], [(16, True), (24, True)]]
        assert trainer.counts.publishing.refused == {}
        trainer.save()
    with fleet_trainer(recipe, data) as trainer:
        assert known(trainer.learner.weights()) == [(16, True), (24, True)]


def spike(trainer: Trainer) -> None:
    """Losses of which the newest ones are far above those before."""
    for loss in (*[1.0] * LEAST_BEFORE, *[100.0] * RECENT):
        trainer._spikes.note(loss)


@pytest.mark.parametrize("saved_between", [False, True])
def test_a_robot_that_joined_since_the_checkpoint_joins_again_when_the_trainer_goes_back(
    tmp_path: Path, saved_between: bool
) -> None:
    recipe, data = job(), DataDirectory(tmp_path)
    show(data, recipe.members["small"], 2)
    with fleet_trainer(recipe, data) as trainer:
        while trainer.counts.published < 1:
            trainer.step()
        trainer.save()
        show(data, recipe.members["wide"], 4)
        while known(trainer.learner.weights()) != [(16, True), (24, False)]:
            trainer.step()
        if saved_between:
            trainer.save()
        while known(trainer.learner.weights()) != [(16, True), (24, True)]:
            trainer.step()
        spike(trainer)
        assert known(trainer.learner.weights()) == [(16, True), (24, False)][: 1 + saved_between]
        for _ in range(4 * PRETRAIN):
            trainer.step()
        assert known(trainer.learner.weights()) == [(16, True), (24, True)]
