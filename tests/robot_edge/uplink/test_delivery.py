"""Across a bad connection everything arrives once and in order, and the newest in time; what is dropped is told."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from robot_edge.uplink.spool_index import is_kept
from tests.robot_edge.uplink.deliveries import SECOND, TICK_S, World
from wire.messages.gateway import EdgeEvent, EdgeStatus, Heartbeat, Segment
from wire.transport.faults import FaultPlan, FaultWindow, LinkState


def random_plan(draw: random.Random) -> FaultPlan:
    """What goes wrong in a minute."""
    windows, at_s = [], 0.0
    while at_s < 60:
        at_s += draw.uniform(1, 10)
        end_s = at_s + draw.choice((0.3, 2.0, 5.0, 12.0))
        link = draw.choice((LinkState.up, LinkState.up, LinkState.stalled, LinkState.silent, LinkState.cut))
        windows.append(
            FaultWindow(
                at_s,
                end_s,
                link=link,
                drop=draw.choice((0.0, 0.3)),
                duplicate=draw.choice((0.0, 0.2)),
                reorder=draw.choice((0.0, 0.2)),
                delay_s=draw.choice((0.0, 0.4)),
                jitter_s=draw.choice((0.0, 0.3)),
                bytes_per_s=draw.choice((float("inf"), 20_000.0)),
            )
        )
        at_s = end_s
    return FaultPlan(tuple(windows), draw.randrange(1000))


def dropped_steps(world: World) -> tuple[int, int]:
    """(what the newest word on it says there were in all, the sum of all words)."""
    texts = [event.detail for event in world.sent(EdgeEvent) if event.kind == "dropped"]
    found = [re.search(r"alone, (\d+) steps.*; (\d+) steps in all", text) for text in texts]
    numbers = [(int(one[1]), int(one[2])) for one in found if one is not None]
    return (numbers[-1][1], sum(news for news, _ in numbers)) if numbers else (0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_human_steps_arrive_once_and_what_is_dropped_is_told(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    world = World(tmp_path, seed, random_plan(draw), spool_bytes=draw.choice((40_000, 150_000)))
    put: dict[str, Segment] = {}

    def watch_spool() -> None:
        spool = world.uplink.spool
        really_put = spool.put

        def put_and_note(segment: Segment, ending: Segment | None = None) -> None:
            really_put(segment, ending)
            put[segment.id] = segment

        spool.put = put_and_note  # type: ignore[method-assign]

    watch_spool()
    while world.clock.now_ns() < 1070 * SECOND:
        if not world.script:
            steps = draw.randrange(5, 45)
            begin = draw.randrange(steps)
            world.record(steps, range(begin, begin + 5) if draw.random() < 0.4 else range(0))
        if draw.random() < 0.01:
            world.gateway.cannot_store = not world.gateway.cannot_store
        if draw.random() < 0.01:
            world.gateway.credit_bytes = draw.choice((0, 3_000, 20_000, 8_000_000))
        if draw.random() < 0.004:
            world.start()  # the one before was killed
            watch_spool()
        before = world.uplink.sender.bytes_under_way
        world.tick()
        sender = world.uplink.sender
        # above its credit it does not grow: that was under way when there was more
        assert sender.bytes_under_way <= max(sender._credit, before) or len(sender._under_way) == 1
    world.gateway.cannot_store, world.gateway.credit_bytes = False, 8_000_000
    world.uplink.control_gone()
    world.drain()
    world.pass_time(15)
    spool, stored = world.uplink.spool, world.gateway.stored
    human_episodes = {segment.episode.id for segment in put.values() if is_kept(segment)}
    missing = {name: segment for name, segment in put.items() if name not in stored}
    assert not human_episodes & {segment.episode.id for segment in missing.values()}
    assert sum(segment.steps for segment in missing.values()) == spool.dropped.steps
    assert dropped_steps(world) == (spool.dropped.steps, spool.dropped.steps)
    assert sum(s.steps for s in stored.values()) + spool.dropped.steps == spool.steps_recorded
    # an episode is there as a whole, or not at all
    for name in {segment.episode.id for segment in put.values()}:
        there = sorted(s.index for s in stored.values() if s.episode.id == name)
        assert there in ([], sorted(s.index for s in put.values() if s.episode.id == name))
    # in order, but for what comes again
    seen: dict[str, int] = {}
    first: set[str] = set()
    for segment in world.sent(Segment):
        if segment.id not in first:
            first.add(segment.id)
            assert segment.index > seen.get(segment.episode.id, -1)
            seen[segment.episode.id] = segment.index
    world.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.pass_time(1)
    yield made
    made.close()


@pytest.mark.parametrize(("segments", "most"), [(0, 1), (3, 3)])
def test_no_more_is_under_way_than_there_is_credit_for_but_one_segment_may_always_go(
    tmp_path: Path, segments: int, most: int
) -> None:
    world = World(tmp_path)
    world.gateway.credit_bytes, world.gateway.bytes_per_s = segments * 3_700 + 1, 10_000.0
    world.pass_time(1)
    for _ in range(20):
        world.record(10)
    world.say_all()
    reached = 0
    while len(world.uplink.spool) or world.script or not reached:
        world.tick()
        sender = world.uplink.sender
        assert sender.bytes_under_way <= max(world.gateway.credit_bytes, 3_700)
        reached = max(reached, len(sender._under_way))
    assert reached == most
    assert set(world.gateway.came.values()) == {1}
    world.close()


def test_without_credit_nothing_goes_and_without_a_word_for_long_one_segment(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gateway.credit_bytes = 0
    world.pass_time(1)
    world.record(30)
    world.say_all()
    world.pass_time(30)
    assert world.sent(Segment) == []
    assert len(world.sent(Heartbeat)) >= 29
    world.gateway.credit_bytes = 8_000_000
    assert world.drain() <= 2.0
    world.close()


def test_after_a_cut_what_was_under_way_comes_again_in_order_and_once(tmp_path: Path) -> None:
    plan = FaultPlan((FaultWindow(1.97, 3, LinkState.stalled), FaultWindow(3, 5, LinkState.cut)))
    world = World(tmp_path, plan=plan)
    world.pass_time(2)
    for _ in range(6):
        world.record(10)
    world.say_all()
    world.pass_time(2)
    first = [segment.id for segment in world.sent(Segment)]
    assert len(first) == 6 and world.gateway.stored == {}
    assert world.drain() < 5
    again = [segment.id for segment in world.sent(Segment)][6:]
    assert again == first
    assert set(world.gateway.came.values()) == {1}
    world.close()


def test_a_gateway_that_could_not_store_for_long_is_tried_gently_and_has_all_soon_after(tmp_path: Path) -> None:
    """Its answers take half a second, and all that was under way is gone."""
    world = World(tmp_path, plan=FaultPlan((FaultWindow(delay_s=0.25),)))
    world.pass_time(2)
    world.record(20)
    world.pass_time(3)
    world.gateway.cannot_store = True
    for _ in range(30):
        world.record(10)
    world.say_all()
    world.pass_time(60)
    assert len(world.uplink.sender._under_way) > 20
    assert world.uplink.sender.resent < 40, "one at a time, every few seconds"
    world.gateway.cannot_store = False
    assert world.drain() < 12
    assert len(world.gateway.stored) == 32
    world.close()


def test_corrections_overtake_a_backlog_and_the_running_episode_overtakes_older_ones(world: World) -> None:
    world.gateway.stands_still = True
    world.pass_time(5)
    for number in range(30):
        world.record(10, range(3, 5) if number % 10 == 5 else range(0))
    world.say_all()
    world.pass_time(1)
    world.gateway.stands_still = False
    sent = len(world.sent(Segment))
    live, correction = world.record(10), world.record(20, range(12, 15))
    world.say_all()
    world.drain()
    order = list(dict.fromkeys(segment.episode.id for segment in world.sent(Segment)[sent:]))
    kept = order[:4]
    assert kept[0] == correction, "of corrections the newest first, with all of its episode"
    assert [world.gateway.stored[f"{one}/0"].episode.seed % 10 for one in kept[1:]] == [6, 6, 6], "then the older"
    rest = [world.gateway.stored[f"{one}/0"].episode.seed for one in order[4:]]
    assert rest == sorted(rest) and live in order[4:]


@pytest.mark.parametrize("link", [LinkState.stalled, LinkState.silent, LinkState.cut])
def test_after_a_stall_of_ten_minutes_all_is_as_usual_within_seconds(tmp_path: Path, link: LinkState) -> None:
    stall_s, usual_bytes_per_s = 600, 200_000.0
    plan = FaultPlan((FaultWindow(20, 20 + stall_s, link), FaultWindow(bytes_per_s=usual_bytes_per_s, delay_s=0.02)))
    world = World(tmp_path, plan=plan)
    closed_ns: dict[str, int] = {}
    put = world.uplink.spool.put

    def note(segment: Segment, ending: Segment | None = None) -> None:
        put(segment, ending)
        closed_ns[segment.id] = world.clock.now_ns()

    world.uplink.spool.put = note  # type: ignore[method-assign]
    end_ns = world.clock.now_ns() + (20 + stall_s) * SECOND
    came = 0
    while world.clock.now_ns() < end_ns + 30 * SECOND:
        if not world.script:
            world.record(40, range(10, 15))
        world.show_status()
        before = len(world.gateway.of(EdgeStatus))
        world.tick(0.1 if world.clock.now_ns() < end_ns else TICK_S)
        came = max(came, len(world.gateway.of(EdgeStatus)) - before)
    late = {
        name: (world.gateway.stored_ns[name] - closed_ns[name]) / SECOND if name in world.gateway.stored_ns else 99.0
        for name in closed_ns
        if end_ns + 5 * SECOND < closed_ns[name] < end_ns + 28 * SECOND
    }
    assert len(late) > 20
    assert max(late.values()) < 1.5, "the newest does not wait behind what a stall left"
    assert came < 60, "no burst of old statuses"
    statuses = world.gateway.of(EdgeStatus)
    assert world.clock.now_ns() - statuses[-1].time_ns < SECOND
    world.drain()
    world.close()


def test_when_only_human_steps_are_left_the_robot_holds_until_some_are_acknowledged(tmp_path: Path) -> None:
    world = World(tmp_path, spool_bytes=60_000)
    world.gateway.credit_bytes = 4_000
    world.pass_time(1)
    world.gateway.cannot_store = True
    dropped_before_held = 0
    while not any(world.held):
        if not world.script:
            world.record(20, range(5, 8) if world.number % 2 else range(0))
        world.tick()
        dropped_before_held = world.uplink.spool.dropped.episodes
    assert dropped_before_held > 2
    assert "may be dropped" in world.held[-1] and "--spool-max" in world.held[-1]
    world.show_status()
    world.tick()
    status = world.uplink.status
    assert status is not None and "the spool is full" in status.detail
    assert status.steps_dropped == world.uplink.spool.dropped.steps > 0
    world.script.clear()
    world.gateway.cannot_store = False
    world.pass_time(30)
    assert world.held[-1] == ""
    world.close()


def test_a_later_process_drops_nothing_of_which_the_gateway_has_a_part(tmp_path: Path) -> None:
    world = World(tmp_path, spool_bytes=40_000)
    world.pass_time(1)
    begun = world.record(40)
    for _ in range(21):
        world.tick()
    assert 0 < len(world.gateway.stored) < 4
    world.gateway.stands_still = True
    world.pass_time(2)
    world.start()
    for _ in range(20):
        world.record(20)
    world.pass_time(25)
    assert world.uplink.spool.dropped.episodes > 0
    world.gateway.stands_still = False
    world.script.clear()
    world.uplink.control_gone()
    world.drain()
    assert any(segment.last for segment in world.gateway.stored.values() if segment.episode.id == begun)
    world.close()


def test_heartbeats_leave_on_time_whatever_else_there_is_to_do(world: World) -> None:
    """However long each message takes: the clock goes on with each that is handled."""
    for _ in range(200):
        world.record(10)
    world.say_all()
    recv = world.control.recv
    really = world.uplink._control.recv

    def slow() -> object:
        world.clock.advance(4_000_000)
        return really()

    world.uplink._control.recv = slow  # type: ignore[method-assign,assignment]
    began_ns, beats = world.clock.now_ns(), len(world.sent(Heartbeat))
    while world.uplink.poll():
        world.gateway.poll()
    recv()
    passed_s = (world.clock.now_ns() - began_ns) / SECOND
    assert passed_s > 5
    assert len(world.sent(Heartbeat)) - beats >= int(passed_s) - 1
