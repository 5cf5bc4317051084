"""New versions on a fleet with a real gateway: one robot tries them, episodes decide, people have the last word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from cloud_learner.rollout.config import RolloutConfig
from robot_edge.uplink.segments import SegmentBuilder
from tests import samples
from tests.cloud_learner.dispatch.hall import SPEC, Hall, canary
from tests.cloud_learner.fake_edge import FakeEdge
from wire.errors import DiskFullError
from wire.messages.fleet import ChangeVersions, Response, SubmitJob, VersionAction, VersionStatus
from wire.messages.gateway import (
    Ack,
    EdgeEvent,
    EdgeStatus,
    Hello,
    HelloAck,
    Published,
    Rejection,
    ThinkVersions,
    VersionAvailable,
)
from wire.transport.memory_channel import MemoryClient
from wire.types import Actor, Episode

NAMES = tuple(f"robot-{k}" for k in range(5))
CANARY = RolloutConfig(canary=0.2, control=0.0)


def fleet(root: Path, config: RolloutConfig = CANARY, versions: int = 1) -> Hall:
    hall = Hall(root, rollout=config)
    for name in NAMES:
        hall.edge(name)
    for number in range(1, versions + 1):
        publish(hall, number)
    return hall


def publish(hall: Hall, number: int) -> None:
    hall.publish(number)
    hear(hall)


def hear(hall: Hall) -> None:
    for edge in hall.edges:
        edge.poll()
    hall.gateway.poll()


def practise(hall: Hall, rounds: int, succeeds: Callable[[int], bool]) -> None:
    """Each robot runs an episode a round by whatever it was told last."""
    for _ in range(rounds):
        hall.clock.advance(10**9)
        for edge in hall.edges:
            edge.poll()
            edge.status()
            assert edge.episode("success" if succeeds(edge.version) else "failure", version=edge.version)
        hall.gateway.poll()
    hear(hall)


def acting(hall: Hall) -> list[int]:
    return [edge.version for edge in hall.edges]


def offers(edge: FakeEdge) -> list[int]:
    return [message.version.number for message in edge.received if isinstance(message, VersionAvailable)]


def change(hall: Hall, console: MemoryClient, action: str, number: int = 0, robot: str = "") -> Response:
    answer = hall.ask(console, ChangeVersions(1, action, number, robot))
    hear(hall)
    return answer


def listed(hall: Hall, console: MemoryClient) -> dict[int, VersionStatus]:
    return {one.version.number: one for one in change(hall, console, VersionAction.list).versions}


def test_one_of_five_robots_is_offered_a_new_version_and_all_are_when_it_is_no_worse(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=2)
    assert sorted(acting(hall)) == [1, 1, 1, 1, 2]
    console = hall.peer()
    states = listed(hall, console)
    assert (states[1].state, states[2].state) == ("promoted", "canary")
    assert len(states[2].robots) == 1 and len(states[1].robots) == 4
    practise(hall, 60, lambda _: True)
    assert acting(hall) == [2] * 5
    state = listed(hall, console)[2]
    assert state.state == "promoted" and state.current and state.here
    assert state.episodes > 30 and state.successes == state.episodes
    assert [offers(edge) for edge in hall.edges if offers(edge) != [1, 2]] == []


def test_a_worse_one_is_rolled_back_and_only_its_robot_is_told(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=2)
    (tried,) = (edge for edge in hall.edges if edge.version == 2)
    practise(hall, 60, lambda version: version == 1)
    assert acting(hall) == [1] * 5
    assert offers(tried) == [1, 2, 1]
    assert all(offers(edge) == [1] for edge in hall.edges if edge is not tried)
    state = listed(hall, hall.peer())[2]
    assert state.state == "rolled_back" and "worse" in state.note
    practise(hall, 5, lambda _: True)
    assert acting(hall) == [1] * 5
    # the next one is tried
    publish(hall, 3)
    assert sorted(acting(hall)) == [1, 1, 1, 1, 3]


@pytest.mark.parametrize("good", [True, False])
def test_a_gateway_that_is_killed_goes_on(tmp_path: Path, good: bool) -> None:
    hall = fleet(tmp_path, versions=2)
    before = acting(hall)
    for _ in range(6):
        practise(hall, 10, lambda version: good or version == 1)
        hall = hall.killed()
        # robots come back one by one: none tries what another one tries
        for edge in hall.edges:
            edge.status()
            hall.gateway.poll()
            edge.poll()
            hall.gateway.poll()
            edge.poll()
            assert acting(hall) in (before, [2] * 5 if good else [1] * 5)
    assert acting(hall) == [2] * 5 if good else [1] * 5


def test_a_robot_that_never_comes_back_hands_its_version_on(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=2)
    (tried,) = (edge for edge in hall.edges if edge.version == 2)
    hall.edges.remove(tried)
    hall.pass_time(590)
    assert acting(hall) == [1] * 4
    hall.pass_time(20)
    assert sorted(acting(hall)) == [1, 1, 1, 2]


def test_people_freeze_thaw_pin_promote_and_go_back(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=1)
    console = hall.peer()
    assert all(one.frozen for one in change(hall, console, VersionAction.freeze).versions)
    publish(hall, 2)
    assert acting(hall) == [1] * 5
    assert change(hall, console, VersionAction.pin, 2, NAMES[3]).versions[1].pinned == (NAMES[3],)
    assert acting(hall) == [1, 1, 1, 2, 1]
    change(hall, console, VersionAction.promote, 2)
    assert acting(hall) == [2] * 5
    change(hall, console, VersionAction.pin, 1)
    assert acting(hall) == [1, 1, 1, 2, 1]
    change(hall, console, VersionAction.pin, 0)
    change(hall, console, VersionAction.pin, 0, NAMES[3])
    assert acting(hall) == [2] * 5
    change(hall, console, VersionAction.thaw)
    publish(hall, 3)
    assert sorted(acting(hall)) == [2, 2, 2, 2, 3]
    change(hall, console, VersionAction.rollback)
    assert acting(hall) == [2] * 5  # the newest step is undone, which was the canary
    answer = change(hall, console, VersionAction.rollback)
    assert acting(hall) == [1] * 5
    assert {one.version.number: one.state for one in answer.versions} == {
        1: "promoted",
        2: "rolled_back",
        3: "rolled_back",
    }
    publish(hall, 4)
    hall = hall.killed()
    hear(hall)
    hall.pass_time(2)
    assert acting(hall) == [1] * 5  # it is frozen until somebody allows it


def test_of_versions_that_wait_none_is_tried_after_a_rollback(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=3)
    console = hall.peer()
    assert [listed(hall, console)[number].state for number in (2, 3)] == ["canary", "candidate"]
    change(hall, console, VersionAction.rollback)
    states = listed(hall, console)
    assert [states[number].state for number in (2, 3)] == ["rolled_back", "candidate"]
    assert states[1].frozen and acting(hall) == [1] * 5


def test_what_nobody_judged_is_left_to_a_person_and_shown(tmp_path: Path) -> None:
    hall = fleet(tmp_path, RolloutConfig(canary=0.2, control=0.0, max_episodes=15), versions=2)
    console = hall.peer()
    assert "on trial by 1 of 5 robots" in listed(hall, console)[2].note
    for _ in range(20):
        hall.clock.advance(10**9)
        for edge in hall.edges:
            edge.poll()
            edge.status()
            assert edge.episode("unjudged" if edge.version == 2 else "success", version=edge.version)
        hall.gateway.poll()
    shown = listed(hall, console)[2]
    assert (shown.state, shown.episodes, shown.unjudged) == ("candidate", 0, 15)
    assert shown.note.startswith("a person must promote it: 0 of 15 episodes judged")
    assert change(hall, console, VersionAction.promote, 2).refused == ""
    assert acting(hall) == [2] * 5


@pytest.mark.parametrize(
    ("action", "number", "robot", "reason"),
    [
        ("promote", 7, "", "no policy version 7: there are 1 to 2; `vla-fleet versions list` shows them."),
        ("promote", 0, "", "needs the number of a version"),
        ("rollback", 9, "", "no policy version 9"),
        ("promote", 1, "", "version 1: it is current already"),
        ("pin", 1, "robot-9", "no robot 'robot-9'"),
        ("pin", 0, "robot-1", "robot 'robot-1': no version is pinned"),
        ("pin", -1, "", "no policy version -1"),
        ("retire", 1, "", "versions can be list, promote, rollback, pin, shadow, freeze, thaw, not 'retire'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    tmp_path: Path, action: str, number: int, robot: str, reason: str
) -> None:
    hall = fleet(tmp_path, versions=2)
    before = acting(hall)
    answer = change(hall, hall.peer(), action, number, robot)
    assert reason in answer.refused and not answer.versions
    assert acting(hall) == before


@pytest.mark.parametrize("canary", [0.0, 0.2])
@pytest.mark.parametrize("wrong", ["nan", "infinite", "tensors", "no parent", "text"])
def test_a_version_that_cannot_be_good_is_offered_to_nobody(tmp_path: Path, wrong: str, canary: float) -> None:
    hall = fleet(tmp_path, RolloutConfig(canary=canary, control=0.0), versions=1)
    good = samples.weights(2, 300)
    value = np.float32(np.nan if wrong == "nan" else np.inf).tobytes()
    other = samples.weights(2, 400)
    data = {"tensors": other, "no parent": other, "text": b"x" * 300}.get(wrong, good[:-4] + value)
    trainer = hall.publish(2, data, 0 if wrong == "no parent" else 1)
    hear(hall)
    answers = hall.received(trainer)
    assert not any(isinstance(message, Published) for message in answers)
    assert any(isinstance(message, Rejection) for message in answers)
    assert [offers(edge) for edge in hall.edges] == [[1]] * 5
    assert list(listed(hall, hall.peer())) == [1]
    # its number is free
    publish(hall, 2)
    assert 2 in acting(hall)


def test_a_robot_whose_announcement_was_lost_is_told_again_ever_seldomer(tmp_path: Path) -> None:
    hall = fleet(tmp_path, RolloutConfig(), versions=1)
    deaf = hall.edges[0]
    hall.publish(2)
    hall.received(deaf.channel)  # nobody got it
    hear(hall)
    assert acting(hall) == [1, 2, 2, 2, 2]
    hall.pass_time(9)
    assert deaf.version == 1
    hall.pass_time(2)
    assert deaf.version == 2
    # one that cannot run it
    deaf.received.clear()
    for _ in range(5 * 600):
        hall.clock.advance(200_000_000)
        deaf.poll()
        deaf.version = 1
        deaf.status()
        hall.gateway.poll()
    assert offers(deaf) == [2] * 5  # after 10, 30, 70, 150 and 310 s
    assert all(offers(edge) == [1, 2] for edge in hall.edges[1:])


def test_files_that_nobody_needs_go_and_no_others(tmp_path: Path) -> None:
    hall = fleet(tmp_path, RolloutConfig(keep=2, room_bytes=0.0), versions=3)
    console = hall.peer()
    change(hall, console, VersionAction.pin, 2, NAMES[1])
    for number in range(4, 9):
        publish(hall, number)
    here = {int(path.name.partition("-")[0]) for path in (tmp_path / "weights").glob("*.safetensors")}
    assert here == {1, 2, 6, 7, 8}  # pinned and the newest, with their parents
    assert acting(hall) == [8, 2, 8, 8, 8]
    states = listed(hall, console)
    assert {number for number, one in states.items() if one.here} == here
    for name in ("console", "console@1"):
        assert "its weights are gone" in change(hall, console, VersionAction.rollback, 4).refused
        hall = hall.killed()
        hear(hall)
        hall.pass_time(1)
        console = hall.peer(name)
    change(hall, console, VersionAction.rollback)
    assert acting(hall) == [7, 2, 7, 7, 7]


def test_what_is_gone_can_be_neither_pinned_nor_evaluated_and_the_way_out_is_named(tmp_path: Path) -> None:
    hall = fleet(tmp_path, RolloutConfig(keep=2, room_bytes=0.0), versions=8)
    console = hall.peer()
    for robot in ("", NAMES[0]):
        said = change(hall, console, VersionAction.pin, 3, robot).refused
        assert "version 3: its weights are gone" in said and "Choose a newer version, and pin" in said
    said = hall.ask(console, SubmitJob(1, canary(version=3))).refused
    assert "version 3: its weights are gone" in said and "Choose a newer version" in said
    assert "there is no policy version 9" in hall.ask(console, SubmitJob(1, canary(version=9))).refused
    assert not hall.ask(console, SubmitJob(1, canary(version=7))).refused
    assert acting(hall) == [8] * 5 and [job for job in hall.jobs(console) if job == "canary"]


def test_a_file_that_was_restored_is_to_be_had_again(tmp_path: Path) -> None:
    hall = fleet(tmp_path, RolloutConfig(), versions=3)
    path = next((tmp_path / "weights").glob("2-*.safetensors"))
    path.rename(tmp_path / "backup")
    hall = hall.killed()
    hall.pass_time(1)
    assert "its weights are gone" in change(hall, hall.peer(), VersionAction.rollback, 2).refused
    (tmp_path / "backup").rename(path)
    hall = hall.killed()
    hall.pass_time(1)
    assert not change(hall, hall.peer("console@1"), VersionAction.rollback, 2).refused
    assert acting(hall) == [2] * 5


# --- which episodes count -------------------------------------------------------------------------------------------


def episode(edge: FakeEdge, number: int, versions: tuple[int, ...], actor: Actor = Actor.policy) -> list:
    """Its segments, one for each of `versions`."""
    edge.between()
    builder = SegmentBuilder(Episode(f"{edge.name}-e{number}", edge.name, SPEC.hash, "reach", 1, "online", 1_000), 2)
    segments = []
    for tick in range(2 * len(versions)):
        found = builder.step(samples.step(tick, actor, version=versions[tick // 2]))
        segments += [found] if found is not None else []
    last = builder.end("success", edge.clock.now_ns())
    return [*segments, *([last] if last is not None else [])]


def status_of(edge: FakeEdge) -> EdgeStatus:
    sent: list[EdgeStatus] = []
    channel, edge.channel = edge.channel, SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    edge.status()
    edge.channel = channel
    return sent[0]


def counts(hall: Hall) -> dict[int, int]:
    return {number: one.episodes for number, one in listed(hall, hall.peer(f"console@{hall.calls}")).items()}


def test_only_episodes_of_one_version_count(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=2)
    edge = hall.edges[0]
    for number, versions in enumerate([(1, 1), (1, 2), (2, 2), (1,)]):
        for segment in episode(edge, number, versions):
            edge.channel.send(segment)
    edge.channel.send(*episode(edge, 9, (1,), Actor.human))
    hall.gateway.poll()
    assert counts(hall) == {1: 2, 2: 1}


def test_an_episode_in_which_the_robot_only_held_is_a_stopped_one_of_its_version(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=2)
    edge = hall.edges[0]
    for number, versions in enumerate([(2, 2), (2,), (1, 2), (0,)]):
        for segment in episode(edge, number, versions, Actor.hold):
            edge.channel.send(segment)
    hall.gateway.poll()
    assert counts(hall) == {1: 0, 2: 2}, "of two versions, or none, it counts for none"
    assert [one.tally.stopped for one in hall.gateway._rollout.controller.versions()] == [0, 2]


def test_an_episode_that_began_before_a_restart_does_not_count(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=2)
    edge = hall.edges[0]
    segments = episode(edge, 1, (1, 2, 2))
    edge.channel.send(segments[0])
    hall.gateway.poll()
    hall = hall.killed()
    hall.pass_time(1)
    edge.received.clear()
    for segment in segments[1:]:
        edge.channel.send(segment)
    hall.gateway.poll()
    hear(hall)
    stored = [name for message in edge.received if isinstance(message, Ack) for name in message.segments]
    assert stored == [segment.id for segment in segments[1:]]
    assert counts(hall) == {1: 0, 2: 0}


def test_a_stop_before_the_first_segment_counts(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=1)
    edge = hall.edges[0]
    edge.latch.stop("s1", "anna")
    segments = episode(edge, 1, (1,))
    edge.status(segments[0].episode.id)
    edge.channel.send(segments[0])
    hall.gateway.poll()
    assert hall.gateway._rollout.controller.versions()[0].tally.stopped == 1
    for number in range(1500):
        hall.gateway._rollout.on_status(msgspec.structs.replace(status_of(edge), episode=f"e{number}"))
    assert len(hall.gateway._rollout._episodes) <= 1000


def test_what_is_kept_and_cannot_be_read_begins_anew(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=2)
    hall.ledger.keep_rollout('{"current": "x"}')
    hall = hall.killed()
    hall.pass_time(2)
    assert acting(hall) == [2] * 5
    assert set(listed(hall, hall.peer())) == {1, 2}


def test_of_what_is_kept_and_cannot_be_read_who_acts_by_what_stays(tmp_path: Path) -> None:
    """What was rolled back is the newest there is, and does not come back by that."""
    hall = fleet(tmp_path, CANARY, versions=1)
    for number in (2, 3):
        publish(hall, number)
        change(hall, hall.peer(), VersionAction.promote, number)
    change(hall, hall.peer(), VersionAction.rollback, 0)
    change(hall, hall.peer(), VersionAction.pin, 1, NAMES[0])
    hall.pass_time(2)
    before = acting(hall)
    assert sorted(before) == [1, 2, 2, 2, 2]
    kept = msgspec.json.decode(hall.ledger.kept_rollout())
    kept["trial"], kept["frozen"], kept["versions"]["1"]["tally"] = "of a newer gateway", False, "unknown"
    hall.ledger.keep_rollout(msgspec.json.encode(kept).decode())
    hall = hall.killed()
    hall.pass_time(2)
    controller = hall.gateway._rollout.controller
    assert controller.current == 2
    assert controller.frozen
    publish(hall, 4)
    hall.pass_time(2)
    assert set(acting(hall)) == {2}, "a pin to what cannot be read is gone, and nothing is tried"
    change(hall, hall.peer("console@2"), VersionAction.thaw, 0)
    hall.pass_time(2)
    assert controller.canary == 4


def test_a_fleet_that_kept_nothing_yet_stays_with_its_newest_version(tmp_path: Path) -> None:
    hall = fleet(tmp_path, RolloutConfig(), versions=5)
    hall.ledger.keep_rollout("")
    hall.rollout = CANARY
    hall = hall.killed()
    hall.pass_time(2)
    assert acting(hall) == [5] * 5
    assert hall.gateway._rollout.controller.canary == 0
    publish(hall, 6)
    assert sorted(acting(hall)) == [5, 5, 5, 5, 6]


def test_a_thinker_has_all_that_may_act(tmp_path: Path) -> None:
    hall = fleet(tmp_path, versions=1)
    thinker = hall.server.connect("thinker")
    thinker.send(Hello("thinker", "thinker", "c", 1))
    hall.gateway.poll()
    publish(hall, 2)
    hall.gateway.poll()
    received = hall.received(thinker)
    assert [message.version.number for message in received if isinstance(message, VersionAvailable)] == [1, 2]
    assert [message.numbers for message in received if isinstance(message, ThinkVersions)] == [(1,), (1, 2)]
    for number in (3, 4):
        publish(hall, number)
    change(hall, hall.peer(), VersionAction.pin, 3, NAMES[1])
    change(hall, hall.peer("console@2"), VersionAction.pin, 4, NAMES[2])
    received = hall.received(thinker)
    assert [message.version.number for message in received if isinstance(message, VersionAvailable)] == [3, 4]
    assert [message.numbers for message in received if isinstance(message, ThinkVersions)][-1] == (1, 2, 4, 3)
    assert msgspec.json.decode(hall.ledger.kept_rollout())["canary"] == 2


def test_no_version_is_announced_before_the_peer_knows_the_key(tmp_path: Path) -> None:
    """Robots, thinkers and evaluators that say hello, and again after a restart of theirs or the gateway's."""
    hall = fleet(tmp_path, RolloutConfig(), versions=1)
    names = {
        "robot-9": Hello("robot-9", "edge", "c", 1, 7, SPEC, ("reach",)),
        "thinker": Hello("thinker", "thinker", "c", 1),
    }
    names["evaluator"] = Hello("evaluator", "evaluator", "c", 1)
    peers = {name: hall.server.connect(name) for name in names}
    for number in range(2, 6):
        for name, peer in peers.items():
            # the ledger answers for a robot later: what is published meanwhile must not reach it before that
            peer.send(msgspec.structs.replace(names[name], pid=number))
        publish(hall, number)
        hall.pass_time(1)
        for name, peer in peers.items():
            kinds = [type(one) for one in hall.received(peer) if isinstance(one, HelloAck | VersionAvailable)]
            assert kinds[0] is HelloAck and VersionAvailable in kinds, name
        if number % 2:
            hall = hall.killed()
    versions = hall.gateway._versions
    versions.announce("robot-9", 5)
    hall.gateway.poll()
    assert not any(isinstance(one, VersionAvailable) for one in hall.received(peers["robot-9"]))


def test_a_rollback_that_is_not_kept_is_done_and_said_not_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hall = fleet(tmp_path, RolloutConfig(), versions=2)
    console = hall.peer()

    def full(kept: str) -> None:
        raise DiskFullError("the disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(hall.ledger, "keep_rollout", full)
        answer = change(hall, console, VersionAction.rollback)
    assert answer.refused.startswith(
        "done, but not kept: a gateway that is started again before that is mended does not"
    )
    assert answer.refused.endswith("the disk is full.") and acting(hall) == [1] * 5
    assert not change(hall, console, VersionAction.freeze).refused
    hall = hall.killed()
    for edge in hall.edges:
        edge.status()
    hear(hall)
    assert hall.gateway._rollout.controller.current == 1 and hall.gateway._rollout.controller.frozen


@pytest.mark.parametrize("what", ["version", "segment", "note"])
def test_a_full_disk_leaves_only_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    hall = fleet(tmp_path, RolloutConfig(), versions=8)
    service, store = hall.gateway._rollout, hall.gateway._rollout._weights
    monkeypatch.setattr(store._fetched, "now", set)
    console = hall.peer()
    assert not change(hall, console, VersionAction.pin, 3, "robot-0").refused
    assert all(store.sizes(number).here for number in range(1, 9))

    def full(*some: object, **more: object) -> None:
        raise DiskFullError("no space left.")

    match what:
        case "version":
            monkeypatch.setattr(store, "begin", full)
            publish(hall, 9)
        case "segment":
            monkeypatch.setattr(hall.ingest._store, "append_all", full)
            assert hall.edges[0].episode(version=8)
        case "note":
            monkeypatch.setattr(hall.ledger, "add_event", full)
            hall.edges[0].channel.send(EdgeEvent(NAMES[0], 1, "hold", "the arm does not answer"))
    hear(hall)
    hear(hall)
    there = [number for number in range(1, 9) if store.sizes(number).here]
    assert 8 in there and 3 in there and service.controller.current in there and len(there) < 8
