"""The data directory: everything one fleet keeps, in one place."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, TypeVar

import msgspec

from policies.interface.registry import PolicyChoice, same_network
from wire.errors import ConfigError, CorruptDataError, DiskFullError, FleetError, storage_error, storage_errors
from wire.transport.keys import check_name

if TYPE_CHECKING:
    from cloud_learner.buffer.ledger.ledger import Ledger
    from cloud_learner.buffer.location import BufferLocation
    from cloud_learner.buffer.store.store import SegmentStore
    from fleet.config.recipe import Recipe

log = logging.getLogger(__name__)
Note = TypeVar("Note", bound=msgspec.Struct)
USUAL_GATEWAY = "tcp://127.0.0.1:5760"
LEAST_FREE_BYTES = 64 * 1024 * 1024


class RunIdentity(msgspec.Struct, frozen=True):
    """What a data directory belongs to."""

    recipe: str
    seed: int
    spec_hash: str
    policy: PolicyChoice | None = None
    """another one than the recipe's"""
    config: str = ""
    """the file that the recipe was made from when the fleet ran last"""
    members: dict[str, str] = {}
    """of a job for robots of several shapes: the spec hash of each, by its short name"""

    @classmethod
    def of(cls, recipe: Recipe, seed: int, policy: PolicyChoice | None) -> RunIdentity:
        """Of what is done by `recipe`, with the policy of `policy` if that is another one."""
        members = {name: one.spec.data_hash for name, one in recipe.members.items()}
        return cls(recipe.name, seed, recipe.spec.data_hash, policy, str(recipe.config or ""), members)

    def is_of_robots(self, other: RunIdentity) -> bool:
        """Whether what was made here goes on with the robots of `other`: further members may have joined."""
        if self.members:
            return self.members.items() <= other.members.items()
        return self.spec_hash == other.spec_hash

    @property
    def config_path(self) -> Path | None:
        return Path(self.config) if self.config else None


class BufferSettings(msgspec.Struct, frozen=True):
    """Where the buffer of a fleet lies when it is not below its data directory, and what is kept of it there."""

    ledger: str = ""
    """SQLAlchemy URL of a PostgreSQL database"""
    store: str = ""
    """URL of an object store, such as s3://bucket/prefix"""
    cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 10_000_000_000
    """what is kept of an object store on this machine's disk, at most; 0: nothing"""
    gateway: str = ""
    """what the gateway here is called among those that share a ledger, '' as its machine"""


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

        noted = self._buffer_settings()
        return BufferLocation(self.root, noted.ledger, noted.store, noted.cache_bytes, noted.gateway)

    @contextlib.contextmanager
    def open_buffer(self, write: bool = False, create: bool = False) -> Iterator[tuple[Ledger, SegmentStore]]:
        """Ledger and store, closed in the end. Raises `ConfigError` when there are none, unless to `create` them, and
        `StorageError` when they cannot be read or written now."""
        if not (create or self.root.is_dir()):
            raise ConfigError(f"there is no data directory {self.root}. Choose another --data; `up` makes one.")
        location = self.buffer
        if not (create or location.exists()):
            raise ConfigError(
                f"no fleet has recorded anything in {self.root}. Choose another --data; `up` and `buffer "
                "import-lerobot` make one."
            )
        ledger, store = location.open_writer() if write else location.open_reader()
        try:
            yield ledger, store
        finally:
            store.close()
            ledger.close()

    def keep_buffer_at(self, ledger: str, store: str, gateway: str = "") -> None:
        """Note the URLs of ledger and store for every process of this fleet, and what its gateway is called; empty ones
        leave what was noted.

        Raises `ConfigError` if the fleet has its data elsewhere already: moving it is not done by an option.
        """
        found = self._buffer_settings()
        wanted = msgspec.structs.replace(found, ledger=ledger or found.ledger, store=store or found.store)
        named = msgspec.structs.replace(wanted, gateway=check_name(gateway) if gateway else found.gateway)
        if named == found:
            return
        begun = wanted != found and ((self.root / "journal").exists() or (self.root / "ledger.sqlite").exists())
        if begun:
            raise ConfigError(
                f"{self.root} has data already, where {self.root / 'buffer.json'} says or in itself. Leave --ledger "
                "and --store out, or choose a fresh --data."
            )
        # A URL may hold a password.
        write_note(self.root / "buffer.json", named, "noting where the buffer is", 0o600)

    def _buffer_settings(self) -> BufferSettings:
        remedy = "It names the ledger's and the store's URL, and cache_bytes, a whole number from 0."
        found = read_note(self.root / "buffer.json", BufferSettings, "reading where the buffer is", remedy)
        return found or BufferSettings()

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
    def published(self) -> Path:
        """What a trainer that is started again makes deltas from."""
        return self.root / "published"

    @property
    def trained(self) -> Path:
        """The weights that `vla-fleet train` wrote in the end."""
        return self.root / "trained.safetensors"

    @property
    def training(self) -> Path:
        """Its checkpoints, apart from those of a fleet's trainer."""
        return self.root / "training"

    @property
    def population(self) -> Path:
        """The members of a population that `vla-fleet train` tunes, and what Ray keeps of it."""
        return self.root / "population"

    def member(self, number: int) -> DataDirectory:
        """Of one of them."""
        return DataDirectory(self.population / str(number))

    @property
    def rewards(self) -> Path:
        """Success classifiers that `vla-fleet rewards train` made."""
        return self.root / "rewards"

    @property
    def runs(self) -> Path:
        """What was started here, with which settings (`fleet.launch.run_record`)."""
        return self.root / "runs"

    @property
    def curves(self) -> Path:
        """Event files of training runs, for TensorBoard."""
        return self.root / "curves"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def gateway(self) -> str:
        """Where the gateway on this data listens or last listened; the usual address when nobody noted it."""
        try:
            return (self.root / "gateway.address").read_text().strip() or USUAL_GATEWAY
        except OSError:
            return USUAL_GATEWAY

    def note_gateway(self, address: str) -> None:
        """Note where it listens, for commands on this machine. Raises `StorageError`."""
        write_note(self.root / "gateway.address", address + "\n", "noting the gateway's address")

    def edge(self, name: str) -> Path:
        return self.root / "edges" / name

    def prepare(self, identity: RunIdentity) -> IO[str]:
        """Create and lock the directory; keep the returned file open as long as the lock is needed.

        Raises `NotWritableError`, `DiskFullError`, or `ConfigError` when another fleet uses it or it holds what another
        recipe or another policy made.
        """
        with contextlib.ExitStack() as held:
            with storage_errors("opening the data directory", self.root):
                self.root.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context((self.root / "lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"{self.root} is in use by another running fleet. Stop that one or choose another --data directory."
                ) from error
            free = shutil.disk_usage(self.root).free
            if free < LEAST_FREE_BYTES:
                raise DiskFullError(
                    f"{self.root} has {free / 1e6:.0f} MB free, a fleet needs at least {LEAST_FREE_BYTES / 1e6:.0f} "
                    "MB. Free some room or choose another --data directory."
                )
            self._identify(identity)
            held.pop_all()
        return lock

    def identity(self) -> RunIdentity | None:
        """What the directory belongs to, None when no fleet began there. Raises `StorageError`."""
        remedy = "Move it away to start a fresh fleet there."
        return read_note(self.root / "fleet.json", RunIdentity, "reading the data directory", remedy)

    def _identify(self, identity: RunIdentity) -> None:
        self.require(identity)
        found = self.identity()
        if found is None or (found.config, found.members) != (identity.config, identity.members):
            write_note(self.root / "fleet.json", identity, "noting what the data directory belongs to")

    def steps_recorded(self, robot: str) -> int | None:
        """Steps the robot's spool ever took in, None when nobody can say here. The robot must be stopped."""
        from robot_edge.uplink.spool import Spool

        path = self.edge(robot) / "spool.sqlite"
        if not path.exists():
            return None
        try:
            with contextlib.closing(Spool(path)) as spool:
                return spool.steps_recorded
        except FleetError as error:
            log.warning("what robot '%s' recorded is not known: %s", robot, error)
            return None

    def require(self, identity: RunIdentity) -> None:
        """Raises `ConfigError` when the directory holds what another recipe or another policy made; writes nothing."""
        found = self.identity()
        if found is None:
            return
        if found.recipe == identity.recipe and identity.members and not found.is_of_robots(identity):
            raise ConfigError(
                f"{self.root} belongs to a job with the members {', '.join(sorted(found.members))}, one of which is "
                "gone or another robot now. Members may join and none may leave: put it back, or choose another --data "
                "directory."
            )
        if found.recipe != identity.recipe or not found.is_of_robots(identity):
            raise ConfigError(
                f"{self.root} belongs to recipe '{found.recipe}' (robot spec {found.spec_hash}), not to "
                f"'{identity.recipe}' ({identity.spec_hash}). Choose another --data directory or that recipe."
            )
        if not same_network(found.policy, identity.policy):
            raise ConfigError(
                f"{self.root} belongs to {_named(found.policy)}, not to {_named(identity.policy)}: its versions and "
                "checkpoints are of another network. Choose another --data directory or that policy."
            )


def read_note(path: Path, kind: type[Note], what: str, remedy: str) -> Note | None:
    """What `write_note` wrote, None when nobody did."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_error(error, what, path) from error
    except msgspec.DecodeError as error:
        raise CorruptDataError(f"{path} cannot be read ({error}). {remedy}") from error


def write_note(path: Path, note: msgspec.Struct | str, what: str, mode: int = 0o666) -> None:
    """Write it whole and for good."""
    text = note.encode() if isinstance(note, str) else msgspec.json.format(msgspec.json.encode(note))
    with storage_errors(what, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)


def _named(policy: PolicyChoice | None) -> str:
    if policy is None:
        return "the recipe's own policy (no --policy)"
    config = f" --policy-config '{msgspec.json.encode(policy.config).decode()}'" if policy.config else ""
    return f"--policy {policy}{config}"
