"""Any Gymnasium environment as a robot, by its id (Towers et al. 2024, "Gymnasium", arXiv 2407.17032).

One `step` of the environment is one control period; the control loop paces it. After an episode has terminated, or was
truncated, nothing moves any more: until it is reset the robot answers with its last state, and that it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from hal.cameras.picture import make_frame, to_rgb
from hal.drivers.gym.spec import RENDER, GymConfig, GymTask, check_spaces, gym_spec, make_env, read_spaces
from hal.interfaces.robot import Feedback, check_reset, require_scene
from hal.safety.limiter import hold_action, limit_action
from hal.safety.rest import rest_action
from wire.clock import Clock, MonotonicClock
from wire.errors import FleetError, InvalidDataError, RobotError
from wire.types import Frame, Observation

_Result = TypeVar("_Result")


class GymRobot:
    """Keeps the `Robot` protocol. Environments are made at the first reset that needs them, and kept."""

    def __init__(self, config: GymConfig, clock: Clock | None = None) -> None:
        """Stores; `clock` stamps observations and frames (default: the machine's monotonic clock).

        Where the configuration leaves names, limits or the rate to the environment, that is made here, once in a
        process, to read its spaces. Raises `ConfigError` for what it lacks and `RobotError` when it cannot be made.
        """
        self.config = config
        self.spec, self._parts = gym_spec(config)
        self._tasks = {task.name: task for task in config.known_tasks()}
        self.tasks = tuple(self._tasks)
        self.task = self._text = ""
        self._clock = clock or MonotonicClock()
        self._connected = False
        self._envs: dict[str, Any] = {}
        self._env: Any = None
        self._seen: Any = None
        self._tick = 0
        self._success = self._terminated = self._truncated = False
        self._executed: np.ndarray = np.zeros(self.spec.action_dim, np.float32)
        self._frames: dict[str, tuple[int, Frame]] = {}

    def connect(self) -> None:
        """Make the environment of the first task and compare it with the spec. Twice is once.

        Raises `RobotError` when it cannot be made, `ConfigError` when it is another one than the spec says.
        """
        if not self._connected:
            self._env_for(self._tasks[self.tasks[0]], 0)
            self._connected = True

    def reset(self, task: str, seed: int) -> None:
        """Begin an episode of `task`. Raises `ConfigError` for an unknown task, `RobotError` before `connect`."""
        check_reset(self._where, task, self.tasks, seed, self._connected)
        wanted = self._tasks[task]
        self._env, self.task = None, ""
        env = self._env_for(wanted, seed)
        self._seen, _ = self._call("reset", lambda: env.reset(seed=seed, options=wanted.options or None))
        self._env, self._tick = env, 0
        self._success = self._terminated = self._truncated = False
        self._frames.clear()
        self.task, self._text = task, wanted.instruction or task.replace("-", " ").replace("_", " ")
        self._executed = rest_action(self.spec, np.nan_to_num(self._state()))
        self._capture()

    def read(self) -> Observation:
        """The state, float32[ds], the newest frames, the instruction. Raises `RobotError`."""
        require_scene(self._where, "read", self._env)
        self._capture()
        frames = {name: frame for name, (_, frame) in self._frames.items()}
        return Observation(self._clock.now_ns(), self._state(), frames, self._text)

    def write(self, action: np.ndarray) -> Feedback:
        """One step of the environment with `action`, float32[da], clipped to the limits.

        Raises `InvalidDataError` for another shape or a number that is not finite; nothing moves then.
        """
        require_scene(self._where, "write", self._env)
        executed = limit_action(self.spec, action)
        if self._terminated or self._truncated:
            return self._feedback(hold_action(self.spec, self._executed), 0.0)
        space = self._env.action_space
        # a copy, as some environments scale the action in place
        given = executed.astype(space.dtype).reshape(space.shape).copy()
        self._seen, reward, terminated, truncated, info = self._call("step", lambda: self._env.step(given))
        self._tick += 1
        self._executed = executed
        self._terminated, self._truncated = bool(terminated), bool(truncated)
        ended_well = terminated and self.config.success_when_terminated
        told = next((info[key] for key in self.config.success_keys if key in info), ended_well)
        self._success = bool(np.all(np.asarray(told, float) > 0.5))
        return self._feedback(executed, float(reward))

    def close(self) -> None:
        """Close all environments. May be called twice."""
        envs, self._envs, self._env, self._seen = self._envs, {}, None, None
        self._connected, self.task = False, ""
        self._frames.clear()
        for env in envs.values():
            self._call("close", env.close)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _feedback(self, executed: np.ndarray, reward: float) -> Feedback:
        return Feedback(executed, reward, self._success, terminated=self._terminated, truncated=self._truncated)

    @property
    def _where(self) -> str:
        return f"robot '{self.spec.embodiment}'"

    def _env_for(self, task: GymTask, seed: int) -> Any:
        key = repr((task.env_id, task.kwargs))
        if self.config.seed_argument and key in self._envs:
            self._call("close", self._envs.pop(key).close)
        if key not in self._envs:
            env = make_env(self.config, task, seed)
            check_spaces(self.config, self._parts, self.spec, read_spaces(self.config, env))
            self._envs[key] = env
        return self._envs[key]

    def _call(self, what: str, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except FleetError:
            raise
        except Exception as error:  # whatever a simulator does
            self._env, self.task = None, ""
            raise RobotError(
                f"{self._where}: {what}() of '{self.config.env_id}' failed: {type(error).__name__}: {error}. "
                "Reset it to go on."
            ) from error

    def _state(self) -> np.ndarray:
        """float32[ds]"""
        values = [np.asarray(self._value(part.key, "state"), np.float32).ravel() for part in self._parts]
        state = np.concatenate(values)
        if state.shape != (self.spec.state_dim,):
            raise RobotError(
                f"{self._where}: the observation has {len(state)} numbers, its space says {self.spec.state_dim}."
            )
        return state

    def _value(self, key: str, what: str) -> Any:
        """What lies at `a.b` in nested mappings; all of it for ''."""
        value = self._seen
        for name in key.split(".") if key else ():
            if not isinstance(value, Mapping) or name not in value:
                raise RobotError(f"{self._where}: {what} '{key}' is not in what the environment gave.")
            value = value[name]
        return value

    def _capture(self) -> None:
        """A new frame of each camera that is due; a frame is drawn when it is wanted, in the caller's thread."""
        for asked, camera in zip(self.config.cameras, self.spec.cameras, strict=True):
            due = self._tick // round(self.spec.control_hz / camera.rate_hz)
            if camera.name in self._frames and self._frames[camera.name][0] >= due:
                continue
            time_ns = self._clock.now_ns()
            drawn = asked.source == RENDER
            picture = self._call("render", self._env.render) if drawn else self._value(asked.source, "camera")
            try:
                preview = asked.preview_height, asked.preview_width
                frame = make_frame(time_ns, to_rgb(picture), (camera.height, camera.width), preview)
            except InvalidDataError as error:
                raise RobotError(f"{self._where}: camera '{camera.name}' ({asked.source}): {error}") from error
            self._frames[camera.name] = due, frame
