import time

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from cloud_learner.buffer.control import summarise_control
from cloud_learner.buffer.ledger import commit as ledger_commit
from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import Journaled, LagRow, PartTotals, Totals
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.errors import InvalidDataError
from wire.messages.gateway import Evaluation
from wire.types import PolicyVersion

SPEC = fake_spec()
POLICY, HUMAN, SCRIPT, HOLD = range(4)
replace = msgspec.structs.replace


@pytest.fixture
def ledger(ledger_place):
    ledger = Ledger.open(ledger_place)
    ledger.see_robot("r1", SPEC, "clock", 5)
    yield ledger
    ledger.close()


def _commit(ledger, segment):
    at = Journaled(1, 200 * segment.index, 100, "0" * 64)
    (row,) = ledger.commit_segments([(segment, at, 10)], 11)
    return row


def _steps(actors, index, first_tick, of, last=False):
    """A segment of these actors, cut out of a fake episode."""
    whole = fake_episode(SPEC, of.id, steps=max(1, len(actors)), segment_steps=5000, actor=actors or [HOLD])[0]
    arrays = {
        name: array[: len(actors)]
        for name in whole.__struct_fields__
        if isinstance(array := getattr(whole, name), np.ndarray)
    }
    return replace(
        whole,
        **arrays,
        id=f"{of.id}/{index}",
        episode=of,
        index=index,
        first_tick=first_tick,
        last=last,
        outcome="failure" if last else "",
    )


# --- entering -------------------------------------------------------------------------------------------------------


def test_a_segment_is_entered_once_and_in_commit_order(ledger):
    segments = fake_episode(SPEC, "e1", steps=200)
    assert [_commit(ledger, segment) for segment in segments] == [1, 2, 3]
    assert [_commit(ledger, segment) for segment in segments] == [None] * 3
    rows = ledger.segments_after(0)
    assert [(row.row, row.id, row.first_tick, row.steps) for row in rows] == [
        (1, "e1/0", 0, 80),
        (2, "e1/1", 80, 80),
        (3, "e1/2", 160, 40),
    ]
    assert (rows[0].robot, rows[0].task, rows[0].episode, rows[0].spec_hash) == ("r1", "drawer-open", "e1", SPEC.hash)
    assert (rows[0].closed_ns, rows[0].received_ns, rows[0].committed_ns) == (segments[0].closed_ns, 10, 11)
    assert ledger.segments_after(1, limit=1) == rows[1:2]
    assert ledger.segment("e1/2") == rows[2]
    assert ledger.segment("e1/3") is None
    assert ledger.segments_of("e1") == rows
    assert ledger.totals().newest_row == 3


def test_an_episode_adds_up_whatever_the_order(ledger):
    for number, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 2, 0)]):
        segments = fake_episode(SPEC, f"e{number}", steps=200, seed=3)
        for index in order:
            _commit(ledger, segments[index])
    episodes = [ledger.episode(f"e{number}") for number in range(3)]
    whole = np.concatenate([segment.actor for segment in fake_episode(SPEC, "e", steps=200, seed=3)])
    control = summarise_control(whole)
    for number, episode in enumerate(episodes):
        assert (episode.number, episode.steps, episode.outcome) == (number + 1, 200, "success")
        assert (episode.segments, episode.bytes, episode.newest_row) == (3, 300, 3 * number + 3)
        assert (episode.committed_ns, episode.pruned_ns) == (11, 0)
        assert abs(time.time_ns() - episode.wall_ns) < 60e9
        assert episode.human_steps == control.human_steps
        assert episode.interventions == control.takeovers
    assert control.takeovers > 0
    assert [episode.id for episode in ledger.episodes(limit=2)] == ["e2", "e1"]
    assert ledger.episodes("nobody") == ()
    assert (ledger.episodes_of_robot("r1"), ledger.episodes_of_robot("nobody")) == (3, 0)
    assert [row.first_tick for row in ledger.segments_of("e1")] == [0, 80, 160]


def test_recoveries_and_corrections_are_told_apart_wherever_segments_are_cut(ledger):
    rng = np.random.default_rng(11)
    recoveries = recovery_steps = correction_steps = 0
    for number in range(12):
        source = "demonstration" if number % 6 == 5 else "online"
        kinds = rng.integers(0, 4, 200)[np.cumsum(rng.random(199) < 0.2)]
        actors = np.array([POLICY, HUMAN, HUMAN, HOLD])[kinds]
        segments = fake_episode(SPEC, f"e{number}", actor=actors.tolist(), segment_steps=23, source=source, steps=199)
        for segment in segments:
            marks = kinds[segment.first_tick : segment.first_tick + segment.steps] == 1
            _commit(ledger, replace(segment, recovery=marks) if marks.any() else segment)
        if source == "online":
            acted = kinds[kinds != 3] == 1
            recoveries += int(acted[0]) + int((acted[1:] & ~acted[:-1]).sum())
            recovery_steps += int((kinds == 1).sum())
            correction_steps += int((kinds == 2).sum())
    assert ledger.parts() == PartTotals(recoveries, recovery_steps, correction_steps) and recoveries > 20
    assert ledger.totals().human_steps > recovery_steps + correction_steps, "demonstrations are no interventions"
    ledger.prune([f"e{number}" for number in range(12)], 5)
    assert ledger.parts() == PartTotals()


def test_the_lag_that_a_segment_arrived_with_is_kept(ledger):
    actors = [POLICY] * 6 + [HUMAN] * 4
    early, late = (fake_episode(SPEC, name, steps=10, actor=actors)[0] for name in ("early", "late"))
    shown = fake_episode(SPEC, "shown", steps=10, actor=actors, source="demonstration")[0]
    _commit(ledger, early)
    for number in (1, 4):
        ledger.commit_version(PolicyVersion(number, "ab", 2, 0, 10, 5, 0), f"{number}.safetensors")
    _commit(ledger, replace(late, version=np.array([4, 4, 2, 2, 2, 1, 0, 0, 0, 0], np.int32)))
    _commit(ledger, shown)
    ledger.commit_version(PolicyVersion(9, "ab", 2, 4, 10, 5, 0), "9.safetensors")
    # sent again: it arrived when it arrived
    assert _commit(ledger, early) is None
    rows = ledger.segments_after(0)
    assert [(row.newest_version, row.lag) for row in rows] == [(0, 0), (4, 3), (4, 0)]
    assert ledger.index(0, SPEC.data_hash).newest_version.tolist() == [0, 4, 4]
    assert ledger.lags() == (LagRow("r1", 12, {0: 8, 2: 3, 3: 1}),)
    assert ledger.lags(1) == (LagRow("r1", 6, {0: 2, 2: 3, 3: 1}),)
    ledger.prune(["late"], 5)
    assert ledger.lags() == (LagRow("r1", 6, {0: 6}),)


def test_counters_equal_a_count_by_hand_whatever_comes(ledger):
    """Segments of random lengths in random order, some over the same ticks, some without a step."""
    rng = np.random.default_rng(2)
    expected = dict.fromkeys(("steps", "human_steps", "interventions", "duplicated_steps", "missing_steps"), 0)
    for number in range(12):
        tangled = number % 3 == 0
        of = fake_episode(SPEC, f"e{number}", steps=1)[0].episode
        parts, tick = [], 0
        for index in range(int(rng.integers(1, 9))):
            actors = rng.choice([POLICY, HUMAN, SCRIPT, HOLD, HOLD], int(rng.integers(0, 30))).tolist()
            first = int(rng.integers(0, 60)) if tangled else tick
            parts.append(_steps(actors, index, first, of))
            tick = first + len(actors)
        for part in rng.permutation(len(parts)).tolist():
            _commit(ledger, parts[part])
        ticks = [tick for part in parts for tick in range(part.first_tick, part.first_tick + part.steps)]
        actors = np.concatenate([part.actor for part in parts])
        whole = summarise_control(actors)
        episode = ledger.episode(of.id)
        assert (episode.steps, episode.human_steps) == (len(ticks), whole.human_steps)
        assert episode.interventions == whole.takeovers
        expected["steps"] += len(ticks)
        expected["human_steps"] += whole.human_steps
        expected["interventions"] += whole.takeovers
        expected["duplicated_steps"] += len(ticks) - len(set(ticks))
        expected["missing_steps"] += max([part.first_tick + part.steps for part in parts]) - len(set(ticks))
        totals = ledger.totals()
        assert {name: getattr(totals, name) for name in expected} == expected
    assert min(expected.values()) > 0


def test_totals_count_each_robot_and_see_what_is_double_or_missing(ledger):
    assert ledger.totals() == Totals()
    assert ledger.robot_totals() == {}
    for segment in fake_episode(SPEC, "e1", steps=200):
        _commit(ledger, segment)
    for segment in fake_episode(SPEC, "e2", robot="r2", steps=100, actor=[HUMAN] * 100)[1:]:
        _commit(ledger, segment)
    totals = ledger.totals()
    assert (totals.segments, totals.episodes, totals.steps, totals.newest_row) == (4, 2, 220, 4)
    assert (totals.bytes, totals.duplicated_steps, totals.missing_steps) == (400, 0, 80)
    by_robot = ledger.robot_totals()
    assert set(by_robot) == {"r1", "r2"}
    assert by_robot["r1"].steps == 200
    assert by_robot["r2"].human_steps == 20
    # an edge with a bug cuts the same ticks twice: [40, 120) again, and [150, 170) within
    for index, (begin, steps) in enumerate([(40, 80), (150, 20)], start=3):
        wrong = fake_episode(SPEC, "e1", steps=steps)[0]
        _commit(ledger, replace(wrong, id=f"e1/{index}", index=index, first_tick=begin))
    assert ledger.totals().duplicated_steps == 100
    assert ledger.robot_totals()["r1"].missing_steps == 0


def test_shares_are_counted_by_task_source_and_outcome(ledger):
    for number, (task, source, finished) in enumerate(
        [("b", "online", True), ("a", "demonstration", True), ("b", "online", False), ("b", "online", True)]
    ):
        options = {"task": task, "source": source, "finished": finished, "actor": [POLICY, HUMAN] * 20}
        for segment in fake_episode(SPEC, f"e{number}", steps=40, **options):
            _commit(ledger, segment)
    assert ledger.shares() == (
        ("a", "demonstration", "success", 1, 40, 20, 0),
        ("b", "online", "", 1, 40, 20, 20),
        ("b", "online", "success", 2, 80, 40, 40),
    )


def test_an_episode_cannot_change_its_facts(ledger):
    segments = fake_episode(SPEC, "e1", steps=200)
    _commit(ledger, segments[0])
    for change in ({"robot": "r2"}, {"task": "other"}, {"source": "evaluation"}, {"seed": 9}):
        episode = replace(segments[1].episode, **change)
        with pytest.raises(InvalidDataError, match=next(iter(change))):
            _commit(ledger, replace(segments[1], episode=episode))
    stranger = fake_episode(fake_spec(state_dim=7), "e9")[0]
    with pytest.raises(InvalidDataError, match="unknown"):
        _commit(ledger, stranger)
    with pytest.raises(InvalidDataError, match="another segment of index 0"):
        _commit(ledger, replace(segments[0], id="e1/other"))
    with pytest.raises(InvalidDataError, match="index"):
        _commit(ledger, replace(segments[1], index=2**40))
    with pytest.raises(InvalidDataError, match="4097 steps"):
        _commit(ledger, _steps([POLICY] * 4097, 1, 80, segments[0].episode))
    assert ledger.totals().segments == 1
    assert ledger.episode("e9") is None
    assert _commit(ledger, segments[1]) == ledger.totals().newest_row


def test_what_fails_leaves_nothing(ledger, monkeypatch):
    segments = fake_episode(SPEC, "e1", steps=200)
    _commit(ledger, segments[0])
    before = ledger.segments_after(0), ledger.episodes(), ledger.totals()

    def fail(_result):
        raise RuntimeError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(ledger_commit, "inserted_key", fail)
        for segment in (segments[1], fake_episode(SPEC, "e2")[0]):
            with pytest.raises(RuntimeError, match="cut off"):
                _commit(ledger, segment)
    assert (ledger.segments_after(0), ledger.episodes(), ledger.totals()) == before
    assert _commit(ledger, segments[1]) is not None


@pytest.mark.slow
def test_the_work_of_a_commit_does_not_grow(tmp_path):
    """Counted in instructions of SQLite's virtual machine: a long episode, of which the robot held a part."""
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.see_robot("r1", SPEC, "clock", 5)
    count = 0

    def tick():
        nonlocal count
        count += 1

    engine = ledger._engine
    sa.event.listen(engine, "connect", lambda raw, _record: raw.set_progress_handler(tick, 1))
    engine.dispose()
    of = fake_episode(SPEC, "e", steps=1)[0].episode
    costs = []
    for index in range(300):
        actors = [HOLD] * 4 if 50 < index < 250 else [POLICY, HUMAN]
        count = 0
        _commit(ledger, _steps(actors, index, 4 * index, of))
        costs.append(count)
    assert costs[0] > 100
    # deeper trees, but no walk over the episode; the first after the long hold may look back over it once
    assert np.median(costs[255:]) < 1.3 * np.median(costs[5:50])
    assert np.median(costs[60:240]) < 1.3 * np.median(costs[5:50])
    ledger.close()


# --- interventions --------------------------------------------------------------------------------------------------


def test_interventions_are_counted_over_segments(ledger):
    of = fake_episode(SPEC, "e", steps=1)[0].episode
    _commit(ledger, _steps([HUMAN, POLICY, HOLD, HUMAN, HOLD], 0, 0, of))
    _commit(ledger, _steps([HOLD], 1, 5, of))
    _commit(ledger, _steps([SCRIPT, HOLD, POLICY, POLICY, SCRIPT], 2, 6, of, last=True))
    # the first began under a person, the second went on with a script after a hold
    assert ledger.episode("e").interventions == 2
    for segment in fake_episode(SPEC, "d", source="demonstration", actor=[POLICY, SCRIPT] * 100):
        _commit(ledger, segment)
    assert (ledger.episode("d").interventions, ledger.episode("d").human_steps) == (0, 100)


# --- index ----------------------------------------------------------------------------------------------------------


def test_the_index_says_of_every_step_who_acted_with_which_version(ledger):
    other = fake_spec(state_dim=7)
    ledger.see_robot("r2", other, "clock", 6)
    rng = np.random.default_rng(3)
    committed = []
    for number in range(5):
        source = "demonstration" if number == 1 else "online"
        for segment in fake_episode(SPEC, f"e{number}", steps=170, seed=number, source=source, finished=number != 4):
            changed = rng.integers(0, 3, segment.steps).cumsum().astype(np.int32)
            committed.append(replace(segment, version=changed))
            _commit(ledger, committed[-1])
        for segment in fake_episode(other, f"other{number}", robot="r2", steps=100):
            _commit(ledger, segment)
    empty = _steps([], 3, 170, replace(committed[-1].episode, id="e4"), last=True)
    committed.append(replace(empty, outcome="aborted"))
    _commit(ledger, committed[-1])

    found = ledger.index(0, SPEC.data_hash)
    kinds = {
        "row": "i8", "episode": "i8", "index": "i4", "first_tick": "i8", "steps": "i4", "frames": "i4",
        "reward_sum": "f8", "last": "?", "outcome": "i1", "run_offsets": "i8", "runs": "i4",
    }  # fmt: skip
    assert {name: getattr(found, name).dtype for name in kinds} == kinds
    rows = {row.id: row for row in ledger.segments_after(0)}
    assert found.row.tolist() == [rows[segment.id].row for segment in committed]
    assert found.index.tolist() == [segment.index for segment in committed]
    assert found.first_tick.tolist() == [segment.first_tick for segment in committed]
    assert found.steps.tolist() == [segment.steps for segment in committed]
    assert found.last.tolist() == [segment.last for segment in committed]
    assert found.frames.tolist() == [len(segment.frames["camera0"].encoded) for segment in committed]
    outcome = {"": -1, "success": 0, "failure": 1, "aborted": 2}
    assert found.outcome.tolist() == [outcome[segment.outcome] for segment in committed]
    for n, segment in enumerate(committed):
        assert found.reward_sum[n] == pytest.approx(segment.reward.astype(np.float64).sum(), abs=1e-12)
        first, count, actor, version = found.runs[found.run_offsets[n] : found.run_offsets[n + 1]].T
        assert np.array_equal(np.repeat(actor, count), segment.actor)
        assert np.array_equal(np.repeat(version, count), segment.version)
        assert first.tolist() == (np.cumsum(count) - count).tolist()
        facts = found.episodes[int(found.episode[n])]
        assert (facts.id, facts.source) == (segment.episode.id, segment.episode.source)
        assert (facts.robot, facts.task, facts.seed) == ("r1", "drawer-open", segment.episode.seed)
    # as few runs as there can be
    changes = sum(
        int(((np.diff(s.actor.astype(int)) != 0) | (np.diff(s.version) != 0)).sum()) + bool(s.steps) for s in committed
    )
    assert len(found.runs) == changes
    assert set(found.episodes) == set(found.episode.tolist())

    # piece by piece it is the same
    pieces, after = [], 0
    while len(piece := ledger.index(after, SPEC.data_hash, limit=4).row):
        pieces += piece.tolist()
        after = pieces[-1]
    assert pieces == found.row.tolist()
    late = ledger.index(int(found.row[-3]), SPEC.data_hash)
    assert late.row.tolist() == found.row[-2:].tolist()
    assert set(late.episodes) == set(late.episode.tolist())
    nothing = ledger.index(ledger.totals().newest_row, SPEC.data_hash)
    assert (len(nothing.row), nothing.run_offsets.tolist(), nothing.runs.shape) == (0, [0], (0, 4))
    assert nothing.episodes == {}
    assert {name: getattr(nothing, name).dtype for name in kinds} == kinds


# --- robots, measurements, events -----------------------------------------------------------------------------------


def test_robots_specs_and_clock_offsets(ledger):
    ledger.see_robot("trainer", None, "clock", 6)
    ledger.set_clock_offset("r1", -1234, 70)
    ledger.see_robot("r1", None, "other clock", 9)
    robot = ledger.robot("r1")
    assert (robot.clock_offset_ns, robot.first_seen_ns, robot.last_seen_ns) == (-1234, 5, 9)
    assert (robot.clock, robot.spec_hash) == ("other clock", SPEC.hash)
    assert ledger.spec(SPEC.hash) == SPEC
    with pytest.raises(InvalidDataError, match="robot spec nothing is unknown"):
        ledger.spec("nothing")
    assert [robot.name for robot in ledger.robots()] == ["r1", "trainer"]
    assert ledger.robot("nobody") is None
    # a robot that was rebuilt brings another spec; data of the old one can still be read
    ledger.see_robot("r1", fake_spec(2), "clock", 10)
    assert ledger.robot("r1").spec_hash == fake_spec(2).hash
    assert ledger.spec(SPEC.hash) == SPEC
    # offsets are kept as they change
    ledger.set_clock_offset("r1", -1234, 80)
    ledger.set_clock_offset("r1", -1200, 90)
    ledger.set_clock_offset("nobody", 5, 90)
    offsets = tables.clock_offsets.c
    with ledger.reading() as connection:
        kept = connection.execute(sa.select(offsets.robot, offsets.measured_ns, offsets.offset_ns).order_by(offsets.id))
        assert kept.all() == [("r1", 70, -1234), ("r1", 90, -1200)]
    assert ledger.robot("r1").clock_offset_ns == -1200
    # as it was known then, and before that as it was found first
    assert [ledger.clock_offset_at("r1", at_ns) for at_ns in (10, 70, 89, 90, 10**18)] == [-1234] * 3 + [-1200] * 2
    assert ledger.clock_offset_at("trainer", 80) == 0


def test_measurements_applied_and_events(ledger):
    measured = Evaluation(1, {"b": 0.5, "a": 1.0}, 20, 1_000_000, "cadence", 77, 1.5)
    assert ledger.add_evaluation(measured, 5)
    assert not ledger.add_evaluation(measured, 6)
    (row,) = ledger.evaluations()
    assert (row.success, row.wall_ns, row.duration_s) == ({"a": 1.0, "b": 0.5}, 5, 1.5)
    assert ledger.note_applied("r1", 1, 10, 20)
    assert not ledger.note_applied("r1", 1, 10, 30)
    assert ledger.note_applied("a robot", 1, 10, 25)
    assert [row.applied_ns for row in ledger.applied()] == [25, 20]
    ledger.add_event(1, "r1", "estop", "pressed")
    ledger.add_event(2, "r1", "refused", "a name with \0 in it")
    assert [event.detail for event in ledger.events()] == ["pressed", "a name with \N{SYMBOL FOR NULL} in it"]
    assert [event.id for event in ledger.events(after_id=1)] == [2]
    assert ledger.events(limit=1)[0].time_ns == 1


def test_of_the_labels_of_an_episode_the_newest_of_each_name_counts(ledger):
    _commit(ledger, fake_episode(SPEC, "e1")[0])
    assert ledger.labels("e1") == ledger.labels("e2") == {}
    ledger.label_episode("e1", "success", 0, "anna")
    ledger.label_episode("e1", "quality", 0.5, "anna")
    ledger.label_episode("e1", "success", 1, "otto")
    ledger.label_episode("e1", "spilled_ml", -3.5, "otto")
    assert ledger.labels("e1") == {"success": 1.0, "quality": 0.5, "spilled_ml": -3.5}


@pytest.mark.parametrize(
    ("episode", "name", "value", "says"),
    [
        ("e2", "quality", 1, "'e2' is not in the ledger: .*'quality'.*buffer tail"),
        ("gone", "quality", 1, "'gone' was pruned"),
        ("e1", "success", 0.5, "success=0.5 of episode 'e1': success is 0 or 1"),
        ("e1", "quality", 1.5, "quality from 0 to 1"),
        ("e1", "other", float("nan"), "other=nan"),
        ("e1", "two words", 1, "'two words': a name"),
    ],
)
def test_a_label_that_cannot_be_is_refused_by_name(ledger, episode, name, value, says):
    _commit(ledger, fake_episode(SPEC, "e1")[0])
    _commit(ledger, fake_episode(SPEC, "gone")[0])
    ledger.prune(["gone"], 70)
    with pytest.raises(InvalidDataError, match=says):
        ledger.label_episode(episode, name, value, "anna")
    assert ledger.labels(episode) == {}


def test_a_job_writes_numbers_back_by_row_and_step(ledger):
    rows = [_commit(ledger, segment) for segment in fake_episode(SPEC, "e1", steps=100, segment_steps=80)]
    first, second = np.linspace(0, 1, 80, dtype=np.float32), np.full(20, np.nan, np.float32)
    ledger.put_step_labels("value", {rows[0]: -first, np.int64(rows[1]): second})
    ledger.put_step_labels("value", {rows[0]: first})
    ledger.put_step_labels("advantage", {rows[1]: np.zeros(20)})
    ledger.put_step_labels("value", {})
    found = ledger.step_labels([*rows, 99], ["value", "advantage", "other"])
    assert {row: sorted(names) for row, names in found.items()} == {
        rows[0]: ["value"],
        rows[1]: ["advantage", "value"],
    }
    assert found[rows[0]]["value"].dtype == np.float32 and np.array_equal(found[rows[0]]["value"], first)
    assert np.isnan(found[rows[1]]["value"]).all()
    assert ledger.step_labels(rows, ["other"]) == {}


def test_numbers_for_a_row_that_is_gone_or_of_another_length_are_refused_whole(ledger):
    rows = [_commit(ledger, segment) for segment in fake_episode(SPEC, "e1", steps=100, segment_steps=80)]
    good = np.zeros(80, np.float32)
    with pytest.raises(InvalidDataError, match=f"'value' of ledger row {rows[1]} has shape .80.; .* 20 steps"):
        ledger.put_step_labels("value", {rows[0]: good, rows[1]: good})
    with pytest.raises(InvalidDataError, match="'value' of ledger row 77: no such segment"):
        ledger.put_step_labels("value", {rows[0]: good, 77: good})
    with pytest.raises(InvalidDataError, match="'a b': a name"):
        ledger.put_step_labels("a b", {rows[0]: good})
    assert ledger.step_labels(rows, ["value"]) == {}


def test_all_rows_that_are_gone_are_named_and_the_others_noted_if_that_is_asked(ledger):
    rows = [_commit(ledger, segment) for segment in fake_episode(SPEC, "e1", steps=100, segment_steps=80)]
    values = {99: np.zeros(3), rows[0]: np.zeros(80), 77: np.zeros(80)}
    with pytest.raises(InvalidDataError, match=r"ledger row 77, 99: no such segment.*skip_gone"):
        ledger.put_step_labels("value", values)
    assert ledger.step_labels(rows, ["value"]) == {}
    assert ledger.put_step_labels("value", values, skip_gone=True) == (77, 99)
    assert list(ledger.step_labels([*rows, 77, 99], ["value"])) == [rows[0]]
    with pytest.raises(InvalidDataError, match="20 steps"):
        ledger.put_step_labels("value", {rows[1]: np.zeros(80), 77: np.zeros(80)}, skip_gone=True)
    assert ledger.put_step_labels("value", {77: np.zeros(80)}, skip_gone=True) == (77,)


def test_what_is_labelled_after_a_prune_is_heard_of(ledger):
    rows = [_commit(ledger, fake_episode(SPEC, name, steps=20)[0]) for name in ("e1", "e2")]
    for row in rows:
        ledger.put_step_labels("value", {row: np.zeros(20)})
    found, known = ledger.labelled_since(0, ["value"])
    assert found == tuple(rows)
    ledger.prune(["e2"], 70)
    assert ledger.labelled_since(known, ["value"]) == ((), known)
    ledger.put_step_labels("value", {rows[0]: np.ones(20)})
    found, newest = ledger.labelled_since(known, ["value"])
    assert found == (rows[0],) and newest > known


def test_pruning_forgets_what_was_said_of_steps(ledger):
    rows = [_commit(ledger, segment) for name in ("e1", "e2") for segment in fake_episode(SPEC, name)]
    counts = {row: ledger.segments_after(row - 1, 1)[0].steps for row in rows}
    ledger.put_step_labels("value", {row: np.zeros(count, np.float32) for row, count in counts.items()})
    ledger.prune(["e1"], 70)
    assert sorted(ledger.step_labels(rows, ["value"])) == rows[3:]
