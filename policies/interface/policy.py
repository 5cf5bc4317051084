"""The fast/slow policy interface, what every policy checks before it acts, and the chunk it makes afterwards.

Nothing here imports torch, so a robot that infers remotely stays light.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from wire.errors import InvalidDataError, PolicyError
from wire.messages.recording import FlowTrace
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities, Prefix, ResidualPolicy, RobotSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class NormalizationData:
    """What a policy may look at before its first gradient step."""

    states: np.ndarray
    """float32[n, ds]"""
    chunks: np.ndarray
    """float32[m, H, da]: actions in a row, all of them imitated; m may be 0"""
    spec: RobotSpec | None = None
    """of the robot, where a policy may know several; None: the policy's own"""


class Policy(Protocol):
    """Turns observations into action chunks in two paces.

    `think` is slow and looks at images and words; `act` is fast and looks at the newest state and the newest latent.
    A policy without a slow path returns an empty latent.
    """

    spec: RobotSpec
    horizon: int
    """H, actions per chunk"""
    version: int
    """the loaded policy version, 0 before any"""

    def think(self, observation: Observation) -> Latent:
        """The latent of the newest frames and the instruction."""
        ...

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        """A chunk whose first action is for control tick `tick`.

        `observation` has the state at that tick and its time: after an inference delay that is a state in the future,
        and the latent's age is `observation.time_ns - latent.observed_ns`. With a `prefix`, the chunk begins with its
        committed actions.

        Raises `PolicyError` if `latent` was made by another policy version, or for a prefix it cannot use.
        """
        ...

    @property
    def trained(self) -> PolicyCapabilities:
        """What the loaded weights were trained for."""
        ...

    @property
    def corrector(self) -> ResidualPolicy | None:
        """The small network that corrects single actions on the robot, None when the weights have none."""
        ...

    def load(self, weights: bytes, version: int) -> None:
        """Take all weights of `version` at once, or raise `WeightsError` and keep the old ones.

        Whoever cannot keep them, for a part of the new ones lies there already, sets `version` to 0 and raises
        `HalfLoadedError`.

        `weights` is a safetensors file whose metadata names the robot spec and the network.
        """
        ...


class TrainablePolicy(Protocol):
    """What a learner needs of a policy, whatever is inside.

    It may have `image_losses`, float32[b] or None: the last batch's loss by image, for `adaptive_share`; without it
    tasks are drawn alike.
    """

    @property
    def ticks_ahead(self) -> tuple[int, ...]:
        """Growing numbers of ticks; batches bring the state so much later as `ahead`. Empty when it needs none."""
        ...

    @property
    def max_offset(self) -> int:
        """Ticks: batches bring states and actions up to so much later than the image. 0: of its own moment."""
        ...

    @property
    def history(self) -> int:
        """Ticks before a step whose states and images batches bring as well. 0: none."""
        ...

    @property
    def module(self) -> torch.nn.Module:
        """The network that is trained."""
        ...

    def loss(self, batch: Batch) -> torch.Tensor:
        """Imitation loss of a batch, a scalar. Equation and paper stand at the implementation."""
        ...

    def save(self, module: torch.nn.Module | None = None) -> bytes:
        """Weights of `module` (default: this policy's) as a safetensors file that `Policy.load` accepts."""
        ...


class LearnedPolicy(Policy, TrainablePolicy, Protocol):
    """What a recipe gives: a policy that acts on robots and learns in the trainer."""

    @property
    def pretrained(self) -> bool:
        """Whether its first weights can act already: they are then published before anything is learned."""
        ...

    def set_normalization(self, examples: NormalizationData) -> None:
        """Set the normalisation, and whatever else is taken from data, before the first gradient step.

        Not called for a policy that is `pretrained`.
        """
        ...


Batch = dict[str, Any]
"""Arrays of one training batch, by the names that `cloud_learner.buffer.loading.windows` documents."""


def check_observation(spec: RobotSpec, observation: Observation, cameras: Collection[str] | None = None) -> None:
    """Raise `InvalidDataError` naming the field if `observation` does not fit `spec`.

    Of pictures, those of `cameras` are looked at; None: all.
    """
    if observation.state.shape != (len(spec.state),):
        raise InvalidDataError(
            f"state of shape {observation.state.shape}; robot '{spec.embodiment}' has {spec.state_dim} dimensions."
        )
    if not all(map(math.isfinite, observation.state.tolist())):
        names = [d.name for d, ok in zip(spec.state, np.isfinite(observation.state), strict=True) if not ok]
        raise InvalidDataError(f"state is not finite in {names} of robot '{spec.embodiment}'.")
    for camera in spec.cameras:
        if cameras is not None and camera.name not in cameras:
            continue
        frame = observation.images.get(camera.name)
        if frame is None:
            raise InvalidDataError(f"no image of camera '{camera.name}'; got {sorted(observation.images)}.")
        if frame.image.shape != (camera.height, camera.width, 3) or frame.image.dtype != np.uint8:
            raise InvalidDataError(
                f"camera '{camera.name}': {frame.image.dtype}{list(frame.image.shape)}, "
                f"expected uint8[{camera.height}, {camera.width}, 3]."
            )


def require_version(latent: Latent, version: int) -> None:
    """Raise `PolicyError` for a latent that another policy version made."""
    if latent.version != version:
        raise PolicyError(
            f"the latent was made by version {latent.version}, this policy is version {version}; "
            "call think() again after loading weights."
        )


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
    seed: int = 0,
    outlook: float = math.nan,
    trace: FlowTrace | None = None,
    log_prob: float = math.nan,
) -> ActionChunk:
    """The chunk of float32[H, da] `actions` for `tick` on, clipped to the limits, begun with what `prefix` committed.

    `seed`: of the noise it was made from, 0 for none; the others: see `ActionChunk`. May write into `actions`. Raises
    `PolicyError` for actions that are not finite.
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
        seed=seed,
        outlook=outlook,
        trace=None if trace is None else msgspec.structs.replace(trace, first_tick=tick),
        log_prob=log_prob,
    )


def oldest_frame_ns(observation: Observation, cameras: Collection[str]) -> int:
    """The time of what a latent of these cameras saw; without any that of the observation."""
    return min((observation.images[name].time_ns for name in cameras), default=observation.time_ns)
