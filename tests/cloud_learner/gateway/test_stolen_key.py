"""A robot's key in the wrong hands, and people who really have a robot: what a trainer draws in the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.sampling.target import imitation, uniform
from robot_edge.uplink.segments import SegmentBuilder
from tests import samples
from tests.cloud_learner.dispatch.hall import TASKS, Hall, page
from tests.cloud_learner.fake_edge import SPEC, FakeEdge
from wire.errors import InvalidDataError
from wire.messages.fleet import AcquireLease, ReleaseLease
from wire.messages.gateway import OperatorCommand, Segment
from wire.transport.keys import Teaching
from wire.types import Actor, Episode, OperatorCommandKind

NOTHING: frozenset[Teaching] = frozenset()
STEPS = 12
LIE = 0.75
"""value of the state by which a stolen key's steps are told from those of others"""


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    made = Hall(tmp_path)
    made.server.teaches = dict.fromkeys(("robot-0", "robot-1"), NOTHING)
    yield made
    made.ledger.close()


def episode(
    hall: Hall, edge: FakeEdge, actor: Actor = Actor.human, source: str = "online", state: float = 0.0, ago_s: float = 0
) -> Segment:
    """One that `actor` drove until `ago_s` ago; not sent."""
    edge.number += 1
    first_ns = hall.clock.now_ns() - round(ago_s * 1e9) - STEPS * SPEC.period_ns
    about = Episode(f"{edge.name}-e{edge.number}", edge.name, SPEC.hash, "reach", 1, source, first_ns)
    builder = SegmentBuilder(about, 100)
    for tick in range(STEPS):
        step = samples.step(tick, actor)
        at_ns = first_ns + tick * SPEC.period_ns
        builder.step(msgspec.structs.replace(step, time_ns=at_ns, state=np.full(4, state, np.float32)))
    segment = builder.end("success", first_ns + STEPS * SPEC.period_ns)
    assert segment is not None
    return segment


def stores(hall: Hall, edge: FakeEdge, segment: Segment) -> bool:
    """Send it; whether it is stored. Either way it is acknowledged, and the robot forgets it."""
    edge.spool[segment.id] = segment
    edge.channel.send(segment)
    hall.gateway.poll()
    edge.poll()
    kept_apart = {entry.id.rpartition("-")[0] for entry in hall.ingest._store.quarantine.entries()}
    found = hall.ledger.segment(segment.id) is not None
    assert found != (segment.id.replace("/", "-") in kept_apart)
    return found


def drawn_states(root: Path, batches: int = 40) -> set[float]:
    """First number of the state of every step that a trainer draws, of all that anybody did and of what is imitated."""
    found: set[float] = set()
    with contextlib.closing(BufferLocation(root).open_reader()[0]) as ledger:
        store = BufferLocation(root).open_reader()[1]
        for target in (imitation(), uniform()):
            config = DatasetConfig(
                tasks=dict.fromkeys(TASKS, ""), target=target, batch=32, cache_bytes=4_000_000, prefetch=0, horizon=4
            )
            dataset = ReplayDataset(ledger, store, SPEC, config)
            dataset.refresh()
            with contextlib.suppress(InvalidDataError):
                for _ in range(batches):
                    found |= set(np.asarray(dataset.next()["state"])[..., 0].ravel().tolist())
            dataset.close()
        store.close()
    return found


def test_nothing_that_a_stolen_key_says_of_people_is_ever_drawn(hall: Hall, tmp_path: Path) -> None:
    thief, honest = hall.edge("robot-0"), hall.edge("robot-1")
    operator = hall.desk.join()
    page(hall, operator, "take_over", "robot-1")
    hall.clock.advance(10**9)
    assert stores(hall, honest, episode(hall, honest, state=0.25))
    for actor in (Actor.human, Actor.script):
        assert not stores(hall, thief, episode(hall, thief, actor, state=LIE))
    for actor in (Actor.human, Actor.script, Actor.policy, Actor.hold):
        assert not stores(hall, thief, episode(hall, thief, actor, "demonstration", state=LIE))
    assert not stores(hall, thief, episode(hall, thief, Actor.policy, "evaluation", state=LIE))
    # Not even with a time at which somebody had another robot; and no value that no robot has, whoever acts.
    assert not stores(hall, thief, episode(hall, thief, ago_s=0.5, state=LIE))
    for actor in Actor:
        assert not stores(hall, thief, episode(hall, thief, actor, state=1e15))
    assert drawn_states(tmp_path) == {0.25}
    # Its own practice is taken, and counts as nobody's teaching.
    assert stores(hall, thief, episode(hall, thief, Actor.policy, state=0.5))
    assert drawn_states(tmp_path) == {0.25, 0.5}
    row = hall.ledger.episode("robot-0-e13")
    assert row is not None and row.human_steps == 0
    # People are told once an episode.
    told = [event["text"] for event in hall.view.snapshot()["events"] if event["kind"] == "quarantine"]
    assert len(told) == len(set(told)) and any("nobody acts" in one or "are a human's" in one for one in told)


def test_who_takes_a_robot_over_at_the_page_teaches_it_until_they_hand_it_back(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    operator = hall.desk.join()
    assert not stores(hall, edge, episode(hall, edge))
    hall.pass_time(20)
    page(hall, operator, "take_over")
    hall.pass_time(30)
    assert stores(hall, edge, episode(hall, edge)) and stores(hall, edge, episode(hall, edge, ago_s=29))
    assert not stores(hall, edge, episode(hall, edge, ago_s=32))
    page(hall, operator, "hand_back")
    # The robot hears of it a little later; what it then sends of before is the person's as well.
    hall.clock.advance(10**9)
    assert stores(hall, edge, episode(hall, edge, ago_s=0.2))
    hall.clock.advance(60 * 10**9)
    assert stores(hall, edge, episode(hall, edge, ago_s=70)) and not stores(hall, edge, episode(hall, edge))


def test_who_vanished_teaches_no_more(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    operator = hall.desk.join()
    page(hall, operator, "take_over")
    hall.desk.leave(operator)
    hall.gateway.poll()
    hall.clock.advance(5 * 10**9)
    assert not stores(hall, edge, episode(hall, edge)) and stores(hall, edge, episode(hall, edge, ago_s=4.5))


def test_a_teleoperator_teaches_while_its_lease_lives(hall: Hall) -> None:
    edge, teleoperator = hall.edge("robot-0"), hall.peer("teleoperator")
    lease = hall.ask(teleoperator, AcquireLease(1, "robot-0", "teleoperation", 0, 20.0)).lease
    assert lease is not None
    teleoperator.send(OperatorCommand("robot-0", OperatorCommandKind.take_over, sequence=1, lease=lease.number))
    hall.gateway.poll()
    hall.clock.advance(10 * 10**9)
    assert stores(hall, edge, episode(hall, edge))
    # A demonstration is one that a person gave; with a step of the policy's in it is the robot's word alone.
    assert stores(hall, edge, episode(hall, edge, source="demonstration"))
    assert not stores(hall, edge, episode(hall, edge, Actor.policy, source="demonstration"))
    assert hall.ask(teleoperator, ReleaseLease(2, "robot-0", lease.number)).lease
    hall.clock.advance(10 * 10**9)
    hall.gateway.poll()
    assert not stores(hall, edge, episode(hall, edge)) and stores(hall, edge, episode(hall, edge, ago_s=11))


@pytest.mark.parametrize(("right", "actor"), [(Teaching.beside, Actor.human), (Teaching.script, Actor.script)])
def test_without_a_lease_the_key_must_say_so(hall: Hall, right: Teaching, actor: Actor) -> None:
    edge = hall.edge("robot-0")
    edge.mode = "human"
    hall.pass_time(2)
    # It shows that somebody beside it drives, and the page shows that: it is the robot's word all the same.
    assert hall.lease("robot-0") == ("beside the robot", "operator")
    assert not stores(hall, edge, episode(hall, edge, actor))
    hall.server.teaches["robot-0"] = frozenset({right})
    assert stores(hall, edge, episode(hall, edge, actor))


def test_a_gateway_that_was_killed_knows_who_had_which_robot(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    operator = hall.desk.join()
    page(hall, operator, "take_over")
    hall.clock.advance(30 * 10**9)
    assert stores(hall, edge, episode(hall, edge))
    offline = [episode(hall, edge, ago_s=20), episode(hall, edge, ago_s=31.5)]
    hall.clock.advance(2 * 10**9)
    offline += [episode(hall, edge)]
    again = hall.killed()
    again.server.teaches = hall.server.teaches
    again.clock.advance(3600 * 10**9)
    again.gateway.poll()
    edge.poll()
    edge.hello()
    again.gateway.poll()
    edge.poll()
    assert [stores(again, edge, segment) for segment in offline] == [True, False, True]
    # Nobody had it while there was no gateway, nor since: the page went with it.
    assert not stores(again, edge, episode(again, edge, ago_s=1800)) and not stores(again, edge, episode(again, edge))
    again.ledger.close()
