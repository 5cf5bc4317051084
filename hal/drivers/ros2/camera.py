"""A camera on a ROS 2 image topic, raw or compressed, as a `Camera`."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from hal.drivers.ros2.config import ImageTopic, Ros2Config
from hal.drivers.ros2.messages import COMPRESSED, IMAGE
from hal.drivers.ros2.synchronizer import ReceivedPictures, Stamps
from hal.drivers.ros2.wrapper import NodeOptions, Qos, Reliability, RosNode, interface
from wire.errors import InvalidDataError, RobotError
from wire.types import CameraSpec, Dimension, Frame, RobotSpec


@dataclass(frozen=True, slots=True)
class Ros2CameraConfig:
    """Where the pictures come from and what they become."""

    name: str = "camera"
    height: int = 480
    width: int = 640
    rate_hz: float = 30.0
    topic: str = ""
    """'': `camera/NAME/image_raw`, with `/compressed` behind it when compressed"""
    compressed: bool = False
    resize: bool = False
    """shrink what comes to height x width; otherwise another size is an error"""
    namespace: str = ""
    node: str = "vla_fleet_camera"
    domain_id: int | None = None
    reliability: Reliability = "reliable"
    arrival_stamps: bool = False
    """for a camera that does not stamp its pictures"""
    use_sim_time: bool = False
    connect_timeout_s: float = 10.0


class Ros2Camera:
    """Keeps the `Camera` protocol."""

    def __init__(self, config: Ros2CameraConfig | None = None) -> None:
        self.config = config = config or Ros2CameraConfig()
        self.spec = CameraSpec(config.name, config.height, config.width, config.rate_hz)
        self._node = RosNode(
            NodeOptions(config.node, config.namespace, config.domain_id, use_sim_time=config.use_sim_time)
        )
        self._changed = threading.Condition()
        self._pictures: ReceivedPictures | None = None
        self._wrong = ""

    def connect(self) -> None:
        """Subscribe and wait for the first picture. Raises `RobotError` when none comes, or one of another kind."""
        if self._pictures is not None:
            return
        config = self.config
        how = ImageTopic(config.topic, config.compressed, config.resize)
        try:
            self._node.open()
            topic = self._node.topic(how.name(config.name))
            times = _stamping(config, self.spec)
            stamps = Stamps(times, self._node.now_ns, None)
            pictures = ReceivedPictures(self.spec, times, topic, config.resize)

            def heard(message: Any) -> None:
                try:
                    stamp, time_ns, _ = stamps.read(message, topic)
                    frame = pictures.convert(message, time_ns)
                except InvalidDataError as error:
                    with self._changed:
                        self._wrong = str(error)
                        self._changed.notify_all()
                    return
                with self._changed:
                    self._wrong = ""
                    pictures.add(stamp, frame)
                    self._changed.notify_all()

            kind = interface(COMPRESSED if config.compressed else IMAGE)
            self._node.subscribe(kind, how.name(config.name), heard, Qos(config.reliability, depth=4))
            with self._changed:
                self._changed.wait_for(
                    lambda: pictures.frames.newest() is not None or self._wrong, config.connect_timeout_s
                )
                if pictures.frames.newest() is None:
                    why = self._wrong or f"nothing came on '{topic}' within {config.connect_timeout_s:g} s"
                    publishers = self._node.publishers(topic)
                    who = ", ".join(f"{o.node} ({'reliable' if o.reliable else 'best effort'})" for o in publishers)
                    raise RobotError(f"camera '{config.name}': {why}. It is published by {who or 'nobody'}.")
        except BaseException:
            self._node.close()
            raise
        self._pictures = pictures

    def read(self) -> Frame:
        """The newest picture. Raises `RobotError` before `connect` and when what comes does not fit the spec."""
        with self._changed:
            newest = self._pictures.frames.newest() if self._pictures is not None else None
            if newest is None:
                raise RobotError(f"camera '{self.config.name}': read before connect(); call connect() first.")
            if self._wrong:
                raise RobotError(f"camera '{self.config.name}': {self._wrong}")
            return newest[1]

    def close(self) -> None:
        """Give the node back. May be called twice."""
        self._pictures = None
        self._node.close()


def _stamping(config: Ros2CameraConfig, spec: CameraSpec) -> Ros2Config:
    """The part of a robot's configuration that says what stamps are worth."""
    nothing = (Dimension("none", "1", 0.0, 1.0),)
    return Ros2Config(
        RobotSpec("camera", nothing, nothing, (spec,), spec.rate_hz),
        stamps="arrival" if config.arrival_stamps else "header",
        use_sim_time=config.use_sim_time,
    )
