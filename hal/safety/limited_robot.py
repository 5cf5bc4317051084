"""A robot behind its limits and its stop, and the one who knows what it executed last: whoever touches the driver
holds one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from hal.interfaces.robot import (
    Feedback,
    RestPose,
    Robot,
    is_real,
    is_stoppable,
    reach,
    request_previews,
    returns_by_steps,
    stop_motion,
    stop_velocities,
    validate_executed,
)
from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits, slowed
from hal.safety.rest import EFFORTS, standing_action, unmeasured
from hal.safety.stop_latch import StopLatch, check_speed_limit
from wire.errors import RobotError, RobotMovingError, RobotStoppedError
from wire.stop_state import StopState
from wire.types import CommandType, Observation

log = logging.getLogger(__name__)


class LimitedRobot:
    """Keeps the `HoldingRobot` protocol. Not for several threads at once, except `stop`, `release`, `start` and
    `stop_motion`.
    """

    def __init__(self, robot: Robot, limits: SafetyLimits | None = None, latch: StopLatch | None = None) -> None:
        """`latch`: stops and speed limits that outlive this process. Raises `ConfigError` for limits that do not fit
        the robot, and for one that was slowed and has no velocity limits that could be scaled.
        """
        self.robot, self.spec = robot, robot.spec
        self.executed: np.ndarray | None = None
        """float32[da]: at the last command of this scene, None before the first; where it stands once its driver has
        stopped it and it was measured"""
        self._latch, self.connected = latch or StopLatch(), False
        self.under_way = 0
        """number of the call that its driver is at, of those that may move it; 0 for none"""
        self._calls = 0
        self._stop_fault = ""
        self.on_stop: Callable[[], None] = lambda: None
        """called by whoever stops the robot, so that nobody waits for the next command"""
        self.stop_driver: Callable[[], object] = self.stop_motion
        """called by whoever stops the robot anew; a host has it done by a thread"""
        self.on_write: Callable[[], None] = lambda: None
        """called before each command that the driver gets"""
        self.coasting = False
        """whether it moves on until it is told otherwise, by what the driver was told last: a velocity that is not 0"""
        self._velocities = [i for i, d in enumerate(robot.spec.action) if d.meaning is CommandType.velocity]
        self._halted = False
        """its driver has stopped it by itself and it was not measured since: neither its speed nor its targets hold"""
        self._unread = ""
        """why it could not be measured then"""
        self._limits = limits or SafetyLimits()
        self._reach = reach(robot)
        self._limiter = SafetyLimiter(robot.spec, self._limits, self._reach)
        self._limiter.slow(self._latch.state.speed_limit)
        self._absolute = np.array([d.meaning is CommandType.absolute for d in robot.spec.action], bool)
        self._guessed = unmeasured(robot.spec, SafetyLimits(moves=self._limits.moves))
        """absolute dimensions that nobody measures, whatever is said of them"""
        places = {d.name for d in robot.spec.action if d.unit not in EFFORTS} if is_real(robot) else set()
        self._unknown = [name for name in self._guessed if name in places or name not in self._limits.rest]
        """those of them that must not be commanded before somebody asks for something; a simulator may be set"""
        self._told = False
        """whether it was commanded anything since it was measured where it stands"""
        self._state: np.ndarray | None = None

    @property
    def still(self) -> bool:
        """Whether the robot was not moving when it was last commanded."""
        return self._limiter.still

    @property
    def stoppable(self) -> bool:
        """Whether its driver has a way of its own to stop what moves."""
        return is_stoppable(self.robot)

    def connect(self) -> None:
        """As `Robot.connect`. Whoever had it before may have left it moving: it is told to stand.

        Raises `RobotStoppedError` for one that is stopped, for connecting may put torque on; but not for one that may
        be moving by a velocity, which stays stopped. Raises `RobotError` for a real one of those that cannot be told.
        """
        if self.connected:
            self.robot.connect()
            return
        with self._calling():
            if not self._velocities:
                self._require_free("is not connected")
            self.robot.connect()
        if not self.stop_motion() and self._velocities:
            self._stop_velocities()
        self.connected = True

    def reset(self, task: str, seed: int) -> RestPose | None:
        """As `Robot.reset`. What was executed before says nothing about where the robot is then: it stands still.

        Raises `RobotStoppedError` for one that is stopped, or was while it reset, and `RobotMovingError` for one that
        has not come to hold.
        """
        with self._calling():
            # Whoever stops it after this has seen that it is under way.
            self.require_at_rest()
            self._forget()
            pose = self.robot.reset(task, seed)
        self._require_free("was stopped while it reset")
        return pose

    def require_at_rest(self) -> None:
        """Raises as `reset` for a robot that is not to be reset now."""
        self._require_free("is not reset")
        if not self.still:
            raise RobotMovingError(f"robot '{self.spec.embodiment}' is not reset while it moves; hold it first.")

    def read(self) -> Observation:
        seen = self.robot.read()
        self._state = getattr(seen, "state", None)
        return seen

    def write(self, action: np.ndarray) -> Feedback:
        """Execute what comes nearest to `action`, float32[da], within all limits; hold while somebody stops the robot.

        Raises `InvalidDataError` for what is no action, `RobotError` while a joint stands where no small step leads
        back from, and what the driver raises, also when it must be read first.
        """
        before = self._before()
        if self._stands:
            before = self._first(before)
        self._limiter.slow(self._latch.state.speed_limit)
        limited = self._limiter.limit(action, before, self._state)
        return self.hold() if not self._latch.state.free else self._write(limited, before)

    def hold(self) -> Feedback:
        """One period of coming to hold, as hard as acceleration allows, or a stop. Raises what the driver raises.

        A robot that stands, because it was commanded nothing in this scene or its driver has stopped it, is left alone
        where no number would keep it there: nobody measures where it is, or it is outside what it can be told.
        """
        state = self._latch.state
        try:
            before = self._before()
        except Exception as error:
            if self.executed is None:
                raise
            if str(error) != self._unread:
                log.warning("robot '%s' is commanded nothing until it is measured: %s", self.spec.embodiment, error)
            self._unread = str(error)
            return Feedback(self.executed, stop=_said(state))
        self._limiter.slow(state.speed_limit)
        if self.executed is None and self._unknown:
            return Feedback(before, stop=_said(state))
        if self._stands and self._outside(before).any():
            if is_real(self.robot):
                return Feedback(before, stop=_said(state))
            before = self._first(before)
        return self._write(self._limiter.brake(before, self._state, bool(state.stops)), before)

    def stop_state(self) -> StopState:
        return self._latch.state

    def stop(self, stop: str, who: str, lasting: bool = False) -> StopState:
        """As `StopLatch.stop`. What the driver does by itself is stopped here; `hold` brakes the rest."""
        new = stop not in self._latch.state.stops
        self._latch.stop(stop, who, lasting)
        self.on_stop()
        if new:
            self.stop_driver()
        return self._latch.state

    def stop_motion(self) -> bool:
        """Stop whatever moves by the driver's own way; whether it has one and took it. Logs what it raises, once.

        From any thread, for it is done whatever the driver is at. The next command begins from rest.
        """
        try:
            done = stop_motion(self.robot)
        except Exception as error:  # noqa: BLE001 - whatever a driver raises, holding goes on
            fault = f"{type(error).__name__}: {error}"
            if fault != self._stop_fault:
                log.error("robot '%s' could not be stopped by its driver's own way: %s", self.spec.embodiment, fault)
            self._stop_fault = fault
            return False
        self._stop_fault = ""
        self._halted = self._halted or done
        return done

    def _stop_velocities(self) -> None:
        """By zero velocities, and all else where it is measured."""
        try:
            if stop_velocities(self.robot):
                return
            if unknown := unmeasured(self.spec, self._limits):
                raise RobotError(f"nobody measures {', '.join(unknown)}")
            state = self.robot.read().state if self._absolute.any() else np.zeros(self.spec.state_dim, np.float32)
            self.robot.write(self._first(standing_action(self.spec, state, self._limits)))
        except Exception as error:
            text = (
                f"robot '{self.spec.embodiment}' may be moving since before it was connected and could not be told to "
                f"stand: {error} Look at it. If its driver takes no command before a reset, give it stop_velocities()."
            )
            if is_real(self.robot):
                raise RobotError(text) from error
            log.info("%s", text)

    def end_cause(self, stop: str) -> None:
        """As `StopLatch.end_cause`."""
        self._latch.end_cause(stop)

    def limit_speed(self, who: str, share: float) -> StopState:
        """As `StopLatch.limit_speed`, from the next command on. Raises as that, and `ConfigError` for a robot that has
        no velocity limits that could be scaled.
        """
        check_speed_limit(who, share)
        slowed(self._limiter.compiled, share)
        self._latch.limit_speed(who, share)
        return self._latch.state

    def release(self, stop: str) -> StopState:
        self._latch.release(stop)
        return self._latch.state

    def start(self, after: str = "") -> StopState:
        self._latch.start(after)
        return self._latch.state

    def request_previews(self, wanted: bool) -> None:
        request_previews(self.robot, wanted)

    def close(self) -> None:
        self.connected = False
        self._forget()
        with self._calling():
            self.robot.close()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        self._calls += 1
        self.under_way = self._calls
        try:
            yield
        finally:
            self.under_way = 0

    def _forget(self) -> None:
        self.executed = self._state = None
        self.coasting = self._halted = self._told = False
        self._unread = ""
        self._limiter.reset()

    def _require_free(self, what: str) -> None:
        state = self._latch.state
        if state.free:
            return
        who = f"by {', '.join(sorted(set(state.stops.values())))}" if state.stops else "before, and nobody started it"
        raise RobotStoppedError(f"robot '{self.spec.embodiment}' {what}: it was stopped {who}.")

    def _before(self) -> np.ndarray:
        """float32[da]: what the robot executes now, or where it stands. Raises what reading it raises."""
        if self._halted:
            self._halted = False
            self._limiter.reset()
            try:
                self._measure_again()
            except BaseException:
                self._halted = True
                raise
        if self.executed is not None:
            return self.executed
        state = self._state if self._state is not None else self.read().state
        return standing_action(self.spec, state, self._limits)

    def _measure_again(self) -> None:
        """Its driver has stopped it: note where it stands now, for its old targets would take it on."""
        state = self.read().state if self._absolute.any() else np.zeros(self.spec.state_dim, np.float32)
        stands = standing_action(self.spec, state, self._limits)
        if self.executed is not None:
            guessed = [d.name in self._guessed for d in self.spec.action]
            self.executed = np.where(guessed, self.executed, stands)
            self._told, self._unread = False, ""

    @property
    def _stands(self) -> bool:
        """Whether it was commanded nothing since it was measured."""
        return self.executed is None or not self._told

    def _outside(self, at: np.ndarray) -> np.ndarray:
        """bool[da]: the absolute dimensions that are not where they can be told to go."""
        low, high = self._reach
        return self._absolute & ((at < low) | (at > high))

    def _first(self, at: np.ndarray) -> np.ndarray:
        """float32[da]: where the first command begins after the robot stood at `at`. Raises `RobotError` for a real
        one that would get back to where it can be told to go by a jump.
        """
        if returns_by_steps(self.robot) or not (outside := self._outside(at)).any():
            return at
        within = np.where(self._absolute, np.clip(at, *self._reach), at)
        for i in np.flatnonzero(outside) if is_real(self.robot) else ():
            dimension, (low, high) = self.spec.action[i], (float(each[i]) for each in self._reach)
            step = self._limits.velocity.get(dimension.name, np.inf) * self.spec.period_ns / 1e9
            if abs(at[i] - within[i]) > step:
                raise RobotError(
                    f"robot '{self.spec.embodiment}' is not moved: '{dimension.name}' is measured at {at[i]:.4g} "
                    f"{dimension.unit}, outside {low:.4g} to {high:.4g}, and would come back by a jump. Bring it back "
                    "by hand with its power off, or calibrate it anew."
                )
        return within

    def _write(self, action: np.ndarray, before: np.ndarray) -> Feedback:
        self._told = True
        # Also before the driver answers: a call that blocks may have done what it was told.
        self.coasting = self._coasts(action) or self._coasts(before)
        self.on_write()
        with self._calling():
            done = self.robot.write(action)
        # A driver may use its array again. It is noted whatever else is wrong with the answer.
        self.executed = validate_executed(self.spec, done).copy()
        self._limiter.note(self.executed, before)
        self.coasting = self._coasts(self.executed)
        stop = _said(self._latch.state)
        return msgspec.structs.replace(done, executed=self.executed, still=self._limiter.still, stop=stop)

    def _coasts(self, action: np.ndarray) -> bool:
        return any(map(action.item, self._velocities))


def _said(state: StopState) -> StopState | None:
    """As `Feedback.stop` has it."""
    return None if state == StopState() else state
