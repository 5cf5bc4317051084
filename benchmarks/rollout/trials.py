"""One version against another, and a line of versions: once each, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.rollout.fleet import DiceFleet, Quality
from cloud_learner.rollout.comparison import EpisodeResult
from cloud_learner.rollout.config import RolloutConfig
from cloud_learner.rollout.controller import RolloutController
from cloud_learner.rollout.records import DecisionKind

_BEFORE_S = 600.0
"""the first version acts alone so long"""
_MOST_S = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class TrialCase:
    """A version that comes after another one."""

    name: str
    before: float
    """success of the version before it"""
    after: Quality
    is_bad: bool
    """it is to be rolled back; else it is to be promoted"""
    robots: int = 10
    robot_spread: float = 0.0
    harder: float = 0.0
    """so much less often everything succeeds from two minutes after it came"""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What was decided, and what it took."""

    promoted: bool
    at_bound: bool
    """rolled back because nothing was shown within the bound on episodes"""
    episodes: int
    """of the canary"""
    minutes: float
    """since it came"""
    share_of_robots: float
    """that acted by it before that was decided"""


def run_trial(case: TrialCase, config: RolloutConfig, seed: int) -> TrialOutcome:
    """Until it is decided; `TimeoutError` after six hours."""
    fleet = DiceFleet(RolloutController(config), case.robots, seed, case.robot_spread)
    fleet.publish(1, Quality(case.before))
    # One robot needs a record; of a thousand a few episodes each are many.
    fleet.run(_BEFORE_S * (6 if case.robots == 1 else 1 if case.robots < 100 else 0.2))
    fleet.publish(2, case.after)
    begun_s = fleet.now_s
    while fleet.now_s < begun_s + _MOST_S:
        if case.harder and fleet.now_s > begun_s + 120:
            fleet.harder = case.harder
        robots = len(fleet.acted.get(2, ()))
        for decision in fleet.step():
            # withdrawn: left to a person
            over = (DecisionKind.promoted, DecisionKind.rolled_back, DecisionKind.withdrawn)
            if decision.version == 2 and decision.kind in over:
                return TrialOutcome(
                    decision.kind is DecisionKind.promoted,
                    decision.reason.startswith("not shown"),
                    fleet.canary_episodes,
                    (fleet.now_s - begun_s) / 60,
                    robots / case.robots,
                )
    raise TimeoutError(f"{case.name}: nothing was decided within {_MOST_S / 3600:.0f} hours of simulated time.")


@dataclass(frozen=True, slots=True)
class LineCase:
    """Many versions, each a little different from the one before."""

    name: str
    first: float
    step: float
    every_s: float
    is_watched: bool = True
    """False: versions are compared with the last promoted one alone"""
    control: float = 0.1
    versions: int = 25


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """What became of it. Losses are of success against the first version, of what is current."""

    alarm_version: int
    """newest version when the line was rolled back for the first time, 0: never"""
    alarm_loss: float
    """then"""
    worst_loss: float
    mean_loss: float
    """over time"""
    end_loss: float
    promoted: int
    reference: int


class Unwatched(RolloutController):
    """Without the comparison with the reference."""

    def _compare(self, number: int, task: str, result: EpisodeResult) -> None:
        self._state.line = None
        super()._compare(number, task, result)


def run_line(case: LineCase, seed: int) -> LineOutcome:
    """A new version every `every_s`, whatever became of those before: the trainer goes on."""
    config = RolloutConfig(canary=0.2, control=case.control if case.is_watched else 0.0)
    fleet = DiceFleet((RolloutController if case.is_watched else Unwatched)(config), 10, seed)
    fleet.publish(1, Quality(case.first))
    fleet.run(case.every_s)
    begun_s, promoted, alarm_version, alarm_loss, worst, sum_s = fleet.now_s, 0, 0, 0.0, 0.0, 0.0

    def loss() -> float:
        return case.first - fleet.qualities[fleet.controller.current].success

    for number in range(2, case.versions + 2):
        fleet.publish(number, Quality(min(max(case.first + case.step * (number - 1), 0.0), 1.0)))
        end_s = fleet.now_s + case.every_s
        while fleet.now_s < end_s:
            before_s, before = fleet.now_s, loss()
            decisions = fleet.step()
            sum_s += before * (fleet.now_s - before_s)
            promoted += sum(one.kind is DecisionKind.promoted for one in decisions)
            if not alarm_version and any("versions since" in one.reason for one in decisions):
                alarm_version, alarm_loss = number, before
            worst = max(worst, loss())
    mean = sum_s / (fleet.now_s - begun_s)
    return LineOutcome(alarm_version, alarm_loss, worst, mean, loss(), promoted, fleet.controller.reference)
