"""The trainer's view of the buffer: segments that the ledger names, decoded once and kept in memory.

What may be imitated (HG-DAgger, Kelly et al. 2019, arXiv 1810.02890): steps of a human or a script, and every step of a
demonstration; never one at which the robot held. Only frames that such a step saw are decoded. Evaluation episodes are
never loaded: held-out seeds must stay held out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

import cv2
import msgspec
import numpy as np

from cloud_learner.buffer import sampler
from cloud_learner.buffer.columns import Column
from cloud_learner.buffer.control import HOLD, by_human
from cloud_learner.buffer.ledger import Ledger
from cloud_learner.buffer.rows import SegmentRow
from cloud_learner.buffer.store import SegmentStore
from wire.errors import ConfigError, Corrupt
from wire.messages import Segment
from wire.types import RobotSpec

log = logging.getLogger(__name__)
_KEPT_AFTER_EVICTION = 0.8


class ReplayStats(msgspec.Struct, frozen=True, eq=False):
    """What is in the cache. State and action statistics are of the imitable steps."""

    segments: int
    """segments loaded and not evicted"""
    episodes: int
    steps: int
    imitable_steps: int
    imitable_by_task: dict[str, int]
    frames: int
    """decoded frames"""
    bytes: int
    newest_row: int
    """ledger row of the newest segment looked at"""
    evicted_episodes: int
    corrupt_segments: int
    other_segments: int
    """left out: of another robot spec, of a task that is not trained, or of an evaluation"""
    state_mean: np.ndarray
    """float32[ds], 0 before the first imitable step"""
    state_std: np.ndarray
    """float32[ds], 1 before the first imitable step"""
    action_mean: np.ndarray
    """float32[da]"""
    action_std: np.ndarray
    """float32[da]"""


class Replay:
    """Cache and sampler over one robot spec. Not for several threads at once."""

    def __init__(
        self,
        ledger: Ledger,
        store: SegmentStore,
        spec: RobotSpec,
        tasks: Mapping[str, str],
        horizon: int = 16,
        capacity_bytes: int = 2 * 1024**3,
        ticks_ahead: tuple[int, ...] = (),
    ) -> None:
        """`tasks`: instruction by task name; other tasks are left out. `ticks_ahead`: growing; see `ahead` of a batch.

        Above `capacity_bytes` the oldest episodes are forgotten, demonstrations last; the store keeps them all.
        """
        if not tasks or horizon < 1 or capacity_bytes < 1:
            raise ConfigError("replay: at least one task, a horizon of 1 and a capacity of 1 byte are needed.")
        self._ledger, self._store, self._spec = ledger, store, spec
        self.tasks = tuple(tasks)
        self.horizon = horizon
        self.ticks_ahead = ticks_ahead
        self.capacity_bytes = capacity_bytes
        self._instructions = tuple(tasks.values())
        self._cameras = tuple(camera.name for camera in spec.cameras)
        self._steps = {
            "state": Column(np.float32, (spec.state_dim,)),
            "executed": Column(np.float32, (spec.action_dim,)),
            "following": Column(np.int64),
            "imitable": Column(np.bool_),
            "task": Column(np.int64),
            "actor": Column(np.uint8),
            "version": Column(np.int32),
            "frame_age": Column(np.float32),
            "frame": Column(np.int64, (len(self._cameras),)),
        }
        self._frame_time = Column(np.int64, (len(self._cameras),))
        self._owner = Column(np.int64)
        self._pixels = {c.name: Column(np.uint8, (c.height, c.width, 3)) for c in spec.cameras}
        self._pixel_owner = {camera: Column(np.int64) for camera in self._cameras}
        self._episodes: dict[str, _Episode] = {}
        self._numbers = 0
        self._finished: Counter[str] = Counter()
        self._jpeg_bytes = 0
        self._index: sampler.Index | None = None
        self.newest_row = 0
        self._evicted = self._corrupt = self._other = 0

    # --- loading --------------------------------------------------------------------------------------------------

    def refresh(self, limit: int = 256) -> int:
        """Load up to `limit` segments that were committed since the last call; how many were looked at.

        A damaged segment is logged, counted and left out. Raises `StorageError` if the ledger or store cannot be read.
        """
        rows = self._ledger.segments_after(self.newest_row, limit)
        for row in rows:
            wanted = row.spec_hash == self._spec.hash and row.task in self.tasks and row.source != "evaluation"
            if wanted:
                self._load(row)
            else:
                self._other += 1
            self.newest_row = row.row
        return len(rows)

    def _load(self, row: SegmentRow) -> None:
        try:
            segment = self._store.read(row.path, row.sha256)
        except Corrupt as error:
            self._corrupt += 1
            log.error("segment %s is left out of training: %s", row.id, error)
            return
        episode = self._episodes.get(row.episode)
        if episode is None:
            self._numbers += 1
            episode = _Episode(self._numbers, row.source == "demonstration", self._cameras)
            self._episodes[row.episode] = episode
        episode.segments += 1
        for camera, frames in segment.frames.items():
            for time, image in zip(frames.times_ns.tolist(), frames.encoded, strict=True):
                episode.encoded[camera][time] = image
                self._jpeg_bytes += len(image)
        if segment.steps:
            self._append(segment, episode)
        self._resolve(episode)
        if segment.last:
            episode.end = segment.first_tick + segment.steps
        if episode.steps == episode.end:
            self._finished[row.source] += 1
            # nothing more can refer to these
            self._drop_encoded(episode)
        if self.bytes > self.capacity_bytes:
            self._evict()

    def _append(self, segment: Segment, episode: _Episode) -> None:
        steps = segment.steps
        imitable = segment.actor != HOLD if episode.demonstration else by_human(segment.actor)
        times: np.ndarray = np.empty((steps, len(self._cameras)), np.int64)
        for c, camera in enumerate(self._cameras):
            times[:, c] = segment.frame_times_ns[camera]
        age_ns = segment.times_ns - times.min(1) if self._cameras else np.zeros(steps)
        first = len(self._owner)
        following = np.arange(first + 1, first + steps + 1)
        following[-1] = -1
        for name, values in (
            ("state", segment.state),
            ("executed", segment.executed),
            ("following", following),
            ("imitable", imitable),
            ("task", np.full(steps, self.tasks.index(segment.episode.task))),
            ("actor", segment.actor),
            ("version", segment.version),
            ("frame_age", age_ns / self._spec.period_ns),
            ("frame", np.full(times.shape, -1)),
        ):
            self._steps[name].append(values)
        self._frame_time.append(times)
        self._owner.append(np.full(steps, episode.number))
        # join the neighbours, whichever of them came first
        links = self._steps["following"].rows
        begin, end = segment.first_tick, segment.first_tick + steps
        if (before := episode.last_step.get(begin)) is not None:
            links[before] = first
        if (after := episode.first_step.get(end)) is not None:
            links[first + steps - 1] = after
        episode.first_step[begin] = first
        episode.last_step[end] = first + steps - 1
        episode.steps += steps
        if imitable.any():
            self._index = None
        if self._cameras:
            episode.unresolved = np.concatenate([episode.unresolved, first + np.flatnonzero(imitable)])

    def _resolve(self, episode: _Episode) -> None:
        """Find, and decode once, the frames that imitable steps saw; what has not come yet is tried again later."""
        steps = episode.unresolved
        if not len(steps):
            return
        self._index = None
        frame, time = self._steps["frame"].rows, self._frame_time.rows
        for c, camera in enumerate(self._cameras):
            for moment in np.unique(time[steps, c]).tolist():
                number = episode.decoded[camera].get(moment)
                if number is None:
                    image = episode.encoded[camera].pop(moment, None)
                    if image is None:
                        continue
                    self._jpeg_bytes -= len(image)
                    number = self._decode(image, camera, episode)
                    episode.decoded[camera][moment] = number
                frame[steps[time[steps, c] == moment], c] = number
        episode.unresolved = steps[(frame[steps] == -1).any(1)]

    def _decode(self, image: bytes, camera: str, episode: _Episode) -> int:
        """Index of the decoded frame, -2 if it cannot be decoded: steps that saw it are then left out."""
        pixels = self._pixels[camera]
        decoded = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)
        if decoded is None or decoded.shape != pixels.rows.shape[1:]:
            log.error("a frame of camera '%s' cannot be decoded; the steps that saw it are left out.", camera)
            return -2
        self._pixel_owner[camera].append(np.array([episode.number]))
        return pixels.append(decoded[None, :, :, ::-1])

    # --- forgetting -----------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Memory of the cached steps and frames."""
        columns = (*self._steps.values(), self._frame_time, self._owner, *self._pixels.values())
        return sum(column.nbytes for column in columns) + self._jpeg_bytes

    def _evict(self) -> None:
        """Forget whole episodes, oldest first and demonstrations last, until a fifth of the capacity is free."""
        cost = np.bincount(self._owner.rows, minlength=self._numbers + 1) * (
            self._frame_time.rows.strides[0] + 8 + sum(column.rows.strides[0] for column in self._steps.values())
        )
        for camera, owner in self._pixel_owner.items():
            cost += np.bincount(owner.rows, minlength=len(cost)) * self._pixels[camera].rows.strides[0]
        excess = self.bytes - self.capacity_bytes * _KEPT_AFTER_EVICTION
        gone: list[int] = []
        for name, episode in sorted(self._episodes.items(), key=lambda item: (item[1].demonstration, item[1].number)):
            if excess <= 0:
                break
            if episode.demonstration:
                log.warning("replay: %d bytes are too few; a demonstration is forgotten too.", self.capacity_bytes)
            excess -= int(cost[episode.number]) + self._drop_encoded(episode)
            gone.append(episode.number)
            del self._episodes[name]
        self._evicted += len(gone)
        log.info("replay: %d episodes forgotten to stay below %d bytes.", len(gone), self.capacity_bytes)
        self._compact(np.array(gone, np.int64))

    def _compact(self, gone: np.ndarray) -> None:
        stays = ~np.isin(self._owner.rows, gone)
        # the last entry is what -1 maps to
        step_to = np.append(np.where(stays, np.cumsum(stays) - 1, -1), -1)
        links = self._steps["following"].rows
        links[:] = step_to[links]
        frame = self._steps["frame"].rows
        frame_to = {}
        for c, (camera, owner) in enumerate(self._pixel_owner.items()):
            kept = ~np.isin(owner.rows, gone)
            to = frame_to[camera] = np.cumsum(kept) - 1
            frame[:, c] = np.where(frame[:, c] >= 0, to[frame[:, c]] if len(to) else -1, frame[:, c])
            self._pixels[camera].keep(np.flatnonzero(kept))
            owner.keep(np.flatnonzero(kept))
        kept_steps = np.flatnonzero(stays)
        for column in (*self._steps.values(), self._frame_time, self._owner):
            column.keep(kept_steps)
        for episode in self._episodes.values():
            episode.move(step_to, frame_to)
        self._index = None

    def _drop_encoded(self, episode: _Episode) -> int:
        size = sum(len(image) for images in episode.encoded.values() for image in images.values())
        self._jpeg_bytes -= size
        for images in episode.encoded.values():
            images.clear()
        return size

    # --- sampling -------------------------------------------------------------------------------------------------

    def sample(
        self, batch: int, rng: np.random.Generator, recent: sampler.Recent = sampler.EVENLY
    ) -> dict[str, object]:
        """`batch` windows, with replacement, as `sampler` documents; an equal share of each task that has data.

        Raises `InvalidData` while there is nothing to imitate.
        """
        return self._gather(sampler.draw(self._current_index(), batch, rng, recent))

    def sample_grouped(
        self,
        batch_frames: int,
        ticks_per_frame: int,
        rng: np.random.Generator,
        recent: sampler.Recent = sampler.EVENLY,
    ) -> dict[str, object]:
        """`batch_frames` sets of frames and, behind each, `ticks_per_frame` windows that start at a step that saw it.

        Every frame of a task is as likely as every other, and so is every step behind it. Without cameras each step is
        alone behind its (empty) frame; use `sample` then. Raises `InvalidData` while there is nothing to imitate.
        """
        return self._gather(sampler.draw_grouped(self._current_index(), batch_frames, ticks_per_frame, rng, recent))

    @property
    def imitable_steps(self) -> int:
        """Cached steps at which a window may start."""
        return self._current_index().count

    @property
    def cached_segments(self) -> int:
        """Segments loaded and not forgotten."""
        return sum(episode.segments for episode in self._episodes.values())

    def finished(self, source: str) -> int:
        """Episodes of that source that were loaded whole since the start, forgotten ones included."""
        return self._finished[source]

    def states(self) -> np.ndarray:
        """float32[n, ds]: states of the imitable steps, for normalisation."""
        return self._steps["state"].rows[self._steps["imitable"].rows]

    def stats(self) -> ReplayStats:
        index = self._current_index()
        imitable = self._steps["imitable"].rows
        state, action = self.states(), self._steps["executed"].rows[imitable]
        some = len(state) > 0
        return ReplayStats(
            segments=self.cached_segments,
            episodes=len(self._episodes),
            steps=len(self._owner),
            imitable_steps=index.count,
            imitable_by_task={self.tasks[t]: len(s) for t, s in zip(index.tasks, index.starts, strict=True)},
            frames=sum(len(column) for column in self._pixels.values()),
            bytes=self.bytes,
            newest_row=self.newest_row,
            evicted_episodes=self._evicted,
            corrupt_segments=self._corrupt,
            other_segments=self._other,
            state_mean=state.mean(0, dtype=np.float64).astype(np.float32) if some else np.zeros(state.shape[1], "f4"),
            state_std=state.std(0, dtype=np.float64).astype(np.float32) if some else np.ones(state.shape[1], "f4"),
            action_mean=action.mean(0, dtype=np.float64).astype(np.float32)
            if some
            else np.zeros(action.shape[1], "f4"),
            action_std=action.std(0, dtype=np.float64).astype(np.float32) if some else np.ones(action.shape[1], "f4"),
        )

    def _views(self) -> sampler.Steps:
        return sampler.Steps(**{name: column.rows for name, column in self._steps.items()})

    def _current_index(self) -> sampler.Index:
        if self._index is None:
            self._index = sampler.build_index(self._views())
        return self._index

    def _gather(self, chosen: np.ndarray) -> dict[str, object]:
        pixels = {camera: column.rows for camera, column in self._pixels.items()}
        return sampler.gather(self._views(), chosen, self.horizon, self.ticks_ahead, pixels, self._instructions)


class _Episode:
    """What must be remembered of an episode while more of it may come."""

    def __init__(self, number: int, demonstration: bool, cameras: tuple[str, ...]) -> None:
        self.number = number
        """grows with the order of loading"""
        self.demonstration = demonstration
        self.segments = 0
        self.steps = 0
        self.end = -1
        """number of ticks of the whole episode, -1 until its last segment came"""
        self.first_step: dict[int, int] = {}
        """flat index of the first step of each segment, by its tick"""
        self.last_step: dict[int, int] = {}
        """flat index of the last step of each segment, by the tick after it"""
        self.encoded: dict[str, dict[int, bytes]] = {camera: {} for camera in cameras}
        """frames by camera and time that no imitable step saw yet"""
        self.decoded: dict[str, dict[int, int]] = {camera: {} for camera in cameras}
        """index of a decoded frame by camera and time, -2 for one that cannot be decoded"""
        self.unresolved: np.ndarray = np.zeros(0, np.int64)
        """flat indices of imitable steps that wait for a frame"""

    def move(self, step_to: np.ndarray, frame_to: Mapping[str, np.ndarray]) -> None:
        """Follow the flat arrays after rows were forgotten."""
        self.first_step = {tick: int(step_to[step]) for tick, step in self.first_step.items()}
        self.last_step = {tick: int(step_to[step]) for tick, step in self.last_step.items()}
        self.unresolved = step_to[self.unresolved]
        for camera, numbers in self.decoded.items():
            to = frame_to[camera]
            self.decoded[camera] = {time: int(to[n]) if n >= 0 else n for time, n in numbers.items()}
