"""A process that loads blocks for another one: `python -m cloud_learner.buffer.loading.decoding.worker <socket>`.

Says `Ready` when its buffer is open, then answers each `LoadTask` with a `Loaded` or `LoadFailed`, in order. It ends
when the other end of its socket closes, in the middle of whatever it does: nobody waits for its answer then.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
from pathlib import Path

import cv2
import msgspec
import numpy as np

from cloud_learner.buffer.loading.decoding.block import Loaded, LoadJob, Read, load_block
from cloud_learner.buffer.loading.decoding.loader import read_others
from cloud_learner.buffer.loading.frame_cache import SharedFrames, attach
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.location import BufferLocation
from wire import codec
from wire.errors import FleetError, StorageError
from wire.messages.gateway import Segment

_LOOK_FOR_PARENT_S = 2.0


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message: where the buffer is and where frames go."""

    data: str
    ledger: str
    store: str
    layout: Layout
    frames: tuple[SharedFrames, ...]


class LoadTask(msgspec.Struct, frozen=True, tag=True):
    """One job."""

    job: LoadJob
    room: tuple[bytes, ...]
    """int32[n] numbers of frames by shape"""
    given: dict[int, bytes]
    """encoded segments by ledger row that need not be read"""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The buffer is open."""


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """A job that could not be done now, or (-1) a buffer that cannot be opened."""

    job: int
    reason: str


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Begin | LoadTask)
_answers = msgspec.msgpack.Decoder(Ready | Loaded | LoadFailed)


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """One message, whole."""
    data = _encoder.encode(message)
    connection.sendall(len(data).to_bytes(8, "little") + data)


def receive_answer(connection: socket.socket) -> Ready | Loaded | LoadFailed | None:
    """The next message of a worker, None when it ended."""
    data = _receive(connection)
    return None if data is None else _answers.decode(data)


def _receive(connection: socket.socket) -> bytearray | None:
    head = _receive_exactly(connection, 8)
    return None if head is None else _receive_exactly(connection, int.from_bytes(head, "little"))


def _receive_exactly(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        try:
            some = connection.recv_into(view[got:])
        except ConnectionError:
            return None
        if not some:
            return None
        got += some
    return data


def run(connection: socket.socket) -> None:
    """Work until the other end closes."""
    requests: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests), daemon=True).start()
    begin = _requests.decode(requests.get())
    if not isinstance(begin, Begin):
        raise StorageError(f"a loading process got {type(begin).__name__} before Begin.")
    try:
        _, store = BufferLocation(data=Path(begin.data), ledger=begin.ledger, store=begin.store).open_reader()
    except FleetError as error:
        send(connection, LoadFailed(-1, str(error)))
        return
    frames = [attach(mapping) for mapping in begin.frames]
    send(connection, Ready())
    while True:
        work = _requests.decode(requests.get())
        if isinstance(work, LoadTask):
            send(connection, _do(work, frames, store.read, begin.layout))


def _do(work: LoadTask, frames: list[np.ndarray], read: Read, layout: Layout) -> Loaded | LoadFailed:
    given: dict[int, Segment] = {row: codec.decode(data) for row, data in work.given.items()}  # type: ignore[misc]
    room = tuple(np.frombuffer(rows, np.int32) for rows in work.room)
    try:
        return load_block(work.job, room, frames, lambda rows: read_others(rows, given, read), layout)
    except StorageError as error:
        return LoadFailed(work.job.number, str(error))


def _listen(connection: socket.socket, requests: queue.SimpleQueue[bytearray]) -> None:
    """Pass messages on; end the process when nobody is there any more."""
    parent = os.getppid()
    while True:
        # The other end may be kept open by a copy of the parent that outlives it.
        while not select.select([connection], [], [], _LOOK_FOR_PARENT_S)[0]:
            if os.getppid() != parent:
                os._exit(0)
        data = _receive(connection)
        if data is None:
            os._exit(0)
        requests.put(data)


if __name__ == "__main__":
    # The parent closes the socket when it ends; Ctrl-C in a terminal reaches every process at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cv2.setNumThreads(0)
    # the other end may close while an answer is on its way
    with contextlib.suppress(ConnectionError):
        run(socket.socket(fileno=int(sys.argv[1])))
