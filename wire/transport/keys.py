"""CURVE keys (RFC 26): who may connect, and as whom.

A key directory holds `<name>.key_secret` for each local process and `public/<name>.key` for everybody who may connect.
A peer's name is the name its public key is filed under; nobody can speak for another.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import zmq

from wire.errors import ConfigError, storage_errors

GATEWAY = "gateway"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair in Z85 text, 40 characters each."""

    public: bytes
    secret: bytes


def check_name(name: str) -> str:
    """`name` if it can name a robot or process, else `ConfigError`: it becomes a file name and a routing id."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot be a name: use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit."
        )
    return name


def make_keys(directory: Path, names: list[str]) -> None:
    """Make the missing key pairs for `names`. Secret files are readable by their owner only."""
    public_directory = directory / "public"
    with storage_errors("making CURVE keys", directory):
        public_directory.mkdir(parents=True, exist_ok=True)
        for name in map(check_name, names):
            secret_file = directory / f"{name}.key_secret"
            public_file = public_directory / f"{name}.key"
            if secret_file.exists() and public_file.exists():
                continue
            public, secret = zmq.curve_keypair()
            _write_atomically(secret_file, public + b"\n" + secret + b"\n", 0o600)
            _write_atomically(public_file, public + b"\n", 0o644)


def load_pair(directory: Path, name: str) -> KeyPair:
    """The key pair of `name`, or `ConfigError` that says how to make one."""
    path = directory / f"{check_name(name)}.key_secret"
    try:
        public, secret = path.read_bytes().split()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no usable secret key for '{name}' at {path}. Make one with `vla-fleet keys {name} --keys {directory}` on "
            f"the gateway's machine and copy it here."
        ) from error
    if len(public) != 40 or len(secret) != 40:
        raise ConfigError(f"{path} is not a CURVE key pair; remove it and make a new one with `vla-fleet keys`.")
    return KeyPair(public, secret)


def load_public(directory: Path, name: str) -> bytes:
    """The public key of `name` (40 bytes of Z85)."""
    path = directory / "public" / f"{check_name(name)}.key"
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"no public key of '{name}' at {path}; copy it from the gateway's machine.") from error
    if len(key) != 40:
        raise ConfigError(f"{path} is not a CURVE public key: it has {len(key)} characters instead of 40.")
    return key


def authorised(directory: Path) -> dict[bytes, str]:
    """Name by public key of everybody who may connect."""
    return {path.read_bytes().strip(): path.stem for path in sorted((directory / "public").glob("*.key"))}


def _write_atomically(path: Path, data: bytes, mode: int) -> None:
    temporary = path.with_suffix(".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
