import errno
import os
import socket
import time

import pytest

from cloud_learner.buffer.store.objects import LocalObjects, RemoteObjects, open_objects
from tests.cloud_learner.buffer.stored import WatchedRequests
from wire.errors import ConfigError, CorruptDataError, DiskFullError, NotWritableError, StorageError

pytest_plugins = ["tests.s3"]


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def objects(request, tmp_path):
    if request.param == "local":
        return open_objects(tmp_path / "store")
    return open_objects(request.getfixturevalue("s3"))


def test_what_is_put_is_there_until_it_is_deleted(objects):
    data = {"a/zarr.json": b"{}", "a/state/c/3/0": os.urandom(100_000), "b/x": b"", "store.json": b"1"}
    for key, content in data.items():
        objects.put(key, content)
    assert {key: objects.get(key) for key in data} == data
    assert sorted(objects.list()) == sorted(data)
    objects.put("b/x", b"new")
    assert objects.get("b/x") == b"new"
    objects.delete("b/x")
    objects.delete("b/x")
    assert sorted(objects.list()) == ["a/state/c/3/0", "a/zarr.json", "store.json"]


def test_parts_are_read_in_the_order_asked(objects):
    data = {"x": os.urandom(5000), "y": os.urandom(3000)}
    for key, content in data.items():
        objects.put(key, content)
    spans = [("x", 10, 20), ("y", 0, 3000), ("x", 4000, 5000), ("x", 15, 16)]
    assert objects.read(spans) == [data[key][first:end] for key, first, end in spans]
    assert objects.read([]) == []


def test_parts_that_lie_close_together_are_one_request(tmp_path, monkeypatch):
    objects, requests = RemoteObjects(f"file://{tmp_path}"), WatchedRequests(monkeypatch)
    data = os.urandom(3_000_000)
    objects.put("x", data)
    objects.put("y", b"12345")
    spans = [("x", 2_900_000, 3_000_000), ("x", 0, 10), ("x", 600_000, 600_001), ("y", 1, 3)]
    assert objects.read(spans) == [data[2_900_000:], data[:10], data[600_000:600_001], b"23"]
    assert sorted(requests.pop()) == [("x", 0, 600_001), ("x", 2_900_000, 3_000_000), ("y", 1, 3)]


@pytest.mark.parametrize("key", ["gone", "x/deeper"])
def test_what_is_gone_or_short_is_corrupt(objects, key):
    objects.put("x", b"12345")
    with pytest.raises(CorruptDataError, match="is gone"):
        objects.get(key)
    with pytest.raises(CorruptDataError, match="is gone"):
        objects.read([("x", 0, 1), (key, 0, 1)])
    for span in (("x", 0, 6), ("x", 5, 6), ("x", 70, 80)):
        with pytest.raises(CorruptDataError, match=r"ends before byte"):
            objects.read([("x", 0, 2), span])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EROFS, NotWritableError),
        (errno.EIO, StorageError),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_disk_leaves_nothing_behind(tmp_path, monkeypatch, code, kind, call):
    objects = LocalObjects(tmp_path)
    objects.put("a/b", b"old")

    def fail(*_args):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(kind):
            objects.put("a/b", b"new")
    assert list(objects.list()) == ["a/b"]
    assert objects.get("a/b") == b"old"
    assert objects.clean() == 0


def test_what_a_crash_left_half_written_is_no_object_and_goes(tmp_path):
    objects = LocalObjects(tmp_path)
    objects.put("a", b"1")
    (tmp_path / ".writing" / "77-1-0.part").write_bytes(b"half")
    assert list(objects.list()) == ["a"]
    assert objects.clean() == 1
    assert objects.clean() == 0
    assert objects.get("a") == b"1"


@pytest.mark.slow
def test_errors_of_an_object_store_name_the_place_and_no_secret(s3, monkeypatch):
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    with pytest.raises(CorruptDataError, match=r"s3://fleet/some/prefix/gone is gone"):
        RemoteObjects(s3).get("gone")
    with pytest.raises(CorruptDataError, match=r"create the bucket"):
        RemoteObjects("s3://no-such-bucket/x").put("a", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    objects = RemoteObjects("s3://fleet/prefix")
    for call in (lambda: objects.put("a", b"1"), lambda: objects.get("a"), lambda: list(objects.list())):
        with pytest.raises(StorageError, match=r"s3://fleet/prefix") as caught:
            call()
        assert secret not in str(caught.value) and "an-access-key" not in str(caught.value)
        assert "AWS_ENDPOINT_URL" in str(caught.value)
    with pytest.raises(ConfigError) as told:
        open_objects(f"nonsense://me:{secret}@host/x")
    assert secret not in str(told.value) and "s3://bucket/prefix" in str(told.value)


def test_a_store_that_is_silent_is_given_up_and_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        objects = RemoteObjects("s3://fleet/prefix", timeout_s=0.1)
        patient = RemoteObjects("s3://fleet/prefix", timeout_s=0.5)
        began = time.monotonic()
        with pytest.raises(StorageError, match="Check the network"):
            patient.get("a")
        # a whole request may last six seconds, but none in which nothing comes
        assert time.monotonic() - began < 4
        for call in (lambda: objects.get("a"), lambda: objects.read([("a", 5, 9)]), lambda: objects.put("a", b"1")):
            with pytest.raises(StorageError, match=r"s3://fleet/prefix/a.*Check the network and AWS_ENDPOINT_URL"):
                call()
