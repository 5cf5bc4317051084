"""How the ledger's database is reached: an SQLite file, or PostgreSQL by URL.

Many threads and processes may read while one writes. Writers take the lock when a transaction begins, so that two of
them wait for each other instead of failing, and commit in the order of the numbers they were given.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import socket
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import sqlalchemy as sa

from cloud_learner.buffer.files import make_directory
from wire.errors import (
    ConfigError,
    CorruptDataError,
    DiskFullError,
    InvalidDataError,
    NothingStoredError,
    NotWritableError,
    StorageError,
    storage_errors,
)

R = TypeVar("R")
_WAIT_S = 30
"""How long a writer waits for another one."""
_SILENT_S, _PROBE_S, _CONNECT_S = 5.0, 5, 10
"""How long PostgreSQL may say nothing to a statement until it is asked whether it is there, how long it may take to
answer that, and to take a new connection: a silent one is given up after 20 s."""
_STOPPED = "it may be stopped, or its machine overloaded"
_POLL_S = 0.02
# advisory locks of a PostgreSQL database: whoever writes, and whoever seals, prunes, compacts or repairs
_LOCK_SPACE, _WRITING, _EXCLUSIVE = 0x564C4146, 1, 2


class Database:
    """A ledger's database. Nothing is opened before its first use; for several threads."""

    def __init__(self, engine: sa.Engine, location: str, lock: Path | None, read_only: bool) -> None:
        """`lock`: file for `exclusive`; None has the database do it."""
        self.location = location
        """its path, or its URL without a password: for people"""
        self.read_only = read_only
        self.writes, self.write_wait_s = 0, 0.0
        """transactions that wrote, and how long they waited for the database and for one another to begin"""
        self._engine = engine
        self._lock = lock
        self._together = threading.local()
        snapshot = {} if lock else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        self._reader = engine.execution_options(**snapshot)
        # after waiting for the lock a writer must see what was committed meanwhile
        self._writer = engine.execution_options(writing=True, **({} if lock else {"isolation_level": "READ COMMITTED"}))

    @classmethod
    def at(cls, location: str | Path, read_only: bool) -> Self:
        """The database at a path (SQLite) or an SQLAlchemy URL.

        Raises `StorageError` when there is no file to read, `ConfigError` for a URL of another kind.
        """
        if isinstance(location, str) and "://" in location:
            url = _parsed(location)
            if url.get_backend_name() == "postgresql":
                return cls(_postgresql(url), _shown(url), None, read_only)
            if not url.database:
                raise ConfigError(f"ledger: {url.render_as_string()} names no file.")
            location = url.database
        path = Path(location)
        if not read_only:
            with storage_errors("ledger", path):
                make_directory(path.parent.absolute())
        elif not path.exists():
            raise no_ledger(str(path))
        return cls(_sqlite(path, read_only), str(path), path.with_name(path.name + ".lock"), read_only)

    @property
    def shared(self) -> bool:
        """Whether gateways on several machines may write here."""
        return self._lock is None

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A transaction that sees one state of the ledger, however long it takes."""
        if (shared := self._shared()) is not None:
            yield shared
            return
        with self._explained(), self._reader.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction that is on the device when it ends; an exception within undoes all of it."""
        if self.read_only:
            raise NotWritableError(f"ledger {self.location} was opened for reading only.")
        if (shared := self._shared()) is not None:
            with self._explained():
                yield shared
            return
        began_s = time.monotonic()
        with self._explained(), self._writer.begin() as connection:
            # one writer at a time: its lock guards these too
            self.writes += 1
            self.write_wait_s += time.monotonic() - began_s
            yield connection

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within it all that this thread reads and writes is one transaction, which an exception undoes. Not to be
        entered twice."""
        with self.writing() as connection:
            self._together.connection = connection
            try:
                yield
            finally:
                self._together.connection = None

    def _shared(self) -> sa.Connection | None:
        """The transaction that this thread is in, if it is one of `together`."""
        return getattr(self._together, "connection", None)

    @contextlib.contextmanager
    def exclusive(self, wait_s: float = 10.0) -> Iterator[None]:
        """Held by whoever seals, prunes, compacts or repairs: one thread of one process. Others write meanwhile.

        Not to be entered twice. Raises `StorageError` when somebody else still holds it after `wait_s`.
        """
        if self.read_only:
            raise NotWritableError(f"ledger {self.location} was opened for reading only.")
        with self._file_lock(self._lock, wait_s) if self._lock else self._advisory_lock(wait_s):
            yield

    @contextlib.contextmanager
    def _file_lock(self, path: Path, wait_s: float) -> Iterator[None]:
        with storage_errors("ledger's lock", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            deadline = time.monotonic() + wait_s
            while not _flock(descriptor, path):
                if time.monotonic() >= deadline:
                    raise self._held(f"process {os.pread(descriptor, 20, 0).decode(errors='replace') or 'unknown'}")
                time.sleep(_POLL_S)
            # only for the message of who comes next: a full disk may leave it out
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            try:
                yield
            finally:
                # closing is not enough: a child that was forked meanwhile has the descriptor too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _advisory_lock(self, wait_s: float) -> Iterator[None]:
        keys = (_LOCK_SPACE, _EXCLUSIVE)
        # a connection of its own, outside any transaction and never used again, so that the lock cannot outlive it
        engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        with contextlib.ExitStack() as opened:
            with self._explained():
                connection = opened.enter_context(engine.connect())
                connection.detach()
                deadline = time.monotonic() + wait_s
                while not connection.scalar(sa.select(sa.func.pg_try_advisory_lock(*keys))):
                    if time.monotonic() >= deadline:
                        raise self._held(connection.scalar(_HOLDER) or "a process that is just done")
                    time.sleep(_POLL_S)
            try:
                yield
            except BaseException:
                # closing the connection would do it too, but a moment later
                with contextlib.suppress(sa.exc.SQLAlchemyError):
                    connection.scalar(sa.select(sa.func.pg_advisory_unlock(*keys)))
                raise
            with self._explained():
                if not connection.scalar(sa.select(sa.func.pg_advisory_unlock(*keys))):
                    raise StorageError(f"ledger {self.location}: its exclusive lock was lost while it was needed.")

    def _held(self, holder: str) -> StorageError:
        return StorageError(
            f"ledger {self.location}: {holder} seals, prunes, compacts or repairs it, as a gateway or a `vla-fleet "
            "buffer` command does. Try again when that is done."
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.DataError as error:
            # trying again will not help
            raise InvalidDataError(f"ledger {self.location}: a value cannot be stored: {_reason(error)}.") from error
        except sa.exc.DBAPIError as error:
            raise _explain(self.location, error) from error
        except sa.exc.TimeoutError as error:
            raise StorageError(f"ledger {self.location}: too many connections at once: {error}.") from error


def no_ledger(location: str) -> NothingStoredError:
    """What to say when there is nothing to read."""
    return NothingStoredError(f"no ledger at {location}: start the gateway there first, or choose another --data.")


def _reason(error: sa.exc.DBAPIError) -> str:
    return " ".join(str(error.orig).split()).rstrip(".")


def _explain(location: str, error: sa.exc.DBAPIError) -> StorageError:
    reason, state = _reason(error), getattr(error.orig, "sqlstate", None) or ""
    if "disk is full" in reason or state == "53100":
        return DiskFullError(
            f"ledger: no space left for {location}. Free some room or choose another --data directory."
        )
    if "malformed" in reason or "not a database" in reason or state.startswith("XX00"):
        return CorruptDataError(f"ledger {location}: {reason}. Restore it from a backup.")
    if "readonly" in reason or state in ("25006", "42501"):
        return NotWritableError(f"ledger {location}: {reason}. Fix its permissions or choose another --data.")
    if "database is locked" in reason or state == "55P03":
        return StorageError(f"ledger {location}: another process has been writing to it for {_WAIT_S} s. Try again.")
    return StorageError(f"ledger {location}: {reason}.")


def _parsed(location: str) -> sa.URL:
    """The URL of a database that the ledger can live in. Raises `ConfigError`."""
    kinds = "Give a path or postgresql://USER@HOST/DATABASE."
    try:
        url = sa.make_url(location)
    except (sa.exc.ArgumentError, ValueError):
        # not what was given, nor the cause: a password may stand in it
        raise ConfigError(f"ledger: this is no URL of a database. {kinds}") from None
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        if importlib.util.find_spec("psycopg") is None:
            raise ConfigError("ledger: PostgreSQL needs psycopg. Run `pip install 'vla-fleet[postgres]'`.")
        return url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() != "sqlite":
        raise ConfigError(f"ledger: a database of kind '{url.drivername}' is not supported. {kinds}")
    return url


def _shown(url: sa.URL) -> str:
    """The URL for people: where the database is, and nothing that is secret."""
    where = {name: value for name, value in url.query.items() if name in ("host", "port")}
    return sa.URL.create("postgresql", url.username, None, url.host, url.port, url.database, where).render_as_string()


def _postgresql(url: sa.URL) -> sa.Engine:
    name = f"vla-fleet process {os.getpid()} on {socket.gethostname()}"
    engine = sa.create_engine(
        url,
        # a connection that broke while nobody used it is replaced
        pool_pre_ping=True,
        connect_args={
            "application_name": name[:63],
            "connect_timeout": _CONNECT_S,
            # a host that is gone says so to nobody
            "keepalives_idle": 5,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 20_000,
        },
    )

    @sa.event.listens_for(engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, positional: list[Any], named: dict[str, Any]) -> Any:
        import psycopg

        try:
            return _guarded_connection_type().connect(*positional, **named)
        except psycopg.errors.ConnectionTimeout as error:
            raise psycopg.OperationalError(f"the server takes no connection in {_CONNECT_S} s: {_STOPPED}") from error

    @sa.event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.autocommit = True
        connection.execute("SET synchronous_commit TO on")
        connection.execute(f"SET lock_timeout TO '{_WAIT_S}s'")
        connection.autocommit = False

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        if connection.get_execution_options().get("writing", False):
            # until the end of the transaction
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK_SPACE}, {_WRITING})")

    return engine


@functools.cache
def _guarded_connection_type() -> Any:
    """Class of connections that are not waited for without end. Their server may take its time, as for a lock or a
    long query, as long as it answers others."""
    import psycopg

    def answers(connection: psycopg.Connection) -> bool:
        asked: dict[str, Any] = connection.info.get_parameters()
        asked |= {"password": connection.info.password, "connect_timeout": _PROBE_S}
        try:
            psycopg.connect(**asked).close()
        except psycopg.errors.ConnectionTimeout:
            return False
        except psycopg.OperationalError:
            # somebody says no
            return True
        return True

    def guarded(steps: Generator[Any, int, R], connection: psycopg.Connection) -> Generator[Any, int, R]:
        """`steps` of psycopg, which yield what they wait for and are sent 0 while that has not come."""
        heard = time.monotonic()
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                if ready:
                    heard = time.monotonic()
                elif time.monotonic() - heard > _SILENT_S:
                    if not answers(connection):
                        # nobody knows how far it came; the pool makes a new one
                        connection.pgconn.finish()
                        raise psycopg.OperationalError(
                            f"the server did not answer for {time.monotonic() - heard:.0f} s: {_STOPPED}"
                        )
                    heard = time.monotonic()
                wanted = steps.send(ready)
        except StopIteration as end:
            result: R = end.value
            return result

    class GuardedConnection(psycopg.Connection):
        def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
            return super().wait(guarded(gen, self), *args, **options)

    return GuardedConnection


def _sqlite(path: Path, read_only: bool) -> sa.Engine:
    query = {"mode": "rw" if read_only else "rwc", "uri": "true"}
    wal = path.with_name(path.name + "-wal")
    if read_only and not os.access(path.parent, os.W_OK) and not (wal.exists() and wal.stat().st_size):
        # a WAL database wants to write beside itself even to be read; here nobody can, so nobody does
        query |= {"mode": "ro", "immutable": "1"}
    # Every thread gets its own connection; WAL lets them, and other processes, read while one writes.
    engine = sa.create_engine(sa.URL.create("sqlite", database=path.absolute().as_uri(), query=query))

    @sa.event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        # pysqlite's own transaction handling is switched off: `_begin` below does it
        connection.isolation_level = None
        pragmas = [f"busy_timeout={_WAIT_S * 1000}", "synchronous=FULL", "foreign_keys=ON"]
        # a reader could not change the journal mode, and must not change data
        pragmas += ["query_only=ON"] if read_only else ["journal_mode=WAL"]
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        writing = connection.get_execution_options().get("writing", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine


def _flock(descriptor: int, path: Path) -> bool:
    """Whether the lock could be had at once."""
    with storage_errors("ledger's lock", path):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


_HOLDER = sa.text(
    "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    f" AND classid = {_LOCK_SPACE} AND objid = {_EXCLUSIVE}"
)
