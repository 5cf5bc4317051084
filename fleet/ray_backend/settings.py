"""What a node says of itself, in environment variables that its Ray processes inherit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """'' leaves what `vla-fleet up` says."""

    data: str = ""
    """data directory on this node; default: the same path as on the gateway's machine"""
    keys: str = ""
    """key directory on this node; default: `keys` in its data directory"""
    site: str = ""
    """where this node's robots stand"""
    robot: str = ""
    """driver of this node's robots"""
    robot_config: str = ""
    """its configuration: JSON, or a JSON file; {name} stands for the robot's name"""

    @classmethod
    def of(cls, environment: Mapping[str, str] | None = None) -> NodeSettings:
        """From `environment`, by default this process's own."""
        found = os.environ if environment is None else environment
        return cls(**{field.name: found.get(_variable(field.name), "") for field in fields(cls)})

    def environment(self) -> dict[str, str]:
        """The variables that say the same: VLA_FLEET_DATA and so on."""
        return {_variable(name): value for name, value in asdict(self).items() if value}

    def data_root(self, usual: str) -> Path:
        return Path(self.data or usual)

    def key_directory(self, usual_data: str) -> Path:
        return Path(self.keys) if self.keys else self.data_root(usual_data) / "keys"

    def edge_words(self, name: str) -> list[str]:
        """Options of `vla-fleet edge` for robot `name` on this node."""
        given = (
            ("--site", self.site),
            ("--robot", self.robot),
            ("--robot-config", self.robot_config.replace("{name}", name)),
        )
        return [word for option, value in given if value for word in (option, value)]


def _variable(field: str) -> str:
    return f"VLA_FLEET_{field.upper()}"
