"""Numbers and pictures in ROS 2 messages, and what is said of messages that do not fit."""

from __future__ import annotations

import array
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hal.drivers.fake import FakeConfig, fake_spec
from tests.ros import needs_ros
from wire.errors import ConfigError, InvalidDataError, RobotError
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

pytestmark = needs_ros

from hal.drivers.ros2 import messages as m  # noqa: E402
from hal.drivers.ros2.config import (  # noqa: E402
    DepthRange,
    ImageTopic,
    IntegrationTarget,
    Ros2Config,
    WrenchTopic,
    robot_spec,
)
from hal.drivers.ros2.received import Stamps  # noqa: E402
from hal.drivers.ros2.synchronizer import MessageSynchronizer  # noqa: E402

ARM = RobotSpec(
    "arm",
    (Dimension("elbow", "rad", -3.0, 3.0), Dimension("elbow_speed", "rad/s", -9.0, 9.0)),
    (
        Dimension("elbow", "rad", -3.0, 3.0),
        Dimension("wheel", "rad/s", -5.0, 5.0, CommandType.velocity),
    ),
    (CameraSpec("front", 4, 6, 30.0),),
    50.0,
)


def reader(**more: dict[str, str]) -> m.StateReader:
    return m.StateReader("/arm/joint_states", ARM.state, more.get("joints", {}), more.get("fields", {}))


def test_a_state_is_read_by_name_in_any_order_from_the_field_that_is_asked_for() -> None:
    message = m.joint_state(["other", "elbow"], [9.0, 1.5], 3)
    message.velocity = [8.0, -2.5]
    read = reader(joints={"elbow_speed": "elbow"}, fields={"elbow_speed": "velocity"})
    assert read.read(message).tolist() == [1.5, -2.5]
    # the order may change while it runs
    message.name, message.position, message.velocity = ["elbow", "other"], [1.0, 0.0], [2.0, 0.0]
    assert read.read(message).tolist() == [1.0, 2.0]
    assert m.stamp_ns(message) == 3


@pytest.mark.parametrize(
    ("names", "position", "said"),
    [
        (["elbow"], [1.0], "no joint elbow_speed; it has elbow"),
        (["elbow", "elbow_speed"], [1.0], "joint 'elbow_speed' has no position: 1 of them for 2 joints"),
        (["elbow", "elbow", "elbow_speed"], [1.0, 2.0, 3.0], "stands twice"),
        ([], [], "it has none"),
    ],
)
def test_joint_states_that_do_not_fit_are_named(names: list[str], position: list[float], said: str) -> None:
    with pytest.raises(InvalidDataError, match="'/arm/joint_states'") as raised:
        reader().read(m.joint_state(names, position, 1))
    assert said in str(raised.value)


def test_a_command_keeps_every_bit_of_its_numbers() -> None:
    spec = fake_spec(FakeConfig())
    action = np.random.default_rng(0).uniform(-1, 1, 4).astype(np.float32)
    message = m.command(spec, {}, action, 1_700_000_000_123_456_789)
    assert m.stamp_ns(message) == 1_700_000_000_123_456_789
    assert list(message.joint_names) == ["move_x", "move_y", "move_z", "gripper_effort"]
    assert message.points[0].time_from_start.nanosec == 12_500_000
    assert len(message.points[0].velocities) == 0
    assert m.read_command(message, spec, "c").tobytes() == action.tobytes()


def test_velocities_travel_as_velocities() -> None:
    message = m.command(ARM, {}, np.array([1.0, -2.0], np.float32), 1)
    point = message.points[0]
    assert np.isnan(point.positions[1])
    assert np.isnan(point.velocities[0])
    assert m.read_command(message, ARM, "c").tolist() == [1.0, -2.0]
    wheels = RobotSpec("base", ARM.state, ARM.action[1:], (), 50.0)
    assert len(m.command(wheels, {}, np.zeros(1, np.float32), 1).points[0].positions) == 0


def test_a_command_for_another_robot_is_named() -> None:
    good = m.command(ARM, {}, np.zeros(2, np.float32), 1)
    with pytest.raises(InvalidDataError, match="this robot has move_x"):
        m.read_command(good, fake_spec(FakeConfig()), "joint_trajectory")
    good.points = [*good.points, *good.points]
    with pytest.raises(InvalidDataError, match="2 points; send one"):
        m.read_command(good, ARM, "joint_trajectory")
    good.points = good.points[:1]
    good.points[0].velocities = []
    with pytest.raises(InvalidDataError, match="0 velocities for 2 joints; 'wheel'"):
        m.read_command(good, ARM, "joint_trajectory")


def test_what_was_executed_needs_every_dimension() -> None:
    executed, more = m.read_executed(m.joint_state(["b", "reward", "a"], [2.0, 0.5, 1.0], 1), ["a", "b"])
    assert executed.tolist() == [1.0, 2.0]
    assert more == {"reward": 0.5}
    with pytest.raises(InvalidDataError, match="without b"):
        m.read_executed(m.joint_state(["a"], [1.0], 1), ["a", "b"])


@pytest.mark.parametrize("said", [(), ("success", "terminated"), ("truncated",)])
def test_a_robot_says_with_what_it_executed_how_the_episode_ended(said: tuple[str, ...]) -> None:
    config = Ros2Config(ARM, executed=True)
    topics = {"joint_states": "/joint_states", "executed": "/executed", "front": "/front"}
    synchronizer = MessageSynchronizer(ARM, config, topics, Stamps(config, lambda: 0, None), own_clock=False)
    synchronizer.on_executed(m.joint_state(["elbow", "wheel", *said], [0.5, 1.0, *[1.0] * len(said)], 7))
    feedback = synchronizer.wait_for_executed(7, 1.0)
    assert feedback is not None and feedback.executed.tolist() == [0.5, 1.0]
    assert tuple(flag for flag in m.FLAGS if getattr(feedback, flag)) == said


def test_pictures_of_every_encoding_become_rgb() -> None:
    for encoding, channels in (("rgb8", 3), ("bgr8", 3), ("mono8", 1)):
        pixels = np.random.default_rng(1).integers(0, 255, (4, 6 * channels + 2), np.uint8)
        message = m.interface(m.IMAGE)()
        message.height, message.width, message.encoding, message.step = 4, 6, encoding, pixels.shape[1]
        message.data = array.array("B", pixels.tobytes())
        seen = m.decode_picture(message, "t")
        own = pixels[:, : 6 * channels].reshape(4, 6, channels)
        wanted = {"rgb8": own, "bgr8": own[..., ::-1], "mono8": np.repeat(own, 3, axis=2)}[encoding]
        assert np.array_equal(seen, wanted), encoding
        assert seen.flags.c_contiguous


def test_pictures_that_do_not_fit_are_named() -> None:
    message = m.raw_image("front", np.zeros((4, 6, 3), np.uint8), 1)
    assert np.array_equal(m.decode_picture(message, "t"), np.zeros((4, 6, 3), np.uint8))
    message.encoding = "16UC1"
    with pytest.raises(InvalidDataError, match="encoding '16UC1' is none of rgb8, bgr8, mono8"):
        m.decode_picture(message, "/front")
    message.encoding, message.height = "rgb8", 5
    with pytest.raises(InvalidDataError, match="72 bytes in rows of 18 for 5x6 'rgb8'; that takes 90"):
        m.decode_picture(message, "/front")
    broken = m.compressed_image("front", 90, np.zeros((4, 6, 3), np.uint8), 1)
    broken.data = broken.data[:10]
    with pytest.raises(InvalidDataError, match="no JPEG or PNG"):
        m.decode_picture(broken, "/front")


def depth_image(encoding: str, values: np.ndarray, padding: int = 0, big: bool = False) -> Any:
    message = m.interface(m.IMAGE)()
    rows = np.pad(values.astype(values.dtype.newbyteorder(">" if big else "<")).view(np.uint8), ((0, 0), (0, padding)))
    message.height, message.width = values.shape
    message.encoding, message.step, message.is_bigendian = encoding, rows.shape[1], int(big)
    message.data = array.array("B", rows.tobytes())
    return message


@pytest.mark.parametrize("big", [False, True])
def test_distances_are_levels_of_grey_and_0_is_none(big: bool) -> None:
    reach = DepthRange(0.5, 2.5)
    metres = np.array([[np.nan, 0.0, 0.1], [0.5, 1.5, 2.5], [np.inf, -np.inf, 9.0]], np.float32)
    levels = [[0, 0, 1], [1, 128, 255], [255, 1, 255]]
    seen = m.decode_picture(depth_image("32FC1", metres, padding=4, big=big), "t", reach)
    assert seen.shape == (3, 3, 3) and seen.dtype == np.uint8
    assert all(seen[..., channel].tolist() == levels for channel in range(3))
    millimetres = np.array([[0, 1, 65535], [500, 1500, 2500]], np.uint16)
    seen = m.decode_picture(depth_image("16UC1", millimetres, big=big), "t", reach)
    assert seen[..., 0].tolist() == [[0, 1, 255], [1, 128, 255]]


def test_distances_are_not_mixed_when_a_depth_picture_shrinks() -> None:
    board = np.kron(np.indices((4, 4)).sum(0) % 2, np.ones((2, 2))).astype(np.uint16) * 2000
    seen = m.decode_picture(depth_image("16UC1", board), "t", DepthRange(0.0, 4.0))
    how = ImageTopic(resize=True, depth=DepthRange(0.0, 4.0))
    small = m.fit_picture(seen, CameraSpec("deep", 4, 4, 30.0), how, "t")
    assert set(np.unique(small)) == {0, 128}
    assert np.array_equal(small[..., 0] > 0, np.indices((4, 4)).sum(0) % 2 == 1)


def test_a_picture_that_is_no_depth_picture_is_named() -> None:
    colour = m.raw_image("front", np.zeros((4, 6, 3), np.uint8), 1)
    with pytest.raises(InvalidDataError, match=r"'/d': encoding 'rgb8' is none of 16UC1, 32FC1, and `depth` is set"):
        m.decode_picture(colour, "/d", DepthRange(0.5, 2.5))
    for near, far in ((1.0, 1.0), (-1.0, 2.0), (0.5, float("inf"))):
        with pytest.raises(ConfigError, match="DepthRange"):
            DepthRange(near, far)
    with pytest.raises(ConfigError, match="depth comes as a raw Image"):
        ImageTopic(compressed=True, depth=DepthRange(0.5, 2.5))


def test_a_wrench_that_falls_silent_is_named_and_nobody_acts_on_its_last_value() -> None:
    spec = RobotSpec("arm", (ARM.state[0], Dimension("push", "N", -9.0, 9.0)), ARM.action, (), 50.0)
    config = Ros2Config(spec, wrenches=(WrenchTopic("ft", {"push": "force.z"}),), max_age_s=0.5)
    now = [time.monotonic_ns()]
    stamps = Stamps(config, lambda: now[0], None)
    synchronizer = MessageSynchronizer(spec, config, {"joint_states": "/joint_states", "ft": "/ft"}, stamps, False)
    felt = m.interface(m.WRENCH)()
    felt.wrench.force.z = -2.5
    m.set_stamp(felt, now[0] - 400_000_000)
    synchronizer.on_wrench("ft", felt)
    synchronizer.on_state(m.joint_state(["elbow"], [1.5], now[0] - 1_000_000))
    assert synchronizer.observation("").state.tolist() == [1.5, -2.5]
    assert np.isnan(synchronizer.state()[1]), "to hold, no wrench is needed"
    m.set_stamp(felt, 0)
    synchronizer.on_wrench("ft", felt)
    synchronizer._config = replace(config, max_age_s=0.3)
    with pytest.raises(RobotError, match=r"wrench on '/ft' is 0\.\d+ s old .*: '/ft': header.stamp is 0"):
        synchronizer.observation("")


def test_a_jpeg_comes_back_nearly_as_it_was_and_may_be_shrunk() -> None:
    spec = CameraSpec("front", 24, 32, 30.0)
    ramp = np.zeros((48, 64, 3), np.uint8)
    ramp[..., 0], ramp[..., 2] = np.linspace(0, 255, 64), 40
    seen = m.decode_picture(m.compressed_image("front", 95, ramp, 1), "t")
    assert np.abs(seen.astype(int) - ramp).mean() < 3
    assert m.fit_picture(seen, spec, ImageTopic(resize=True), "t").shape == (24, 32, 3)
    with pytest.raises(InvalidDataError, match="48x64; camera 'front' of the spec has 24x32"):
        m.fit_picture(seen, spec, ImageTopic(), "t")


def test_a_configuration_is_checked_against_its_spec(tmp_path) -> None:
    import msgspec

    path = tmp_path / "arm.json"
    path.write_bytes(msgspec.json.encode(ARM))
    assert robot_spec(Ros2Config(str(path))) == ARM
    with pytest.raises(ConfigError, match=r"spec .*gone.json"):
        robot_spec(Ros2Config(str(tmp_path / "gone.json")))
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not a robot spec"):
        robot_spec(Ros2Config(str(path)))
    with pytest.raises(ConfigError, match=r"of 'arm': `cameras` names 'frant'. Did you mean 'front'"):
        robot_spec(Ros2Config(ARM, cameras={"frant": ImageTopic()}))
    with pytest.raises(ConfigError, match="stepped needs executed"):
        Ros2Config(ARM, stepped=True)
    with pytest.raises(ConfigError, match="stepped needs stamps: header"):
        Ros2Config(ARM, stepped=True, executed=True, stamps="arrival")
    with pytest.raises(ConfigError, match=r"reset moves a real robot .* set stop: true"):
        Ros2Config(ARM, reset=True)
    assert Ros2Config(ARM, reset=True, stop=True).reset and Ros2Config(ARM, reset=True, simulated=True).reset
    with pytest.raises(ConfigError, match="say which state dimension move_y, move_z"):
        robot_spec(Ros2Config(fake_spec(FakeConfig()), targets={"move_x": IntegrationTarget("x")}))
