"""A kind of policy for tests: the flow policy of the fake robot, with defaults that a test sets."""

from __future__ import annotations

from typing import Any

from policies.interface.registry import PolicyDefaults
from wire.errors import ConfigError
from wire.types import RobotSpec

DEFAULTS = PolicyDefaults()
"""a test puts others in its place"""


def make(name_or_path: str, config: dict[str, Any], spec: RobotSpec, seed: int) -> Any:
    from policies.flow.factory import pixels_network
    from policies.flow.policy import FlowPolicy

    return FlowPolicy(spec, pixels_network(spec, horizon=int(config.get("horizon", 16))), seed)


def defaults(name_or_path: str, config: dict[str, Any], spec: RobotSpec) -> PolicyDefaults:
    if name_or_path == "broken":
        raise ConfigError(f"echo:{name_or_path}: nothing in it fits robot '{spec.embodiment}'.")
    return DEFAULTS
