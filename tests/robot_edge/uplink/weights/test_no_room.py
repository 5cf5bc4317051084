"""A version that cannot run here is not fetched: its fault names the way out, and the next one is tried."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from robot_edge.uplink.weights.client import WeightClient
from tests.cloud_learner.fake_edge import SPEC
from tests.robot_edge.uplink.weights.fleet import Fleet
from tests.wire.weights.files import version_of
from wire.messages.gateway import VersionAvailable
from wire.weights.manifest import RUNTIME, Manifest, Signer, hash_bytes

Limit = Callable[[pytest.MonkeyPatch, int], None]


def memory(patch: pytest.MonkeyPatch, size: int) -> None:
    sysconf = os.sysconf
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size}
    patch.setattr(os, "sysconf", lambda name: pages.get(name) or sysconf(name))


def disk(patch: pytest.MonkeyPatch, size: int) -> None:
    usage = shutil.disk_usage
    patch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=size + 64 * 1024 * 1024))


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


LIMITS = pytest.mark.parametrize(
    "limit, says", [(memory, r"of memory: run its policy on another one"), (disk, r"free below .*: free some room")]
)


@LIMITS
def test_a_version_that_is_too_large_is_refused_before_anything_of_it_comes(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, limit: Limit, says: str
) -> None:
    limit(monkeypatch, 20_000)
    fleet.publish()
    fleet.run(3)
    assert fleet.robot.ready is None
    assert fleet.client.fetched_bytes == 0
    assert not list(fleet.here.iterdir())
    with pytest.raises(AssertionError, match=f"version 1 has 0 MB, .*{says}"):
        raise AssertionError(fleet.client.fault)


@LIMITS
def test_one_that_is_smaller_is_fetched_later(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, limit: Limit, says: str
) -> None:
    fleet.publish()
    fleet.fetch(1)
    large = b"x" * 100_000
    with monkeypatch.context() as patch:
        limit(patch, 50_000)
        fleet.client.fetch(version_of(7, large))
        assert "version 7" in fleet.client.fault
        fleet.run(3)
        number = fleet.publish()
        fleet.fetch(number)
        assert fleet.client.fault == ""


@LIMITS
def test_going_back_to_what_is_here_is_no_fault(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, limit: Limit, says: str
) -> None:
    for _ in range(2):
        fleet.fetch(fleet.publish())
    for number in (2, 1):
        with monkeypatch.context() as patch:
            limit(patch, 50_000)
            fleet.client.fetch(version_of(7, b"x" * 100_000))
            assert "version 7" in fleet.client.fault
            fleet.call_back(number)
            fleet.run(0.1)
        assert fleet.has(number) and fleet.client.fault == ""


@LIMITS
def test_what_was_announced_meanwhile_is_fetched_though_this_one_cannot_be(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, limit: Limit, says: str
) -> None:
    first, large, small = (version_of(number, b"x" * size) for number, size in ((5, 30_000), (6, 100_000), (7, 30_000)))
    limit(monkeypatch, 50_000)
    for version in (first, large, small):
        fleet.client.fetch(version)
    wanted, following = fleet.client._wanted, fleet.client._following
    assert wanted is not None and wanted.version == first
    assert following is not None and following.version == small


def test_there_is_room_again_when_it_is_announced_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        disk(patch, 1000)
        fleet.publish()
        fleet.run(1)
    assert fleet.client.fault
    fleet.call_back(1)
    fleet.fetch(1)
    assert fleet.client.fault == ""


def test_a_disk_that_fills_meanwhile_leaves_nothing_and_the_next_announcement_tries_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.publish()
    fleet.fetch(1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    number = fleet.publish()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        fleet.run(3)
    assert "keeping version 2: no space left" in caplog.text
    assert [path.name for path in fleet.here.iterdir()] == [fleet.file(1).name]
    fleet.call_back(number)
    assert fleet.fetch(number) == fleet.size(number)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"spec_hash": "another"}, "is for robot spec another, .* start it with the fleet's recipe, or have it join"),
        ({"runtime": RUNTIME + 1}, "version 1 needs runtime .*: install the gateway's vla-fleet"),
        ({"chunks": b""}, "hashes of other than all its chunks"),
        ({"version": version_of(2, b"x")}, "a manifest of another version"),
    ],
)
def test_a_version_whose_manifest_does_not_fit_is_not_fetched(
    fleet: Fleet, change: dict[str, object], says: str
) -> None:
    signer, data = Signer(b"x" * 32), b"data"
    good = Manifest(version_of(1, data), hash_bytes(data), spec_hash=SPEC.hash)
    manifest = msgspec.msgpack.encode(msgspec.structs.replace(good, **change))
    client: WeightClient = fleet.client
    client.check.key = signer.public
    client.handle_message(VersionAvailable(good.version, 1, manifest, signer.sign(manifest)))
    assert re.search(says, client.fault) and client.refused["manifest"] == 1
    assert client._wanted is None
    # nor one that was signed by somebody else
    manifest = msgspec.msgpack.encode(good)
    client.handle_message(VersionAvailable(good.version, 1, manifest, Signer(b"y" * 32).sign(manifest)))
    assert "did not sign" in client.fault and client._wanted is None
    assert "connect this robot to its own fleet's gateway" in client.fault
    client.handle_message(VersionAvailable(good.version, 1, manifest, signer.sign(manifest)))
    assert client.fault == "" and client._wanted is not None
