"""Hosting a robot from a command line, for whoever has no fleet's supervisor (`hal.driver_host.server`).

python -m hal.driver_host.command --robot fake --socket /run/robot-0/host
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
from pathlib import Path

from hal.driver_host.frames import remove_frames
from hal.driver_host.server import PATIENCE_TICKS, run_host
from hal.interfaces.robot import Robot
from hal.registry import make_robot
from wire.errors import ConfigError


def main(arguments: list[str] | None = None) -> None:
    """`python -m hal.driver_host.command`: host a robot of the registry, or what `module:function` makes."""
    parser = argparse.ArgumentParser(prog="python -m hal.driver_host.command", description="Host one robot's driver.")
    parser.add_argument("--robot", required=True, help="a name of the registry, or module:function that makes a robot")
    parser.add_argument("--socket", required=True, type=Path, help="where control processes attach")
    parser.add_argument("--patience", type=int, default=PATIENCE_TICKS, help="periods without a command before hold")
    parser.add_argument("--parent", type=int, default=0, help="end when this process is no longer the parent")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    robot = _made(options.robot)
    run_host(
        robot,
        options.socket,
        lambda: asked or (options.parent != 0 and os.getppid() != options.parent),
        patience_ticks=options.patience,
    )
    remove_frames(options.socket)


def _made(name: str) -> Robot:
    module, colon, function = name.partition(":")
    if not colon:
        return make_robot(name)
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--robot {name}: {error}. Give module:function of something that can be imported."
        ) from error


if __name__ == "__main__":
    main()
