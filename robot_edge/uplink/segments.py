"""Segments on the robot: made of the steps and frames of an episode."""

from __future__ import annotations

import copy
from collections import deque

import cv2
import msgspec
import numpy as np

from wire.errors import InvalidDataError
from wire.messages.gateway import ACTORS, CameraFrames, RecordedChunk, Segment, TerminalObservation
from wire.messages.recording import FlowTrace
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
        self._traces: list[FlowTrace] = []
        self._frames: dict[str, deque[tuple[int, bytes]]] = {}
        self._outcome = ""
        self._ended: tuple[int, TerminalObservation | None] | None = None

    def frame(self, camera: str, time_ns: int, image: np.ndarray) -> bytes:
        """A frame that the next steps refer to; given once. The JPEG that is kept of it."""
        jpeg = encode_jpeg(image)
        self._frames.setdefault(camera, deque()).append((time_ns, jpeg))
        return jpeg

    def step(
        self, step: Step, chunk: RecordedChunk | None = None, outcome: str = "", trace: FlowTrace | None = None
    ) -> Segment | None:
        """Add a step, the chunk it is the first to act by with its trace, and how the episode ended with it; the
        segment before it when that one is full, or when ticks between the two were not recorded: those of a segment
        follow each other.
        """
        full = len(self._steps) >= self._max_steps
        gap = bool(self._steps) and step.tick != self._steps[-1].tick + 1
        segment = self._cut("", False, self._steps[-1].time_ns, step.frames) if full or gap else None
        self._steps.append(step)
        if chunk is not None:
            self._chunks.append(chunk)
        if trace is not None:
            self._traces.append(trace)
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
        traces, self._traces = tuple(self._traces), []
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
        recovery = np.array([s.recovery for s in steps], bool)
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
            traces=traces or msgspec.UNSET,
            recovery=recovery if recovery.any() else msgspec.UNSET,
        )
        self._index += 1
        return segment
