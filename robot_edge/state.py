"""Who is in control: one pure function of what is known at a tick.

The order is strict: e-stop > a person > the scripted operator > the policy. Whatever is not alive, fresh and valid
ends in a hold with a name.
"""

from __future__ import annotations

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


class Hold(StrEnum):
    """Why a robot holds."""

    none = ""
    estop = "emergency stop"
    no_recorder = "the recorder does not take steps"
    storage = "the spool cannot be written"
    bad_observation = "the observation is not valid"
    stale_camera = "a camera stands still"
    operator_idle = "the operator presses no key"
    operator_lost = "the operator's link is lost"
    no_job = "no job yet"
    no_version = "no policy version yet"
    no_action = "no fresh action from inference"
    bad_action = "the action is not valid"


class Known(msgspec.Struct, frozen=True):
    """Everything that decides about control at one tick."""

    estop: bool = False
    recorder_ok: bool = True
    storage_ok: bool = True
    observation_ok: bool = True
    camera_fresh: bool = True
    human: bool = False
    """a person has taken over"""
    human_linked: bool = True
    """the person's page is connected"""
    human_command_fresh: bool = False
    """a key is down and its command has just come"""
    script: bool = False
    """the scripted operator has taken over"""
    version: int = 0
    """policy version inference runs, 0 when none"""
    action_ready: bool = False
    """the chunk schedule has an action for this tick"""


def decide(known: Known) -> tuple[Mode, Hold]:
    """(mode, reason to hold) for this tick."""
    if known.estop:
        return Mode.estop, Hold.estop
    if not known.recorder_ok:
        return Mode.hold, Hold.no_recorder
    if not known.storage_ok:
        return Mode.hold, Hold.storage
    if not known.observation_ok:
        return Mode.hold, Hold.bad_observation
    if not known.camera_fresh:
        return Mode.hold, Hold.stale_camera
    if known.human:
        if not known.human_linked:
            return Mode.hold, Hold.operator_lost
        if not known.human_command_fresh:
            return Mode.hold, Hold.operator_idle
        return Mode.human, Hold.none
    if known.script:
        return Mode.script, Hold.none
    if known.version == 0:
        return Mode.hold, Hold.no_version
    if not known.action_ready:
        return Mode.hold, Hold.no_action
    return Mode.policy, Hold.none
