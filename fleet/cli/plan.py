"""`vla-fleet plan`: how many robots a trainer needs, and what limits a fleet first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fleet.cli.options import AsJson, echo_json
from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import unset
from fleet.config.recipe import Recipe


def _figure(help: str, metavar: str, **kept: Any) -> Any:
    """An option for one figure, found elsewhere unless it is given."""
    return typer.Option(help=help, metavar=metavar, show_default=False, **kept)


Seconds = float | None


def plan(
    recipe: Annotated[
        str, unset("The job, whose figures are the last resort; default: that of --data, else pixels.")
    ] = "",
    config: Annotated[
        Path | None, typer.Option(help="What that recipe of real robots is made from: FILE.toml.")
    ] = None,
    data: Annotated[Path | None, _figure("Take what the ledger of the fleet below DIR tells.", "DIR")] = None,
    metrics: Annotated[
        list[str] | None, _figure("Take what a running gateway or trainer shows there; may be repeated.", "URL")
    ] = None,
    max_lag: Annotated[int | None, _figure("S, in versions; default: the recipe's, else 6.", "S", min=0)] = None,
    robots: Annotated[list[int] | None, _figure("A row for N robots; may be repeated.", "N", min=1)] = None,
    gradient_step: Annotated[Seconds, _figure("Of one gradient step of a trainer that never waits.", "SECONDS")] = None,
    batch: Annotated[float | None, _figure("Steps that are drawn for it.", "STEPS")] = None,
    samples_per_insert: Annotated[
        float | None, _figure("How often a recorded step is drawn; default: the recipe's, else its echo.", "DRAWS")
    ] = None,
    publish_every: Annotated[Seconds, _figure("Between two versions, at least.", "SECONDS")] = None,
    steps_per_publish: Annotated[float | None, _figure("Gradient steps between two versions, at least.", "K")] = None,
    version_mb: Annotated[float | None, _figure("What a robot fetches of a version.", "MB")] = None,
    publish_time: Annotated[Seconds, _figure("Until the gateway has a new version.", "SECONDS")] = None,
    apply_time: Annotated[Seconds, _figure("Until a robot that has a version acts on it.", "SECONDS")] = None,
    gateway_up: Annotated[float | None, _figure("Gateway to all robots; default 1000.", "MBIT")] = None,
    gateway_down: Annotated[float | None, _figure("All robots to the gateway; default 1000.", "MBIT")] = None,
    robot_up: Annotated[float | None, _figure("Of each robot; default 50.", "MBIT")] = None,
    robot_down: Annotated[float | None, _figure("Of each robot; default 100.", "MBIT")] = None,
    relay_fanout: Annotated[
        int | None, _figure("Robots that one hands a version on to; default 0: all fetch from the gateway.", "N", min=0)
    ] = None,
    control_hz: Annotated[float | None, _figure("Steps a second of a robot.", "HZ")] = None,
    active: Annotated[float | None, _figure("Share of the time that a robot records; default 1.", "SHARE")] = None,
    step_kb: Annotated[float | None, _figure("Of a recorded step.", "KB")] = None,
    segment_time: Annotated[Seconds, _figure("Recording that is handed in at once.", "SECONDS")] = None,
    chunk_time: Annotated[Seconds, _figure("Actions of one chunk that are executed.", "SECONDS")] = None,
    ingest: Annotated[float | None, _figure("The gateway takes in, a second; default 86.", "MB")] = None,
    gateway_robots: Annotated[float | None, _figure("Robots that the gateway can serve; default 130.", "N")] = None,
    as_json: AsJson = False,
) -> None:
    """How many robots keep the trainer busy on rollouts that are not stale, and where the bottleneck is.

    What is not given is taken from --metrics, then --data, then the recipe.
    """
    from rich.console import Console

    from fleet.planning import measured, table
    from fleet.planning.model import make_plan

    mb, mbit = 1e6, measured.MBIT
    given = {
        "max_lag": (max_lag, 1.0),
        "gradient_step_s": (gradient_step, 1.0),
        "draws_per_step": (batch, 1.0),
        "draws_per_insert": (samples_per_insert, 1.0),
        "publish_every_s": (publish_every, 1.0),
        "steps_per_publish": (steps_per_publish, 1.0),
        "version_bytes": (version_mb, mb),
        "publish_s": (publish_time, 1.0),
        "apply_s": (apply_time, 1.0),
        "gateway_up_bytes_s": (gateway_up, mbit),
        "gateway_down_bytes_s": (gateway_down, mbit),
        "robot_up_bytes_s": (robot_up, mbit),
        "robot_down_bytes_s": (robot_down, mbit),
        "relay_fanout": (relay_fanout, 1.0),
        "control_hz": (control_hz, 1.0),
        "active": (active, 1.0),
        "step_bytes": (step_kb, 1e3),
        "segment_s": (segment_time, 1.0),
        "chunk_s": (chunk_time, 1.0),
        "ingest_bytes_s": (ingest, mb),
        "gateway_robots": (gateway_robots, 1.0),
    }
    said = {
        name: measured.PlanFigure(value * unit, "given") for name, (value, unit) in given.items() if value is not None
    }
    if steps_per_publish is not None and publish_every is None:
        # who counts in steps does not mean the recipe's seconds
        said["publish_every_s"] = measured.PlanFigure(0.0, "--steps-per-publish")
    job = _recipe(recipe, config, data)
    rate = control_hz or job.spec.control_hz
    stored = measured.of_data(data, rate) if data is not None else {}
    figures, lag, sources = measured.settle(said, measured.of_metrics(metrics or ()), stored, measured.of_recipe(job))
    made = make_plan(figures, lag, robots or ())
    if as_json:
        echo_json({"figures": sources, "plan": made})
        return
    console = Console()
    console.print(table.figures_table(sources))
    console.print(table.plan_table(made))
    for sentence in table.verdict(made):
        typer.echo(sentence)


def _recipe(name: str, config: Path | None, data: Path | None) -> Recipe:
    """The recipe of that name, or the one of the fleet below `data` with the policy that was chosen for it."""
    from fleet.config.recipes import get_recipe

    if not name and data is not None and DataDirectory(data.resolve()).identity() is not None:
        from fleet.tools.policy_commands import recipe_of

        recipe, overrides = recipe_of(data)
        return overrides.applied(recipe)
    return get_recipe(name or "pixels", config=config)
