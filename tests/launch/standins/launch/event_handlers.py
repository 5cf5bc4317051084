"""Stand-ins for `launch.event_handlers`."""

from __future__ import annotations

from typing import Any


class OnProcessExit:
    def __init__(self, *, target_action: Any, on_exit: Any) -> None:
        self.target_action, self.on_exit = target_action, on_exit
