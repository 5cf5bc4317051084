"""Who is in control, over everything that can be known, against the rules written down a second time."""

from __future__ import annotations

import itertools

import pytest

from robot_edge.control.mode import PRIORITY_RULES, ControlConditions, HoldReason, Mode, decide

FLAGS = (
    "estop",
    "recorder_ok",
    "storage_ok",
    "safe",
    "human",
    "human_linked",
    "human_command_fresh",
    "resetting",
    "script",
    "trained",
    "slow_path_ok",
    "action_ready",
)
UNFIT = (
    HoldReason.none,
    HoldReason.bad_observation,
    HoldReason.stale_state,
    HoldReason.stale_camera,
    HoldReason.frozen_camera,
    HoldReason.clock_jump,
    HoldReason.no_robot,
    HoldReason.no_reset,
)


def all_that_can_be_known():
    for values in itertools.product((False, True), repeat=len(FLAGS)):
        for version, unfit in itertools.product((0, 7), (HoldReason.none, HoldReason.clock_jump)):
            yield ControlConditions(**dict(zip(FLAGS, values, strict=True)), version=version, unfit=unfit)


def test_every_combination_follows_the_rules() -> None:
    seen = set()
    for known in all_that_can_be_known():
        mode, reason = decide(known)
        seen.add((mode, reason))
        fit = known.recorder_ok and known.storage_ok and known.safe and known.unfit is HoldReason.none
        commanded = known.human_linked and known.human_command_fresh
        # e-stop always wins, and nothing else is called one
        assert (mode is Mode.estop) == known.estop
        # a hold has a reason, and whoever moves has none
        assert (reason is not HoldReason.none) == (mode in (Mode.hold, Mode.estop))
        # nobody moves without alive, fresh and valid
        moves = mode in (Mode.human, Mode.reset, Mode.script, Mode.policy)
        assert not moves or (fit and not known.estop)
        # a person beats reset, script and policy; a person who is silent holds the robot
        assert (mode is Mode.human) == (known.human and commanded and fit and not known.estop)
        assert not (known.human and mode in (Mode.reset, Mode.script, Mode.policy))
        # a reset beats script and policy, the script the policy
        free = fit and not known.estop and not known.human
        assert (mode is Mode.reset) == (free and known.resetting)
        assert (mode is Mode.script) == (free and not known.resetting and known.script)
        # the policy moves only if nobody else wants to, and if all it needs is there
        needs = known.version > 0 and known.trained and known.slow_path_ok and known.action_ready
        assert (mode is Mode.policy) == (free and not known.resetting and not known.script and needs)
    holds = {reason for mode, reason in seen if mode is Mode.hold}
    # reasons that the loop itself gives, or that are other ways of being unfit
    by_the_loop = {
        HoldReason.none,
        HoldReason.estop,
        HoldReason.no_job,
        HoldReason.other_version,
        HoldReason.bad_action,
    }
    assert set(HoldReason) - holds == (by_the_loop | set(UNFIT)) - {HoldReason.clock_jump}


@pytest.mark.parametrize("unfit", UNFIT[1:])
def test_what_is_unfit_is_the_reason(unfit: HoldReason) -> None:
    fine = {"version": 3, "action_ready": True}
    assert decide(ControlConditions(**fine, unfit=unfit)) == (Mode.hold, unfit)
    assert decide(ControlConditions(**fine, unfit=unfit, human=True, human_command_fresh=True)) == (Mode.hold, unfit)
    assert decide(ControlConditions(**fine, unfit=unfit, estop=True)) == (Mode.estop, HoldReason.estop)
    assert decide(ControlConditions(**fine)) == (Mode.policy, HoldReason.none)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"recorder_ok": False}, HoldReason.no_recorder),
        ({"storage_ok": False}, HoldReason.storage),
        ({"safe": False}, HoldReason.safety),
        ({"human": True, "human_linked": False}, HoldReason.operator_lost),
        ({"human": True}, HoldReason.operator_idle),
        ({"version": 0}, HoldReason.no_version),
        ({"trained": False}, HoldReason.untrained),
        ({"slow_path_ok": False}, HoldReason.slow_path_lost),
        ({"action_ready": False}, HoldReason.no_action),
    ],
)
def test_one_thing_missing_is_named(change: dict, reason: HoldReason) -> None:
    assert decide(ControlConditions(**{"version": 3, "action_ready": True, **change})) == (Mode.hold, reason)


def test_every_row_of_the_table_is_needed() -> None:
    first = [
        next(i for i, (when, _, _) in enumerate(PRIORITY_RULES) if when(known)) for known in all_that_can_be_known()
    ]
    assert set(first) == set(range(len(PRIORITY_RULES)))


def test_reasons_read_differently() -> None:
    texts = [reason.value for reason in HoldReason]
    assert len(set(texts)) == len(texts)
