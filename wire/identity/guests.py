"""Peers whose key is not filed: one word, one answer, or silence."""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path

import zmq

from wire.codec import decode
from wire.errors import (
    ConfigError,
    MessageTooLargeError,
    ProtocolError,
    ProtocolVersionError,
    StorageError,
    storage_errors,
)
from wire.identity.admission import TcpConnection
from wire.identity.join_tokens import TokenRefusal, redeem
from wire.identity.keyring import Keyring
from wire.identity.refusals import RefusalReason, Refusals
from wire.messages import Message
from wire.messages.gateway import Hello, Rejection
from wire.messages.joining import Join, Joined
from wire.transport.keys import is_name

log = logging.getLogger(__name__)

_MOST = 1000
_BYTES = 64 * 1024
_MESSAGES = 60
"""one that goes on is cut; until then it need not connect again and again"""


class Guests:
    """Of one port. Those who say too much, or have no right to be told why they are refused, are cut."""

    def __init__(self, keys: Path, keyring: Keyring, refusals: Refusals, *, enrols: bool) -> None:
        """`enrols`: whether a robot may join here by a token."""
        self.port = 0
        """where they are"""
        self._keys, self._keyring, self._refusals, self._enrols = keys, keyring, refusals, enrols
        self._here: OrderedDict[bytes, tuple[TcpConnection, int]] = OrderedDict()
        """by connection: how often it spoke"""

    def hear(
        self, connection: bytes, tcp: TcpConnection, public: str, address: str, frames: list[zmq.Frame]
    ) -> Message | None:
        """What is answered to the first word of a guest: the reason and the way in, or that its key is filed now."""
        _, spoke = self._here.pop(connection, (tcp, 0))
        self._here[connection] = tcp, spoke + 1
        if len(self._here) > _MOST:
            self._here.popitem(last=False)[1][0].cut(self.port)
        whole = len(frames) == 2 and len(frames[1]) <= _BYTES
        if whole and 0 < spoke < _MESSAGES:
            return None
        if not whole:
            self._refusals.counts[RefusalReason.too_large] += 1
        answer = self._answer(public, address, frames[1]) if whole and not spoke else None
        if answer is None:
            tcp.cut(self.port)
        if isinstance(answer, Joined):
            del self._here[connection]
        return answer

    def _answer(self, public: str, address: str, word: zmq.Frame) -> Message | None:
        if self._keyring.revoked(public) is not None:
            # It was told of when it was cut.
            self._refusals.counts[RefusalReason.revoked_key] += 1
            return None
        try:
            message = decode(word.bytes)
        except ProtocolVersionError as error:
            # Nothing is said that the answer's first byte does not say.
            self._refusals.note(RefusalReason.version, "unknown", f"from {address}: {error}", address)
            return Rejection(str(error))
        except (ProtocolError, MessageTooLargeError):
            self._refusals.counts[RefusalReason.malformed] += 1
            return None
        if isinstance(message, Join):
            return self._enrol(public, address, message)
        name = message.name if isinstance(message, Hello) and is_name(message.name) else ""
        return self._reject(public, address, name)

    def _reject(self, public: str, address: str, name: str) -> Rejection:
        """The name that it gives itself helps people to find it."""
        why, file = f"its key {public} is not filed at the gateway. If it may connect,", name or "NAME"
        there = f"--keys {self._keys}`"
        self._refusals.note(
            RefusalReason.unknown_key,
            name or "unknown",
            f"from {address}: {why} let it join by what `vla-fleet keys token {file} {there} prints, or make its key "
            f"with `vla-fleet keys {file} {there} and copy {file}.key_secret to its machine.",
            address,
        )
        return Rejection(
            f"'{name or 'unknown'}' is refused: {why} have `vla-fleet keys token {file}` run there and join with what "
            "it prints: `vla-fleet edge --join`."
        )

    def _enrol(self, public: str, address: str, join: Join) -> Joined | None:
        """File the key of whoever has a token; why not is for the operator alone."""
        if not self._enrols:
            self._refusals.counts[RefusalReason.bad_token] += 1
            return None
        try:
            with storage_errors("filing the key of a robot that joins", self._keys):
                found = redeem(self._keys, join.secret, public)
        except (StorageError, ConfigError) as error:
            log.error("nobody can join: %s", error)
            return None
        if isinstance(found, TokenRefusal):
            text = f"from {address}: {found.text}"
            self._refusals.note(found.reason, found.name or "unknown", text, address)
            return None
        self._keyring.refresh(now=True)
        log.info("'%s' has joined from %s with the key %s.", found.name, address, public)
        return Joined(found.name, found.role)
