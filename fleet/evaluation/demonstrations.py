"""Demonstrations: the scripted operator does whole episodes, unpaced, through a robot's own loop, spool and ingest."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fleet.config.recipe import Recipe
from fleet.launch.factories import make_control
from robot_edge.control.config import EpisodeRules, GateConfig
from robot_edge.uplink.server import Uplink
from wire.clock import MonotonicClock, SimulatedClock, clock_name
from wire.errors import FleetError, RobotError
from wire.messages.gateway import Hello, Job
from wire.transport.channel import Channel
from wire.transport.memory_channel import memory_pair
from wire.types import Role

log = logging.getLogger(__name__)
_DRAIN_S = 60.0


def demonstrate(
    recipe: Recipe,
    name: str,
    directory: Path,
    gateway: Channel,
    episodes: int,
    first_seed: int,
    wait: Callable[[], object],
) -> None:
    """Record `episodes` episodes, the recipe's tasks in turn, and return when the gateway has acknowledged all of them.

    `directory` keeps the spool of `name`, `gateway` is its connection. `wait` rests while there is nothing to do.
    Raises `FleetError` when the gateway does not take them in time, and `RobotError` when the robot fails.
    """
    to_uplink, from_uplink = memory_pair()
    inference, unused = memory_pair()
    # The gate opens at once, and there is no policy to hand back to.
    # No person is there.
    config = replace(
        recipe.loop,
        source="demonstration",
        needs_policy=False,
        gate=GateConfig(stall_ticks=0),
        episodes=EpisodeRules(reset_by_person=False),
    )
    demonstrated = replace(recipe, loop=config, delay="0")
    loop = make_control(demonstrated, name, to_uplink, inference, SimulatedClock(), paced=False)
    uplink = Uplink(name, directory, gateway, from_uplink, unused, MonotonicClock())
    loop.robot.connect()
    to_uplink.send(Hello(name, Role.demonstrator, clock_name(), time.monotonic_ns(), os.getpid(), loop.robot.spec))
    from_uplink.send(Job("demonstrations", recipe.tasks, first_seed))
    uplink.poll()
    try:
        while loop.tracker.ended < episodes:
            before = loop.tracker.ended
            loop.tick()
            uplink.poll()
            if loop.driver.fault.detail:
                # A robot of the fleet is tried again; a demonstration is not worth the wait.
                raise RobotError(f"demonstrations: {loop.driver.fault.detail}")
            if loop.tracker.ended > before:
                log.info("demonstration %d of %d recorded.", loop.tracker.ended, episodes)
    finally:
        loop.close()
    uplink.poll()
    uplink.control_gone()
    deadline = time.monotonic() + _DRAIN_S
    while not uplink.drained:
        if time.monotonic() > deadline:
            raise FleetError(
                f"the gateway did not take the demonstrations within {_DRAIN_S:.0f} s"
                f"{': ' + uplink.rejection if uplink.rejection else ''}. They stay in the spool of '{uplink.name}'."
            )
        wait()
        uplink.poll()
    uplink.close()
