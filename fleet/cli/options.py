"""Options that several `vla-fleet` commands share, their defaults, and what every command does first."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

_T = TypeVar("_T")

Recipe = Annotated[str, typer.Option(help="Which job: a name from `vla-fleet recipes`, or module:function.")]
Data = Annotated[Path | None, typer.Option(help="Data directory; default data/RECIPE.", show_default=False)]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.")]
Address = Annotated[str, typer.Option(help="The gateway, tcp://HOST:PORT.")]
Keys = Annotated[Path | None, typer.Option(help="Key directory; default DATA/keys.", show_default=False)]
Name = Annotated[str, typer.Option(help="Name of this process; its key is filed under it.")]
LedgerUrl = Annotated[
    str, typer.Option("--ledger", help="PostgreSQL URL of the ledger; default: a file in DATA.", show_default=False)
]
StoreUrl = Annotated[
    str, typer.Option("--store", help="Object store for shards, s3://BUCKET/PREFIX; default: DATA.", show_default=False)
]
Strategy = Annotated[
    str,
    typer.Option(
        help="How late actions are dealt with: auto (as the checkpoint was trained), sync, naive, aligned, ensemble, "
        "future_state, rtc_guided, rtc_trained or residual; default: the recipe's.",
        show_default=False,
    ),
]
DelayOption = Annotated[
    str,
    typer.Option(
        "--delay",
        help="Inject latency in control ticks: 4, random:2-8, or burst:2,12,0.05 (usual, long, share).",
        show_default=False,
    ),
]
SpeedUp = Annotated[int, typer.Option(help="Execute every q-th action; 0: as the recipe says.", show_default=False)]
RobotKind = Annotated[
    str,
    typer.Option("--robot", help="Another driver for the recipe's robot, such as ros2.", show_default=False),
]
RobotConfig = Annotated[
    str,
    typer.Option("--robot-config", help="That driver's configuration: JSON, or a JSON file.", show_default=False),
]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        help="Another policy, KIND:PLACE: flow:PRESET, lerobot:DIRECTORY or a hub name, tokens:PRESET; default: the "
        "recipe's.",
        show_default=False,
    ),
]
PolicyConfig = Annotated[
    str,
    typer.Option("--policy-config", help="That policy's configuration: JSON, or a JSON file.", show_default=False),
]
Think = Annotated[
    str,
    typer.Option(
        help="A think server, tcp://HOST:PORT, that runs the slow path; default: this computer.", show_default=False
    ),
]
Site = Annotated[str, typer.Option(help="Where the robot stands, for jobs that ask for it.", show_default=False)]
RunDir = Annotated[Path, typer.Option(hidden=True)]

CHUNKING = ("strategy", "delay", "speed_up")
DRIVER = ("robot", "robot_config")
POLICY = ("policy", "policy_config")
_TUNING: dict[str, tuple[Any, str | int]] = {
    "strategy": (Strategy, ""),
    "delay": (DelayOption, ""),
    "speed_up": (SpeedUp, 0),
    "robot": (RobotKind, ""),
    "robot_config": (RobotConfig, ""),
    "policy": (PolicyOption, ""),
    "policy_config": (PolicyConfig, ""),
}
"""(annotation, default) of the option for each field of `fleet.config.overrides.Tuning`"""

PORT = 5760
WEB_PORT = 8080
THINK_PORT = 5761


def tuning_options(*names: str) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Give a command the options `names`; what they say comes as its parameter `tuning`, a `Tuning`."""

    def decorate(command: Callable[..., _T]) -> Callable[..., _T]:
        # `Tuning` is imported when a command runs: a command line that only helps stays quick.
        hints = get_type_hints(command, localns={"Tuning": object}, include_extras=True)
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "tuning"]
        parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
        for name in names:
            annotation, default = _TUNING[name]
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )

        @functools.wraps(command)
        def run(**given: Any) -> _T:
            from fleet.config.overrides import Tuning

            tuning = Tuning(**{name: given.pop(name) for name in names})
            return command(**given, tuning=tuning)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def directory(data: Path | None, recipe: str) -> Path:
    """The one that was given, else data/RECIPE."""
    return data if data is not None else Path("data") / recipe.replace(":", ".")


def log_to_stderr() -> None:
    """What the process says goes to its terminal or its log file; VLA_FLEET_LOG sets how much."""
    logging.basicConfig(
        level=os.environ.get("VLA_FLEET_LOG", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
