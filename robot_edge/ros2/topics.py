"""What a ROS 2 robot must offer before it can be driven, and a sentence about what of it is missing.

Asks a node for its graph but imports no rclpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Something another node must have."""

    kind: str
    """publisher, subscription or service"""
    name: str
    """absolute"""
    type: str
    """as `ros2 topic info` prints it: sensor_msgs/msg/JointState"""


_VERBS = {
    "publisher": "nobody publishes",
    "subscription": "nobody listens on",
    "service": "nobody offers the service",
}


def describe_missing(endpoints: Iterable[Endpoint], node: Any) -> str:
    """What of `endpoints` an rclpy `node` does not see, with what looks like it under another name; '' when nothing."""
    lacking = [endpoint for endpoint in endpoints if endpoint.type not in _types(endpoint, node)]
    if not lacking:
        return ""
    said = []
    for endpoint in lacking:
        others = sorted(_types(endpoint, node))
        instead = f", only of type {', '.join(others)}" if others else ""
        said.append(f"{_VERBS[endpoint.kind]} {endpoint.name} ({endpoint.type}){instead}")
    return f"{'; '.join(said)}. {_hint(lacking, node)}"


def _types(endpoint: Endpoint, node: Any) -> set[str]:
    if endpoint.kind == "service":
        return set(dict(node.get_service_names_and_types()).get(endpoint.name, ()))
    look = node.get_publishers_info_by_topic if endpoint.kind == "publisher" else node.get_subscriptions_info_by_topic
    return {info.topic_type for info in look(endpoint.name)}


def _hint(lacking: list[Endpoint], node: Any) -> str:
    wanted = {endpoint.type for endpoint in lacking}
    named = {endpoint.name for endpoint in lacking}
    alike = sorted(
        name for name, types in node.get_topic_names_and_types() if wanted & set(types) and name not in named
    )
    if alike:
        return f"Topics of these types that are there: {', '.join(alike)}; check the namespace or the driver's topics."
    return "Start the robot's driver, or check ROS_DOMAIN_ID."
