"""Who is in control: one table, read from the top, of what is known at a tick.

The order is strict: e-stop > a person > a reset > the scripted operator > the policy. Whatever is not alive, fresh and
valid ends in a hold with a name, whoever is in control.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum

import msgspec


class Mode(StrEnum):
    """Who moves the robot now."""

    estop = "estop"
    hold = "hold"
    reset = "reset"
    human = "human"
    script = "script"
    policy = "policy"


class HoldReason(StrEnum):
    """Why a robot holds."""

    none = ""
    estop = "emergency stop"
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
    other_version = "the job's policy version does not act yet"
    no_version = "no policy version yet"
    no_action = "no fresh action from inference"
    bad_action = "the action is not valid"
    safety = "the robot does not take commands"


class ControlConditions(msgspec.Struct, frozen=True):
    """Everything that decides about control at one tick."""

    estop: bool = False
    recorder_ok: bool = True
    storage_ok: bool = True
    unfit: HoldReason = HoldReason.none
    """why the observation must not be acted on"""
    safe: bool = True
    """the robot takes commands: its driver did not refuse the last ones"""
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
    trained: bool = True
    """the weights were trained for the schedule that would use them"""
    slow_path_ok: bool = True
    """the slow path, or what stands in for it, still answers"""
    action_ready: bool = False
    """the chunk schedule has an action for this tick"""


PRIORITY_RULES: tuple[tuple[Callable[[ControlConditions], bool], Mode, HoldReason | None], ...] = (
    (lambda known: known.estop, Mode.estop, HoldReason.estop),
    (lambda known: not known.recorder_ok, Mode.hold, HoldReason.no_recorder),
    (lambda known: not known.storage_ok, Mode.hold, HoldReason.storage),
    (lambda known: known.unfit is not HoldReason.none, Mode.hold, None),
    (lambda known: not known.safe, Mode.hold, HoldReason.safety),
    (lambda known: known.human and not known.human_linked, Mode.hold, HoldReason.operator_lost),
    (lambda known: known.human and not known.human_command_fresh, Mode.hold, HoldReason.operator_idle),
    (lambda known: known.human, Mode.human, HoldReason.none),
    (lambda known: known.resetting, Mode.reset, HoldReason.none),
    (lambda known: known.script, Mode.script, HoldReason.none),
    (lambda known: known.version == 0, Mode.hold, HoldReason.no_version),
    (lambda known: not known.trained, Mode.hold, HoldReason.untrained),
    (lambda known: not known.slow_path_ok, Mode.hold, HoldReason.slow_path_lost),
    (lambda known: not known.action_ready, Mode.hold, HoldReason.no_action),
    (lambda known: True, Mode.policy, HoldReason.none),
)
"""(when, who moves the robot, why it holds); the first row that applies decides. None: the reason is
`ControlConditions.unfit`.
"""


@functools.lru_cache(256)
def decide(known: ControlConditions) -> tuple[Mode, HoldReason]:
    """(mode, reason to hold) for this tick: the first row of `PRIORITY_RULES` that applies.

    What is known is mostly what was known at the tick before, so answers are kept.
    """
    mode, reason = next((mode, reason) for when, mode, reason in PRIORITY_RULES if when(known))
    return mode, known.unfit if reason is None else reason
