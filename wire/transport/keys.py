"""CURVE keys (RFC 26): who may connect, as whom and as what.

A key directory holds `<name>.key_secret` for each local process, `public/<name>.key`, the record of everybody who may
connect, and `revoked/`, the records of those who may not any more. A peer's name and role are those of the record that
its public key is in; nobody can speak for another.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from wire.errors import ConfigError, storage_errors, suggest
from wire.types import Role

GATEWAY = "gateway"
KEY_ROLES = tuple(role for role in Role if role != Role.inference)
"""roles that a key can have"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_WORD = re.compile(r"[A-Za-z]+")
_PUBLIC = re.compile(rb"[!-~]{40}")


class Teaching(StrEnum):
    """What of an episode a robot's own word is enough for, without a lease or a job of the fleet."""

    script = "script"
    """a scripted operator in the robot's process acted"""
    beside = "beside"
    """a person beside the robot acted"""
    demonstrations = "demonstrations"
    """the episode is a demonstration"""


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair in Z85 text, 40 characters each, and what it was made for."""

    public: bytes
    secret: bytes
    role: Role


class Credentials(NamedTuple):
    """What a client needs of keys."""

    pair: KeyPair
    server_public: bytes


class KeyRecord(msgspec.Struct, frozen=True):
    """Whose a public key is."""

    name: str
    role: Role
    public: str
    """Z85 text, 40 characters"""
    made: datetime.datetime
    """when the pair was made, or the robot joined"""
    teaches: tuple[Teaching, ...] = ()
    """what is learned from this robot by its own word; anything else needs the fleet's record of who had it"""

    @property
    def may_teach(self) -> frozenset[Teaching]:
        """`teaches`, and what goes with the role."""
        scripted = (Teaching.script, Teaching.demonstrations) if self.role == Role.demonstrator else ()
        return frozenset((*self.teaches, *scripted))


def check_name(name: str) -> str:
    """`name` if it can name a robot or process, else `ConfigError`: it becomes a file name and a routing id."""
    if not is_name(name):
        raise ConfigError(
            f"'{name}' cannot be a name: use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit."
        )
    return name


def is_name(name: str) -> bool:
    """Whether `name` can name a robot or process."""
    return _NAME.fullmatch(name) is not None


def check_role(role: str) -> Role:
    """`role` if a key can have it, else `ConfigError`."""
    if role not in KEY_ROLES:
        raise ConfigError(f"no key is a {role!r}'s.{suggest(role, KEY_ROLES)} There are {', '.join(KEY_ROLES)}.")
    return Role(role)


def check_teaching(words: Collection[str]) -> tuple[Teaching, ...]:
    """These words as what a key may teach, each once and in order; none for `none`. Raises `ConfigError`."""
    for word in words:
        if word not in (*Teaching, "none"):
            known = (*Teaching, "none")
            raise ConfigError(
                f"--teaches {word!r}: there is no such right.{suggest(word, known)} Known: {', '.join(known)}."
            )
    return tuple(one for one in Teaching if one in words)


def default_role(name: str) -> Role:
    """What a key of this name is made for when nobody says: the role that is the name's first word, else a robot."""
    word = _WORD.match(name)
    return Role(word[0]) if word is not None and word[0] in KEY_ROLES else Role.edge


def make_keys(
    directory: Path, names: list[str], role: Role | None = None, teaches: Collection[Teaching] | None = None
) -> list[str]:
    """Make the missing key pairs for `names`, of `role` or of each name's own. Secret files are readable by their owner
    only. `teaches`: what they may teach, also those that are there; None leaves that as it is, nothing for a new one.
    Returns the names whose public key is filed here and whose secret is not: they stay as they are.

    Raises `ConfigError` for a secret without its public key: one that was taken out of `public/` does not come back.
    """
    elsewhere = []
    with storage_errors("making CURVE keys", directory):
        (directory / "public").mkdir(parents=True, exist_ok=True)
        for name in map(check_name, names):
            secret_file, public_file = directory / f"{name}.key_secret", public_path(directory, name)
            if public_file.exists():
                if not secret_file.exists():
                    elsewhere.append(name)
                if teaches is not None:
                    _let_teach(directory, read_record(public_file), tuple(teaches))
                continue
            if secret_file.exists():
                raise ConfigError(
                    f"{secret_file} has no public key at {public_file}: put that file back, or remove the secret to "
                    "have a new pair made."
                )
            public, secret = zmq.curve_keypair()
            as_what = role or default_role(name)
            write_secret(directory, name, KeyPair(public, secret, as_what))
            file_key(directory, KeyRecord(name, as_what, public.decode(), now(), tuple(teaches or ())))
    return elsewhere


def _let_teach(directory: Path, record: KeyRecord, teaches: tuple[Teaching, ...]) -> None:
    """A gateway that runs cuts the connections of a key whose record changed; they come back under the new one."""
    if record.teaches != teaches:
        file_key(directory, msgspec.structs.replace(record, teaches=teaches))


def now() -> datetime.datetime:
    """To the second, in UTC."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def public_path(directory: Path, name: str) -> Path:
    return directory / "public" / f"{name}.key"


def write_secret(directory: Path, name: str, pair: KeyPair, suffix: str = "key_secret") -> Path:
    """Write a pair for its owner alone; its path. Raises `OSError`."""
    path = directory / f"{name}.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, b"%s\n%s\n%s\n" % (pair.public, pair.secret, pair.role.encode()), 0o600)
    return path


def file_key(directory: Path, record: KeyRecord, folder: str = "public", stem: str = "") -> Path:
    """Enter `record` among those who may connect, or in another `folder`; its path. Raises `OSError`."""
    path = directory / folder / f"{stem or record.name}.key"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(record)) + b"\n", 0o644)
    return path


def load_pair(directory: Path, name: str, suffix: str = "key_secret") -> KeyPair:
    """The key pair of `name`, or `ConfigError` that says how to come by one."""
    path = directory / f"{check_name(name)}.{suffix}"
    try:
        public, secret, *role = path.read_bytes().split()
    except (OSError, ValueError) as error:
        if public_path(directory, name).exists():
            raise ConfigError(
                f"no usable secret key for '{name}' at {path}, though its public key is there: the secret was moved "
                f"away. Bring it back, or give '{name}' a new pair: `vla-fleet keys revoke {name} --keys {directory}`, "
                f"then `vla-fleet keys {name} --keys {directory}`."
            ) from error
        raise ConfigError(
            f"no usable secret key for '{name}' at {path}. Make one with `vla-fleet keys {name} --keys {directory}` on "
            "the gateway's machine and copy it here, or have a robot join with a token: `vla-fleet keys token` there, "
            "`vla-fleet edge --join TOKEN` here."
        ) from error
    if len(public) != 40 or len(secret) != 40:
        raise ConfigError(f"{path} is not a CURVE key pair; remove it and make a new one with `vla-fleet keys`.")
    return KeyPair(public, secret, check_role(role[0].decode(errors="replace")) if role else default_role(name))


def load_public(directory: Path, name: str) -> bytes:
    """The public key of `name` (40 bytes of Z85)."""
    path = public_path(directory, check_name(name))
    try:
        return read_record(path).public.encode()
    except OSError as error:
        raise ConfigError(f"no public key of '{name}' at {path}; copy it from the gateway's machine.") from error


def read_record(path: Path) -> KeyRecord:
    """The record in a file `<name>.key`; one that holds the key alone is of the name's own role.

    Raises `OSError`, and `ConfigError` for a file that is none.
    """
    data, name = path.read_bytes().strip(), path.stem
    if _PUBLIC.fullmatch(data):
        made = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).replace(microsecond=0)
        return KeyRecord(name, default_role(name), data.decode(), made)
    try:
        record = msgspec.json.decode(data, type=KeyRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not the record of a CURVE public key: {error}.") from error
    if not _PUBLIC.fullmatch(record.public.encode()):
        raise ConfigError(f"{path} is not the record of a CURVE public key: its `public` is not 40 characters of Z85.")
    check_role(record.role)
    return record


def records(directory: Path, folder: str = "public") -> list[KeyRecord]:
    """Everybody who may connect, by name. Raises `ConfigError`, `OSError`."""
    return [read_record(path) for path in sorted((directory / folder).glob("*.key"))]


def revoke(directory: Path, name: str) -> KeyRecord:
    """Take the key of `name` out for good; gateways that run notice by themselves. Raises `ConfigError`, `OSError`."""
    path = public_path(directory, check_name(name))
    if not path.exists():
        known = [one.stem for one in path.parent.glob("*.key")]
        raise ConfigError(f"no key of '{name}' is filed in {path.parent}.{suggest(name, known)}")
    record = read_record(path)
    # By its key: a name may be given, and revoked, again.
    file_key(directory, record, "revoked", f"{record.name}-{record.public.encode().hex()[:16]}")
    path.unlink()
    secret = directory / f"{name}.key_secret"
    if secret.exists() and secret.read_bytes().split()[:1] == [record.public.encode()]:
        secret.unlink()
    return record


def write_atomically(path: Path, data: bytes, mode: int) -> None:
    """Write a file of which a kill leaves all or nothing. Raises `OSError`."""
    temporary = path.with_suffix(".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
