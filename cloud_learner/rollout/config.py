"""What a rollout is asked for."""

from __future__ import annotations

import msgspec

from wire.errors import ConfigError


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a version gets from the gate to all robots. Raises `ConfigError`."""

    canary: float = 0.0
    """share of the robots of each shape, 0 to 1, that try a version before all get it: at least one robot, otherwise
    rounded down; never all of several robots. 0: what passed the gate is promoted at once, and nothing is compared"""
    control: float = 0.1
    """share of the robots that keep acting by the reference while another version is current, so that a slow loss over
    many versions shows; rounded in the same way, as far as robots on the current version are left. 0: none"""
    margin: float = 0.2
    """what a promoted version must have been shown not to be worse by: in success and in stops a share of the episodes,
    in human share one of the steps"""
    alpha: float = 0.05
    """most probability of rolling back a version that is no worse, and of refusing it for its held-out success"""
    beta: float = 0.05
    """most probability of promoting a version that is worse by `margin` or more, or letting in one by `gate_success`"""
    max_episodes: int = 200
    """of a canary; then it is decided by what there is, or left to a person where too few were judged"""
    gate_success: float = 0.0
    """what a candidate's held-out success must be shown not to be worse by than that of the version it would replace, a
    share of the episodes, before robots act by it; while an evaluator is there. 0: it decides nothing"""
    gate_task: float = 0.0
    """with `gate_success`, what it must be shown not to be worse by in any one task as well: no task is lost for what
    others gained. 0: tasks are looked at together"""
    gate_timeout_s: float = 600.0
    """a candidate goes on without when no evaluator has brought anything of it for so long"""
    keep: int = 20
    """newest versions whose files are kept, beside those in use"""
    room_bytes: float = 4e9
    """and all others as well while they take less than that together: small ones may be measured or gone back to"""

    def __post_init__(self) -> None:
        if not 0 <= self.canary <= 1:
            raise ConfigError(f"rollout: canary is {self.canary}; it is a share of the robots, from 0 (off) to 1.")
        if not 0 <= self.control < 1:
            raise ConfigError(f"rollout: control is {self.control}; it is a share of the robots, from 0 to below 1.")
        if not 0 < self.margin < 1:
            raise ConfigError(f"rollout: margin is {self.margin}; it is a share of the episodes, above 0 and below 1.")
        if not 0 <= self.gate_success < 1:
            raise ConfigError(
                f"rollout: gate_success is {self.gate_success}; it is a share of the episodes, from 0 (off) to below 1."
            )
        if not 0 <= self.gate_task < 1 or (self.gate_task and not self.gate_success):
            raise ConfigError(
                f"rollout: gate_task is {self.gate_task}; it is a share of a task's episodes, from 0 (off) to below 1, "
                "and needs gate_success."
            )
        if not self.gate_timeout_s > 0:
            raise ConfigError(f"rollout: gate_timeout_s is {self.gate_timeout_s}; it is a time, above 0.")
        for name in ("alpha", "beta"):
            if not 0 < getattr(self, name) <= 0.5:
                raise ConfigError(
                    f"rollout: {name} is {getattr(self, name)}; a probability of error is above 0 and at most 0.5."
                )
        if self.max_episodes < 10:
            raise ConfigError(f"rollout: max_episodes is {self.max_episodes}; fewer than 10 episodes decide nothing.")
        if not self.room_bytes >= 0:
            raise ConfigError(f"rollout: room_bytes is {self.room_bytes}; it is a size, 0 or more.")
        if self.keep < 1:
            raise ConfigError(f"rollout: keep is {self.keep}; at least the newest version is kept.")
