"""Which stored episodes go into a LeRobot dataset."""

from __future__ import annotations

import msgspec

from cloud_learner.buffer.check import OUTCOMES, SOURCES
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import EpisodeRow
from cloud_learner.buffer.sampling.segment_index import on_side
from wire.errors import ConfigError, suggest
from wire.messages.gateway import ACTORS
from wire.types import RobotSpec

UNFINISHED = "unfinished"


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which episodes, and which parts of them; an empty tuple asks for all."""

    ids: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    sources: tuple[str, ...] = ("online", "demonstration")
    outcomes: tuple[str, ...] = tuple(outcome for outcome in OUTCOMES if outcome != "discarded")
    """`EpisodeOutcome`s, or unfinished"""
    actors: tuple[str, ...] = ()
    """keep only the steps that these chose; each run of them becomes an episode of its own"""
    newest: int = 0
    """at most so many episodes, the newest; 0 for all"""
    until_row: int = 0
    """nothing that was committed after this ledger row, such as that of a snapshot; 0 for all"""
    validation: float = 0.0
    """share of the episodes that are held out, as `DatasetConfig` has it"""
    held_out: bool = False
    """those of them, and no others"""


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
    if not 0 <= selection.validation < 1 or (selection.held_out and not selection.validation):
        raise ConfigError(f"validation {selection.validation}: give a share below 1, above 0 for what is held out.")
    of_spec = [row for row in ledger.episodes(limit=2**31 - 1) if row.spec_hash == spec.hash]
    if selection.until_row:
        of_spec = _as_of(ledger, of_spec, selection.until_row)
    found = [
        row
        for row in of_spec
        if (not selection.ids or row.id in selection.ids)
        and (not selection.tasks or row.task in selection.tasks)
        and (not selection.sources or row.source in selection.sources)
        and (not selection.outcomes or (row.outcome or UNFINISHED) in selection.outcomes)
        and on_side(row.id, selection.validation, selection.held_out)
    ]
    if not found:
        tasks = ", ".join(sorted({row.task for row in of_spec})[:20]) or "none"
        raise ConfigError(
            f"no episode matches {_said(selection)}: of robot spec {spec.hash} there are {len(of_spec)} "
            f"(tasks: {tasks})."
        )
    return (found[: selection.newest] if selection.newest else found)[::-1]


def _as_of(ledger: Ledger, episodes: list[EpisodeRow], until_row: int) -> list[EpisodeRow]:
    """Those that had begun by then; whichever got a segment later had not ended."""
    first = ledger.first_rows([row.id for row in episodes if row.newest_row > until_row])
    return [
        row if row.newest_row <= until_row else msgspec.structs.replace(row, outcome="")
        for row in episodes
        if row.newest_row <= until_row or first.get(row.id, row.newest_row) <= until_row
    ]


def _said(selection: Selection) -> str:
    given = {name: value for name, value in msgspec.structs.asdict(selection).items() if value}
    return ", ".join(
        f"{name}: {' '.join(value) if isinstance(value, tuple) else value}" for name, value in given.items()
    )
