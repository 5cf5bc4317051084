"""What a node sends last arrives, though the node is closed at once."""

from __future__ import annotations

import pytest

from tests.ros import needs_ros, wait_until
from tests.ros import ros as ros

pytestmark = [needs_ros, pytest.mark.slow]

from hal.drivers.ros2.wrapper import RosNode, interface  # noqa: E402

KIND, TOPIC = "sensor_msgs/msg/Image", "large"
MESSAGES, ROUNDS = 20, 12
"""large messages take a while; without waiting for them every third round loses some"""


def test_what_is_sent_last_arrives_though_the_node_is_closed(ros: None) -> None:
    image = interface(KIND)
    got: list[int] = []
    reader = RosNode("reader")
    reader.open()
    try:
        reader.subscribe(KIND, TOPIC, lambda message: got.append(message.height), depth=2 * MESSAGES)
        for hello in range(1000, 1000 + ROUNDS):
            writer = RosNode("writer")
            writer.open()
            publisher = writer.publisher(KIND, TOPIC, depth=2 * MESSAGES)

            def is_heard() -> bool:
                publisher.send(image(height=hello))
                return hello in got

            wait_until(is_heard)
            got.clear()
            for number in range(MESSAGES):
                publisher.send(image(height=number, data=bytes(2_000_000)))
            writer.close()
            wait_until(lambda: MESSAGES - 1 in got, 20.0)
    finally:
        reader.close()
