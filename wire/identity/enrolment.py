"""A robot joins a fleet: it makes a pair of keys, of which only the public one leaves its computer."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import zmq

from wire.errors import ConfigError, ProtocolVersionError, RejectedError, WireError, storage_errors
from wire.identity.join_tokens import Invitation, read_token
from wire.messages.joining import Join, Joined
from wire.transport.keys import (
    GATEWAY,
    Credentials,
    KeyPair,
    KeyRecord,
    check_role,
    file_key,
    load_pair,
    load_public,
    now,
    public_path,
    write_secret,
)
from wire.transport.zmq_channel import ZmqClient, wait_any
from wire.types import Role

log = logging.getLogger(__name__)

ANSWER_S = 10.0
_CUTS = 3
"""once it may be the network; a gateway does not say why it cuts"""
_PENDING = "key_joining"
"""how the file of a pair ends that may not be filed yet: the token is good for no other key, once it was used"""


def join_fleet(directory: Path, token: str, gateway: str, answer_s: float = ANSWER_S) -> str:
    """The robot's name, with its keys in `directory`. With what is there from this token before nothing is done.

    Raises `ConfigError` for keys of another gateway or what is no token, `RejectedError` when the gateway does not take
    the token, `WireError` when there is none.
    """
    invitation = read_token(token)
    name = invitation.name
    if public_path(directory, GATEWAY).exists() and load_public(directory, GATEWAY) != invitation.gateway:
        raise ConfigError(
            f"--join: {public_path(directory, GATEWAY)} is the key of another gateway than the token's. Give a "
            "directory of its own with --keys."
        )
    if (directory / f"{name}.key_secret").exists():
        load_pair(directory, name)
        log.info("'%s' has a key in %s; the token is not used.", name, directory)
        return name
    with storage_errors("keeping the robot's keys", directory):
        pair = _own_pair(directory, name)
        answer = _ask(gateway, invitation, pair, answer_s)
        file_key(directory, KeyRecord(GATEWAY, Role.gateway, invitation.gateway.decode(), now()))
        write_secret(directory, name, KeyPair(pair.public, pair.secret, check_role(answer.role)))
        (directory / f"{name}.{_PENDING}").unlink()
    log.info("'%s' has joined; it starts without the token from now on: `vla-fleet edge --name %s`.", name, name)
    return name


def _own_pair(directory: Path, name: str) -> KeyPair:
    """On the disk before anybody hears of it: what the gateway has filed can be used after a crash."""
    if not (directory / f"{name}.{_PENDING}").exists():
        public, secret = zmq.curve_keypair()
        write_secret(directory, name, KeyPair(public, secret, Role.edge), _PENDING)
    return load_pair(directory, name, _PENDING)


def _ask(gateway: str, invitation: Invitation, pair: KeyPair, answer_s: float) -> Joined:
    with contextlib.closing(ZmqClient(gateway, invitation.name, Credentials(pair, invitation.gateway))) as channel:
        shown, sent, deadline = channel.handshake, 0, time.monotonic() + answer_s
        while not shown.refusal and shown.lost < _CUTS and time.monotonic() < deadline:
            # Once for each connection: it is either answered or cut.
            if sent <= shown.lost and channel.send(Join(invitation.secret)):
                sent = shown.lost + 1
            wait_any([channel], 0.05)
            if isinstance(answer := channel.recv(), Joined):
                return answer
        if channel.refused[ProtocolVersionError.reason]:
            raise WireError(shown.refusal)
        if shown.succeeded:
            raise RejectedError(
                f"the gateway at {gateway} does not take the token: it was used, has expired or was never made there. "
                f"The gateway's log and page say which. `vla-fleet keys token {invitation.name}` makes another one."
            )
        raise WireError(shown.refusal or f"no gateway of this token answers at {gateway}: does it run, is that it?")
