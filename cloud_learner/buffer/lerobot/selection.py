"""Which stored episodes go into a LeRobot dataset."""

from __future__ import annotations

import msgspec

from cloud_learner.buffer.check import OUTCOMES, SOURCES
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import EpisodeRow
from wire.errors import ConfigError, suggest
from wire.messages.gateway import ACTORS
from wire.types import RobotSpec

UNFINISHED = "unfinished"


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which episodes, and which parts of them; an empty tuple asks for all."""

    ids: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    sources: tuple[str, ...] = ("online", "demonstration")
    outcomes: tuple[str, ...] = OUTCOMES
    """success, failure, aborted, unfinished"""
    actors: tuple[str, ...] = ()
    """keep only the steps that these chose; each run of them becomes an episode of its own"""
    newest: int = 0
    """at most so many episodes, the newest; 0 for all"""


class TransferProgress(msgspec.Struct, frozen=True):
    """How far an export or import is."""

    episodes: int
    of_episodes: int
    steps: int


class LeftOut(msgspec.Struct, frozen=True):
    """An episode, or part of one, that is not in the dataset."""

    episode: str
    reason: str


def select(ledger: Ledger, spec: RobotSpec, selection: Selection) -> list[EpisodeRow]:
    """The episodes of robots with `spec` that match, oldest first. Raises `ConfigError` when there is none."""
    for name, given, known in (
        ("source", selection.sources, SOURCES),
        ("outcome", selection.outcomes, (*OUTCOMES, UNFINISHED)),
        ("actor", selection.actors, ACTORS),
    ):
        for value in given:
            if value not in known:
                raise ConfigError(f"{name} '{value}' is none of {', '.join(known)}.{suggest(value, known)}")
    of_spec = [row for row in ledger.episodes(limit=2**31 - 1) if row.spec_hash == spec.hash]
    found = [
        row
        for row in of_spec
        if (not selection.ids or row.id in selection.ids)
        and (not selection.tasks or row.task in selection.tasks)
        and (not selection.sources or row.source in selection.sources)
        and (not selection.outcomes or (row.outcome or UNFINISHED) in selection.outcomes)
    ]
    if not found:
        tasks = ", ".join(sorted({row.task for row in of_spec})[:20]) or "none"
        raise ConfigError(
            f"no episode matches {_said(selection)}: of robot spec {spec.hash} there are {len(of_spec)} "
            f"(tasks: {tasks})."
        )
    return (found[: selection.newest] if selection.newest else found)[::-1]


def _said(selection: Selection) -> str:
    given = msgspec.structs.asdict(selection)
    return ", ".join(
        f"{name}: {' '.join(value)}" for name, value in given.items() if isinstance(value, tuple) and value
    )
