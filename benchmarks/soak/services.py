"""What a fleet stores to beyond its own disk: a PostgreSQL server and an object store, each a process that can hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from fleet.launch.backend import free_port
from tests import postgres

_BUCKET = "fleet"
_START_S = 60.0


class StorageServices:
    """URLs for a gateway, and ways to have either silent."""

    def __init__(self, database: postgres.Server, ledger: str, store: str, moto: subprocess.Popen[bytes]) -> None:
        self.ledger, self.store = ledger, store
        self._database, self._moto = database, moto

    def database_away(self) -> contextlib.AbstractContextManager[None]:
        """It hangs meanwhile: connections stay open and nobody answers."""
        return self._database.stopped()

    @contextlib.contextmanager
    def objects_away(self) -> Iterator[None]:
        """The same of the object store."""
        os.kill(self._moto.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._moto.pid, signal.SIGCONT)


@contextlib.contextmanager
def storage_services(place: Path) -> Iterator[StorageServices]:
    """Both, empty, until the end. Raises `tests.postgres.UnavailableError` when there is no PostgreSQL here."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(postgres.server())
        ledger = stack.enter_context(server.database())
        port = free_port(0, "127.0.0.1")
        endpoint = f"http://127.0.0.1:{port}"
        access = {"AWS_ACCESS_KEY_ID": "soak", "AWS_SECRET_ACCESS_KEY": "soak", "AWS_ENDPOINT_URL": endpoint}
        access |= {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ.update(access)
        with (place / "moto.log").open("wb") as log:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
            moto = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _make_bucket(endpoint, moto)
            yield StorageServices(server, ledger, f"s3://{_BUCKET}/soak", moto)
        finally:
            moto.kill()
            moto.wait()
            for name in access:
                os.environ.pop(name)


def _make_bucket(endpoint: str, moto: subprocess.Popen[bytes]) -> None:
    import boto3

    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(f"{endpoint}/moto-api/data.json", timeout=1.0):
                break
        except (OSError, urllib.error.URLError):
            if moto.poll() is not None or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=_BUCKET)
