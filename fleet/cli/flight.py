"""Flight recording of a recipe's control loop, and its replay: the loop is built again from what the file says."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace
from pathlib import Path

import msgspec

from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe
from hal.interfaces.robot import Robot, Teleoperator
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.control.config import GateConfig, LoopConfig
from robot_edge.control.loop import ControlLoop
from robot_edge.control.takeover import Gate
from robot_edge.flight_recorder.events import FlightHeader
from robot_edge.flight_recorder.recorder import FlightRecorder
from wire.clock import Clock
from wire.errors import ConfigError
from wire.transport.channel import Channel


def recorded(
    recipe: Recipe, name: str, directory: Path, *, operated: bool
) -> contextlib.AbstractContextManager[FlightRecorder]:
    """The recorder of one start of robot `name`'s control process, closed in the end."""
    header = FlightHeader(
        name=name,
        session_id=secrets.token_hex(4),
        spec=recipe.spec,
        config=msgspec.to_builtins(recipe.loop),
        strategy=recipe.chunking.strategy,
        settings={
            "recipe": recipe.name,
            "chunking": msgspec.to_builtins(recipe.chunking),
            "gate": msgspec.to_builtins(recipe.gate),
        },
        operated=operated,
    )
    flight = FlightRecorder(directory, header)
    flight.start()
    return contextlib.closing(flight)


def rebuilt(
    header: FlightHeader,
    robot: Robot,
    uplink: Channel,
    inference: Channel,
    clock: Clock,
    operator: Teleoperator | None,
) -> ControlLoop:
    """The control loop that `header` describes, on other borders.

    What a file cannot hold, the robot's motion, is the recipe's of today. Raises `ConfigError` for an unknown recipe or
    a header of another program version that cannot be read.
    """
    from fleet.launch.supplies import scheduler_factory

    settings = header.settings
    try:
        config = msgspec.convert(header.config, LoopConfig)
        gate = Gate(msgspec.convert(settings["gate"], GateConfig)) if operator is not None else None
        recipe = replace(
            get_recipe(settings["recipe"]),
            loop=config,
            chunking=msgspec.convert(settings["chunking"], ChunkingConfig),
        )
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"the flight of '{header.name}' was recorded by version {header.program} and its header cannot be read "
            f"now ({error}); replay it with that version."
        ) from error
    return ControlLoop(
        header.name,
        header.session_id,
        robot,
        uplink,
        inference,
        scheduler_factory(recipe),
        clock,
        config,
        operator,
        gate,
    )
