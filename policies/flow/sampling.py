"""From noise to actions: the flow integrated freely, behind a committed prefix, or steered towards one.

Shapes: z latent, ds state, H actions of da numbers, one chunk at a time. Actions are normalised to [-1, 1].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from policies.flow.network import FlowNetwork

MAX_GUIDANCE = 5.0
"""beta of arXiv 2506.07339: the pull at flow time 0 would be endless"""


def sample(
    network: FlowNetwork,
    latent: torch.Tensor,
    state: torch.Tensor,
    noise: torch.Tensor,
    age: torch.Tensor | None = None,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """Euler steps from noise to actions: [1, z], [1, ds], [1, H * da] -> [1, H * da] in [-1, 1].

    `age`: [1, 1] ticks, 0 when left out. `known`: [1, p * da], the actions that are already committed; they enter as
    they are at every step and come back so (training-time real-time chunking, arXiv 2512.05964).
    """
    fast, steps = network.fast, network.config.euler_steps
    committed = None
    if known is not None:
        committed = torch.zeros(1, network.config.horizon, device=noise.device)
        committed[:, : known.shape[1] // network.config.action_dim] = 1
        noise = noise.clone()
    fixed, weight = _fixed(network, latent, state, age, committed), fast.noisy.weight.t()
    actions = noise
    for step in range(steps):
        if known is not None:
            actions[:, : known.shape[1]] = known
        output = fast.head(torch.addmm(fixed[step : step + 1], actions, weight))
        if network.config.predict == "action":
            # v = (a - x) / (1 - t), times the step 1 / steps
            actions = torch.lerp(actions, output, 1 / (steps - step))
        else:
            actions = actions + output / steps
    if known is not None:
        actions[:, : known.shape[1]] = known
    return actions.clamp(-1, 1)


def sample_towards(
    network: FlowNetwork,
    latent: torch.Tensor,
    state: torch.Tensor,
    noise: torch.Tensor,
    wanted: torch.Tensor,
    weights: torch.Tensor,
    age: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sample`, steered so that the end of the flow agrees with [1, H * da] `wanted` where float32[H * da] `weights`
    say so.

    Real-time chunking (Black, Galliker, Levine 2025, arXiv 2506.07339, equations 2 to 4): with the clean chunk
    a(x) = x + (1 - t) v(x) that the flow would end at, each step follows

        v + min(beta, (t^2 + (1 - t)^2) / (t (1 - t))) (wanted - a(x))^T diag(weights) da/dx

    It needs one backward pass a step. What the network gives whatever the noise was cannot be steered.
    """
    steps = network.config.euler_steps
    # gradients, and tensors that may take part in them, even when whoever calls infers without
    with torch.inference_mode(False), torch.enable_grad():
        with torch.no_grad():
            age = None if age is None else age.clone()
            fixed = _fixed(network, latent.clone(), state.clone(), age, None)
            weight = network.fast.noisy.weight.t().detach()
            wanted, weights, actions = wanted.clone(), weights.clone(), noise.clone()
        for step in range(steps):
            time = step / steps
            actions = actions.detach().requires_grad_()
            output = network.fast.head(torch.addmm(fixed[step : step + 1], actions, weight))
            if network.config.predict == "action":
                clean, velocity = output, (output - actions) / (1 - time)
            else:
                clean, velocity = actions + (1 - time) * output, output
            error = (wanted - clean.detach()) * weights
            (pull,) = torch.autograd.grad(clean, actions, error)
            actions = actions.detach() + (velocity.detach() + guidance(time) * pull) / steps
    return actions.detach().clamp(-1, 1)


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


def _fixed(
    network: FlowNetwork,
    latent: torch.Tensor,
    state: torch.Tensor,
    age: torch.Tensor | None,
    committed: torch.Tensor | None,
) -> torch.Tensor:
    """[steps, width]: all of the first layer that does not depend on the noisy actions."""
    fast, steps = network.fast, network.config.euler_steps
    time = torch.arange(steps, device=latent.device)[:, None] / steps
    known = fast.latent(latent) + fast.state(network.normalizer(state))
    return fast.with_options(known, age, committed) + fast.time(fast.embed(time))
