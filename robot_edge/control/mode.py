"""Who is in control: one table, read from the top, of what is known at a tick.

The order is strict: e-stop > a person > a reset > the scripted operator > the policy. Whatever is not alive, fresh and
valid ends in a hold with a name, whoever is in control.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum

import msgspec

from wire.types import Mode


class HoldReason(StrEnum):
    """Why a robot holds."""

    none = ""
    estop = "emergency stop"
    not_started = "it was stopped: somebody has to start it"
    no_recorder = "the recorder does not take steps"
    storage = "the spool cannot be written"
    bad_observation = "the observation is not valid"
    stale_state = "the state is old"
    stale_camera = "a camera stands still"
    frozen_camera = "a camera repeats its picture"
    clock_jump = "a clock jumped"
    slow_path_lost = "the slow path is silent"
    untrained = "the weights were not trained for this strategy"
    operator_idle = "the operator presses no key"
    operator_lost = "the operator's link is lost"
    no_robot = "the robot does not answer"
    no_reset = "the robot cannot be reset"
    no_job = "no job yet"
    scene = "it waits until a person says that the scene is ready"
    other_version = "the job's policy version does not act yet"
    no_version = "no policy version yet"
    no_action = "no fresh action from inference"
    bad_action = "the action is not valid"
    safety = "the robot does not take commands"


class Hold(msgspec.Struct, frozen=True):
    """Why a robot holds; false when it need not."""

    reason: HoldReason = HoldReason.none
    detail: str = ""
    """what a person should know beyond the reason"""

    def __bool__(self) -> bool:
        return self.reason is not HoldReason.none


NO_HOLD = Hold()


class ControlConditions(msgspec.Struct, frozen=True):
    """Everything that decides about control at one tick."""

    estop: bool = False
    ready: bool = False
    """it was stopped, and nobody has started it since"""
    resting: bool = False
    """between two episodes, and there is none to begin"""
    recorder_ok: bool = True
    storage_ok: bool = True
    fault: Hold = NO_HOLD
    """what is wrong with the robot or with what it reports, or why it did not take the last command"""
    human: bool = False
    """a person has taken over"""
    human_linked: bool = True
    """the person's page is connected"""
    human_command_fresh: bool = False
    """a key is down and its command has just come"""
    resetting: bool = False
    """the robot is being brought to the start of an episode"""
    script: bool = False
    """the scripted operator has taken over"""
    version: int = 0
    """policy version inference runs, 0 when none"""
    version_fits: bool = True
    """it is the version the job asks for"""
    trained: bool = True
    """the weights were trained for the strategy that would use them"""
    scene_open: bool = False
    """a person has to reset the scene first"""
    missing_action: Hold = NO_HOLD
    """why the chunk scheduler has no action for this tick"""

    @property
    def may_begin(self) -> bool:
        """Whether somebody is there who can act: a script, or the policy that the job asks for."""
        return self.script or (self.version > 0 and self.version_fits and self.trained)


PRIORITY_RULES: tuple[tuple[Callable[[ControlConditions], bool], Mode, HoldReason | None], ...] = (
    (lambda known: known.estop, Mode.estop, HoldReason.estop),
    (lambda known: known.ready, Mode.hold, HoldReason.not_started),
    (lambda known: known.resting, Mode.hold, HoldReason.no_job),
    (lambda known: not known.recorder_ok, Mode.hold, HoldReason.no_recorder),
    (lambda known: not known.storage_ok, Mode.hold, HoldReason.storage),
    (lambda known: bool(known.fault), Mode.hold, None),
    (lambda known: known.human and not known.human_linked, Mode.hold, HoldReason.operator_lost),
    (lambda known: known.human and not known.human_command_fresh, Mode.hold, HoldReason.operator_idle),
    (lambda known: known.human, Mode.human, HoldReason.none),
    (lambda known: known.scene_open and known.may_begin, Mode.hold, HoldReason.scene),
    (lambda known: known.resetting, Mode.reset, HoldReason.none),
    (lambda known: known.script, Mode.script, HoldReason.none),
    (lambda known: known.version == 0, Mode.hold, HoldReason.no_version),
    (lambda known: not known.version_fits, Mode.hold, HoldReason.other_version),
    (lambda known: not known.trained, Mode.hold, HoldReason.untrained),
    (lambda known: bool(known.missing_action), Mode.hold, None),
    (lambda known: True, Mode.policy, HoldReason.none),
)
"""(when, who moves the robot, why it holds); the first row that applies decides. None: the hold is the condition's own.
"""


@functools.lru_cache(256)
def decide(known: ControlConditions) -> tuple[Mode, Hold]:
    """(mode, why the robot holds) for this tick: the first row of `PRIORITY_RULES` that applies.

    What is known is mostly what was known at the tick before, so answers are kept.
    """
    mode, reason = next((mode, reason) for when, mode, reason in PRIORITY_RULES if when(known))
    return mode, (known.fault or known.missing_action) if reason is None else Hold(reason)
