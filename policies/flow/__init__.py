"""Our own policy: flow matching with a slow and a fast path.

The configuration needs no torch; the policy itself is imported when it is asked for. Others come in by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from policies.flow.config import Bridge, CameraEncoderConfig, Conv, FlowConfig, Transformer, Vlm
from policies.flow.presets import pixels_network, state_network

if TYPE_CHECKING:
    from policies.flow.policy import FlowPolicy

__all__ = [
    "Bridge",
    "CameraEncoderConfig",
    "Conv",
    "FlowConfig",
    "FlowPolicy",
    "Transformer",
    "Vlm",
    "pixels_network",
    "state_network",
]


def __getattr__(name: str) -> Any:
    if name == "FlowPolicy":
        from policies.flow.policy import FlowPolicy

        return FlowPolicy
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
