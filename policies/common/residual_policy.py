"""One action corrected on the robot between two chunks. Needs numpy alone: the control process runs it.

A2C2 (Sendai et al. 2025, arXiv 2509.23224): a chunk was made from an observation that grows older with every action
of it. A small network looks at each action once more before it is executed, with the newest state. It is trained in
`policies.flow.networks.residual`; both must build the input alike.
"""

from __future__ import annotations

import numpy as np

from wire.types import ResidualPolicy

STATE_LIMIT = 5.0
"""normalised states are clamped to ± this: one that was never seen before stays a moderate input"""
TICKS_SCALE = 1 / 16
"""index and age reach the network divided by so many ticks"""


def input_width(state_dim: int, latent_width: int, action_dim: int) -> int:
    """Numbers that the first layer reads: state, latent, action, index, age."""
    return state_dim + latent_width + action_dim + 2


def correct(
    corrector: ResidualPolicy,
    state: np.ndarray,
    latent: np.ndarray,
    action: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    index: int,
    age_ticks: float,
) -> np.ndarray:
    """float32[da] within [low, high]: `action`, corrected.

    `state`: float32[ds], the newest; `latent`: float32[z] the chunk was made from; `action`: float32[da], entry
    `index` of the chunk; `age_ticks`: how old what the latent saw is now.
    """
    ds, z, da = len(state), len(latent), len(action)
    half = (high - low) * np.float32(0.5)
    x: np.ndarray = np.empty(ds + z + da + 2, np.float32)
    felt = x[:ds]
    np.subtract(state, corrector.mean, out=felt)
    np.divide(felt, corrector.std, out=felt)
    np.minimum(felt, STATE_LIMIT, out=felt)
    np.maximum(felt, -STATE_LIMIT, out=felt)
    x[ds : ds + z] = latent
    x[ds + z : -2] = (action - low) / half - 1
    x[-2] = index * TICKS_SCALE
    x[-1] = age_ticks * TICKS_SCALE
    last = len(corrector.weights) - 1
    for layer, (weight, bias) in enumerate(zip(corrector.weights, corrector.biases, strict=True)):
        x = weight @ x
        x += bias
        if layer < last:
            # SiLU, in a form that does not overflow
            x *= np.float32(0.5) * (1 + np.tanh(x * np.float32(0.5)))
    return np.minimum(np.maximum(action + x * half, low), high).astype(np.float32, copy=False)
