import sqlite3

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.control import count_interventions, summarise_control
from cloud_learner.buffer.fake import fake_episode, fake_spec
from cloud_learner.buffer.ledger import Ledger
from cloud_learner.buffer.rows import Stored, Totals
from wire.errors import Corrupt, InvalidData, StorageError
from wire.messages import Evaluation
from wire.types import PolicyVersion

SPEC = fake_spec()
POLICY, HUMAN, SCRIPT, HOLD = range(4)


def _stored(segment):
    return Stored(f"{segment.id}.zip", 100, "0" * 64)


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.see_robot("r1", SPEC, "clock", 5)
    yield ledger
    ledger.close()


def _commit(ledger, segment):
    return ledger.commit_segment(segment, _stored(segment), 10, 11)


def test_a_segment_is_entered_once_and_in_commit_order(ledger):
    segments = fake_episode(SPEC, "e1", steps=200)
    assert [_commit(ledger, segment) for segment in segments] == [True] * 3
    assert [_commit(ledger, segment) for segment in segments] == [False] * 3
    rows = ledger.segments_after(0)
    assert [(row.row, row.id, row.first_tick, row.steps) for row in rows] == [
        (1, "e1/0", 0, 80),
        (2, "e1/1", 80, 80),
        (3, "e1/2", 160, 40),
    ]
    assert rows[0].robot == "r1"
    assert rows[0].task == "drawer-open"
    assert ledger.segments_after(1, limit=1) == rows[1:2]
    assert ledger.segment("e1/2") == rows[2]
    assert ledger.segment("e1/3") is None
    assert ledger.segments_of("e1") == rows


def test_an_episode_adds_up_whatever_the_order(ledger):
    for number, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 2, 0)]):
        segments = fake_episode(SPEC, f"e{number}", steps=200, seed=3)
        for index in order:
            _commit(ledger, segments[index])
    episodes = [ledger.episode(f"e{number}") for number in range(3)]
    whole = np.concatenate([segment.actor for segment in fake_episode(SPEC, "e", steps=200, seed=3)])
    control = summarise_control(whole)
    for episode in episodes:
        assert episode.steps == 200
        assert episode.outcome == "success"
        assert episode.human_steps == control.human_steps
        assert episode.interventions == control.takeovers
    assert control.takeovers > 0
    assert [episode.id for episode in ledger.episodes(limit=2)] == ["e2", "e1"]


def test_interventions_are_changes_from_the_policy_to_a_person():
    def count(*segments):
        found = [summarise_control(np.array(actors, np.uint8)) for actors in segments]
        return count_interventions((c.entry, c.exit, c.takeovers) for c in found)

    assert count([POLICY] * 5) == 0
    assert count([HUMAN] * 5) == 0
    assert count([POLICY, HUMAN, HUMAN, POLICY, SCRIPT]) == 2
    assert count([POLICY, HUMAN, SCRIPT, HUMAN]) == 1
    # a hold belongs to nobody
    assert count([POLICY, HOLD, HUMAN, HOLD, HUMAN]) == 1
    # the seam between segments counts, also across one that held all the time
    assert count([POLICY], [HUMAN]) == 1
    assert count([POLICY, HUMAN], [HUMAN, POLICY]) == 1
    assert count([POLICY], [HOLD, HOLD], [SCRIPT]) == 1
    assert count([HOLD], [HUMAN]) == 0


def test_interventions_do_not_depend_on_where_segments_are_cut():
    rng = np.random.default_rng(1)
    for _ in range(200):
        actors = rng.integers(0, 4, rng.integers(1, 40)).astype(np.uint8)
        cuts = np.sort(rng.integers(0, len(actors) + 1, rng.integers(0, 5)))
        parts = [summarise_control(part) for part in np.split(actors, cuts)]
        whole = summarise_control(actors)
        assert count_interventions((c.entry, c.exit, c.takeovers) for c in parts) == whole.takeovers
        assert sum(part.human_steps for part in parts) == whole.human_steps


def test_a_demonstration_counts_no_intervention(ledger):
    for segment in fake_episode(SPEC, "d", source="demonstration", actor=[POLICY, SCRIPT] * 100):
        _commit(ledger, segment)
    assert ledger.episode("d").interventions == 0
    assert ledger.episode("d").human_steps == 100


def test_totals_count_each_robot_and_see_what_is_double_or_missing(ledger):
    assert ledger.totals() == Totals()
    assert ledger.robot_totals() == {}
    first = fake_episode(SPEC, "e1", steps=200)
    for segment in first:
        _commit(ledger, segment)
    for segment in fake_episode(SPEC, "e2", robot="r2", steps=100, actor=[HUMAN] * 100)[1:]:
        _commit(ledger, segment)
    totals = ledger.totals()
    assert (totals.segments, totals.episodes, totals.steps, totals.newest_row) == (4, 2, 220, 4)
    assert (totals.duplicated_steps, totals.missing_steps) == (0, 80)
    by_robot = ledger.robot_totals()
    assert set(by_robot) == {"r1", "r2"}
    assert by_robot["r1"].steps == 200
    assert by_robot["r2"].human_steps == 20
    # an edge with a bug cuts the same ticks twice: [40, 120) again, and [150, 170) within
    for index, (begin, steps) in enumerate([(40, 80), (150, 20)], start=3):
        wrong = fake_episode(SPEC, "e1", steps=steps)[0]
        wrong = msgspec.structs.replace(wrong, id=f"e1/{index}", index=index, first_tick=begin)
        _commit(ledger, wrong)
    assert ledger.totals().duplicated_steps == 100
    assert ledger.robot_totals()["r1"].missing_steps == 0


def test_duplicated_steps_equal_a_count_by_hand(ledger):
    rng = np.random.default_rng(2)
    base = fake_episode(SPEC, "e", steps=30)[0]
    ticks = []
    for index in range(12):
        begin, steps = int(rng.integers(0, 60)), int(rng.integers(1, 30))
        segment = fake_episode(SPEC, "e", steps=steps)[0]
        segment = msgspec.structs.replace(
            segment, id=f"e/{index}", index=index, first_tick=begin, last=False, outcome="", episode=base.episode
        )
        _commit(ledger, segment)
        ticks += range(begin, begin + steps)
        totals = ledger.totals()
        assert totals.duplicated_steps == len(ticks) - len(set(ticks))
        assert totals.missing_steps == max(ticks) + 1 - len(set(ticks))


def test_an_episode_cannot_change_its_facts(ledger):
    segments = fake_episode(SPEC, "e1", steps=200)
    _commit(ledger, segments[0])
    for change in ({"robot": "r2"}, {"task": "other"}, {"source": "evaluation"}, {"seed": 9}):
        episode = msgspec.structs.replace(segments[1].episode, **change)
        with pytest.raises(InvalidData, match=next(iter(change))):
            _commit(ledger, msgspec.structs.replace(segments[1], episode=episode))
    stranger = fake_episode(fake_spec(state_dim=7), "e9")[0]
    with pytest.raises(InvalidData, match="unknown"):
        _commit(ledger, stranger)
    assert ledger.totals().segments == 1
    assert ledger.episode("e9") is None


def test_robots_specs_and_clock_offsets(ledger):
    ledger.see_robot("trainer", None, "clock", 6)
    ledger.set_clock_offset("r1", -1234)
    ledger.see_robot("r1", None, "other clock", 9)
    robot = ledger.robot("r1")
    assert (robot.clock_offset_ns, robot.first_seen_ns, robot.last_seen_ns) == (-1234, 5, 9)
    assert (robot.clock, robot.spec_hash) == ("other clock", SPEC.hash)
    assert ledger.spec(SPEC.hash) == SPEC
    assert ledger.spec("nothing") is None
    assert [robot.name for robot in ledger.robots()] == ["r1", "trainer"]
    assert ledger.robot("nobody") is None
    # a robot that was rebuilt brings another spec; data of the old one can still be read
    ledger.see_robot("r1", fake_spec(2), "clock", 10)
    assert ledger.robot("r1").spec_hash == fake_spec(2).hash
    assert ledger.spec(SPEC.hash) == SPEC


def test_versions_measurements_applied_and_events(ledger):
    assert ledger.newest_version() is None
    one = PolicyVersion(1, "a" * 64, 10, 0, 100, 50, 7, 123)
    ledger.commit_version(one, "1.safetensors")
    with pytest.raises(InvalidData, match="version 1"):
        ledger.commit_version(one, "1.safetensors")
    assert ledger.newest_version().version == one
    assert ledger.version(1).path == "1.safetensors"
    assert ledger.version(2) is None
    assert [row.version.number for row in ledger.versions()] == [1]
    measured = Evaluation(1, {"b": 0.5, "a": 1.0}, 20, 1_000_000, "cadence", 77, 1.5)
    assert ledger.add_evaluation(measured, 5)
    assert not ledger.add_evaluation(measured, 6)
    (row,) = ledger.evaluations()
    assert (row.success, row.wall_ns, row.duration_s) == ({"a": 1.0, "b": 0.5}, 5, 1.5)
    assert ledger.note_applied("r1", 1, 10, 20)
    assert not ledger.note_applied("r1", 1, 10, 30)
    assert [row.applied_ns for row in ledger.applied()] == [20]
    ledger.add_event(1, "r1", "estop", "pressed")
    ledger.add_event(2, "r1", "estop")
    assert [event.detail for event in ledger.events()] == ["pressed", ""]
    assert [event.id for event in ledger.events(after_id=1)] == [2]


def test_another_process_reads_while_the_gateway_writes(tmp_path, ledger):
    reader = Ledger.open(ledger.path, read_only=True)
    for number, segment in enumerate(fake_episode(SPEC, "e1", steps=200), start=1):
        _commit(ledger, segment)
        assert reader.totals().segments == number
    with pytest.raises(StorageError, match="readonly"):
        reader.add_event(1, "r1", "no")
    ledger.close()
    # the last writer took its journal away; readers still come in
    assert Ledger.open(ledger.path, read_only=True).totals().segments == 3
    reader.close()


def test_the_file_is_durable_and_checked(tmp_path, ledger):
    with ledger._engine.connect() as connection:
        pragmas = {
            p: connection.exec_driver_sql(f"PRAGMA {p}").scalar()
            for p in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_a_ledger_that_cannot_be_read_says_why(tmp_path, ledger):
    with pytest.raises(StorageError, match="start the gateway"):
        Ledger.open(tmp_path / "none.sqlite", read_only=True)
    ledger.close()
    with sqlite3.connect(ledger.path) as raw:
        raw.execute("update meta set value = '99'")
    for read_only in (False, True):
        with pytest.raises(StorageError, match="format 99"):
            Ledger.open(ledger.path, read_only=read_only)
    with sqlite3.connect(tmp_path / "other.sqlite") as raw:
        raw.execute("create table t (x)")
    with pytest.raises(StorageError, match="format unknown"):
        Ledger.open(tmp_path / "other.sqlite")
    (tmp_path / "text.sqlite").write_text("this is no database" * 100)
    with pytest.raises(Corrupt, match=r"text\.sqlite"):
        Ledger.open(tmp_path / "text.sqlite")
    (tmp_path / "name with ? and # and %").mkdir()
    Ledger.open(tmp_path / "name with ? and # and %" / "ledger.sqlite").close()
    assert (tmp_path / "name with ? and # and %" / "ledger.sqlite").exists()
