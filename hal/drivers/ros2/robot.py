"""A robot on ROS 2 topics as a `Robot`: joint states, wrenches and pictures in, commands out. See docs/ros2.md.

    vla-fleet edge --robot ros2 --robot-config arm.json ...

Callbacks run in the node's threads and leave what they hear in an `MessageSynchronizer`; `read` takes the newest of it
and never waits, `write` publishes and, where the robot says what it executed, waits for that.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any

import numpy as np

from hal.drivers.ros2.commands import Commander
from hal.drivers.ros2.config import ImageTopic, Ros2Config, robot_spec
from hal.drivers.ros2.messages import JOINT_STATE, TRIGGER, WRENCH
from hal.drivers.ros2.received import Stamps
from hal.drivers.ros2.synchronizer import MessageSynchronizer
from hal.drivers.ros2.wrapper import Client, RosNode
from hal.interfaces.robot import Feedback, check_reset, require_scene
from hal.safety.limiter import hold_action, limit_action
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError, FleetError, RobotError
from wire.types import CommandType, Observation

log = logging.getLogger(__name__)

_STOP_S = 1.0
"""how long whoever stops the robot waits for its answer, and `reset` for a stop that is under way"""
_STOP_LOST_S = 5.0
"""an answer that has not come by then never will"""


class Ros2Robot:
    """Keeps the `Robot` protocol."""

    def __init__(self, config: Ros2Config | None = None, clock: Clock | None = None) -> None:
        """`clock`: a simulation's, which then stamps what comes. Raises `ConfigError` without a configuration."""
        if config is None:
            raise ConfigError(
                "robot 'ros2' needs a configuration: give at least its `spec`. `python -m hal.drivers.ros2.sim_node "
                "--describe` prints one for a simulated robot; docs/ros2.md says what is in it."
            )
        self.config = config
        self.spec = robot_spec(config)
        self.tasks = tuple(config.tasks)
        self._stopping = threading.Lock()
        """held while it is asked to stop"""
        self._asked: tuple[Any, float] | None = None
        """the answer to come, and when it was asked for: asked once more, it would stop later too"""
        self.real = not config.simulated
        states = {d.name: at for at, d in enumerate(self.spec.state)}
        absolute = [d.name for d in self.spec.action if d.meaning is CommandType.absolute]
        self._places = {name: states[name] for name in absolute if name in states}
        """the state dimension that measures it, by the name of an absolute action dimension"""
        self.returns_by_steps = len(self._places) == len(absolute)
        if config.stop:
            # Only then: whoever finds this method takes the robot for stopped by it.
            self.stop_motion = self._ask_to_stop
        self._who = f"robot '{self.spec.embodiment}'"
        self.task = ""
        self._clock = None if clock is None or isinstance(clock, MonotonicClock) else clock
        where = (config.namespace, config.domain_id)
        self._node = RosNode(config.node, *where, use_sim_time=config.use_sim_time)
        # Pictures take longer: joint states must not wait behind them.
        self._camera_node = RosNode(f"{config.node}_cameras", *where, use_sim_time=config.use_sim_time)
        self._synchronizer: MessageSynchronizer | None = None
        self._stamps = Stamps(config, self._node.now_ns, self._clock)
        self._commander = Commander(self.spec, config)
        self._reset: Client | None = None
        self._stop: Client | None = None
        self._sent: np.ndarray | None = None
        """float32[da]: what was asked for last in this scene"""
        self._targets: dict[int, float] = {}
        """where integrated delta dimensions were last sent, by index"""
        self._stamp_ns = 0
        self._silent = False

    def connect(self) -> None:
        """Open the node, wait for the first joint states and for the controllers of `outputs`. Twice is once.

        Raises `RobotError` that says what is on the graph when none come, or what is wrong with them.
        """
        if self._synchronizer is not None:
            return
        config, qos = self.config, self.config.qos
        node = self._node
        try:
            node.open()
            cameras = {camera.name: config.cameras.get(camera.name, ImageTopic()) for camera in self.spec.cameras}
            topics = {name: node.topic(how.topic_of(name)) for name, how in cameras.items()}
            topics |= {sensor.topic: node.topic(sensor.topic) for sensor in config.wrenches}
            topics |= {"joint_states": node.topic(config.topics.joint_states)}
            synchronizer = MessageSynchronizer(
                self.spec, config, topics, self._stamps, own_clock=self._clock is not None
            )
            if cameras:
                self._camera_node.open(beside=node)
            for name, how in cameras.items():
                on_picture = partial(synchronizer.on_picture, name)
                self._camera_node.subscribe(how.kind, how.topic_of(name), on_picture, qos.images, depth=4)
            if config.executed:
                node.subscribe(JOINT_STATE, config.topics.executed, synchronizer.on_executed, qos.executed)
            node.subscribe(JOINT_STATE, config.topics.joint_states, synchronizer.on_state, qos.joint_states)
            for sensor in config.wrenches:
                node.subscribe(WRENCH, sensor.topic, partial(synchronizer.on_wrench, sensor.topic), qos.wrenches)
            self._commander.open(node)
            self._reset = node.client(TRIGGER, config.topics.reset) if config.reset else None
            self._stop = node.client(TRIGGER, config.topics.stop) if config.stop else None
            if wrong := synchronizer.wait_for_any(config.connect_timeout_s):
                raise RobotError(
                    f"{self._who}: {wrong}, waited {config.connect_timeout_s:g} s. "
                    f"{self._graph_hint(topics['joint_states'])}"
                )
            if config.outputs:
                self._commander.wait_for_controllers(config.connect_timeout_s)
        except BaseException:
            self._release()
            raise
        self._synchronizer = synchronizer

    def reset(self, task: str, seed: int) -> None:
        """Name the task, call the robot's `reset` where it has one, and wait for what it sees then.

        Raises `ConfigError` for a task that it does not know, `RobotError` for a reset that failed or took too long.
        """
        config, who = self.config, self._who
        check_reset(who, task, self.tasks or (task,), seed, self._synchronizer is not None)
        assert self._synchronizer is not None
        self.task = ""
        if config.parameters_of:
            refused = self._node.set_parameters(
                config.parameters_of, {"task": task, "seed": seed}, config.connect_timeout_s
            )
            if refused:
                why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
                raise ConfigError(
                    f"{who}: node '{config.parameters_of}' did not take task '{task}', seed {seed}: {why}"
                )
        # A stop that is still under way must not come after it.
        if self._stopping.acquire(timeout=_STOP_S):
            self._stopping.release()
        begun = self._stamps.now_ns()
        if self._reset is not None:
            self._trigger(self._reset, config.reset_timeout_s)
        # What a stepped robot shows after its reset is shown once; any other is where it should be only now.
        self._synchronizer.begin(begun if config.stepped else self._stamps.now_ns())
        if missing := self._synchronizer.wait_for_scene(config.connect_timeout_s):
            around = " ".join(map(self._graph_hint, missing))
            raise RobotError(
                f"{who}: nothing on {', '.join(missing)} after the reset, waited {config.connect_timeout_s:g} s. "
                f"{self._synchronizer.faults()} {around}"
            )
        self._lose_targets()
        self._sent, self._silent, self.task = None, False, task

    def read(self) -> Observation:
        """State float32[ds] and, of each camera, the newest picture that is not newer than it.

        Raises `RobotError` for joint states that are too old, pictures that do not go with them, or a clock that
        jumped; it goes on by itself when they are right again.
        """
        synchronizer = require_scene(self._who, "read", self._synchronizer if self.task else None)
        try:
            return synchronizer.observation(self.config.tasks.get(self.task) or self.task)
        except RobotError:
            # Nobody knows where the robot is meanwhile: targets begin again from where it is found.
            self._lose_targets()
            raise

    def write(self, action: np.ndarray) -> Feedback:
        """Publish `action`, float32[da], limited. What was executed is what the robot says, or else what was sent.

        Raises `InvalidDataError` for another shape or a number that is not finite, and `RobotError` when no `executed`
        comes in time, or when nobody listens or nothing moves: what is driven by velocity is then told to stop.
        """
        synchronizer = require_scene(self._who, "write", self._synchronizer if self.task else None)
        limited = self._commander.fit(self._bounded(synchronizer, action))
        self._commander.require_controllers(self._measured(synchronizer), self._now_ns())
        sent, executed = self._integrate(synchronizer, limited)
        self._sent = limited
        self._commander.send(sent, self._next_stamp())
        if not self.config.executed:
            return Feedback(executed)
        # A robot that is gone is not waited for as long again: control has other things to do.
        gone = self._silent and not synchronizer.alive
        timeout_s = self.spec.period_ns / 1e9 if gone else self.config.confirm_timeout_s
        feedback = synchronizer.wait_for_executed(self._stamp_ns, timeout_s)
        self._silent = feedback is None
        if feedback is None:
            raise RobotError(
                f"{self._who}: nothing on '{self._node.topic(self.config.topics.executed)}' for a command sent "
                f"{timeout_s:g} s ago. Is the robot's node running and active?"
            )
        return feedback

    def close(self) -> None:
        """Stop the robot, by its service or by a command to stay where it is measured, and give the node back.

        What is not measured, or not now, keeps the target it has; a robot that was commanded nothing is left alone.
        May be called twice.
        """
        if self._synchronizer is not None:
            try:
                self._stop_moving()
            except FleetError as error:
                log.warning("%s: could not be stopped over ROS 2: %s", self._who, error)
        self._release()

    def stop_velocities(self) -> None:
        """As `hal.interfaces.robot`. Raises `RobotError` for a topic that takes a target too which nobody measures."""
        synchronizer = self._synchronizer
        if synchronizer is None:
            raise RobotError(f"{self._who}: it is not connected, and so cannot be told to stand.")
        if self.config.stepped:
            # It stands between two commands, and each is a step.
            return
        values = np.zeros(self.spec.action_dim, np.float32)
        if not self.config.outputs:
            known = dict(zip((d.name for d in self.spec.state), synchronizer.state().tolist(), strict=True))
            for index, dimension in enumerate(self.spec.action):
                if dimension.meaning is CommandType.absolute:
                    values[index] = known.get(dimension.name, np.nan)
            if unknown := [d.name for d, value in zip(self.spec.action, values, strict=True) if np.isnan(value)]:
                raise RobotError(f"{self._who}: nobody measures {', '.join(unknown)}, so it cannot be told to stand.")
        self._commander.stop_velocities(values, self._next_stamp())

    def _ask_to_stop(self) -> None:
        """As `StoppableRobot.stop_motion`, by the robot's service: its answer decides. Raises `RobotError`."""
        if self._stop is None:
            raise RobotError(f"{self._who}: it is not connected, and so cannot be asked to stop.")
        with self._stopping:
            now_s = time.monotonic()
            if self._asked is None or now_s - self._asked[1] > _STOP_LOST_S:
                self._asked = self._stop.send(_STOP_S), now_s
            answered = threading.Event()
            future = self._asked[0]
            future.add_done_callback(lambda _: answered.set())
            if not answered.wait(_STOP_S):
                raise RobotError(f"{self._who}: service '{self._stop.name}' has not answered; is its node stuck?")
            self._asked = None
            self._require_success(self._stop, future.result())

    def _bounded(self, synchronizer: MessageSynchronizer, action: np.ndarray) -> np.ndarray:
        """float32[da]: `action` within the limits of the spec, or on the way back to them from where it is measured."""
        within = limit_action(self.spec, action)
        beyond = [i for i in np.flatnonzero(within != action) if self.spec.action[i].name in self._places]
        if not beyond:
            return within
        measured = self._require_measured(synchronizer)
        for i in beyond:
            ends = sorted((within[i], measured[self._places[self.spec.action[i].name]]))
            within[i] = min(max(action[i], ends[0]), ends[1])
        return within

    # --- parts ------------------------------------------------------------------------------------------------------

    def _integrate(self, synchronizer: MessageSynchronizer, limited: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(what goes out, what that executes), both float32[da].

        Raises `RobotError`, and stops what is driven by velocity, when nobody knows where a target begins.
        """
        if not self.config.targets:
            return limited, limited
        states = {d.name: (index, d) for index, d in enumerate(self.spec.state)}
        measured: np.ndarray | None = None
        sent, executed = limited.copy(), limited.copy()
        for index, dimension in enumerate(self.spec.action):
            if (target := self.config.targets.get(dimension.name)) is None:
                continue
            at, limits = states[target.state]
            if index not in self._targets:
                measured = self._require_measured(synchronizer) if measured is None else measured
                self._targets[index] = float(measured[at])
            begin = self._targets[index]
            end = float(np.clip(begin + target.scale * float(limited[index]), limits.low, limits.high))
            self._targets[index] = end
            sent[index], executed[index] = end, (end - begin) / target.scale
        return sent, executed

    def _require_measured(self, synchronizer: MessageSynchronizer) -> np.ndarray:
        try:
            return synchronizer.observation("").state
        except RobotError:
            self._commander.stop_what_moves()
            raise

    def _stop_moving(self) -> None:
        if self._stop is not None:
            try:
                self._trigger(self._stop, _STOP_S)
                return
            except RobotError as error:
                log.warning("%s: it is sent what holds it, for its own stop failed: %s", self._who, error)
        if self._sent is not None:
            assert self._synchronizer is not None
            sent, _ = self._integrate(self._synchronizer, self._held(self._synchronizer, self._sent))
            self._commander.stop(sent, self._next_stamp())

    def _held(self, synchronizer: MessageSynchronizer, last: np.ndarray) -> np.ndarray:
        """float32[da]: what stops the robot after `last`: no target in it that was neither measured nor sent before."""
        held, states = hold_action(self.spec, last), [dimension.name for dimension in self.spec.state]
        try:
            measured = synchronizer.state()
        except RobotError as error:
            log.warning("%s: it keeps the targets it has: %s", self._who, error)
            return held
        for index, dimension in enumerate(self.spec.action):
            if dimension.meaning is CommandType.absolute and dimension.name in states:
                value = measured[states.index(dimension.name)]
                held[index] = value if np.isfinite(value) else held[index]
        # Also outside its limits: closing brings nothing back.
        return held

    def _trigger(self, service: Client, timeout_s: float) -> None:
        self._require_success(service, service.call(timeout_s))

    def _require_success(self, service: Client, answer: Any) -> None:
        if not answer.success:
            raise RobotError(f"{self._who}: service '{service.name}' failed: {answer.message or 'no reason given'}.")

    def _lose_targets(self) -> None:
        self._targets.clear()
        self._commander.forget()

    def _measured(self, synchronizer: MessageSynchronizer) -> np.ndarray | None:
        if not self.config.outputs:
            return None
        try:
            return synchronizer.state()
        except RobotError:
            return None  # `read` says so; a command to hold still goes out

    def _now_ns(self) -> int:
        return self._clock.now_ns() if self._clock else time.monotonic_ns()

    def _next_stamp(self) -> int:
        # Also on a clock that stands still, each command has a stamp of its own.
        self._stamp_ns = max(self._node.now_ns(), self._stamp_ns + 1)
        return self._stamp_ns

    def _release(self) -> None:
        self._synchronizer, self.task = None, ""
        self._reset = self._stop = self._asked = None
        self._camera_node.close()
        self._node.close()

    def _graph_hint(self, topic: str) -> str:
        """What a person would look for when nothing comes on `topic`."""
        publishers = self._node.publishers(topic)
        if not publishers:
            of_states = topic == self._node.topic(self.config.topics.joint_states)
            others = self._node.topics_of(JOINT_STATE) if of_states else []
            return (
                f"Nobody publishes '{topic}' in ROS domain {self._node.domain_id}"
                + (f"; topics of that type there: {', '.join(others)}. Check the namespace." if others else ".")
                + " Is the robot's node running, with the same ROS_DOMAIN_ID?"
            )
        worse = [node for node, reliability in publishers.items() if reliability == "best_effort"]
        if worse and "reliable" in (self.config.qos.joint_states, self.config.qos.images):
            return f"{', '.join(worse)} publishes '{topic}' with best effort: set that in `qos`."
        return f"'{topic}' is published by {', '.join(publishers)}; `ros2 topic hz {topic}` tells more."
