"""One version against another, by episodes of the same tasks: has it lost, has it shown that it has not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from cloud_learner.rollout.sequential_test import BettingTest

_LEANS = math.log(3.0)
"""evidence of 3 to 1 that something was lost: a version that is no worse shows it ever with a probability of 1/3"""
_TASKS = 256
_WAITING = 16
"""blocks of a task and side that wait for the other side; the oldest go, so that a block is of about one time"""


class Measure(StrEnum):
    """What a version can be worse in."""

    success = "success"
    human = "human share"
    stops = "stops"


class EpisodeResult(msgspec.Struct, frozen=True, array_like=True):
    """What is compared of an episode."""

    success: bool | None
    """None: nobody said"""
    human_share: float
    """of its steps, 0 to 1"""
    stopped: bool
    """somebody or something had to stop the robot"""


class Tally(msgspec.Struct):
    """Sums over episodes."""

    episodes: int = 0
    judged: int = 0
    """of which somebody said whether they succeeded"""
    succeeded: int = 0
    human_share: float = 0.0
    stopped: int = 0

    def add(self, result: EpisodeResult) -> None:
        self.episodes += 1
        self.judged += result.success is not None
        self.succeeded += result.success is True
        self.human_share += result.human_share
        self.stopped += result.stopped

    def text(self, measure: Measure) -> str:
        """Such as `12 of 20 episodes succeeded`."""
        if measure is Measure.human:
            return f"a human share of {self.human_share / max(self.episodes, 1):.2f} in {self.episodes} episodes"
        if measure is Measure.stops:
            return f"{self.stopped} of {self.episodes} episodes stopped"
        unjudged = self.episodes - self.judged
        return f"{self.succeeded} of {self.judged} episodes succeeded" + f" ({unjudged} unjudged)" * bool(unjudged)


class WaitingEpisodes(msgspec.Struct):
    """Of one task: episodes that no block has yet, oldest first."""

    new: list[EpisodeResult] = []
    old: list[EpisodeResult] = []


def _tests(bound: float, error: float, reserve: float) -> dict[Measure, BettingTest]:
    return {measure: BettingTest(bound=bound, error=error, reserve=reserve) for measure in Measure}


class Comparison(msgspec.Struct, kw_only=True):
    """A new version, or a line of them, against an old one that acts at the same time.

    Episodes are compared in blocks of one task: one of the side that has fewer robots, and of the other side as many as
    it has more robots, or fewer where these do not come; each episode is in one block at most, so that the world may
    change and tasks may differ. A block's D are differences of means, in [-1, 1], positive when the new version is
    worse. Of each measure one test, with an error of alpha / 3 (Bonferroni), has H0: nothing was lost. Another one,
    with an error of beta, has H0: it is worse by `margin` or more; all three have to reject theirs, so that their
    errors do not add up (intersection-union test, Berger 1982).

    What makes a difference of two robots is taken for one of the versions: robots should be alike, or be drawn anew for
    each version.
    """

    worse: dict[Measure, BettingTest]
    """H0: nothing was lost; rejected, the new version is worse"""
    good: dict[Measure, BettingTest]
    """H0: it is worse by the margin or more; rejected, it is not"""
    unjudged: BettingTest = msgspec.field(default_factory=lambda: BettingTest(bound=0.0, error=0.05))
    """H0: the new version's episodes go unjudged no more often; failures may be among them"""
    waiting: dict[str, WaitingEpisodes] = {}
    """by task, the least recent first"""
    recorded: bool = False
    """the old version's episodes are from its record, and none is to be wasted"""
    new: Tally = msgspec.field(default_factory=Tally)
    old: Tally = msgspec.field(default_factory=Tally)

    @classmethod
    def begin(cls, margin: float, alpha: float, beta: float, reserve: float = 0.0) -> Comparison:
        """alpha: error of all tests of loss together; beta: of each test of `margin`; reserve: see `BettingTest`."""
        worse = _tests(0.0, alpha / len(Measure), reserve)
        return cls(worse=worse, good=_tests(-margin, beta, reserve))

    def preload(self, results: Iterable[tuple[str, EpisodeResult]]) -> None:
        """Episodes of the old version from before, where no robot is left that could act by it."""
        self.recorded = True
        for task, result in results:
            self.old.add(result)
            self._of_task(task).old.append(result)

    def add(self, task: str, result: EpisodeResult, is_new: bool, new_a_block: int, old_a_block: int) -> bool:
        """An episode of one side; at most so many of each side make a block. Whether something was compared."""
        (self.new if is_new else self.old).add(result)
        waiting = self._of_task(task)
        side, other = (waiting.new, waiting.old) if is_new else (waiting.old, waiting.new)
        side.append(result)
        most = _WAITING * (new_a_block if is_new else old_a_block)
        full = len(waiting.new) >= new_a_block and len(waiting.old) >= old_a_block
        # A side that has two blocks waiting waits no longer for the whole share of the other.
        late = not self.recorded and (len(waiting.new) >= 2 * new_a_block or len(waiting.old) >= 2 * old_a_block)
        if not other or not (full or late):
            if len(side) > most:
                del side[0]
            return False
        new, old = waiting.new[:new_a_block], waiting.old[:old_a_block]
        del waiting.new[: len(new)], waiting.old[: len(old)]
        self._compare(new, old)
        return True

    def loss_of(self) -> Measure | None:
        """In what the new version was shown to be worse."""
        return next((measure for measure, test in self.worse.items() if test.rejected), None)

    @property
    def is_good(self) -> bool:
        """Whether the new version was shown not to be worse by the margin, in anything."""
        return all(test.rejected for test in self.good.values())

    @property
    def goes_unjudged(self) -> bool:
        """Whether the new version's episodes seem to go unjudged more often, so that its success says little."""
        return self.unjudged.log_wealth > _LEANS

    def leaning(self, evidence: float = _LEANS) -> Measure | None:
        """In what it looks worse now, without having been shown to be: log of the odds above `evidence`."""
        return next((measure for measure, test in self.worse.items() if test.log_wealth > evidence), None)

    def restart(self, share: float) -> None:
        """Another version has joined the line: see `BettingTest.restart`."""
        for test in (*self.worse.values(), *self.good.values()):
            test.restart(share)
        for waiting in self.waiting.values():
            waiting.new.clear()

    def text(self, measure: Measure, old: str) -> str:
        """Such as `3 of 12 episodes succeeded; of version 7, 38 of 45 episodes succeeded`."""
        return f"{self.new.text(measure)}; of {old}, {self.old.text(measure)}"

    def judged_text(self, old: str) -> str:
        """Such as `3 of 12 episodes judged, of version 7 38 of 45`."""
        new, before = self.new, self.old
        return f"{new.judged} of {new.episodes} episodes judged, of {old} {before.judged} of {before.episodes}"

    def _compare(self, new: list[EpisodeResult], old: list[EpisodeResult]) -> None:
        judged_new = [one.success for one in new if one.success is not None]
        judged_old = [one.success for one in old if one.success is not None]
        losses = {
            Measure.human: _mean([one.human_share for one in new]) - _mean([one.human_share for one in old]),
            Measure.stops: _mean([one.stopped for one in new]) - _mean([one.stopped for one in old]),
        }
        if judged_new and judged_old:
            losses[Measure.success] = _mean(judged_old) - _mean(judged_new)
        for measure, loss in losses.items():
            self.worse[measure].observe(loss)
            self.good[measure].observe(-loss)
        self.unjudged.observe((len(new) - len(judged_new)) / len(new) - (len(old) - len(judged_old)) / len(old))

    def _of_task(self, task: str) -> WaitingEpisodes:
        """The one heard of last comes last; over `_TASKS` the first is dropped."""
        found = self.waiting.pop(task, None) or WaitingEpisodes()
        self.waiting[task] = found
        if len(self.waiting) > _TASKS:
            del self.waiting[next(iter(self.waiting))]
        return found


def _mean(values: list[float] | list[bool]) -> float:
    return sum(values) / len(values)
