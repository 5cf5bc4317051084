"""What lerobot's vision-language-action policies share: words of one length, denoising, and what a loss reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policies.lerobot.partitions.partition import PolicyPartition, Tensors
from wire.errors import PolicyError

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    from policies.lerobot.partitions.partition import Guide


def words(policy: PreTrainedPolicy, batch: Tensors) -> tuple[Tensor, Tensor]:
    """Tokens int64[b, n] and bool[b, n], true for those that are words; n is always the configured length.

    So a latent has one shape whatever is said. What is padded is masked, and changes nothing.
    Raises `PolicyError` when the preprocessor made no tokens.
    """
    from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS

    if OBS_LANGUAGE_TOKENS not in batch:
        raise PolicyError(
            f"a {policy.config.type} policy reads instructions, but its preprocessor made no '{OBS_LANGUAGE_TOKENS}'; "
            "use the policy_preprocessor.json that belongs to it."
        )
    tokens, said = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK].bool()
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


class DenoisingPartition(PolicyPartition):
    """Of a kind that makes a chunk by denoising it."""

    guided = True

    def noise_shape(self, policy: PreTrainedPolicy) -> tuple[int, ...]:
        """[1, H, the width all robots' actions are padded to]"""
        return 1, policy.config.chunk_size, policy.config.max_action_dim


def denoise(
    noise: Tensor | None,
    steps: int,
    velocity: Callable[[Tensor, float], Tensor],
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


def _guided(
    guide: Guide, settings: RTCConfig | None, noise: Tensor
) -> Callable[[Callable[[Tensor, float], Tensor], Tensor, float], Tensor]:
    from lerobot.configs.types import RTCAttentionSchedule
    from lerobot.policies.rtc.configuration_rtc import RTCConfig
    from lerobot.policies.rtc.modeling_rtc import RTCProcessor

    if settings is None:
        settings = RTCConfig(enabled=True, prefix_attention_schedule=RTCAttentionSchedule.EXP)
    processor = RTCProcessor(settings)
    known = guide.actions.shape[0]

    def bend(velocity: Callable[[Tensor, float], Tensor], x: Tensor, time: float) -> Tensor:
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
