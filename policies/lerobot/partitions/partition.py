"""How one kind of lerobot policy is divided into a slow and a fast path.

A new kind needs a subclass of `PolicyPartition` and a line in `policies.lerobot.policy.PARTITIONS`. Any other kind runs
undivided, with the pictures themselves as its latent (`WholePartition`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from wire.errors import PolicyError

if TYPE_CHECKING:
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

STATE, ACTION, PAD, PICTURES = "observation.state", "action", "action_is_pad", "observation.images"
WORDS = "observation.language.tokens", "observation.language.attention_mask"
"""names in lerobot's batches"""
Network: TypeAlias = Any
"""lerobot's `PreTrainedPolicy`, whose subclasses have nothing in common beyond that"""
Tensors: TypeAlias = dict[str, Any]
"""a batch by lerobot's names: tensors, and the list of strings `task`"""
Latents: TypeAlias = list[Tensor]
Velocity: TypeAlias = Callable[[Tensor, float], Tensor]
"""of x [b, H, width] at a flow time"""


@dataclass(frozen=True)
class Guide:
    """Actions that a chunk is steered towards (real-time chunking, arXiv 2506.07339)."""

    actions: Tensor
    """float32[n, da], normalised, n <= H"""
    committed: int
    """the first so many will have been executed; the rest is leaned on less and less"""


class PolicyPartition(ABC):
    """One kind of lerobot policy, divided. Has no state of its own but what can be made again."""

    guided = False
    """whether `act` understands a guide"""
    draws = False
    """whether `act` draws random numbers beside `noise`: then it is not compiled"""
    think_reads_state = False
    """whether the state is among what the latent is made of"""
    lora_targets: tuple[str, ...] = ()
    """patterns of the Linear modules that get adapters unless the user names others"""

    def horizon(self, policy: Network) -> int:
        """H, the actions that `act` returns."""
        return int(policy.config.chunk_size)

    @abstractmethod
    def think(self, policy: Network, batch: Tensors) -> Latents:
        """The latent: what only images and words decide.

        `batch` is preprocessed: one observation, images [1, 3, h, w] and `observation.state` [1, ds]. Called under
        `torch.no_grad`, as is `act`.
        """

    @abstractmethod
    def act(
        self, policy: Network, latent: Latents, batch: Tensors, noise: Tensor | None, guide: Guide | None
    ) -> Tensor:
        """float32[1, H, da], normalised actions.

        `batch` is preprocessed and has the fresh `observation.state` [1, ds], no image and no words. A policy with
        n_obs_steps > 1 gets it as [1, n_obs_steps, ds], oldest first, and each tensor of the latent with such an axis
        after its first.
        `noise` has the shape that `noise_shape` says; any other randomness comes from torch's global generator,
        which the caller has seeded and puts back.
        """

    def noise_shape(self, policy: Network) -> tuple[int, ...] | None:
        """Of the normal noise that `act` begins with, None when it needs none."""
        return None

    def arrange(self, policy: Network, batch: Tensors) -> Tensors:
        """Last changes to a preprocessed training batch before `loss`."""
        return batch

    @abstractmethod
    def loss(self, policy: Network, batch: Tensors) -> Tensor:
        """Scalar: lerobot's own loss of an arranged batch, as a mean over the actions that are kept."""

    def unreached(self, policy: Network) -> frozenset[str]:
        """Names of parameters that no loss reaches, whatever `requires_grad` says."""
        return frozenset()


class DenoisingPartition(PolicyPartition):
    """Of a kind that makes a chunk by denoising it."""

    guided = True
    _steps: str
    """the configuration's name for the number of denoising steps"""

    def noise_shape(self, policy: Network) -> tuple[int, ...]:
        """[1, H, the width all robots' actions are padded to]"""
        return 1, policy.config.chunk_size, policy.config.max_action_dim

    def act(
        self, policy: Network, latent: Latents, batch: Tensors, noise: Tensor | None, guide: Guide | None
    ) -> Tensor:
        """float32[b, H, da] from the newest state and the images and words of `latent`."""
        config, velocity = policy.config, self._velocity(policy, latent, batch)
        actions = denoise(noise, getattr(config, self._steps), velocity, guide, config.rtc_config)
        return actions[:, :, : config.output_features["action"].shape[0]]

    @abstractmethod
    def _velocity(self, policy: Network, latent: Latents, batch: Tensors) -> Velocity:
        """The flow's velocity at x [b, H, width] and a flow time."""


def words(policy: Network, batch: Tensors) -> tuple[Tensor, Tensor]:
    """Tokens int64[b, n] and bool[b, n], true for those that are words; n is always the configured length.

    So a latent has one shape whatever is said. What is padded is masked, and changes nothing.
    Raises `PolicyError` when the preprocessor made no tokens.
    """
    if WORDS[0] not in batch:
        raise PolicyError(
            f"a {policy.config.type} policy reads instructions, but its preprocessor made no '{WORDS[0]}'; "
            "use the policy_preprocessor.json that belongs to it."
        )
    tokens, said = batch[WORDS[0]], batch[WORDS[1]].bool()
    more = policy.config.tokenizer_max_length - tokens.shape[1]
    if more > 0:
        tokens = torch.nn.functional.pad(tokens, (0, more))
        said = torch.nn.functional.pad(said, (0, more))
    return tokens, said


def unread(names: Iterable[str], layers: str, last: int) -> set[str]:
    """Of the parameters below the prefix `layers`, those that bear on no key and no value of layers 0 to `last`."""
    found = set()
    for name in names:
        if name.startswith(layers):
            number, _, part = name.removeprefix(layers).partition(".")
            read = part.startswith(("input_layernorm.", "self_attn.k_proj.", "self_attn.v_proj."))
            if int(number) > last or (int(number) == last and not read):
                found.add(name)
    return found


def denoise(
    noise: Tensor | None,
    steps: int,
    velocity: Velocity,
    guide: Guide | None,
    settings: RTCConfig | None,
) -> Tensor:
    """[b, H, width]: `noise` brought from flow time 1 to 0 in `steps` Euler steps, as lerobot's `sample_actions` does.

    `velocity` takes x [b, H, width] and the flow time. With a `guide` each velocity is bent towards its actions by
    lerobot's `RTCProcessor` (Black et al. 2025, arXiv 2506.07339, eq. 2 and 4): fully for the committed actions, less
    and less up to the last that is known (eq. 5). `settings` are the checkpoint's own for that, if it has any.
    """
    assert noise is not None
    x, dt = noise, -1.0 / steps
    bend = None if guide is None else _guided(guide, settings, noise)
    for step in range(steps):
        time = 1.0 + step * dt
        x = x + dt * (velocity(x, time) if bend is None else bend(velocity, x, time))
    return x


def flow_times(x: Tensor, time: float) -> Tensor:
    """float32[b]: the flow time as lerobot's `denoise_step` wants it."""
    return torch.full((len(x),), time, dtype=torch.float32, device=x.device)


def _guided(guide: Guide, settings: RTCConfig | None, noise: Tensor) -> Callable[[Velocity, Tensor, float], Tensor]:
    from lerobot.configs.types import RTCAttentionSchedule
    from lerobot.policies.rtc.configuration_rtc import RTCConfig
    from lerobot.policies.rtc.modeling_rtc import RTCProcessor

    if settings is None:
        settings = RTCConfig(enabled=True, prefix_attention_schedule=RTCAttentionSchedule.EXP)
    processor = RTCProcessor(settings)
    known = guide.actions.shape[0]

    def bend(velocity: Velocity, x: Tensor, time: float) -> Tensor:
        def plain(at: Tensor) -> Tensor:
            # The processor asks for gradients of nothing but its own sum, so the network needs no graph.
            with torch.no_grad():
                return velocity(at, time)

        # It does use autograd, which inference mode would forbid even inside `enable_grad`.
        with torch.inference_mode(False), torch.no_grad():
            bent: Tensor = processor.denoise_step(
                x_t=x.clone(),
                prev_chunk_left_over=wanted,
                inference_delay=guide.committed,
                time=time,
                original_denoise_step_partial=plain,
                execution_horizon=known,
            )
            return bent.detach()

    with torch.inference_mode(False):
        wanted = torch.zeros_like(noise)
        wanted[:, :known, : guide.actions.shape[1]] = guide.actions.to(noise)
    return bend
