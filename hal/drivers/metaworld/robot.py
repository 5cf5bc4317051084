"""MetaWorld (Yu et al. 2020, "Meta-World") as a robot: a simulated Sawyer arm that is paced like a real one.

The action is what MetaWorld takes: a set-point that moves by up to 1 cm per step in x, y, z, and a gripper effort.
The recipe `pixels` sees a camera and its own hand; `state` sees the poses of all objects and no camera.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hal.drivers.metaworld.camera import InlineCamera, ThreadedMetaWorldCamera
from hal.drivers.metaworld.changes import UNCHANGED, WorldChanges
from hal.drivers.metaworld.simulation import CONTROL_HZ, Simulation, import_simulator
from hal.drivers.metaworld.tasks import KNOWN_TASKS, PIXEL_TASKS, instruction
from hal.interfaces.robot import Feedback, check_reset, check_task, require_scene
from hal.safety.limiter import limit_action
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError
from wire.types import CameraSpec, CommandType, Dimension, Frame, Observation, RobotSpec


@dataclass(frozen=True, slots=True)
class MetaWorldConfig:
    """What the robot sees and which tasks it knows. Raises `ConfigError` for values that cannot work."""

    tasks: tuple[str, ...] = PIXEL_TASKS
    """MetaWorld names without `-v3`"""
    observation: Literal["pixels", "state"] = "pixels"
    """pixels: camera and 4 numbers of the hand. state: all 39 numbers of MetaWorld, no camera"""
    camera: str = "corner2"
    image_px: int = 64
    """width and height of the policy's image"""
    preview_px: int = 128
    """width and height of the picture that is drawn; the policy's is its area average"""
    camera_hz: float = 20.0
    render_in_thread: bool = False
    """False: drawn between two ticks, deterministic, for evaluation. True: beside them, for a robot at its own rate"""
    changes: WorldChanges = UNCHANGED
    """what of the world is other than MetaWorld ships it; the spec says nothing of it"""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError(f"MetaWorldConfig: no tasks; choose from {', '.join(KNOWN_TASKS)}.")
        if self.observation not in ("pixels", "state"):
            raise ConfigError(f"MetaWorldConfig: observation '{self.observation}' is neither pixels nor state.")
        for task in self.tasks:
            check_task("MetaWorldConfig", task, KNOWN_TASKS)
        ticks = CONTROL_HZ / self.camera_hz if self.camera_hz > 0 else 0
        if ticks < 1 or ticks != int(ticks):
            raise ConfigError(
                f"MetaWorldConfig: camera_hz {self.camera_hz:g} must divide the control rate of {CONTROL_HZ:g} Hz: "
                "try 20, 40 or 80."
            )
        if not 1 <= self.image_px <= self.preview_px <= 2048:
            raise ConfigError(
                f"MetaWorldConfig: image_px {self.image_px} must be 1 to preview_px, and preview_px "
                f"({self.preview_px}) at most 2048."
            )


def metaworld_spec(config: MetaWorldConfig) -> RobotSpec:
    """The spec of a robot with `config`; needs no simulator."""
    hand = (
        *_axes("hand_{}", "m", (-0.525, 0.348, -0.0525), (0.525, 1.025, 0.7)),
        Dimension("gripper_opening", "1", -1.0, 1.0),
    )
    state = hand
    if config.observation == "state":
        state = (*_hand_and_objects(hand, ""), *_hand_and_objects(hand, "_before"), *_position("goal_{}"))
    camera = CameraSpec(config.camera, config.image_px, config.image_px, config.camera_hz)
    return RobotSpec(
        embodiment=f"metaworld-sawyer-{config.observation}",
        state=state,
        action=(
            *(Dimension(f"move_{axis}", "cm/step", -1.0, 1.0, CommandType.delta) for axis in "xyz"),
            Dimension("gripper_effort", "1", -1.0, 1.0),
        ),
        cameras=(camera,) if config.observation == "pixels" else (),
        control_hz=CONTROL_HZ,
    )


class MetaWorldRobot:
    """Keeps the `Robot` protocol. Each task's simulator is made at its first reset (about 0.1 s) and kept."""

    def __init__(self, config: MetaWorldConfig | None = None, clock: Clock | None = None) -> None:
        """Only stores; `clock` stamps observations and frames (default: the machine's monotonic clock)."""
        self.config = config or MetaWorldConfig()
        self.spec = metaworld_spec(self.config)
        self.tasks = self.config.tasks
        self._who = f"robot '{self.spec.embodiment}'"
        self._clock = clock or MonotonicClock()
        self._connected = False
        self._camera: InlineCamera | ThreadedMetaWorldCamera | None = None
        self._simulations: dict[str, Simulation] = {}
        self._simulation: Simulation | None = None
        self._instruction = ""
        self._previews = False

    def connect(self) -> None:
        """Import the simulator and open the camera. Twice is once.

        Raises `RobotError` when MetaWorld is not installed, `RenderError` when this machine cannot draw.
        """
        if self._connected:
            return
        import_simulator()
        config = self.config
        if self.spec.cameras:
            sizes = config.camera, config.image_px, config.preview_px
            if config.render_in_thread:
                self._camera = ThreadedMetaWorldCamera(*sizes, config.camera_hz, self._clock)
            else:
                self._camera = InlineCamera(*sizes, int(CONTROL_HZ / config.camera_hz), self._clock)
            self._camera.previews = self._previews
        self._connected = True

    def reset(self, task: str, seed: int) -> None:
        """Build the scene of `seed`; no frame of an earlier episode is seen after it.

        Raises `ConfigError` for a task that is not in the configuration, `RobotError` before `connect`, `RenderError`
        when the camera gives no frame.
        """
        check_reset(self._who, task, self.tasks, seed, self._connected)
        if self._camera is not None:
            self._camera.pause()
        self._simulation = None
        simulation = self._simulations.get(task)
        if simulation is None:
            simulation = self._simulations[task] = Simulation(task, self.config.changes)
        simulation.reset(seed)
        if self._camera is not None:
            self._camera.start(simulation)
        self._simulation, self._instruction = simulation, instruction(task)

    def read(self) -> Observation:
        """The state, float32[4] or [39], the camera's newest frame, the instruction. Raises `RobotError`."""
        state = require_scene(self._who, "read", self._simulation).observation[: self.spec.state_dim].astype(np.float32)
        frames: dict[str, Frame] = {}
        if self._camera is not None:
            frames[self.config.camera] = self._camera.frame()
        return Observation(self._clock.now_ns(), state, frames, self._instruction)

    def write(self, action: np.ndarray) -> Feedback:
        """Step the simulator by 12.5 ms with `action`, float32[4], clipped to the limits.

        Raises `InvalidDataError` for another shape or a number that is not finite; nothing moves then.
        """
        simulation = require_scene(self._who, "write", self._simulation)
        executed = limit_action(self.spec, action)
        reward, success = simulation.step(executed)
        if self._camera is not None:
            self._camera.on_step(simulation)
        return Feedback(executed, reward, success)

    def privileged(self) -> np.ndarray:
        """What a scripted operator knows, never for a policy of pixels: float64[39], MetaWorld's whole observation."""
        return require_scene(self._who, "privileged", self._simulation).observation

    @property
    def task(self) -> str:
        """The running task's name, '' before the first reset."""
        return self._simulation.task if self._simulation is not None else ""

    def request_previews(self, wanted: bool) -> None:
        """As `hal.interfaces.robot`: the picture as it was drawn goes with ten frames a second at most."""
        self._previews = wanted
        if self._camera is not None:
            self._camera.previews = wanted

    def close(self) -> None:
        """Free camera and simulators. May be called twice."""
        if self._camera is not None:
            self._camera.close()
        for simulation in self._simulations.values():
            simulation.close()
        self._camera, self._simulation, self._connected = None, None, False
        self._simulations.clear()


def _axes(name: str, unit: str, low: tuple[float, ...], high: tuple[float, ...]) -> tuple[Dimension, ...]:
    """x, y and z in the place of {} in `name`."""
    sides = zip("xyz", low, high, strict=True)
    return tuple(Dimension(name.format(axis), unit, least, most) for axis, least, most in sides)


def _position(name: str) -> tuple[Dimension, ...]:
    # Generous: what falls off the table comes to rest on the floor 0.91 m below it.
    return _axes(name, "m", (-1.5, -0.5, -1.5), (1.5, 2.0, 1.5))


def _hand_and_objects(hand: tuple[Dimension, ...], when: str) -> tuple[Dimension, ...]:
    """18 numbers: the hand and two objects (position and quaternion; zeros where a task has one object)."""
    dimensions = [Dimension(d.name + when, d.unit, d.low, d.high) for d in hand]
    for thing in ("object", "second_object"):
        dimensions += _position(f"{thing}{when}_{{}}")
        dimensions += [Dimension(f"{thing}{when}_q{i}", "1", -1.0, 1.0) for i in range(4)]
    return tuple(dimensions)
