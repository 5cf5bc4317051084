"""A kind of policy for tests: the flow policy of the fake robot, with hints that a test sets."""

from __future__ import annotations

from typing import Any

from policies.interface.registry import PolicyDefaults
from wire.errors import ConfigError
from wire.types import RobotSpec

HINTS = PolicyDefaults()
"""a test puts others in its place"""


def make(place: str, config: dict[str, Any], spec: RobotSpec, seed: int) -> Any:
    from policies.flow.policy import FlowPolicy
    from policies.flow.presets import pixels_network

    return FlowPolicy(spec, pixels_network(spec, horizon=int(config.get("horizon", 16))), seed)


def hints(place: str, config: dict[str, Any], spec: RobotSpec) -> PolicyDefaults:
    if place == "broken":
        raise ConfigError(f"echo:{place}: nothing in it fits robot '{spec.embodiment}'.")
    return HINTS
