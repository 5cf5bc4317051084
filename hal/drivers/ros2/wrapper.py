"""ROS 2 behind one small door: the only file of `hal` that imports rclpy.

A `RosNode` has a context of its own, so several can live in one process, and a thread that runs its callbacks. Messages
come in as they are; `messages` turns them into numbers.

Written for Kilted, and for Jazzy and Humble, which differ in this: Fast DDS looks for its profile under another name
before 3.0 (Kilted), and warns of the old name from then on; Humble has no `rclpy.parameter_client`, so parameters are
set by their service; events of a subscription live in another module there, so publishers are asked for their quality
of service when nothing comes. The experimental executors of newer ones are not used. All that is in this file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from wire.errors import ConfigError, RobotError

log = logging.getLogger(__name__)

Value = bool | int | float | str
Reliability = Literal["reliable", "best_effort"]

PROFILE = Path(__file__).with_name("fastdds.xml")
_NEW_VARIABLE, _OLD_VARIABLE = "FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE"
"""from Fast DDS 3.0 on (Kilted), and before"""
_DELIVER_S = 1.0
_USERS_OWN = (_NEW_VARIABLE, _OLD_VARIABLE, "FASTDDS_BUILTIN_TRANSPORTS")


def import_rclpy() -> Any:
    """rclpy. Raises `RobotError` that says how to get it."""
    try:
        import rclpy
    except Exception as error:  # ImportError, and OSError for a shared library of another distribution
        raise RobotError(
            f"ROS 2 cannot be imported ({type(error).__name__}: {error}). Source its setup file, or install it with "
            "`pip install 'vla-fleet[ros]'`."
        ) from error
    return rclpy


@functools.cache
def interface(name: str) -> Any:
    """The class of a message or service, such as `sensor_msgs/msg/JointState`. Raises `RobotError`."""
    package, kind, what = name.split("/")
    try:
        return getattr(importlib.import_module(f"{package}.{kind}"), what)
    except (ImportError, AttributeError) as error:
        raise RobotError(
            f"ROS 2 interface '{name}' cannot be imported ({error}); install `ros-{package.replace('_', '-')}`."
        ) from error


def own_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without what is meant for ROS (`--ros-args ... --`)."""
    import_rclpy()
    from rclpy.utilities import remove_ros_args

    return remove_ros_args(args=["", *arguments])[1:]


def use_profile(path: Path = PROFILE) -> bool:
    """Have Fast DDS read the profile at `path` when this process makes its first context.

    False when the user chose a profile or transports of their own, which are kept.
    """
    if any(os.environ.get(name) not in (None, "", str(path)) for name in _USERS_OWN):
        return False
    new = importlib.util.find_spec("rclpy.experimental") is not None
    os.environ[_NEW_VARIABLE if new else _OLD_VARIABLE] = str(path)
    return True


class RosNode:
    """One node, its context and the thread that runs its callbacks, one at a time.

    Any thread may call any method, except that a callback must not wait for another (`call`). Topics are volatile: the
    newest `depth` messages are kept. `kind` is the type of a message or service, as `interface` takes it.
    """

    def __init__(
        self,
        name: str,
        namespace: str = "",
        domain_id: int | None = None,
        *,
        arguments: Sequence[str] = (),
        parameters: Mapping[str, Value] | None = None,
        use_sim_time: bool = False,
    ) -> None:
        """`domain_id`: None for `ROS_DOMAIN_ID`, else 0; `arguments`: standard ROS arguments, as
        `--ros-args -r __ns:=/left -p seed:=3`; `parameters`: declared with these defaults, arguments may set others.
        """
        self.name = name
        self._namespace = namespace
        self._domain_id = domain_id
        self._arguments = list(arguments)
        self._parameters = parameters or {}
        self._use_sim_time = use_sim_time
        self.fault = ""
        """what the last callback that failed said; '' when none has"""
        self._publishers: list[Any] = []
        self._context: Any = None
        self._node: Any = None
        self._executor: Any = None
        self._thread: threading.Thread | None = None
        self._borrowed = False

    # --- life -----------------------------------------------------------------------------------------------------

    def open(self, beside: RosNode | None = None) -> None:
        """Make the node and start its thread. Twice is once.

        `beside`: share its context (one participant, one discovery), with a thread of its own for slow callbacks.
        Raises `RobotError` without ROS 2, `ConfigError` for a name, namespace or argument it does not take.
        """
        if self._node is not None:
            return
        rclpy = import_rclpy()
        use_profile()
        self._borrowed = beside is not None
        try:
            if beside is not None:
                self._context = beside._context
            else:
                self._context = rclpy.Context()
                self._context.init(args=self._arguments, domain_id=self._domain_id)
            overrides = [rclpy.parameter.Parameter("use_sim_time", value=True)] if self._use_sim_time else []
            self._node = rclpy.create_node(
                self.name,
                context=self._context,
                namespace=self._namespace or None,
                parameter_overrides=overrides,
                start_parameter_services=beside is None,
            )
            for name, value in self._parameters.items():
                self._node.declare_parameter(name, value)
        except Exception as error:
            self._release()
            raise ConfigError(
                f"ROS 2 node '{self.name}' in namespace '{self._namespace or '/'}' cannot be made with arguments "
                f"{self._arguments}: {type(error).__name__}: {error}."
            ) from error
        from rclpy.executors import SingleThreadedExecutor

        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._thread = threading.Thread(target=self._spin, name=f"ros-{self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, give the node back and, where it is its own, the context. May be called twice.

        What was sent last, such as the command to stand, is delivered first where somebody takes it within a second.
        """
        self._deliver()
        if self._executor is not None:
            self._executor.shutdown()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
            if self._thread.is_alive():
                log.warning("ROS 2 node '%s': its thread has not ended after 5 s.", self.name)
        self._release()

    def _deliver(self) -> None:
        # A publisher that goes takes with it what its readers have not acknowledged.
        from rclpy.duration import Duration

        until_s = time.monotonic() + _DELIVER_S
        for publisher in self._publishers if self._context is not None and self._context.ok() else ():
            with contextlib.suppress(RuntimeError):  # what all of rclpy's own errors are
                publisher.wait_for_all_acked(Duration(seconds=max(0.0, until_s - time.monotonic())))

    def _release(self) -> None:
        self._publishers.clear()
        if self._node is not None:
            self._node.destroy_node()
        if self._context is not None and not self._borrowed and self._context.ok():
            self._context.shutdown()
        self._context = self._node = self._executor = self._thread = None

    def _spin(self) -> None:
        from rclpy.executors import ExternalShutdownException

        executor, context = self._executor, self._context
        try:
            executor.spin()
        except ExternalShutdownException:
            return
        except Exception as error:
            if context.ok():
                self.fault = f"the thread of ROS 2 node '{self.name}' died: {type(error).__name__}: {error}"
                log.exception("%s", self.fault)

    def _guarded(self, what: str, callback: Callable[..., Any]) -> Callable[..., Any]:
        # An exception that leaves a callback ends the executor, and with it everything else this node does.
        def call(*arguments: Any) -> Any:
            try:
                return callback(*arguments)
            except Exception as error:
                self.fault = f"{what}: {type(error).__name__}: {error}"
                log.exception("ROS 2 node '%s': %s", self.name, self.fault)
                return None

        return call

    @property
    def node(self) -> Any:
        """The rclpy node. Raises `RobotError` before `open`."""
        if self._node is None:
            raise RobotError(f"ROS 2 node '{self.name}' is not open; call open() first.")
        return self._node

    @property
    def full_name(self) -> str:
        """With its namespace, such as `/left/robot`."""
        return self.node.get_fully_qualified_name()

    @property
    def domain_id(self) -> int:
        return self._context.get_domain_id()

    def now_ns(self) -> int:
        """ROS time: the system's, or `/clock`'s with use_sim_time (0 before its first message)."""
        return self.node.get_clock().now().nanoseconds

    # --- topics ---------------------------------------------------------------------------------------------------

    def topic(self, name: str) -> str:
        """The name in full, after namespace and remappings."""
        return self.node.resolve_topic_name(name)

    def publisher(self, kind: str, topic: str, reliability: Reliability = "reliable", depth: int = 10) -> Publisher:
        publisher = self.node.create_publisher(interface(kind), topic, _qos(reliability, depth))
        self._publishers.append(publisher)
        return Publisher(publisher)

    def subscribe(
        self,
        kind: str,
        topic: str,
        on_message: Callable[[Any], None],
        reliability: Reliability = "reliable",
        depth: int = 10,
    ) -> None:
        """Call `on_message` with each message, in this node's thread."""
        # Named, so that rclpy sees one argument and gives no message info.
        guarded = self._guarded(f"a message of '{topic}'", on_message)
        self.node.create_subscription(
            interface(kind), topic, lambda message: guarded(message), _qos(reliability, depth)
        )

    def publishers(self, topic: str) -> dict[str, Reliability]:
        """Who publishes `topic` now and how, by node, as far as discovery has come."""
        from rclpy.qos import ReliabilityPolicy

        found: dict[str, Reliability] = {}
        for info in self.node.get_publishers_info_by_topic(self.topic(topic)):
            reliable = info.qos_profile.reliability == ReliabilityPolicy.RELIABLE
            found[f"{info.node_namespace.rstrip('/')}/{info.node_name}"] = "reliable" if reliable else "best_effort"
        return found

    def mismatches(self, topic: str, kind: str, reliability: Reliability) -> list[str]:
        """Why each node that subscribes to `topic` cannot hear a publisher of this kind; [] when nobody subscribes."""
        from rclpy.qos import QoSCompatibility, qos_check_compatible

        found = []
        for info in self.node.get_subscriptions_info_by_topic(self.topic(topic)):
            who = f"'{self.topic(topic)}' is taken by {info.node_namespace.rstrip('/')}/{info.node_name}"
            fits, why = qos_check_compatible(_qos(reliability, 1), info.qos_profile)
            why = why.replace("ERROR: ", "").replace(";", ", ")
            if info.topic_type != kind:
                found.append(f"{who} as {info.topic_type}, not as {kind}; set the output's kind")
            elif fits is not QoSCompatibility.OK:
                found.append(f"{who} with another quality of service ({why.strip('; ')}); set qos.command or its own")
        return found

    def topics_of(self, kind: str) -> list[str]:
        """Names of all topics of a type that are there now, sorted."""
        return sorted(name for name, kinds in self.node.get_topic_names_and_types() if kind in kinds)

    # --- services, parameters, timers -----------------------------------------------------------------------------

    def serve(self, kind: str, name: str, answer: Callable[[Any, Any], Any]) -> None:
        """Offer a service: `answer(request, response)` fills and returns the response, in this node's thread."""
        guarded = self._guarded(f"a call of '{name}'", answer)
        # What failed is answered as it was: empty.
        self.node.create_service(interface(kind), name, lambda ask, reply: guarded(ask, reply) or reply)

    def client(self, kind: str, name: str) -> Client:
        return Client(self.node.create_client(interface(kind), name), self.node.resolve_service_name(name))

    def parameter(self, name: str) -> Any:
        """The value of one of this node's own parameters."""
        return self.node.get_parameter(name).value

    def on_parameters(self, check: Callable[[dict[str, Any]], str]) -> None:
        """Ask `check` before parameters change: '' takes the new values, anything else is why not."""
        result = interface("rcl_interfaces/msg/SetParametersResult")

        def changed(parameters: Sequence[Any]) -> Any:
            why = self._guarded("a change of parameters", check)({one.name: one.value for one in parameters})
            why = self.fault if why is None else why
            return result(successful=not why, reason=why)

        self.node.add_on_set_parameters_callback(changed)

    def set_parameters(self, node: str, values: Mapping[str, Value], timeout_s: float) -> dict[str, str]:
        """Set parameters of another node. Returns why each that was refused was. Raises `RobotError` for silence."""
        import_rclpy()
        from rclpy.parameter import Parameter

        client = self.client("rcl_interfaces/srv/SetParameters", f"{node}/set_parameters")
        try:
            wanted = [Parameter(name, value=value).to_parameter_msg() for name, value in values.items()]
            results = client.call(timeout_s, parameters=wanted).results
        finally:
            client.close()
        pairs = zip(values, results, strict=True)
        return {name: one.reason or "refused without a reason" for name, one in pairs if not one.successful}

    def every(self, period_s: float, tick: Callable[[], None]) -> None:
        """Call `tick` at this period of ROS time, in this node's thread."""
        self.node.create_timer(period_s, self._guarded("a timer", tick))


class Publisher:
    """One topic to publish on, from any thread."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    def send(self, message: Any) -> None:
        """Raises `RobotError` when the transport does not take it, as on a machine that is too busy."""
        try:
            self._publisher.publish(message)
        except RuntimeError as error:  # what all of rclpy's own errors are
            raise RobotError(f"'{self._publisher.topic_name}': a message could not be sent: {error}") from error

    @property
    def subscriptions(self) -> int:
        """How many subscriptions are matched now."""
        return self._publisher.get_subscription_count()


class Client:
    """One service to call, from any thread but its node's own."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self.name = name

    def wait(self, timeout_s: float) -> None:
        """Until the service is found. Raises `RobotError` when it is not in time."""
        if not self._client.wait_for_service(timeout_sec=timeout_s):
            raise RobotError(
                f"no service '{self.name}' within {timeout_s:g} s. Is the robot's node running, in this namespace and "
                "ROS_DOMAIN_ID? `ros2 service list` shows what there is."
            )

    def call(self, timeout_s: float, **request: Any) -> Any:
        """The response to these fields. Raises `RobotError` when there is no such service, or no answer, in time."""
        self.wait(timeout_s)
        done = threading.Event()
        future = self._client.call_async(self._client.srv_type.Request(**request))
        future.add_done_callback(lambda _: done.set())
        if not done.wait(timeout_s):
            self._client.remove_pending_request(future)
            raise RobotError(f"service '{self.name}' has not answered within {timeout_s:g} s; is its node stuck?")
        return future.result()

    def send(self, timeout_s: float, **request: Any) -> Any:
        """Ask without waiting for the response, a future. Raises `RobotError` when there is no such service in time:
        who has just connected may not have found it yet."""
        self.wait(timeout_s)
        return self._client.call_async(self._client.srv_type.Request(**request))

    def close(self) -> None:
        self._client.destroy()


def _qos(reliability: Reliability, depth: int) -> Any:
    from rclpy.qos import QoSProfile, ReliabilityPolicy

    reliable = reliability == "reliable"
    return QoSProfile(
        depth=depth, reliability=ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT
    )
