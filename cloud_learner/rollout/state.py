"""What is known of versions on their way to all robots, as it is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from cloud_learner.rollout.sequential_test import BettingTest
from wire.errors import ConfigError


class VersionState(StrEnum):
    """How far a version is."""

    candidate = "candidate"
    """it passed the gate and acts nowhere"""
    canary = "canary"
    """it acts on some robots, and is compared"""
    promoted = "promoted"
    """it may act on all robots"""
    rolled_back = "rolled_back"
    superseded = "superseded"
    """a newer candidate was tried instead"""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How a new version comes to act on all robots."""

    canary: float = 0.0
    """share of the robots that try it first; 0: it is promoted at once"""
    margin: float = 0.2
    """so much less success than its baseline is bad"""
    alpha: float = 0.05
    """chance at most that a version no worse than its baseline is rolled back by comparison with it"""
    beta: float = 0.05
    """chance at most that one that is worse by the margin is promoted by comparison"""
    most_episodes: int = 200
    """of a canary; then what speaks for it is weighed against what speaks against it"""
    keep: int = 20
    """newest versions whose files stay"""

    def __post_init__(self) -> None:
        """Raises `ConfigError` naming what cannot be."""
        if not 0 <= self.canary <= 0.5:
            raise ConfigError(f"--canary {self.canary:g}: a share of the robots from 0 (none: all at once) to 0.5.")
        for name in ("margin", "alpha", "beta"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"rollout: {name} is {getattr(self, name):g}; give a number between 0 and 1.")
        for name in ("most_episodes", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout: {name} is {getattr(self, name)}; give at least 1.")


class VersionRecord(msgspec.Struct):
    """One version, and what robots that it acted on for whole episodes did."""

    number: int
    parent: int
    state: VersionState
    since_ns: int
    episodes: int = 0
    successes: int = 0
    human_share: float = 0.0
    """sum over the episodes"""
    stops: int = 0
    note: str = ""
    """why it is in this state"""
    ever_canary: bool = False

    @property
    def success(self) -> float:
        return self.successes / self.episodes if self.episodes else math.nan


class EpisodeResult(msgspec.Struct, frozen=True):
    """An episode in which one version acted whenever the policy did."""

    robot: str
    version: int
    task: str
    success: bool
    human_share: float
    """of its steps"""
    stopped: bool
    """somebody stopped the robot"""


class Comparison(msgspec.Struct):
    """A canary against episodes of its baseline."""

    worse: dict[str, BettingTest]
    """by what is compared; H0: the canary is not worse"""
    fit: BettingTest
    """H0: its success is lower by the margin, or more"""
    sinks: BettingTest
    """H0: its success is below the reference's record by half the margin at most"""
    floats: BettingTest
    """H0: it is below that by the margin, or more"""
    waiting: dict[str, list[EpisodeResult]] = {}
    """by task: of the canary, or of its baseline, that have no partner yet"""
    began_ns: int = 0
    episodes: int = 0
    """of the canary"""


class RolloutState(msgspec.Struct):
    """All that a controller knows."""

    versions: dict[int, VersionRecord] = {}
    current: int = 0
    """promoted last: what robots run that try nothing"""
    canary: int = 0
    reference: int = 0
    """the promoted version with the best record"""
    comparison: Comparison | None = None
    drift: BettingTest | None = None
    """since the reference; H0: what acts is worse than the reference by half the margin at most"""
    pins: dict[str, int] = {}
    """by robot, "" for all"""
    frozen: bool = False


def wilson_low(successes: int, episodes: int, z: float = 1.2816) -> float:
    """Lower end of the Wilson interval (Wilson 1927) of a rate; `z` 1.2816: below it with a chance of 0.1."""
    if not episodes:
        return 0.0
    rate, square = successes / episodes, z * z
    middle = rate + square / (2 * episodes)
    half = z * math.sqrt(rate * (1 - rate) / episodes + square / (4 * episodes * episodes))
    return (middle - half) / (1 + square / episodes)
