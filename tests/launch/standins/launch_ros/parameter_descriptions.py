"""Stand-ins for `launch_ros.parameter_descriptions`."""

from __future__ import annotations

from typing import Any


class ParameterValue:
    def __init__(self, value: Any, *, value_type: type | None = None) -> None:
        self.value, self.value_type = value, value_type
