"""What decides a shared network. It is the same on every robot, whatever that is: what differs is in the weights."""

from __future__ import annotations

from policies.common.embodiments import EmbodimentTable
from policies.flow.config import FlowConfig, Positive
from wire.errors import ConfigError
from wire.types import RobotSpec

_OWN_PARTS = ("transformer", "vlm", "pooler", "residual", "advantage", "editor", "outlook", "explore")
"""of a network for robots of one shape"""


class SharedConfig(FlowConfig, frozen=True, kw_only=True):
    """A small flow network of fixed width. `state_dim` and `action_dim` are columns: there must be one for each name
    of a dimension that any of its robots has. A camera of `cameras` is that of a robot which has one of this name; its
    pictures are brought to this size."""

    state_dim: Positive = 96
    action_dim: Positive = 16
    capacity: Positive = 8
    """robots of so many shapes"""

    def require_robot(self, spec: RobotSpec) -> None:
        """Raise `ConfigError` if this cannot be the network of the robot `spec`, or of any."""
        self.require()
        self.empty_table().join(spec)

    def require(self) -> None:
        """Raise `ConfigError` for values that cannot work, whatever the robot."""
        super().require()
        for name in (*_OWN_PARTS, "online_statistics"):
            if getattr(self, name):
                raise ConfigError(f"shared flow policy: it has no `{name}`; leave it out, or train one policy a robot.")

    def empty_table(self) -> EmbodimentTable:
        """Before any robot has joined."""
        return EmbodimentTable(self.capacity, self.state_dim, self.action_dim)
