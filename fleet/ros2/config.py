"""The configuration of a robot's ROS 2 driver as its edge node completes it, and what the robot must offer for it.

What the recipe knows need not be said again: spec and instructions; and the driver looks where its node is.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from fleet.config.overrides import read_json
from fleet.config.recipe import Recipe
from hal.drivers.ros2.config import ImageTopic, Ros2Config, robot_spec
from hal.drivers.ros2.messages import JOINT_STATE, TRAJECTORY, TRIGGER
from hal.registry import read_config
from robot_edge.ros2.topics import Endpoint
from wire.errors import storage_error

ROS2 = "ros2"
"""the driver's registered name"""


def complete_config(recipe: Recipe, robot_config: str, namespace: str) -> Ros2Config:
    """What is given in `robot_config` (JSON or a file of it) and in the recipe, with the rest filled in.

    `namespace`: the node's, which the driver shares unless it has one. Raises `ConfigError` that names the field.
    """
    given: dict[str, Any] = {"spec": msgspec.to_builtins(recipe.spec), "tasks": dict(recipe.instructions)}
    if isinstance(recipe.robot_config, Ros2Config):
        given.update(msgspec.to_builtins(recipe.robot_config))
    if robot_config:
        given.update(read_json(robot_config))
    config = read_config(ROS2, given)
    return config if config.namespace else dataclasses.replace(config, namespace=namespace.rstrip("/"))


def write_config(config: Ros2Config, path: Path) -> None:
    """Write it where the edge's processes read it. Raises `StorageError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    except OSError as error:
        raise storage_error(error, "noting the driver's configuration", path) from error


def required_endpoints(config: Ros2Config) -> tuple[Endpoint, ...]:
    """What the robot must have in the graph before it can be driven."""
    topics = config.topics
    wanted = [("publisher", topics.joint_states, JOINT_STATE), ("subscription", topics.command, TRAJECTORY)]
    if config.executed:
        wanted.append(("publisher", topics.executed, JOINT_STATE))
    for camera in robot_spec(config).cameras:
        image = config.cameras.get(camera.name, ImageTopic())
        wanted.append(("publisher", image.name(camera.name), image.kind))
    if config.reset:
        wanted.append(("service", topics.reset, TRIGGER))
    if config.stop:
        wanted.append(("service", topics.stop, TRIGGER))
    return tuple(Endpoint(kind, absolute_name(name, config.namespace), type_) for kind, name, type_ in wanted)


def absolute_name(name: str, namespace: str) -> str:
    """A topic's name from the root, as ROS 2 resolves it."""
    return name if name.startswith("/") else f"/{namespace.strip('/')}/{name}".replace("//", "/")
