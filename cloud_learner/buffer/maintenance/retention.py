"""Which episodes are forgotten: a recipe's setting, and a pure function of what is stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from wire.errors import ConfigError, suggest
from wire.types import EpisodeOutcome, EpisodeSource

if TYPE_CHECKING:
    from cloud_learner.buffer.ledger.rows import KeptEpisode

_STILL_RUNS_NS = 3600 * 10**9
"""An unfinished episode that got a segment within this time is never forgotten."""


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much is kept of some episodes. Raises `ConfigError` for what is below 0."""

    max_bytes: float | None = None
    """of their segments as they came; the oldest episodes go until the rest is no more"""
    max_age_s: float | None = None
    """since an episode's newest segment was committed"""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_age_s", "min_episodes_per_task", "quarantine_bytes"):
            if (getattr(self, name, None) or 0) < 0:
                raise ConfigError(f"retention: {name} {getattr(self, name):g} is negative.")


class Retention(Bound, frozen=True, forbid_unknown_fields=True):
    """Which episodes are forgotten; its own bounds are those of all episodes. By default all of them stay.

    Raises `ConfigError` for a source or an outcome that does not exist.
    """

    by_task: dict[str, Bound] = {}
    by_source: dict[str, Bound] = {}
    """online, demonstration or evaluation"""
    min_episodes_per_task: int = 0
    """so many of each task stay, whatever the bounds"""
    drop_outcomes: tuple[str, ...] = ()
    """episodes that ended so go at once"""
    keep_outcomes: tuple[str, ...] = ()
    """episodes that ended so stay, whatever their age and the size of all"""
    keep_human: bool = True
    """episodes in which a person or a script acted stay; otherwise they go after all others"""
    keep_demonstrations: bool = True
    """so do demonstrations"""
    quarantine_bytes: float = 2**30
    """of what was refused or found damaged; the oldest goes"""

    def __post_init__(self) -> None:
        super().__post_init__()
        sources, outcomes = (list(map(str, kind)) for kind in (EpisodeSource, EpisodeOutcome))
        for given, known in (
            (self.by_source, sources),
            (self.drop_outcomes, outcomes),
            (self.keep_outcomes, outcomes),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"retention: {name!r} is none of {', '.join(known)}.{suggest(name, known)}")

    @property
    def bounded(self) -> bool:
        """Whether anything is ever forgotten."""
        return self.may_forget(math.inf)

    def may_forget(self, stored_bytes: float) -> bool:
        """Whether any episode may go, or a warning be due, while all together have so many bytes; no episode is looked
        at for it.
        """
        bounds = (self, *self.by_task.values(), *self.by_source.values())
        full = any(bound.max_bytes is not None and stored_bytes >= bound.max_bytes for bound in bounds)
        return full or bool(self.drop_outcomes) or any(bound.max_age_s is not None for bound in bounds)

    def choose(self, episodes: Sequence[KeptEpisode], now_ns: int) -> list[KeptEpisode]:
        """Those of all `episodes` that are to go, which come oldest first. `now_ns`: nanoseconds since 1970."""
        groups = self._groups(sorted(episodes, key=_is_human))
        left = Counter(one.task for one in episodes)
        chosen: dict[str, KeptEpisode] = {}

        def choose(one: KeptEpisode) -> int:
            """Its bytes if it goes."""
            if one.id in chosen or left[one.task] <= self.min_episodes_per_task or self._protects(one, now_ns):
                return 0
            chosen[one.id] = one
            left[one.task] -= 1
            return one.bytes

        for _, bound, some in groups:
            for one in some:
                if one.outcome in self.drop_outcomes or _is_older(one, bound.max_age_s, now_ns):
                    choose(one)
        for _, bound, some in groups:
            size = sum(one.bytes for one in some if one.id not in chosen)
            for one in some:
                if bound.max_bytes is None or size <= bound.max_bytes:
                    break
                size -= choose(one)
        return list(chosen.values())

    def warning(self, episodes: Sequence[KeptEpisode]) -> str:
        """What to say when human data alone fills the budget of all, of a task or of a source, '' otherwise."""
        keeps = self.keep_human or self.keep_demonstrations
        filled = []
        for name, bound, some in self._groups(episodes):
            size = sum(one.bytes for one in some if _is_human(one))
            # where people record all there is, and the oldest may go, nothing is pushed out by them
            only = not keeps and all(map(_is_human, some))
            if bound.max_bytes is not None and size and size >= bound.max_bytes and not only:
                filled.append(f"the {bound.max_bytes / 1e6:.0f} MB of {name}")
        if not filled:
            return ""
        return (
            f"episodes in which people acted fill {' and '.join(filled)} alone: "
            f"{'nothing else stays' if keeps else 'the oldest of them go'} there. Raise max_bytes"
            + (", or let the oldest go with keep_human and keep_demonstrations false." if keeps else ".")
        )

    def _groups(self, episodes: Sequence[KeptEpisode]) -> list[tuple[str, Bound, Sequence[KeptEpisode]]]:
        """What has a bound of its own, by name, and then all."""
        groups: list[tuple[str, Bound, Sequence[KeptEpisode]]] = []
        for task, bound in self.by_task.items():
            groups.append((f"task '{task}'", bound, [one for one in episodes if one.task == task]))
        for source, bound in self.by_source.items():
            groups.append((f"source '{source}'", bound, [one for one in episodes if one.source == source]))
        return [*groups, ("the buffer", self, episodes)]

    def _protects(self, one: KeptEpisode, now_ns: int) -> bool:
        return (
            (self.keep_human and one.human_steps > 0)
            or (self.keep_demonstrations and one.source == EpisodeSource.demonstration)
            or one.outcome in self.keep_outcomes
            # below 0: the wall clock was set back meanwhile, which says nothing of the episode
            or (one.outcome == "" and now_ns - one.wall_ns <= _STILL_RUNS_NS)
        )


def _is_human(one: KeptEpisode) -> bool:
    return one.human_steps > 0 or one.source == EpisodeSource.demonstration


def _is_older(one: KeptEpisode, max_age_s: float | None, now_ns: int) -> bool:
    return max_age_s is not None and now_ns - one.wall_ns > max_age_s * 1e9
