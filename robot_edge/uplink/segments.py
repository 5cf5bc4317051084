"""Segments on the robot: made of steps and frames, and durable until they are acknowledged."""

from __future__ import annotations

import copy
import sqlite3
from collections import deque
from pathlib import Path

import cv2
import msgspec
import numpy as np

from wire.codec import decode, encode
from wire.errors import (
    CorruptDataError,
    DiskFullError,
    InvalidDataError,
    NotWritableError,
    StorageError,
    storage_errors,
)
from wire.messages.gateway import ACTORS, CameraFrames, RecordedChunk, Segment, TerminalObservation
from wire.types import Episode, EpisodeOutcome, Step


def encode_jpeg(image: np.ndarray, quality: int = 95) -> bytes:
    """JPEG of `image`, uint8[h, w, 3] RGB."""
    ok, data = cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not ok:
        raise InvalidDataError(f"an image of shape {image.shape} and dtype {image.dtype} cannot be encoded as JPEG.")
    return data.tobytes()


class SegmentBuilder:
    """Collects the steps of one episode and cuts them into segments of at most `max_steps`."""

    def __init__(self, episode: Episode, max_steps: int) -> None:
        self.episode = episode
        self._max_steps = max_steps
        self._index = 0
        self._steps: list[Step] = []
        self._chunks: list[RecordedChunk] = []
        self._frames: dict[str, deque[tuple[int, bytes]]] = {}
        self._outcome = ""
        self._ended: tuple[int, TerminalObservation | None] | None = None

    def frame(self, camera: str, time_ns: int, image: np.ndarray) -> bytes:
        """A frame that the next steps refer to; given once. The JPEG that is kept of it."""
        jpeg = encode_jpeg(image)
        self._frames.setdefault(camera, deque()).append((time_ns, jpeg))
        return jpeg

    def step(self, step: Step, chunk: RecordedChunk | None = None, outcome: str = "") -> Segment | None:
        """Add a step, the chunk it is the first to act by, and how the episode ended with it; the segment before it
        when that one is full, or when ticks between the two were not recorded: those of a segment follow each other.
        """
        full = len(self._steps) >= self._max_steps
        gap = bool(self._steps) and step.tick != self._steps[-1].tick + 1
        segment = self._cut("", False, self._steps[-1].time_ns, step.frames) if full or gap else None
        self._steps.append(step)
        if chunk is not None:
            self._chunks.append(chunk)
        self._outcome = outcome
        return segment

    @property
    def awaits_verdict(self) -> bool:
        """Whether all of it is there, and somebody may still say how it ended."""
        return self._ended is not None

    def await_verdict(self, outcome: str, ended_ns: int, terminal: TerminalObservation | None) -> None:
        """It has ended, as `outcome` unless somebody says otherwise."""
        self._outcome, self._ended = outcome, (ended_ns, terminal)

    def judge(self, outcome: str) -> None:
        """Somebody has said how it ended."""
        self._outcome = outcome

    def end(self, outcome: str, now_ns: int, terminal: TerminalObservation | None = None) -> Segment | None:
        """The last segment, or None for an episode without a step.

        Its last step says whether the episode was terminated or truncated, also when nobody knew at that step: a
        success that a person saw afterwards is terminated.
        """
        if not self._steps:
            return None
        last = self._steps[-1]
        # Should control have died when all but the terminal observation, or a person's last word, was there.
        outcome = self._outcome or outcome
        now_ns, terminal = self._ended or (now_ns, terminal)
        over = outcome == EpisodeOutcome.success
        if not last.terminated and (over or not last.truncated):
            self._steps[-1] = msgspec.structs.replace(last, terminated=over, truncated=not over)
        return self._cut(outcome, True, now_ns, None, terminal)

    def broken_off(self) -> Segment | None:
        """What `end` would give if nothing came any more. The episode goes on."""
        if not self._steps:
            return None
        twin = copy.copy(self)
        twin._steps = self._steps.copy()
        twin._frames = {camera: queue.copy() for camera, queue in self._frames.items()}
        return twin.end(EpisodeOutcome.aborted, self._steps[-1].time_ns)

    def _cut(
        self,
        outcome: str,
        last: bool,
        closed_ns: int,
        next_frames: dict[str, int] | None,
        terminal: TerminalObservation | None = None,
    ) -> Segment:
        steps, self._steps = self._steps, []
        chunks, self._chunks = tuple(self._chunks), []
        frames = {}
        for camera, queue in self._frames.items():
            # The frame that only the step to come refers to goes with that step's segment.
            newest = (
                steps[-1].frames.get(camera, -1)
                if next_frames is not None
                else max(t for t, _ in queue)
                if queue
                else -1
            )
            taken = []
            while queue and queue[0][0] <= newest:
                taken.append(queue.popleft())
            frames[camera] = CameraFrames(np.array([t for t, _ in taken], np.int64), tuple(data for _, data in taken))
        segment = Segment(
            id=f"{self.episode.id}/{self._index}",
            episode=self.episode,
            index=self._index,
            first_tick=steps[0].tick,
            last=last,
            outcome=outcome,
            closed_ns=closed_ns,
            times_ns=np.array([s.time_ns for s in steps], np.int64),
            state=np.stack([s.state for s in steps]).astype(np.float32, copy=False),
            proposed=np.stack([s.proposed for s in steps]).astype(np.float32, copy=False),
            executed=np.stack([s.executed for s in steps]).astype(np.float32, copy=False),
            actor=np.array([ACTORS.index(s.actor.value) for s in steps], np.uint8),
            chunk_tick=np.array([s.chunk_tick for s in steps], np.int32),
            delay_ticks=np.array([s.delay_ticks for s in steps], np.int16),
            version=np.array([s.version for s in steps], np.int32),
            reward=np.array([s.reward for s in steps], np.float32),
            terminated=np.array([s.terminated for s in steps], bool),
            truncated=np.array([s.truncated for s in steps], bool),
            frame_times_ns={c: np.array([s.frames.get(c, -1) for s in steps], np.int64) for c in steps[0].frames},
            frames=frames,
            terminal=terminal,
            chunks=chunks,
        )
        self._index += 1
        return segment


class Spool:
    """Segments wait here until the gateway has acknowledged them: first in, first out; `forget` takes one out for good.

    Beside them lies what the episode ends with that goes on, in case its next segment never comes.

    SQLite does the hard part (atomic, durable, checked); a kill at any point leaves either the whole segment or none.
    Used by one process at a time.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the spool. Raises `StorageError` that says what to do."""
        self._path = path
        with storage_errors("opening the spool", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS segments (row INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,"
                " data BLOB NOT NULL)"
            )
            self._db.execute("CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL)")
            self._db.execute("CREATE TABLE IF NOT EXISTS running (ending BLOB NOT NULL)")
            # Nobody else writes here, so what a status asks for is known without asking the file.
            count, newest = self._db.execute("SELECT count(*), max(row) FROM segments").fetchone()
            steps = self._db.execute("SELECT value FROM counters WHERE name = 'steps'").fetchone()
            self._count: int = count
            self.newest: int = newest or 0
            """row of the newest segment ever put in, 0 when there was none"""
            self.steps_recorded: int = steps[0] if steps else 0
            """steps ever put in, acknowledged or not"""
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def __len__(self) -> int:
        return self._count

    def put(self, segment: Segment, ending: Segment | None = None) -> None:
        """Durable when this returns; nothing of it is kept when it raises.

        `ending`: the episode's last segment if this process dies before it puts the next one; None when it is over.
        """
        try:
            with self._db:
                put = self._db.execute("INSERT INTO segments (id, data) VALUES (?, ?)", (segment.id, encode(segment)))
                self._db.execute(
                    "INSERT INTO counters VALUES ('steps', ?)"
                    " ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                    (segment.steps,),
                )
                self._db.execute("DELETE FROM running")
                if ending is not None:
                    self._db.execute("INSERT INTO running VALUES (?)", (encode(ending),))
        except sqlite3.Error as error:
            raise self._explain(error) from error
        self.newest = put.lastrowid or self.newest
        self._count += 1
        self.steps_recorded += segment.steps

    def waiting(self, after: int, count: int) -> list[tuple[int, str]]:
        """(row, id) of up to `count` segments with a row above `after`, oldest first."""
        query = "SELECT row, id FROM segments WHERE row > ? ORDER BY row LIMIT ?"
        return self._db.execute(query, (after, count)).fetchall()

    def get(self, row: int) -> Segment | None:
        """The segment in `row`, or None if it was forgotten meanwhile."""
        found = self._db.execute("SELECT data FROM segments WHERE row = ?", (row,)).fetchone()
        if found is None:
            return None
        return self._decode(found[0], f"row {row}")

    def ending(self) -> Segment | None:
        """The `ending` that was put last: whoever opens the spool finds the end of what a dead process recorded."""
        found = self._db.execute("SELECT ending FROM running").fetchone()
        return None if found is None else self._decode(found[0], "the end of the running episode")

    def forget(self, ids: tuple[str, ...]) -> None:
        """Drop acknowledged segments. Raises `DiskFullError`, with nothing dropped: even forgetting needs some room."""
        try:
            with self._db:
                gone = self._db.executemany("DELETE FROM segments WHERE id = ?", [(segment_id,) for segment_id in ids])
        except sqlite3.Error as error:
            raise self._explain(error) from error
        self._count -= gone.rowcount

    def close(self) -> None:
        self._db.close()

    def _decode(self, data: bytes, what: str) -> Segment:
        segment = decode(data, stored=True)
        if not isinstance(segment, Segment):
            raise CorruptDataError(
                f"{what} in {self._path} is a {type(segment).__name__}. Move the file away to start anew."
            )
        return segment

    def _explain(self, error: sqlite3.Error) -> StorageError:
        text = str(error)
        if "full" in text:
            return DiskFullError(
                f"the spool {self._path}: the disk is full. Free some room; the robot holds until then."
            )
        if "readonly" in text or "unable to open" in text or "permission" in text:
            return NotWritableError(f"the spool {self._path} may not be written ({text}). Fix its permissions.")
        if "malformed" in text or "not a database" in text:
            return CorruptDataError(
                f"the spool {self._path} is damaged ({text}). Move it away; unsent segments in it are not lost."
            )
        return StorageError(f"the spool {self._path}: {text}.")
