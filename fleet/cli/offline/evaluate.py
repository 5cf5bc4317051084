"""`vla-fleet eval` and `vla-fleet compare`: success on held-out scenes, of one policy, or of two on the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from fleet.cli.fleet import show_table, table_of
from fleet.cli.offline.progress import show_progress
from fleet.config.overrides import Overrides, unset
from fleet.config.process_options import NOTHING, SIMULATED, Config
from fleet.config.recipes import get_recipe
from fleet.config.weights_source import SourceKind, parse_source
from fleet.evaluation.held_out import MeasuredEpisode, PolicyUnderTest, SuccessRate, measure, pin, plan_episodes, rate
from fleet.evaluation.paired import PairedComparison, compare_outcomes
from fleet.launch.run_record import differing_settings, newest_record
from wire.errors import ConfigError, storage_errors

if TYPE_CHECKING:
    from rich.table import Table

    from fleet.config.recipe import Recipe

_SOURCE = "weights file, DATA or DATA:VERSION, what `train` wrote, directory of a lerobot checkpoint, or untrained"
_SHOWN_SETTINGS = 20


@dataclass(frozen=True, kw_only=True)
class HeldOutOptions:
    """Of both commands."""

    recipe: Annotated[str, unset("Which job; default: the one that the weights' directory belongs to.")] = ""
    config: Config = None
    episodes: Annotated[int, typer.Option(min=0, help="Of each task; 0: the recipe's evaluator.final_episodes.")] = 0
    processes: Annotated[
        int, typer.Option(min=1, max=256, help="Simulate in so many processes, each with a policy of its own.")
    ] = 1
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write figures and every episode's outcome there.")
    ] = None
    overrides: Annotated[Overrides, SIMULATED] = NOTHING


@dataclass(frozen=True, kw_only=True)
class EvalOptions(HeldOutOptions):
    source: Annotated[str, typer.Argument(help=f"What is measured: {_SOURCE}.")]
    version: Annotated[str, unset("Of a data directory: a number, newest or current (what robots run).")] = ""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(HeldOutOptions):
    a: Annotated[str, typer.Argument(metavar="A", help=f"One: {_SOURCE}.")]
    b: Annotated[str, typer.Argument(metavar="B", help="The other, likewise.")]


def evaluate(options: EvalOptions) -> None:
    """Measure success on held-out scenes in the recipe's simulator, of each task and in all, without a fleet."""
    _check_file(options)
    source = f"{options.source}:{options.version}" if options.version else options.source
    under_test = find_policy(source, options)
    recipe = under_test.make_recipe()
    episodes = plan_episodes(recipe, options.episodes or recipe.evaluator.final_episodes)
    with show_progress(len(episodes), "episodes") as progress:
        outcomes: list[MeasuredEpisode] = []
        for one in measure(under_test, episodes, options.processes):
            outcomes.append(one)
            progress.update(len(outcomes), f"success {rate(outcomes).share:.2f}")
    # the same whatever process was first
    outcomes.sort(key=_position(episodes))
    rates = _rates(recipe, outcomes)
    typer.echo(f"{_title(under_test)}, seeds from {episodes[0][1]}; steps: of an episode that succeeds")
    table = table_of("", "task", "episodes", "success", "95 %", "steps", right=("episodes", "success", "steps"))
    for name, found in rates.items():
        steps = f"{found.steps:.1f}" if found.steps is not None else "–"
        table.add_row(name, str(found.episodes), f"{found.share:.2f}", f"{found.low:.2f} to {found.high:.2f}", steps)
    show_table(table)
    if options.file is not None:
        _write(options.file, {**_about(under_test), "success": _as_json(rates), "episodes": outcomes})


def compare(options: CompareOptions) -> None:
    """Tell which of two does better on the same held-out scenes, by an exact paired test."""
    _check_file(options)
    pair = {"A": find_policy(options.a, options), "B": find_policy(options.b, options)}
    recipe, other = pair["A"].make_recipe(), pair["B"].make_recipe()
    if (recipe.measured_tasks, recipe.spec.data_hash) != (other.measured_tasks, other.spec.data_hash):
        raise ConfigError(
            f"A is of recipe '{recipe.name}', B of '{other.name}', with other tasks or another robot: nothing that one "
            "does can be held against the other."
        )
    episodes = plan_episodes(recipe, options.episodes or recipe.evaluator.final_episodes)
    outcomes: dict[str, list[MeasuredEpisode]] = {"A": [], "B": []}
    with show_progress(2 * len(episodes), "episodes") as progress:
        for name, under_test in pair.items():
            for one in measure(under_test, episodes, options.processes):
                outcomes[name].append(one)
                shown = ", ".join(f"{each} {rate(found).share:.2f}" for each, found in outcomes.items() if found)
                progress.update(sum(map(len, outcomes.values())), shown)
    for found in outcomes.values():
        found.sort(key=_position(episodes))
    whole, by_task = compare_outcomes(outcomes["A"], outcomes["B"])
    for name, under_test in pair.items():
        typer.echo(f"{name}: {_title(under_test)}")
    show_table(_comparison_table(by_task, whole))
    typer.echo(_sentence(whole))
    settings = _differences(pair["A"], pair["B"])
    if options.file is not None:
        about = {
            name: {**_about(one), "success": _as_json(_rates(recipe, outcomes[name]))} for name, one in pair.items()
        }
        compared = {"all": whole, "tasks": by_task, "settings": settings}
        _write(options.file, {**about, **compared, "episodes": outcomes})


def find_policy(text: str, options: HeldOutOptions) -> PolicyUnderTest:
    """What `text` names, with recipe and policy of its directory unless options say others, and the weights it has now.

    Raises `ConfigError` when nobody says which recipe it is of, and what reading the weights raises.
    """
    source, overrides = parse_source(text), options.overrides
    identity = source.identity()
    name, config = options.recipe, options.config
    if not name:
        if identity is None:
            raise ConfigError(f"{text}: nothing there says of which recipe it is. Give --recipe NAME.")
        name, config = identity.recipe, config or identity.config_path
    if source.kind == SourceKind.checkpoint:
        if overrides.policy:
            raise ConfigError(f"{text} is a policy of its own: leave --policy {overrides.policy} out.")
        overrides = replace(overrides, policy=f"lerobot:{source.path}")
    elif not overrides.policy and identity is not None and identity.recipe == name.partition("@")[0]:
        if (choice := identity.policy) is not None:
            policy_config = json.dumps(choice.config) if choice.config else ""
            overrides = replace(overrides, policy=str(choice), policy_config=policy_config)
        elif source.home is not None and get_recipe(name, config=config).tiny:
            overrides = replace(overrides, policy=f"lerobot:{source.home.policy}")
    under_test = PolicyUnderTest(source, name, config, overrides)
    under_test.make_recipe().require_one_shape("what is measured")
    return pin(under_test)


# --- inside -----------------------------------------------------------------------------------------------------------


def _position(episodes: list[tuple[str, int]]) -> Callable[[MeasuredEpisode], int]:
    order = {scene: number for number, scene in enumerate(episodes)}
    return lambda one: order[one.task, one.seed]


def _rates(recipe: Recipe, outcomes: list[MeasuredEpisode]) -> dict[str, SuccessRate]:
    found = {task: rate(one for one in outcomes if one.task == task) for task in recipe.measured_tasks}
    return {**found, "all": rate(outcomes)} if len(found) > 1 else found


def _title(under_test: PolicyUnderTest) -> str:
    version = f", version {under_test.version}" if under_test.version else ""
    policy = f", policy {under_test.overrides.policy}" if under_test.overrides.policy else ""
    return f"{under_test.source}{version} (recipe {under_test.recipe}{policy})"


def _about(under_test: PolicyUnderTest) -> dict[str, Any]:
    return {
        "source": str(under_test.source),
        "version": under_test.version,
        "sha256": under_test.sha256,
        "recipe": under_test.recipe,
        "policy": under_test.overrides.policy,
        "set": under_test.overrides.set_,
    }


def _as_json(rates: dict[str, SuccessRate]) -> dict[str, Any]:
    return {name: {"share": one.share, **msgspec.structs.asdict(one)} for name, one in rates.items()}


def _comparison_table(by_task: dict[str, PairedComparison], whole: PairedComparison) -> Table:
    table = table_of("", "task", "of", "A", "B", "A - B", "95 %", "p", "", right=("of", "A", "B", "A - B", "p"))
    table.box = None
    rows = {**by_task, "all": whole} if len(by_task) > 1 else by_task
    for name, one in rows.items():
        shares = [f"{share:.2f}" for share in (one.a / one.episodes, one.b / one.episodes)]
        found = f"{one.difference:+.2f}", f"{one.low:+.2f} to {one.high:+.2f}", _p(one.p), one.verdict.value
        table.add_row(name, str(one.episodes), *shares, *found)
    return table


def _sentence(one: PairedComparison) -> str:
    return (
        f"{one.verdict}: {one.a} against {one.b} of the same {one.episodes} episodes succeed, A alone in {one.only_a}, "
        f"B alone in {one.only_b}. A - B "
        f"{one.difference:+.3f} (95 %: {one.low:+.3f} to {one.high:+.3f}), p {_p(one.p)} (exact McNemar)."
    )


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1g}"


def _differences(a: PolicyUnderTest, b: PolicyUnderTest) -> list[tuple[str, Any, Any]]:
    """What the newest starts in both directories differ in, said as well."""
    homes = [one.source.home for one in (a, b)]
    records = [newest_record(home) if home is not None else None for home in homes]
    if records[0] is None or records[1] is None or homes[0] == homes[1]:
        return []
    found = differing_settings(records[0], records[1])
    for name, ours, theirs in found[:_SHOWN_SETTINGS]:
        typer.echo(f"  {name}: A {json.dumps(ours)}, B {json.dumps(theirs)}")
    if len(found) > _SHOWN_SETTINGS:
        typer.echo(f"  and {len(found) - _SHOWN_SETTINGS} more")
    return found


def _check_file(options: HeldOutOptions) -> None:
    if options.file is not None and not options.file.resolve().parent.is_dir():
        raise ConfigError(f"--json {options.file}: its directory does not exist; create it first.")


def _write(file: Path, found: dict[str, Any]) -> None:
    with storage_errors("writing what was measured", file):
        file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    typer.echo(f"{file} written.")
