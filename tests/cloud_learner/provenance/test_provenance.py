"""What a robot says of its steps against the fleet's record: leases, rights of keys, clocks, limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from cloud_learner.buffer.check import MAX_REWARD, VALUE_MARGIN
from cloud_learner.buffer.ledger import notes
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import LeaseKind, LeaseNote
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.gateway.storage.ingest import Ingest, IngestResult
from cloud_learner.provenance.provenance import BOOT_MARGIN_NS, CLOCKS, MARGIN_NS, within
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.clock import ManualClock
from wire.messages.gateway import ACTORS, Segment
from wire.transport.keys import Teaching

SPEC = fake_spec(0)
POLICY, HUMAN, SCRIPT, HOLD = range(4)
S = 1_000_000_000
YEAR_NS = 365 * 86400 * S
STEPS = 80
"""a second of them"""


class Storage:
    """The storing side of a gateway whose clock says 100,000 s, with one robot."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock, self.teaches = root, ManualClock(100_000 * S), set[Teaching]()
        self.start()
        self.ledger.see_robot("r1", SPEC, "robot's clock", self.now)
        self.offset_ns = 0
        self.ledger.set_clock_offset("r1", 0, self.now - 10 * S)
        self.episodes = self.number = 0

    def start(self) -> None:
        self.ledger, self.store = BufferLocation(self.root).open_writer()
        self.ingest = Ingest(self.ledger, self.store, self.clock, lambda robot: self.teaches)
        self.ingest.open()

    @property
    def now(self) -> int:
        return self.clock.now_ns()

    def leased(self, first_ns: int, last_ns: int | None = None, kind: LeaseKind = LeaseKind.person) -> None:
        self.number += 1
        began = LeaseNote("r1", self.number, "anna", kind, first_ns)
        self.ledger.note_leases([began])
        if last_ns is not None:
            self.ledger.note_leases([msgspec.structs.replace(began, at_ns=last_ns, ended=True)])

    def episode(self, actor: list[int], start_ns: int, source: str = "online", **changes: object) -> Segment:
        """Of one segment, that begins at `start_ns` of the robot's clock."""
        self.episodes += 1
        (segment,) = fake_episode(SPEC, f"e{self.episodes}", steps=len(actor), actor=actor, source=source)
        late = start_ns - int(segment.times_ns[0])
        terminal = msgspec.structs.replace(segment.terminal, time_ns=segment.terminal.time_ns + late)
        return msgspec.structs.replace(segment, times_ns=segment.times_ns + late, terminal=terminal, **changes)

    def accept(self, segment: Segment) -> IngestResult:
        return self.ingest.accept("r1", segment, self.now)

    def stores(self, actor: list[int], start_ns: int, source: str = "online") -> bool:
        return self.accept(self.episode(actor, start_ns, source)).outcome == "stored"


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    made = Storage(tmp_path)
    yield made
    made.ledger.close()


def test_a_humans_steps_need_a_lease_and_are_kept_apart_by_name_without(storage: Storage) -> None:
    actor = [POLICY] * 20 + [HUMAN] * 31 + [POLICY] * 29
    result = storage.accept(storage.episode(actor, storage.now))
    assert result.outcome == "quarantined"
    assert "31 steps, ticks 20 to 50, are a human's, and no lease" in result.reason
    assert "'r1' then" in result.reason and "vla-fleet keys r1 --teaches" in result.reason
    (entry,) = storage.store.quarantine.entries()
    assert entry.reasons == ("unconfirmed",) and entry.robot == "r1"
    assert storage.ledger.totals().segments == 0
    storage.leased(storage.now)
    assert storage.stores(actor, storage.now)
    assert storage.stores([POLICY] * 5 + [HOLD] * 5, storage.now + 1000 * S)


@pytest.mark.parametrize("offset_ns", [0, YEAR_NS, -YEAR_NS, 123_456_789])
def test_a_step_is_a_humans_within_a_second_of_the_lease_by_the_gateways_clock(
    storage: Storage, offset_ns: int
) -> None:
    storage.ledger.set_clock_offset("r1", offset_ns, storage.now - 5 * S)
    begin, end = storage.now, storage.now + 60 * S
    storage.leased(begin, end)
    storage.clock.advance(1000 * S)

    def human(first_ns: int) -> bool:
        return storage.stores([HUMAN] * 8, first_ns - offset_ns)

    assert human(begin) and human(begin - MARGIN_NS) and human(end) and human(end + MARGIN_NS - 8 * SPEC.period_ns)
    assert not human(begin - MARGIN_NS - 1) and not human(end + MARGIN_NS)
    assert not human(begin + offset_ns + 100 * S) and not human(begin - offset_ns - 100 * S)


def test_a_lease_that_stands_says_nothing_of_the_time_to_come(storage: Storage) -> None:
    storage.leased(storage.now)
    assert storage.stores([HUMAN] * 8, storage.now)
    assert not storage.stores([HUMAN] * 8, storage.now + 2 * S)
    storage.clock.advance(2 * S)
    assert storage.stores([HUMAN] * 8, storage.now)


def test_a_segment_whose_lease_ends_in_the_middle_is_kept_apart_as_a_whole(storage: Storage) -> None:
    storage.leased(storage.now - 10 * S, storage.now - MARGIN_NS)
    # the lease's margin ends after 40 steps
    result = storage.accept(storage.episode([HUMAN] * STEPS, storage.now - 40 * SPEC.period_ns))
    assert result.outcome == "quarantined" and "39 steps, ticks 41 to 79, are a human's" in result.reason


def test_segments_that_come_days_later_find_the_leases_of_then(storage: Storage) -> None:
    then = storage.now
    for number in range(200):
        storage.leased(then + 2 * number * 10 * S, then + (2 * number + 1) * 10 * S)
    storage.clock.advance(3 * 86400 * S)
    storage.ledger.close()
    storage.start()
    assert storage.stores([HUMAN] * STEPS, then + 2 * 77 * 10 * S + 3 * S)
    assert not storage.stores([HUMAN] * STEPS, then + (2 * 77 + 1) * 10 * S + 3 * S)


def test_what_a_robot_recorded_before_its_computer_started_again_goes_by_its_clock_of_then(storage: Storage) -> None:
    began = storage.now
    storage.ledger.set_clock_offset("r1", began - 7 * S, began)
    storage.leased(began, began + 60 * S)
    storage.clock.advance(3600 * S)
    # It comes back with a clock that has just begun, and sends what is left of before: 10 s of that clock.
    storage.ledger.see_robot("r1", SPEC, "robot's next clock", storage.now)
    storage.ledger.set_clock_offset("r1", storage.now - 2 * S, storage.now)
    assert storage.stores([HUMAN] * STEPS, 10 * S)
    assert not storage.stores([HUMAN] * STEPS, 10 * S + 70 * S)
    storage.leased(storage.now)
    storage.clock.advance(10 * S)
    assert storage.stores([HUMAN] * STEPS, 8 * S)


def test_of_many_clocks_of_a_robot_the_newest_are_tried_with_one_look_at_the_leases(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        storage.clock.advance(100 * S)
        storage.ledger.see_robot("r1", SPEC, f"clock {number}", storage.now)
        # each begins with its boot
        storage.ledger.set_clock_offset("r1", storage.now, storage.now)
        if number >= 300 - CLOCKS - 1:
            storage.leased(storage.now + 10 * (number - 290) * S, storage.now + (10 * (number - 290) + 5) * S)
    assert len(storage.ledger.clock_offsets("r1")) <= 64
    looks = []
    look = Ledger.lease_intervals

    def counted(*arguments: object) -> np.ndarray:
        looks.append(1)
        return look(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "lease_intervals", counted)
    storage.clock.advance(100 * S)
    # so long after its boot each of them was driven; what the last but eight others brings is not known any more
    found = [storage.stores([HUMAN] * 8, 10 * (number - 290) * S) for number in range(291, 300)]
    assert found == [False] + [True] * CLOCKS
    assert len(looks) == 1 + CLOCKS
    assert len(storage.ingest._provenance._offsets["r1"]) == CLOCKS


def test_what_was_recorded_before_the_gateways_computer_started_again_goes_by_wall_clocks(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall_ns = [YEAR_NS * 50]
    monkeypatch.setattr(notes.time, "time_ns", lambda: wall_ns[0])
    monkeypatch.setattr(notes, "clock_name", lambda: "first boot")
    offset_ns = 5 * S
    storage.ledger.set_clock_offset("r1", offset_ns, storage.now)
    then = storage.now
    storage.leased(then, then + 60 * S)
    # An hour later its clock has started over; the robot's has not.
    monkeypatch.setattr(notes, "clock_name", lambda: "second boot")
    wall_ns[0] += 3600 * S
    storage.clock = ManualClock(4 * S)
    storage.ledger.close()
    storage.start()
    storage.ledger.set_clock_offset("r1", offset_ns + 4 * S - (then + 3600 * S), storage.now)
    assert storage.stores([HUMAN] * STEPS, then - offset_ns + 30 * S)
    assert not storage.stores([HUMAN] * STEPS, then - offset_ns + 70 * S + BOOT_MARGIN_NS)


@pytest.mark.parametrize("source", ["online", "demonstration"])
@pytest.mark.parametrize("actor", [POLICY, HUMAN, SCRIPT, HOLD])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("teaches", [(), *[(one,) for one in Teaching], ("script", "demonstrations"), tuple(Teaching)])
def test_who_may_say_what_by_their_own_word(
    storage: Storage, source: str, actor: int, held: bool, teaches: tuple[Teaching, ...]
) -> None:
    if held:
        storage.leased(storage.now)
    storage.teaches = set(teaches)
    shows = Teaching.demonstrations in teaches
    believed = {
        POLICY: source == "online" or shows,
        HUMAN: held or (Teaching.beside in teaches and (source == "online" or shows)),
        SCRIPT: Teaching.script in teaches and (source == "online" or shows),
        HOLD: source == "online" or shows,
    }
    assert storage.stores([actor] * 10, storage.now, source) == believed[actor]


def test_a_robot_measures_only_what_it_was_given_to_measure(storage: Storage) -> None:
    result = storage.accept(storage.episode([POLICY] * 5, storage.now, "evaluation"))
    assert result.outcome == "quarantined" and "never gave one to 'r1'" in result.reason
    storage.leased(storage.now, storage.now + S, LeaseKind.evaluation)
    # It goes on with its job where nobody hears of it.
    storage.clock.advance(1000 * S)
    assert storage.stores([POLICY] * 5, storage.now, "evaluation")
    assert not storage.stores([HUMAN] * 5, storage.now)


def test_values_are_believed_a_quarter_of_their_range_beyond_the_limits(storage: Storage) -> None:
    storage.leased(storage.now)
    reach = {"state": 5.0 + VALUE_MARGIN * 10, "proposed": 1.0 + VALUE_MARGIN * 2, "executed": 1.0 + VALUE_MARGIN * 2}
    for name, most in reach.items():
        for value in (most, -most, most * 1.001, -most * 1.001, 1e15):
            segment = storage.episode([HUMAN] * 10, storage.now)
            changed = getattr(segment, name).copy()
            changed[7, 2] = value
            result = storage.accept(msgspec.structs.replace(segment, **{name: changed}))
            assert result.outcome == ("stored" if abs(value) <= most else "quarantined"), (name, value, result.reason)
            if result.outcome == "quarantined":
                one = f"{name} '{'s2' if name == 'state' else 'a2'}' is {value:.6g} at tick 7; its limits are -"
                assert result.reason.startswith(f"out_of_range: {segment.id}: {one}")
    segment = storage.episode([POLICY] * 10, storage.now)
    reward = segment.reward.copy()
    reward[3] = 2 * MAX_REWARD
    assert "reward is 2e+06 at tick 3" in storage.accept(msgspec.structs.replace(segment, reward=reward)).reason
    terminal = msgspec.structs.replace(segment.terminal, state=segment.terminal.state * 1e9)
    assert "terminal.state 's0'" in storage.accept(msgspec.structs.replace(segment, terminal=terminal)).reason


def test_an_episode_is_told_once_and_admitted_as_a_whole_in_any_order(storage: Storage) -> None:
    actor = [HUMAN] * 10 + [POLICY] * 70 + [POLICY] * 80 + [HUMAN] * 40
    segments = fake_episode(fake_spec(1, size=16), "long", actor=actor)
    storage.ledger.see_robot("r1", fake_spec(1, size=16), "robot's clock", storage.now)
    results = [storage.accept(segment) for segment in segments]
    assert [(one.outcome, one.told) for one in results] == [
        ("quarantined", False),
        ("stored", False),
        ("quarantined", True),
    ]
    # What is acknowledged so is not sent again; were it, it is not kept twice.
    assert storage.accept(segments[0]).told and len(storage.store.quarantine.entries()) == 2
    for entry in sorted(storage.store.quarantine.entries(), key=lambda entry: entry.id, reverse=True):
        assert storage.ingest.admit(entry.id, storage.now, "anna").outcome == "stored"
    assert storage.store.quarantine.entries() == []
    row = storage.ledger.episode("long")
    assert row is not None and (row.segments, row.human_steps, row.outcome) == (3, 50, "success")
    told = [event.detail for event in storage.ledger.events()]
    assert [detail.partition(":")[0] for detail in told] == [f"long/{n} was admitted by anna" for n in (2, 0)]
    # Sent again it is what is stored; the next of that kind is doubted as before.
    assert storage.accept(segments[0]).outcome == "duplicate"
    assert not storage.stores([HUMAN] * 4, storage.now)


def test_admitting_overrules_what_it_lies_there_for_and_nothing_else(storage: Storage) -> None:
    segment = storage.episode([HUMAN] * 10, storage.now)
    wild = msgspec.structs.replace(segment, state=segment.state * 1e6)
    result = storage.accept(wild)
    assert result.reason.startswith("unconfirmed, out_of_range: e1/0: it says that 10 steps")
    (entry,) = storage.store.quarantine.entries()
    assert entry.reasons == ("unconfirmed", "out_of_range")
    assert storage.ingest.admit(entry.id, storage.now, "anna").outcome == "stored"
    # Shapes and types, order and frames are no matter of belief.
    bad = storage.episode([HUMAN] * 10, storage.now)
    bad = msgspec.structs.replace(bad, state=bad.state[:, :2])
    assert storage.accept(bad).outcome == "quarantined"
    (entry,) = storage.store.quarantine.entries()
    assert entry.reasons == ("invalid",)
    assert "expected <f4[10, 4]" in storage.ingest.admit(entry.id, storage.now, "anna").reason
    storage.store.quarantine.remove(entry.id)
    # What another reason comes up for stays, with both, and goes the next time.
    doubted = storage.episode([HUMAN] * 10, storage.now)
    doubted = msgspec.structs.replace(doubted, state=doubted.state * 1e6)
    storage.teaches = {Teaching.beside}
    assert storage.accept(doubted).reason.startswith("out_of_range")
    storage.teaches = set()
    (entry,) = storage.store.quarantine.entries()
    assert storage.ingest.admit(entry.id, storage.now, "anna").outcome == "quarantined"
    (entry,) = storage.store.quarantine.entries()
    assert entry.reasons == ("out_of_range", "unconfirmed")
    assert storage.ingest.admit(entry.id, storage.now, "anna").outcome == "stored"


# --- against a slow and obvious reference -----------------------------------------------------------------------------

TIMES = st.integers(0, 60)


@given(st.lists(st.tuples(TIMES, TIMES, st.booleans()), max_size=12), st.lists(TIMES, max_size=20))
def test_times_lie_within_leases_as_one_looks_at_each(spans: list[tuple[int, int, bool]], times: list[int]) -> None:
    leases = np.array([(a * S, max(a, b) * S, 7 if same else 8) for a, b, same in spans], np.int64).reshape(-1, 3)
    margins = [MARGIN_NS if base == 7 else MARGIN_NS + BOOT_MARGIN_NS for base in leases[:, 2]]
    at = np.array(times, np.int64) * S
    wanted = [
        any(a - m <= t <= b + m for (a, b, _), m in zip(leases.tolist(), margins, strict=True)) for t in at.tolist()
    ]
    assert within(at, leases, 7).tolist() == wanted


EVENT = st.tuples(st.sampled_from(["lease", "end", "steps"]), st.integers(1, 40), st.integers(0, 3))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENT, min_size=1, max_size=14), offset=st.integers(-YEAR_NS, YEAR_NS), late=st.booleans())
def test_leases_and_episodes_in_any_order_are_told_apart_as_by_hand(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int, int]], offset: int, late: bool
) -> None:
    """Tenths of a second pass; people take a robot and give it back; now or in the end its segments come."""
    storage = Storage(tmp_path_factory.mktemp("provenance"))
    storage.ledger.set_clock_offset("r1", offset, storage.now - 5 * S)
    leases: list[list[int | None]] = []
    sent: list[tuple[int, list[int]]] = []
    for what, tenths, actor in events:
        if what == "lease" and (not leases or leases[-1][1] is not None):
            leases.append([storage.now, None])
            storage.number += 1
            storage.ledger.note_leases([LeaseNote("r1", storage.number, "anna", LeaseKind.person, storage.now)])
        elif what == "end" and leases and leases[-1][1] is None:
            leases[-1][1] = storage.now
            note = LeaseNote("r1", storage.number, "anna", LeaseKind.person, storage.now, ended=True)
            storage.ledger.note_leases([note])
        elif what == "steps":
            actors = [actor, HUMAN, POLICY, HOLD, HUMAN][: 1 + tenths % 5]
            sent.append((storage.now, [one for one in actors for _ in range(8)]))
            if not late:
                storage.clock.advance(5 * S // 10)
                _compare(storage, leases, [sent.pop()], offset)
        storage.clock.advance(tenths * S // 10)
    _compare(storage, leases, sent, offset)
    storage.ledger.close()


def _compare(storage: Storage, leases: list[list[int | None]], sent: list[tuple[int, list[int]]], offset: int) -> None:
    for start_ns, actors in sent:
        fine = True
        for number, actor in enumerate(actors):
            at_ns = start_ns + number * SPEC.period_ns
            if ACTORS[actor] == "script":
                fine = False
            elif ACTORS[actor] == "human":
                fine &= any(
                    begin - MARGIN_NS <= at_ns <= (storage.now if end is None else end) + MARGIN_NS
                    for begin, end in leases
                )
        assert storage.stores(actors, start_ns - offset) == fine
