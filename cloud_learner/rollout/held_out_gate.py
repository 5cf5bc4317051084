"""Which candidates may go on by their held-out success, while there is an evaluator to measure it."""

from __future__ import annotations

from cloud_learner.rollout.config import RolloutConfig
from cloud_learner.rollout.held_out import FIRST_SEED, ROUND_SEEDS, HeldOutTrial
from cloud_learner.rollout.records import DecisionKind, RolloutState, VersionState


class HeldOutGate:
    """Changes `state`. One candidate at a time is measured, the newest there was when the one before was decided."""

    def __init__(self, config: RolloutConfig, state: RolloutState) -> None:
        self._config, self._state = config, state
        self.has_evaluator = False
        self._progress_ns = 0
        """when an evaluator was last of use"""

    def admitted(self, waiting: list[int], now_ns: int) -> list[int]:
        """Of the candidates that wait those that may go on; has the newest one measured if none may yet."""
        state, config = self._state, self._config
        if not (config.gate_success and self.has_evaluator and state.current):
            return waiting
        passed = [number for number in waiting if state.versions[number].passed_against == state.current]
        if not passed and state.held_out is None:
            number, used = max(waiting), state.held_out_seeds
            errors = config.alpha, config.beta
            margins = config.gate_success, *errors, config.gate_task
            state.held_out = HeldOutTrial.begin(number, state.current, FIRST_SEED + used, *margins)
            self._progress_ns = now_ns
            reason = f"waits for its held-out success against version {state.current}."
            state.set_state(number, VersionState.candidate, reason, now_ns)
        return passed

    def revise(self) -> None:
        """Give up a trial whose versions are no longer what waits and what it would replace."""
        state, trial = self._state, self._state.held_out
        if trial is None:
            return
        new, old = state.versions.get(trial.candidate), state.versions.get(trial.current)
        waits = new is not None and new.state is VersionState.candidate and new.has_weights
        if not waits or trial.current != state.current or old is None or not old.has_weights:
            self._end()
            if waits and new is not None:
                new.reason = ""

    def on_outcomes(self, now_ns: int) -> bool:
        """A round may be over; whether the candidate was decided on."""
        state, trial = self._state, self._state.held_out
        if trial is None:
            return False
        self._progress_ns = now_ns
        if trial.no_common_task and not trial.found:
            self._go_on_without("no task was measured of both versions: give all evaluators the same tasks", now_ns)
            return True
        record, may_go_on = state.versions[trial.candidate], trial.decision()
        if may_go_on is None:
            record.reason = f"held-out success is being measured: {trial.text()}."
            return False
        self._end()
        if may_go_on:
            record.passed_against = trial.current
            record.reason = f"held-out success is not worse: {trial.text()}."
            return True
        state.newest_tried = max(state.newest_tried, record.number)
        if trial.lost_task:
            shown = f"has lost {trial.lost_task} in held-out success"
        elif trial.whole.worse.is_over:
            shown = "worse in held-out success"
        else:
            shown = "not shown to be as good in held-out success"
        reason = f"{shown}: {trial.text()}."
        state.set_state(record.number, VersionState.refused, reason, now_ns)
        state.decide(DecisionKind.refused, record.number, reason, now_ns)
        return True

    def watch(self, has_evaluator: bool, now_ns: int) -> bool:
        """Whether an evaluator is there; whether that, or one that brings nothing, lets candidates go on."""
        state = self._state
        changed, self.has_evaluator = has_evaluator != self.has_evaluator, has_evaluator
        if changed:
            self._progress_ns = now_ns
        trial, timeout_s = state.held_out, self._config.gate_timeout_s
        late = now_ns - self._progress_ns > timeout_s * 1e9
        if trial is None or (has_evaluator and not late):
            return changed
        why = f"no evaluator measured anything for {timeout_s:g} s" if has_evaluator else "the evaluator is gone"
        self._go_on_without(why, now_ns)
        return True

    def _go_on_without(self, why: str, now_ns: int) -> None:
        state, trial = self._state, self._state.held_out
        assert trial is not None
        self._end()
        record = state.versions[trial.candidate]
        record.passed_against = trial.current
        record.reason = f"goes on without its held-out success: {why}."
        state.decide(DecisionKind.withdrawn, record.number, record.reason, now_ns)

    def _end(self) -> None:
        """Seeds of a round that was begun are not used again either."""
        state, trial = self._state, self._state.held_out
        if trial is not None:
            state.held_out_seeds = trial.first_seed + ROUND_SEEDS - FIRST_SEED
        state.held_out = None
