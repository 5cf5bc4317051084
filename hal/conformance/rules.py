"""The `Robot` contract as rules that run on any driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from hal.interfaces.robot import Feedback, Robot
from hal.safety.limiter import hold_action, limit_action, rest_action
from wire.errors import ConfigError, FleetError, InvalidDataError
from wire.types import CommandType, Observation, RobotSpec


class RuleBrokenError(Exception):
    """A rule is broken; the text says how and what to do."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Each rule on a robot of its own, from `make`."""

    make: Callable[[], Robot]
    task: str
    seed: int
    ticks: int
    scale: float
    seeded: bool
    sleep: Callable[[float], None]
    move: bool = True
    gentle: bool = False
    """swing about the pose the robot stands in and never command a limit: for hardware"""

    def rules(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "spec", self.spec
        if not self.move:
            yield "connect", self.connect
            return
        yield "connect_twice", self.connect_twice
        yield "close_twice", self.close_twice
        yield "unready_is_refused", self.unready_is_refused
        yield "unknown_task", self.unknown_task
        yield "read", self.read
        yield "read_limits", self.read_limits
        yield "time", self.time
        yield "cameras", self.cameras
        yield "write", self.write
        if not self.gentle:
            yield "write_limits", self.write_limits
        yield "write_invalid", self.write_invalid
        yield "hold", self.hold
        if self.seeded:
            yield "deterministic", self.deterministic

    # --- the rules ------------------------------------------------------------------------------------------------

    def spec(self) -> None:
        robot = self.make()
        require(isinstance(robot, Robot), "lacks a method of hal.interfaces.robot.Robot; add it.")
        require(isinstance(robot.spec, RobotSpec), "`spec` must be a RobotSpec, set by the constructor.")
        require(robot.spec.action_dim > 0, "the spec has no action; name at least one dimension.")
        for d in (*robot.spec.state, *robot.spec.action):
            require(np.isfinite([d.low, d.high]).all(), f"'{d.name}' has no finite limits; give its real range.")
        for d in robot.spec.action:
            still = d.meaning is CommandType.absolute or d.low <= 0 <= d.high
            require(still, f"action '{d.name}' is a {d.meaning.value} but 0 is not within its limits: it cannot hold.")
        require(robot.spec.hash == self.make().spec.hash, "two robots of the same configuration have other specs.")

    def connect(self) -> None:
        with closing(self.make()) as robot:
            robot.connect()

    def connect_twice(self) -> None:
        with closing(self.make()) as robot:
            robot.connect()
            robot.connect()
            robot.reset(self.task, self.seed)

    def close_twice(self) -> None:
        robot = self.make()
        robot.close()
        robot.connect()
        robot.reset(self.task, self.seed)
        robot.close()
        robot.close()
        _refuses(robot.read, "read() after close()")

    def unready_is_refused(self) -> None:
        with closing(self.make()) as robot:
            _refuses(lambda: robot.reset(self.task, self.seed), "reset() before connect()")
            robot.connect()
            _refuses(robot.read, "read() before reset()")
            _refuses(lambda: robot.write(robot.spec.action_low()), "write() before reset()")

    def unknown_task(self) -> None:
        with closing(self.make()) as robot:
            robot.connect()
            wrong = self.task + "-x"
            try:
                robot.reset(wrong, self.seed)
            except ConfigError as error:
                require(wrong in str(error), f"the error does not name the task '{wrong}': {error}")
                return
        raise RuleBrokenError(f"reset('{wrong}') must raise ConfigError with the nearest known task.")

    def read(self) -> None:
        spec = self.make().spec
        for observation, _ in self._play():
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
                got = f"{frame.image.dtype}{list(frame.image.shape)}"
                wanted = f"uint8[{camera.height}, {camera.width}, 3]"
                require(got == wanted, f"'{camera.name}' gave {got}; the spec says {wanted}.")

    def read_limits(self) -> None:
        spec = self.make().spec
        for tick, (observation, _) in enumerate(self._play()):
            for d, value in zip(spec.state, observation.state, strict=False):
                inside = np.float32(d.low) <= value <= np.float32(d.high)
                require(
                    inside or np.isnan(value),
                    f"tick {tick}: '{d.name}' is {value} {d.unit}, limits {d.low} to {d.high}.",
                )

    def time(self) -> None:
        before = -1
        for tick, (observation, _) in enumerate(self._play()):
            now = observation.time_ns
            require(isinstance(now, int), "`time_ns` must be an int.")
            require(
                now >= before,
                f"tick {tick}: time went back by {(before - now) / 1e6:.3f} ms; stamp by one monotonic clock.",
            )
            before = now

    def cameras(self) -> None:
        spec = self.make().spec
        seen: dict[str, list[int]] = {camera.name: [] for camera in spec.cameras}
        longest_s = max((1 / camera.rate_hz for camera in spec.cameras), default=0.0)
        ticks = max(self.ticks, int(4 * longest_s * spec.control_hz))
        for tick, (observation, _) in enumerate(self._play(ticks)):
            for name, times in seen.items():
                frame = observation.images[name]
                ahead_s = (frame.time_ns - observation.time_ns) / 1e9
                require(
                    ahead_s <= 0, f"tick {tick}: a frame of '{name}' is {ahead_s:.3f} s newer than its observation."
                )
                require(
                    not times or frame.time_ns >= times[-1], f"tick {tick}: a frame of '{name}' is older than the last."
                )
                times.append(frame.time_ns)
        for name, times in seen.items():
            require(
                len(set(times)) > 1, f"'{name}' gave one frame in {ticks} ticks: it is frozen, or stamped by read()."
            )

    def write(self) -> None:
        spec = self.make().spec
        for _, feedback in self._play():
            _check_executed(spec, feedback)
            require(bool(np.isfinite(feedback.reward)), f"reward {feedback.reward} is not finite.")

    def write_limits(self) -> None:
        with closing(self.make()) as robot:
            self.start(robot)
            spec = robot.spec
            for far in (spec.action_high() + 1, spec.action_low() - 1):
                wide = far.astype(np.float32) * np.float32(1.0)
                _check_executed(spec, robot.write(wide))
                self.sleep(1 / spec.control_hz)

    def write_invalid(self) -> None:
        with closing(self.make()) as robot:
            self.start(robot)
            da = robot.spec.action_dim
            for bad, what in (
                (np.full(da, np.nan, np.float32), "NaN"),
                (np.full(da, np.inf, np.float32), "infinity"),
                (np.zeros(da + 1, np.float32), f"{da + 1} numbers"),
            ):
                _refuses(lambda bad=bad: robot.write(bad), f"write() of {what}", InvalidDataError)  # type: ignore[misc]
            observation = robot.read()
            require(bool(np.isfinite(observation.state).all()), "the state is not finite after a refused action.")

    def hold(self) -> None:
        with closing(self.make()) as robot:
            self.start(robot)
            last = robot.write(self.first(robot)).executed
            held = robot.write(hold_action(robot.spec, last)).executed
            for d, value in zip(robot.spec.action, held, strict=True):
                moved = d.meaning is not CommandType.absolute and value != 0
                require(not moved, f"told to hold, it executed {value} {d.unit} of '{d.name}'.")

    def deterministic(self) -> None:
        with closing(self.make()) as robot:
            robot.connect()
            first = self._trajectory(robot, self.seed)
            other = self._trajectory(robot, self.seed + 1)
            second = self._trajectory(robot, self.seed)
        with closing(self.make()) as robot:
            robot.connect()
            fresh = self._trajectory(robot, self.seed)
        del other  # only there to leave traces that the second run must not see
        for again, where in ((second, "after another episode"), (fresh, "on a fresh robot")):
            same = first.shape == again.shape and np.array_equal(first, again, equal_nan=True)
            require(
                same, f"the same seed and actions gave another trajectory {where}; rebuild all of the scene in reset()."
            )

    # --- moving ---------------------------------------------------------------------------------------------------

    def start(self, robot: Robot) -> None:
        robot.connect()
        robot.reset(self.task, self.seed)

    def action(self, robot: Robot, tick: int, rest: np.ndarray | None = None) -> np.ndarray:
        """float32[da]: a small swing about the middle of each dimension's limits.

        `rest`, float32[ds]: the state of a robot that must be handled gently: the swing is about it and grows softly.
        """
        low, high = robot.spec.action_low(), robot.spec.action_high()
        phase = np.sin(0.3 * tick + np.arange(len(low))) * self.scale
        middle = (low + high) / 2
        if rest is not None:
            middle = rest_action(robot.spec, rest)
            phase *= min(1.0, tick / 20)
        return limit_action(robot.spec, (middle + (high - low) / 2 * phase).astype(np.float32))

    def first(self, robot: Robot) -> np.ndarray:
        """float32[da]: an action to begin with."""
        return self.action(robot, 0, robot.read().state if self.gentle else None)

    def _play(self, ticks: int = 0) -> Iterator[tuple[Observation, Feedback]]:
        with closing(self.make()) as robot:
            self.start(robot)
            rest = robot.read().state if self.gentle else None
            for tick in range(ticks or self.ticks):
                observation = robot.read()
                yield observation, robot.write(self.action(robot, tick, rest))
                self.sleep(1 / robot.spec.control_hz)

    def _trajectory(self, robot: Robot, seed: int) -> np.ndarray:
        robot.reset(self.task, seed)
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
        inside = np.float32(d.low) <= value <= np.float32(d.high)
        require(
            bool(inside),
            f"executed {value} {d.unit} of '{d.name}', limits {d.low} to {d.high}: use limit_action().",
        )


def require(holds: bool | np.bool_, otherwise: str) -> None:
    if not holds:
        raise RuleBrokenError(otherwise)


def _refuses(call: Callable[[], object], what: str, kind: type[FleetError] = FleetError) -> None:
    try:
        call()
    except kind:
        return
    raise RuleBrokenError(f"{what} must raise {kind.__name__} that says what to do.")
