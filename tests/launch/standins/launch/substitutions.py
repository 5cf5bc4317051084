"""Stand-ins for `launch.substitutions`."""

from __future__ import annotations

from typing import Any

from launch import LaunchContext


def perform(context: LaunchContext, value: Any) -> str:
    """Text of a string, a substitution or a list of them."""
    if isinstance(value, list):
        return "".join(perform(context, part) for part in value)
    return value.perform(context) if hasattr(value, "perform") else value


class LaunchConfiguration:
    def __init__(self, variable_name: str) -> None:
        self.variable_name = variable_name

    def perform(self, context: LaunchContext) -> str:
        return context.launch_configurations[self.variable_name]


class PathJoinSubstitution:
    def __init__(self, substitutions: list[Any]) -> None:
        self.parts = substitutions

    def perform(self, context: LaunchContext) -> str:
        return "/".join(perform(context, part) for part in self.parts)
