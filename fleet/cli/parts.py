"""The commands that start one part of a fleet each; `up` starts all of them."""

from __future__ import annotations

from typing import Annotated

import typer

from fleet.cli.options import (
    PORT,
    THINK_PORT,
    WEB_PORT,
    Address,
    Data,
    DelayOption,
    Keys,
    LedgerUrl,
    Name,
    PolicyConfig,
    PolicyOption,
    Recipe,
    RobotConfig,
    RobotKind,
    RunDir,
    Seed,
    Site,
    SpeedUp,
    StoreUrl,
    Strategy,
    Think,
    directory,
    log_to_stderr,
)


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


def trainer(
    gateway: Address = f"tcp://127.0.0.1:{PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    seed: Seed = 0,
    name: Name = "trainer",
    max_steps: Annotated[int, typer.Option(help="Stop learning after so many gradient steps; 0: never.")] = 0,
    policy: PolicyOption = "",
    policy_config: PolicyConfig = "",
) -> None:
    """Train on the buffer in DATA and publish versions to the gateway."""
    from fleet.config.overrides import Tuning
    from fleet.launch.builders import run_trainer

    log_to_stderr()
    tuning = Tuning(policy=policy, policy_config=policy_config)
    run_trainer(recipe, directory(data, recipe), gateway, keys, seed, name, max_steps, tuning)


def evaluator(
    gateway: Address = f"tcp://127.0.0.1:{PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    seed: Seed = 0,
    name: Name = "evaluator",
    version: Annotated[int, typer.Option(help="Measure only this version, then end; 0: the newest, steadily.")] = 0,
    label: Annotated[str, typer.Option(help="With --version: before, after or any word.")] = "once",
    strategy: Strategy = "",
    delay: DelayOption = "",
    speed_up: SpeedUp = 0,
    policy: PolicyOption = "",
    policy_config: PolicyConfig = "",
) -> None:
    """Measure versions on held-out seeds."""
    from fleet.config.overrides import Tuning
    from fleet.launch.builders import run_evaluator

    log_to_stderr()
    tuning = Tuning(strategy, delay, speed_up, policy=policy, policy_config=policy_config)
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


def edge(
    name: Name = "robot-0",
    gateway: Address = f"tcp://127.0.0.1:{PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    operator: Annotated[bool, typer.Option(help="Whether the scripted operator corrects.")] = True,
    strategy: Strategy = "",
    delay: DelayOption = "",
    speed_up: SpeedUp = 0,
    robot: RobotKind = "",
    robot_config: RobotConfig = "",
    think: Think = "",
    site: Site = "",
    policy: PolicyOption = "",
    policy_config: PolicyConfig = "",
) -> None:
    """Run one robot: its driver, control, inference and uplink processes."""
    from fleet.config.overrides import Tuning
    from fleet.launch.robot_builders import run_robot

    log_to_stderr()
    tuning = Tuning(strategy, delay, speed_up, robot, robot_config, policy, policy_config)
    raise typer.Exit(run_robot(recipe, directory(data, recipe), gateway, keys, name, operator, tuning, think, site))


def edge_part(
    part: Annotated[str, typer.Argument(help="robot, control, inference, thinker or uplink")],
    run_dir: RunDir,
    name: Name,
    gateway: Address,
    recipe: Recipe,
    data: Data,
    keys: Keys,
    operator: bool = True,
    strategy: Strategy = "",
    delay: DelayOption = "",
    speed_up: SpeedUp = 0,
    robot: RobotKind = "",
    robot_config: RobotConfig = "",
    think: Think = "",
    site: Site = "",
    policy: PolicyOption = "",
    policy_config: PolicyConfig = "",
) -> None:
    """One process of a robot; started by `edge`."""
    from fleet.config.overrides import Tuning
    from fleet.launch.robot_builders import run_edge_part

    log_to_stderr()
    tuning = Tuning(strategy, delay, speed_up, robot, robot_config, policy, policy_config)
    run_edge_part(part, run_dir, recipe, directory(data, recipe), gateway, keys, name, operator, tuning, think, site)


def think_server(
    gateway: Address = f"tcp://127.0.0.1:{PORT}",
    recipe: Recipe = "pixels",
    data: Data = None,
    keys: Keys = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = THINK_PORT,
    host: Annotated[str, typer.Option(help="Address to listen on for robots.")] = "127.0.0.1",
    policy: PolicyOption = "",
    policy_config: PolicyConfig = "",
) -> None:
    """Run the slow path for robots elsewhere: `edge --think tcp://HOST:PORT`. Its key is called `thinker`."""
    from fleet.config.overrides import Tuning
    from fleet.launch.builders import run_think_server

    log_to_stderr()
    tuning = Tuning(policy=policy, policy_config=policy_config)
    run_think_server(recipe, directory(data, recipe), gateway, keys, host, port, tuning)
