"""Which robot acts by which version: tried on some, promoted to all, rolled back from all."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from cloud_learner.rollout.assignment import few
from cloud_learner.rollout.commands import check_pin, check_promote, check_shadow, rollback_target
from cloud_learner.rollout.comparison import EpisodeResult, Measure
from cloud_learner.rollout.config import RolloutConfig
from cloud_learner.rollout.held_out import HeldOutRequest
from cloud_learner.rollout.line import decide_line, line_leans
from cloud_learner.rollout.records import (
    RECENT,
    DecisionKind,
    PendingEpisode,
    RolloutDecision,
    RolloutState,
    ShadowTally,
    VersionRecord,
    VersionState,
)
from cloud_learner.rollout.transitions import VersionTransitions
from wire.errors import InvalidDataError

_LEAST_BLOCKS = 10
"""in which success was compared, without which the bound on a canary's episodes decides nothing"""
_RECORD_A_BLOCK = 8
"""new episodes for each of the reference's, where these come from its record and no more are added"""
_LEFT = 2
_TASK_CHARS = 200
_SHADOWS = 3
"""robots that compute a shadow where nobody chose any: enough to see how far apart versions are"""
_MOST_PENDING = 8192
_MOST_LAG_NS = 600_000_000_000


class RolloutController:
    """Not a thread's: one caller. Times are any clock's, in nanoseconds, and growing.

    A version that passed the gate is a candidate. With `gate_success`, and while there is an evaluator, it waits until
    a `HeldOutTrial` against current lets it go on. With `canary` 0, or while none is current, it is promoted at once.
    Otherwise the newest candidate is the canary: it acts on some robots, and a `Comparison` with current decides.

    - Worse in success, human share or stops (error alpha over the three): rolled back, at once.
    - Not worse by `margin` in any of them (error beta): promoted, unless one leans: evidence of 3 to 1 for a loss, or
      for episodes that go unjudged more often than current's.
    - After `max_episodes` of it: rolled back if success is lower on average or any evidence is for a loss; else left to
      a person if success was compared in fewer than 10 blocks or goes unjudged more often; else promoted. Of versions
      worse in success by `margin` that promotes exp(-blocks margin^2 / 2) beside beta at most (Hoeffding 1963).

    **Slow losses.** Many versions may each lose less than a canary can show. So current is watched against a reference,
    by robots that keep acting by it (`control`), over all versions since: `line`. When that line was shown to have lost
    (error alpha), current goes back to the reference, and what was promoted since is rolled back. While it leans, no
    version is promoted. The reference moves only to a version that is better: when the line was shown to have gained
    (error alpha) and current itself has on average; so it cannot creep down with what is watched by it.

    Guaranteed, for robots that are alike or drawn anew: a canary that is no worse than current is rolled back as worse
    with a probability of at most alpha, and a line that is never worse than its reference with at most alpha, for ever.
    Only measured, by `benchmarks.rollout`: how soon a loss is found, how often the bound on episodes ends a trial, and
    that the choice to hold promotions back costs little. Without robots to spare (fewer than three, `control` 0) the
    reference's recorded episodes stand for new ones until they are used up: then nothing is watched, and a world that
    has changed since looks like the version's doing. A single robot tries a version after 64 episodes by current, which
    it is compared with.

    A pin goes before all else; episodes of pinned robots are counted, and compared with nothing: a person chose them.
    While frozen nothing becomes canary or promoted by itself; what was shown to be worse is rolled back all the same.
    """

    def __init__(self, config: RolloutConfig, state: RolloutState | None = None) -> None:
        """state: what `state` gave, to go on there."""
        self.config = config
        self.restore(state or RolloutState())

    # --- what is so -----------------------------------------------------------------------------------------------

    @property
    def current(self) -> int:
        """The promoted version, 0: none."""
        return self._state.current

    @property
    def canary(self) -> int:
        """The version under trial, 0: none."""
        return self._state.canary

    @property
    def reference(self) -> int:
        """The version that current is watched against, 0: none."""
        return self._state.reference

    @property
    def frozen(self) -> bool:
        return self._state.frozen

    @property
    def pins(self) -> dict[str, int]:
        """By robot; '': the fleet."""
        return dict(self._state.pins)

    @property
    def needed(self) -> set[int]:
        """Versions whose weights must stay, beside those that robots still act by."""
        return self._state.needed

    @property
    def left_to_people(self) -> list[int]:
        """The newest that were tried, and not decided on: whoever promotes one finds its weights."""
        state = self._state
        found = (one.number for one in self.versions() if one.state is VersionState.candidate and one.has_weights)
        return [number for number in found if number <= state.newest_tried][-_LEFT:]

    @property
    def wanted_measurements(self) -> list[HeldOutRequest]:
        """What evaluators are to measure now."""
        trial = self._state.held_out
        return trial.missing() if trial is not None else []

    def versions(self) -> list[VersionRecord]:
        """All that are remembered, by number; to look at."""
        return [self._state.versions[number] for number in sorted(self._state.versions)]

    def version_for(self, robot: str) -> int:
        """What it is to act by, 0: nothing yet. The same after a restart, of the robot or of the gateway."""
        state = self._state
        if pinned := state.pins.get(robot) or state.pins.get(""):
            return pinned
        if robot in self._moves.split.canaries:
            return state.canary
        return state.reference if robot in self._moves.split.controls else state.current

    @property
    def shadow(self) -> int:
        """The version that some robots compute without acting by it, 0: none."""
        return self._state.shadow

    def shadow_robots(self) -> frozenset[str]:
        """Those that are to compute it: those that a person chose, else a few of those that act by another one."""
        state = self._state
        if not state.shadow:
            return frozenset()
        if state.shadow_robots:
            return frozenset(state.shadow_robots)
        others = [robot for robot in state.shapes if self.version_for(robot) != state.shadow]
        return few(others, state.shadow, _SHADOWS)

    def state(self) -> RolloutState:
        """All of it, a copy."""
        return _copy(self._state)

    def restore(self, state: RolloutState) -> None:
        """Go on from there."""
        self._state = _copy(state)
        if not self.config.canary:
            self._state.reference, self._state.line = self._state.current, None
        self._moves = VersionTransitions(self.config, self._state)

    def pop_decisions(self) -> list[RolloutDecision]:
        """What was decided since, oldest first."""
        decisions, self._state.decisions = self._state.decisions, []
        return decisions

    # --- what happens ---------------------------------------------------------------------------------------------

    def set_robots(self, robots: Mapping[str, str], now_ns: int) -> None:
        """Shape by robot, of all that take part now: those of one are alike. Nobody else is chosen to try something."""
        if robots != self._state.shapes:
            self._state.shapes = dict(sorted(robots.items()))
            self._moves.divide()
            self._moves.advance(now_ns)

    def on_version(self, number: int, parent: int, now_ns: int) -> None:
        """It passed the gate, and its weights are here."""
        state = self._state
        if (known := state.versions.get(number)) is not None:
            known.has_weights = True
        else:
            record = VersionRecord(number=number, parent=parent, state=VersionState.candidate, since_ns=now_ns)
            state.versions[number] = record
            state.forget()
        self._moves.advance(now_ns)

    def on_refused(self, number: int, parent: int, reason: str, now_ns: int) -> None:
        """The gate did not let it in."""
        state = self._state
        if number not in state.versions:
            refused = VersionState.refused
            state.versions[number] = VersionRecord(
                number=number, parent=parent, state=refused, since_ns=now_ns, reason=reason, has_weights=False
            )
            state.decide(DecisionKind.refused, number, reason, now_ns)
            state.forget()

    def on_weights_gone(self, numbers: Iterable[int], now_ns: int) -> None:
        """Their files were deleted. What robots acted by is replaced by what is left."""
        state = self._state
        for number in numbers:
            if number in state.versions:
                state.versions[number].has_weights = False
        self._moves.leave_gone(now_ns)
        self._moves.advance(now_ns)

    def on_episode(
        self,
        robot: str,
        versions: Collection[int],
        task: str,
        success: bool | None,
        human_share: float,
        stopped: bool,
        began_ns: int,
        now_ns: int,
    ) -> None:
        """An episode that began at `began_ns` has ended. Raises `InvalidDataError`.

        versions: all that acted in it; one of several versions counts for none
        success: None when nobody said; human_share: of its steps, 0 to 1; stopped: somebody or something had to stop it
        """
        if not 0 <= human_share <= 1:
            raise InvalidDataError(f"robot '{robot}': a human share of {human_share} is not from 0 to 1.")
        state, numbers = self._state, set(versions)
        record = state.versions.get(numbers.pop()) if len(numbers) == 1 else None
        if record is None:
            return
        result = EpisodeResult(success, float(human_share), bool(stopped))
        record.tally.add(result)
        if robot in state.pins or "" in state.pins:
            return
        task = task[:_TASK_CHARS]
        if record.number in state.needed:
            record.recent.append((task, result))
            del record.recent[:-RECENT]
        began_ns = min(max(began_ns, now_ns - _MOST_LAG_NS), now_ns)
        state.note_duration(now_ns - began_ns)
        episode = PendingEpisode(began_ns, record.number, task, result)
        insort(state.pending, episode, key=lambda one: one.began_ns)
        self._compare_due(now_ns)
        if not state.canary:
            # There may be enough episodes of current now for a fleet without a robot to spare.
            self._moves.advance(now_ns)

    def on_work(self, robot: str, now_ns: int) -> bool:
        """It has an episode under way, and nobody stops or drives it; several times a second. Whether that decided
        anything: see `VersionTransitions.unended`."""
        self._moves.note_work(robot, now_ns)
        if not self._moves.unended():
            return False
        self._decide(now_ns)
        return True

    def on_other_work(self, robot: str) -> None:
        """It ran an episode that is not counted: of an evaluation, or a demonstration."""
        if robot in self._moves.split.canaries:
            self._state.trial_worked_ns = 0

    def set_evaluator(self, is_there: bool, now_ns: int) -> bool:
        """Whether somebody can measure versions; to be called now and then. Whether that changed anything."""
        if not self._moves.gate.watch(is_there, now_ns):
            return False
        self._moves.advance(now_ns)
        return True

    def on_measured(self, request: HeldOutRequest, outcomes: Mapping[str, Sequence[bool]], now_ns: int) -> bool:
        """An evaluator measured a version: outcomes by task. Whether that was wanted."""
        trial = self._state.held_out
        if trial is None or not trial.add(request, outcomes):
            return False
        if self._moves.gate.on_outcomes(now_ns):
            self._moves.advance(now_ns)
        return True

    def on_shadow(self, robot: str, number: int, found: ShadowTally) -> None:
        """A robot has compared the shadow with what acted, or could not: what came of it since it said so last."""
        record = self._state.versions.get(number)
        if record is None or robot not in self._state.shapes:
            return
        record.shadow = record.shadow or ShadowTally()
        record.shadow.add(robot, found)

    # --- what people ask for --------------------------------------------------------------------------------------

    def promote(self, number: int, now_ns: int, who: str = "a person") -> None:
        """Make it current without a trial; it is watched like any other. Raises `RejectedError`."""
        check_promote(self._state, number)
        self._moves.promote(number, f"promoted by {who}.", now_ns)
        self._moves.advance(now_ns)

    def rollback(self, now_ns: int, to: int = 0, who: str = "a person") -> None:
        """Go back to a version that was promoted, and freeze: what waits would undo it. What came since is rolled back.

        0: undo the newest step: the canary if there is one, else the newest promotion. Raises `RejectedError`.
        """
        state, reason = self._state, f"rolled back by {who}."
        target = state.current if not to and state.canary else rollback_target(state, to)
        state.frozen = True
        if state.canary:
            self._moves.end_trial(VersionState.rolled_back, DecisionKind.rolled_back, reason, now_ns)
        if target != state.current:
            self._moves.go_back(target, reason, now_ns)
        self._moves.advance(now_ns)

    def pin(self, robot: str, number: int, now_ns: int) -> None:
        """Have a robot, or with '' the fleet, act by a version whatever is decided; 0: no longer.

        Raises `RejectedError`.
        """
        check_pin(self._state, robot, number)
        if number:
            self._state.pins[robot] = number
        else:
            del self._state.pins[robot]
        self._moves.divide()
        self._moves.advance(now_ns)

    def set_shadow(self, number: int, robots: Collection[str] = ()) -> None:
        """Have robots compute a version without acting by it; none: a few of them. 0: no longer. Raises
        `RejectedError`."""
        state = self._state
        check_shadow(state, number, robots)
        if number:
            state.versions[number].shadow = ShadowTally()
        state.shadow, state.shadow_robots = number, sorted(set(robots)) if number else []

    def freeze(self, frozen: bool, now_ns: int) -> None:
        """While frozen, nothing becomes canary or promoted by itself."""
        self._state.frozen = frozen
        self._decide(now_ns)
        self._moves.advance(now_ns)

    # --- how it is decided ----------------------------------------------------------------------------------------

    def _compare_due(self, now_ns: int) -> None:
        """In the order in which they began, as soon as all that began with them should have ended.

        In the order in which they end, the first of many robots would all be successes that end soon.
        """
        pending = self._state.pending
        while pending and (pending[0].began_ns + self._state.lag_ns <= now_ns or len(pending) > _MOST_PENDING):
            episode = pending.pop(0)
            self._compare(episode.version, episode.task, episode.result)
            self._decide(now_ns)

    def _compare(self, number: int, task: str, result: EpisodeResult) -> None:
        state, split = self._state, self._moves.split
        canaries, controls, others = max(len(split.canaries), 1), len(split.controls), max(len(split.others), 1)
        if state.trial is not None and number in (state.canary, state.current):
            is_new = number == state.canary
            state.trial.add(task, result, is_new, max(canaries // others, 1), max(others // canaries, 1))
        line = state.line
        if line is not None and number in (state.current, state.reference):
            new = max(others // controls, 1) if controls else _RECORD_A_BLOCK
            gain = line.good[Measure.success]
            before, count = gain.total, gain.count
            line.add(task, result, number == state.current, new, max(controls // others, 1))
            state.own_gain += gain.total - before
            state.own_blocks += gain.count - count

    def _decide(self, now_ns: int) -> None:
        """By what the newest episode added."""
        decide_line(self._moves, now_ns)
        state, trial = self._state, self._state.trial
        if trial is None:
            return
        old = f"version {state.current}"
        after = f"after {(now_ns - state.trial_since_ns) / 1e9:.0f} s: "
        if (lost := trial.loss_of()) is not None:
            reason = f"worse in {lost.value} {after}{trial.text(lost, old)}."
            self._moves.end_trial(VersionState.rolled_back, DecisionKind.rolled_back, reason, now_ns)
        elif unended := self._moves.unended():
            robots = ", ".join(sorted(self._moves.split.canaries)[:8])
            reason = f"a person must promote it: {robots} ended no episode by it {after}{unended}."
            self._moves.end_trial(VersionState.candidate, DecisionKind.withdrawn, reason, now_ns)
        elif state.frozen:
            return
        elif trial.is_good and trial.leaning() is None and not trial.goes_unjudged and not line_leans(self._state):
            self._moves.promote(state.canary, f"not worse {after}{trial.text(Measure.success, old)}.", now_ns)
        elif trial.new.episodes >= self.config.max_episodes:
            success = trial.worse[Measure.success]
            text = f"at the bound of {self.config.max_episodes} episodes {after}{trial.text(Measure.success, old)}"
            if success.mean > 0 or trial.leaning(0.0) is not None or line_leans(self._state):
                reason = f"not shown to be as good {text}, {success.count} blocks compared."
                self._moves.end_trial(VersionState.rolled_back, DecisionKind.rolled_back, reason, now_ns)
            elif success.count < _LEAST_BLOCKS or trial.goes_unjudged:
                reason = f"a person must promote it: {trial.judged_text(old)}, {success.count} blocks compared."
                self._moves.end_trial(VersionState.candidate, DecisionKind.withdrawn, reason, now_ns)
            else:
                self._moves.promote(state.canary, f"no sign of a loss {text}.", now_ns)
        else:
            return
        self._moves.advance(now_ns)


def _copy(state: RolloutState) -> RolloutState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RolloutState)
