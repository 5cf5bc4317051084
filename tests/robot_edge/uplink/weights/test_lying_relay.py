"""A relay may be anybody: it can delay a version, and no more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from robot_edge.uplink.weights.client import WeightClient
from robot_edge.uplink.weights.relay_source import RelaySource
from tests.robot_edge.uplink.weights.fleet import CHUNK, SECOND, Fleet, small_chunks
from wire.clock import ManualClock
from wire.messages.gateway import FetchWeights, Rejection, WeightBytes
from wire.transport.faults import FaultWindow
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
    "drip": lambda fleet, asked: [answer(asked, fleet.right(asked)[:1])],
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
    fleet.source._rests_ns = 2 * SECOND
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
    assert "for 1 min the gateway is asked instead" in told and fleet.source.name in told
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


@pytest.mark.parametrize("leave", ["refuse", "be silent"])
def test_a_relay_that_lies_and_leaves_the_rest_of_the_chunk_to_the_gateway_is_named_too(
    tmp_path: Path, leave: str
) -> None:
    fleet = start(tmp_path, honest)
    window = fleet.client._requests.window
    window.size_bytes, window.adapt = 300, lambda *given: None  # type: ignore[method-assign]
    chunks: set[int] = set()

    def lie(asked: FetchWeights) -> list[WeightBytes]:
        if asked.offset // CHUNK not in chunks:
            chunks.add(asked.offset // CHUNK)
            return [answer(asked, bytes(asked.size))]
        if leave == "refuse":
            fleet._relay.send(Rejection("not here.", asked))
        return []

    fleet.relay = lie
    number = fleet.publish()
    window.begin = lambda: None  # type: ignore[method-assign]
    assert fleet.fetch(number, 14.0) <= fleet.size(number) + CHUNK
    assert fleet.client.refused["relay"] == 1 and fleet.source.faults == 1
    fleet.relayed.clear()
    fleet.fetch(fleet.publish(), 2.0)
    assert fleet.relayed == [], "it is left out"


@pytest.mark.parametrize(("every_s", "most_s"), [(9.0, 12.0), (1.0, 13.0)])
def test_a_relay_that_is_slower_than_it_may_be_holds_nobody(tmp_path: Path, every_s: float, most_s: float) -> None:
    """All of it is right, and a part of 4 KiB comes every few seconds."""
    fleet = start(tmp_path, honest, count=32_000)
    waiting: list[FetchWeights] = []
    fleet.relay = lambda asked: waiting.append(asked) or []  # type: ignore[func-returns-value]
    number, at_ns = fleet.publish(whole=True), fleet.clock.now_ns()
    next_ns = at_ns + every_s * SECOND
    while not fleet.has(number):
        fleet.step()
        if waiting and fleet.clock.now_ns() >= next_ns:
            fleet._relay.send(honest(fleet, waiting.pop(0))[0])
            next_ns += every_s * SECOND
        assert fleet.clock.now_ns() - at_ns < most_s * SECOND
    assert fleet.client.refused["relay"] == 1


def test_a_relay_that_is_slow_and_goes_on_is_asked_for_all_of_it(tmp_path: Path) -> None:
    """30 kB/s, which is what the site's line brings."""
    fleet = start(tmp_path, honest, count=200_000)
    waiting: list[FetchWeights] = []
    fleet.relay = lambda asked: waiting.append(asked) or []  # type: ignore[func-returns-value]
    number = fleet.publish(whole=True)
    ready_ns: float = fleet.clock.now_ns()
    while not fleet.has(number):
        fleet.step()
        if waiting and fleet.clock.now_ns() >= ready_ns:
            fleet._relay.send(honest(fleet, asked := waiting.pop(0))[0])
            ready_ns = fleet.clock.now_ns() + asked.size / 30e3 * SECOND
    assert fleet.client.refused == {}
    assert sum(asked.size for asked in fleet.relayed) == len(fleet.files[number])


def test_a_relay_is_asked_for_chunks_from_their_beginning(tmp_path: Path) -> None:
    """It may have to fetch one from there before it can hand out the middle."""
    fleet = start(tmp_path, honest, faults=FaultWindow(bytes_per_s=40_000))
    fleet.source._rests_ns = fleet.clock.now_ns() + 600 * SECOND
    fleet.client._requests.window.size_bytes = 1000
    number = fleet.publish(whole=True)
    fleet.until(lambda: fleet.client._requests.received % CHUNK)
    fleet.source._rests_ns = 0
    fleet.fetch(number)
    assert fleet.relayed and fleet.relayed[0].offset % CHUNK == 0


def test_a_relay_that_lies_again_is_left_out_for_twice_as_long_up_to_an_hour(tmp_path: Path) -> None:
    fleet = start(tmp_path, honest)

    def rest_min(relay: Relay) -> int:
        """For how long it is left out after the next version; that is over when this returns."""
        fleet.relay = lambda asked: relay(fleet, asked)
        fleet.fetch(fleet.publish(whole=True), 14.0)
        left_s = (fleet.source._rests_ns - fleet.clock.now_ns()) / SECOND
        fleet.clock.advance(round(max(0.0, left_s) * SECOND))
        fleet.run(3)
        return round(max(0.0, left_s) / 60)

    def late(fleet: Fleet, asked: FetchWeights) -> list[WeightBytes]:
        return (honest if asked.offset < 2 * CHUNK else LIES["wrong bytes"])(fleet, asked)

    assert [rest_min(LIES["one bit"]) for _ in range(3)] == [1, 2, 4]
    assert [rest_min(late) for _ in range(5)] == [8, 16, 32, 60, 60], "right chunks are not yet a right version"
    assert fleet.source.faults == 8
    assert rest_min(honest) == 0
    assert rest_min(LIES["one bit"]) == 1, "a version that was whole and right"


def test_a_relay_may_refuse_at_once_but_not_late(tmp_path: Path) -> None:
    fleet = start(tmp_path, honest)
    late_s = 0.0
    waiting: list[tuple[float, FetchWeights]] = []

    def fetch_s() -> float:
        """How long the next version takes when each request is refused after `late_s`."""
        number, began_ns = fleet.publish(), fleet.clock.now_ns()
        waiting.clear()
        fleet.relay = lambda asked: waiting.append((fleet.clock.now_ns() + late_s * SECOND, asked)) or []  # type: ignore[func-returns-value]
        while not fleet.has(number):
            fleet.step()
            while waiting and waiting[0][0] <= fleet.clock.now_ns():
                fleet._relay.send(Rejection("not here.", waiting.pop(0)[1]))
        return (fleet.clock.now_ns() - began_ns) / SECOND

    assert max(fetch_s() for _ in range(20)) < 0.3
    assert fleet.client.refused == {} and len(fleet.relayed) >= 20
    late_s = 6.0
    took_s = [fetch_s() for _ in range(5)]
    assert sum(took_s) < 11, "it has used up its time"
    assert fleet.client.refused["relay"] == 1


def test_a_relay_that_refuses_for_a_moment_brings_the_rest(tmp_path: Path) -> None:
    """Its line was cut, say, in a version that takes minutes."""
    fleet = start(tmp_path, honest, faults=FaultWindow(bytes_per_s=10_000), count=60_000)
    refusing = True

    def relay(asked: FetchWeights) -> list[WeightBytes]:
        if not refusing:
            return honest(fleet, asked)
        fleet._relay.send(Rejection("the gateway does not answer the relay.", asked))
        return []

    fleet.relay = relay
    number = fleet.publish(whole=True)
    fleet.until(lambda: fleet.relayed)
    refusing = False
    fleet.fetch(number, 60.0)
    assert sum(asked.size for asked in fleet.relayed) > len(fleet.files[number]) / 2
    assert fleet.client.refused == {}


def test_a_late_answer_to_a_smaller_request_is_no_lie(tmp_path: Path) -> None:
    """Of a shadow's client, say, which asks the same relay."""
    fleet = start(tmp_path, honest)
    number = fleet.publish()
    small = FetchWeights(number, 0, 100, True, bytes(32))
    fleet.source.send(small)

    def late(asked: FetchWeights) -> list[WeightBytes]:
        if asked.size == small.size:
            return []
        return [*(honest(fleet, small) if asked.offset == 0 else []), *honest(fleet, asked)]

    fleet.relay = late
    fleet.fetch(number)
    assert {asked.offset for asked in fleet.relayed} >= {0, 100}, "it was taken"
    assert fleet.client.refused == {}


def test_a_base_that_is_damaged_here_is_not_the_relays_fault(tmp_path: Path) -> None:
    fleet = start(tmp_path, honest)
    fleet.file(1).write_bytes(bytes(len(fleet.files[1])))
    fleet.fetch(fleet.publish())
    assert fleet.client.refused == {}


def test_a_gateway_that_does_not_say_which_deltas_there_are_is_not_the_relays_fault(tmp_path: Path) -> None:
    fleet = start(tmp_path, honest)
    fleet.fetch(fleet.publish())
    fleet.file(2).unlink()
    fleet.hall.gateway._versions._weights.deltas = lambda asked: None  # type: ignore[method-assign,assignment,return-value]
    fleet.fetch(fleet.publish())
    assert fleet.client.refused == {}


def test_what_a_relay_sends_unasked_is_not_heard(tmp_path: Path) -> None:
    fleet = start(tmp_path, honest)
    fleet.source._rests_ns = fleet.clock.now_ns() + 60 * SECOND
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
    clock = ManualClock(SECOND)
    client = WeightClient(tmp_path, channel, clock, relay=RelaySource(relay, clock))
    fleet = Fleet(tmp_path / "fleet")
    fleet.train()
    client.fetch(fleet.version(1))
    assert far.recv() is None
    assert isinstance(gateway.recv(), FetchWeights)
