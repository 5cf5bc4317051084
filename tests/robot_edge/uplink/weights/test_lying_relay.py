"""A relay may be anybody: it can delay a version, and no more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from robot_edge.uplink.weights.client import WeightClient
from tests.robot_edge.uplink.weights.fleet import CHUNK, SECOND, Fleet, small_chunks
from wire.clock import ManualClock
from wire.messages.gateway import FetchWeights, WeightBytes
from wire.transport.memory_channel import memory_pair

replace = msgspec.structs.replace
Relay = Callable[[Fleet, FetchWeights], list[WeightBytes]]


@pytest.fixture(autouse=True)
def chunks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)


def answer(asked: FetchWeights, data: bytes) -> WeightBytes:
    return WeightBytes(asked.number, asked.offset, data, asked.delta)


def honest(fleet: Fleet, asked: FetchWeights) -> list[WeightBytes]:
    return [answer(asked, fleet.right(asked))]


def old(fleet: Fleet, asked: FetchWeights) -> list[WeightBytes]:
    """The same place of the version before."""
    before = fleet.right(replace(asked, number=asked.number - 1)) if asked.number > 2 else bytes(asked.size)
    return [answer(asked, before.ljust(asked.size, b"x")[: asked.size])]


LIES: dict[str, Relay] = {
    "wrong bytes": lambda fleet, asked: [answer(asked, bytes(asked.size))],
    "one bit": lambda fleet, asked: [answer(asked, bytes([fleet.right(asked)[0] ^ 1]) + fleet.right(asked)[1:])],
    "old bytes": old,
    "more": lambda fleet, asked: [answer(asked, fleet.right(asked) + b"x")],
    "much more": lambda fleet, asked: [answer(asked, fleet.right(asked) + bytes(1_000_000))],
    "nothing": lambda fleet, asked: [answer(asked, b"")],
    "torn": lambda fleet, asked: [answer(asked, fleet.right(asked)[:-1])],
    "torn and wrong": lambda fleet, asked: [answer(asked, bytes(asked.size // 2))],
    "silence": lambda fleet, asked: [],
    "another place": lambda fleet, asked: [replace(honest(fleet, asked)[0], offset=asked.offset + 1)],
    "another version": lambda fleet, asked: [replace(honest(fleet, asked)[0], number=1000)],
    "another file": lambda fleet, asked: [replace(honest(fleet, asked)[0], delta=not asked.delta)],
    "everything twice, and wrong": lambda fleet, asked: [answer(asked, bytes(asked.size))] * 2,
}


def start(root: Path, relay: Relay, **options: object) -> Fleet:
    """With a first version here, from the gateway."""
    fleet = Fleet(root, relay=lambda asked: [], **options)  # type: ignore[arg-type]
    fleet.client._relay_rests_ns = 2 * SECOND
    fleet.publish()
    fleet.fetch(1)
    fleet.relay = lambda asked: relay(fleet, asked)
    fleet.run(3)
    assert fleet.relayed == [] and fleet.client.refused == {}
    return fleet


def test_what_an_honest_relay_has_is_not_asked_of_the_gateway(tmp_path: Path) -> None:
    fleet = start(tmp_path, honest)
    served: list[FetchWeights] = []
    store = fleet.hall.gateway._versions._weights
    serve, store.serve = store.serve, lambda asked: served.append(asked) or serve(asked)  # type: ignore[method-assign]
    for whole in (False, True):
        number = fleet.publish(whole)
        size = len(fleet.files[number]) if whole else fleet.size(number)
        assert fleet.fetch(number) == size
    assert served == [] and fleet.relayed != []
    assert fleet.client.refused == {}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_a_relay_that_lies_is_named_and_left_out_for_a_minute(
    tmp_path: Path, lie: str, whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = start(tmp_path, LIES[lie])
    with caplog.at_level(logging.ERROR):
        number = fleet.publish(whole)
        size = len(fleet.files[number]) if whole else fleet.size(number)
        # of what the relay sent a window at most was for nothing
        assert fleet.fetch(number, 14.0) <= 2 * size
    assert fleet.client.refused["relay"] == 1
    (told,) = [record.message for record in caplog.records if "the relay" in record.message]
    assert "for a minute the gateway is asked instead" in told
    assert {asked.number for asked in fleet.relayed} == {number}
    fleet.relayed.clear()
    for _ in range(3):
        number = fleet.publish()
        assert fleet.fetch(number, 2.0) == fleet.size(number)
    assert fleet.relayed == [] and fleet.client.refused["relay"] == 1
    fleet.run(60)
    fleet.relay = lambda asked: honest(fleet, asked)
    fleet.fetch(fleet.publish(), 2.0)
    assert fleet.relayed != [] and fleet.client.refused["relay"] == 1


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_a_relay_that_lies_late_spoils_nothing_that_came_before(tmp_path: Path, lie: str, whole: bool) -> None:
    fleet = start(tmp_path, honest, count=200_000 if not whole else 8000)
    fleet.relay = lambda asked: (honest if asked.offset < 3 * CHUNK else LIES[lie])(fleet, asked)
    number = fleet.publish(whole)
    size = len(fleet.files[number]) if whole else fleet.size(number)
    assert size > 4 * CHUNK
    assert fleet.fetch(number, 14.0) <= size + 2 * CHUNK
    assert fleet.client.refused["relay"] == 1


def test_a_base_that_is_damaged_here_is_not_the_relays_fault(tmp_path: Path) -> None:
    fleet = start(tmp_path, honest)
    fleet.file(1).write_bytes(bytes(len(fleet.files[1])))
    fleet.fetch(fleet.publish())
    assert fleet.client.refused == {}


def test_what_a_relay_sends_unasked_is_not_heard(tmp_path: Path) -> None:
    fleet = start(tmp_path, honest)
    fleet.client._relay_rests_ns = fleet.clock.now_ns() + 60 * SECOND
    number = fleet.publish()
    for _ in range(5):
        for offset in (0, CHUNK):
            for delta in (False, True):
                fleet._relay.send(WeightBytes(number, offset, bytes(100), delta))
        fleet.step()
    assert fleet.has(number)
    assert fleet.client.refused == {}


def test_a_relay_is_not_asked_for_what_nobody_has_a_hash_of(tmp_path: Path) -> None:
    far, relay = memory_pair()
    gateway, channel = memory_pair()
    client = WeightClient(tmp_path, channel, ManualClock(SECOND), relay=relay)
    fleet = Fleet(tmp_path / "fleet")
    fleet.train()
    client.fetch(fleet.version(1))
    assert far.recv() is None
    assert isinstance(gateway.recv(), FetchWeights)
