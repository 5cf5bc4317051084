"""Episodes as their segments are stored: which versions acted in each, and how it ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from wire.messages.gateway import ACTORS, Segment
from wire.types import Actor, EpisodeOutcome

_JUDGED: Mapping[str, bool | None] = {
    EpisodeOutcome.success: True,
    EpisodeOutcome.failure: False,
    EpisodeOutcome.unjudged: None,
}
_MOST = 1000
_POLICY, _HOLD = ACTORS.index(Actor.policy), ACTORS.index(Actor.hold)


class FinishedEpisode(NamedTuple):
    """One that says something about the versions that acted in it."""

    versions: set[int]
    success: bool | None
    human_share: float
    stopped: bool
    began_ns: int


class _OpenEpisode(msgspec.Struct):
    began_ns: int = 0
    versions: set[int] = set()
    """that chose an action of it"""
    held: set[int] = set()
    """that were to, where the robot held"""
    only_held: bool = True
    segments: int = 0
    whole: bool = True
    steps: int = 0
    stopped: bool = False


class OpenEpisodes:
    """By id; the oldest are forgotten."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _OpenEpisode] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def stop(self, episode: str) -> None:
        """Somebody stopped its robot, perhaps before the first segment of it."""
        self._find(episode).stopped = True

    def add(self, segment: Segment, human_steps: int, offset_ns: int) -> FinishedEpisode | None:
        """A segment was stored, for the first time; the episode, if it ended with that and says something.

        `human_steps`: of its episode, with the last segment; `offset_ns`: from the robot's clock to the gateway's.
        """
        episode = segment.episode
        found = self._find(episode.id)
        if not found.segments:
            found.began_ns = int(segment.times_ns[0]) + offset_ns
        if segment.index != found.segments:
            # a part of it came before this gateway was started: nobody knows who acted in it
            found.whole = False
        found.segments = segment.index + 1
        found.steps += segment.steps
        holds = segment.actor == _HOLD
        found.versions |= set(np.unique(segment.version[segment.actor == _POLICY]).tolist())
        found.held |= set(np.unique(segment.version[holds]).tolist())
        found.only_held &= bool(holds.all())
        if not segment.last:
            return None
        del self._open[episode.id]
        if segment.outcome not in _JUDGED or not found.whole:
            return None  # broken off or thrown away: it says nothing about the policy
        share = min(1.0, human_steps / max(1, found.steps))
        # A robot that holds from the first step to the last does so by its version, as far as anybody can tell.
        versions, stopped = (found.held, True) if found.only_held else (found.versions, found.stopped)
        return FinishedEpisode(versions, _JUDGED[segment.outcome], share, stopped, found.began_ns)

    def _find(self, episode: str) -> _OpenEpisode:
        found = self._open.setdefault(episode, _OpenEpisode())
        if len(self._open) > _MOST:
            self._open.popitem(last=False)
        return found
