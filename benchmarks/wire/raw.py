"""The least that a server of segments can do: a ROUTER with CURVE that takes what comes, writes it, and answers.

    python -m benchmarks.wire.raw KEYS [DIRECTORY]

Prints where it listens and ends with its standard input. What lies in the socket is one batch, up to the bytes that the
gateway stores at once; with a DIRECTORY it is written to one file with one flush, files of 64 MiB as the journal's. It
reads nothing of what it gets, and any key will do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import zmq

from wire.codec import MAX_MESSAGE_BYTES
from wire.transport.keys import GATEWAY, load_pair

_SEGMENTS_AT_ONCE, _BYTES_AT_ONCE, _FILE_BYTES = 64, 32 * 1024 * 1024, 64 * 1024 * 1024


class RawReceiver:
    """Its socket, and the file it writes to."""

    def __init__(self, keys: Path, directory: Path | None) -> None:
        pair = load_pair(keys, GATEWAY)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        options: dict[int, int | bytes] = {
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: pair.secret,
            zmq.CURVE_PUBLICKEY: pair.public,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
        }
        for option, value in options.items():
            self.socket.setsockopt(option, value)
        self.socket.bind("tcp://127.0.0.1:*")
        self._directory, self._file, self._end, self._number = directory, -1, _FILE_BYTES, 0

    def poll(self) -> None:
        """Take a batch and answer it."""
        peers: list[bytes] = []
        batch: list[memoryview] = []
        size = 0
        while len(batch) < _SEGMENTS_AT_ONCE and size < _BYTES_AT_ONCE and self.socket.poll(0):
            peer, data = self.socket.recv_multipart(copy=False)
            peers.append(peer.bytes)
            batch.append(data.buffer)
            size += len(data.buffer)
        if batch and self._directory is not None:
            self._write(batch, size)
        for one in peers:
            self.socket.send_multipart([one, b""])

    def _write(self, batch: list[memoryview], size: int) -> None:
        if self._end >= _FILE_BYTES:
            self._begin()
        written = os.writev(self._file, batch)
        if written != size:
            raise OSError(f"{written} of {size} bytes were written")
        os.fdatasync(self._file)
        self._end += size

    def _begin(self) -> None:
        assert self._directory is not None
        before, self._number, self._end = self._directory / f"{self._number}", self._number + 1, 0
        if self._file >= 0:
            os.close(self._file)
            before.unlink()
        self._file = os.open(self._directory / f"{self._number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)


def main() -> None:
    keys, *directory = map(Path, sys.argv[1:])
    receiver = RawReceiver(keys, directory[0] if directory else None)
    sys.stdout.write(receiver.socket.getsockopt_string(zmq.LAST_ENDPOINT) + "\n")
    sys.stdout.flush()
    poller = zmq.Poller()
    poller.register(receiver.socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while sys.stdin.fileno() not in dict(poller.poll()):
        receiver.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
