"""A recipe's control loop, recorded and decided again from the file alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fleet.cli.__main__ import app
from fleet.config.recipes import get_recipe
from fleet.launch import factories
from robot_edge.inference.server import infer_chunk
from wire.clock import ManualClock
from wire.messages.gateway import Job, OperatorCommand, VersionActivated
from wire.messages.local import ChunkRequest
from wire.transport.memory_channel import memory_pair
from wire.types import PolicyCapabilities


@pytest.fixture(scope="module")
def flight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 ticks of the fake recipe with its operator, injected delay and an emergency stop in between."""
    directory = tmp_path_factory.mktemp("flight")
    recipe = get_recipe("fake")
    policy = recipe.make_policy(recipe.spec, 0)
    policy.load(policy.save(), 1)
    up, uplink = memory_pair()
    inf, inference = memory_pair()
    clock = ManualClock()
    with factories.record_flight(recipe, "robot-0", directory, operated=True) as recorder:
        loop = factories.make_control(recipe, "robot-0", uplink, inference, clock, paced=False, flight=recorder)
        loop.robot.connect()
        up.send(Job("j", recipe.tasks, 500_000))
        up.send(VersionActivated("robot-0", 1, 0, policy.trained))
        waiting = None
        for tick in range(150):
            if (kind := {70: "estop", 80: "release_estop", 82: "start"}.get(tick)) is not None:
                up.send(OperatorCommand("robot-0", kind, stop="1"))
            recorder.tick(loop)
            if waiting is not None:
                inf.send(waiting)
                waiting = None
            while (request := inf.recv()) is not None:
                if isinstance(request, ChunkRequest):
                    waiting = infer_chunk(policy, policy.think(request.observation), request)
            while up.recv() is not None:
                pass
        loop.close()
    return directory


def test_it_is_decided_again_in_the_same_way(flight: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(flight)])
    assert result.exit_code == 0, result.output
    assert "150 decided again, all the same" in result.output


def test_a_stretch_can_be_looked_at(flight: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(flight), "--from", "69", "--to", "75", "--table"])
    assert result.exit_code == 0, result.output
    assert "estop" in result.output
    assert "7 decided again" in result.output


def test_another_decision_is_found(flight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = factories.scheduler_factory

    def other(recipe):
        make = real(recipe)

        def made(trained: PolicyCapabilities):
            scheduler = make(trained)
            action = scheduler.next_action

            def nudged(tick, observation):
                chosen = action(tick, observation)
                return None if chosen is None else (np.float32(0.5) * chosen[0], chosen[1])

            scheduler.next_action = nudged
            return scheduler

        return made

    monkeypatch.setattr(factories, "scheduler_factory", other)
    result = CliRunner().invoke(app, ["replay", str(flight)])
    assert result.exit_code == 1
    assert "is decided otherwise now" in result.output


def test_a_directory_without_a_flight_is_a_clear_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert result.exit_code == 1
    assert str(tmp_path) in str(result.exception)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("--delay", "soon", "random:2-8"), ("--strategy", "future", "future_state"), ("--speed-up", "-1", "speed-up")],
)
def test_what_cannot_be_understood_is_refused_before_anything_starts(
    tmp_path: Path, option: str, value: str, says: str
) -> None:
    result = CliRunner().invoke(app, ["up", "--recipe", "fake", "--data", str(tmp_path / "x"), option, value])
    assert result.exit_code != 0
    assert says in str(result.exception) + result.output
    assert not (tmp_path / "x").exists()
