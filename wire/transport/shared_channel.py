"""A connection between two processes of one computer through shared memory.

Two rings of bytes lie in one mapped file, one per direction, each with one writer and one reader. A record is complete
before the ring's head moves past it, so a writer that dies in the middle leaves nothing. A FIFO beside the file is each
end's doorbell: it wakes who waits in `wait_any`, and the kernel tells through it that an end has died.

Either end may be killed and come back. Every start of an end has a number, and a record is addressed from one start to
one start: what the dead one wrote is not delivered once its successor is there, nor is what was meant for it.

Pictures of requests do not travel: they lie in a `FrameRing`, and the other end looks at them there.

An end that `polls` looks at its own pace and is rung for only now and then, to see whether it lives: a message to it
costs no system call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from wire.codec import decode, encode
from wire.errors import ConfigError, InvalidDataError, MessageTooLargeError, ProtocolError, storage_errors
from wire.messages import Message
from wire.messages.local import ChunkRequest, ChunkSample, FrameRecorded, SharedFrameEnvelope, ThinkRequest
from wire.transport.frame_ring import FrameRing, SharedFrame, without_previews
from wire.transport.shared_memory import MARK_BYTES, map_file
from wire.types import Frame

log = logging.getLogger(__name__)

_LINE = 64
"""bytes of a cache line: numbers that two processes write never share one"""
_FIRST_RECORD = 4096
_RECORD = struct.Struct("=4Q")
"""a record's header: payload bytes, checksum, the writer's start, the reader's start"""
_HEADER = _RECORD.size
_UNSEEN_TIMEOUT_S = 0.01
_ALIVE_S = 0.05
"""how long an end that polls is taken to live after it was rung for"""


class SharedChannel:
    """One end of a connection; `bind` tells the two ends apart. Keeps the `Channel` protocol; of each end one
    thread sends and one receives.

    A message sent in the very moment in which the other end starts may be lost, as one sent just before it is.
    """

    def __init__(
        self,
        path: Path,
        *,
        bind: bool,
        capacity_bytes: int = 4 * 1024 * 1024,
        polls: bool = False,
        ring: FrameRing | None = None,
    ) -> None:
        """Make or find the file `path` and become its one or other end; the predecessor at this end is replaced.

        `capacity_bytes` of each direction; both ends must give the same. `polls`: this end calls `recv` often enough by
        itself and needs no waking; `wait_any` is not for it. What the other end sends in the `_ALIVE_S` after this one
        died is taken for sent. `ring`: where images of requests lie; those that it cannot take travel, without their
        previews. Raises `ConfigError` for a file of other sizes, `StorageError` when it cannot be made.
        """
        self._path = path
        self._capacity = capacity_bytes = -(-capacity_bytes // _LINE) * _LINE
        self._map = map_file(
            path, f"vla-fleet connection 2, {capacity_bytes} bytes", _FIRST_RECORD + 2 * capacity_bytes
        )
        self._bytes = memoryview(self._map)
        header = self._header = self._bytes[MARK_BYTES:_FIRST_RECORD].cast("Q")
        out, back = (0, 1) if bind else (1, 0)
        step = _LINE // 8
        self._me, self._peer = out * step, back * step
        self._out_head, self._out_tail = (2 + 2 * out) * step, (3 + 2 * out) * step
        self._in_head, self._in_tail = (2 + 2 * back) * step, (3 + 2 * back) * step
        self._out_polled, self._in_polled = (6 + out) * step, (6 + back) * step
        self._out = self._bytes[_FIRST_RECORD + out * capacity_bytes :][:capacity_bytes]
        self._in = self._bytes[_FIRST_RECORD + back * capacity_bytes :][:capacity_bytes]
        self.lost = 0
        """records that were damaged, of a dead end, or came when their frames had been overwritten: they are dropped"""
        self._ring = ring
        self._polls = polls
        self._alive_until = 0.0
        header[self._in_polled] = polls
        header[self._me] += 1
        self._start = header[self._me]
        # What lies in the ring was meant for the predecessor.
        header[self._in_tail] = header[self._in_head]
        self._doorbell_there = path.with_name(f"{path.name}.{'connect' if bind else 'bind'}")
        self._peer_doorbell_fd = -1
        self.socket, self._keep_fd = _open_doorbell(path.with_name(f"{path.name}.{'bind' if bind else 'connect'}"))
        """file descriptor that can be read when there may be a message; for `wait_any`"""

    def send(self, message: Message) -> bool:
        """False when nobody is there, the ring is full, or a frame was overwritten while it was copied.

        Raises `MessageTooLargeError` for what can never fit.
        """
        if self._ring is not None and isinstance(message, ChunkRequest | ThinkRequest | ChunkSample):
            message = _by_reference(message, self._ring)
        data = encode(message)
        size = -(-(_HEADER + len(data)) // _LINE) * _LINE
        if size > self._capacity:
            raise MessageTooLargeError(
                f"a {type(message).__name__} of {len(data)} bytes does not fit the {self._capacity} bytes of "
                f"{self._path}: give both ends a larger capacity_bytes."
            )
        if isinstance(message, FrameRecorded) and isinstance(message.frame, SharedFrame) and not message.frame.intact:
            return False
        header = self._header
        if header[self._me] != self._start:
            return False
        peer, head = header[self._peer], header[self._out_head]
        if peer == 0 or size > self._capacity - (head - header[self._out_tail]):
            return False
        at = head % self._capacity
        payload = at + _HEADER
        _RECORD.pack_into(self._out, at, len(data), zlib.crc32(data), self._start, peer)
        # A record starts on a cache line, so the header is in one piece; the payload may go on at the ring's start.
        first = min(len(data), self._capacity - payload)
        self._out[payload : payload + first] = data if first == len(data) else data[:first]
        if first < len(data):
            self._out[: len(data) - first] = data[first:]
        header[self._out_head] = head + size
        if header[self._out_polled]:
            now = time.monotonic()
            if now < self._alive_until:
                return True
            self._alive_until = now + _ALIVE_S if self._wake_peer() else 0.0
            return self._alive_until > 0
        return self._wake_peer()

    def recv(self) -> Message | None:
        """The next message that has come. What is damaged is logged and dropped."""
        while True:
            data = self._pop()
            if data is None and not self._polls:
                # The bell is silenced only when all is read, and then looked once more: it cannot be missed.
                with contextlib.suppress(BlockingIOError):
                    os.read(self.socket, 65536)
                data = self._pop()
            if data is None:
                return None
            if (message := self._decoded(data)) is not None:
                return message

    def close(self) -> None:
        """Leave the connection; the file stays for the other end and for a successor."""
        for descriptor in (self.socket, self._keep_fd, self._peer_doorbell_fd):
            if descriptor >= 0:
                os.close(descriptor)
        for view in (self._in, self._out, self._header, self._bytes):
            view.release()
        self._map.close()

    def _decoded(self, data: bytes) -> Message | None:
        """The message, its images where they lie; None, and a word in the log, for what is none or came too late."""
        try:
            message = decode(data)
        except (ProtocolError, MessageTooLargeError) as error:
            self.lost += 1
            log.error("dropped a message on %s: %s", self._path, error)
            return None
        if self._ring is None or not isinstance(message, SharedFrameEnvelope):
            return message
        try:
            frames = {camera: self._ring.view(camera, number) for camera, number in message.frames.items()}
        except InvalidDataError as error:
            raise ConfigError(f"the other process of this robot speaks of another robot: {error}") from error
        late = sorted(camera for camera, frame in frames.items() if frame is None)
        if late:
            self.lost += 1
            log.warning(
                "a request waited so long that its frames of %s were overwritten; it is dropped (%d so far).",
                late,
                self.lost,
            )
            return None
        return _with_images(message.message, frames)

    def _wake_peer(self) -> bool:
        """Whether somebody is there to hear the bell."""
        try:
            if self._peer_doorbell_fd < 0:
                self._peer_doorbell_fd = os.open(self._doorbell_there, os.O_WRONLY | os.O_NONBLOCK)
            os.write(self._peer_doorbell_fd, b"!")
        except BlockingIOError:
            # It has been rung thousands of times and is still loud.
            return True
        except OSError:
            # ENOENT, ENXIO: nobody has come yet. EPIPE: the one who was there is dead; a successor has the same bell.
            return False
        return True

    def _pop(self) -> bytes | None:
        """The next record that is meant for this start of this end."""
        header = self._header
        while header[self._me] == self._start:
            tail, head = header[self._in_tail], header[self._in_head]
            if head == tail:
                return None
            at = tail % self._capacity
            length, checksum, sender, reader = _RECORD.unpack_from(self._in, at)
            size = -(-(_HEADER + length) // _LINE) * _LINE
            if head < tail or size > head - tail or head - tail > self._capacity:
                self._drop_damaged(head, "its length is impossible")
                continue
            if reader != self._start or sender != header[self._peer]:
                header[self._in_tail] = tail + size
                self.lost += 1
                continue
            payload = at + _HEADER
            first = min(length, self._capacity - payload)
            data = self._read_payload(payload, first, length, checksum)
            if data is None:
                self._drop_damaged(tail + size, "its checksum is wrong")
                continue
            header[self._in_tail] = tail + size
            return data
        return None

    def _read_payload(self, payload: int, first: int, length: int, checksum: int) -> bytes | None:
        # On a processor with weak memory order the head may be seen a moment before the bytes.
        deadline = 0.0
        while True:
            data = bytes(self._in[payload : payload + first])
            if first < length:
                data += bytes(self._in[: length - first])
            if zlib.crc32(data) == checksum:
                return data
            now = time.monotonic()
            deadline = deadline or now + _UNSEEN_TIMEOUT_S
            if now > deadline:
                return None

    def _drop_damaged(self, go_on_at: int, why: str) -> None:
        self.lost += 1
        log.error("dropped what came on %s: %s.", self._path, why)
        self._header[self._in_tail] = go_on_at


def _by_reference(message: ChunkRequest | ThinkRequest | ChunkSample, ring: FrameRing) -> Message:
    """The request with the places of its images instead of them, if all lie in `ring`."""
    frames = {camera: ring.refer(camera, frame) for camera, frame in message.observation.images.items()}
    known = {camera: number for camera, number in frames.items() if number is not None}
    if len(known) < len(frames):
        return msgspec.structs.replace(message, observation=without_previews(message.observation))
    return SharedFrameEnvelope(_with_images(message, {}), known)


def _with_images(
    message: ChunkRequest | ThinkRequest | ChunkSample, images: Mapping[str, Frame | None]
) -> ChunkRequest | ThinkRequest | ChunkSample:
    return msgspec.structs.replace(message, observation=msgspec.structs.replace(message.observation, images=images))


def _open_doorbell(path: Path) -> tuple[int, int]:
    """(descriptor to read, one that keeps the FIFO open for writing so that its poll never reports a hang-up)."""
    with storage_errors("making a doorbell", path):
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        hear = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        return hear, os.open(path, os.O_WRONLY | os.O_NONBLOCK)
