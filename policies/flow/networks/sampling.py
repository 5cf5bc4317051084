"""From noise to actions: the flow integrated freely, behind committed actions, or steered towards a prefix.

Shapes: b chunks, z latent, ds state, H actions of da numbers. Actions are normalised to [-1, 1], states as the
network's normaliser gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from policies.flow.config import FlowConfig
from policies.flow.networks.fast import Conditioning, FastPath
from policies.interface.capabilities import GOOD, UNKNOWN

MAX_GUIDANCE = 5.0
"""beta of arXiv 2506.07339: the pull at flow time 0 would be endless"""


def sample(
    fast: FastPath, config: FlowConfig, given: Conditioning, noise: torch.Tensor, known: torch.Tensor | None = None
) -> torch.Tensor:
    """Euler steps from noise to actions: [b, H * da] -> float32[b, H * da] in [-1, 1].

    `known`: [b, H * da], of which the actions that `given.committed` marks are committed; they enter as they are at
    every step and come back so (training-time real-time chunking, arXiv 2512.05964).
    """
    steps = config.euler_steps
    answer = field(fast, config, given)
    held = None if given.committed is None else given.committed.repeat_interleave(config.action_dim, 1) > 0
    actions = noise
    for step in range(steps):
        if held is not None and known is not None:
            actions = torch.where(held, known, actions)
        output = answer(step, actions)
        if config.predict == "action":
            # v = (a - x) / (1 - t), times the step 1 / steps
            actions = torch.lerp(actions, output, 1 / (steps - step))
        else:
            actions = actions + output / steps
    if held is not None and known is not None:
        actions = torch.where(held, known, actions)
    return actions.clamp(-1, 1)


def sample_towards(
    fast: FastPath,
    config: FlowConfig,
    given: Conditioning,
    noise: torch.Tensor,
    wanted: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """`sample`, steered so that the end of the flow agrees with [b, H * da] `wanted` where float32[b, H * da] `weights`
    say so.

    Real-time chunking (Black, Galliker, Levine 2025, arXiv 2506.07339, equations 2 to 4): with the clean chunk
    a(x) = x + (1 - t) v(x) that the flow would end at, each step follows

        v + min(beta, (t^2 + (1 - t)^2) / (t (1 - t))) (wanted - a(x))^T diag(weights) da/dx

    It needs one backward pass a step. What the network gives whatever the noise was cannot be steered.
    """
    steps = config.euler_steps
    # gradients, and tensors that may take part in them, even when whoever calls infers without
    with torch.inference_mode(False), torch.enable_grad():
        with torch.no_grad():
            own = given._replace(committed=None, advantage=None)
            own = Conditioning._make(None if tensor is None else tensor.clone() for tensor in own)
            answer = field(fast, config, own)
            wanted, weights, actions = wanted.clone(), weights.clone(), noise.clone()
        for step in range(steps):
            time = step / steps
            actions = actions.detach().requires_grad_()
            output = answer(step, actions)
            if config.predict == "action":
                clean, velocity = output, (output - actions) / (1 - time)
            else:
                clean, velocity = actions + (1 - time) * output, output
            error = (wanted - clean.detach()) * weights
            (pull,) = torch.autograd.grad(clean, actions, error)
            actions = actions.detach() + (velocity.detach() + guidance(time) * pull) / steps
    return actions.detach().clamp(-1, 1)


def field(fast: FastPath, config: FlowConfig, given: Conditioning) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """What the fast path answers at each Euler step to float32[b, H * da], as float32.

    A network that knows advantages is asked for good actions. With `guidance` w it answers

        f(unknown) + w (f(good) - f(unknown))

    which above 1 goes on beyond what was imitated (classifier-free guidance: Ho and Salimans 2022, arXiv 2207.12598,
    equation 6; for advantages: RECAP, arXiv 2511.14759).
    """
    kind, good = given.latent.dtype, torch.full((len(given.latent),), GOOD, device=given.latent.device)
    if not config.advantage or config.guidance == 1:
        prepared = fast.prepare(given._replace(advantage=good if config.advantage else None), config.euler_steps)
        return lambda step, noisy: fast.step(prepared, step, noisy.to(kind)).float()

    both = Conditioning._make(None if tensor is None else torch.cat([tensor, tensor]) for tensor in given)
    told = torch.cat([good, torch.full_like(good, UNKNOWN)])
    prepared = fast.prepare(both._replace(advantage=told), config.euler_steps)

    def answer(step: int, noisy: torch.Tensor) -> torch.Tensor:
        wanted, unknown = fast.step(prepared, step, torch.cat([noisy, noisy]).to(kind)).float().chunk(2)
        return unknown + config.guidance * (wanted - unknown)

    return answer


def guidance(time: float) -> float:
    """How strongly `sample_towards` pulls at a flow time in [0, 1)."""
    if time <= 0:
        return MAX_GUIDANCE
    return min(MAX_GUIDANCE, (time**2 + (1 - time) ** 2) / (time * (1 - time)))


def soft_mask(horizon: int, prefix: int, committed: int) -> torch.Tensor:
    """float32[H]: how much each action of a chunk must agree with a prefix; arXiv 2506.07339, equation 5.

    1 for the committed ones, then falling exponentially to 0 at the end of the prefix, 0 behind it.
    """
    weights = torch.zeros(horizon)
    weights[:committed] = 1
    for i in range(committed, prefix):
        left = (prefix - i) / (prefix - committed + 1)
        weights[i] = left * (math.exp(left) - 1) / (math.e - 1)
    return weights
