"""Robots as Ray and the gateway see them, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleet.cli.client import FleetClient
from fleet.ray_backend.cluster import Cluster
from fleet.ray_backend.resources import discover
from wire.messages.fleet import RobotState


@dataclass(frozen=True, slots=True)
class PlacedRobot:
    """One robot."""

    name: str
    node: str
    """host name of the node that offers it, '' when none does now"""
    state: RobotState | None
    """what the gateway knows of it: health, lease, job; None: it has not come to the gateway yet"""


def robots(cluster: Cluster, fleet: FleetClient) -> tuple[PlacedRobot, ...]:
    """All robots that a node of `cluster` offers or that the gateway of `fleet` knows, by name."""
    return joined(discover(cluster.nodes().values()).robots, fleet.robots())


def joined(offered: Mapping[str, str], known: Iterable[RobotState]) -> tuple[PlacedRobot, ...]:
    """`offered`: host name by robot name."""
    states = {state.name: state for state in known}
    names = sorted(offered.keys() | states.keys())
    return tuple(PlacedRobot(name, offered.get(name, ""), states.get(name)) for name in names)
