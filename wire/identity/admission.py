"""Who is on the other end of a connection, and how one is cut."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import NamedTuple, Self

import zmq
from zmq.utils import z85

from wire.identity.keyring import Keyring
from wire.identity.refusals import AddressLimit, RefusalReason, Refusals

_HANDSHAKES_AT_ONCE = 64
_GUESTS_AT_ONCE = 20
_GUEST_EVERY_S = 1.0
_IN, _NO = (b"200", b"OK"), (b"400", b"")


class Authenticator:
    """Says whose key it is on the other end of a CURVE connection (ZAP, RFC 27): the user id of its messages.

    ZAP is asked before a peer can say its name, an operator has to know *which* robot was turned away, and one that
    joins has no key here yet. So a connection with an unknown key is let in as a guest: encrypted, under no name, able
    to say one word and hear one answer. How many from one address is bounded; a revoked key is not let in.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keyring: Keyring, refusals: Refusals) -> None:
        self._keyring, self._refusals = keyring, refusals
        self._guests = AddressLimit(_GUESTS_AT_ONCE, _GUEST_EVERY_S)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def poll(self) -> None:
        """Answer the handshakes that wait, or many of them."""
        for _ in range(_HANDSHAKES_AT_ONCE):
            if not self.socket.poll(0):
                return
            # libzmq itself asks, and only about CURVE: a server with a key ends any other handshake before.
            version, request, _domain, address, _identity, _mechanism, key = self.socket.recv_multipart()
            public = z85.encode(key)
            status, text = _IN if self._admits(public.decode(), address.decode()) else _NO
            self.socket.send_multipart([version, request, status, text, public, b""])

    def close(self) -> None:
        self.socket.close()

    def _admits(self, public: str, address: str) -> bool:
        if self._keyring.record(public) is not None:
            return True
        if (record := self._keyring.revoked(public)) is not None:
            self._refusals.note(
                RefusalReason.revoked_key, record.name, f"from {address}: its key was revoked.", address
            )
            return False
        if not self._guests.take(address):
            # They are told one by one while they are few.
            self._refusals.counts[RefusalReason.too_many_unknown] += 1
            return False
        return True


class TcpConnection(NamedTuple):
    """What a message came by, so that it can be cut: libzmq itself cuts nobody."""

    fd: int
    """of libzmq; -1 when it is gone"""
    inode: int
    """tells it from a later one under the same number"""

    @classmethod
    def of(cls, frame: zmq.Frame) -> Self:
        """The one that a message came by."""
        return cls.at(int(frame.get(zmq.SRCFD)))

    @classmethod
    def at(cls, fd: int) -> Self:
        """The one that has this number now."""
        with contextlib.suppress(OSError):
            return cls(fd, os.fstat(fd).st_ino)
        return cls(-1, 0)

    def cut(self, port: int) -> None:
        """End it, if it is still there and one of ours at `port`; both ends hear of that as of any that is lost."""
        with contextlib.suppress(OSError):
            # A number of our own: what it stands for cannot change between the look and the cut.
            own = os.dup(self.fd)
            try:
                if os.fstat(own).st_ino == self.inode:
                    connection = socket.socket(fileno=own)
                    try:
                        here = connection.getsockname()
                        if isinstance(here, tuple) and here[1] == port:
                            connection.shutdown(socket.SHUT_RDWR)
                    finally:
                        connection.detach()
            finally:
                os.close(own)
