"""A robot has what the gateway took, by as few bytes as what it holds allows, whatever is lost, killed or damaged."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from tests.robot_edge.uplink.weights.fleet import CHUNK, Fleet, small_chunks
from wire.messages.gateway import Deltas, FetchDeltas, FetchWeights
from wire.transport.faults import FaultWindow


@pytest.fixture(autouse=True)
def chunks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    fleet = Fleet(tmp_path)
    fleet.publish()
    assert fleet.fetch(1) == len(fleet.files[1])
    return fleet


@pytest.fixture
def slow(tmp_path: Path) -> Fleet:
    fleet = Fleet(tmp_path, faults=FaultWindow(bytes_per_s=40_000))
    fleet.publish()
    fleet.fetch(1)
    return fleet


def test_a_robot_that_has_the_parent_fetches_the_delta_alone(fleet: Fleet) -> None:
    for _ in range(3):
        number = fleet.publish()
        assert fleet.fetch(number, 2.0) == fleet.size(number) < len(fleet.files[1]) / 10
    assert fleet.arrived == [1, 2, 3, 4]
    assert fleet.client.refused == {} and fleet.client.fault == ""


def test_a_robot_that_missed_versions_fetches_the_deltas_since(fleet: Fleet) -> None:
    fleet.server.cut.add("robot-0")
    for _ in range(6):
        number = fleet.publish()
    fleet.run(3)
    fleet.server.cut.clear()
    assert fleet.fetch(number) == fleet.size(2, number)
    assert fleet.arrived == [1, 7]


def test_a_robot_that_was_off_fetches_the_deltas_since(fleet: Fleet) -> None:
    for _ in range(3):
        number = fleet.publish()
    fleet.start_robot()
    assert fleet.fetch(number) == fleet.size(2, number)


def test_where_the_deltas_together_are_larger_the_whole_is_fetched(fleet: Fleet) -> None:
    fleet.server.cut.add("robot-0")
    while fleet.size(2, number := fleet.publish()) < len(fleet.files[1]):
        pass
    fleet.run(3)
    fleet.server.cut.clear()
    assert fleet.fetch(number) == len(fleet.files[1])


def test_a_version_that_was_published_whole_is_fetched_whole(fleet: Fleet) -> None:
    number = fleet.publish(whole=True)
    assert fleet.fetch(number) == len(fleet.files[number])
    number = fleet.publish()
    assert fleet.fetch(number) == fleet.size(number)


@pytest.mark.parametrize("damage", [lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: d[:9000], lambda d: b""])
def test_a_base_that_is_damaged_here_costs_the_whole(fleet: Fleet, damage) -> None:
    path = fleet.file(1)
    path.write_bytes(damage(path.read_bytes()))
    number = fleet.publish()
    assert fleet.fetch(number) == fleet.size(number) + len(fleet.files[number])
    assert fleet.fetch(fleet.publish()) == fleet.size(3)


def test_a_base_that_is_gone_meanwhile_costs_the_whole(slow: Fleet) -> None:
    number = slow.publish()
    slow.half(number, 0)
    slow.file(1).unlink()
    assert slow.fetch(number) == slow.size(number) + len(slow.files[number])


@pytest.mark.parametrize("damage", ["", "torn", "longer", "turned", "empty"])
def test_a_robot_that_was_killed_goes_on_as_far_as_chunks_are_right(slow: Fleet, damage: str) -> None:
    fleet, number = slow, slow.publish(whole=True)
    fleet.half(number, 3 * CHUNK)
    path, whole = fleet.coming(), fleet.files[number]
    path.write_bytes(whole[: 3 * CHUNK])
    kept = 2 * CHUNK
    match damage:
        case "":
            kept = 3 * CHUNK
        case "torn":
            path.write_bytes(whole[: 3 * CHUNK - 10])
        case "longer":
            path.write_bytes(whole[: 3 * CHUNK] + b"x" * 100_000)
            kept = 3 * CHUNK
        case "turned":
            path.write_bytes(whole[: 2 * CHUNK + 5] + bytes(CHUNK - 5))
        case "empty":
            path.write_bytes(b"")
            kept = 0
    fleet.start_robot()
    assert fleet.fetch(number) == len(whole) - kept


def test_a_robot_that_was_killed_before_the_last_step_takes_it_then(slow: Fleet) -> None:
    fleet, number = slow, slow.publish()
    fleet.half(number, 0)
    name = f"{fleet.here}/{number:08d}-{fleet.version(number).sha256[:12]}"
    base = f"{1:08d}-{fleet.version(1).sha256[:12]}"
    Path(f"{name}.from-{base}.part").write_bytes(fleet.deltas[number])
    Path(f"{name}.tmp").write_bytes(b"half rebuilt")
    fleet.start_robot()
    assert not list(fleet.here.glob("*.tmp"))
    assert fleet.fetch(number) == len(fleet.deltas[number]) % CHUNK
    assert not list(fleet.here.glob("*.part"))


def test_what_is_left_of_an_older_version_goes(fleet: Fleet) -> None:
    (fleet.here / "00000009-0123456789ab.part").write_bytes(b"half")
    fleet.start_robot()
    fleet.fetch(fleet.publish())
    assert sorted(path.suffix for path in fleet.here.iterdir()) == [".safetensors"] * 2


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_gateway_had_before_it_was_killed_is_not_fetched_again(slow: Fleet, whole: bool) -> None:
    number = slow.publish(whole)
    slow.half(number, 0)
    slow.restart_gateway()
    size = len(slow.files[number]) if whole else slow.size(number)
    assert slow.fetch(number) == size


def test_a_gateway_that_lost_a_delta_serves_the_whole(fleet: Fleet) -> None:
    number = fleet.publish()
    (delta,) = (fleet.root / "gateway" / "weights").glob(f"{number}-*.delta")
    delta.unlink()
    assert fleet.fetch(number, 15.0) == len(fleet.files[number])
    assert fleet.fetch(fleet.publish()) == fleet.size(3)


def test_a_robot_goes_back_to_an_older_version(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.fetch(fleet.publish())
    before = fleet.client.fetched_bytes
    fleet.call_back(1)
    fleet.until(lambda: fleet.has(1))
    assert fleet.client.fetched_bytes == before, "it is here still"
    for number in (3, 2):
        fleet.call_back(number)
        fleet.until(lambda: fleet.has(number))
    # one that is here no more
    fleet.file(1).unlink()
    fleet.call_back(1)
    assert fleet.fetch(1) == len(fleet.files[1])
    # newer versions are made of what is here again
    fleet.file(3).unlink()
    fleet.call_back(3)
    assert fleet.fetch(3) == fleet.size(3)


def test_a_robot_that_has_only_later_versions_fetches_the_whole(fleet: Fleet) -> None:
    fleet.fetch(fleet.publish())
    fleet.fetch(fleet.publish())
    fleet.file(1).unlink()
    fleet.file(2).unlink()
    fleet.call_back(2)
    assert fleet.fetch(2) == len(fleet.files[2])


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_line_does_the_newest_version_arrives_and_none_that_is_another(tmp_path: Path, seed: int) -> None:
    """`Fleet.step` looks at every file that is called ready."""
    bad = FaultWindow(0, 60, drop=0.1, duplicate=0.1, reorder=0.1, corrupt=0.05, delay_s=0.02, jitter_s=0.05)
    fleet, draw = Fleet(tmp_path, 4000, bad, seed), random.Random(seed)
    fleet.publish()
    began_ns = fleet.clock.now_ns()
    while fleet.clock.now_ns() - began_ns < 50e9:
        match draw.randrange(10):
            case 0:
                fleet.start_robot()
            case 1:
                fleet.restart_gateway()
            case 2:
                fleet.call_back(draw.randint(1, len(fleet.files)))
            case 3:
                fleet.publish(whole=True)
            case 4 if held := list(fleet.here.glob("*.safetensors")):
                path = draw.choice(held)
                if fleet.robot.ready is None or path != fleet.robot.ready[1]:
                    path.write_bytes(path.read_bytes()[: draw.randrange(16_000)])
            case _:
                fleet.publish()
        fleet.run(draw.choice([0.05, 0.5, 3.0, 8.0]))
    fleet.run(max(0.0, 61 - (fleet.clock.now_ns() - began_ns) / 1e9))
    number = fleet.publish()
    fleet.fetch(number)
    assert len(set(fleet.arrived)) >= 2


def test_a_gateway_whose_file_is_damaged_is_asked_now_and_then(fleet: Fleet) -> None:
    fleet.server.cut.add("robot-0")
    fleet.run(3)
    number = fleet.publish(whole=True)
    (path,) = (fleet.root / "gateway" / "weights").glob(f"{number}-*.safetensors")
    path.write_bytes(fleet.files[number][:-100] + bytes(100))
    fleet.server.cut.clear()
    before = fleet.client.fetched_bytes
    fleet.run(20)
    assert not fleet.has(number)
    assert fleet.client.fetched_bytes - before < 4 * len(fleet.files[number])
    path.write_bytes(fleet.files[number])
    fleet.fetch(number)


def test_a_file_that_changed_here_before_it_was_loaded_is_fetched_again_when_it_is_announced(fleet: Fleet) -> None:
    number = fleet.publish()
    fleet.fetch(number)
    assert fleet.robot.ready is not None
    version, path = fleet.robot.ready
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    fleet.client.on_reverted(version, "damaged_file")
    assert fleet.robot.ready is None and fleet.client.refused["damaged_file"] == 1
    fleet.call_back(number)
    assert fleet.fetch(number) == len(fleet.files[number])
    # one that is right is loaded again without being fetched
    fleet.client.on_reverted(version, "half_loaded")
    fleet.call_back(number)
    assert fleet.fetch(number) == 0


@pytest.mark.parametrize("cut_s", [1, 45])
def test_deltas_are_asked_for_again_when_the_question_was_lost(slow: Fleet, cut_s: float) -> None:
    slow.server.cut.add("robot-0")
    for _ in range(2):
        number = slow.publish()
    slow.run(3)
    slow.server.cut.clear()
    slow.until(lambda: slow.client._waits_for_deltas)
    slow.server.cut.add("robot-0")
    slow.run(cut_s)
    slow.server.cut.clear()
    assert slow.fetch(number, 60.0) == slow.size(2, number)


@pytest.mark.parametrize("changes", [{"base": 9}, {"base_sha256": "../../../" + "0" * 64}])
def test_deltas_of_what_is_not_here_cost_the_whole(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    fleet.server.cut.add("robot-0")
    for _ in range(2):
        number = fleet.publish()
    fleet.run(3)
    weights = fleet.hall.gateway._versions._weights
    deltas = weights.deltas

    def others(request: FetchDeltas) -> Deltas:
        first, *rest = deltas(request).deltas
        return Deltas(request.number, (msgspec.structs.replace(first, **changes), *rest))

    monkeypatch.setattr(weights, "deltas", others)
    fleet.server.cut.clear()
    assert fleet.fetch(number) == len(fleet.files[number])


def test_a_gateway_that_is_busy_for_a_while_costs_nothing_and_one_without_the_delta_the_whole(fleet: Fleet) -> None:
    """It answers heartbeats meanwhile."""
    versions = fleet.hall.gateway._versions
    serve = versions.serve

    def refuse_deltas(peer: str, request: FetchWeights | FetchDeltas) -> None:
        if isinstance(request, FetchDeltas) or not request.delta:
            serve(peer, request)

    versions.serve = refuse_deltas  # type: ignore[method-assign]
    number = fleet.publish()
    fleet.run(20)
    versions.serve = serve  # type: ignore[method-assign]
    assert fleet.fetch(number) == fleet.size(number)
    versions.serve = refuse_deltas  # type: ignore[method-assign]
    number = fleet.publish()
    assert fleet.fetch(number, 60.0) == len(fleet.files[number])


@pytest.mark.parametrize("newer", [False, True])
def test_after_a_long_cut_in_the_middle_of_a_delta_the_rest_of_it_comes(tmp_path: Path, newer: bool) -> None:
    fleet = Fleet(tmp_path, count=400_000, faults=FaultWindow(bytes_per_s=40_000))
    fleet.publish()
    fleet.fetch(1, 60.0)
    number = fleet.publish()
    fleet.half(number, 2 * CHUNK)
    if newer:  # it was announced before the cut, and follows
        fleet.publish()
        fleet.until(lambda: fleet.client._following)
    here = fleet.client._requests.received
    assert 2 * CHUNK <= here < fleet.size(number) - 4 * CHUNK
    fleet.server.cut.add("robot-0")
    fleet.run(45)
    assert fleet.client.fetching == number
    fleet.server.cut.clear()
    assert fleet.fetch(number) <= fleet.size(number) - here
    assert fleet.arrived == [1, number]


def test_a_version_whose_file_has_gone_gives_way_to_the_newest_at_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, count=100_000, faults=FaultWindow(bytes_per_s=40_000))
    fleet.publish()
    fleet.fetch(1, 60.0)
    first = fleet.publish(whole=True)
    fleet.half(first, 2 * CHUNK)
    row = fleet.hall.ledger.version(first)
    assert row is not None
    (file,) = (fleet.root / "gateway").rglob(row.path)
    file.unlink()
    newest = fleet.publish(whole=True)
    assert fleet.until(lambda: fleet.client.fetching == newest) < 6.0, "it is not waited for in vain"
    fleet.fetch(newest, 60.0)
    assert fleet.arrived == [1, newest]
