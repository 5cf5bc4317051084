"""Stand-ins for `launch.actions`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class DeclareLaunchArgument:
    def __init__(self, name: str, *, default_value: Any = None, description: str | None = None) -> None:
        self.name, self.default_value, self.description = name, default_value, description


class OpaqueFunction:
    def __init__(self, *, function: Callable[..., Any]) -> None:
        self.function = function


class SetEnvironmentVariable:
    def __init__(self, name: Any, value: Any) -> None:
        self.name, self.value = name, value


class ExecuteProcess:
    def __init__(
        self,
        *,
        cmd: list[Any],
        name: Any = None,
        output: str = "log",
        respawn: Any = False,
        respawn_delay: float | None = None,
        sigterm_timeout: Any = "5",
    ) -> None:
        self.cmd, self.name, self.output = cmd, name, output
        self.respawn, self.respawn_delay, self.sigterm_timeout = respawn, respawn_delay, sigterm_timeout


class GroupAction:
    def __init__(self, actions: Iterable[Any], *, scoped: bool = True) -> None:
        self.actions, self.scoped = list(actions), scoped


class IncludeLaunchDescription:
    def __init__(self, launch_description_source: Any, *, launch_arguments: Iterable[tuple[Any, Any]] = ()) -> None:
        self.source, self.arguments = launch_description_source, dict(launch_arguments)


class RegisterEventHandler:
    def __init__(self, event_handler: Any) -> None:
        self.event_handler = event_handler
