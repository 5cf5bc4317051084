"""What the `vla-fleet policy` commands do: they load torch, the command line itself does not."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import Overrides
from fleet.config.process_options import TryPolicyOptions
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe
from fleet.config.weights_source import read_version
from fleet.launch.builders import limit_threads
from fleet.launch.learning import dataset_config
from policies.conformance.check import example_observation
from policies.interface.policy import NormalizationData
from policies.tokens.config import FastConfig, ResidualVQConfig
from policies.tokens.fast import FastTokenizer
from policies.tokens.read_tokenizer import read_tokenizer
from policies.tokens.residual_vq import ResidualVQ
from policies.tokens.tokenizer import ActionTokenizer
from policies.tokens.tokenizer import report as token_report
from wire.errors import (
    ConfigError,
    FleetError,
    InvalidDataError,
    PolicyError,
    storage_errors,
    suggest,
)
from wire.types import RobotSpec

_RESTS = 0.02
"""a dimension that used less of the robot's range than this share is taken to rest"""
_TOKENIZERS: dict[str, Any] = {"fast": (FastTokenizer, FastConfig), "residual_vq": (ResidualVQ, ResidualVQConfig)}
"""tokeniser and its configuration"""


def tuned_recipe(recipe: str, policy: str, policy_config: str, config: Path | None = None) -> Recipe:
    """The recipe with that policy, in a process that is about to run it. Raises `ConfigError`."""
    limit_threads()
    return Overrides(policy=policy, policy_config=policy_config).applied(get_recipe(recipe, config=config))


def make_once(options: TryPolicyOptions) -> None:
    """Make the policy of `options` for the recipe's robot, and the algorithm for it if one is given.

    Raises a `FleetError` when it cannot be made, or lacks what the algorithm needs, as the batches may; `PolicyError`
    for what a policy raises that says no more of itself.
    """
    limit_threads()
    job = options.overrides.applied(options.make_recipe(options.seed))
    try:
        policy = job.make_policy(job.spec, options.seed)
        if options.overrides.algorithm:
            job.algorithm.make(policy)
            if not job.members:
                dataset_config(job, policy, options.seed)
    except FleetError:
        raise
    except Exception as error:  # whatever a third party's policy raises
        what = options.overrides.policy or f"of recipe '{options.recipe}'"
        raise PolicyError(f"policy {what} cannot be made: {type(error).__name__}: {error}") from error


def measure_cost(recipe: Recipe, seed: int = 0, rounds: int = 10) -> dict[str, Any]:
    """What the recipe's policy is and what it costs on this computer, timed on random observations.

    Times are medians with one thread; `version_bytes`: of one published version; `cameras`: of the robot, by the names
    that the policy has for them; `pretrained`: its first weights can act already; `trained_max_delay` in ticks.
    """
    spec = recipe.spec
    policy = recipe.make_policy(spec, seed)
    think_s, act_s = [], []
    instruction = next(iter(recipe.instructions.values()))
    # The first round pays for what is done once.
    for number in range(rounds + 1):
        observation = example_observation(spec, number, instruction)
        started_s = time.perf_counter()
        latent = policy.think(observation)
        thought_s = time.perf_counter()
        policy.act(observation, latent, 0)
        if number:
            think_s.append(thought_s - started_s)
            act_s.append(time.perf_counter() - thought_s)
    parameters = list(policy.module.parameters())
    return {
        "policy": type(policy).__name__,
        "recipe": recipe.name,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "version_bytes": len(policy.save()),
        "horizon": policy.horizon,
        "horizon_s": policy.horizon / spec.control_hz,
        "execute_ticks": recipe.chunking.execute_ticks,
        "latent_shape": list(latent.data.shape),
        "latent_bytes": latent.data.nbytes,
        "think_ms": 1e3 * float(np.median(think_s)),
        "act_ms": 1e3 * float(np.median(act_s)),
        "cameras": dict(getattr(policy, "cameras", {})),
        "pretrained": policy.pretrained,
        "trained_max_delay": policy.trained.trained_max_delay,
    }


def format_cost(shown: dict[str, Any]) -> list[str]:
    """What `measure_cost` found, for people."""
    parameters, trained = shown["parameters"], shown["trained_parameters"]
    chunk_s, ticks = shown["horizon_s"], shown["execute_ticks"]
    return [
        f"policy          {shown['policy']} for recipe '{shown['recipe']}'",
        f"parameters      {parameters:,}, of which {trained:,} are trained",
        f"a version       {shown['version_bytes'] / 1e6:.2f} MB are published",
        f"begins with     {'weights that act' if shown['pretrained'] else 'random weights'}",
        f"chunk           {shown['horizon']} actions, {chunk_s:.2f} s; the next after {ticks} ticks",
        f"trained for     a delay of up to {shown['trained_max_delay']} ticks",
        f"latent          {shown['latent_shape']}, {shown['latent_bytes'] / 1e3:.1f} kB",
        f"think           {shown['think_ms']:.1f} ms",
        f"act             {shown['act_ms']:.1f} ms",
        *(f"camera          {camera} as {name}" for name, camera in shown["cameras"].items()),
    ]


def recipe_of(root: Path) -> tuple[Recipe, Overrides]:
    """What the fleet below `root` runs: its recipe, and the policy that was chosen for it. Raises `ConfigError`."""
    data = DataDirectory(root.resolve())
    identity = data.identity()
    if identity is None:
        raise ConfigError(f"--data {root}: no fleet has worked there. `vla-fleet up` makes such a directory.")
    recipe, choice = get_recipe(identity.recipe, config=identity.config_path), identity.policy
    if choice is not None:
        return recipe, Overrides(policy=str(choice), policy_config=json.dumps(choice.config) if choice.config else "")
    return recipe, Overrides(policy=f"lerobot:{data.policy}") if recipe.tiny else Overrides()


def export_version(root: Path, version: int | None, out: Path) -> int:
    """Write a published version, None for the newest, as a lerobot checkpoint into `out`; its number.

    Raises `ConfigError` when there is no such version or the policy is none of lerobot's.
    """
    recipe, overrides = recipe_of(root)
    choice = overrides.choice()
    if choice is None or choice.kind != "lerobot":
        raise ConfigError(
            f"--data {root}: its policy is {choice or 'the one of recipe ' + recipe.name}; only lerobot's can be "
            "written as a lerobot checkpoint."
        )
    number, weights = read_version(root, version)
    limit_threads()
    from policies.lerobot.export import export
    from policies.lerobot.policy import LeRobotPolicy

    policy = overrides.applied(recipe).make_policy(recipe.spec, 0)
    assert isinstance(policy, LeRobotPolicy)
    policy.load(weights, number)
    export(policy, out)
    return number


def recorded_examples(root: Path, recipe: Recipe, horizon: int) -> NormalizationData:
    """Imitable states and chunks of the buffer below `root`. Raises `ConfigError` when there are none."""
    from cloud_learner.buffer.loading.config import DatasetConfig
    from cloud_learner.buffer.loading.dataset import ReplayDataset
    from cloud_learner.buffer.sampling.target import imitation

    data = DataDirectory(root)
    config = DatasetConfig(tasks=recipe.instructions, target=imitation(), batch=1, horizon=horizon, prefetch=0)
    with contextlib.ExitStack() as held:
        ledger, store = held.enter_context(data.open_buffer())
        dataset = held.enter_context(contextlib.closing(ReplayDataset(ledger, store, recipe.spec, config)))
        dataset.refresh()
        examples = dataset.examples()
    if not len(examples.chunks):
        raise ConfigError(
            f"--data {root}: it has no {horizon} actions in a row of an operator on the tasks of recipe "
            f"'{recipe.name}'. Record demonstrations first."
        )
    return examples


# --- action tokenisers ------------------------------------------------------------------------------------------------


def recorded_chunks(root: Path, horizon: int) -> tuple[np.ndarray, RobotSpec]:
    """float32[m, H, da] of what operators did, in the order of recording, and the robot they are of.

    Raises `ConfigError` when nothing is recorded.
    """
    recipe, _ = recipe_of(root)
    return recorded_examples(root, recipe, horizon).chunks, recipe.spec


def fit_tokenizer(kind: str, chunks: np.ndarray, spec: RobotSpec, error: float) -> ActionTokenizer:
    """A tokeniser of `kind` with a mean error of at most `error`, a share of the range; 0: with the kind's settings.

    Raises `ConfigError` for an unknown kind and an error that it cannot meet.
    """
    if kind not in _TOKENIZERS:
        raise ConfigError(
            f"--kind {kind}: there is no such tokeniser.{suggest(kind, _TOKENIZERS)} Known: {', '.join(_TOKENIZERS)}."
        )
    tokenizer, config = _TOKENIZERS[kind]
    return tokenizer.fit(chunks, config(error_goal=error or None), _RESTS * (spec.action_high() - spec.action_low()))


def write_tokenizer(tokenizer: ActionTokenizer, path: Path) -> None:
    """Raises `StorageError`."""
    with storage_errors("writing the tokeniser", path):
        path.write_bytes(tokenizer.to_bytes())


def load_tokenizer(path: Path) -> ActionTokenizer:
    """Raises `StorageError` or `InvalidDataError` that names the file."""
    with storage_errors("reading the tokeniser", path):
        data = path.read_bytes()
    try:
        return read_tokenizer(data)
    except InvalidDataError as error:
        raise InvalidDataError(f"{path}: {error}") from error


def format_token_report(tokenizer: ActionTokenizer, chunks: np.ndarray, as_json: bool) -> str:
    """The report of `tokenizer` on `chunks`, for people or as JSON."""
    found = token_report(tokenizer, chunks)
    if as_json:
        about = {"horizon": tokenizer.horizon, "vocabulary": tokenizer.vocabulary, **asdict(found)}
        return msgspec.json.format(msgspec.json.encode(about)).decode()
    return "\n".join(
        [
            f"chunks       {found.chunks} of {tokenizer.horizon} actions in {chunks.shape[2]} dimensions",
            f"vocabulary   {tokenizer.vocabulary} tokens",
            f"a chunk      {found.tokens_mean:.1f} tokens on average, 99 % have at most {found.tokens_p99:.0f}",
            f"error        {found.mean_abs:.2%} of the range on average, 99 % are below {found.p99:.2%}",
            f"worst        {found.worst_dimension:.2%} on average in one dimension",
        ]
    )
