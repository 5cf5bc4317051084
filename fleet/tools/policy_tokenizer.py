"""What `vla-fleet policy tokenizer` does: action tokenisers fitted and measured on what a fleet recorded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fleet.tools.policy_commands import recipe_of, recorded
from policies.tokens.config import FastConfig, ResidualVQConfig
from policies.tokens.fast import FastTokenizer
from policies.tokens.read_tokenizer import read_tokenizer
from policies.tokens.residual_vq import ResidualVQ
from policies.tokens.tokenizer import ActionTokenizer
from policies.tokens.tokenizer import report as measured
from wire.errors import ConfigError, InvalidDataError, storage_errors, suggest
from wire.types import RobotSpec

_RESTS = 0.02
"""a dimension that used less of the robot's range than this share is taken to rest"""


_KINDS: dict[str, Any] = {"fast": (FastTokenizer, FastConfig), "residual_vq": (ResidualVQ, ResidualVQConfig)}
"""tokeniser and its configuration"""


def recorded_chunks(root: Path, horizon: int) -> tuple[np.ndarray, RobotSpec]:
    """float32[m, H, da] of what operators did, in the order of recording, and the robot they are of.

    Raises `ConfigError` when nothing is recorded.
    """
    recipe, _ = recipe_of(root)
    return recorded(root, recipe, horizon).chunks, recipe.spec


def fitted(kind: str, chunks: np.ndarray, spec: RobotSpec, error: float) -> ActionTokenizer:
    """A tokeniser of `kind` with a mean error of at most `error`, a share of the range; 0: with the kind's settings.

    Raises `ConfigError` for an unknown kind and an error that it cannot meet.
    """
    if kind not in _KINDS:
        raise ConfigError(
            f"--kind {kind}: there is no such tokeniser.{suggest(kind, _KINDS)} Known: {', '.join(_KINDS)}."
        )
    tokenizer, config = _KINDS[kind]
    return tokenizer.fit(chunks, config(error_goal=error or None), _RESTS * (spec.action_high() - spec.action_low()))


def write(tokenizer: ActionTokenizer, path: Path) -> None:
    """Raises `StorageError`."""
    with storage_errors("writing the tokeniser", path):
        path.write_bytes(tokenizer.to_bytes())


def read(path: Path) -> ActionTokenizer:
    """Raises `StorageError` or `InvalidDataError` that names the file."""
    with storage_errors("reading the tokeniser", path):
        data = path.read_bytes()
    try:
        return read_tokenizer(data)
    except InvalidDataError as error:
        raise InvalidDataError(f"{path}: {error}") from error


def rendered(tokenizer: ActionTokenizer, chunks: np.ndarray, as_json: bool) -> str:
    """The report of `tokenizer` on `chunks`, for people or as JSON."""
    found = measured(tokenizer, chunks)
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
