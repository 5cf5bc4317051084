"""The options of a robot's control: limits of an episode, of freshness, of its driver, and of the scripted operator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from hal.safety.limits import SafetyLimits
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ObservationLimits:
    """What counts as fresh, and when a hold ends."""

    state_stale_s: float = 0.5
    """an observation that is older than this, by control's clock, brings hold"""
    camera_stale_s: float = 0.5
    """a frame that is older than this, by its observation's clock, brings hold"""
    jump_s: float = 0.5
    """a robot's clock that gets ahead of control's by more than this at once has jumped; going back at all is a jump"""
    future_s: float = 0.05
    """a frame may be stamped so much later than its observation"""
    repeated_frames: int = 8
    """so many new frames in a row with one picture, each taken while the robot moved, are a frozen camera; 0: never"""
    repeated_span: float = 0.1
    """share of a state dimension's range that the robot must have gone through meanwhile"""
    moving: float = 0.002
    """share of a state dimension's range by which it must change from one frame to the next to count as moving"""
    repeats_while_still: bool = False
    """count frames while the robot stands still too: for a real camera, whose noise makes every picture another; a
    simulated one draws the same picture of the same scene"""
    recover_ticks: int = 3
    """ticks in a row that must be healthy before a hold ends"""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a limit that would hold every robot, or none."""
        for name in ("state_stale_s", "camera_stale_s", "jump_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"ObservationLimits: {name} is {getattr(self, name)}; give seconds above 0.")
        for name in ("future_s", "repeated_frames", "repeated_span", "moving", "recover_ticks"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"ObservationLimits: {name} is {getattr(self, name)}; give 0 or more.")


@dataclass(frozen=True, slots=True)
class RobotTimeouts:
    """How long control waits for a driver that fails."""

    give_up_s: float = 3.0
    """without one valid observation for so long, the connection is given up and made anew"""
    refusals: int = 40
    """commands in a row that a driver may refuse before its connection is given up"""
    first_pause_s: float = 1.0
    """before the first try to connect again"""
    longest_pause_s: float = 30.0
    """the pause is twice as long after each try, up to this"""
    call_s: float = 1.0
    """a driver in a process of its own that has not answered a read or write by then blocks"""
    stuck_s: float = 5.0
    """a read or write that takes so long ends the driver's process, and a new one begins"""
    stuck_coasting_s: float = 0.5
    """the same while the robot moves on until it is told otherwise: a velocity that was commanded and is not 0"""
    reset_s: float = 60.0
    """connecting or a reset that takes so long ends it as well"""

    def __post_init__(self) -> None:
        for name in ("give_up_s", "refusals", "first_pause_s", "call_s", "stuck_coasting_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"RobotTimeouts: {name} is {getattr(self, name)}; give one above 0.")
        for name, least in (("longest_pause_s", "first_pause_s"), ("stuck_s", "call_s"), ("reset_s", "call_s")):
            if getattr(self, name) < getattr(self, least):
                raise ConfigError(f"RobotTimeouts: {name} is {getattr(self, name)}, less than {least}.")


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Thresholds of the gate."""

    disagreement: float = 0.45
    """mean absolute difference of the motion actions plus `gripper_weight` times that of the last action"""
    gripper_weight: float = 0.5
    disagreement_ticks: int = 3
    """ticks in a row of disagreement before taking over"""
    min_ticks: int = 15
    """ticks a takeover lasts at least"""
    stall_ticks: int = 80
    """ticks without progress before taking over; 0: at once"""
    stall_progress: float = 0.01
    """what counts as progress, in the operator's unit"""
    trust: float = 0.0
    """a policy that says of its chunk that it succeeds by itself with so much probability or more is left alone; 0:
    none is (`ActionChunk.outlook`; ThriftyDAgger, arXiv 2109.08273)"""
    most_share: float = 1.0
    """of a robot's ticks that the operator drives: no takeover begins while it would be more. What was not asked for is
    there for later, up to that of `saved_ticks`"""
    saved_ticks: int = 1000

    def __post_init__(self) -> None:
        if not (0 < self.most_share <= 1 and self.most_share * self.saved_ticks >= self.min_ticks):
            raise ConfigError(
                f"GateConfig: with most_share {self.most_share} of saved_ticks {self.saved_ticks} nobody could take "
                f"over for min_ticks {self.min_ticks}: give a share up to 1, and more ticks."
            )


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """Who resets the scene and says how an episode ended, and how long both may take."""

    reset_by_person: bool | None = None
    """nobody but a person can reset the scene: before each episode the robot waits for them; None: as the robot is
    real or simulated"""
    judged_by_person: bool | None = None
    """nobody but a person can tell a success: without their word an episode is unjudged and no failure; None: where a
    person resets, and of any real robot"""
    reset_s: float = 0.0
    """the next episode begins so long after a scene can be reset, whatever the person says; 0: it waits for them"""
    max_s: float = 0.0
    """seconds an episode may last, whoever drives; 0: `max_ticks` alone ends it"""
    after_correction: Literal["continue", "end"] = "continue"
    """when a person or a script has handed back: the policy goes on, or the episode ends, as RaC has it"""
    recovery_first: bool = False
    """a person who takes over recovers until they say that they correct; otherwise they say when they recover"""

    def __post_init__(self) -> None:
        if self.after_correction not in ("continue", "end"):
            raise ConfigError(f"EpisodeRules: after_correction is '{self.after_correction}'; give continue or end.")
        for name in ("reset_s", "max_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"EpisodeRules: {name} is {getattr(self, name)}; give seconds, or 0 for no limit.")

    def settled(self, real: bool) -> EpisodeRules:
        """The same for a robot that is `real`, with nothing left open."""
        resets = real if self.reset_by_person is None else self.reset_by_person
        judges = real or resets if self.judged_by_person is None else self.judged_by_person
        return replace(self, reset_by_person=resets, judged_by_person=judges)


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
    takeover_blend_s: float = 0.5
    """what lies between a person's device and the robot when they engage fades in this time; 0: at once"""
    hand_back_blend_s: float = 0.5
    """the policy comes in over this time after a person; 0: at once"""
    status_every_ticks: int = 16
    source: str = "online"
    needs_policy: bool = True
    """whether a policy version must be there before an episode starts and before the operator steps in"""
    observation_limits: ObservationLimits = field(default_factory=ObservationLimits)
    safety: SafetyLimits = field(default_factory=SafetyLimits)
    driver: RobotTimeouts = field(default_factory=RobotTimeouts)
    gate: GateConfig = field(default_factory=GateConfig)
    episodes: EpisodeRules = field(default_factory=EpisodeRules)

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a time or a number that is none."""
        for name in ("max_ticks", "status_every_ticks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"LoopConfig: {name} is {getattr(self, name)}; give 1 or more.")
        if self.tail_ticks < 0:
            raise ConfigError(f"LoopConfig: tail_ticks is {self.tail_ticks}; give 0 or more.")
        for name in ("takeover_blend_s", "hand_back_blend_s"):
            if not 0 <= getattr(self, name) <= 60:
                raise ConfigError(f"LoopConfig: {name} is {getattr(self, name)}; give 0 to 60 seconds.")
