"""Demonstrations, recorded whole by a robot's own loop and spool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cloud_learner.buffer.check import VALUE_MARGIN
from fleet.config.data_directory import DataDirectory
from fleet.config.recipes import get_recipe
from fleet.evaluation.demonstrations import demonstrate
from fleet.launch import factories
from hal.drivers.gym.presets import metaworld, pusht
from hal.drivers.gym.robot import GymConfig, GymRobot
from wire.clock import ManualClock, clock_name
from wire.messages.gateway import Ack, Hello, HelloAck, Segment
from wire.transport.keys import KeyRecord, now
from wire.transport.memory_channel import MemoryServer
from wire.types import Role


def test_each_demonstration_ends_with_what_its_last_action_led_to_and_none_is_left_half_done(tmp_path: Path) -> None:
    server, stored = MemoryServer(), []

    def acknowledge() -> None:
        while (item := server.recv()) is not None:
            if isinstance(item[1], Hello):
                server.send("demo", HelloAck(clock_name(), 1, 1))
            elif isinstance(item[1], Segment):
                stored.append(item[1])
                server.send("demo", Ack((item[1].id,)))

    demonstrate(get_recipe("fake"), "demo", tmp_path, server.connect("demo"), 3, 0, acknowledge)
    ends = [segment for segment in stored if segment.last]
    assert [end.outcome for end in ends] == ["success"] * 3
    assert len({segment.episode.id for segment in stored}) == 3
    for end in ends:
        assert end.terminated[-1] and not end.truncated.any()
        assert end.terminal is not None and end.terminal.time_ns > end.times_ns[-1]
        moved = end.terminal.state[:3] - end.state[-1, :3]
        np.testing.assert_allclose(moved, 0.01 * end.executed[-1, :3], atol=1e-6)
    assert not any(segment.chunks for segment in stored)


@pytest.mark.parametrize("name", ["fake", pytest.param("state", marks=pytest.mark.slow), "pixels"])
def test_what_the_shipped_recipes_record_is_believed(tmp_path: Path, name: str) -> None:
    recipe, data, server = get_recipe(name), DataDirectory(tmp_path), MemoryServer()
    server.teaches["demo"] = KeyRecord("demo", Role.demonstrator, "", now()).may_teach
    gateway, _, ledger, _ = factories.make_gateway(recipe, data, server)
    demonstrate(recipe, "demo", data.edge("demo"), server.connect("demo", "demonstrator"), 2, 7, gateway.poll)
    assert data.buffer.open_reader()[1].quarantine.entries() == []
    assert [row.outcome for row in ledger.episodes()] == ["success"] * 2
    ledger.close()


@pytest.mark.parametrize("config", [pusht(image_px=0), metaworld("push")], ids=["pusht", "metaworld"])
def test_wherever_a_simulated_robot_is_pushed_its_state_is_believed(config: GymConfig) -> None:
    clock, rng = ManualClock(10**9), np.random.default_rng(0)
    robot = GymRobot(config, clock)
    robot.connect()
    robot.reset(robot.tasks[0], 3)
    low, high = (np.array([getattr(one, side) for one in robot.spec.state]) for side in ("low", "high"))
    margin = VALUE_MARGIN * (high - low)
    for tick in range(120):
        state = robot.read().state
        assert ((state >= low - margin) & (state <= high + margin)).all(), state
        if tick % 10 == 0:
            # To a corner of what can be asked for, and beyond its reach.
            action = np.where(
                rng.random(robot.spec.action_dim) < 0.5, robot.spec.action_low(), robot.spec.action_high()
            )
        robot.write(action.astype(np.float32))
        clock.advance(robot.spec.period_ns)
    robot.close()
