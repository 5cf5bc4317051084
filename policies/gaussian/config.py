"""What decides the Gaussian policy's network. Imports no torch."""

from __future__ import annotations

from policies.flow.config import Positive, SlowPathConfig
from policies.interface.policy import Batch
from wire.errors import ConfigError


class GaussianConfig(SlowPathConfig, frozen=True, kw_only=True):
    """Everything that decides the network's shape and how it is drawn from. The slow path is the flow policy's."""

    width: Positive = 256
    """hidden units of the fast path"""
    layers: Positive = 3
    """hidden layers of the fast path"""
    ahead: tuple[int, ...] = ()
    """as of `FlowConfig`"""
    ahead_weight: float = 0.3
    """as of `FlowConfig`"""
    ego_motion: bool = False
    """as of `FlowConfig`; needs `max_offset`"""

    def require(self) -> None:
        """Raise `ConfigError` for values that cannot work, whatever the robot."""
        super().require()
        if self.cameras and not self.stem:
            raise ConfigError("gaussian policy: a policy with cameras needs at least one convolution in `stem`.")
        if self.ego_motion and self.max_offset < 1:
            raise ConfigError("gaussian policy: ego_motion needs max_offset 1 or more, else nothing moves.")

    def batch_shapes(self, batch: Batch) -> dict[str, tuple[int, ...]]:
        """See `SlowPathConfig`."""
        shapes = super().batch_shapes(batch)
        if self.ego_motion:
            shapes["seen_state"] = (self.state_dim,)
        if self.ahead:
            shapes["ahead"] = (len(self.ahead), self.state_dim)
        return shapes
