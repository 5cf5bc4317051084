"""What a robot must offer: five methods and its spec. Everything else wraps it.

A driver's constructor only stores its configuration; `connect` is what touches hardware.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from wire.errors import ConfigError, InvalidDataError, RobotError, suggest
from wire.stop_state import StopState
from wire.types import Frame, Observation, RobotSpec

_FLOAT32 = np.dtype(np.float32)
_Scene = TypeVar("_Scene")

ROBOT = "VLA_FLEET_ROBOT"
"""environment variable with the robot's name in each of its processes, for drivers that tell apart what they open"""


class Feedback(msgspec.Struct, frozen=True, eq=False):
    """What came of an action."""

    executed: np.ndarray
    """float32[da]: what the robot really did with the action it was given"""
    reward: float = 0.0
    success: bool = False
    """the task is done, as far as the robot or its simulator can tell"""
    terminated: bool = False
    """the episode ended by itself with this action, well (`success`) or badly: there is nothing more to act on"""
    truncated: bool = False
    """the environment was cut short after this action, by a time limit of its own: the task would have gone on"""
    still: bool = True
    """nothing of the robot moves by it; said by whoever limits the robot, not by a driver"""
    held_ticks: int = 0
    """for so many control periods since the command before it was held, for none came in time; said by its host"""
    stop: StopState | None = None
    """who stops or slows the robot, None when nobody does; one that is not `free` was not commanded, but brought to a
    stop"""


class RestPose(msgspec.Struct, frozen=True, eq=False):
    """Where a robot has to move before an episode begins."""

    action: np.ndarray
    """float32[da]: the target of each absolute dimension; the others rest"""
    speed: float
    """share of a dimension's range per second"""
    tolerance: float
    """share of a dimension's range that it may be off when it has arrived"""


@runtime_checkable
class Robot(Protocol):
    """A robot that can be read and commanded once per control period."""

    spec: RobotSpec

    def connect(self) -> None:
        """Open the hardware or simulator. Raises `RobotError` that says what to do."""
        ...

    def reset(self, task: str, seed: int) -> RestPose | None:
        """Bring the robot and its scene to the start of `task` (a name from `tasks`). May take seconds.

        A robot that has to move for it says where to: it is then commanded there, within its limits and stoppable, by
        whoever resets it. Raises `ConfigError` for an unknown task, with the nearest known one.
        """
        ...

    def read(self) -> Observation:
        """The newest observation, without waiting for a camera."""
        ...

    def write(self, action: np.ndarray) -> Feedback:
        """Execute `action`, float32[da] within the spec's limits, for one control period; see `returns_by_steps`."""
        ...

    def close(self) -> None:
        """Bring the robot to a safe stop and give it back. May be called twice."""
        ...


@runtime_checkable
class StoppableRobot(Protocol):
    """A robot that has a way of its own to stop what moves."""

    def stop_motion(self) -> None:
        """Stop whatever moves, at once. Called by another thread while another call is under way, also one that blocks;
        returns within a second. Raises `RobotError` when it could not: then it is called again.
        """
        ...


@runtime_checkable
class HoldingRobot(Robot, Protocol):
    """A robot behind its limits: `hal.safety.limited_robot`, also in another process."""

    def hold(self) -> Feedback:
        """One control period of coming to hold."""
        ...

    def stop_state(self) -> StopState:
        """Who keeps the robot from moving."""
        ...

    def stop(self, stop: str, who: str) -> StopState:
        """As `StopLatch.stop`; at once, whatever else the robot is doing. Raises `RobotError` if nobody hears it."""
        ...

    def release(self, stop: str) -> StopState:
        """As `StopLatch.release`. Raises as `stop`."""
        ...

    def start(self, after: str = "") -> StopState:
        """As `StopLatch.start`. Raises as `stop`."""
        ...


def check_task(who: str, task: str, known: Collection[str]) -> None:
    """Raise `ConfigError`, which begins with `who`, with the nearest known name if `task` is not `known`."""
    if task not in known:
        raise ConfigError(f"{who}: no task '{task}'.{suggest(task, known)} It knows: {', '.join(known)}.")


def check_reset(who: str, task: str, known: Sequence[str], seed: int, connected: bool) -> None:
    """What every `Robot.reset` refuses first. Raises `ConfigError` for a task that is not `known` or a negative seed,
    `RobotError` before `connect`; `who` begins the text.
    """
    check_task(who, task, known)
    if seed < 0:
        raise ConfigError(f"{who}: seed {seed} is negative.")
    if not connected:
        raise RobotError(f"{who}: reset before connect(); call connect() first.")


def require_scene(who: str, what: str, scene: _Scene | None) -> _Scene:
    """`scene`, None before the first `Robot.reset`: raises `RobotError` then, of the call `what`."""
    if scene is None:
        raise RobotError(f"{who}: {what} without a scene; call reset() first.")
    return scene


def validate_observation(spec: RobotSpec, observation: Observation) -> Observation:
    """`observation` if its parts are of the kinds they should be, with numpy's numbers as plain ones.

    Raises `InvalidDataError` naming the part. Whether its shapes and numbers fit the spec is another question.
    """
    if not isinstance(observation, Observation):
        raise _invalid(spec, f"read() gave {type(observation).__name__}, not an Observation.")
    state, time_ns, task, images = observation.state, observation.time_ns, observation.task, observation.images
    if not isinstance(state, np.ndarray) or state.dtype.kind != "f":
        kind = state.dtype if isinstance(state, np.ndarray) else type(state).__name__
        raise _invalid(spec, f"read() gave a state of {kind}; float32[{spec.state_dim}] is expected.")
    plain = type(time_ns) is int and time_ns.bit_length() < 64 and type(task) is str and task.isascii()
    for camera, frame in images.items():
        if not isinstance(frame, Frame) or not isinstance(frame.image, np.ndarray):
            raise _invalid(spec, f"read() gave no Frame with an array as image for camera '{camera}'.")
        plain = plain and type(camera) is str and camera.isascii()
        plain = plain and type(frame.time_ns) is int and frame.time_ns.bit_length() < 64
    if not plain:
        time_ns = _require(spec, "read() gave time_ns", time_ns, _WHOLE)
        task = _require(spec, "read() gave the task", task, _TEXT)
        images = {}
        for camera, frame in observation.images.items():
            stamped = _require(spec, f"read() gave a frame of camera '{camera}' with time_ns", frame.time_ns, _WHOLE)
            name = _require(spec, "read() gave a camera named", camera, _TEXT)
            images[name] = msgspec.structs.replace(frame, time_ns=stamped)
    elif state.dtype == _FLOAT32:
        return observation
    return Observation(time_ns, np.asarray(state, np.float32), images, task)


def validate_feedback(spec: RobotSpec, feedback: Feedback) -> Feedback:
    """`feedback` if it can be recorded, with its action as float32. Raises `InvalidDataError` naming what cannot."""
    executed = validate_executed(spec, feedback)
    outcome = validate_outcome(spec, feedback)
    return Feedback(executed, *outcome, feedback.still, feedback.held_ticks, feedback.stop)


def validate_executed(spec: RobotSpec, feedback: Feedback) -> np.ndarray:
    """float32[da]: what was executed. Raises as `validate_feedback`."""
    if not isinstance(feedback, Feedback):
        raise _invalid(spec, f"write() gave {type(feedback).__name__}, not a Feedback.")
    given = executed = np.asarray(feedback.executed)
    fits = given.shape == (len(spec.action),) and given.dtype.kind in "fiu"
    if fits and given.dtype != _FLOAT32:
        with np.errstate(over="ignore"):
            executed = given.astype(np.float32)
    # As float32: what is finite as float64 may be none then.
    if not fits or not all(map(math.isfinite, executed.tolist())):
        what = f"write() gave {_text_of(given)} as what it executed"
        raise _invalid(spec, f"{what}; float32[{spec.action_dim}], all finite, is expected.")
    return executed


def validate_outcome(spec: RobotSpec, feedback: Feedback) -> tuple[float, bool, bool, bool]:
    """(reward, success, terminated, truncated). Raises as `validate_feedback`."""
    reward, success, terminated, truncated = feedback.reward, feedback.success, feedback.terminated, feedback.truncated
    if type(reward) is not float or not math.isfinite(reward):
        reward = _require(spec, "write() gave the reward", reward, _NUMBER)
    if type(success) is not bool:
        success = _require(spec, "write() gave success", success, _TRUTH)
    if type(terminated) is not bool:
        terminated = _require(spec, "write() gave terminated", terminated, _TRUTH)
    if type(truncated) is not bool:
        truncated = _require(spec, "write() gave truncated", truncated, _TRUTH)
    return reward, success, terminated, truncated


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


_WHOLE = "a whole number of 64 bits", lambda value: int(np.int64(operator.index(value)))
_NUMBER = "a number that is finite", _finite
_TRUTH = "True or False", bool
_TEXT = "a text in Unicode", lambda value: value.encode().decode()


def _invalid(spec: RobotSpec, text: str) -> InvalidDataError:
    return InvalidDataError(f"robot '{spec.embodiment}': {text}")


def _require(spec: RobotSpec, what: str, value: object, kind: tuple[str, Callable[[Any], Any]]) -> Any:
    """`value`, of numpy or not, as a plain one. Raises `InvalidDataError` with `what`."""
    try:
        return kind[1](value)
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise _invalid(spec, f"{what} {_text_of(value)}; {kind[0]} is expected.") from error


def _text_of(value: object) -> str:
    return f"{repr(value)[:80]} ({type(value).__name__})"


def request_previews(robot: Robot, wanted: bool) -> None:
    """Somebody wants frames to have a `Frame.preview` now and then, or nobody does any more.

    A robot to which larger pictures cost something has a method of this name; without one it goes on as it is. Nobody
    wants them before the first call.
    """
    request = getattr(robot, "request_previews", None)
    if request is not None:
        request(wanted)


def is_real(robot: Robot) -> bool:
    """Whether it can hurt somebody: a driver says so by an attribute `real`, without one it is a simulator."""
    return bool(getattr(robot, "real", False))


def reach(robot: Robot) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), float32[da]: what this very robot can be told. A driver whose calibration or motors narrow its spec
    says so by an attribute `reach`, so that the robot brakes before those ends; without one it is the spec's.
    """
    low, high = robot.spec.action_low(), robot.spec.action_high()
    own = getattr(robot, "reach", None)
    return (low, high) if own is None else (np.maximum(low, own[0]), np.minimum(high, own[1]))


def returns_by_steps(robot: Robot) -> bool:
    """Whether `write` takes what lies between an absolute dimension that is measured outside its reach and its reach,
    so that the robot comes back within its limits; a driver says so by an attribute `returns_by_steps`. Without one
    what it is told is clipped, by it or by its motors, and the way back would be one jump.
    """
    return bool(getattr(robot, "returns_by_steps", False))


def is_stoppable(robot: Robot) -> bool:
    """Whether it keeps the `StoppableRobot` protocol."""
    # Not by isinstance: one that wraps another has what that has.
    return getattr(robot, "stop_motion", None) is not None


def stop_motion(robot: Robot) -> bool:
    """Stop whatever moves by the robot's own way; False when it has none (`StoppableRobot`). Raises what it raises."""
    stop = getattr(robot, "stop_motion", None)
    if stop is not None:
        stop()
    return stop is not None


def stop_velocities(robot: Robot) -> bool:
    """Tell what is driven by velocity to stand, before there is a scene; False when the robot has no method of this
    name, which one needs whose `write` takes nothing then. Raises what it raises.
    """
    stop = getattr(robot, "stop_velocities", None)
    if stop is not None:
        stop()
    return stop is not None


class Teleoperator(Protocol):
    """Somebody or something that can control a robot in the policy's place."""

    def propose(self, observation: Observation) -> np.ndarray | None:
        """float32[da]: the action wanted now, or None when the operator wants none."""
        ...

    def progress(self) -> float:
        """How far the running episode is from done, in any unit that shrinks as the task advances."""
        ...
