"""One stored episode as a file of its own, for `hal.drivers.replay` and for carrying to another machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.store.store import SegmentStore
from wire.episode_file import EpisodeHeader, write_episode
from wire.errors import ConfigError, CorruptDataError, suggest
from wire.identity.sealing import held_cameras


class ExportedEpisode(msgspec.Struct, frozen=True):
    """What was written."""

    path: Path
    steps: int
    frames: int
    bytes: int
    outcome: str
    """'' when the episode has not ended yet"""


def export_episode(
    ledger: Ledger, store: SegmentStore, episode_id: str, path: Path, instruction: str = ""
) -> ExportedEpisode:
    """Write the episode, pictures as the JPEGs they were stored as. `instruction`: default the task's name.

    Raises `ConfigError` for an episode that is not there, not whole yet, or a file that is; `CorruptDataError` when it
    is damaged; `StorageError` when it cannot be read or written now.
    """
    row = ledger.episode(episode_id)
    if row is None or row.pruned_ns:
        newest = [episode.id for episode in ledger.episodes(limit=200)]
        gone = "was pruned" if row is not None else "is not stored"
        raise ConfigError(
            f"episode '{episode_id}' {gone}.{suggest(episode_id, newest)} `vla-fleet buffer tail` names the newest."
        )
    if path.exists():
        raise ConfigError(f"{path} is there already; choose another name or remove it.")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent}; make it first.")
    rows = [segment.row for segment in ledger.segments_of(episode_id)]
    found = store.read(rows)
    if found.damaged:
        raise CorruptDataError(
            f"episode '{episode_id}' cannot be exported: {next(iter(found.damaged.values()))} "
            "`vla-fleet buffer verify` tells more."
        )
    if found.elsewhere:
        raise ConfigError(
            f"episode '{episode_id}' lies in the journal of another machine; run this there, or when it was sealed."
        )
    segments = [found.segments[row] for row in rows if row in found.segments]
    if not segments:
        raise ConfigError(f"episode '{episode_id}' has no steps; choose another.")
    if held := {camera for segment in segments for camera in held_cameras(segment)}:
        raise ConfigError(
            f"episode '{episode_id}': a relay holds back pictures of {', '.join(sorted(held))}. Ask for them first: "
            f"`vla-fleet buffer ask {episode_id}`."
        )
    last = segments[-1]
    header = EpisodeHeader(
        spec=store.spec(last.episode.spec_hash),
        episode=last.episode,
        instruction=instruction or last.episode.task,
        outcome=last.outcome,
        steps=last.first_tick + last.steps,
    )
    size = write_episode(path, header, segments)
    frames = sum(len(camera.encoded) for segment in segments for camera in segment.frames.values())
    return ExportedEpisode(path, header.steps, frames, size, last.outcome)
