"""Whether current has lost or gained over all versions since the reference, which some robots keep."""

from __future__ import annotations

from cloud_learner.rollout.comparison import Measure
from cloud_learner.rollout.records import DecisionKind, RolloutState
from cloud_learner.rollout.transitions import VersionTransitions

_OWN_BLOCKS = 20
"""of a version with the reference, before it may follow it"""


def decide_line(moves: VersionTransitions, now_ns: int) -> None:
    """By what the newest episode added: back to the reference, on to current as the reference, or neither."""
    state, line = moves.state, moves.state.line
    if line is None:
        return
    after = f"after {(now_ns - state.line_since_ns) / 1e9:.0f} s: "
    if (lost := line.loss_of()) is not None:
        said = line.text(lost, f"version {state.reference}")
        count = len(state.history) - 1 - state.history.index(state.reference)
        reason = f"{count} versions since version {state.reference} lost in {lost.value} {after}{said}."
        moves.go_back(state.reference, reason, now_ns)
        moves.advance(now_ns)
    elif (
        line.good[Measure.success].rejected
        and state.own_blocks >= _OWN_BLOCKS
        and state.own_gain > 0
        and line.leaning() is None
    ):
        reason = f"better than version {state.reference} {after}"
        reason += f"{line.text(Measure.success, f'version {state.reference}')}."
        state.reference, state.line = state.current, None
        state.decide(DecisionKind.reference, state.current, reason, now_ns)
        moves.divide()


def line_leans(state: RolloutState) -> bool:
    """Whether there is some evidence of a loss: no version is promoted then."""
    return state.line is not None and state.line.leaning() is not None
