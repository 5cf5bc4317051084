"""The robot under the mode that was decided: what was last seen of it, what it was told, and what it did."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from hal.interfaces.robot import Feedback
from hal.safety.limiter import hold_action, limit_action
from hal.safety.limits import SafetyLimits
from hal.safety.rest import standing_action
from robot_edge.chunking.scheduler import ChunkSchedulerSelector
from robot_edge.control.guarded_robot import GuardedRobot
from robot_edge.control.mode import ControlConditions, Hold, HoldReason, Mode, decide
from wire.errors import InvalidDataError
from wire.types import Observation, RobotSpec

log = logging.getLogger(__name__)


class CommandedRobot:
    """One robot. Whoever decides says so here first: a command that is not taken changes what was decided."""

    def __init__(
        self, name: str, spec: RobotSpec, driver: GuardedRobot, chunks: ChunkSchedulerSelector, safety: SafetyLimits
    ) -> None:
        self.mode = Mode.hold
        self.hold = Hold(HoldReason.no_job)
        """why the robot holds"""
        self.seen: Observation | None = None
        """the newest valid observation of this scene"""
        self.waited = False
        """its host held it, or it refused: it is not where it was told to go"""
        self._name, self._spec, self._driver, self._chunks, self._safety = name, spec, driver, chunks, safety

    @property
    def executed(self) -> np.ndarray:
        """float32[da]: what the robot did last, as it said."""
        return self._driver.executed

    def decide(self, **known: Any) -> None:
        """Who is in control, from what is `known` of `ControlConditions` and from who stops the robot."""
        self.mode, self.hold = decide(ControlConditions(**self._driver.stop_conditions, **known))

    def hold_for(self, fault: Hold) -> None:
        """The robot cannot be used, or what was decided cannot be done."""
        self.decide(fault=fault)

    def observe(self) -> Observation | None:
        """The newest valid observation of this scene. None, with the hold named, without one or without the robot."""
        observation = self._driver.observe()
        if observation is not None:
            if self.seen is None:
                # A scene was reset: what the robot executed before says nothing about where it is now.
                self._driver.executed = standing_action(self._spec, observation.state, self._safety)
                self._driver.still = True
            self.seen = observation
        if self.seen is not None and self._driver.connected:
            return self.seen
        # Nobody knows what would hold a robot that was just reset.
        self.hold_for(self._driver.observation_fault)
        return None

    def checked(self, proposed: np.ndarray | None) -> np.ndarray | None:
        """`proposed` within its bounds; None, with the hold named, for what is no action."""
        if proposed is None:
            return None
        try:
            return limit_action(self._spec, proposed)
        except InvalidDataError as error:
            log.warning("robot '%s': %s", self._name, error)
            self.hold_for(Hold(HoldReason.bad_action, str(error)))
            return None

    def apply(self, action: np.ndarray | None, next_read_ns: int = 0) -> Feedback:
        """Command the robot, None to hold, and note what it did. A driver that refuses is given a while, during which
        it is held.
        """
        feedback = self._driver.write(action, next_read_ns)
        self.waited = feedback is None or feedback.held_ticks > 0
        if feedback is None:
            if self.mode not in (Mode.estop, Mode.hold):
                self.hold_for(self._driver.fault)
            return Feedback(hold_action(self._spec, self.executed))
        if self.waited:
            # It is not where the plan has it either.
            self._chunks.scheduler.void()
        return feedback

    def come_to_rest(self) -> bool:
        """Between two episodes: slow the robot down within its limits; whether it stands still."""
        if self.seen is not None and not self._driver.still:
            self.apply(None)
            self.decide(resetting=True)
            return False
        return True
