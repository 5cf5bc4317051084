"""Stand-ins for `launch_ros.actions`."""

from __future__ import annotations

from typing import Any


class Node:
    def __init__(
        self,
        *,
        executable: Any,
        package: Any = None,
        name: Any = None,
        namespace: Any = None,
        parameters: list[Any] | None = None,
        arguments: list[Any] | None = None,
        output: str = "log",
        respawn: Any = False,
        respawn_delay: float | None = None,
        sigterm_timeout: Any = "5",
    ) -> None:
        self.package, self.executable, self.name, self.namespace = package, executable, name, namespace
        self.parameters, self.arguments, self.output = parameters or [], arguments or [], output
        self.respawn, self.respawn_delay, self.sigterm_timeout = respawn, respawn_delay, sigterm_timeout


class LifecycleNode(Node):
    def __init__(self, *, name: Any, namespace: Any, **more: Any) -> None:
        super().__init__(name=name, namespace=namespace, **more)
