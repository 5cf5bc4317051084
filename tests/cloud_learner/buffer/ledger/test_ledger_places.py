"""Where segments lie according to the ledger: from the journal into shards, pruned, damaged, and by whom."""

import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
import sqlalchemy as sa

from cloud_learner.buffer.ledger import ledger as ledger_module
from cloud_learner.buffer.ledger import segments as segments_module
from cloud_learner.buffer.ledger import shards as ledger_shards
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import Journaled, Totals, Waiting
from tests.cloud_learner.buffer.stored import count_changes
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.errors import InvalidDataError, StorageError
from wire.types import PolicyVersion

SPEC, OTHER = fake_spec(), fake_spec(state_dim=7)


@pytest.fixture
def ledger(ledger_place):
    ledger = Ledger.open(ledger_place)
    ledger.see_robot("r1", SPEC, "clock", 5)
    ledger.see_robot("r2", OTHER, "clock", 5)
    yield ledger
    ledger.close()


def _commit(ledger, *segments, journal=1):
    at = (
        Journaled(journal, 200 * segment.index, 100 + segment.index, f"{n:064x}") for n, segment in enumerate(segments)
    )
    return ledger.commit_segments([(segment, here, 10) for segment, here in zip(segments, at, strict=True)], 11)


def _offsets(ledger, rows):
    """Where a shard that holds these rows would put their records, and the bytes of all."""
    found, end = {}, 0
    for row, place in ledger.places(rows).items():
        found[row] = end
        end += place.bytes
    return found, end


def _seal(ledger, rows, spec=SPEC, size=5000):
    number = ledger.reserve_shard(spec.hash, 77)
    assert ledger.commit_shard(spec.hash, number, *_offsets(ledger, rows), size, "a" * 64) == len(rows)
    return number


def _tallies_are_right(ledger):
    """Whether the tallies kept by robot equal the sums over episodes, and those the sums over segments."""
    with ledger.reading() as connection:
        sums = connection.execute(
            sa.text(
                "SELECT robot, count(*), sum(segments), sum(steps), sum(human_steps), sum(interventions), sum(bytes),"
                " sum(ticks), sum(end_tick) FROM episodes WHERE pruned_ns = 0 GROUP BY robot"
            )
        ).fetchall()
        kept = connection.execute(
            sa.text(
                "SELECT robot, episodes, segments, steps, human_steps, interventions, bytes, ticks, end_tick"
                " FROM tallies WHERE episodes > 0"
            )
        ).fetchall()
        counted = connection.execute(
            sa.text("SELECT count(*), coalesce(sum(steps), 0), coalesce(sum(bytes), 0) FROM segments")
        ).one()
        totals = ledger.totals()
        assert tuple(map(int, counted)) == (totals.segments, totals.steps, totals.bytes)
        return sorted(map(list, sums)) == sorted(map(list, kept))


def _missing(ledger):
    """Ticks below the newest of their episode that no segment brought, counted afresh."""
    ticks, ends = set(), {}
    for row in ledger.segments_after(0, 10_000):
        ticks |= {(row.episode, row.first_tick + n) for n in range(row.steps)}
        ends[row.episode] = max(ends.get(row.episode, 0), row.first_tick + row.steps)
    return sum(ends.values()) - len(ticks)


# --- sealing --------------------------------------------------------------------------------------------------------


def test_a_segment_lies_in_the_journal_until_it_lies_in_a_shard(ledger):
    segments = fake_episode(SPEC, "e1", steps=200)
    rows = _commit(ledger, *segments, journal=3)
    place = ledger.places(rows)[rows[1]]
    assert (place.row, place.id, place.episode, place.index, place.spec_hash) == (2, "e1/1", "e1", 1, SPEC.hash)
    assert (place.steps, place.sha256, place.bytes) == (80, f"{1:064x}", 101)
    assert (place.journal, place.offset, place.shard) == (3, 200, None)
    assert place.damaged is False
    assert list(ledger.places([3, 1, 99])) == [1, 3]
    assert ledger.places([]) == {}
    assert (ledger.in_journal(), ledger.journals()) == (Waiting(3, 200, 303), {3})

    number = ledger.reserve_shard(SPEC.hash, 77)
    offsets = _offsets(ledger, rows[:2])
    (shard,) = ledger.shards()
    assert (shard.number, shard.state, shard.created_ns, shard.bytes) == (number, "writing", 77, 0)
    assert ledger.commit_shard(SPEC.hash, number, *offsets, 9000, "b" * 64) == 2
    place = ledger.places(rows)[rows[1]]
    assert (place.journal, place.shard, place.offset, place.bytes) == (None, number, 100, 101)
    assert ledger.places_in_shard(SPEC.hash, number) == tuple(ledger.places(rows[:2]).values())
    assert ledger.places(rows)[rows[2]].journal == 3
    assert (ledger.in_journal(), ledger.journals()) == (Waiting(1, 40, 102), {3})
    (shard,) = ledger.shards(SPEC.hash)
    assert (shard.state, shard.record_bytes, shard.bytes, shard.sha256) == ("sealed", 201, 9000, "b" * 64)
    assert (shard.live_bytes, shard.live_steps, shard.live_segments, shard.damaged_segments) == (201, 160, 2, 0)
    assert ledger.shards(OTHER.hash) == ()
    # a shard is committed once, and only if it was reserved
    for wrong in (number, number + 1):
        with pytest.raises(StorageError, match=f"shard {wrong} of robot spec {SPEC.hash} is"):
            ledger.commit_shard(SPEC.hash, wrong, *offsets, 1, "c" * 64)


@pytest.mark.slow
def test_many_segments_move_at_once(ledger):
    """More than fit into one list of SQL."""
    rows = _commit(ledger, *fake_episode(SPEC, "e", steps=1100, segment_steps=1))
    assert len(ledger.places(rows)) == 1100
    _seal(ledger, rows)
    assert ledger.in_journal().segments == 0
    assert ledger.shards()[0].live_segments == 1100
    assert ledger.mark_damaged(rows) == 1100


def test_what_is_not_sealed_is_told_by_episode(ledger):
    first, second, third = (fake_episode(SPEC, f"e{n}", steps=200) for n in range(3))
    others = fake_episode(OTHER, "o", robot="r2", steps=100)
    _commit(ledger, first[0], second[2], others[0], second[1], third[0], first[1], second[0], third[2])
    found = ledger.unsealed()
    assert [one.id for one in found] == ["e0/0", "e0/1", "e1/0", "e1/1", "e1/2", "o/0", "e2/0", "e2/2"]
    assert [one.finished for one in found] == [False, False, True, True, True, False, False, False]
    one = found[4]
    assert (one.row, one.episode, one.index, one.spec_hash) == (2, "e1", 2, SPEC.hash)
    assert (one.steps, one.bytes, one.committed_ns) == (40, 102, 11)
    assert (one.journal, one.offset, one.sha256) == (1, 400, f"{1:064x}")
    assert found[0].finished is False
    _commit(ledger, third[1], first[2])
    assert all(one.finished for one in ledger.unsealed() if one.spec_hash == SPEC.hash)
    # what cannot be read is nothing to seal, but its file stays
    ledger.mark_damaged([found[0].row])
    assert len(ledger.unsealed()) == 9
    _seal(ledger, [one.row for one in ledger.unsealed() if one.spec_hash == SPEC.hash])
    assert [one.id for one in ledger.unsealed()] == ["o/0"]
    assert ledger.journals() == {1}


def test_what_was_forgotten_or_damaged_meanwhile_is_not_moved(ledger):
    rows = _commit(ledger, *fake_episode(SPEC, "e1"), *fake_episode(SPEC, "e2"))
    number = ledger.reserve_shard(SPEC.hash, 1)
    offsets = _offsets(ledger, rows)
    ledger.mark_damaged([rows[0]])
    ledger.prune(["e2"], 5)
    assert ledger.commit_shard(SPEC.hash, number, *offsets, 1, "a" * 64) == 2
    places = ledger.places(rows)
    assert [places[row].shard for row in rows[:3]] == [None, number, number]
    assert (ledger.shards()[0].live_segments, ledger.shards()[0].live_bytes) == (2, 203)


def test_a_shard_that_fails_to_commit_changes_nothing(ledger):
    rows = _commit(ledger, *fake_episode(SPEC, "e1"))
    number = ledger.reserve_shard(SPEC.hash, 1)
    with pytest.raises(StorageError):
        ledger.commit_shard(SPEC.hash, number, *_offsets(ledger, rows), 1, None)
    assert (ledger.shards()[0].state, ledger.in_journal().segments) == ("writing", 3)
    ledger.forget_shard(SPEC.hash, number)
    assert ledger.shards() == ()


def test_shards_are_numbered_once_for_each_spec(ledger):
    rows = _commit(ledger, *fake_episode(SPEC, "e1"))
    assert [ledger.reserve_shard(SPEC.hash, 1) for _ in range(3)] == [0, 1, 2]
    assert ledger.reserve_shard(OTHER.hash, 1) == 0
    for number in (2, 1):
        ledger.forget_shard(SPEC.hash, number)
    assert _seal(ledger, rows) == 3
    assert [(shard.spec_hash, shard.number) for shard in ledger.shards(SPEC.hash)] == [(SPEC.hash, 0), (SPEC.hash, 3)]
    with pytest.raises(InvalidDataError, match="unknown"):
        ledger.reserve_shard("0" * 16, 1)
    # of the same number, but other specs
    others = _commit(ledger, *fake_episode(OTHER, "o", robot="r2", steps=80))
    number = ledger.reserve_shard(OTHER.hash, 1)
    ledger.commit_shard(OTHER.hash, number, *_offsets(ledger, others), 1, "a" * 64)
    counts = {(shard.spec_hash, shard.number): shard.live_steps for shard in ledger.shards() if shard.state == "sealed"}
    assert counts == {(SPEC.hash, 3): 200, (OTHER.hash, 1): 80}


def test_a_shard_goes_when_nothing_lives_in_it(ledger):
    rows = _commit(ledger, *fake_episode(SPEC, "e1"), *fake_episode(SPEC, "e2"))
    old = _seal(ledger, rows)
    with pytest.raises(StorageError, match=f"shard {old} .* is still needed, by segment e"):
        ledger.mark_dropping(SPEC.hash, old)
    with pytest.raises(StorageError, match="sealed, not writing or dropping"):
        ledger.forget_shard(SPEC.hash, old)
    # one episode is forgotten, one segment damaged, the others move into a new shard
    ledger.prune(["e1"], 5)
    ledger.mark_damaged([rows[3]])
    assert (ledger.shards()[0].live_segments, ledger.shards()[0].live_steps) == (2, 120)
    new = _seal(ledger, rows[4:])
    assert {place.shard for place in ledger.places(rows[4:]).values()} == {new}
    ledger.mark_dropping(SPEC.hash, old)
    ledger.mark_dropping(SPEC.hash, old)
    assert [shard.state for shard in ledger.shards()] == ["dropping", "sealed"]
    ledger.forget_shard(SPEC.hash, old)
    assert [shard.number for shard in ledger.shards()] == [new]
    with pytest.raises(StorageError, match="unknown"):
        ledger.forget_shard(SPEC.hash, old)


# --- forgetting and damage ------------------------------------------------------------------------------------------


def test_a_pruned_episode_is_gone_but_not_unknown(ledger):
    rows = _commit(ledger, *fake_episode(SPEC, "e1"), *fake_episode(SPEC, "e2", seed=3), journal=1)
    rows += _commit(ledger, *fake_episode(OTHER, "o", robot="r2"), journal=2)
    ledger.commit_version(PolicyVersion(1, "a" * 64, 10, 0, 1, 1, 1), "1", trained=[1, 2])
    ledger.label_episode("e1", "quality", 0.5, "anna")
    before, episode = ledger.robot_totals(), ledger.episode("e1")
    assert ledger.generation() == 0
    assert ledger.prune([], 70) == ledger.prune(["nothing"], 70) == (0, 0, 0)
    assert ledger.generation() == 0
    assert ledger.prune(["e1", "nothing"], 70) == (1, 3, 303)
    assert ledger.generation() == 1
    assert ledger.prune(["e1"], 71) == (0, 0, 0)
    assert ledger.generation() == 1

    assert ledger.segments_of("e1") == ()
    assert list(ledger.places(rows)) == rows[3:]
    assert ledger.index(0, SPEC.data_hash).row.tolist() == rows[3:6]
    assert {facts.id for facts in ledger.index(0, SPEC.data_hash).episodes.values()} == {"e2"}
    assert [one.episode for one in ledger.unsealed()] == ["e2"] * 3 + ["o"] * 3
    # what it was stays known, for lineage and for the seeds that were used up
    assert ledger.episode("e1").pruned_ns == 70
    assert (ledger.episode("e1").steps, ledger.episode("e1").outcome) == (episode.steps, "success")
    assert ledger.episodes_of_version(1) == ("e1", "e2")
    assert ledger.labels("e1") == {"quality": 0.5}
    assert ledger.episodes_of_robot("r1") == 2
    assert [row.id for row in ledger.episodes("r1")] == ["e2"]
    assert ledger.pruned_episodes() == 1
    # and it is not counted any more
    after = ledger.robot_totals()
    assert after["r2"] == before["r2"]
    assert (after["r1"].segments, after["r1"].episodes, after["r1"].steps, after["r1"].bytes) == (3, 1, 200, 303)
    assert _tallies_are_right(ledger)
    ledger.prune(["e2"], 72)
    assert set(ledger.robot_totals()) == {"r2"}
    assert ledger.journals() == {2}


def test_what_went_since_a_generation_is_told(ledger):
    rows = [row for name in ("e1", "e2", "e3") for row in _commit(ledger, *fake_episode(SPEC, name))]
    numbers = [ledger.episode(name).number for name in ("e1", "e2", "e3")]

    def gone(generation):
        episodes, damaged = ledger.gone_since(generation)
        return list(episodes), damaged.tolist()

    assert gone(0) == ([], [])
    ledger.prune(["e1"], 5)
    ledger.mark_damaged(rows[8:])
    generation = ledger.generation()
    ledger.prune(["e2"], 3)
    assert gone(0) == (numbers[:2], rows[8:])
    assert gone(generation) == (numbers[1:2], rows[8:])
    assert gone(ledger.generation()) == ([], rows[8:])


def test_an_index_of_many_pieces_is_one(ledger, monkeypatch):
    for number in range(5):
        _commit(ledger, *fake_episode(SPEC, f"e{number}", seed=number))
    whole = ledger.index(0, SPEC.data_hash)
    monkeypatch.setattr(segments_module, "_FETCHED", 2)
    pieces = ledger.index(0, SPEC.data_hash)
    for name in whole.__struct_fields__:
        one, other = getattr(whole, name), getattr(pieces, name)
        assert one == other if isinstance(one, dict) else np.array_equal(one, other) and one.dtype == other.dtype, name


def test_a_segment_of_a_pruned_episode_is_refused(ledger):
    segments = fake_episode(SPEC, "e1")
    _commit(ledger, *segments[:2])
    ledger.prune(["e1"], 5)
    for segment in segments:
        with pytest.raises(InvalidDataError, match="its episode was pruned"):
            _commit(ledger, segment)
    assert ledger.totals() == Totals()
    assert ledger.in_journal().segments == 0


def test_pruning_many_takes_many_short_transactions(ledger, monkeypatch):
    monkeypatch.setattr(ledger_module, "SEGMENTS_AT_ONCE", 4)
    monkeypatch.setattr(ledger_module, "EPISODES_AT_ONCE", 2)
    _commit(ledger, *fake_episode(SPEC, "long", steps=240, segment_steps=20))
    for number in range(3):
        _commit(ledger, *fake_episode(SPEC, f"e{number}"))
    changed = count_changes(ledger)
    assert ledger.prune(["long", "e0", "e1", "nothing", "e2"], 0) == (4, 21, 2175)
    assert max(changed) == 4 and sum(changed) == 21 + 4
    assert ledger.episode("e0").pruned_ns != 0 and ledger.segments_after(0) == ()
    assert ledger.index(0, SPEC.hash).row.tolist() == [] and ledger.totals() == Totals()


def test_pruning_that_was_killed_is_finished_by_the_next_one(ledger, monkeypatch):
    for name in ("e1", "e2"):
        _commit(ledger, *fake_episode(SPEC, name))
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "finish_pruning", lambda: None)
        ledger.prune(["e1"], 5)
    # what was noted is counted no more, and nothing is added to it, but its segments are there
    assert ledger.totals().segments == 3 and len(ledger.segments_of("e1")) == 3
    assert len(ledger.index(0, SPEC.data_hash).row) == 3
    generation = ledger.generation()
    assert ledger.prune(["e2"], 5) == (1, 3, 303)
    assert ledger.segments_after(0) == () and ledger.generation() > generation


def test_an_episode_that_grew_since_it_was_chosen_is_not_pruned(ledger):
    rows = _commit(ledger, *fake_episode(SPEC, "e1", finished=False)[:2])
    _commit(ledger, *fake_episode(SPEC, "e2"))
    _commit(ledger, fake_episode(SPEC, "e1")[2])
    assert ledger.prune(["e1", "e2"], 5, rows[-1] + 3) == (1, 3, 303)
    assert ledger.episode("e1").pruned_ns == 0


def test_damaged_segments_are_left_out_and_counted(ledger):
    rows = _commit(ledger, *fake_episode(SPEC, "e1"))
    assert ledger.damaged_segments() == 0
    assert ledger.mark_damaged([rows[1], 99]) == 1
    assert ledger.generation() == 1
    assert ledger.mark_damaged(rows[:2]) == 1
    assert ledger.generation() == 2
    assert ledger.mark_damaged(rows[:2]) == ledger.mark_damaged([]) == 0
    assert ledger.generation() == 2
    assert ledger.damaged_segments() == 2
    assert ledger.index(0, SPEC.data_hash).row.tolist() == rows[2:]
    assert [place.damaged for place in ledger.places(rows).values()] == [True, True, False]
    assert [row.damaged for row in ledger.segments_of("e1")] == [True, True, False]
    # nothing is lost from the counters: they came, and they are not duplicates if they come again
    assert ledger.totals().steps == 200
    assert _commit(ledger, *fake_episode(SPEC, "e1")) == [None] * 3


def test_the_tallies_hold_whatever_happens(ledger):
    rng = np.random.default_rng(6)
    names = []
    for number in range(30):
        names.append(f"e{number}")
        spec, robot = ((SPEC, "r1"), (OTHER, "r2"))[number % 2]
        segments = fake_episode(spec, names[-1], robot=robot, steps=int(rng.integers(1, 90)), segment_steps=20)
        kept = [segments[n] for n in rng.permutation(len(segments)) if rng.random() < 0.8]
        _commit(ledger, *kept)
        if number % 7 == 6:
            ledger.prune([names.pop(int(rng.integers(len(names)))) for _ in range(3)], 5)
        assert _tallies_are_right(ledger)
    assert ledger.totals().missing_steps == _missing(ledger) > 0


def _live(ledger):
    """What lies in each shard, counted afresh: whole bytes, steps and segments, and damaged segments."""
    found = {}
    for row in ledger.segments_after(0):
        place = ledger.places([row.row])[row.row]
        if place.shard is not None:
            counts = found.setdefault((row.spec_hash, place.shard), [0, 0, 0, 0])
            for n, more in enumerate((0, 0, 0, 1) if row.damaged else (row.bytes, row.steps, 1, 0)):
                counts[n] += more
    return found


def test_the_counts_of_shards_hold_whatever_happens(ledger, monkeypatch):
    monkeypatch.setattr(ledger_module, "SEGMENTS_AT_ONCE", 3)
    rng = np.random.default_rng(8)
    rows = {}
    for number in range(8):
        spec, robot = ((SPEC, "r1"), (OTHER, "r2"))[number % 2]
        rows[number] = _commit(ledger, *fake_episode(spec, f"e{number}", robot=robot, steps=150, segment_steps=20))
        _seal(ledger, rows[number], spec)
        if number % 3 == 2:
            # some of an earlier shard are written again together with what came now
            spec = (SPEC, OTHER)[(number - 2) % 2]
            both = [*rng.permutation(rows[number - 2])[:5].tolist(), *rows[number - 2][-1:]]
            ledger.commit_shard(spec.hash, ledger.reserve_shard(spec.hash, 1), *_offsets(ledger, both), 1, "b" * 64)
            ledger.mark_damaged(rng.permutation(rows[number - 1])[:4].tolist())
        if number == 6:
            ledger.prune(["e1", "e2", "e5"], 9)
        kept = {
            (shard.spec_hash, shard.number): [
                shard.live_bytes,
                shard.live_steps,
                shard.live_segments,
                shard.damaged_segments,
            ]
            for shard in ledger.shards()
        }
        assert {key: counts for key, counts in kept.items() if any(counts)} == _live(ledger)


def test_a_shard_is_committed_in_short_transactions_and_may_be_interrupted(ledger, monkeypatch):
    monkeypatch.setattr(ledger_module, "SEGMENTS_AT_ONCE", 4)
    rows = _commit(ledger, *fake_episode(SPEC, "long", steps=200, segment_steps=20))
    number, changed = ledger.reserve_shard(SPEC.hash, 1), count_changes(ledger)
    move, calls = ledger_shards.move_segments, []

    def fail_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise StorageError("the power went")
        return move(*args)

    monkeypatch.setattr(ledger_shards, "move_segments", fail_third)
    with pytest.raises(StorageError):
        ledger.commit_shard(SPEC.hash, number, *_offsets(ledger, rows), 1, "a" * 64)
    # what was moved stays moved, the rest lies where it lay
    assert [place.shard for place in ledger.places(rows).values()] == [number] * 8 + [None] * 2
    (shard,) = ledger.shards()
    assert (shard.state, shard.live_segments, max(changed)) == ("sealed", 8, 4)
    assert len(ledger.unsealed()) == 2


# --- exclusive ------------------------------------------------------------------------------------------------------


def test_one_at_a_time_seals_while_others_write(ledger):
    order = []

    def wait():
        with ledger.exclusive(wait_s=30):
            order.append("second")

    with ledger.exclusive():
        thread = threading.Thread(target=wait)
        thread.start()
        said = rf"process {os.getpid()}.* seals, prunes, compacts or repairs it"
        with pytest.raises(StorageError, match=said), ledger.exclusive(wait_s=0.1):
            order.append("never")
        assert _commit(ledger, *fake_episode(SPEC, "e1")) == [1, 2, 3]
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
    # an exception gives it back
    with pytest.raises(ZeroDivisionError), ledger.exclusive():
        _ = 1 / 0
    with ledger.exclusive(wait_s=0):
        pass


def _hold(place, held):
    ledger = Ledger.open(place)
    with ledger.exclusive(wait_s=30):
        held.set()
        time.sleep(60)


@pytest.mark.slow
def test_a_killed_process_holds_nothing(ledger, ledger_place):
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=_hold, args=(ledger_place, held))
    process.start()
    try:
        assert held.wait(60)
        with pytest.raises(StorageError, match=f"process {process.pid}"), ledger.exclusive(wait_s=0.1):
            pass
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    with ledger.exclusive(wait_s=20):
        pass


@pytest.mark.slow
def test_a_lock_that_was_lost_is_an_error(postgres_server, postgres_url):
    ledger = Ledger.open(postgres_url)
    end_all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'vla-fleet%'"
    with pytest.raises(StorageError), ledger.exclusive():
        postgres_server.execute(end_all)
    with ledger.exclusive():
        pass
    ledger.close()
