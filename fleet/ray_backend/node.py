"""`vla-fleet ray-node`: `ray start` for a computer that has robots, with what a node of a fleet needs said."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fleet.ray_backend.resources import robot_resource
from wire.errors import ConfigError
from wire.transport.keys import GATEWAY, load_pair, load_public
from wire.types import CALLERS, Role

_PARTS = (Role.gateway, Role.trainer, Role.evaluator, Role.demonstrator, Role.thinker, *CALLERS)
"""what other keys of a fleet are called, or begin with"""
_STORE_BYTES = 100_000_000
"""object store, unless said otherwise: nothing of a fleet goes through it"""


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

    def edge_arguments(self, name: str) -> list[str]:
        """Options of `vla-fleet edge` for robot `name` on this node."""
        given = (
            ("--site", self.site),
            ("--robot", self.robot),
            ("--robot-config", self.robot_config.replace("{name}", name)),
        )
        return [argument for option, value in given if value for argument in (option, value)]


def _variable(field: str) -> str:
    return f"VLA_FLEET_{field.upper()}"


def robot_names(text: str) -> tuple[str, ...]:
    """Names from `a,b,c`. Raises `ConfigError` for one that cannot be a name or is there twice."""
    names = tuple(name for part in text.split(",") if (name := part.strip()))
    if text.strip() and not names:
        raise ConfigError(f"--robots {text}: no name in it. Give names with commas between them, or leave it out.")
    for name in names:
        robot_resource(name)
        if name.startswith(_PARTS):
            raise ConfigError(f"--robots {text}: '{name}' is the name of another part of a fleet; choose another one.")
        if names.count(name) > 1:
            raise ConfigError(f"--robots {text}: '{name}' is there twice; two robots cannot have one name.")
    return names


def start_arguments(robots: Sequence[str], address: str, head: bool, more: Sequence[str]) -> list[str]:
    """Arguments of `ray start`. `more`: further options of it, which win over what is usual here.

    A computer with robots offers those alone, and no CPU: nothing else shall run where a robot is controlled.
    """
    if head == bool(address):
        raise ConfigError("ray-node: give --address HOST:PORT to join a cluster, or --head to begin one.")
    argv = ["--head"] if head else ["--address", address]
    if robots:
        argv += ["--resources", json.dumps({robot_resource(name): 1 for name in robots})]
    usual = {"--object-store-memory": str(_STORE_BYTES)}
    if robots:
        usual["--num-cpus"] = "0"
    given = {argument.split("=", 1)[0] for argument in more}
    if robots and "--resources" in given:
        raise ConfigError('ray-node: --robots and --resources exclude each other; a robot is {"robot:NAME": 1}.')
    argv += [argument for option, value in usual.items() if option not in given for argument in (option, value)]
    return [*argv, "--block", "--disable-usage-stats", *more]


def check_keys(settings: NodeSettings, robots: Sequence[str]) -> None:
    """Raises `ConfigError` for a robot whose key is not in the key directory that was named."""
    if settings.keys:
        load_public(Path(settings.keys), GATEWAY)
        for name in robots:
            load_pair(Path(settings.keys), name)


def run_node(robots: Sequence[str], address: str, head: bool, settings: NodeSettings, more: Sequence[str]) -> None:
    """Become `ray start --block`: this process is the node from here on."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray-node needs Ray: install vla-fleet[cluster] here.")
    check_keys(settings, robots)
    argv = start_arguments(robots, address, head, more)
    # Asked to end, Ray would go on for half a minute so that others can move away; a robot cannot.
    environment = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", **os.environ, **settings.environment()}
    os.execve(sys.executable, [sys.executable, "-m", "ray.scripts.scripts", "start", *argv], environment)
