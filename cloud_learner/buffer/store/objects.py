"""Where whole, immutable objects lie: a local directory, or an object store by URL.

An object appears at once or not at all. Keys are relative paths such as `<spec hash>/records/c/3`; whoever writes takes
care that they are safe as file names.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from cloud_learner.buffer.files import TEMPORARY, bad_sectors, remove_leftovers, write_durably
from cloud_learner.buffer.store.range_cache import RangeCache, Span
from wire.errors import ConfigError, CorruptDataError, NotWritableError, StorageError, storage_errors

WEIGHTS = "weights/"
"""Below it lie policy versions, for other gateways; shards lie below the hashes of specs."""
_WRITING = ".writing"
"""Folder of a local store in which objects are written before they get their name."""
_REQUESTS = 16
"""Requests to an object store that are under way at once."""
_GAP_BYTES = 1024 * 1024
"""Bytes that are fetched for nothing rather than asking twice."""
_TIMEOUT_S = 10.0
_RETRIES = 5
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")


class ObjectStore(Protocol):
    """A place of objects. Safe to use from several threads."""

    place: str
    """as people know it, without secrets"""
    remote: bool
    """whether each request takes its time: what is needed is best asked for at once"""
    cache: RangeCache | None
    """of what `read` brought"""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store `data`, replacing what is there; durable when this returns. Raises `StorageError`."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object. Raises `CorruptDataError` when there is none, `StorageError` when it cannot be asked for
        now.
        """
        ...

    def read(self, spans: Sequence[Span], cached: bool = True) -> list[bytes]:
        """Parts of objects, all at once where that is faster; unless `cached`, from where they lie for good.

        Raises as `get`; `CorruptDataError` also for one that is short.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is as well removed."""
        ...

    def list(self) -> Iterator[str]:
        """Keys of all objects."""
        ...

    def clean(self) -> int:
        """Remove what a crash left half-written; only for one that alone writes here. Returns how many."""
        ...


_SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "file")


def open_objects(place: str | Path, cache: RangeCache | None = None) -> ObjectStore:
    """The objects at a directory, or at a URL such as `s3://bucket/prefix`. Nothing is read or created yet.

    cache: for a URL
    """
    if isinstance(place, str) and "://" in place:
        scheme = place.partition("://")[0]
        if scheme not in _SCHEMES:
            raise ConfigError(
                f"store {_without_secrets(place)}: '{scheme}' keeps nothing or cannot be written to; "
                f"use a directory or a URL such as s3://bucket/prefix ({', '.join(_SCHEMES)})."
            )
        return RemoteObjects(place, cache)
    return LocalObjects(Path(place))


class LocalObjects:
    """Objects as files below `root`."""

    def __init__(self, root: Path) -> None:
        self.remote = False
        self.cache: RangeCache | None = None
        self.root = root
        self.place = str(root)

    def put(self, key: str, data: bytes | memoryview) -> None:
        temporary = self.root / _WRITING / f"{secrets.token_hex(8)}{TEMPORARY}"
        write_durably(self.root / key, data, "store", temporary)

    def get(self, key: str) -> bytes:
        with self._reading(key):
            return (self.root / key).read_bytes()

    def read(self, spans: Sequence[Span], cached: bool = True) -> list[bytes]:
        found = []
        for key, first, end in spans:
            with self._reading(key), open(self.root / key, "rb", buffering=0) as file:
                part = os.pread(file.fileno(), end - first, first)
            if len(part) != end - first:
                raise CorruptDataError(f"object {self.root / key} ends before byte {end}. Restore it from a backup.")
            found.append(part)
        return found

    def delete(self, key: str) -> None:
        with storage_errors("store", self.root / key):
            (self.root / key).unlink(missing_ok=True)

    def list(self) -> Iterator[str]:
        for folder, folders, names in os.walk(self.root):
            relative = Path(folder).relative_to(self.root)
            if relative == Path("."):
                folders[:] = [name for name in folders if name != _WRITING]
            for name in names:
                yield str(relative / name)

    def clean(self) -> int:
        return remove_leftovers(self.root / _WRITING, "store")

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        path = self.root / key
        with storage_errors("store", path):
            try:
                with bad_sectors("object", path):
                    yield
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                raise CorruptDataError(f"object {path} is gone. Restore it from a backup.") from error


class RemoteObjects:
    """Objects of an object store. Credentials, region and endpoint come from the usual `AWS_*` environment."""

    def __init__(self, url: str, cache: RangeCache | None = None, timeout_s: float = _TIMEOUT_S) -> None:
        """What fails is tried again, up to five times within twice `timeout_s`; then whoever asked is told.

        timeout_s: how long the store may be silent while it is read from; half of it while it is connected to, twelve
            times as long for a whole request
        """
        self.place, self.remote, self.cache = _without_secrets(url), True, cache
        # An endpoint is plain HTTP only when the environment says so.
        endpoint = next(
            (os.environ[name] for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if os.environ.get(name)), ""
        )
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=12 * timeout_s),
            "connect_timeout": timedelta(seconds=timeout_s / 2),
            "allow_http": endpoint.startswith("http://"),
        }
        retries = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=2 * timeout_s)}
        config: dict[str, Any] = {"endpoint": endpoint} if endpoint and url.startswith("s3") else {}
        try:
            connect: Any = from_url
            # while an object is on its way there, nothing is to be read
            self._uploads = connect(url, config=config or None, client_options=options, retry_config=retries)
            options = {**options, "read_timeout": timedelta(seconds=timeout_s)}
            self._store = connect(url, config=config or None, client_options=options, retry_config=retries)
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"store {self.place} cannot be used: {self._text(error)}. Give a URL such as s3://bucket/prefix, and "
                "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL where it needs them."
            ) from None
        # its threads begin with the first requests
        self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="objects")

    def put(self, key: str, data: bytes | memoryview) -> None:
        try:
            # in one request: an upload in parts that is cut leaves parts that nobody sees but somebody pays
            obstore.put(self._uploads, key, data, use_multipart=False)
        except (BaseError, OSError) as error:
            raise self._explained(error, key) from None

    def get(self, key: str) -> bytes:
        try:
            return obstore.get(self._store, key).bytes().to_bytes()
        except (BaseError, OSError) as error:
            raise self._explained(error, key) from None

    def read(self, spans: Sequence[Span], cached: bool = True) -> list[bytes]:
        if self.cache is None:
            return self._fetch(spans)
        parts = {span: part for span in spans if cached and (part := self.cache.get(span)) is not None}
        missing = [span for span in spans if span not in parts]
        for span, part in zip(missing, self._fetch(missing), strict=True):
            parts[span] = part
            self.cache.put(span, part)
        return [parts[span] for span in spans]

    def _fetch(self, spans: Sequence[Span]) -> list[bytes]:
        # obstore's own `get_ranges` ends the process for an object that is shorter than it should be
        runs = _runs(spans)

        def fetch(run: _ObjectRun) -> memoryview:
            try:
                data = memoryview(obstore.get_range(self._store, run.key, start=run.first, end=run.end))
            except (BaseError, OSError) as error:
                # what begins behind the end of an object is no worse than what ends there; nor is it tried again
                if not isinstance(error, OSError) and " retries" not in str(error) and self._size(run.key) < run.end:
                    raise self._short(run.key, run.end) from None
                raise self._explained(error, run.key) from None
            if len(data) != run.end - run.first:
                raise self._short(run.key, run.end)
            return data

        found: list[bytes] = [b""] * len(spans)
        for run, data in zip(runs, self._pool.map(fetch, runs), strict=True):
            for number in run.spans:
                _, first, end = spans[number]
                found[number] = bytes(data[first - run.first : end - run.first])
        return found

    def delete(self, key: str) -> None:
        try:
            obstore.delete(self._store, key)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise self._explained(error, key) from None

    def list(self) -> Iterator[str]:
        try:
            for some in obstore.list(self._store):
                for entry in some:
                    yield entry["path"]
        except (BaseError, OSError) as error:
            raise self._explained(error, "") from None

    def clean(self) -> int:
        return 0  # an object is put in one request

    def _size(self, key: str) -> int:
        try:
            return int(obstore.head(self._store, key)["size"])
        except (BaseError, OSError) as error:
            raise self._explained(error, key) from None

    def _short(self, key: str, end: int) -> CorruptDataError:
        return CorruptDataError(f"object {self.place}/{key} ends before byte {end}. Restore it from a backup.")

    def _explained(self, error: Exception, key: str) -> StorageError:
        where = f"{self.place}/{key}"
        if isinstance(error, FileNotFoundError):
            return CorruptDataError(f"object {where} is gone. Restore it from a backup, or create the bucket.")
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            return NotWritableError(
                f"object {where} may not be used with these credentials: {self._text(error)}. "
                "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what they may do."
            )
        return StorageError(f"object {where}: {self._text(error)}. Check the network and AWS_ENDPOINT_URL.")

    @staticmethod
    def _text(error: Exception) -> str:
        """The first line of what the object store said, without anything secret."""
        text = _without_secrets(str(error).strip().split("\n")[0])[:300].rstrip(". ")
        return text or type(error).__name__


class _ObjectRun(msgspec.Struct):
    """Neighbouring parts of an object that are asked for at once."""

    key: str
    first: int
    end: int
    spans: list[int]


def _runs(spans: Sequence[Span]) -> list[_ObjectRun]:
    """`spans` in requests: what lies close together in one object goes into one."""
    runs: list[_ObjectRun] = []
    for number in sorted(range(len(spans)), key=lambda number: spans[number]):
        key, first, end = spans[number]
        if runs and runs[-1].key == key and first - runs[-1].end <= _GAP_BYTES:
            runs[-1].end = max(runs[-1].end, end)
            runs[-1].spans.append(number)
        else:
            runs.append(_ObjectRun(key, first, end, [number]))
    return runs


def _without_secrets(text: str) -> str:
    text = re.sub(r"//[^/@\s]*@", "//", text)
    text = re.sub(r"\?[^\s)\"']*", "", text)
    for name in _SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, f"<{name}>")
    return text
