"""The commands that start one process of a fleet each; `up` starts all of them."""

from __future__ import annotations

import typer

from fleet.cli.options import command
from fleet.config.process_options import (
    DemonstratorOptions,
    EdgeOptions,
    EdgePartOptions,
    EvaluatorOptions,
    GatewayOptions,
    ThinkServerOptions,
    TrainerOptions,
)


def add_commands(app: typer.Typer) -> None:
    """Add them to `app`."""

    @command(app, GatewayOptions)
    def gateway(options: GatewayOptions) -> None:
        """Run the gateway: ingest, buffer, weight server and the operator page."""
        from fleet.config.data_directory import DataDirectory
        from fleet.launch.builders import run_gateway

        DataDirectory(options.root).keep_buffer_at(options.ledger, options.store)
        run_gateway(options)

    @command(app, TrainerOptions)
    def trainer(options: TrainerOptions) -> None:
        """Train on the buffer in DATA and publish versions to the gateway."""
        from fleet.launch.builders import run_trainer

        run_trainer(options)

    @command(app, EvaluatorOptions)
    def evaluator(options: EvaluatorOptions) -> None:
        """Measure versions on held-out seeds."""
        from fleet.launch.builders import run_evaluator

        run_evaluator(options)

    @command(app, DemonstratorOptions)
    def demonstrate(options: DemonstratorOptions) -> None:
        """Record demonstrations of the scripted operator and send them to the gateway."""
        from fleet.launch.builders import run_demonstrator

        run_demonstrator(options)

    @command(app, EdgeOptions)
    def edge(options: EdgeOptions) -> None:
        """Run one robot: its driver, control, inference and uplink processes."""
        from fleet.launch.robot_builders import run_robot

        raise typer.Exit(run_robot(options))

    @command(app, ThinkServerOptions)
    def think_server(options: ThinkServerOptions) -> None:
        """Run the slow path for robots elsewhere: `edge --think tcp://HOST:PORT`. Its key is called `thinker`."""
        from fleet.launch.builders import run_think_server

        run_think_server(options)

    @command(app, EdgePartOptions, hidden=True)
    def edge_part(options: EdgePartOptions) -> None:
        """One process of a robot; started by `edge`."""
        from fleet.launch.robot_builders import run_edge_part

        run_edge_part(options)
