"""Who is on the other end of a CURVE connection: the ZAP handler (RFC 27) of the gateway.

ZAP is asked before a peer can say its name, and an operator has to know *which* robot was turned away. So a connection
with an unknown key is let in as a guest: encrypted, under no name, able to say one `Hello` and hear one `Rejection`
(`wire.transport.zmq_channel`), and nothing else. pyzmq's own authenticator can only cut it without a word.
"""

from __future__ import annotations

import logging
from pathlib import Path

import zmq
from zmq.utils import z85

from wire.transport.keys import authorised

log = logging.getLogger(__name__)

GUEST = "?"
"""starts the user id of a peer whose key is not filed; its public key follows"""


class Authenticator:
    """Answers each handshake with the name the peer's key is filed under."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Path) -> None:
        self._keys = keys
        self._known = authorised(keys)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def poll(self) -> None:
        """Answer the handshakes that wait."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            if len(frames) < 7 or frames[5] != b"CURVE":
                log.error("refused a handshake that is not CURVE, from %s.", frames[3:4])
                self.socket.send_multipart(
                    [b"1.0", frames[1] if len(frames) > 1 else b"", b"400", b"refused", b"", b""]
                )
                continue
            self.socket.send_multipart([frames[0], frames[1], b"200", b"OK", self._name(frames[6]).encode(), b""])

    def close(self) -> None:
        self.socket.close()

    def _name(self, key: bytes) -> str:
        public = z85.encode(key)
        if public not in self._known:
            # Keys may be filed while the gateway runs; a guest's handshake is rare enough to look again.
            self._known = authorised(self._keys)
        return self._known.get(public, GUEST + public.decode())
