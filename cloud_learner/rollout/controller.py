"""Which robot is to run which version.

    gate ──► candidate ──► canary on a share of the robots ──► promoted: all robots
                │                        └──► rolled back
                └──► superseded by a newer one, while another canary is compared

A canary's episodes are paired with episodes of the same task by robots that run `current` at the time. Success,
people's share of the steps and stops are compared by tests that hold at any time (`sequential_test`): worse in any of
them, and it is rolled back; not worse by the margin in success, and it is promoted.

Each step down may be too small to be seen. So canaries, and all that `current` does since the best version so far, the
reference, are also bet against that one's record (the lower end of its interval): below it by the margin nothing is
promoted, and a line that has sunk by more than half of it goes back to the reference. How soon is measured, not
promised: the reference's record is an estimate.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from typing import NamedTuple

from cloud_learner.rollout.sequential_test import BettingTest
from cloud_learner.rollout.state import (
    Comparison,
    EpisodeResult,
    RolloutConfig,
    RolloutState,
    VersionRecord,
    VersionState,
    wilson_low,
)
from wire.errors import RejectedError

_COMPARED = ("success", "people", "stops")
_WAITING = 64
"""episodes of a task without a partner; the newest are of what is compared now"""
_RECORDED = 30
"""episodes before a version's record says something"""
_REMEMBERED = 200
"""versions"""


class RolloutDecision(NamedTuple):
    """What was decided of a version, for people."""

    kind: VersionState
    version: int
    reason: str


class RolloutController:
    """Times are of the caller's clock."""

    def __init__(self, config: RolloutConfig, state: RolloutState | None = None) -> None:
        self.config = config
        self.state = state or RolloutState()
        """of which all survives"""
        self._robots: tuple[str, ...] = ()
        self._decisions: list[RolloutDecision] = []

    # --- what robots run --------------------------------------------------------------------------------------------

    def set_robots(self, names: Collection[str]) -> None:
        """The robots there are."""
        self._robots = tuple(sorted(names))

    def version_for(self, robot: str) -> int:
        """What `robot` is to run, 0 when nothing is promoted yet."""
        state = self.state
        if pinned := state.pins.get(robot) or state.pins.get(""):
            return pinned
        return state.canary if state.canary and robot in self.canary_robots() else state.current

    def canary_robots(self) -> frozenset[str]:
        """Those that try the canary: the same as long as robots stay the same."""
        free = [name for name in self._robots if not (self.state.pins.get(name) or self.state.pins.get(""))]
        count = math.ceil(self.config.canary * len(free))
        if len(free) > 1:
            count = min(count, len(free) - 1)
        return frozenset(sorted(free, key=lambda name: _rank(name, self.state.canary))[:count])

    def pop_decisions(self) -> list[RolloutDecision]:
        """What was decided since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions

    # --- what happens -----------------------------------------------------------------------------------------------

    def on_version(self, number: int, parent: int, now_ns: int) -> None:
        """A version has passed the gate."""
        state = self.state
        if number in state.versions:
            return
        state.versions[number] = VersionRecord(number, parent, VersionState.candidate, now_ns)
        if not state.frozen:
            if not self.config.canary:
                self._promote(number, "versions are promoted as they come", now_ns)
            elif not state.current:
                self._promote(number, "there is nothing to compare it with", now_ns)
        self._begin(now_ns)
        self._forget()

    def on_episode(self, episode: EpisodeResult, now_ns: int) -> None:
        """An episode has ended with a verdict."""
        state = self.state
        if (record := state.versions.get(episode.version)) is None:
            return
        record.episodes += 1
        record.successes += episode.success
        record.human_share += episode.human_share
        record.stops += episode.stopped
        if self.config.canary:
            if episode.version == state.current:
                self._watch_drift(episode, now_ns)
            self._compare(episode, now_ns)
        if not state.canary:
            self._begin(now_ns)

    # --- people -----------------------------------------------------------------------------------------------------

    def promote(self, number: int, who: str, now_ns: int) -> None:
        """All robots run it from now on. Raises `RejectedError`."""
        self._known(number)
        if self.state.canary == number:
            self._end_canary()
        self._promote(number, f"{who} promoted it", now_ns)
        self._begin(now_ns)

    def rollback(self, number: int, who: str, now_ns: int) -> int:
        """Go back to version `number`, 0: to what the running one came from; which. What is newer is rolled back, and
        nothing newer acts by itself until it is allowed to (`freeze`). Raises `RejectedError`."""
        state = self.state
        target = number or self._before(state.current)
        if not target:
            raise RejectedError(f"version {state.current} has nothing before it to go back to.")
        self._known(target)
        for record in state.versions.values():
            if record.number > target and record.state in (VersionState.promoted, VersionState.canary):
                self._set(record, VersionState.rolled_back, f"{who} went back to {target}", now_ns)
        self._end_canary()
        state.frozen = True
        self._promote(target, f"{who} went back to it; versions are frozen", now_ns)
        return target

    def pin(self, robot: str, number: int) -> None:
        """`robot`, "" for all, runs `number` whatever comes; 0: it follows again. Raises `RejectedError`."""
        if number:
            self._known(number)
            self.state.pins[robot] = number
        elif self.state.pins.pop(robot, 0) == 0:
            raise RejectedError(f"{f'robot {robot!r}' if robot else 'the fleet'} is pinned to no version.")

    def freeze(self, frozen: bool, now_ns: int) -> None:
        """While it is frozen nothing is tried or promoted by itself."""
        self.state.frozen = frozen
        if not frozen and not self.config.canary:
            newest = max(self._candidates(), default=0)
            if newest:
                self._promote(newest, "versions are promoted as they come", now_ns)
        self._begin(now_ns)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _candidates(self) -> list[int]:
        """Versions that nobody decided about, newer than what runs."""
        newer = (one for one in self.state.versions.values() if one.number > self.state.current)
        return [one.number for one in newer if one.state == VersionState.candidate]

    def _begin(self, now_ns: int) -> None:
        """Try the newest candidate, if none is tried."""
        state, config = self.state, self.config
        if state.frozen or state.canary or not config.canary or not state.current or not (new := self._candidates()):
            return
        if len(self._robots) == 1 and state.versions[state.current].episodes < _RECORDED:
            return  # one robot: it is compared with what is recorded
        number = max(new)
        for older in new:
            if older != number:
                self._set(state.versions[older], VersionState.superseded, f"{number} is tried instead", now_ns)
        state.canary = number
        worse = {name: BettingTest(0.0) for name in _COMPARED}
        sinks, floats = BettingTest(config.margin / 2), BettingTest(-config.margin)
        state.comparison = Comparison(worse, BettingTest(-config.margin), sinks, floats, {}, now_ns)
        record = state.versions[number]
        record.ever_canary = True
        robots = ", ".join(sorted(self.canary_robots())) or "none yet"
        self._set(record, VersionState.canary, f"it is compared with {state.current} (robots: {robots})", now_ns)

    def _compare(self, episode: EpisodeResult, now_ns: int) -> None:
        state, comparison = self.state, self.state.comparison
        if comparison is None or episode.version not in (state.canary, state.current):
            return
        mine = episode.version == state.canary
        comparison.episodes += mine
        low = self._reference_low()
        if mine and low is not None:
            comparison.sinks.add(low - episode.success)
            comparison.floats.add(episode.success - low)
        if len(self._robots) == 1:
            if mine:
                self._bet(episode, self._record_as_episode(episode))
        else:
            waiting = comparison.waiting.setdefault(episode.task, [])
            if waiting and waiting[0].version != episode.version:
                other = waiting.pop(0)
                self._bet(*((episode, other) if mine else (other, episode)))
            else:
                waiting.append(episode)
                del waiting[:-_WAITING]
        if mine or comparison.fit.count:
            self._decide(now_ns)

    def _record_as_episode(self, episode: EpisodeResult) -> tuple[float, float, float]:
        record = self.state.versions[self.state.current]
        count = max(1, record.episodes)
        return record.successes / count, record.human_share / count, record.stops / count

    def _bet(self, canary: EpisodeResult, baseline: EpisodeResult | tuple[float, float, float]) -> None:
        comparison = self.state.comparison
        assert comparison is not None
        if isinstance(baseline, EpisodeResult):
            baseline = float(baseline.success), baseline.human_share, float(baseline.stopped)
        success, people, stops = baseline
        comparison.worse["success"].add(success - canary.success)
        comparison.worse["people"].add(canary.human_share - people)
        comparison.worse["stops"].add(canary.stopped - stops)
        comparison.fit.add(canary.success - success)

    def _decide(self, now_ns: int) -> None:
        state, config, comparison = self.state, self.config, self.state.comparison
        assert comparison is not None
        each = config.alpha / len(_COMPARED)
        worse = [name for name, test in comparison.worse.items() if test.rejects(each)]
        against = max(test.wealth for test in comparison.worse.values())
        low = self._reference_low()
        if low is not None and comparison.sinks.rejects(each):
            self._roll_back_canary(f"below the {low:.2f} of {state.reference}", now_ns)
        elif worse:
            self._roll_back_canary(f"{' and '.join(worse)}: worse than {state.current}", now_ns)
        elif self._fits(low) and against < 1 / (2 * each):
            self._promote_canary("not worse by the margin", now_ns)
        elif comparison.episodes >= config.most_episodes:
            if comparison.fit.wealth > against and (low is None or comparison.floats.wealth > comparison.sinks.wealth):
                self._promote_canary(f"more speaks for it than against it after {comparison.episodes} episodes", now_ns)
            else:
                self._roll_back_canary(f"nothing speaks for it after {comparison.episodes} episodes", now_ns)

    def _fits(self, low: float | None) -> bool:
        comparison = self.state.comparison
        assert comparison is not None
        tests = [comparison.fit, *([comparison.floats] if low is not None else [])]
        return all(test.rejects(self.config.beta) for test in tests)

    def _reference_low(self) -> float | None:
        """What the reference achieves at least; None while its record says nothing, or it is what runs."""
        state = self.state
        record = state.versions.get(state.reference)
        if record is None or record.episodes < _RECORDED or state.reference == state.current:
            return None
        return wilson_low(record.successes, record.episodes)

    def _promote_canary(self, why: str, now_ns: int) -> None:
        number, figures = self.state.canary, self._figures(now_ns)
        self._end_canary()
        self._promote(number, f"{why} ({figures})", now_ns)

    def _roll_back_canary(self, why: str, now_ns: int) -> None:
        record, figures = self.state.versions[self.state.canary], self._figures(now_ns)
        self._end_canary()
        self._set(record, VersionState.rolled_back, f"{why} ({figures})", now_ns)

    def _end_canary(self) -> None:
        self.state.canary, self.state.comparison = 0, None

    def _figures(self, now_ns: int) -> str:
        comparison, state = self.state.comparison, self.state
        assert comparison is not None
        canary, current = state.versions[state.canary], state.versions[state.current]
        return (
            f"success {canary.success:.2f} in {canary.episodes} episodes against {current.success:.2f} in "
            f"{current.episodes}, {comparison.fit.count} pairs, {(now_ns - comparison.began_ns) / 1e9:.0f} s"
        )

    def _promote(self, number: int, why: str, now_ns: int) -> None:
        state = self.state
        record = state.versions[number]
        state.current = number
        if record.state != VersionState.promoted:
            self._set(record, VersionState.promoted, why, now_ns)
        else:
            record.note = why
            self._decisions.append(RolloutDecision(VersionState.promoted, number, why))
        if not state.reference:
            state.reference = number

    def _watch_drift(self, episode: EpisodeResult, now_ns: int) -> None:
        """Bet the running line against the reference's record, or make it the reference."""
        state, config = self.state, self.config
        promoted = [one for one in state.versions.values() if one.state == VersionState.promoted]
        # Asked again each time: a record that was good by luck loses its place as it grows.
        best = max(promoted, key=lambda one: wilson_low(one.successes, one.episodes), default=None)
        if best is not None and best.number != state.reference:
            state.reference, state.drift = best.number, None
        if (low := self._reference_low()) is None:
            return
        reference = state.versions[state.reference]
        state.drift = state.drift or BettingTest(config.margin / 2)
        state.drift.add(low - episode.success)
        if not state.drift.rejects(config.alpha):
            return
        episodes, state.drift = state.drift.count, None
        for record in state.versions.values():
            if record.number > state.reference and record.state == VersionState.promoted:
                self._set(record, VersionState.rolled_back, f"a line that sank since {state.reference}", now_ns)
        if state.canary:
            self._roll_back_canary("what it came from sank", now_ns)
        why = f"versions sank below its {reference.success:.2f} in the {episodes} episodes since"
        self._promote(state.reference, why, now_ns)

    def _set(self, record: VersionRecord, to: VersionState, why: str, now_ns: int) -> None:
        record.state, record.since_ns, record.note = to, now_ns, why
        self._decisions.append(RolloutDecision(to, record.number, why))

    def _known(self, number: int) -> None:
        if number not in self.state.versions:
            known = ", ".join(map(str, sorted(self.state.versions)[-5:])) or "none"
            raise RejectedError(f"there is no policy version {number} to be had; the newest are {known}.")

    def _before(self, number: int) -> int:
        """The newest older version that was promoted and not rolled back."""
        promoted = (one for one in self.state.versions.values() if one.state == VersionState.promoted)
        return max((one.number for one in promoted if one.number < number), default=0)

    def needed(self) -> frozenset[int]:
        """Versions that robots run, may go back to or may try."""
        state = self.state
        before = self._before(state.current)
        return frozenset((state.current, state.canary, state.reference, before, *state.pins.values())) - {0}

    def _forget(self) -> None:
        versions, needed = self.state.versions, self.needed()
        for number in sorted(versions)[: max(0, len(versions) - _REMEMBERED)]:
            if number not in needed:
                del versions[number]


def _rank(robot: str, version: int) -> bytes:
    return hashlib.sha256(f"{version} {robot}".encode()).digest()
