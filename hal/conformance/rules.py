"""The `Robot` contract as rules that run on any driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.conformance.report import CheckOutcome
from hal.interfaces.robot import Feedback, HoldingRobot, Robot
from hal.safety.limiter import hold_action, limit_action
from hal.safety.rest import rest_action
from wire.clock import Clock
from wire.errors import ConfigError, FleetError, InvalidDataError, RobotMovingError
from wire.types import CameraSpec, CommandType, Frame, Observation, RobotSpec

_SCALE, _GENTLE_SCALE = 0.5, 0.05
"""shares of the action limits used to move"""


class RuleBrokenError(Exception):
    """A rule is broken; the text says how and what to do."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Each rule is called with a new robot, as `make` gives it."""

    make: Callable[[], Robot]
    task: str
    ticks: int
    seeded: bool
    clock: Clock
    move: bool = True
    gentle: bool = False
    """swing about the pose the robot stands in and never command a limit: for hardware"""

    def rules(self) -> list[Callable[[Robot], None]]:
        if not self.move:
            return [self.spec, self.connect]
        return [
            self.spec,
            self.connect_twice,
            self.close_twice,
            self.unready_is_refused,
            self.unknown_task,
            self.read,
            self.read_limits,
            self.time,
            self.cameras,
            self.write,
            *([] if self.gentle else [self.write_limits]),
            self.write_invalid,
            self.hold,
            *([self.deterministic] if self.seeded else []),
        ]

    # --- the rules ------------------------------------------------------------------------------------------------

    def spec(self, robot: Robot) -> None:
        require(isinstance(robot, Robot), "lacks a method of hal.interfaces.robot.Robot; add it.")
        require(isinstance(robot.spec, RobotSpec), "`spec` must be a RobotSpec, set by the constructor.")
        for d in robot.spec.action:
            still = d.meaning is CommandType.absolute or d.low <= 0 <= d.high
            require(still, f"action '{d.name}' is a {d.meaning.value} but 0 is not within its limits: it cannot hold.")
        require(robot.spec.hash == self.make().spec.hash, "two robots of the same configuration have other specs.")

    def connect(self, robot: Robot) -> None:
        robot.connect()

    def connect_twice(self, robot: Robot) -> None:
        robot.connect()
        self.start(robot)

    def close_twice(self, robot: Robot) -> None:
        robot.close()
        self.start(robot)
        robot.close()
        robot.close()
        refuses(robot.read, "read() after close()")

    def unready_is_refused(self, robot: Robot) -> None:
        refuses(lambda: robot.reset(self.task, 0), "reset() before connect()")
        robot.connect()
        refuses(robot.read, "read() before reset()")
        if not self.gentle:
            # One that does not refuse it goes there.
            refuses(lambda: robot.write(robot.spec.action_low()), "write() before reset()")

    def unknown_task(self, robot: Robot) -> None:
        robot.connect()
        wrong = self.task + "-x"
        error = refuses(lambda: robot.reset(wrong, 0), f"reset('{wrong}')", ConfigError)
        require(wrong in str(error), f"the error does not name the task '{wrong}': {error}")

    def read(self, robot: Robot) -> None:
        spec = robot.spec
        for observation, _ in self._play(robot):
            state = observation.state
            require(state.dtype == np.float32, f"state is {state.dtype}; it must be float32.")
            require(bool(observation.task), "`task` is empty; give the instruction a person would say.")
            shape = state.shape == (spec.state_dim,)
            require(shape, f"state has shape {list(state.shape)}; the spec has {spec.state_dim} dimensions.")
            names = [d.name for d, ok in zip(spec.state, np.isfinite(state), strict=True) if not ok]
            require(not names, f"state is not finite in {', '.join(names)}; raise RobotError when a sensor fails.")
            for camera in spec.cameras:
                frame = observation.images.get(camera.name)
                if frame is None:
                    raise RuleBrokenError(f"no frame of '{camera.name}'; reset() must wait for the first.")
                check_picture(camera, frame)

    def read_limits(self, robot: Robot) -> None:
        for tick, (observation, _) in enumerate(self._play(robot)):
            for d, value in zip(robot.spec.state, observation.state, strict=False):
                inside = np.float32(d.low) <= value <= np.float32(d.high) or np.isnan(value)
                require(inside, f"tick {tick}: '{d.name}' is {value} {d.unit}, limits {d.low} to {d.high}.")

    def time(self, robot: Robot) -> None:
        before = -1
        for tick, (observation, _) in enumerate(self._play(robot)):
            now = observation.time_ns
            require(isinstance(now, int), "`time_ns` must be an int.")
            back_ms = (before - now) / 1e6
            require(back_ms <= 0, f"tick {tick}: time went back by {back_ms:.3f} ms; stamp by one monotonic clock.")
            before = now

    def cameras(self, robot: Robot) -> None:
        spec = robot.spec
        seen: dict[str, list[int]] = {camera.name: [] for camera in spec.cameras}
        longest_s = max((1 / camera.rate_hz for camera in spec.cameras), default=0.0)
        ticks = max(self.ticks, int(4 * longest_s * spec.control_hz))
        for tick, (observation, _) in enumerate(self._play(robot, ticks)):
            for name, times in seen.items():
                time_ns = observation.images[name].time_ns
                ahead_s = (time_ns - observation.time_ns) / 1e9
                what = f"tick {tick}: a frame of '{name}' is"
                require(ahead_s <= 0, f"{what} {ahead_s:.3f} s newer than its observation.")
                require(not times or time_ns >= times[-1], f"{what} older than the last.")
                times.append(time_ns)
        for name, times in seen.items():
            more = len(set(times)) > 1
            require(more, f"'{name}' gave one frame in {ticks} ticks: it is frozen, or stamped by read().")

    def write(self, robot: Robot) -> None:
        for _, feedback in self._play(robot):
            _check_executed(robot.spec, feedback)
            require(bool(np.isfinite(feedback.reward)), f"reward {feedback.reward} is not finite.")

    def write_limits(self, robot: Robot) -> None:
        self.start(robot)
        spec = robot.spec
        for far in (spec.action_high() + 1, spec.action_low() - 1):
            _check_executed(spec, robot.write(far.astype(np.float32)))
            self.wait(spec)

    def write_invalid(self, robot: Robot) -> None:
        self.start(robot)
        da = robot.spec.action_dim
        for bad, what in (
            (np.full(da, np.nan, np.float32), "NaN"),
            (np.full(da, np.inf, np.float32), "infinity"),
            (np.zeros(da + 1, np.float32), f"{da + 1} numbers"),
        ):
            refuses(lambda bad=bad: robot.write(bad), f"write() of {what}", InvalidDataError)  # type: ignore[misc]
        finite = bool(np.isfinite(robot.read().state).all())
        require(finite, "the state is not finite after a refused action.")

    def hold(self, robot: Robot) -> None:
        self.start(robot)
        last = robot.write(self.action(robot, 0, self._rest(robot))).executed
        held = robot.write(hold_action(robot.spec, last)).executed
        for d, value in zip(robot.spec.action, held, strict=True):
            moved = d.meaning is not CommandType.absolute and value != 0
            require(not moved, f"told to hold, it executed {value} {d.unit} of '{d.name}'.")

    def deterministic(self, robot: Robot) -> None:
        robot.connect()
        first = self._trajectory(robot, 0)
        # leaves traces that the second run must not see
        self._trajectory(robot, 1)
        second = self._trajectory(robot, 0)
        robot.close()
        with closing(self.make()) as another:
            another.connect()
            fresh = self._trajectory(another, 0)
        for again, where in ((second, "after another episode"), (fresh, "on a fresh robot")):
            same = first.shape == again.shape and np.array_equal(first, again, equal_nan=True)
            what = f"the same seed and actions gave another trajectory {where}"
            require(same, f"{what}; rebuild all of the scene in reset().")

    # --- moving ---------------------------------------------------------------------------------------------------

    def start(self, robot: Robot) -> None:
        robot.connect()
        self._reset(robot, 0)

    def _reset(self, robot: Robot, seed: int) -> None:
        while isinstance(robot, HoldingRobot):
            try:
                robot.reset(self.task, seed)
                return
            except RobotMovingError:
                robot.hold()
        robot.reset(self.task, seed)

    def wait(self, spec: RobotSpec) -> None:
        """One control period."""
        self.clock.sleep_until(self.clock.now_ns() + spec.period_ns)

    def action(self, robot: Robot, tick: int, rest: np.ndarray | None = None) -> np.ndarray:
        """float32[da]: a small swing about the middle of each dimension's limits.

        `rest`, float32[ds]: the state of a robot that must be handled gently: the swing is about it and grows softly.
        """
        low, high = robot.spec.action_low(), robot.spec.action_high()
        phase = np.sin(0.3 * tick + np.arange(len(low))) * (_GENTLE_SCALE if self.gentle else _SCALE)
        middle = (low + high) / 2
        if rest is not None:
            middle = rest_action(robot.spec, rest)
            phase *= min(1.0, tick / 20)
        return limit_action(robot.spec, (middle + (high - low) / 2 * phase).astype(np.float32))

    def _rest(self, robot: Robot) -> np.ndarray | None:
        """float32[ds]: where a robot that must be handled gently stands."""
        return robot.read().state if self.gentle else None

    def _play(self, robot: Robot, ticks: int = 0) -> Iterator[tuple[Observation, Feedback]]:
        self.start(robot)
        rest = self._rest(robot)
        for tick in range(ticks or self.ticks):
            observation = robot.read()
            yield observation, robot.write(self.action(robot, tick, rest))
            self.wait(robot.spec)

    def _trajectory(self, robot: Robot, seed: int) -> np.ndarray:
        self._reset(robot, seed)
        rows = []
        for tick in range(self.ticks):
            rows.append(robot.read().state)
            robot.write(self.action(robot, tick))
        return np.array(rows)


def _check_executed(spec: RobotSpec, feedback: Feedback) -> None:
    executed = feedback.executed
    right = executed.shape == (spec.action_dim,) and executed.dtype == np.float32
    require(right, f"executed is {executed.dtype}{list(executed.shape)}; it must be float32[{spec.action_dim}].")
    for d, value in zip(spec.action, executed, strict=True):
        inside = bool(np.float32(d.low) <= value <= np.float32(d.high))
        require(inside, f"executed {value} {d.unit} of '{d.name}', limits {d.low} to {d.high}: use limit_action().")


def check_picture(camera: CameraSpec, frame: Frame) -> None:
    got = f"{frame.image.dtype}{list(frame.image.shape)}"
    wanted = f"uint8[{camera.height}, {camera.width}, 3]"
    require(got == wanted, f"'{camera.name}' gave {got}; the spec says {wanted}.")


def require(holds: bool | np.bool_, otherwise: str) -> None:
    if not holds:
        raise RuleBrokenError(otherwise)


def refuses(call: Callable[[], object], what: str, kind: type[FleetError] = FleetError) -> FleetError:
    """What `call` raises, which must be of `kind`."""
    try:
        call()
    except kind as error:
        return error
    raise RuleBrokenError(f"{what} must raise {kind.__name__} that says what to do.")


def run_rules(
    make: Callable[[], Any], rules: Iterable[Callable[[Any], None]], notify: Callable[[str], None] = lambda name: None
) -> Iterator[CheckOutcome]:
    """The outcome of each rule on a device of its own; `notify` is called with its function's name before it runs."""
    for rule in rules:
        notify(rule.__name__)
        message = ""
        try:
            device = make()
            try:
                rule(device)
            finally:
                getattr(device, "close", lambda: None)()
        except RuleBrokenError as broken:
            message = str(broken)
        except Exception as error:  # noqa: BLE001 - a driver may raise anything; the report must say what
            message = f"raised {type(error).__name__}: {error}"
        yield CheckOutcome(rule.__name__, not message, message)
