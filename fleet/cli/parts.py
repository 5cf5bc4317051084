"""The commands that start one part of a fleet each; `up` starts all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.options import (
    CHUNKING,
    DRIVER,
    POLICY,
    PORT,
    THINK_PORT,
    WEB_PORT,
    Address,
    Data,
    Keys,
    LedgerUrl,
    Name,
    Recipe,
    RunDir,
    Seed,
    Site,
    StoreUrl,
    Think,
    directory,
    log_to_stderr,
    tuning_options,
)

if TYPE_CHECKING:
    from fleet.config.overrides import Tuning


def add_commands(app: typer.Typer) -> None:
    """Add them to `app`."""
    for command in (gateway, trainer, evaluator, demonstrate, edge, think_server):
        app.command()(command)
    app.command(hidden=True)(edge_part)


def gateway(
    recipe: Recipe = "pixels",
    data: Data = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = PORT,
    host: Annotated[str, typer.Option(help="Address to listen on for robots.")] = "127.0.0.1",
    web_port: Annotated[int, typer.Option(min=0, max=65535)] = WEB_PORT,
    web_host: Annotated[str, typer.Option(help="Address the page listens on.")] = "127.0.0.1",
    ledger: LedgerUrl = "",
    store: StoreUrl = "",
) -> None:
    """Run the gateway: ingest, buffer, weight server and the operator page."""
    from fleet.config.data_directory import DataDirectory
    from fleet.launch.builders import run_gateway

    log_to_stderr()
    DataDirectory(directory(data, recipe)).keep_buffer_at(ledger, store)
    run_gateway(recipe, directory(data, recipe), host, port, web_host, web_port)


@tuning_options(*POLICY)
def trainer(
    gateway: Address = f"tcp://127.0.0.1:{PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    seed: Seed = 0,
    name: Name = "trainer",
    max_steps: Annotated[int, typer.Option(help="Stop learning after so many gradient steps; 0: never.")] = 0,
    *,
    tuning: Tuning,
) -> None:
    """Train on the buffer in DATA and publish versions to the gateway."""
    from fleet.launch.builders import run_trainer

    log_to_stderr()
    run_trainer(recipe, directory(data, recipe), gateway, keys, seed, name, max_steps, tuning)


@tuning_options(*CHUNKING, *POLICY)
def evaluator(
    gateway: Address = f"tcp://127.0.0.1:{PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    seed: Seed = 0,
    name: Name = "evaluator",
    version: Annotated[int, typer.Option(help="Measure only this version, then end; 0: the newest, steadily.")] = 0,
    label: Annotated[str, typer.Option(help="With --version: before, after or any word.")] = "once",
    *,
    tuning: Tuning,
) -> None:
    """Measure versions on held-out seeds."""
    from fleet.launch.builders import run_evaluator

    log_to_stderr()
    run_evaluator(recipe, directory(data, recipe), gateway, keys, seed, name, version, label, tuning)


def demonstrate(
    gateway: Address = f"tcp://127.0.0.1:{PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    name: Name = "demonstrator",
    first_seed: Annotated[int, typer.Option(help="Seed of the first demonstration.")] = 0,
    episodes: Annotated[int, typer.Option(help="How many in all; 0: as the recipe says.")] = 0,
) -> None:
    """Record demonstrations of the scripted operator and send them to the gateway."""
    from fleet.launch.builders import run_demonstrator

    log_to_stderr()
    run_demonstrator(recipe, directory(data, recipe), gateway, keys, name, first_seed, episodes)


@tuning_options(*CHUNKING, *DRIVER, *POLICY)
def edge(
    name: Name = "robot-0",
    gateway: Address = f"tcp://127.0.0.1:{PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    operator: Annotated[bool, typer.Option(help="Whether the scripted operator corrects.")] = True,
    think: Think = "",
    site: Site = "",
    *,
    tuning: Tuning,
) -> None:
    """Run one robot: its driver, control, inference and uplink processes."""
    from fleet.launch.robot_builders import run_robot

    log_to_stderr()
    raise typer.Exit(run_robot(recipe, directory(data, recipe), gateway, keys, name, operator, tuning, think, site))


@tuning_options(*CHUNKING, *DRIVER, *POLICY)
def edge_part(
    part: Annotated[str, typer.Argument(help="robot, control, inference, thinker or uplink")],
    run_dir: RunDir,
    name: Name,
    gateway: Address,
    recipe: Recipe,
    data: Data,
    keys: Keys,
    operator: bool = True,
    think: Think = "",
    site: Site = "",
    *,
    tuning: Tuning,
) -> None:
    """One process of a robot; started by `edge`."""
    from fleet.launch.robot_builders import run_edge_part

    log_to_stderr()
    run_edge_part(part, run_dir, recipe, directory(data, recipe), gateway, keys, name, operator, tuning, think, site)


@tuning_options(*POLICY)
def think_server(
    gateway: Address = f"tcp://127.0.0.1:{PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = THINK_PORT,
    host: Annotated[str, typer.Option(help="Address to listen on for robots.")] = "127.0.0.1",
    *,
    tuning: Tuning,
) -> None:
    """Run the slow path for robots elsewhere: `edge --think tcp://HOST:PORT`. Its key is called `thinker`."""
    from fleet.launch.builders import run_think_server

    log_to_stderr()
    run_think_server(recipe, directory(data, recipe), gateway, keys, host, port, tuning)
