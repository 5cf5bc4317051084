"""Several gateways on one ledger: each its own journal, leases of its own, each robot at one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import LeaseKind, LeaseNote
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import PROMPT_S, seal
from tests.cloud_learner.buffer.stored import SPEC, put
from tests.cloud_learner.buffer.synthetic import fake_episode, same_segment
from wire.errors import StorageError
from wire.messages.fleet import JobRequest
from wire.types import Lease


@pytest.fixture
def two(ledger_place: str, tmp_path: Path):
    """(ledger, store) of two gateways, which have the objects in common and a journal each."""
    store = f"file://{tmp_path / 'objects'}"
    (tmp_path / "objects").mkdir()
    opened = [BufferLocation(tmp_path / name, ledger_place, store, gateway=name).open_writer() for name in ("a", "b")]
    for ledger, _ in opened:
        ledger.see_robot("r1", SPEC, "clock", 1)
    yield opened
    for ledger, journal in opened:
        journal.close()
        ledger.close()


def test_what_lies_in_one_journal_is_elsewhere_for_the_other_until_it_is_sealed(two, ledger_place, tmp_path) -> None:
    (first, mine), (second, other) = two
    rows, taken = [], {}
    for store, name in ((mine, "one"), (other, "two")):
        for segment in fake_episode(SPEC, name, seed=len(rows)):
            row = put(store, segment)
            rows.append(row)
            taken[row] = segment
    assert (first.gateway, second.gateway) == (1, 2)
    found = mine.read(rows)
    assert found.damaged == {}
    assert set(found.segments) | set(found.elsewhere) == set(rows)
    assert {taken[row].episode.id for row in found.segments} == {"one"}
    assert first.unsealed_elsewhere() == {"b": len(found.elsewhere)}
    assert first.journals() == second.journals() == {1}

    seal(mine, 10**9, force=True)
    assert {place.gateway for place in first.places(rows).values() if place.journal is not None} == {2}
    assert mine.journal.numbers() != other.journal.numbers() or second.journals() == {1}
    # soon, for nobody else can read what lies here
    assert seal(other, round(PROMPT_S * 1e9) + 10).segments == len(found.elsewhere)
    reader, store = BufferLocation(tmp_path / "c", ledger_place, f"file://{tmp_path / 'objects'}").open_reader()
    read = store.read(rows)
    assert all(same_segment(read.segments[row], taken[row]) for row in rows)
    reader.close()


def test_a_name_stands_for_one_journal(two, ledger_place, tmp_path) -> None:
    (_, store), _ = two
    put(store, fake_episode(SPEC, "one")[0])
    impostor = BufferLocation(tmp_path / "d", ledger_place, f"file://{tmp_path / 'objects'}", gateway="a")
    with pytest.raises(StorageError, match="as gateway 'a': its journal is not this one's"):
        impostor.open_writer()
    seal(store, 10**9, force=True)
    ledger, _ = impostor.open_writer()
    assert ledger.gateway == 1  # nothing lies in the journal that is gone
    assert ledger.gateway_names() == {1: "a", 2: "b"}
    ledger.close()


def test_each_goes_on_with_its_own_jobs_and_leases(two) -> None:
    (first, _), (second, _) = two
    assert first.add_job(JobRequest("j", "rollout", ("reach",)), 1)
    assert not second.add_job(JobRequest("j", "rollout", ("reach",)), 1)
    assert [job.id for job in first.jobs()] == ["j"]
    assert second.jobs() == ()
    lease = Lease("r1", "somebody", "maintenance", 30, 5, 4)
    first.keep_leases({"r1": lease}, 1)
    second.keep_leases({"r1": None}, 2)
    assert first.kept_leases() == (lease,)
    assert second.kept_leases() == ()
    second.keep_leases({"r1": lease}, 3)  # the robot has gone there
    assert first.kept_leases() == ()


def test_a_robot_is_at_the_gateway_that_hears_it(two) -> None:
    first, second = (ledger for ledger, _ in two)

    def take(ledger: Ledger, silent_s: float):
        return ledger.take_robots(["r1"], silent_s, 1000)

    reserved = first.reserve_leases(1000)
    assert take(first, 5.0).elsewhere == {}
    assert take(first, 5.0).reserved == 0
    assert take(second, 5.0).elsewhere == {"r1": "a"}
    moved = take(second, 0.0)
    assert moved.elsewhere == {}
    # above all that the other one may have given it
    assert moved.reserved >= reserved + 1000
    assert take(first, 5.0).elsewhere == {"r1": "b"}


def test_each_ends_its_own_leases_in_the_history_and_those_of_robots_that_it_takes(two) -> None:
    first, second = (ledger for ledger, _ in two)

    def spans() -> list[tuple[int, int]]:
        found = first.lease_intervals("r1", LeaseKind.person, [(-(2**62), 2**62)], 10**15)
        base = found[0, 2]
        return [(int(begin - base), int(end - base)) for begin, end, _ in found]

    first.take_robots(["r1"], 5.0, 1000)
    first.note_leases([LeaseNote("r1", 1, "anna", LeaseKind.person, 1000)])
    second.end_leases(2000, 10)  # it starts, and knows nothing of the other's
    assert spans() == [(1000, 10**15)]
    second.take_robots(["r1"], 0.0, 1000)  # the first one is dead
    assert spans() == [(1000, 1000)]
    second.note_leases([LeaseNote("r1", 2000, "bert", LeaseKind.person, 3000)])
    first.end_leases(4000, 10)
    assert spans() == [(1000, 1000), (3000, 10**15)]
    second.end_leases(3005, 10)
    assert spans() == [(1000, 1000), (3000, 3005)]
    back = first.take_robots(["r1"], 0.0, 1000)
    assert (back.moved, first.take_robots(["r1"], 0.0, 1000).moved) == (("r1",), ())
