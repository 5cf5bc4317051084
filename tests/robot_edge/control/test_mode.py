"""Who is in control, over everything that can be known, against the rules written down a second time."""

from __future__ import annotations

import itertools

import pytest

from robot_edge.control.mode import NO_HOLD, PRIORITY_RULES, ControlConditions, Hold, HoldReason, Mode, decide

FLAGS = (
    "estop",
    "ready",
    "resting",
    "recorder_ok",
    "storage_ok",
    "human",
    "human_linked",
    "human_command_fresh",
    "resetting",
    "script",
    "version_fits",
    "trained",
    "scene_open",
)
FAULTS = (
    HoldReason.bad_observation,
    HoldReason.stale_state,
    HoldReason.stale_camera,
    HoldReason.frozen_camera,
    HoldReason.clock_jump,
    HoldReason.no_robot,
    HoldReason.no_reset,
)
MISSING = (HoldReason.no_action, HoldReason.bad_action, HoldReason.slow_path_lost)
"""why inference has no action"""
REFUSAL = Hold(HoldReason.safety, "the driver does not take a command")
FAULT = Hold(HoldReason.clock_jump, "it went back")
NO_ACTION = Hold(HoldReason.no_action, "no version is loaded")


def all_that_can_be_known():
    for values in itertools.product((False, True), repeat=len(FLAGS)):
        for version, fault, missing in itertools.product((0, 7), (NO_HOLD, FAULT, REFUSAL), (NO_HOLD, NO_ACTION)):
            flags = dict(zip(FLAGS, values, strict=True))
            yield ControlConditions(**flags, version=version, fault=fault, missing_action=missing)


def test_every_combination_follows_the_rules() -> None:
    seen = set()
    for known in all_that_can_be_known():
        mode, hold = decide(known)
        seen.add((mode, hold.reason))
        fit = known.recorder_ok and known.storage_ok and not (known.fault or known.resting or known.ready)
        commanded = known.human_linked and known.human_command_fresh
        # e-stop always wins, and nothing else is called one
        assert (mode is Mode.estop) == known.estop
        # a hold has a reason, and whoever moves has none
        assert bool(hold) == (mode in (Mode.hold, Mode.estop))
        # what is wrong with the robot is told as it is, and so is why there is no action
        assert hold.detail or hold.reason not in (FAULT.reason, REFUSAL.reason, NO_ACTION.reason)
        # nobody moves without alive, fresh and valid
        moves = mode in (Mode.human, Mode.reset, Mode.script, Mode.policy)
        assert not moves or (fit and not known.estop)
        # a person beats reset, script and policy; a person who is silent holds the robot
        assert (mode is Mode.human) == (known.human and commanded and fit and not known.estop)
        assert not (known.human and mode in (Mode.reset, Mode.script, Mode.policy))
        # a reset beats script and policy, the script the policy
        # nobody begins in a scene that a person has to reset, and nobody is asked to while nothing could begin
        can_begin = known.script or (known.version > 0 and known.version_fits and known.trained)
        asked = known.scene_open and can_begin
        free = fit and not known.estop and not known.human and not asked
        assert (hold.reason is HoldReason.scene) == (fit and not known.estop and not known.human and asked)
        assert (mode is Mode.reset) == (free and known.resetting)
        assert (mode is Mode.script) == (free and not known.resetting and known.script)
        # the policy moves only if nobody else wants to, and if all it needs is there
        needs = known.version > 0 and known.version_fits and known.trained and not known.missing_action
        assert (mode is Mode.policy) == (free and not known.resetting and not known.script and needs)
    holds = {reason for mode, reason in seen if mode is Mode.hold}
    # an e-stop is no hold; the others are further faults, and further ways of having no action
    unseen = {HoldReason.none, HoldReason.estop, *FAULTS, *MISSING} - {FAULT.reason, NO_ACTION.reason}
    assert set(HoldReason) - holds == unseen


@pytest.mark.parametrize("reason", FAULTS)
def test_a_fault_is_the_reason(reason: HoldReason) -> None:
    fault = Hold(reason, "so it is")
    assert decide(ControlConditions(version=3, fault=fault)) == (Mode.hold, fault)
    assert decide(ControlConditions(version=3, fault=fault, human=True, human_command_fresh=True)) == (Mode.hold, fault)
    assert decide(ControlConditions(version=3, fault=fault, estop=True)) == (Mode.estop, Hold(HoldReason.estop))
    assert decide(ControlConditions(version=3, fault=fault, missing_action=NO_ACTION)) == (Mode.hold, fault)
    assert decide(ControlConditions(version=3)) == (Mode.policy, NO_HOLD)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"resting": True}, HoldReason.no_job),
        ({"recorder_ok": False}, HoldReason.no_recorder),
        ({"storage_ok": False}, HoldReason.storage),
        ({"fault": Hold(HoldReason.safety)}, HoldReason.safety),
        ({"human": True, "human_linked": False}, HoldReason.operator_lost),
        ({"human": True}, HoldReason.operator_idle),
        ({"version": 0}, HoldReason.no_version),
        ({"version_fits": False}, HoldReason.other_version),
        ({"trained": False}, HoldReason.untrained),
        ({"scene_open": True}, HoldReason.scene),
        *(({"missing_action": Hold(reason)}, reason) for reason in MISSING),
    ],
)
def test_one_thing_missing_is_named(change: dict, reason: HoldReason) -> None:
    assert decide(ControlConditions(**{"version": 3, **change})) == (Mode.hold, Hold(reason))


def test_every_row_of_the_table_is_needed() -> None:
    first = [
        next(i for i, (when, _, _) in enumerate(PRIORITY_RULES) if when(known)) for known in all_that_can_be_known()
    ]
    assert set(first) == set(range(len(PRIORITY_RULES)))


def test_reasons_read_differently() -> None:
    texts = [reason.value for reason in HoldReason]
    assert len(set(texts)) == len(texts)
