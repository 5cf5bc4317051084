"""What people may ask of a version, and what they are told when they may not."""

from __future__ import annotations

from collections.abc import Collection

from cloud_learner.rollout.records import RolloutState, VersionRecord, VersionState
from wire.errors import RejectedError

_MOST_PINS = 4096


def require_version(state: RolloutState, number: int) -> VersionRecord:
    """A version that robots could act by. Raises `RejectedError`."""
    record = state.versions.get(number)
    if record is None:
        known = sorted(state.versions)
        range_text = "None was published yet."
        if known:
            range_text = f"Known are {known[0]} to {known[-1]}; `vla-fleet versions list` shows them."
        raise RejectedError(f"version {number}: there is no such version. {range_text}")
    if record.state is VersionState.refused and not record.has_weights:
        raise RejectedError(
            f"version {number}: the gate refused it ({record.reason}). Choose another one, or mend what the gate found "
            "and train on."
        )
    if not record.has_weights:
        raise RejectedError(
            f"version {number}: its weights are gone, as only the newest are kept. Choose a newer version, and pin "
            "what is to be kept."
        )
    return record


def check_promote(state: RolloutState, number: int) -> None:
    """Whether a person may promote it. Raises `RejectedError`."""
    record = require_version(state, number)
    if number == state.current:
        raise RejectedError(f"version {number}: it is current already. Nothing is to be done.")
    if record.state is VersionState.promoted:
        raise RejectedError(
            f"version {number}: it was promoted before version {state.current}. Roll back to it instead."
        )


def rollback_target(state: RolloutState, to: int) -> int:
    """The version to go back to; `to` 0: the one promoted before current. Raises `RejectedError`."""
    if not to:
        if not state.previous:
            raise RejectedError(
                f"version {state.current}: there is no earlier promoted version whose weights are there. Pin a version "
                "or promote another one."
                if state.current
                else "rollback: no version is current. Promote one first."
            )
        return state.previous
    record = require_version(state, to)
    if to == state.current and not state.canary:
        raise RejectedError(
            f"version {to}: it is current already, and no canary is under way. Nothing is to be undone."
        )
    if record.state is VersionState.rolled_back:
        raise RejectedError(f"version {to}: it was rolled back itself ({record.reason}). Choose an earlier one.")
    if to not in state.history:
        raise RejectedError(f"version {to}: it was never promoted. Promote it instead, or pin it to a robot.")
    return to


def check_shadow(state: RolloutState, number: int, robots: Collection[str]) -> None:
    """Whether a person may have these robots compute it; 0 ends what there is. Raises `RejectedError`."""
    if not number:
        if not state.shadow:
            raise RejectedError("no version is a shadow. Nothing is to be undone.")
        return
    require_version(state, number)
    if unknown := sorted(set(robots) - set(state.shapes)):
        raise RejectedError(f"there is no robot '{unknown[0][:64]}' here now.")
    if number == state.current and not state.pins and not state.canary:
        raise RejectedError(f"version {number}: robots act by it. There is nothing to compare it with.")


def check_pin(state: RolloutState, robot: str, number: int) -> None:
    """Whether a person may pin it; 0 takes a pin away. Raises `RejectedError`."""
    if not number:
        if robot not in state.pins:
            what = f"robot '{robot}'" if robot else "the fleet"
            raise RejectedError(f"{what}: no version is pinned to it. Nothing is to be undone.")
        return
    require_version(state, number)
    if robot not in state.pins and len(state.pins) >= _MOST_PINS:
        raise RejectedError(f"robot '{robot}': {_MOST_PINS} robots are pinned already. Unpin some, or pin the fleet.")
