"""A bad connection on demand: what the plan says goes wrong, when it says so, and the same way again."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from wire.clock import ManualClock
from wire.codec import encode
from wire.errors import ConfigError
from wire.messages import Message
from wire.messages.gateway import Heartbeat, Rejection
from wire.transport.faults import FaultPlan, FaultWindow, LinkState
from wire.transport.memory_channel import MemoryPairEnd, MemoryServer, memory_pair

MS = 1_000_000


def sent_through(plan: FaultPlan, count: int = 200, every_ms: int = 1) -> tuple[list[tuple[int, int]], MemoryPairEnd]:
    """(number, when it came in ms) of `count` heartbeats, and the end they came to."""
    clock = ManualClock()
    near, far = memory_pair(plan, clock)
    came: list[tuple[int, int]] = []
    for number in range(count + 5000):
        if number < count:
            near.send(Heartbeat(number))
        came += [(m.sent_ns, clock.now_ns() // MS) for m in iter(far.recv, None) if isinstance(m, Heartbeat)]
        clock.advance(every_ms * MS)
    return came, far


def numbers(plan: FaultPlan, count: int = 200) -> list[int]:
    return [number for number, _ in sent_through(plan, count)[0]]


def test_without_a_window_everything_comes_at_once_and_in_order() -> None:
    came, _ = sent_through(FaultPlan())
    assert came == [(number, number) for number in range(200)]


def test_a_share_is_lost_the_same_one_each_time_and_another_with_another_seed() -> None:
    plan = FaultPlan((FaultWindow(drop=0.3),), seed=1)
    first = numbers(plan, 1000)
    assert 600 < len(first) < 800
    assert numbers(plan, 1000) == first
    assert numbers(FaultPlan(plan.windows, seed=2), 1000) != first


def test_a_message_has_its_fate_whatever_windows_there_were_before_it() -> None:
    lossy = FaultWindow(0.1, 0.2, drop=0.3)
    alone = set(numbers(FaultPlan((lossy,)), 300))
    after_delay = set(numbers(FaultPlan((FaultWindow(0, 0.1, delay_s=0.02), lossy)), 300))
    assert alone == after_delay and len(alone) < 300


def test_only_within_its_window() -> None:
    lost = set(range(300)) - set(numbers(FaultPlan((FaultWindow(0.1, 0.2, drop=1.0),)), 300))
    assert lost == set(range(100, 200))


def test_some_come_twice() -> None:
    times = Counter(Counter(numbers(FaultPlan((FaultWindow(duplicate=0.25),)), 400)).values())
    assert times[1] + times[2] == 400 and 60 < times[2] < 140


def test_some_are_overtaken_and_none_is_lost() -> None:
    came = numbers(FaultPlan((FaultWindow(reorder=0.2),)))
    assert came != sorted(came) and sorted(came) == list(range(200))


def test_delay_and_jitter_keep_the_order() -> None:
    came, _ = sent_through(FaultPlan((FaultWindow(delay_s=0.02, jitter_s=0.03),)))
    assert [number for number, _ in came] == list(range(200))
    late = [when - number for number, when in came]
    assert min(late) >= 20 and 35 < max(late) <= 51


def test_a_slow_line_carries_so_many_bytes_a_second() -> None:
    size = len(encode(Heartbeat(0)))
    came, _ = sent_through(FaultPlan((FaultWindow(bytes_per_s=100 * size),)), 100)
    assert len(came) == 100
    assert 900 < came[-1][1] < 1100


def test_what_waited_for_a_stall_comes_afterwards_and_what_a_silent_line_took_does_not() -> None:
    stalled, _ = sent_through(FaultPlan((FaultWindow(0.05, 0.15, LinkState.stalled),)))
    assert [number for number, _ in stalled] == list(range(200))
    assert {when for number, when in stalled if 50 <= number < 150} == {150}
    assert numbers(FaultPlan((FaultWindow(0.05, 0.15, LinkState.silent),))) == [*range(50), *range(150, 200)]
    assert numbers(FaultPlan((FaultWindow(0.05, math.inf, LinkState.stalled),))) == list(range(50))


def test_a_cut_line_says_so_and_takes_what_was_on_its_way() -> None:
    clock = ManualClock()
    server = MemoryServer(FaultPlan((FaultWindow(0, 1, delay_s=0.01), FaultWindow(1, 2, LinkState.cut))), clock)
    client = server.connect("robot-0")
    clock.advance(995 * MS)
    assert client.send(Heartbeat(1)) and server.send("robot-0", Heartbeat(2))
    clock.advance(10 * MS)
    assert not client.send(Heartbeat(3)) and not server.send("robot-0", Heartbeat(4))
    assert server.recv() is None and client.recv() is None
    clock.advance(1000 * MS)
    assert client.send(Heartbeat(5)) and server.send("robot-0", Heartbeat(6))
    received = server.recv()
    assert received is not None and received[0] == "robot-0"
    assert isinstance(client.recv(), Heartbeat)


def test_what_was_damaged_is_counted_or_a_message_and_its_sender_is_told() -> None:
    clock = ManualClock()
    server = MemoryServer(FaultPlan((FaultWindow(0, 1, corrupt=1.0),)), clock)
    client = server.connect("robot-0")
    for number in range(100):
        client.send(Heartbeat(number))
    read = list(iter(server.recv, None))
    assert server.refused.total() + len(read) == 100 and server.refused["malformed"] > 50
    clock.advance(1000 * MS)
    server.send("robot-0", Heartbeat(0))
    told: list[Message] = list(iter(client.recv, None))
    assert isinstance(told[-1], Heartbeat)
    assert sum(isinstance(message, Rejection) for message in told) + client.refused.total() > 50


@pytest.mark.parametrize(
    "wrong",
    [
        {"drop": 1.5},
        {"corrupt": -0.1},
        {"delay_s": math.inf},
        {"start_s": 3.0, "end_s": 2.0},
        {"bytes_per_s": 0.0},
    ],
)
def test_a_window_that_cannot_be_is_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="fault window"):
        FaultWindow(**wrong)  # type: ignore[arg-type]
