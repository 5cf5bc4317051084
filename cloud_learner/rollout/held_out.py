"""A version against the one it would replace, on held-out seeds: has it lost, has it shown that it has not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from cloud_learner.rollout.sequential_test import BettingTest

FIRST_SEED = 3_000_000
"""of the gate's: neither the curve's nor those of the figures before and after"""
ROUND_SEEDS = 5
"""of each task, measured of both versions before anything is decided"""
_BOUND = 8.0


class HeldOutRequest(msgspec.Struct, frozen=True):
    """A version to measure on held-out seeds [first_seed, first_seed + episodes) of each task."""

    number: int
    first_seed: int
    episodes: int = ROUND_SEEDS


class HeldOutTest(msgspec.Struct, kw_only=True):
    """Two tests of the same differences D: whether the new version is worse, and whether it is not by a margin."""

    margin: float
    worse: BettingTest
    good: BettingTest
    wins: int = 0
    """of the new version"""

    @classmethod
    def begin(cls, margin: float, alpha: float, beta: float) -> HeldOutTest:
        """As `HeldOutTrial.begin`."""
        worse, good = BettingTest(bound=0.0, error=alpha), BettingTest(bound=-margin, error=beta)
        return cls(margin=margin, worse=worse, good=good)

    def observe(self, won: bool, won_before: bool) -> None:
        """A pair of episodes, by the new version and by the old one."""
        self.worse.observe(float(won_before - won))
        self.good.observe(float(won - won_before))
        self.wins += won

    @property
    def most_pairs(self) -> int:
        """Then the mean decides: that lets in exp(-4) of what is worse by `margin` at most (Hoeffding 1963)."""
        return math.ceil(_BOUND / self.margin**2)

    def decision(self) -> bool | None:
        """Whether the new version is good enough; None while nothing is shown."""
        if self.worse.is_over:
            return False
        if self.good.is_over:
            return True
        return self.worse.mean <= 0 if self.worse.count >= self.most_pairs else None

    def text(self) -> str:
        """Such as `3 of 10, before 9 of 10`."""
        count = self.worse.count
        return f"{self.wins} of {count}, before {self.wins + round(self.worse.total)} of {count}"


class HeldOutTrial(msgspec.Struct, kw_only=True):
    """Pairs of episodes of the same task and seed, one by each version, in rounds that have as many of each task.

    A pair's D is 1 when only the old version succeeded, -1 when only the new one did, else 0. One `BettingTest` has H0:
    the mean of D is at most 0; rejected, the new version is worse. Another one has H0: it is `margin` or more;
    rejected, it is not worse by that. Both are looked at after whole rounds. Tasks may differ: pairs are independent
    given the versions, so the expectation of a bet's capital over a round is a product over its pairs, and by the
    inequality of the means at most that of pairs that all had the round's mean. Each round of each trial has seeds that
    no version was judged by before: what was chosen because it did well on some is not compared on these.

    With `task_margin` the same two tests look at each task by itself, and the new version has to be good enough in all:
    what it gained in some does not make up for one that it has lost.
    """

    candidate: int
    current: int
    first_seed: int
    """of this round"""
    whole: HeldOutTest
    """of all tasks together"""
    alpha: float
    beta: float
    task_margin: float = 0.0
    tasks: dict[str, HeldOutTest] = {}
    """of each task, with `task_margin`"""
    found: dict[int, dict[str, list[bool]]] = {}
    """outcomes of this round by version and task"""
    rounds: int = 0
    no_common_task: bool = False
    """in the last round: each version was measured by an evaluator with tasks of its own"""

    @classmethod
    def begin(
        cls,
        candidate: int,
        current: int,
        first_seed: int,
        margin: float,
        alpha: float,
        beta: float,
        task_margin: float = 0.0,
    ) -> HeldOutTrial:
        """alpha: error of refusing what is no worse, and again of refusing for a task what has lost none; beta: of
        letting in what is worse by `margin` or more, or in a task by `task_margin` if that is above 0."""
        whole = HeldOutTest.begin(margin, alpha, beta)
        return cls(
            candidate=candidate,
            current=current,
            first_seed=first_seed,
            whole=whole,
            alpha=alpha,
            beta=beta,
            task_margin=task_margin,
        )

    @property
    def pairs(self) -> int:
        """Of all tasks, in whole rounds."""
        return self.whole.worse.count

    def missing(self) -> list[HeldOutRequest]:
        """What is to be measured for this round; the version that was measured last comes first: it is loaded."""
        order = (self.candidate, self.current) if self.rounds % 2 == 0 else (self.current, self.candidate)
        return [HeldOutRequest(number, self.first_seed) for number in order if number not in self.found]

    def add(self, request: HeldOutRequest, outcomes: Mapping[str, Sequence[bool]]) -> bool:
        """Outcomes by task, of `request.episodes` seeds each; whether they were asked for, and new."""
        if request not in self.missing():
            return False
        if not outcomes or any(len(won) != request.episodes for won in outcomes.values()):
            return False
        self.found[request.number] = {task: list(won) for task, won in outcomes.items()}
        if not self.missing():
            self._compare()
        return True

    def decision(self) -> bool | None:
        """Whether the candidate may go on; None while nothing is shown."""
        if self.found or not self.pairs:
            return None
        every = [self.whole.decision(), *(one.decision() for one in self.tasks.values())]
        if False in every:
            return False
        return None if None in every else True

    @property
    def lost_task(self) -> str:
        """The task, if any, for which alone the candidate may not go on; of several the one that it lost most of."""
        if self.whole.decision() is False:
            return ""
        lost = {task: one.worse.mean for task, one in self.tasks.items() if one.decision() is False}
        return max(lost, key=lambda task: lost[task], default="")

    def text(self) -> str:
        """Such as `27 of 30 held-out episodes succeeded; of version 7, 26 of 30 of the same`, and the lost task's."""
        wins, of = self.whole.wins, f"of {self.pairs}"
        before = wins + round(self.whole.worse.total)
        said = f"{wins} {of} held-out episodes succeeded; of version {self.current}, {before} {of} of the same"
        return f"{said}; of {self.lost_task}: {self.tasks[self.lost_task].text()}" if self.lost_task else said

    def _compare(self) -> None:
        new, old = self.found[self.candidate], self.found[self.current]
        common = sorted(new.keys() & old.keys())
        self.no_common_task = not common
        if self.task_margin and not self.tasks:
            # any of them may be refused for by chance
            alpha = self.alpha / max(1, len(common))
            self.tasks = {task: HeldOutTest.begin(self.task_margin, alpha, self.beta) for task in common}
        # nobody measures the others any more
        self.tasks = {task: one for task, one in self.tasks.items() if task in common}
        for task in common:
            for won, won_before in zip(new[task], old[task], strict=True):
                self.whole.observe(won, won_before)
                if task in self.tasks:
                    self.tasks[task].observe(won, won_before)
        self.found, self.rounds = {}, self.rounds + 1
        self.first_seed += ROUND_SEEDS
