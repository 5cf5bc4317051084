"""What a control loop is told once: limits of an episode, of freshness and of motion."""

from __future__ import annotations

from dataclasses import dataclass, field

from hal.safety.limiter import SafetyLimits
from robot_edge.control.guarded_robot import RobotTimeouts
from robot_edge.control.observation_monitor import ObservationLimits


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Limits of an episode, of freshness and of motion."""

    max_ticks: int = 200
    """ticks an episode may last; those in a person's hands do not count"""
    tail_ticks: int = 5
    """ticks recorded after success"""
    write_after_s: float = 0.0
    """from the beginning of a tick to its command: an answer of inference that is quicker counts in the tick it was
    asked in. Well below the control period"""
    status_every_ticks: int = 16
    source: str = "online"
    needs_policy: bool = True
    """whether a policy version must be there before an episode starts and before the operator steps in"""
    health: ObservationLimits = field(default_factory=ObservationLimits)
    safety: SafetyLimits = field(default_factory=SafetyLimits)
    driver: RobotTimeouts = field(default_factory=RobotTimeouts)
