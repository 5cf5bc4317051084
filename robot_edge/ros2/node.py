"""The ROS 2 edge node: a managed (lifecycle) node that keeps the edge processes of one robot.

    configure    parameters, keys and recipe are checked, the driver can be made, a ROS 2 robot's topics are there
    activate     driver, control, inference and uplink start; the node starts the dead ones again
    deactivate   they end in order: control first, so the robot holds; then the spool drains
    cleanup      forgets what was configured
    error        an edge that cannot go on is put away, the node is unconfigured again and says why
    shutdown     as deactivate, for good

The robot's data never passes through this process, which may die and come back; the edge processes end when it dies.
Written for Kilted; Jazzy and Humble have the same interfaces.
"""

from __future__ import annotations

import functools
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.executors import MultiThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import Header
from std_srvs.srv import Trigger

from hal.safety.stop_latch import check_speed_limit
from robot_edge.control.episodes.intervention import InterventionPart
from robot_edge.control.mode import HoldReason, Mode
from robot_edge.ros2.diagnostics import Diagnosis, diagnose
from robot_edge.ros2.operator import Ros2Operator
from robot_edge.ros2.parameters import DEFAULTS, DESCRIPTIONS, EdgeParameters, read_parameters
from robot_edge.ros2.stops import NodeStops
from robot_edge.ros2.topics import Endpoint, describe_missing
from robot_edge.runtime.process_group import EdgeProcesses, uplink_channel
from robot_edge.runtime.robot_host import HOST
from wire.errors import FleetError, InvalidDataError, RobotError
from wire.messages.gateway import EdgeStatus
from wire.types import EPISODE_COMMANDS, VERDICTS, OperatorCommandKind

log = logging.getLogger(__name__)

NAME = "edge_node"
_WATCH_S = 0.1
_REPORT_S = 1.0
_CONFIRM_S = 2.0
"""how long a command may take until control's status shows it"""
_RETRY_S = (2.0, 30.0)
"""shortest and longest pause before an autostarted node tries again"""
_BY_PERSON = (HoldReason.operator_idle, HoldReason.operator_lost)

SUCCESS, FAILURE, ERROR = (
    TransitionCallbackReturn.SUCCESS,
    TransitionCallbackReturn.FAILURE,
    TransitionCallbackReturn.ERROR,
)


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """What a checked set of parameters comes to."""

    edge: EdgeProcesses
    endpoints: tuple[Endpoint, ...] = ()
    """what a ROS 2 robot must offer before it can be driven, by absolute names"""
    home: Path | None = None
    """the robot's own directory, where its host keeps what stops it"""


Prepare = Callable[[EdgeParameters, str], NodeSetup]
"""(parameters, the node's namespace) to what they come to; raises `FleetError` that names what is wrong"""


def _driven(kind: str, came_true: Callable[[EdgeStatus], bool]) -> Callable[[Ros2Operator, float], str]:
    return lambda operator, timeout_s: operator.command(kind, came_true, timeout_s)


_PARTS = {
    OperatorCommandKind.recover: InterventionPart.recovery,
    OperatorCommandKind.correct: InterventionPart.correction,
}


def _was_heard(kind: OperatorCommandKind, status: EdgeStatus) -> bool:
    """Whether a word about an episode came true; where nobody waits for it, it was heard."""
    if kind in _PARTS:
        return status.part == _PARTS[kind]
    if not status.by_person or kind == OperatorCommandKind.next:
        return True
    if kind == OperatorCommandKind.scene_ready:
        return status.reason != HoldReason.scene
    return not status.episode and (kind not in VERDICTS or status.open_outcome in ("", kind))


_SERVICES: dict[str, Callable[[Ros2Operator, float], str]] = {
    "estop": Ros2Operator.stop,
    "release_estop": Ros2Operator.release,
    "start": Ros2Operator.start,
    "take_over": _driven("take_over", lambda status: status.mode not in (Mode.policy, Mode.script, Mode.reset)),
    "hand_back": _driven("hand_back", lambda status: status.mode != Mode.human and status.reason not in _BY_PERSON),
    **{kind.value: _driven(kind, functools.partial(_was_heard, kind)) for kind in sorted(EPISODE_COMMANDS)},
}
"""service: what it does, within so many seconds; it returns '' or why that did not come true"""
_OF_STOPS = ("estop", "release_estop", "start")


class EdgeNode(LifecycleNode):
    """See the top of this file."""

    def __init__(self, prepare: Prepare, **options: Any) -> None:
        """`prepare` makes the edge processes; `options` go to `rclpy.lifecycle.LifecycleNode`."""
        super().__init__(NAME, **options)
        for name, default in DEFAULTS.items():
            # A command line makes numbers of digits: `-p delay:=4` must not be refused for its type.
            described = ParameterDescriptor(name=name, description=DESCRIPTIONS[name], dynamic_typing=True)
            self.declare_parameter(name, default, described)
        self.phase = "unconfigured"
        """primary state of the life cycle, or stopping"""
        self.reason = ""
        """what went wrong last; '' after a transition that went well"""
        self.ended = False
        self._prepare = prepare
        self._prepared: NodeSetup | None = None
        self._operator: Ros2Operator | None = None
        self._robot = ""
        self._give_up_after, self._speed_limit = 0, 1.0
        self._failing = False
        self._stops = NodeStops(self._edge_directory, lambda: self._prepared.home if self._prepared else None)
        self._asked_to_end = False
        self._autostart = self.get_parameter("autostart").value is True
        self._pause_s, self._next_start_s = _RETRY_S[0], 0.0
        self._reported: Diagnosis | None = None
        self._next_report_s = 0.0
        self.add_on_set_parameters_callback(self._may_set)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        # Transitions and this timer share the default group, so that never two of them run at once. The others go on
        # during a transition: an edge that drains takes seconds, and an emergency stop must not wait for it.
        self.create_timer(_WATCH_S, self._watch)
        self.create_timer(_WATCH_S, self._publish_diagnosis, callback_group=MutuallyExclusiveCallbackGroup())
        stops = MutuallyExclusiveCallbackGroup()
        people = MutuallyExclusiveCallbackGroup()
        for kind in _SERVICES:
            group = stops if kind == "estop" else people
            self.create_service(Trigger, f"~/{kind}", functools.partial(self._answer, kind), callback_group=group)

    def ask_to_end(self) -> None:
        """Shut down in order, soon."""
        self._asked_to_end = True

    # --- transitions ----------------------------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._attempt("configure", self._configure)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._attempt("activate", self._activate)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        if self._failing or self._attempt("deactivate", self._stop_edge) != SUCCESS:
            return ERROR
        self.phase, self.reason, self._autostart = "inactive", "", False
        return SUCCESS

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._prepared = None
        self.phase, self.reason, self._autostart = "unconfigured", "", False
        return SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._stop_edge()
        self._prepared = None
        self.phase, self._autostart = "finalized", False
        return SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Puts the edge away; the reason stays in the diagnostics until the next attempt."""
        reason, self._failing = self.reason, False
        self._attempt("put the edge away", self._stop_edge)
        self.reason = reason or self.reason
        self._prepared = None
        self.phase = "unconfigured"
        self._retry_later()
        return SUCCESS

    def _attempt(self, what: str, work: Callable[[], None]) -> TransitionCallbackReturn:
        try:
            work()
        except FleetError as error:
            self.reason = f"cannot {what}: {error}"
            self.get_logger().error(self.reason)
            return FAILURE
        except Exception as error:  # rclpy would drop it without a word
            self.reason = f"cannot {what}: {type(error).__name__}: {error}"
            log.exception("%s", self.reason)
            self.get_logger().error(self.reason)
            return ERROR
        self.reason = ""
        return SUCCESS

    def _configure(self) -> None:
        given = {name: self.get_parameter(name).value for name in DEFAULTS}
        parameters = read_parameters(given, self.get_namespace())
        self._robot, self._speed_limit = parameters.name, parameters.speed_limit
        prepared = self._prepare(parameters, self.get_namespace())
        self._await_robot(prepared.endpoints, parameters.wait_for_robot_s)
        self._prepared, self.phase, self._give_up_after = prepared, "inactive", parameters.give_up_after
        self._stops.settle()

    def _await_robot(self, endpoints: tuple[Endpoint, ...], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while problem := describe_missing(endpoints, self):
            if time.monotonic() >= deadline_s or self._asked_to_end:
                raise RobotError(f"robot '{self._robot}': {problem}")
            time.sleep(0.1)

    def _activate(self) -> None:
        assert self._prepared is not None
        edge = self._prepared.edge
        edge.start()
        channel = uplink_channel(edge.directory, "operator")
        self._operator = Ros2Operator(self._robot, channel, host=edge.directory / HOST)
        self.phase = "active"
        self._pause_s = _RETRY_S[0]
        self.get_logger().info(f"robot '{self._robot}': the edge processes start.")

    def _edge_directory(self) -> Path | None:
        """Of the processes that run, also while they start or end."""
        prepared = self._prepared
        try:
            return prepared.edge.directory if prepared is not None else None
        except RobotError:
            return None

    def _stop_edge(self) -> None:
        """Stop the edge processes, in order, and no longer listen to them. The robot holds afterwards."""
        self.phase = "stopping"
        operator, self._operator = self._operator, None
        if self._prepared is not None:
            self._prepared.edge.stop()
        if operator is not None:
            operator.close()
        # What their host did not hear any more.
        self._stops.settle()

    # --- timers ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self.phase == "finalized" and self._asked_to_end:
            for timer in self.timers:
                timer.cancel()
            self.ended = True
        elif self.phase == "finalized":
            return
        elif self._asked_to_end:
            self.trigger_shutdown()
        elif self.phase == "active":
            assert self._prepared is not None
            for role in self._prepared.edge.poll():
                self.get_logger().warning(f"robot '{self._robot}': its {role} process died and is started again.")
            most = max((child.deaths_in_a_row for child in self._prepared.edge.supervisor.children.values()), default=0)
            if 0 < self._give_up_after <= most:
                self._fail(self._prepared.edge.fault)
        elif self._autostart and time.monotonic() >= self._next_start_s:
            self._start()

    def _fail(self, reason: str) -> None:
        """An active node goes to ErrorProcessing by a deactivation that fails."""
        self.reason = reason
        self.get_logger().error(f"robot '{self._robot}' cannot go on: {reason}")
        self._failing = True
        self.trigger_deactivate()

    def _start(self) -> None:
        if (self.phase == "unconfigured" and self.trigger_configure() != SUCCESS) or self.trigger_activate() != SUCCESS:
            self._retry_later()

    def _retry_later(self) -> None:
        self._next_start_s = time.monotonic() + self._pause_s
        self._pause_s = min(_RETRY_S[1], 2 * self._pause_s)

    def _publish_diagnosis(self) -> None:
        """Publish the diagnosis once a second, and at once when it changes."""
        operator, prepared = self._operator, self._prepared
        self._stops.settle()
        if operator is not None:
            operator.poll()
            for event in operator.events():
                self.get_logger().info(f"robot '{self._robot}': {event.kind}: {event.detail}")
        status, age_s = (operator.status, operator.age_s) if operator is not None else (None, 0.0)
        processes = prepared.edge.fault if prepared is not None else ""
        found = diagnose(self.phase, self.reason, status, age_s, processes)
        now_s = time.monotonic()
        changed = self._reported is None or found[:2] != self._reported[:2]
        if not changed and now_s < self._next_report_s:
            return
        self._reported, self._next_report_s = found, now_s + _REPORT_S
        entry = DiagnosticStatus(
            level=bytes([found.level]),
            name=f"{self.get_fully_qualified_name().lstrip('/')}: edge",
            message=found.message,
            hardware_id=self._robot,
            values=[KeyValue(key=key, value=value) for key, value in found.values.items()],
        )
        header = Header(stamp=self.get_clock().now().to_msg())
        self._diagnostics.publish(DiagnosticArray(header=header, status=[entry]))

    # --- services and parameters ----------------------------------------------------------------------------------

    def _answer(self, kind: str, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        problem = self._command(kind)
        response.success = not problem
        shown = f"; {self._shown_stops()}" if kind in _OF_STOPS else ""
        response.message = problem or f"robot '{self._robot}': {kind}{shown}"
        return response

    def _shown_stops(self) -> str:
        """Who stops the robot."""
        if self._stops.waits:
            return "it begins so when the node is configured"
        operator = self._operator
        if operator is None or (operator.status is None and not operator.stop_state.stops):
            return f"it is {self._stops.shown}"
        return f"it is {operator.stop_state}"

    def _command(self, kind: str) -> str:
        """Carry out one command; '' or why it did not come true."""
        operator = self._operator
        if kind == "estop":
            if operator is not None and not operator.stop(_CONFIRM_S):
                return ""
            return self._stops.stop(_CONFIRM_S if operator is None else 0.0)
        if kind == "release_estop" and (operator is None or operator.status is None or self._stops.waits):
            return self._stops.release(_CONFIRM_S)
        if operator is None:
            return f"the node is {self.phase}: no edge process runs; activate it first."
        return _SERVICES[kind](operator, _CONFIRM_S)

    def _may_set(self, parameters: list[Any]) -> SetParametersResult:
        ours = [parameter.name for parameter in parameters if parameter.name in DEFAULTS]
        if ours == ["speed_limit"] and self._operator is not None:
            problem = self._limit_speed(self._operator, parameters[0].value)
            return SetParametersResult(successful=not problem, reason=problem)
        if ours and self.phase != "unconfigured":
            reason = f"'{ours[0]}' can be set while the node is unconfigured, not {self.phase}; clean it up first."
            return SetParametersResult(successful=False, reason=reason)
        return SetParametersResult(successful=True)

    def _limit_speed(self, operator: Ros2Operator, share: Any) -> str:
        """'' or why it is not so."""
        try:
            check_speed_limit("parameter 'speed_limit'", share)
        except (InvalidDataError, TypeError) as error:
            return str(error)
        if share > self._speed_limit:
            return f"the edge was started with speed_limit {self._speed_limit:g}; clean the node up to set it higher."
        return operator.limit_speed(float(share), _CONFIRM_S)


def run_edge_node(prepare: Prepare, arguments: list[str] | None = None) -> int:
    """Spin an `EdgeNode` until SIGINT or SIGTERM, then shut it down in order; the exit status."""
    # Our own handlers: rclpy's would take the context away before the edge is stopped. They are there before the node:
    # it can be seen, and asked to end, before it is whole.
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = EdgeNode(prepare)
        executor = MultiThreadedExecutor(num_threads=5)
        executor.add_node(node)
        while not node.ended:
            if asked:
                node.ask_to_end()
            executor.spin_once(timeout_sec=0.2)
        # The callback that ended it may still be on its way out; it must not find the executor gone.
        executor.spin_once(timeout_sec=0.2)
        executor.shutdown()
        node.destroy_node()
    finally:
        rclpy.try_shutdown()
    return 0
