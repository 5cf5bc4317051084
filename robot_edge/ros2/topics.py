"""What a ROS 2 robot must offer before it can be driven, and a sentence about what of it is missing.

Asks a node for its graph but imports no rclpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Something another node must have."""

    kind: str
    """publisher, subscription or service"""
    name: str
    """absolute"""
    type: str
    """as `ros2 topic info` prints it: sensor_msgs/msg/JointState"""


class Graph(Protocol):
    """The part of `rclpy.node.Node` that is needed here."""

    def get_publishers_info_by_topic(self, topic_name: str, no_mangle: bool = False) -> list[Any]: ...

    def get_subscriptions_info_by_topic(self, topic_name: str, no_mangle: bool = False) -> list[Any]: ...

    def get_service_names_and_types(self) -> list[tuple[str, list[str]]]: ...

    def get_topic_names_and_types(self, no_demangle: bool = False) -> list[tuple[str, list[str]]]: ...


_VERBS = {
    "publisher": "nobody publishes",
    "subscription": "nobody listens on",
    "service": "nobody offers the service",
}


def missing(endpoints: Iterable[Endpoint], graph: Graph) -> str:
    """What of `endpoints` is not in the graph, with what looks like it under another name; '' when all is there."""
    lacking = [endpoint for endpoint in endpoints if endpoint.type not in _types(endpoint, graph)]
    if not lacking:
        return ""
    said = []
    for endpoint in lacking:
        others = sorted(_types(endpoint, graph))
        instead = f", only of type {', '.join(others)}" if others else ""
        said.append(f"{_VERBS[endpoint.kind]} {endpoint.name} ({endpoint.type}){instead}")
    return f"{'; '.join(said)}. {_hint(lacking, graph)}"


def _types(endpoint: Endpoint, graph: Graph) -> set[str]:
    if endpoint.kind == "service":
        services: Mapping[str, list[str]] = dict(graph.get_service_names_and_types())
        return set(services.get(endpoint.name, ()))
    look = graph.get_publishers_info_by_topic if endpoint.kind == "publisher" else graph.get_subscriptions_info_by_topic
    return {info.topic_type for info in look(endpoint.name)}


def _hint(lacking: list[Endpoint], graph: Graph) -> str:
    wanted = {endpoint.type for endpoint in lacking}
    named = {endpoint.name for endpoint in lacking}
    alike = sorted(
        name for name, types in graph.get_topic_names_and_types() if wanted & set(types) and name not in named
    )
    if alike:
        return f"Topics of these types that are there: {', '.join(alike)}; check the namespace or the driver's topics."
    return "Start the robot's driver, or check ROS_DOMAIN_ID."
