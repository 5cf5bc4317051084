"""The flow-matching policy (needs torch)."""

from policies.flow.config import Conv, Eye, FlowConfig
from policies.flow.policy import FlowPolicy
from policies.flow.presets import pixels_network, state_network

__all__ = ["Conv", "Eye", "FlowConfig", "FlowPolicy", "pixels_network", "state_network"]
