"""ROS 2 messages to numbers and back, checked: what does not fit is named with its topic.

Messages of the `sensor_msgs` and `trajectory_msgs` packages are looked up when they are first made.
"""

from __future__ import annotations

import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hal.cameras.picture import resize_image
from hal.drivers.ros2.config import DepthRange, Field, ImageTopic
from hal.drivers.ros2.wrapper import interface
from wire.errors import InvalidDataError
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

JOINT_STATE = "sensor_msgs/msg/JointState"
IMAGE = "sensor_msgs/msg/Image"
COMPRESSED = "sensor_msgs/msg/CompressedImage"
WRENCH = "geometry_msgs/msg/WrenchStamped"
TRAJECTORY = "trajectory_msgs/msg/JointTrajectory"
TRIGGER = "std_srvs/srv/Trigger"

_DEPTHS = {"16UC1": "u2", "32FC1": "f4"}
"""whole millimetres, and metres"""
_CHANNELS = {"rgb8": 3, "bgr8": 3, "mono8": 1}


def stamp_ns(message: Any) -> int:
    """Nanoseconds of the message's `header.stamp`."""
    stamp = message.header.stamp
    return stamp.sec * 1_000_000_000 + stamp.nanosec


def set_stamp(message: Any, ns: int) -> None:
    message.header.stamp.sec, message.header.stamp.nanosec = divmod(ns, 1_000_000_000)


# --- joint states ---------------------------------------------------------------------------------------------------


class StateReader:
    """float32[ds] from a JointState: each dimension from a field of the joint of its name."""

    def __init__(
        self,
        topic: str,
        dimensions: Sequence[Dimension],
        joints: Mapping[str, str],
        fields: Mapping[str, Field],
        elsewhere: Collection[str] = (),
    ) -> None:
        """`elsewhere`: dimensions that another topic holds; NaN here."""
        self._topic = topic
        self._size = len(dimensions)
        self._wanted = [
            (index, joints.get(d.name, d.name), fields.get(d.name, "position"))
            for index, d in enumerate(dimensions)
            if d.name not in elsewhere
        ]

    def read(self, message: Any) -> np.ndarray:
        """Raises `InvalidDataError` naming the joint for one that is missing, or whose field is."""
        names = list(message.name)
        places = {name: index for index, name in enumerate(names)}
        if missing := dict.fromkeys(joint for _, joint, _ in self._wanted if joint not in places):
            raise InvalidDataError(
                f"'{self._topic}': no joint {', '.join(missing)}; it has {', '.join(names) or 'none'}. "
                "Name the robot's joints in `joints`."
            )
        if len(places) != len(names):
            raise InvalidDataError(f"'{self._topic}': a joint stands twice in {', '.join(names)}.")
        state = np.full(self._size, np.nan, np.float32)
        for index, joint, field in self._wanted:
            column = getattr(message, field)
            if places[joint] >= len(column):
                raise InvalidDataError(
                    f"'{self._topic}': joint '{joint}' has no {field}: {len(column)} of them for "
                    f"{len(names)} joints. Have the robot publish it, or say in `fields` what to read."
                )
            state[index] = column[places[joint]]
        return state


def read_wrench(message: Any, axes: Sequence[str]) -> np.ndarray:
    """float32[n]: these axes of a WrenchStamped."""
    parts = (axis.split(".") for axis in axes)
    return np.array([getattr(getattr(message.wrench, part), letter) for part, letter in parts], np.float32)


def joint_state(names: Sequence[str], position: Sequence[float] | np.ndarray, time_ns: int) -> Any:
    """A JointState with positions."""
    message = interface(JOINT_STATE)()
    set_stamp(message, time_ns)
    message.name = list(names)
    message.position = array.array("d", np.asarray(position, np.float64).tobytes())
    return message


FLAGS = ("success", "terminated", "truncated")
"""of `Feedback`: further names of an `executed` message, 1 or 0"""


def read_executed(message: Any, names: Sequence[str]) -> tuple[np.ndarray, dict[str, float]]:
    """(float32[da], everything else by name) of an `executed` message. Raises `InvalidDataError`."""
    values = dict(zip(message.name, message.position, strict=False))
    missing = [name for name in names if name not in values]
    if missing or len(message.name) != len(message.position):
        raise InvalidDataError(
            f"'executed': {len(message.position)} positions for {len(message.name)} names, without "
            f"{', '.join(missing) or 'a missing one'}; it must hold every action dimension of the spec."
        )
    executed = np.array([values.pop(name) for name in names], np.float32)
    return executed, values


# --- commands -------------------------------------------------------------------------------------------------------


def command(spec: RobotSpec, joints: Mapping[str, str], action: np.ndarray, time_ns: int) -> Any:
    """A JointTrajectory of one point from float32[da]; see docs/ros2.md."""
    message = interface(TRAJECTORY)()
    set_stamp(message, time_ns)
    message.joint_names = [joints.get(d.name, d.name) for d in spec.action]
    point = interface("trajectory_msgs/msg/JointTrajectoryPoint")()
    rates = np.array([d.meaning is CommandType.velocity for d in spec.action], bool)
    values = np.asarray(action, np.float64)
    if not rates.all():
        point.positions = array.array("d", np.where(rates, np.nan, values).tobytes())
    if rates.any():
        point.velocities = array.array("d", np.where(rates, values, np.nan).tobytes())
    point.time_from_start.sec, point.time_from_start.nanosec = divmod(spec.period_ns, 1_000_000_000)
    message.points = [point]
    return message


def read_command(message: Any, spec: RobotSpec, topic: str) -> np.ndarray:
    """float32[da] of a JointTrajectory as `command` makes it, its joints in any order. Raises `InvalidDataError`."""
    names = list(message.joint_names)
    wanted = [d.name for d in spec.action]
    if sorted(names) != sorted(wanted):
        raise InvalidDataError(f"'{topic}': joints {', '.join(names) or 'none'}; this robot has {', '.join(wanted)}.")
    if len(message.points) != 1:
        raise InvalidDataError(f"'{topic}': {len(message.points)} points; send one, for the next control period.")
    point = message.points[0]
    action = np.empty(len(wanted), np.float32)
    for index, d in enumerate(spec.action):
        field = "velocities" if d.meaning is CommandType.velocity else "positions"
        values = getattr(point, field)
        if len(values) != len(names):
            raise InvalidDataError(f"'{topic}': {len(values)} {field} for {len(names)} joints; '{d.name}' needs one.")
        action[index] = values[names.index(d.name)]
    return action


# --- pictures -------------------------------------------------------------------------------------------------------


def decode_picture(message: Any, topic: str, depth: DepthRange | None = None) -> np.ndarray:
    """uint8[h, w, 3] RGB of an Image or CompressedImage; grey of a depth Image, as `depth` says. Raises
    `InvalidDataError` for what it is not.
    """
    if depth is not None:
        return _grey(_distances(message, topic), depth)
    return _compressed(message, topic) if hasattr(message, "format") else _raw(message, topic)


def _raw(message: Any, topic: str) -> np.ndarray:
    channels = _CHANNELS.get(message.encoding)
    if channels is None:
        raise InvalidDataError(
            f"'{topic}': encoding '{message.encoding}' is none of {', '.join(_CHANNELS)}. Have the camera's node send "
            "one of these, for example with image_proc; a depth camera has `depth`."
        )
    image = _rows(message, topic, channels).reshape(message.height, message.width, channels)
    if message.encoding == "mono8":
        return np.repeat(image, 3, axis=2)
    return np.ascontiguousarray(image[..., ::-1] if message.encoding == "bgr8" else image)


def _rows(message: Any, topic: str, pixel_bytes: int) -> np.ndarray:
    """uint8[h, w * pixel_bytes]: an Image's data without what its rows may be padded with."""
    height, width, step = message.height, message.width, message.step
    data = np.frombuffer(message.data, np.uint8)
    if step < width * pixel_bytes or data.size != step * height or not data.size:
        raise InvalidDataError(
            f"'{topic}': {data.size} bytes in rows of {step} for {height}x{width} '{message.encoding}'; that takes "
            f"{height * width * pixel_bytes}."
        )
    return data.reshape(height, step)[:, : width * pixel_bytes]


def _distances(message: Any, topic: str) -> np.ndarray:
    """float32[h, w] in metres, NaN where nothing was measured (REP 118)."""
    number = _DEPTHS.get(message.encoding)
    if number is None:
        raise InvalidDataError(
            f"'{topic}': encoding '{message.encoding}' is none of {', '.join(_DEPTHS)}, and `depth` is set for this "
            "camera. Unset it, or name the depth camera's topic."
        )
    kind = np.dtype(number).newbyteorder(">" if message.is_bigendian else "<")
    values = np.ascontiguousarray(_rows(message, topic, kind.itemsize)).view(kind).astype(np.float32)
    if message.encoding == "16UC1":
        values /= 1000.0
    values[values == 0] = np.nan
    return values


def _grey(metres: np.ndarray, depth: DepthRange) -> np.ndarray:
    """uint8[h, w, 3] of float32[h, w]: 1 at `near_m` and nearer to 255 at `far_m` and farther, 0 for NaN."""
    share = (metres - depth.near_m) / (depth.far_m - depth.near_m)
    levels = np.where(np.isnan(share), 0, np.rint(1 + 254 * np.clip(share, 0, 1)))
    with np.errstate(invalid="ignore"):
        return np.repeat(levels.astype(np.uint8)[:, :, None], 3, axis=2)


def _compressed(message: Any, topic: str) -> np.ndarray:
    import cv2

    data = np.frombuffer(message.data, np.uint8)
    image = cv2.imdecode(data, cv2.IMREAD_COLOR) if data.size else None
    if image is None:
        raise InvalidDataError(f"'{topic}': {data.size} bytes of format '{message.format}' are no JPEG or PNG picture.")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def fit_picture(image: np.ndarray, spec: CameraSpec, how: ImageTopic, topic: str) -> np.ndarray:
    """`image` in the size of `spec`. Raises `InvalidDataError` when it has another and `resize` is not wanted."""
    if image.shape[:2] == (spec.height, spec.width):
        return image
    if not how.resize:
        raise InvalidDataError(
            f"'{topic}': pictures of {image.shape[0]}x{image.shape[1]}; camera '{spec.name}' of the spec has "
            f"{spec.height}x{spec.width}. Set the camera's size, or `resize` for it."
        )
    if how.depth is not None:
        # A mean of two distances is where nothing is, and one with a pixel that was not measured is none.
        rows = (np.arange(spec.height) + 0.5) * image.shape[0] // spec.height
        columns = (np.arange(spec.width) + 0.5) * image.shape[1] // spec.width
        return image[rows.astype(int)[:, None], columns.astype(int)]
    return resize_image(image, spec.height, spec.width)


def raw_image(camera: str, image: np.ndarray, time_ns: int) -> Any:
    """An Image, `rgb8`, from uint8[h, w, 3] RGB."""
    message = _image(IMAGE, camera, time_ns, np.ascontiguousarray(image))
    message.height, message.width = image.shape[:2]
    message.encoding, message.step = "rgb8", image.shape[1] * 3
    return message


def compressed_image(camera: str, quality: int, image: np.ndarray, time_ns: int) -> Any:
    """A CompressedImage, JPEG, from uint8[h, w, 3] RGB; `quality` 1 to 100."""
    import cv2

    _, coded = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, quality])
    message = _image(COMPRESSED, camera, time_ns, coded)
    message.format = "rgb8; jpeg compressed bgr8"
    return message


def _image(kind: str, camera: str, time_ns: int, data: np.ndarray) -> Any:
    message = interface(kind)()
    set_stamp(message, time_ns)
    message.header.frame_id = camera
    message.data = array.array("B")
    message.data.frombytes(data.data.cast("B"))
    return message
