"""What every policy checks before it acts, and the chunk it makes of the numbers afterwards. Imports no torch."""

from __future__ import annotations

import numpy as np

from wire.errors import PolicyError
from wire.types import ActionChunk, Latent, Observation, Prefix, RobotSpec


def require_version(latent: Latent, version: int) -> None:
    """Raise `PolicyError` for a latent that another policy version made."""
    if latent.version != version:
        raise PolicyError(
            f"the latent was made by version {latent.version}, this policy is version {version}; "
            "call think() again after loading weights."
        )


def require_width(latent: Latent, width: int) -> None:
    """Raise `PolicyError` for a latent that is not `width` numbers in a row."""
    if latent.data.shape != (width,):
        raise PolicyError(f"a latent of shape {list(latent.data.shape)}; this policy's think() gives [{width}].")


def require_prefix(horizon: int, spec: RobotSpec, prefix: Prefix) -> None:
    """Raise `PolicyError` that says what is wrong if `prefix` cannot begin a chunk of `horizon` actions."""
    h, da = horizon, spec.action_dim
    shape = np.shape(prefix.actions)
    if len(shape) != 2 or shape[0] > h or shape[1] != da:
        raise PolicyError(f"a prefix of shape {list(shape)}; this policy's chunks are [{h}, {da}].")
    if not 0 <= prefix.committed <= shape[0]:
        raise PolicyError(f"a prefix of {shape[0]} actions with {prefix.committed} committed.")
    if not np.isfinite(prefix.actions).all():
        raise PolicyError("a prefix with actions that are not finite.")


def chunk(
    actions: np.ndarray,
    spec: RobotSpec,
    version: int,
    observation: Observation,
    latent: Latent,
    tick: int,
    prefix: Prefix | None = None,
) -> ActionChunk:
    """The chunk of float32[H, da] `actions` for `tick` on, clipped to the limits, begun with what `prefix` committed.

    May write into `actions`. Raises `PolicyError` for actions that are not finite.
    """
    if prefix is not None:
        actions[: prefix.committed] = prefix.actions[: prefix.committed]
    if not np.isfinite(actions).all():
        raise PolicyError(f"version {version} gave actions that are not finite; roll back to another version.")
    return ActionChunk(
        actions=np.clip(actions, spec.action_low(), spec.action_high()),
        first_tick=tick,
        step_ns=spec.period_ns,
        version=version,
        observed_ns=observation.time_ns,
        latent_observed_ns=latent.observed_ns,
    )
