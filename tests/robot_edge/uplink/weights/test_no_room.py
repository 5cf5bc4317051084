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

from robot_edge.runtime.memory import AvailableMemory
from robot_edge.uplink.server import Uplink
from robot_edge.uplink.weights import file
from robot_edge.uplink.weights.client import WeightClient
from tests.cloud_learner.fake_edge import SPEC
from tests.robot_edge.uplink.weights.fleet import CHUNK, Fleet, small_chunks
from tests.wire.weights.files import version_of
from wire.clock import ManualClock
from wire.messages.gateway import VersionAvailable, WeightBytes
from wire.messages.local import LoadWeights
from wire.transport.faults import FaultWindow
from wire.transport.memory_channel import memory_pair
from wire.types import PolicyVersion
from wire.weights.manifest import RUNTIME, Manifest, Signer, hash_bytes

Limit = Callable[[pytest.MonkeyPatch, int], None]


def memory(patch: pytest.MonkeyPatch, size: int) -> None:
    """For a version of that size."""
    patch.setattr(file, "available_memory", lambda: AvailableMemory(2 * size, "/proc/meminfo"))


def disk(patch: pytest.MonkeyPatch, size: int) -> None:
    usage = shutil.disk_usage
    patch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=size + 64 * 1024 * 1024))


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


LIMITS = pytest.mark.parametrize(
    "limit, says", [(memory, r"\(/proc/meminfo\): end other programs"), (disk, r"are free there: free some room")]
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
    with pytest.raises(AssertionError, match=rf"version 1 needs 0\.. MB .*{says}"):
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


def small_disk(patch: pytest.MonkeyPatch, fleet: Fleet, room: int) -> None:
    """With room for so many bytes of weights in all."""
    usage = shutil.disk_usage

    def free(path: Path) -> object:
        taken = sum(one.stat().st_size for one in fleet.here.rglob("*"))
        return usage(path)._replace(free=room - taken + 64 * 1024 * 1024)

    patch.setattr(shutil, "disk_usage", free)


def test_what_is_rebuilt_from_deltas_takes_the_room_of_both(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.fetch(fleet.publish())
    number, whole = fleet.publish(), len(fleet.files[1])
    for room, fetched in ((-1, 0), (fleet.size(2) - 1, whole), (fleet.size(2), fleet.size(2))):
        with monkeypatch.context() as patch:
            small_disk(patch, fleet, 2 * whole + room)
            before = fleet.client.fetched_bytes
            fleet.call_back(number)
            fleet.run(3)
            assert fleet.client.fetched_bytes - before == fetched
            assert fleet.has(number) == (room >= 0) == (fleet.client.fault == "")
        if fleet.has(number):
            fleet.call_back(1)
            fleet.until(lambda: fleet.has(1))
            fleet.file(number).unlink()


def test_what_came_before_a_kill_needs_no_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    fleet = Fleet(tmp_path, faults=FaultWindow(bytes_per_s=40_000))
    fleet.publish()
    whole = len(fleet.files[1])
    small_disk(monkeypatch, fleet, whole)
    fleet.half(1, 4 * CHUNK)
    kept = fleet.coming().stat().st_size // CHUNK * CHUNK
    fleet.start_robot()
    assert kept and fleet.fetch(1) == whole - kept


def test_superseded_versions_give_way_but_not_in_vain_and_none_that_is_used(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        fleet.fetch(fleet.publish(whole=True))
    whole = len(fleet.files[1])
    small_disk(monkeypatch, fleet, 3 * whole)
    fleet.client.fetch(version_of(9, b"x" * (2 * whole + 1)))
    assert "version 9 needs" in fleet.client.fault
    assert [len(list(fleet.here.glob(f"0000000{number}-*"))) for number in (1, 2, 3)] == [1, 1, 1]
    fleet.call_back(1)
    fleet.until(lambda: fleet.has(1))
    number = fleet.publish(whole=True)
    assert fleet.fetch(number) == whole
    here = sorted(int(path.name[:8]) for path in fleet.here.glob("*.safetensors"))
    assert here == [1, 3, 4], "2 was used longest ago"
    # the base of a delta is used
    number = fleet.publish()
    assert fleet.fetch(number) == fleet.size(number)
    assert fleet.file(4) and not list(fleet.here.glob("00000003-*"))


def test_a_refusal_says_what_is_needed_for_what_what_there_is_and_where(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        disk(patch, 100_000_000)
        fleet.client.fetch(PolicyVersion(7, "ab" * 32, 300_000_000, 6, 1, 1, 1))
    assert fleet.client.fault == (
        f"version 7 needs 300.0 MB below {fleet.here} for its file, besides 67.1 MB that stay free, and 167.1 MB are "
        "free there: free some room, or choose a --data directory on a larger disk."
    )
    with monkeypatch.context() as patch:
        memory(patch, 100_000_000)
        fleet.client.fetch(PolicyVersion(7, "ab" * 32, 300_000_000, 6, 1, 1, 1))
    assert fleet.client.fault == (
        "version 7 needs 600.0 MB of memory, for its file and the tensors in it while it is loaded beside the one that "
        "acts, and 200.0 MB are available (/proc/meminfo): end other programs, allow this one more, choose a smaller "
        "policy, or run it on another computer (`--think`)."
    )


@LIMITS
def test_a_robot_tries_again_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: Limit, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, channel = memory_pair()
    inference, line = memory_pair()
    clock, data = ManualClock(1), b"x" * 1000
    uplink = Uplink("robot-0", tmp_path, channel, memory_pair()[0], line, clock)
    with monkeypatch.context() as patch:
        limit(patch, 500)
        gateway.send(VersionAvailable(version_of(1, data), 1))
        for _ in range(200):
            uplink.poll()
            clock.advance(10**9)
        assert "version 1 needs" in uplink.weights.fault and caplog.text.count("version 1 needs") == 1
    for _ in range(40):
        uplink.poll()
        clock.advance(10**9)
    assert uplink.weights.fetching == 1 and uplink.weights.fault == ""
    gateway.send(WeightBytes(1, 0, data))
    uplink.poll()
    assert isinstance(inference.recv(), LoadWeights)
    uplink.close()


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

    def full(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:1000])
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


def test_a_version_without_a_signature_is_taken_only_where_nobody_signs(fleet: Fleet) -> None:
    fleet.publish()
    fleet.fetch(1)
    client, offer = fleet.client, VersionAvailable(version_of(2, b"data"), 1)
    assert client.check.key == Signer(b"x" * 32).public, "as the gateway said"
    client.handle_message(offer)
    assert client._wanted is None and client.refused["manifest"] == 1
    says = "version 2 .* without a signature, .* signs .*: wait until .*`vla-fleet versions"
    assert re.search(says, client.fault)
    assert fleet.has(1), "it goes on with what it has"
    # its gateway signs it after all
    fleet.publish()
    fleet.fetch(2)
    assert client.fault == ""
    client.check.key = b""
    client.handle_message(VersionAvailable(version_of(3, b"data"), 1))
    assert client.fetching == 3
