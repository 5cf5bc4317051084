"""Demonstrations: the scripted operator does whole episodes, unpaced, through a robot's own loop, spool and ingest."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import numpy as np

from robot_edge.control.loop import ControlLoop
from robot_edge.uplink.server import Uplink
from wire.clock import clock_name
from wire.errors import FleetError, RobotError
from wire.messages.gateway import Hello, Job
from wire.transport.channel import Channel
from wire.types import Role

log = logging.getLogger(__name__)


class AlwaysIntervene:
    """A gate that never hands back."""

    active = False

    def reset(self) -> None:
        self.active = True

    def update(self, policy: np.ndarray | None, expert: np.ndarray, progress: float) -> bool:
        self.active = True
        return True


def demonstrate(
    loop: ControlLoop,
    uplink: Uplink,
    to_uplink: Channel,
    from_uplink: Channel,
    tasks: tuple[str, ...],
    episodes: int,
    first_seed: int,
    wait: Callable[[], object],
    patience_s: float = 60.0,
) -> None:
    """Record `episodes` episodes, the `tasks` in turn, and return when the gateway has acknowledged all of them.

    `to_uplink` is the loop's end of its line to `uplink`, `from_uplink` the other one. `wait` rests while there is
    nothing to do. Raises `FleetError` when the gateway does not take them within `patience_s`, and `RobotError` when
    the robot fails.
    """
    loop.robot.connect()
    to_uplink.send(Hello(loop.name, Role.demonstrator, clock_name(), time.monotonic_ns(), os.getpid(), loop.robot.spec))
    from_uplink.send(Job("demonstrations", tasks, first_seed))
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
    deadline = time.monotonic() + patience_s
    while not uplink.drained:
        if time.monotonic() > deadline:
            raise FleetError(
                f"the gateway did not take the demonstrations within {patience_s:.0f} s"
                f"{': ' + uplink.rejection if uplink.rejection else ''}. They stay in the spool of '{uplink.name}'."
            )
        wait()
        uplink.poll()
    uplink.close()
