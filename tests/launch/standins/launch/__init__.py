"""Stands in for ROS 2's `launch`, which no package index has: takes what the real classes take and remembers it.

Only what the launch files here use, with the parameter names that Humble, Jazzy, Kilted and Rolling share.
"""

from __future__ import annotations

from typing import Any


class LaunchContext:
    """What has been decided so far."""

    def __init__(self) -> None:
        self.launch_configurations: dict[str, str] = {}


class LaunchDescription:
    def __init__(self, initial_entities: list[Any] | None = None) -> None:
        self.entities = list(initial_entities or ())
