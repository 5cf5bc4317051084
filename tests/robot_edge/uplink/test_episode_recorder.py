"""An episode that nobody goes on with has an end, whichever process died."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from robot_edge.runtime.process_group import record_channel
from robot_edge.uplink.spool import Spool
from tests import samples
from tests.robot_edge.uplink.test_server import SECOND, Desk, segments
from tests.robot_edge.uplink.test_spool import waiting
from wire.clock import clock_name
from wire.messages import Message
from wire.messages.gateway import Ack, Hello, HelloAck
from wire.messages.local import EpisodeEnded, EpisodeLost, EpisodeStarted, StepRecorded


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.uplink.close()


def lost(desk: Desk) -> list[str]:
    """Episodes of which control was told that steps are missing."""
    return [m.episode_id for m in desk.to_control() if isinstance(m, EpisodeLost)]


# --- the uplink dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [StepRecorded("e", samples.step(3)), EpisodeEnded("e", "success", 5)])
def test_a_new_uplink_in_the_middle_of_an_episode_says_that_it_has_not_all_of_it(desk: Desk, message: Message) -> None:
    desk.control.send(message)
    desk.control.send(EpisodeEnded("e", "aborted", 6))
    desk.uplink.poll()
    assert lost(desk) == ["e"]
    desk.hello()
    desk.record(5, number=1)
    assert lost(desk) == [], "once"
    assert {s.episode.id for s in segments(desk.received())} == {samples.episode(number=1).id}


@pytest.mark.parametrize("steps", [11, 20, 25])
def test_an_episode_whose_uplink_was_killed_ends_where_the_spool_ends(tmp_path: Path, steps: int) -> None:
    killed = Desk(tmp_path)
    killed.hello()
    killed.record(steps, end=False)
    known = segments(killed.received())
    assert [s.last for s in known] == [False] * ((steps - 1) // 10)
    killed.server.send("robot-0", Ack(tuple(s.id for s in known)))
    killed.uplink.poll()
    assert len(killed.uplink.spool) == 0
    again = Desk(tmp_path)
    again.uplink.poll()
    assert (len(again.uplink.spool), again.uplink.spool.ending()) == (1, None)
    again.hello()
    assert lost(again) == [samples.episode().id]
    (end,) = segments(again.received())
    assert (end.index, end.first_tick, end.steps, end.last) == (len(known), 10 * len(known), 1, True)
    assert (end.outcome, end.terminated.tolist(), end.truncated.tolist()) == ("aborted", [False], [True])
    brought = {t for s in (*known, end) for t in s.frames["front"].times_ns.tolist()}
    assert set(end.frame_times_ns["front"].tolist()) <= brought
    assert again.uplink.spool.steps_recorded == 10 * len(known) + 1
    again.record(12, number=1)
    assert [(s.index, s.outcome) for s in segments(again.received())] == [(0, ""), (1, "success")]
    third = Desk(tmp_path)
    third.hello()
    assert len(segments(third.received())) == 3
    for desk in (killed, again, third):
        desk.uplink.close()


def test_an_uplink_that_is_killed_with_all_steps_in_the_spool_has_lost_nothing(tmp_path: Path) -> None:
    killed, episode = Desk(tmp_path), samples.episode()
    killed.record(10, end=False)
    last = msgspec.structs.replace(samples.step(10, frame_ns=81), terminated=True)
    killed.control.send(StepRecorded(episode.id, last, outcome="failure"))
    killed.uplink.poll()
    again = Desk(tmp_path)
    again.control.send(EpisodeEnded(episode.id, "failure", 5))
    again.hello()
    assert lost(again) == []
    found = segments(again.received())
    assert [(s.steps, s.outcome, s.terminated[-1]) for s in found] == [(10, "", False), (1, "failure", True)]
    killed.uplink.close()
    again.uplink.close()


def test_an_uplink_that_is_killed_between_two_episodes_ends_nothing(tmp_path: Path) -> None:
    killed = Desk(tmp_path)
    killed.record(25)
    again = Desk(tmp_path)
    again.hello()
    assert [s.last for s in segments(again.received())] == [False, False, True]
    killed.uplink.close()
    again.uplink.close()


# --- control dies ---------------------------------------------------------------------------------------------------


def test_a_new_control_process_ends_what_the_one_before_it_recorded(desk: Desk) -> None:
    desk.hello()
    desk.record(5, end=False)
    desk.hello()
    assert segments(desk.received()) == [], "the same one says hello again and again"
    desk.control.send(Hello("robot-0", "edge", "c", 1, 78, samples.spec(), ("reach",)))
    desk.uplink.poll()
    assert len(desk.uplink.spool) == 1
    desk.server.send("robot-0", HelloAck(clock_name(), 1, 1))
    desk.uplink.poll()
    assert [(s.steps, s.outcome) for s in segments(desk.received())] == [(5, "aborted")]


def test_an_episode_of_which_nothing_comes_any_more_ends(desk: Desk) -> None:
    desk.hello()
    desk.record(5, end=False)
    for tick in range(5, 45):
        desk.clock.advance(20 * SECOND)
        desk.control.send(StepRecorded(samples.episode().id, samples.step(tick, frame_ns=41)))
        desk.uplink.poll()
    assert not any(s.last for s in segments(desk.received()))
    desk.pass_time(31)
    (end,) = (s for s in segments(desk.received()) if s.last)
    assert (end.outcome, end.truncated[-1]) == ("aborted", True)
    assert lost(desk) == []
    desk.control.send(StepRecorded(samples.episode().id, samples.step(45, frame_ns=41)))
    desk.uplink.poll()
    assert lost(desk) == [samples.episode().id]


# --- real processes, kill -9 ----------------------------------------------------------------------------------------

UPLINK = """
import sys, time
from pathlib import Path
from robot_edge.runtime.process_group import record_channel
from robot_edge.uplink.server import Uplink
from tests import samples
from wire.clock import MonotonicClock
from wire.transport.memory_channel import memory_pair
root = Path(sys.argv[1])
control = record_channel(root, samples.spec(), uplink=True)
uplink = Uplink("robot-0", root, memory_pair()[0], control, memory_pair()[0], MonotonicClock(), 10)
uplink.start()
while True:
    uplink.poll()
    time.sleep(0.002)
"""
CONTROL = """
import os, sys, time
from pathlib import Path
from robot_edge.runtime.process_group import record_channel
from tests import samples
from wire.messages.gateway import Hello
from wire.messages.local import EpisodeStarted, StepRecorded
uplink = record_channel(Path(sys.argv[1]), samples.spec(), uplink=False)
episode = samples.episode()
said = [EpisodeStarted(episode), *(StepRecorded(episode.id, samples.step(tick)) for tick in range(int(sys.argv[2])))]
while True:
    uplink.send(Hello("robot-0", "edge", "c", 1, os.getpid(), samples.spec(), ("reach",)))
    while said and uplink.send(said[0]):
        said.pop(0)
    time.sleep(0.01)
"""


@contextlib.contextmanager
def running(code: str, root: Path, *words: str) -> Iterator[None]:
    """A process that is killed with -9 in the end."""
    process = subprocess.Popen([sys.executable, "-c", code, str(root), *words])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def until(true: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


def spooled(root: Path) -> list[tuple[int, int, str]]:
    """(index, steps, outcome) of each segment."""
    if not (root / "spool.sqlite").exists():
        return []
    with contextlib.closing(Spool(root / "spool.sqlite")) as spool:
        found = [spool.get(row) for row, _ in waiting(spool)]
    return [(s.index, s.steps, s.outcome) for s in found if s is not None]


@pytest.mark.slow
def test_an_uplink_that_is_killed_leaves_an_end_to_its_successor(tmp_path: Path) -> None:
    control, episode = record_channel(tmp_path, samples.spec(), uplink=False), samples.episode()

    def say(message: Message) -> None:
        until(lambda: control.send(message))

    with running(UPLINK, tmp_path):
        say(Hello("robot-0", "edge", "c", 1, os.getpid(), samples.spec(), ("reach",)))
        say(EpisodeStarted(episode))
        for tick in range(25):
            say(StepRecorded(episode.id, samples.step(tick)))
        until(lambda: len(spooled(tmp_path)) == 2)
    with running(UPLINK, tmp_path):
        until(lambda: spooled(tmp_path) == [(0, 10, ""), (1, 10, ""), (2, 1, "aborted")])
        say(StepRecorded(episode.id, samples.step(25)))
        until(lambda: isinstance(message := control.recv(), EpisodeLost) and message.episode_id == episode.id)
    control.close()


@pytest.mark.slow
def test_what_a_killed_control_process_recorded_is_durable_when_the_next_one_only_rests(tmp_path: Path) -> None:
    with running(UPLINK, tmp_path):
        with running(CONTROL, tmp_path, "15"):
            until(lambda: len(spooled(tmp_path)) == 1)
        with running(CONTROL, tmp_path, "0"):
            until(lambda: len(spooled(tmp_path)) > 1)
    assert spooled(tmp_path) == [(0, 10, ""), (1, 5, "aborted")]
