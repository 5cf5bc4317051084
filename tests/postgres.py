"""A PostgreSQL server of the tests' own: private, throw-away, and gone when the test run ends, however it ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_START_S = 90.0
_SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "100",
    "shared_buffers": "64MB",
}
# ends the server when the pipe to the test run is closed, which a killed test run does, too
_GUARD = '"$@" & server=$!; read _; kill -INT $server; wait $server'


class UnavailableError(Exception):
    """There is no PostgreSQL here; the message says why."""


class Server:
    """A running server, reached through a socket in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()

    def url(self, database: str) -> str:
        """SQLAlchemy URL of a database."""
        return f"postgresql://fleet@/{database}?host={self._directory}"

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """URL of an empty database, which is dropped at the end."""
        name = f"fleet{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE template0 STRATEGY file_copy")
        try:
            yield self.url(name)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, command: str, database: str = "postgres") -> None:
        """Run one statement outside any transaction."""
        import psycopg

        with psycopg.connect(f"host={self._directory} user=fleet dbname={database}", autocommit=True) as connection:
            connection.execute(command)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It falls silent without closing anything, as on a machine that hangs."""
        import psycopg

        with psycopg.connect(f"host={self._directory} user=fleet dbname=postgres", autocommit=True) as connection:
            backends = connection.execute("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()").fetchall()
        postmaster = int((self._directory / "data" / "postmaster.pid").read_text().split()[0])
        pids = [postmaster, *(pid for (pid,) in backends)]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """Start a server; it is ended at the end. Raises `UnavailableError`."""
    binaries = _binaries()
    try:
        import psycopg
    except ImportError as error:
        raise UnavailableError(f"psycopg cannot be imported: {error}") from error
    user = _user()
    # not below pytest's directories: another user may not go there, and the path of a socket has 107 bytes
    with tempfile.TemporaryDirectory(prefix="fleet-postgres-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        log = directory / "log"
        data = directory / "data"
        if user is not None:
            shutil.chown(directory, user)
        as_user = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user is not None else {}
        initdb = [binaries / "initdb", "-D", data, "-U", "fleet", "-A", "trust", "-E", "UTF8", "--no-locale", "-N"]
        made = subprocess.run(initdb, capture_output=True, text=True, cwd="/", **as_user)  # type: ignore[call-overload]
        if made.returncode:
            raise UnavailableError(f"initdb: {made.stderr.strip()[-500:]}")
        settings = {**_SETTINGS, "unix_socket_directories": str(directory)}
        options = itertools.chain(*(("-c", f"{key}={value}") for key, value in settings.items()))
        command = ["sh", "-c", _GUARD, "sh", binaries / "postgres", "-D", data, *options]
        with log.open("w") as output:
            guard = subprocess.Popen(  # type: ignore[call-overload]
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd="/", start_new_session=True, **as_user
            )
        try:
            running = Server(directory)
            deadline = time.monotonic() + _START_S
            while True:
                try:
                    running.execute("SELECT 1")
                    break
                except psycopg.OperationalError as error:
                    if time.monotonic() > deadline or guard.poll() is not None:
                        raise UnavailableError(f"it does not start: {log.read_text()[-500:]}") from error
                time.sleep(0.05)
            yield running
        finally:
            guard.stdin.close()
            guard.wait(_START_S)


def _binaries() -> Path:
    """The newest installed server's programs."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    found.sort(key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else 0)
    if not found and (path := shutil.which("postgres")) is not None:
        found = [Path(path).resolve().parent]
    if not found:
        raise UnavailableError("no PostgreSQL server is installed (Debian and Ubuntu: apt install postgresql)")
    return found[-1]


def _user() -> str | None:
    """Whom to start it as: PostgreSQL refuses to run as root. None for the user that runs the tests."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
