"""A camera on a ROS 2 image topic, raw or compressed, as a `Camera`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hal.drivers.ros2.config import ImageTopic, Ros2Config, StampSource, robot_spec
from hal.drivers.ros2.received import Stamps
from hal.drivers.ros2.synchronizer import MessageSynchronizer
from hal.drivers.ros2.wrapper import Reliability, RosNode
from wire.errors import RobotError
from wire.types import CameraSpec, Dimension, Frame, RobotSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Ros2CameraConfig(ImageTopic):
    """Where the pictures come from and what they become."""

    name: str = "camera"
    height: int = 480
    width: int = 640
    rate_hz: float = 30.0
    namespace: str = ""
    node: str = "vla_fleet_camera"
    domain_id: int | None = None
    reliability: Reliability = "reliable"
    stamps: StampSource = StampSource.header
    use_sim_time: bool = False
    connect_timeout_s: float = 10.0


class Ros2Camera:
    """Keeps the `Camera` protocol."""

    def __init__(self, config: Ros2CameraConfig | None = None) -> None:
        self.config = config = config or Ros2CameraConfig()
        self.spec = CameraSpec(config.name, config.height, config.width, config.rate_hz)
        self._node = RosNode(config.node, config.namespace, config.domain_id, use_sim_time=config.use_sim_time)
        self._synchronizer: MessageSynchronizer | None = None

    def connect(self) -> None:
        """Subscribe and wait for the first picture. Raises `RobotError` when none comes, or one of another kind."""
        if self._synchronizer is not None:
            return
        config, name = self.config, self.config.name
        robot = _as_robot(config, self.spec)
        try:
            self._node.open()
            topic = self._node.topic(config.topic_of(name))
            stamps = Stamps(robot, self._node.now_ns, None)
            topics = {name: topic, "joint_states": ""}
            synchronizer = MessageSynchronizer(robot_spec(robot), robot, topics, stamps, own_clock=False)
            on_picture = partial(synchronizer.on_picture, name)
            self._node.subscribe(config.kind, config.topic_of(name), on_picture, config.reliability, depth=4)
            try:
                synchronizer.newest_picture(name, config.connect_timeout_s)
            except RobotError as error:
                publishers = self._node.publishers(topic).items()
                who = ", ".join(f"{node} ({reliability})" for node, reliability in publishers)
                raise RobotError(f"{error}. It is published by {who or 'nobody'}.") from error
        except BaseException:
            self._node.close()
            raise
        self._synchronizer = synchronizer

    def read(self) -> Frame:
        """The newest picture. Raises `RobotError` before `connect` and when what comes does not fit the spec."""
        if self._synchronizer is None:
            raise RobotError(f"camera '{self.config.name}': read before connect(); call connect() first.")
        return self._synchronizer.newest_picture(self.config.name)

    def close(self) -> None:
        """Give the node back. May be called twice."""
        self._synchronizer = None
        self._node.close()


def _as_robot(config: Ros2CameraConfig, spec: CameraSpec) -> Ros2Config:
    """A robot that has only this camera."""
    nothing = (Dimension("none", "1", 0.0, 1.0),)
    return Ros2Config(
        RobotSpec("camera", nothing, nothing, (spec,), spec.rate_hz),
        cameras={config.name: config},
        stamps=config.stamps,
        use_sim_time=config.use_sim_time,
    )
