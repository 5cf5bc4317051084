"""All that a rollout remembers, as plain data that `msgspec` writes and reads."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TypeVar

import msgspec

from cloud_learner.rollout.comparison import Comparison, EpisodeResult, Tally
from cloud_learner.rollout.held_out import HeldOutTrial
from wire.weights.action_difference import ActionDifference

log = logging.getLogger(__name__)
MOST_VERSIONS = 512
"""remembered; of older ones those in use stay"""
RECENT = 256
"""newest episodes of a version in use that are remembered one by one"""
MOST_DECISIONS = 256
"""that wait for `pop_decisions`; the oldest go"""


class VersionState(StrEnum):
    """Where a version is on its way."""

    candidate = "candidate"
    """passed the gate; waits, for a person if its trial showed too little, or was passed over by a newer one"""
    canary = "canary"
    promoted = "promoted"
    """current, or was"""
    rolled_back = "rolled_back"
    refused = "refused"
    """by the gate; for its held-out success it has weights, and a person may promote it"""


class DecisionKind(StrEnum):
    """What was decided of a version."""

    refused = "refused"
    canary = "canary"
    promoted = "promoted"
    rolled_back = "rolled_back"
    reference = "reference"
    """others are compared with it from now on"""
    withdrawn = "withdrawn"
    """a canary that waits again or for a person, or whose weights are gone"""


class RolloutDecision(msgspec.Struct, frozen=True):
    """For people and for the record."""

    kind: DecisionKind
    version: int
    reason: str
    """with the figures it was decided by"""
    at_ns: int


class PendingEpisode(msgspec.Struct, frozen=True, array_like=True):
    """It has ended, and waits to be compared."""

    began_ns: int
    version: int
    task: str
    result: EpisodeResult


class ShadowTally(msgspec.Struct):
    """What came of a version that robots compute without acting by it, over all robots."""

    difference: ActionDifference = ActionDifference()
    """of its actions from those that acted, of robots of whatever shape"""
    largest: dict[str, float] = {}
    """difference in each action dimension, by its name"""
    faults: int = 0
    """chunks that were not made"""
    problems: dict[str, str] = {}
    """by robot, of those that compute it or should: what is wrong"""

    def add(self, robot: str, found: ShadowTally) -> None:
        """What came of it on a robot since it said something last."""
        self.difference = self.difference.plus(found.difference)
        for name, share in found.largest.items():
            self.largest[name] = max(share, self.largest.get(name, 0.0))
        self.faults += found.faults
        if found.problems:
            self.problems |= found.problems
        elif found.difference.chunks:
            self.problems.pop(robot, None)


class VersionRecord(msgspec.Struct, kw_only=True):
    """What is known of a version."""

    number: int
    parent: int
    state: VersionState
    since_ns: int
    """when it came into this state"""
    reason: str = ""
    """why it is in this state"""
    has_weights: bool = True
    passed_against: int = 0
    """the version whose held-out success it may replace, 0: none"""
    tally: Tally = msgspec.field(default_factory=Tally)
    """over all episodes that it alone acted in"""
    recent: list[tuple[str, EpisodeResult]] = []
    """(task, result) of the newest of robots that were not pinned, while it is in use"""
    shadow: ShadowTally | None = None
    """None: it never was one"""


class RolloutState(msgspec.Struct, kw_only=True):
    """Of the whole rollout. 0: no such version."""

    versions: dict[int, VersionRecord] = {}
    history: list[int] = []
    """versions that were promoted and not rolled back, in that order; the last is current"""
    reference: int = 0
    """what current is watched against: the newest version that was shown to be better than the reference before it"""
    canary: int = 0
    newest_tried: int = 0
    """newer versions wait; older ones are passed over"""
    pins: dict[str, int] = {}
    """by robot, '' for all"""
    shadow: int = 0
    """what some robots compute without acting by it"""
    shadow_robots: list[str] = []
    """those that a person chose; none: a few"""
    shapes: dict[str, str] = {}
    """by robot, of all that take part"""
    frozen: bool = False
    pending: list[PendingEpisode] = []
    """by when they began"""
    longest_ns: int = 0
    """about the longest episode of late"""
    mean_ns: int = 0
    """of the episodes of late"""
    held_out: HeldOutTrial | None = None
    """of the candidate that evaluators measure"""
    held_out_seeds: int = 0
    """of each task that were used for that"""
    trial: Comparison | None = None
    """of the canary against current"""
    trial_since_ns: int = 0
    trial_worked_ns: int = 0
    """so long its robots worked since, or since they did something else than practise"""
    worked_at_ns: int = 0
    """when one of them did last"""
    line: Comparison | None = None
    """of all that were current since the reference, against it"""
    line_since_ns: int = 0
    line_versions: int = 0
    own_blocks: int = 0
    """compared blocks of current with the reference"""
    own_gain: float = 0.0
    """sum of the gain of success in them"""
    decisions: list[RolloutDecision] = []

    @property
    def current(self) -> int:
        """What robots act by that are neither pinned nor chosen for something else."""
        return self.history[-1] if self.history else 0

    @property
    def previous(self) -> int:
        """The newest version before current whose weights are there."""
        return next((n for n in reversed(self.history[:-1]) if self.versions[n].has_weights), 0)

    @property
    def needed(self) -> set[int]:
        """Versions that robots act by, compute or would be sent back to, or that evaluators measure for that."""
        measured = {self.held_out.candidate} if self.held_out is not None else set[int]()
        passed = {number for number, one in self.versions.items() if self._has_passed(one)}
        used = {self.current, self.previous, self.reference, self.canary, self.shadow, *self.pins.values()}
        return (used | measured | passed) - {0}

    def _has_passed(self, record: VersionRecord) -> bool:
        waits = record.state is VersionState.candidate and record.number > self.newest_tried
        return waits and 0 < record.passed_against == self.current

    @property
    def lag_ns(self) -> int:
        """How long an episode takes at most. A robot that stood still in one of them holds nothing up for long."""
        return min(self.longest_ns, 3 * self.mean_ns)

    def note_duration(self, duration_ns: int) -> None:
        """Of an episode."""
        self.longest_ns = max(self.longest_ns - self.longest_ns // 4096, duration_ns)
        self.mean_ns += (duration_ns - self.mean_ns) // 256 if self.mean_ns else duration_ns

    def set_state(self, number: int, state: VersionState, reason: str, now_ns: int) -> None:
        """Enter it."""
        record = self.versions[number]
        record.state, record.reason, record.since_ns = state, reason, now_ns

    def decide(self, kind: DecisionKind, number: int, reason: str, now_ns: int) -> None:
        """Queue it for people and for the record."""
        self.decisions.append(RolloutDecision(kind, number, reason, now_ns))
        del self.decisions[:-MOST_DECISIONS]

    def forget(self) -> None:
        """What is no longer needed, once there is too much."""
        while len(self.versions) > MOST_VERSIONS:
            waiting = (n for n, one in self.versions.items() if one.state is VersionState.candidate)
            kept = {*self.needed, max(waiting, default=0)}
            if not (number := min((n for n in self.versions if n not in kept), default=0)):
                return  # all are pinned, which is bounded too
            del self.versions[number]
            self.history = [n for n in self.history if n != number]


def decode_state(kept: str) -> RolloutState:
    """What was kept as JSON. Where that cannot be read, said and frozen: what can be read of versions, and of who acts
    by which; nothing is on trial any more."""
    if not kept:
        return RolloutState()
    try:
        return msgspec.json.decode(kept, type=RolloutState)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        state = _salvage(kept)
        then = f"version {state.current} stays current, and nothing is tried until a person unfreezes"
        then = then if state.current else "the newest version is promoted"
        log.error("what is kept of versions cannot be read (%s): %s.", error, then)
        return state


def _salvage(kept: str) -> RolloutState:
    fields = _decoded(kept, dict[str, msgspec.Raw]) or {}
    records = _decoded(fields.get("versions"), dict[int, msgspec.Raw]) or {}
    versions = {number: one for number, data in records.items() if (one := _decoded(data, VersionRecord)) is not None}
    history = _decoded(fields.get("history"), list[int])
    if history is None:
        history = sorted(number for number, one in versions.items() if one.state is VersionState.promoted)
    history = [number for number in history if number in versions]
    if not history:
        return RolloutState()
    for one in versions.values():
        if one.state is VersionState.canary:
            one.state, one.reason = VersionState.candidate, "its trial could not be read after a restart."
    tried = (number for number, one in versions.items() if one.state is not VersionState.candidate)
    pins = _decoded(fields.get("pins"), dict[str, int]) or {}
    return RolloutState(
        versions=versions,
        history=history,
        reference=history[-1],
        newest_tried=max(tried, default=0),
        pins={robot: number for robot, number in pins.items() if number in versions},
        shapes=_decoded(fields.get("shapes"), dict[str, str]) or {},
        frozen=True,
    )


_Kind = TypeVar("_Kind")


def _decoded(data: str | msgspec.Raw | None, kind: type[_Kind]) -> _Kind | None:
    """None: it is not there or cannot be read."""
    try:
        return msgspec.json.decode(data, type=kind) if data is not None else None
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
