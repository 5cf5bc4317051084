"""Observations whose images lie in memory shared by the processes of a robot computer (`wire.transport.frame_ring`)."""

from __future__ import annotations

import logging

import msgspec

from wire.errors import ConfigError, InvalidDataError
from wire.messages import Message
from wire.messages.local import ChunkRequest, SharedFrameEnvelope, ThinkRequest
from wire.transport.channel import Channel
from wire.transport.frame_ring import FrameRing, SharedFrame, without_preview
from wire.types import Observation

log = logging.getLogger(__name__)


class SharedFrameChannel:
    """A line on which the images of requests travel by their place in a `FrameRing`; previews stay behind.

    Both ends see plain messages. What is no request passes as it is, and so does a request whose images the ring cannot
    take.
    """

    def __init__(self, channel: Channel, ring: FrameRing) -> None:
        self._channel = channel
        self._ring = ring
        self.socket = getattr(channel, "socket", None)
        """what `wait_any` waits for"""
        self.late = 0
        """requests that came when their frames had been overwritten, and were dropped"""

    def send(self, message: Message) -> bool:
        if isinstance(message, ChunkRequest | ThinkRequest):
            message = self._framed(message)
        return self._channel.send(message)

    def recv(self, timeout_s: float = 0.0) -> Message | None:
        while (message := self._channel.recv(timeout_s)) is not None:
            if not isinstance(message, SharedFrameEnvelope):
                return message
            whole = self._plain(message)
            if whole is not None:
                return whole
        return None

    def close(self) -> None:
        self._channel.close()

    def _framed(self, message: ChunkRequest | ThinkRequest) -> Message:
        seen = message.observation
        frames = {camera: self._ring.refer(camera, frame) for camera, frame in seen.images.items()}
        known = {camera: number for camera, number in frames.items() if number is not None}
        if len(known) < len(frames):
            return _with(message, without_previews(seen))
        return SharedFrameEnvelope(_with(message, Observation(seen.time_ns, seen.state, {}, seen.task)), known)

    def _plain(self, framed: SharedFrameEnvelope) -> Message | None:
        try:
            frames = {camera: self._ring.view(camera, number) for camera, number in framed.frames.items()}
        except InvalidDataError as error:
            raise ConfigError(f"the other process of this robot speaks of another robot: {error}") from error
        whole = {camera: frame for camera, frame in frames.items() if frame is not None}
        if len(whole) < len(frames):
            self.late += 1
            log.warning(
                "a request waited so long that its frames of %s were overwritten; it is dropped (%d so far).",
                sorted(set(frames) - set(whole)),
                self.late,
            )
            return None
        seen = framed.message.observation
        return _with(framed.message, Observation(seen.time_ns, seen.state, dict(whole), seen.task))


def intact(observation: Observation) -> bool:
    """Whether all images of `observation` are still those that were sent; ask after they have been used."""
    return all(frame.intact for frame in observation.images.values() if isinstance(frame, SharedFrame))


def without_previews(observation: Observation) -> Observation:
    """The observation as a policy needs it: pictures for people stay behind."""
    if all(frame.preview is None for frame in observation.images.values()):
        return observation
    images = {camera: without_preview(frame) for camera, frame in observation.images.items()}
    return Observation(observation.time_ns, observation.state, images, observation.task)


def _with(message: ChunkRequest | ThinkRequest, observation: Observation) -> ChunkRequest | ThinkRequest:
    return msgspec.structs.replace(message, observation=observation)
