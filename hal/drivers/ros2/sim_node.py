"""`sim_robot_node`: any robot of this project on the ROS 2 topics of docs/ros2.md.

    sim_robot_node --robot metaworld --robot-config '{"tasks": ["push"]}' --ros-args -r __ns:=/left -p pacing:=stepped
    sim_robot_node --robot fake --describe > robot.json     # the configuration of the driver `ros2` for it

Node parameters: `task` and `seed` (of the next reset), and at start `pacing`, `raw`, `compressed`, `jpeg_quality`.

- `stepped`: each command moves the robot by one control period; it stands still in between. Deterministic.
- `real_time`: each command moves it when it comes; when none has come for two periods, the robot holds at its own rate.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from hal.drivers.ros2.messages import (
    COMPRESSED,
    FLAGS,
    IMAGE,
    JOINT_STATE,
    TRAJECTORY,
    TRIGGER,
    compressed_image,
    joint_state,
    raw_image,
    read_command,
    set_stamp,
    stamp_ns,
)
from hal.drivers.ros2.time import read_together
from hal.drivers.ros2.wrapper import Publisher, RosNode, interface, own_arguments
from hal.interfaces.robot import Robot
from hal.registry import make_robot, read_config
from hal.safety.limiter import hold_action, limit_action
from hal.safety.rest import rest_action
from wire.errors import ConfigError, FleetError, InvalidDataError, RobotError, suggest
from wire.types import Observation

log = logging.getLogger(__name__)

NODE = "sim_robot"
_WATCHDOG_PERIODS = 2.0
_CATCH_UP = 0.5
"""a command that comes early waits until so much of a period has passed since the one before"""
_KEEPALIVE_S = 0.1
"""a stepped robot that stands still says so again this often: it is alive"""
_PICTURE_KEEPALIVES = 10
"""and shows its pictures again every so many times, for a driver that came late"""


Pacing = Literal["real_time", "stepped"]


@dataclass(slots=True)
class Counts:
    """What the node has done so far."""

    steps: int = 0
    holds: int = 0
    """steps for which no command had come"""
    resets: int = 0
    late: int = 0
    """commands older than the one before"""
    replaced: int = 0
    """commands that a newer one overtook before they were executed"""
    refused: int = 0
    """commands that do not fit the robot"""
    unsent: int = 0
    """messages that the transport did not take"""
    fault: str = ""
    """what was wrong last"""


class SimRobotNode:
    """One robot on topics. All calls to the robot come from the thread that calls `open` and `run`."""

    def __init__(self, robot: Robot, arguments: Sequence[str] = ()) -> None:
        """`arguments`: standard ROS arguments."""
        self.robot = robot
        self.counts = Counts()
        tasks = tuple(getattr(robot, "tasks", ()))
        parameters = {
            "task": tasks[0] if tasks else "",
            "seed": 0,
            "pacing": "real_time",
            "raw": True,
            "compressed": False,
            "jpeg_quality": 90,
        }
        self.node = RosNode(NODE, arguments=arguments, parameters=parameters)
        self._tasks = tasks
        self._pacing = "real_time"
        self._work = threading.Condition()
        self._command: tuple[int, np.ndarray] | None = None
        self._requests: list[tuple[Callable[[], None], Future[None]]] = []
        self._states: Publisher | None = None
        self._executed_publisher: Publisher | None = None
        self._cameras: dict[str, list[tuple[Publisher, Callable[[np.ndarray, int], Any]]]] = {}
        self._frames: dict[str, tuple[int, int, list[tuple[Publisher, Any]]]] = {}
        """by camera: (time of its newest frame, its stamp, the messages)"""
        self._state: Any = None
        self._stamp = 0
        self._executed = np.zeros(robot.spec.action_dim, np.float32)
        self._stepped_s = self._commanded_s = self._published_s = 0.0
        self._keepalives = self._last_command = 0
        self._open = False

    # --- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect the robot, bring it to the first scene and offer everything. Raises what the robot raises."""
        node, spec = self.node, self.robot.spec
        node.open()
        self._open = True
        self._pacing = node.parameter("pacing")
        if self._pacing not in get_args(Pacing):
            raise ConfigError(f"sim_robot_node: pacing '{self._pacing}' is none of {', '.join(get_args(Pacing))}.")
        self._states = node.publisher(JOINT_STATE, "joint_states")
        self._executed_publisher = node.publisher(JOINT_STATE, "executed")
        quality = node.parameter("jpeg_quality")
        for camera in spec.cameras:
            name, topic = camera.name, f"camera/{camera.name}/image_raw"
            ways: list[tuple[Publisher, Callable[[np.ndarray, int], Any]]] = []
            if node.parameter("raw"):
                ways.append((node.publisher(IMAGE, topic, depth=4), partial(raw_image, name)))
            if node.parameter("compressed"):
                publisher = node.publisher(COMPRESSED, f"{topic}/compressed", depth=4)
                ways.append((publisher, partial(compressed_image, name, quality)))
            self._cameras[name] = ways
        self.robot.connect()
        self._reset()
        node.on_parameters(self._check)
        node.subscribe(TRAJECTORY, "joint_trajectory", self._on_command, depth=1)
        node.serve(TRIGGER, "reset", lambda _, answer: self._on_request(self._reset, answer))
        node.serve(TRIGGER, "stop", lambda _, answer: self._on_request(self._halt, answer))
        reports = node.publisher("diagnostic_msgs/msg/DiagnosticArray", "diagnostics")
        node.every(1.0, lambda: reports.send(self._report()))

    def run(self, stopped: Callable[[], bool]) -> None:
        """Serve until `stopped`, which is asked at least every tenth of a second."""
        while not stopped():
            with self._work:
                self._work.wait_for(lambda: self._requests or self._command, self._wait_s())
                requests, self._requests = self._requests, []
                command = None
                if self._command is not None and time.monotonic() >= self._earliest_s():
                    command, self._command = self._command, None
            for work, done in requests:
                try:
                    done.set_result(work())
                except FleetError as error:
                    done.set_exception(error)
            if command is not None:
                self._commanded_s = time.monotonic()
                self._step(command[1], command[0])
            elif self._pacing == "real_time" and time.monotonic() >= self._hold_due_s():
                self.counts.holds += 1
                self._step(hold_action(self.robot.spec, self._executed), None)
            elif self._pacing == "stepped" and time.monotonic() >= self._published_s + _KEEPALIVE_S:
                self._keepalive()

    def close(self) -> None:
        """Stop the robot and give the node back. May be called twice."""
        if self._open:
            self._open = False
            self.node.close()
            self.robot.close()

    # --- the node's thread ------------------------------------------------------------------------------------------

    def _on_command(self, message: Any) -> None:
        try:
            action = limit_action(self.robot.spec, read_command(message, self.robot.spec, "joint_trajectory"))
        except InvalidDataError as error:
            self.counts.refused += 1
            self.counts.fault = str(error)
            log.warning("sim_robot_node: %s", error)
            return
        stamp = stamp_ns(message)
        with self._work:
            # One that was overtaken by a newer one is not executed after it; another sender may have another clock.
            if stamp <= self._last_command and time.monotonic() < self._hold_due_s():
                self.counts.late += 1
                return
            self.counts.replaced += self._command is not None
            self._last_command, self._command = stamp, (stamp, action)
            self._work.notify_all()

    def _on_request(self, work: Callable[[], None], answer: Any) -> Any:
        done: Future[None] = Future()
        with self._work:
            self._requests.append((work, done))
            self._work.notify_all()
        # The thread that has the robot also ends it: what is asked while the node is being closed is not done.
        while not wait([done], 0.1).done and self._open:
            pass
        error = done.exception() if done.done() else RobotError("the node is closing.")
        answer.success, answer.message = error is None, str(error or "")
        return answer

    def _check(self, values: dict[str, Any]) -> str:
        task, seed = values.get("task", ""), values.get("seed", 0)
        if "task" in values and self._tasks and task not in self._tasks:
            return f"no task '{task}'.{suggest(task, self._tasks)} It knows: {', '.join(self._tasks)}."
        if seed < 0:
            return f"seed {seed} is negative."
        fixed = [name for name in values if name not in ("task", "seed", "use_sim_time")]
        return f"{', '.join(fixed)}: read at start; start the node with another value." if fixed else ""

    def _report(self) -> Any:
        """A DiagnosticArray: warns when commands were refused."""
        pair = interface("diagnostic_msgs/msg/KeyValue")
        status = interface("diagnostic_msgs/msg/DiagnosticStatus")()
        embodiment, counts = self.robot.spec.embodiment, asdict(self.counts)
        status.message = counts.pop("fault") or "ok"
        status.level = status.WARN if counts["refused"] or counts["unsent"] else status.OK
        status.name, status.hardware_id = f"{self.node.full_name}: {embodiment}", embodiment
        values = {"pacing": self._pacing, **{name: self.node.parameter(name) for name in ("task", "seed")}, **counts}
        status.values = [pair(key=key, value=str(value)) for key, value in values.items()]
        message = interface("diagnostic_msgs/msg/DiagnosticArray")()
        set_stamp(message, self.node.now_ns())
        message.status = [status]
        return message

    # --- the robot's thread -----------------------------------------------------------------------------------------

    @property
    def _period_s(self) -> float:
        return 1.0 / self.robot.spec.control_hz

    def _earliest_s(self) -> float:
        return self._stepped_s + _CATCH_UP * self._period_s if self._pacing == "real_time" else 0.0

    def _hold_due_s(self) -> float:
        return max(self._commanded_s + _WATCHDOG_PERIODS * self._period_s, self._stepped_s + self._period_s)

    def _wait_s(self) -> float:
        due_s = self._hold_due_s() if self._pacing == "real_time" else self._published_s + _KEEPALIVE_S
        return min(max(due_s - time.monotonic(), 0.0), _KEEPALIVE_S)

    def _reset(self) -> None:
        task, seed = self.node.parameter("task"), self.node.parameter("seed")
        with self._work:
            self._command = None
        self.robot.reset(task, seed)
        self._frames.clear()
        observation = self.robot.read()
        self._executed = rest_action(self.robot.spec, observation.state)
        self._publish(observation)
        self.counts.resets += 1
        self._stepped_s = self._commanded_s = time.monotonic()

    def _halt(self) -> None:
        with self._work:
            self._command = None
        self._step(hold_action(self.robot.spec, self._executed), None)

    def _step(self, action: np.ndarray, command: int | None) -> None:
        feedback = self.robot.write(action)
        self._stepped_s = time.monotonic()
        self._executed = feedback.executed
        self.counts.steps += 1
        self._publish(self.robot.read())
        if command is None:
            return
        more = {"reward": feedback.reward, "joint_states": self._stamp - command}
        more |= {flag: float(getattr(feedback, flag)) for flag in FLAGS}
        more |= {f"camera/{name}": stamp - command for name, (_, stamp, _) in self._frames.items()}
        names = [*(d.name for d in self.robot.spec.action), *more]
        self._send(self._executed_publisher, joint_state(names, [*feedback.executed.tolist(), *more.values()], command))

    def _publish(self, observation: Observation) -> None:
        """Publish what is new of `observation`, pictures first: they belong to the state that follows."""
        ros_ns, machine_ns = read_together(self.node.now_ns)
        for name, frame in observation.images.items():
            if name in self._frames and self._frames[name][0] == frame.time_ns:
                continue
            stamp = ros_ns - (machine_ns - frame.time_ns)
            messages = [(publisher, make(frame.image, stamp)) for publisher, make in self._cameras[name]]
            self._frames[name] = frame.time_ns, stamp, messages
            for publisher, message in messages:
                self._send(publisher, message)
        self._stamp = max(ros_ns - (machine_ns - observation.time_ns), self._stamp + 1)
        self._state = joint_state([d.name for d in self.robot.spec.state], observation.state, self._stamp)
        self._send(self._states, self._state)
        self._published_s = time.monotonic()

    def _send(self, publisher: Publisher | None, message: Any) -> None:
        assert publisher is not None, "open() comes first"
        try:
            publisher.send(message)
        except RobotError as error:
            # Losing a message is what the other side must be able to live with; ending here would stop the robot.
            self.counts.unsent += 1
            self.counts.fault = str(error)
            log.warning("sim_robot_node: %s", error)

    def _keepalive(self) -> None:
        self._keepalives += 1
        if self._keepalives % _PICTURE_KEEPALIVES == 0:
            for _, _, messages in self._frames.values():
                for publisher, message in messages:
                    self._send(publisher, message)
        self._send(self._states, self._state)
        self._published_s = time.monotonic()


def describe(robot: Robot) -> dict[str, Any]:
    """The configuration, as plain values, with which the driver `ros2` drives `robot` behind `sim_robot_node`.

    Connects `robot` to ask it for the instruction of each task. Add `"stepped": true` for that pacing.
    """
    tasks = tuple(getattr(robot, "tasks", ()))
    instructions = {}
    if tasks:
        robot.connect()
        try:
            for task in tasks:
                robot.reset(task, 0)
                instructions[task] = robot.read().task
        finally:
            robot.close()
    return {
        "spec": msgspec.to_builtins(robot.spec),
        "tasks": instructions,
        "executed": True,
        "reset": True,
        "stop": True,
        "simulated": True,
        "parameters_of": NODE,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `sim_robot_node`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="sim_robot_node", description="A robot of this project on ROS 2 topics.")
    parser.add_argument("--robot", default="metaworld", help="its kind, as `vla-fleet edge --robot` takes it")
    parser.add_argument("--robot-config", default="", help="its configuration: JSON, or a JSON file")
    parser.add_argument("--describe", action="store_true", help="print the driver's configuration for it and end")
    try:
        options = parser.parse_args(own_arguments(given))
        config = read_config(options.robot, _json(options.robot_config)) if options.robot_config else None
        robot = make_robot(options.robot, config)
        sim = SimRobotNode(robot, given[given.index("--ros-args") :] if "--ros-args" in given else ())
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        try:
            if options.describe:
                sys.stdout.write(msgspec.json.format(msgspec.json.encode(describe(robot))).decode() + "\n")
                return 0
            sim.open()
            log.info("sim_robot_node: '%s' is on %s.", robot.spec.embodiment, sim.node.topic("joint_states"))
            sim.run(stop.is_set)
        finally:
            sim.close()
    except FleetError as error:
        log.error("%s", error)
        return 1
    return 0


def _json(text: str) -> dict[str, Any]:
    try:
        data = text if text.lstrip().startswith("{") else Path(text).read_bytes()
        return msgspec.json.decode(data, type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--robot-config {text}: {error}. Give JSON or a JSON file of its fields.") from error


if __name__ == "__main__":
    raise SystemExit(main())
