"""The data directory: everything one fleet keeps, in one place."""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from policies.interface.registry import PolicyChoice, same_network
from wire.errors import ConfigError, CorruptDataError, DiskFullError, storage_error

if TYPE_CHECKING:
    from cloud_learner.buffer.location import BufferLocation

LEAST_FREE_BYTES = 64 * 1024 * 1024


class RunIdentity(msgspec.Struct, frozen=True):
    """What a data directory belongs to."""

    recipe: str
    seed: int
    spec_hash: str
    policy: PolicyChoice | None = None
    """another one than the recipe's"""


class BufferUrls(msgspec.Struct, frozen=True):
    """Where the buffer of a fleet lies when it is not below its data directory."""

    ledger: str = ""
    """SQLAlchemy URL of a PostgreSQL database"""
    store: str = ""
    """URL of an object store, such as s3://bucket/prefix"""


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """Paths below `root`. Nothing is created before `prepare`."""

    root: Path

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def buffer(self) -> BufferLocation:
        """Where ledger, store and journal are: below `root`, or where `keep_buffer_at` said."""
        from cloud_learner.buffer.location import BufferLocation

        urls = self._buffer_urls()
        return BufferLocation(self.root, urls.ledger, urls.store)

    def keep_buffer_at(self, ledger: str, store: str) -> None:
        """Note the URLs of ledger and store for every process of this fleet; empty ones leave what was noted.

        Raises `ConfigError` if the fleet has its data elsewhere already: moving it is not done by an option.
        """
        found = self._buffer_urls()
        wanted = BufferUrls(ledger or found.ledger, store or found.store)
        if wanted == found:
            return
        begun = (self.root / "journal").exists() or (self.root / "ledger.sqlite").exists()
        if begun:
            raise ConfigError(
                f"{self.root} has data already, where {self.root / 'buffer.json'} says or in itself. Leave --ledger "
                "and --store out, or choose a fresh --data."
            )
        path = self.root / "buffer.json"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(wanted)))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except OSError as error:
            raise storage_error(error, "noting where the buffer is", path) from error

    def _buffer_urls(self) -> BufferUrls:
        path = self.root / "buffer.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=BufferUrls)
        except FileNotFoundError:
            return BufferUrls()
        except OSError as error:
            raise storage_error(error, "reading where the buffer is", path) from error
        except msgspec.DecodeError as error:
            raise CorruptDataError(
                f"{path} cannot be read ({error}). It names the ledger's and the store's URL."
            ) from error

    @property
    def policy(self) -> Path:
        """What a recipe with a `tiny` policy begins with."""
        return self.root / "policy"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def edges(self) -> Path:
        return self.root / "edges"

    def edge(self, name: str) -> Path:
        return self.edges / name

    def prepare(self, identity: RunIdentity) -> IO[str]:
        """Create and lock the directory; keep the returned file open as long as the lock is needed.

        Raises `NotWritableError`, `DiskFullError`, or `ConfigError` when another fleet uses it or it holds what another
        recipe or another policy made.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = (self.root / "lock").open("w")
        except OSError as error:
            raise storage_error(error, "opening the data directory", self.root) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ConfigError(
                f"{self.root} is in use by another running fleet. Stop that one or choose another --data directory."
            ) from error
        free = shutil.disk_usage(self.root).free
        if free < LEAST_FREE_BYTES:
            lock.close()
            raise DiskFullError(
                f"{self.root} has {free / 1e6:.0f} MB free, a fleet needs at least {LEAST_FREE_BYTES / 1e6:.0f} MB. "
                "Free some room or choose another --data directory."
            )
        try:
            self._identify(identity)
        except BaseException:
            lock.close()
            raise
        return lock

    def identity(self) -> RunIdentity | None:
        """What the directory belongs to, None when no fleet began there. Raises `StorageError`."""
        path = self.root / "fleet.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=RunIdentity)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error(error, "reading the data directory", path) from error
        except msgspec.DecodeError as error:
            raise CorruptDataError(
                f"{path} cannot be read ({error}). Move it away to start a fresh fleet there."
            ) from error

    def _identify(self, identity: RunIdentity) -> None:
        path = self.root / "fleet.json"
        self.require(identity)
        if self.identity() is None:
            try:
                temporary = path.with_suffix(".tmp")
                with temporary.open("wb") as file:
                    file.write(msgspec.json.format(msgspec.json.encode(identity)))
                    file.flush()
                    os.fsync(file.fileno())
                temporary.rename(path)
            except OSError as error:
                raise storage_error(error, "noting what the data directory belongs to", path) from error

    def require(self, identity: RunIdentity) -> None:
        """Raises `ConfigError` when the directory holds what another recipe or another policy made; writes nothing."""
        found = self.identity()
        if found is None:
            return
        if (found.recipe, found.spec_hash) != (identity.recipe, identity.spec_hash):
            raise ConfigError(
                f"{self.root} belongs to recipe '{found.recipe}' (robot spec {found.spec_hash}), not to "
                f"'{identity.recipe}' ({identity.spec_hash}). Choose another --data directory or that recipe."
            )
        if not same_network(found.policy, identity.policy):
            raise ConfigError(
                f"{self.root} belongs to {_named(found.policy)}, not to {_named(identity.policy)}: its versions and "
                "checkpoints are of another network. Choose another --data directory or that policy."
            )


def _named(policy: PolicyChoice | None) -> str:
    if policy is None:
        return "the recipe's own policy (no --policy)"
    config = f" --policy-config '{msgspec.json.encode(policy.config).decode()}'" if policy.config else ""
    return f"--policy {policy}{config}"
