"""How versions change their state: tried, promoted, gone back from, and who acts by what afterwards."""

from __future__ import annotations

from cloud_learner.rollout.assignment import FleetSplit, split_by_shape
from cloud_learner.rollout.comparison import Comparison
from cloud_learner.rollout.config import RolloutConfig
from cloud_learner.rollout.held_out_gate import HeldOutGate
from cloud_learner.rollout.records import DecisionKind, RolloutState, VersionState

_RECORD = 64
"""episodes of current, before a fleet without a robot to spare tries another version"""
_LINE_RESERVE = 0.5
_EXPECTED = 20
"""episodes that a canary's robots would have ended by now if they did as others do: without any its trial is over"""
_LEAST_WORK_NS, _AT_ONCE_NS = 300_000_000_000, 1_000_000_000
"""of work without an ended episode, before a trial is over; that is counted between two reports of work at most"""


class VersionTransitions:
    """Changes `state`, and keeps `split`: which robots try the canary or keep the reference."""

    def __init__(self, config: RolloutConfig, state: RolloutState) -> None:
        self.config, self.state, self.split = config, state, FleetSplit()
        self.gate = HeldOutGate(config, state)
        self.divide()

    def advance(self, now_ns: int) -> None:
        """Try the newest that waits and may go on, if anything may be tried."""
        state = self.state
        self.gate.revise()
        if state.frozen:
            return
        if state.canary and not self.config.canary:
            self._drop_trial(now_ns)
        if state.canary:
            return
        waiting = [
            number
            for number, one in state.versions.items()
            if one.state is VersionState.candidate and one.has_weights and number > state.newest_tried
        ]
        if not waiting or not (admitted := self.gate.admitted(waiting, now_ns)):
            return
        number = max(admitted)
        if not state.current:
            self.promote(number, "the first version: there is nothing to compare it with.", now_ns)
        elif not self.config.canary:
            found = state.versions[number].reason if state.versions[number].passed_against else "it passed the gate"
            self.promote(number, f"{found.rstrip('.')}, and no trial is asked for.", now_ns)
            self.advance(now_ns)
        elif self._can_try(number):
            state.canary, state.newest_tried = number, number
            record = state.versions[number]
            found = f"; {record.reason}" if record.passed_against else "."
            self.divide()
            share = f"{len(self.split.canaries)} of {len(state.shapes)} robots"
            state.set_state(number, VersionState.canary, f"on trial by {share}{found}", now_ns)
            self._begin_trial(now_ns)
            robots = ", ".join(sorted(self.split.canaries)[:8])
            state.decide(DecisionKind.canary, number, f"tried against version {state.current} by {robots}.", now_ns)

    def _drop_trial(self, now_ns: int) -> None:
        """The configuration asks for none any more: the canary is to be promoted, unless it looks worse."""
        state, reason = self.state, "no trials are asked for any more."
        if state.trial is not None and state.trial.leaning(0.0) is not None:
            self.end_trial(VersionState.rolled_back, DecisionKind.rolled_back, f"it looked worse, and {reason}", now_ns)
        else:
            state.newest_tried = state.canary - 1
            self.end_trial(VersionState.candidate, DecisionKind.withdrawn, reason, now_ns)

    def _can_try(self, number: int) -> bool:
        """A robot tries it, and others go on with current or there are episodes of it to compare with."""
        split = self._divided(number)
        recorded = len(self.state.versions[self.state.current].recent)
        return bool(split.canaries) and (bool(split.others) or recorded >= min(_RECORD, self.config.max_episodes))

    def _begin_trial(self, now_ns: int) -> None:
        state, config = self.state, self.config
        state.trial = Comparison.begin(config.margin, config.alpha, config.beta)
        state.trial_since_ns, state.trial_worked_ns = now_ns, 0
        if not self.split.others:
            # A single robot: what current did before it.
            state.trial.preload(state.versions[state.current].recent)

    def note_work(self, robot: str, now_ns: int) -> None:
        """It works now, by the version that it is to act by."""
        state = self.state
        if robot in self.split.canaries and not state.frozen:
            state.trial_worked_ns += min(max(now_ns - state.worked_at_ns, 0), _AT_ONCE_NS)
            state.worked_at_ns = now_ns

    def unended(self) -> str:
        """What shows that the canary's robots end no episode by it, '' when nothing does: they refuse it, or hold.

        Others ended 20 for each of them meanwhile. Where there are no others a robot has to have worked for as long as
        20 episodes usually take, and for 5 minutes; while it is off, stopped, driven by a person, without a job or
        frozen no time passes, and what it does for an evaluation or a demonstration begins it anew.
        """
        state, trial = self.state, self.state.trial
        if trial is None or trial.new.episodes:
            return ""
        canaries, others, old = len(self.split.canaries), len(self.split.others), trial.old.episodes
        if others and not trial.recorded:
            return f"others ended {old}" if old * canaries >= _EXPECTED * others else ""
        enough = state.trial_worked_ns >= max(_EXPECTED * state.mean_ns, _LEAST_WORK_NS)
        return f"in {state.trial_worked_ns / 1e9:.0f} s of work" if enough else ""

    def end_trial(self, into: VersionState, kind: DecisionKind, reason: str, now_ns: int) -> None:
        """Without a promotion: the canary enters the state `into`."""
        state = self.state
        number, state.canary, state.trial = state.canary, 0, None
        state.set_state(number, into, reason, now_ns)
        state.decide(kind, number, reason, now_ns)
        self.divide()

    def promote(self, number: int, reason: str, now_ns: int) -> None:
        """Make it current."""
        state = self.state
        if number == state.canary:
            state.canary, state.trial = 0, None
        elif state.canary and state.canary < number:
            self.end_trial(VersionState.candidate, DecisionKind.withdrawn, f"passed over by {number}.", now_ns)
        state.history.append(number)
        state.newest_tried = max(state.newest_tried, number)
        state.set_state(number, VersionState.promoted, reason, now_ns)
        state.decide(DecisionKind.promoted, number, reason, now_ns)
        if not state.reference or not self.config.canary:
            state.reference, state.line = number, None
        self._follow(now_ns)

    def go_back(self, target: int, reason: str, now_ns: int) -> None:
        """To a version of the history; the canary, if there is one, is compared with it from now on."""
        state = self.state
        at = state.history.index(target) + 1
        for number in reversed(state.history[at:]):
            state.set_state(number, VersionState.rolled_back, reason, now_ns)
            state.decide(DecisionKind.rolled_back, number, f"back to version {target}: {reason}", now_ns)
        if state.reference in state.history[at:]:
            state.reference = target
            state.decide(DecisionKind.reference, target, reason, now_ns)
        del state.history[at:]
        self._follow(now_ns)

    def leave_gone(self, now_ns: int) -> None:
        """The files of some versions were deleted: nothing is to go by them any more."""
        state = self.state
        reason = "its weights are gone."
        if state.canary and not state.versions[state.canary].has_weights:
            self.end_trial(VersionState.candidate, DecisionKind.withdrawn, reason, now_ns)
        if state.current and not state.versions[state.current].has_weights and state.previous:
            self.go_back(state.previous, reason, now_ns)
        if state.reference and not state.versions[state.reference].has_weights:
            state.reference, state.line = state.current, None
            state.decide(DecisionKind.reference, state.current, f"of the reference before it, {reason}", now_ns)
        if state.shadow and not state.versions[state.shadow].has_weights:
            state.decide(DecisionKind.withdrawn, state.shadow, f"no shadow any more: {reason}", now_ns)
            state.shadow, state.shadow_robots = 0, []
        for robot, pin in list(state.pins.items()):
            if not state.versions[pin].has_weights:
                del state.pins[robot]
                state.decide(
                    DecisionKind.withdrawn, pin, f"not pinned to '{robot or 'all robots'}' now: {reason}", now_ns
                )
        self.divide()

    def _follow(self, now_ns: int) -> None:
        """Another version is current."""
        state, config = self.state, self.config
        state.own_blocks, state.own_gain = 0, 0.0
        if state.current == state.reference:
            state.line = None
        self.divide()
        if state.current != state.reference:
            if state.line is None:
                state.line = Comparison.begin(0.0, config.alpha, config.alpha, _LINE_RESERVE)
                state.line_since_ns, state.line_versions = now_ns, 1
                if not self.split.controls:
                    state.line.preload(state.versions[state.reference].recent)
            else:
                state.line_versions += 1
                state.line.restart(1 / (state.line_versions + 1))
        if state.canary:
            self._begin_trial(now_ns)
        for number, record in state.versions.items():
            if record.recent and number not in state.needed:
                record.recent = []

    def divide(self) -> None:
        """Robots, pins or versions have changed."""
        self.split = self._divided(self.state.canary)

    def _divided(self, canary: int) -> FleetSplit:
        state, config = self.state, self.config
        free = {} if "" in state.pins else {one: shape for one, shape in state.shapes.items() if one not in state.pins}
        reference = state.reference if state.reference != state.current else 0
        return split_by_shape(free, canary, reference, config.canary, config.control if config.canary else 0.0)
