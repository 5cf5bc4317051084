"""Join tokens: by one, once, a robot files the public key of a pair that it made itself.

The token's text carries the gateway's public key, so that nobody else can be joined by mistake, and a secret, of which
the gateway keeps the hash. `tokens/` in its key directory has a record of each token, and beside it, once it was used,
the key that it was used for.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import logging
import os
import secrets
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec
from zmq.utils import z85

from wire.errors import ConfigError
from wire.identity.refusals import RefusalReason
from wire.transport.keys import (
    GATEWAY,
    KeyRecord,
    Teaching,
    check_name,
    file_key,
    load_pair,
    make_keys,
    now,
    public_path,
    read_record,
    write_atomically,
)
from wire.types import Role

log = logging.getLogger(__name__)

_TOKENS = "tokens"
_SECRET_BYTES = 20


class TokenRecord(msgspec.Struct, frozen=True):
    """What a gateway keeps of a token."""

    name: str
    role: Role
    digest: str
    """SHA-256 of its secret"""
    made: datetime.datetime
    expires: datetime.datetime
    teaches: tuple[Teaching, ...] = ()


class Invitation(NamedTuple):
    """What a token's text says."""

    name: str
    secret: bytes
    gateway: bytes
    """its public key, Z85"""


class TokenRefusal(NamedTuple):
    """Why a token lets nobody in; for the operator, not for whoever sent it."""

    reason: RefusalReason
    name: str
    """of the robot that the token was made for, '' when nobody knows"""
    text: str


def make_token(
    directory: Path, name: str, minutes: float, role: Role = Role.edge, teaches: tuple[Teaching, ...] = ()
) -> str:
    """The text of a new token for `name`, good for so many minutes and for one use; `teaches` as in `KeyRecord`.

    Raises `ConfigError` for a name that has a key already, `OSError`.
    """
    if public_path(directory, check_name(name)).exists():
        raise ConfigError(
            f"'{name}' has a key already. If it is to have another one, first "
            f"`vla-fleet keys revoke {name} --keys {directory}`."
        )
    make_keys(directory, [GATEWAY])
    secret, made = secrets.token_bytes(_SECRET_BYTES), now()
    record = TokenRecord(name, role, _digest(secret), made, made + datetime.timedelta(minutes=minutes), teaches)
    path = _path(directory, record.digest)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(record)) + b"\n", 0o600)
    told = z85.decode(load_pair(directory, GATEWAY).public) + secret + name.encode()
    return base64.urlsafe_b64encode(zlib.crc32(told).to_bytes(4, "big") + told).rstrip(b"=").decode()


def read_token(text: str) -> Invitation:
    """What a token says. Raises `ConfigError` for one that is not whole."""
    try:
        data = base64.b64decode(text.strip() + "=" * (-len(text.strip()) % 4), b"-_", validate=True)
        check, told = data[:4], data[4:]
        if zlib.crc32(told).to_bytes(4, "big") != check:
            raise ValueError("its checksum is wrong")
        gateway, secret, name = told[:32], told[32 : 32 + _SECRET_BYTES], told[32 + _SECRET_BYTES :].decode()
        return Invitation(check_name(name), secret, z85.encode(gateway))
    except (ValueError, binascii.Error) as error:
        raise ConfigError(
            f"--join: this is no join token, or not all of it ({error}). Copy the whole line that "
            "`vla-fleet keys token ROBOT` printed."
        ) from error


def open_tokens(directory: Path) -> list[TokenRecord]:
    """Those that somebody could still join by, by name."""
    found = [_read(path) for path in (directory / _TOKENS).glob("*.json") if not _user(path)]
    still = (token for token in found if token is not None and token.expires > now())
    return sorted(still, key=lambda token: (token.name, token.expires))


def redeem(directory: Path, secret: bytes, public: str) -> KeyRecord | TokenRefusal:
    """File `public` under the name that the token with this `secret` was made for. The same key may ask again, for its
    answer may have been lost; but what was filed and taken away since is not filed again. Raises `OSError`, and files
    nothing then that would not be filed again."""
    path = _path(directory, _digest(secret))
    if (token := _read(path)) is None:
        return TokenRefusal(RefusalReason.bad_token, "", "it brought a join token that this gateway did not make.")
    again = f"`vla-fleet keys token {token.name} --keys {directory}` makes another one."
    if not (user := _user(path)) and token.expires < now():
        text = f"its join token has expired at {token.expires:%Y-%m-%d %H:%M} UTC. {again}"
        return TokenRefusal(RefusalReason.expired_token, token.name, text)
    filed = public_path(directory, token.name)
    if filed.exists() and not _is_of(filed, public):
        reason = RefusalReason.used_token if user else RefusalReason.wrong_name
        text = "was used already, by another key" if user else "is for a name that has got a key in the meantime"
        return TokenRefusal(reason, token.name, f"its join token {text}. If that was not you: revoke the key.")
    if not user:
        user = _use(path, public)
    if user != public:
        text = f"its join token was used already, by another key, which was revoked since. {again}"
        return TokenRefusal(RefusalReason.used_token, token.name, text)
    record = KeyRecord(token.name, token.role, public, now(), token.teaches)
    if not filed.exists():
        was_filed = path.with_suffix(".filed")
        if was_filed.exists() or token.expires < now():
            text = f"its join token was used already, and the key that it was used for was taken away since. {again}"
            return TokenRefusal(RefusalReason.used_token, token.name, text)
        file_key(directory, record)
        was_filed.touch()
    return record


def _read(path: Path) -> TokenRecord | None:
    """None, and a word in the log, for a file that is no record of a token."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TokenRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.error("nobody joins by %s: %s", path, error)
        return None


def _is_of(filed: Path, public: str) -> bool:
    try:
        return read_record(filed).public == public
    except ConfigError:
        return False


def _digest(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def _path(directory: Path, digest: str) -> Path:
    return directory / _TOKENS / f"{digest}.json"


def _user(path: Path) -> str:
    """The key that a token was used for, '' when it was not."""
    try:
        return path.with_suffix(".used").read_text()
    except FileNotFoundError:
        return ""


def _use(path: Path, public: str) -> str:
    """Note whom a token is used for, unless somebody was first; whoever was."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(public)
    try:
        with temporary.open() as file:
            os.fsync(file.fileno())
        os.link(temporary, path.with_suffix(".used"))
    except FileExistsError:
        return _user(path)
    finally:
        temporary.unlink()
    return public
