"""`vla-fleet policy`: try a policy before it meets a robot, build a tiny one, take one out of a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleet.cli.options import AsJson, command, echo_json
from fleet.config.overrides import PolicyConfig, unset
from fleet.config.process_options import Config, Recipe, Seed, TryPolicyOptions

app = typer.Typer(
    name="policy",
    help="Check a policy, see what it costs, build a tiny one, export a version, fit an action tokeniser.",
    no_args_is_help=True,
)

Policy = Annotated[str, unset("Which one, KIND:NAME; default: the recipe's own.")]
Recorded = Annotated[Path, typer.Option("--data", help="Data directory of a fleet.")]


@app.command()
def check(
    recipe: Recipe = "pixels",
    config: Config = None,
    policy: Policy = "",
    policy_config: PolicyConfig = "",
    seed: Seed = 0,
) -> None:
    """Run the conformance suite on a policy for the recipe's robot; exit status 1 when a promise is not kept."""
    from fleet.tools.policy_commands import tuned_recipe
    from policies.conformance.check import check_policy

    job = tuned_recipe(recipe, policy, policy_config, config)
    typer.echo(f"checking {policy or 'the policy'} for recipe '{recipe}' …", err=True)
    checks = check_policy(lambda: job.make_policy(job.spec, seed))
    for one in checks:
        typer.echo(f"{'ok' if one.passed else 'FAILED':7} {one.name}{f': {one.detail}' if one.detail else ''}")
    failed = sum(not one.passed for one in checks)
    typer.echo(f"{len(checks)} checks, {failed} failed." if failed else f"{len(checks)} checks, all passed.")
    if failed:
        raise typer.Exit(1)


@app.command()
def show(
    recipe: Recipe = "pixels",
    config: Config = None,
    policy: Policy = "",
    policy_config: PolicyConfig = "",
    seed: Seed = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Chunks to make while the clock runs.")] = 10,
    as_json: AsJson = False,
) -> None:
    """What a policy is and costs on this computer: parameters, bytes of a version, times of both paths, cameras."""
    from fleet.tools.policy_commands import format_cost, measure_cost, tuned_recipe

    found = measure_cost(tuned_recipe(recipe, policy, policy_config, config), seed, rounds)
    echo_json(found) if as_json else typer.echo("\n".join(format_cost(found)))


@command(app, TryPolicyOptions, name="try", hidden=True)
def try_policy(options: TryPolicyOptions) -> None:
    """Make a policy once and say nothing; started by `up` and `edge`."""
    from fleet.tools.policy_commands import make_once

    make_once(options)


@app.command()
def tiny(
    kind: Annotated[str, typer.Argument(help="smolvla or act.")],
    out: Annotated[Path, typer.Argument(help="The directory to write, not there yet or empty.")],
    recipe: Recipe = "pixels",
    config: Config = None,
    chunk: Annotated[int, typer.Option(min=2, help="Actions per chunk.")] = 16,
    data: Annotated[
        Path | None,
        typer.Option(help="Take the statistics of what this fleet recorded; default: the robot's limits."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Build a small lerobot checkpoint with random weights for the recipe's robot; needs no network connection."""
    from fleet.config.recipes import get_recipe
    from fleet.tools.policy_commands import recorded_examples
    from policies.lerobot.tiny import build_tiny

    job = get_recipe(recipe, seed, config)
    examples = recorded_examples(data, job, chunk) if data is not None else None
    typer.echo(f"building a tiny {kind} for recipe '{recipe}' …", err=True)
    build_tiny(kind, out, job.spec, tuple(job.instructions.values()), chunk=chunk, seed=seed, examples=examples)
    made_from = f" --config {config}" if config else ""
    typer.echo(f"{out} is a checkpoint: vla-fleet up --recipe {recipe}{made_from} --policy lerobot:{out}")


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="The directory to write, not there yet or empty.")],
    data: Recorded,
    version: Annotated[int | None, unset("Which published version; default: the newest.", min=1)] = None,
) -> None:
    """Write a version that a fleet learned back as a lerobot checkpoint."""
    from fleet.tools.policy_commands import export_version

    number = export_version(data, version, out)
    typer.echo(f"version {number} of {data} is in {out}: a checkpoint for lerobot, and for --policy lerobot:{out}")


tokenizer = typer.Typer(
    name="tokenizer", help="Fit an action tokeniser on what a fleet recorded, and measure one.", no_args_is_help=True
)
app.add_typer(tokenizer)


@tokenizer.command()
def fit(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    data: Recorded,
    kind: Annotated[str, typer.Option(help="fast or residual_vq.")] = "fast",
    horizon: Annotated[int, typer.Option(min=2, help="Actions per chunk.")] = 16,
    error: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Mean error to meet, a share of the range; 0: none in particular.")
    ] = 0.01,
    as_json: AsJson = False,
) -> None:
    """Fit a tokeniser on four fifths of what a fleet recorded, report it on the last fifth, and write it."""
    from fleet.tools import policy_commands as work

    chunks, spec = work.recorded_chunks(data, horizon)
    held_out = len(chunks) - len(chunks) // 5
    typer.echo(f"fitting {kind} on {held_out} chunks …", err=True)
    made = work.fit_tokenizer(kind, chunks[:held_out], spec, error)
    work.write_tokenizer(made, out)
    typer.echo(work.format_token_report(made, chunks[held_out:], as_json))


@tokenizer.command()
def report(
    file: Annotated[Path, typer.Argument(help="A file that `tokenizer fit` wrote.")],
    data: Recorded,
    as_json: AsJson = False,
) -> None:
    """Tokens per chunk and reconstruction error of a tokeniser on all that a fleet recorded."""
    from fleet.tools import policy_commands as work

    made = work.load_tokenizer(file)
    chunks, _ = work.recorded_chunks(data, made.horizon)
    typer.echo(work.format_token_report(made, chunks, as_json))
