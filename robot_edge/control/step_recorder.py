"""Passes what happened to the uplink, which makes it durable. Never blocks the control loop."""

from __future__ import annotations

import logging
from collections import deque

from wire.errors import MessageTooLargeError
from wire.messages.local import EpisodeEnded, EpisodeStarted, FrameRecorded, StepRecorded
from wire.transport.channel import Channel
from wire.transport.frame_ring import private, without_preview
from wire.types import Episode, Observation, Step

log = logging.getLogger(__name__)

_Record = EpisodeStarted | StepRecorded | FrameRecorded | EpisodeEnded


class StepRecorder:
    """Sends every step, and every frame once; keeps what the uplink cannot take yet and says so through `healthy`."""

    def __init__(self, channel: Channel, backlog: int = 24) -> None:
        """`backlog`: messages kept before `healthy` turns false, which makes the robot hold."""
        self._channel = channel
        self._limit = backlog
        self._waiting: deque[_Record] = deque()
        self._episode: Episode | None = None
        self._frame_ns: dict[str, int] = {}
        self.previews = True

    @property
    def healthy(self) -> bool:
        """Whether steps leave this process."""
        if self._waiting:
            self._flush()
        return len(self._waiting) < self._limit

    def start(self, episode: Episode) -> None:
        self._episode = episode
        self._frame_ns = {}
        self._put(EpisodeStarted(episode))

    def step(self, observation: Observation, step: Step) -> None:
        """Record one tick; frames not yet recorded go first, so that a step never refers to what did not come.

        Raises `InvalidDataError`, and records no step, when a frame was overwritten before it could be taken.
        """
        assert self._episode is not None
        for camera, frame in observation.images.items():
            if frame.time_ns > self._frame_ns.get(camera, -1):
                self._frame_ns[camera] = frame.time_ns
                sent = frame if self.previews else without_preview(frame)
                self._put(FrameRecorded(self._episode.id, camera, sent))
        self._put(StepRecorded(self._episode.id, step))

    def end(self, outcome: str, now_ns: int) -> None:
        assert self._episode is not None
        self._put(EpisodeEnded(self._episode.id, outcome, now_ns))
        self._episode = None

    def _put(self, record: _Record) -> None:
        waiting = bool(self._waiting)
        if not waiting and self._sent(record):
            return
        if isinstance(record, FrameRecorded):
            # What it shows may be overwritten while it waits.
            record = FrameRecorded(record.episode_id, record.camera, private(record.frame))
        self._waiting.append(record)
        if waiting:
            self._flush()

    def _flush(self) -> None:
        while self._waiting and self._sent(self._waiting[0]):
            self._waiting.popleft()

    def _sent(self, record: _Record) -> bool:
        try:
            return self._channel.send(record)
        except MessageTooLargeError as error:
            if not isinstance(record, FrameRecorded) or record.frame.preview is None:
                raise
            log.warning("camera '%s': pictures for people are left out: %s", record.camera, error)
            self.previews = False
            plain = FrameRecorded(record.episode_id, record.camera, without_preview(record.frame))
            return self._channel.send(plain)
