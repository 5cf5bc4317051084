"""What lies in a spool, in memory: in which order it is to be sent, and what may be dropped for want of room."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from wire.messages.gateway import ACTORS, Segment
from wire.types import Actor, EpisodeSource

_OTHERS = [ACTORS.index(actor) for actor in (Actor.human, Actor.script)]


class SpooledSegment(NamedTuple):
    """A segment in the spool."""

    row: int
    number: int
    """in its episode, `Segment.index`"""
    size: int
    """bytes"""


class SpooledEpisode:
    """What of an episode lies in the spool."""

    __slots__ = ("begun", "ended", "id", "kept", "segments", "size", "steps", "waiting")

    def __init__(self, episode_id: str, begun: bool) -> None:
        self.id = episode_id
        self.begun = begun
        """the gateway may have some of it"""
        self.kept = False
        """a person or a script acted in it, or it demonstrates: it comes first, and is never dropped"""
        self.ended = False
        self.segments = self.steps = self.size = 0
        """in the spool, with their bytes"""
        self.waiting: deque[SpooledSegment] = deque()
        """those that were not handed out to be sent, in order"""


def is_kept(segment: Segment) -> bool:
    """Whether a person or a script acted in a segment, or it demonstrates. A robot that holds waits for its policy."""
    return segment.episode.source == EpisodeSource.demonstration or bool(np.isin(segment.actor, _OTHERS).any())


class SpoolIndex:
    """Episodes in two lanes: those that are kept, then the rest.

    In a lane the newest episode of all comes first, for it is what the robot does now; then the others, oldest first.
    The segments of an episode keep their order.

    The uplink's loop takes out what is to be sent, the thread of the spool does all else; whoever reads or changes it
    has the lock for that moment, and never while a disk is waited for.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._episodes: dict[str, SpooledEpisode] = {}
        self._kept: dict[str, SpooledEpisode] = {}
        self._rest: dict[str, SpooledEpisode] = {}
        """those with segments that wait, by id"""
        self._newest: SpooledEpisode | None = None
        self.segments = self.size = 0
        """in the spool, with their bytes"""

    def expect(self, episode_id: str, kept: bool, begun: bool) -> SpooledEpisode:
        """An episode of which something was put in, or will be."""
        with self._lock:
            episode = self._episodes.get(episode_id)
            if episode is None:
                episode = self._episodes[episode_id] = SpooledEpisode(episode_id, begun)
                episode.kept = kept
            return episode

    def is_kept(self, episode_id: str) -> bool:
        """Whether what is known of an episode has to stay."""
        with self._lock:
            episode = self._episodes.get(episode_id)
            return episode is not None and episode.kept

    def add(self, episode_id: str, segment: SpooledSegment, steps: int, kept: bool, last: bool, begun: bool) -> None:
        """It was put in; what is put in is newer than what is there."""
        with self._lock:
            episode = self.expect(episode_id, kept, begun)
            self._newest = episode
            episode.waiting.append(segment)
            episode.segments += 1
            episode.steps += steps
            episode.size += segment.size
            self.segments += 1
            self.size += segment.size
            episode.ended |= last
            if kept and not episode.kept:
                episode.kept = True
                self._rest.pop(episode_id, None)
            (self._kept if episode.kept else self._rest)[episode_id] = episode

    def next(self) -> tuple[SpooledEpisode, SpooledSegment] | None:
        """What is to be sent next."""
        with self._lock:
            for lane in (self._kept, self._rest):
                newest = self._newest
                if newest is not None and newest.id in lane:
                    return newest, newest.waiting[0]
                for episode in lane.values():
                    return episode, episode.waiting[0]
            return None

    def pop(self, fits: Callable[[int], bool] = lambda size: True) -> tuple[SpooledEpisode, SpooledSegment] | None:
        """Hand out what `next` says, if its size `fits`."""
        with self._lock:
            if (found := self.next()) is None or not fits(found[1].size):
                return None
            found[0].waiting.popleft()
            self._tidy(found[0])
            return found

    def remove(self, episode_id: str, number: int, steps: int, size: int) -> bool:
        """A segment is no longer in the spool; whether its episode has ended and no other of it is there."""
        with self._lock:
            episode = self._episodes.get(episode_id)
            if episode is None:
                return False
            if any(segment.number == number for segment in episode.waiting):
                # an earlier process had sent it
                episode.waiting = deque(segment for segment in episode.waiting if segment.number != number)
            episode.segments -= 1
            episode.steps -= steps
            episode.size -= size
            self.segments -= 1
            self.size -= size
            self._tidy(episode)
            # Of one that goes on more is to come, and the gateway has what came before.
            if done := episode.ended and not episode.segments:
                del self._episodes[episode_id]
            return done

    def next_to_begin(self, count: int) -> list[SpooledEpisode]:
        """So many of those that may be dropped, in the order in which they are sent."""
        with self._lock:
            rest = [one for one in itertools.islice(self._rest.values(), count + 1) if not one.begun]
            if self._newest is not None and self._newest.id in self._rest and not self._newest.begun:
                rest = [self._newest, *(one for one in rest if one is not self._newest)]
            return rest[:count]

    def droppable(self, size: int = 1) -> list[SpooledEpisode]:
        """Whole episodes of the policy alone of which the gateway has nothing, oldest first: so many bytes, or all."""
        with self._lock:
            found: list[SpooledEpisode] = []
            candidates: Iterator[SpooledEpisode] = (one for one in self._rest.values() if one.ended and not one.begun)
            while size > 0 and (episode := next(candidates, None)) is not None:
                found.append(episode)
                size -= episode.size
            return found

    def drop(self, episode: SpooledEpisode) -> None:
        """A whole episode is no longer in the spool."""
        with self._lock:
            del self._episodes[episode.id]
            # not there when all of it was handed out meanwhile
            self._rest.pop(episode.id, None)
            self.segments -= episode.segments
            self.size -= episode.size
            episode.waiting.clear()

    def _tidy(self, episode: SpooledEpisode) -> None:
        if not episode.waiting:
            self._kept.pop(episode.id, None)
            self._rest.pop(episode.id, None)
