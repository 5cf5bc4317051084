import errno
import os
import random

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.check import MAX_EPISODE_STEPS
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.gateway.storage.ingest import Ingest, ReceivedSegment
from tests import samples
from tests.cloud_learner.buffer.synthetic import CLOSING_NS, fake_episode, fake_spec, same_segment
from wire import codec
from wire.clock import ManualClock
from wire.errors import StorageError

SPEC = fake_spec(1, size=16)
replace = msgspec.structs.replace


class Gateway:
    """The storage side of a gateway, which can be started again."""

    def __init__(self, root):
        self.root = root
        self.clock = ManualClock(10**12)
        self.start()
        self.ledger.see_robot("r1", SPEC, "clock", 1)

    def start(self):
        self.ledger, self.store = BufferLocation(self.root).open_writer()
        self.ingest = Ingest(self.ledger, self.store, self.clock, samples.all_teach)
        self.ingest.open()

    def accept(self, segment, peer="r1"):
        return self.ingest.accept(peer, segment, self.clock.now_ns())

    def read(self, segment_id):
        row = self.ledger.segment(segment_id).row
        return self.store.read([row]).segments[row]

    def quarantined(self):
        """What lies there, as (robot, reason, bytes as they came)."""
        found = map(self.store.quarantine.read, [entry.id for entry in self.store.quarantine.entries()])
        return [(entry.robot, entry.reason, data) for entry, data in found]


@pytest.fixture
def gateway(tmp_path):
    return Gateway(tmp_path)


def _files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def _journal_bytes(root):
    return sum(path.stat().st_size for path in (root / "journal").glob("*.journal"))


def test_what_is_stored_reads_back_and_a_resend_is_stored_once(gateway):
    segments = fake_episode(SPEC, "e", steps=200)
    assert [gateway.accept(segment).outcome for segment in segments] == ["stored"] * 3
    before = _journal_bytes(gateway.root)
    assert [gateway.accept(segment).outcome for segment in segments] == ["duplicate"] * 3
    # as it comes from the wire: read-only views
    assert gateway.accept(codec.decode(codec.encode(segments[1]))).outcome == "duplicate"
    assert _journal_bytes(gateway.root) == before
    assert len(gateway.ledger.segments_after(0)) == 3
    for segment in segments:
        assert same_segment(gateway.read(segment.id), segment)
    assert gateway.ledger.totals().duplicated_steps == 0
    assert gateway.quarantined() == []


def test_invalid_data_is_kept_aside_with_its_reason(gateway, caplog):
    (segment,) = fake_episode(SPEC, "e", steps=20)
    state = segment.state.copy()
    state[7, 2] = np.nan
    bad = replace(segment, state=state)
    result = gateway.accept(bad)
    assert result.outcome == "quarantined"
    assert "state is not finite at tick 7" in result.reason
    assert "e/0" in caplog.text
    ((robot, reason, data),) = gateway.quarantined()
    assert (robot, reason) == ("r1", result.reason)
    assert same_segment(codec.decode(data), bad)
    # the same again does not fill the disk
    gateway.accept(bad)
    assert len(gateway.quarantined()) == 1
    assert gateway.ledger.totals().segments == 0
    assert _journal_bytes(gateway.root) == 0


@pytest.mark.parametrize("name", ["../../../escape", "a/b", "..", "", "x" * 5000, "\n\0"])
def test_hostile_names_stay_in_quarantine(gateway, name):
    (segment,) = fake_episode(SPEC, "e", steps=4)
    bad = replace(segment, id=f"{name}/0", episode=replace(segment.episode, id=name))
    assert gateway.accept(bad).outcome == "quarantined"
    assert len(gateway.quarantined()) == 1
    outside = [
        path
        for path in _files(gateway.root)
        if not path.startswith(("quarantine/", "ledger.sqlite", "store/", "journal/owner"))
    ]
    assert outside == []


def test_nobody_writes_into_another_robots_episode(gateway):
    segments = fake_episode(SPEC, "e", steps=200)
    gateway.accept(segments[0])
    assert "sent by 'r2'" in gateway.accept(segments[1], peer="r2").reason
    stolen = replace(segments[1], episode=replace(segments[1].episode, robot="r2"))
    result = gateway.accept(stolen, peer="r2")
    assert (result.outcome, "robot" in result.reason) == ("quarantined", True)
    # the robot's own segment finds its place free
    assert gateway.accept(segments[1]).outcome == "stored"
    assert same_segment(gateway.read("e/1"), segments[1])


def test_an_id_with_other_content_is_not_lost(gateway):
    (first,) = fake_episode(SPEC, "e", steps=20, seed=1)
    (other,) = fake_episode(SPEC, "e", steps=20, seed=2)
    other = replace(other, episode=first.episode)
    gateway.accept(first)
    result = gateway.accept(other)
    assert (result.outcome, "other content" in result.reason) == ("quarantined", True)
    assert same_segment(gateway.read("e/0"), first)


def test_a_segment_that_another_gateway_stored_is_stored_once(gateway):
    first, second, third = fake_episode(SPEC, "e", steps=60, segment_steps=22)
    gateway.accept(first)
    here = gateway.ingest
    gateway.start()
    assert gateway.accept(second).outcome == "stored"
    # this one's history of the episode is old
    assert [here.accept("r1", one, 1).outcome for one in (second, third, third)] == ["duplicate", "stored", "duplicate"]
    assert gateway.ledger.totals().segments == 3


def test_an_unknown_spec_or_an_unknown_frame_is_quarantined(gateway):
    (stranger,) = fake_episode(fake_spec(2), "x", steps=8)
    assert "unknown" in gateway.accept(stranger).reason
    first, second = fake_episode(SPEC, "e", steps=160)
    seen = second.frame_times_ns["camera0"].copy()
    seen[0] -= 1
    gateway.accept(first)
    wrong = replace(second, frame_times_ns={"camera0": seen})
    assert "never came" in gateway.accept(wrong).reason
    assert gateway.accept(second).outcome == "stored"


def test_frames_of_earlier_segments_are_known_after_a_restart(gateway, caplog):
    first, second, third = fake_episode(SPEC, "e", steps=60, segment_steps=22)
    gateway.accept(first)
    gateway.start()
    # steps of the second segment saw a frame that the first one brought
    assert second.frame_times_ns["camera0"][0] in first.frames["camera0"].times_ns
    assert gateway.accept(second).outcome == "stored"
    gateway.start()
    row = gateway.ledger.segment("e/1").row
    place = gateway.ledger.places([row])[row]
    journal = gateway.root / "journal" / f"{place.journal:08d}.journal"
    data = bytearray(journal.read_bytes())
    data[place.offset + place.bytes // 2] ^= 255
    journal.write_bytes(data)
    # nobody can tell what a damaged segment brought: the next one is taken nevertheless
    assert gateway.accept(third).outcome == "stored"
    assert f"row {row} of episode e cannot be read back" in caplog.text


def test_segments_may_come_in_any_order(gateway):
    segments = fake_episode(SPEC, "e", steps=60, segment_steps=22)
    for index in (2, 0, 1):
        assert gateway.accept(segments[index]).outcome == "stored"
    episode = gateway.ledger.episode("e")
    assert (episode.steps, episode.outcome) == (60, "success")


def test_a_full_disk_leaves_nothing_and_the_resend_succeeds(gateway, monkeypatch, caplog):
    first, second, _ = fake_episode(SPEC, "e", steps=200)
    gateway.accept(first)
    before = _journal_bytes(gateway.root)

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        patch.setattr(os, "fdatasync", full)
        result = gateway.accept(second)
        assert (result.outcome, "no space left" in result.reason) == ("retry", True)
        # what should go to quarantine is not dropped either
        assert gateway.accept(replace(second, outcome="nonsense")).outcome == "retry"
    assert _journal_bytes(gateway.root) == before
    assert gateway.quarantined() == []
    assert gateway.ledger.totals().segments == 1
    assert gateway.accept(second).outcome == "stored"


def test_a_ledger_that_fails_after_the_bytes_were_written(gateway, monkeypatch):
    (segment,) = fake_episode(SPEC, "e", steps=20)
    with monkeypatch.context() as patch:

        def fail(*_args, **_options):
            raise StorageError("the ledger is locked.")

        patch.setattr(gateway.ledger, "commit_segments", fail)
        assert gateway.accept(segment).outcome == "retry"
    assert gateway.accept(segment).outcome == "stored"
    assert gateway.ledger.totals().segments == 1
    assert same_segment(gateway.read("e/0"), segment)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"times_ns": lambda first, second: second.times_ns - 10**9}, "times_ns runs backwards at tick 40"),
        ({"first_tick": lambda first, second: 39}, "first_tick 39 is below tick 40"),
        ({"first_tick": lambda first, second: MAX_EPISODE_STEPS - 5}, "first_tick: episode 'e' would have"),
        ({"reward": lambda first, second: second.reward[:-1]}, "reward is <f4[19], expected <f4[20]"),
        ({"state": lambda first, second: second.state[:, :3]}, "state is <f4[20, 3], expected <f4[20, 4]"),
    ],
)
def test_a_bad_column_is_named_and_the_stream_goes_on(gateway, change, named):
    first, second = fake_episode(SPEC, "e", steps=60, segment_steps=40)
    assert gateway.accept(first).outcome == "stored"
    ((name, make),) = change.items()
    bad = replace(second, **{name: make(first, second)})
    if name == "times_ns":
        bad = replace(bad, frame_times_ns={c: np.minimum(t, bad.times_ns) for c, t in bad.frame_times_ns.items()})
    result = gateway.accept(bad)
    assert result.outcome == "quarantined"
    assert named in result.reason
    assert codec.decode(gateway.quarantined()[0][2]).id == "e/1"
    assert gateway.accept(second).outcome == "stored"


def test_time_may_not_run_backwards_towards_a_later_segment(gateway):
    first, second, third = fake_episode(SPEC, "e", steps=60, segment_steps=20)
    assert gateway.accept(third).outcome == "stored"
    late = replace(second, times_ns=second.times_ns + 20 * SPEC.period_ns)
    assert "to the segment after" in gateway.accept(late).reason
    longer = replace(second, first_tick=21)
    assert "tick 40 is stored already" in gateway.accept(longer).reason
    assert gateway.accept(second).outcome == gateway.accept(first).outcome == "stored"


def _broken_tables(jpeg):
    table = jpeg.find(b"\xff\xc4")
    return jpeg[: table + 4] + b"\xff" * 26 + jpeg[table + 30 :]


def _with_frames(segment, change):
    frames = segment.frames["camera0"]
    return replace(segment, frames={"camera0": replace(frames, encoded=tuple(map(change, frames.encoded)))})


def _cut_short(jpeg):
    return jpeg[: len(jpeg) * 3 // 4] + b"\xff\xd9"


def test_a_frame_that_is_no_jpeg_is_refused(gateway):
    (segment,) = fake_episode(SPEC, "e", steps=8)
    second = segment.frames["camera0"].encoded[1]
    result = gateway.accept(_with_frames(segment, lambda jpeg: _broken_tables(jpeg) if jpeg is second else jpeg))
    assert (result.outcome, "camera 'camera0': frame 1 is no JPEG image" in result.reason) == ("quarantined", True)


def test_a_camera_whose_frames_cannot_be_decoded_is_refused(gateway):
    (segment,) = fake_episode(SPEC, "e", steps=8)
    result = gateway.accept(_with_frames(segment, _cut_short))
    assert (result.outcome, "cannot be decoded" in result.reason) == ("quarantined", True)


def test_a_single_one_of_them_is_found_by_chance(gateway):
    random.seed(0)
    outcomes = []
    for number in range(40):
        (segment,) = fake_episode(SPEC, f"e{number}", steps=8)
        frames = segment.frames["camera0"].encoded
        bad = _with_frames(segment, lambda jpeg, last=frames[-1]: _cut_short(jpeg) if jpeg is last else jpeg)
        outcomes.append(gateway.accept(bad).outcome)
    assert set(outcomes) == {"stored", "quarantined"}


def test_latency_is_measured_in_the_gateways_clock(gateway):
    segments = fake_episode(SPEC, "e", steps=200)
    offset_ns = 5 * 10**9
    for number, segment in enumerate(segments, start=1):
        gateway.clock.sleep_until(segment.closed_ns + offset_ns + number * 10**7)
        (result,) = gateway.ingest.accept_all([ReceivedSegment("r1", segment, 1, offset_ns=offset_ns)])
        assert result.latency_s == pytest.approx(0.01 * number)
    # a resend is no new sample
    assert gateway.accept(segments[0]).latency_s == 0
    assert segments[0].closed_ns - int(segments[0].times_ns[-1]) == CLOSING_NS


def test_nothing_comes_after_an_episodes_end(gateway):
    first, second, third = fake_episode(SPEC, "e", steps=60, segment_steps=20)
    early_end = replace(second, last=True, outcome="failure")
    assert gateway.accept(third).outcome == "stored"
    assert "ended with segment 2 already" in gateway.accept(early_end).reason
    more = replace(third, id="e/3", index=3, first_tick=60, times_ns=third.times_ns + 20 * SPEC.period_ns)
    more = replace(more, frames={}, last=False, outcome="", terminated=np.zeros(20, bool), terminal=None)
    assert "ended with 2" in gateway.accept(more).reason
    flagged = replace(second, terminated=np.arange(20) == 5)
    assert "terminated at tick 25, but the episode goes on" in gateway.accept(flagged).reason
    assert gateway.accept(second).outcome == gateway.accept(first).outcome == "stored"
    assert gateway.ledger.episode("e").outcome == "success"


def test_a_frame_is_brought_once_and_never_older_than_the_one_before(gateway):
    first, second, _ = fake_episode(SPEC, "e", steps=60, segment_steps=22)
    assert gateway.accept(first).outcome == "stored"
    again = replace(second, frames=first.frames)
    assert "was brought before" in gateway.accept(again).reason
    seen = {"camera0": np.concatenate([first.frame_times_ns["camera0"][:1], second.frame_times_ns["camera0"][1:]])}
    assert "tick 22 saw an older frame" in gateway.accept(replace(second, frame_times_ns=seen)).reason
    assert gateway.accept(second).outcome == "stored"


def test_what_comes_after_an_episode_was_forgotten_is_kept_aside(gateway):
    first, second, _ = fake_episode(SPEC, "e", steps=60, segment_steps=22)
    gateway.accept(first)
    gateway.ledger.prune(["e"], 1)
    gateway.start()
    result = gateway.accept(second)
    assert (result.outcome, "its episode was pruned" in result.reason) == ("quarantined", True)


# --- many at once -----------------------------------------------------------------------------------------------------


def _accept_all(gateway, segments):
    return [result.outcome for result in gateway.ingest.accept_all([ReceivedSegment("r1", one, 1) for one in segments])]


def test_what_came_together_is_flushed_and_committed_together(gateway, monkeypatch):
    segments = [one for name in "ab" for one in fake_episode(SPEC, name, steps=60, segment_steps=12)]
    calls = []
    for owner, name in ((os, "fdatasync"), (gateway.ledger, "commit_segments")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, real=real, name=name: calls.append(name) or real(*args))
    results = gateway.ingest.accept_all([ReceivedSegment("r1", one, 1) for one in segments])
    assert [result.outcome for result in results] == ["stored"] * 10
    assert [result.row for result in results] == list(range(1, 11))
    assert calls == ["fdatasync", "commit_segments"]
    for segment in segments:
        assert same_segment(gateway.read(segment.id), segment)
    # what the history of an episode knows is what a gateway that starts now reads back
    gateway.start()
    assert _accept_all(gateway, segments) == ["duplicate"] * 10


def test_a_bad_one_among_many_is_put_aside_alone(gateway):
    mine = fake_episode(SPEC, "e", steps=60, segment_steps=12)
    other = fake_episode(SPEC, "f", steps=60, segment_steps=12)
    gateway.accept(mine[0])
    by_its_look = replace(mine[1], state=mine[1].state * np.float32("nan"))
    only_the_ledger_knows = replace(other[2], episode=replace(other[2].episode, task="another"))
    sent = [by_its_look, other[0], mine[1], other[1], only_the_ledger_knows, mine[2], other[2]]
    assert _accept_all(gateway, sent) == ["quarantined"] + ["stored"] * 3 + ["quarantined"] + ["stored"] * 2
    assert sorted(reason[:20] for _, reason, _ in gateway.quarantined()) == [
        "segment f/2: its epi",
        "state is not finite ",
    ]
    for segment in (*mine[:3], *other[:3]):
        assert same_segment(gateway.read(segment.id), segment)
    assert _accept_all(gateway, [*mine[3:], *other[3:]]) == ["stored"] * 4


def test_one_that_comes_twice_in_one_go_is_stored_once(gateway):
    segments = fake_episode(SPEC, "e", steps=36, segment_steps=12)
    assert _accept_all(gateway, [*segments[:2], *segments]) == ["stored"] * 2 + ["duplicate"] * 2 + ["stored"]
    assert gateway.ledger.totals().segments == 3 and gateway.quarantined() == []


def test_a_full_disk_takes_none_of_many(gateway, monkeypatch):
    segments = fake_episode(SPEC, "e", steps=36, segment_steps=12)
    with monkeypatch.context() as patch:

        def full(*_args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "fdatasync", full)
        assert _accept_all(gateway, segments) == ["retry"] * 3
    assert _journal_bytes(gateway.root) == 0 and gateway.ledger.totals().segments == 0
    assert _accept_all(gateway, segments) == ["stored"] * 3


def test_a_surprise_hits_only_the_one_it_is_about(gateway, monkeypatch, caplog):
    segments = fake_episode(SPEC, "e", steps=36, segment_steps=12)
    append = gateway.store.append_all

    def surprise(some, *more):
        if any(segment.index == 1 for segment, _ in some):
            raise KeyError("nobody thought of it")
        return append(some, *more)

    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, "append_all", surprise)
        assert _accept_all(gateway, segments) == ["stored", "retry", "stored"]
    assert "Traceback" in caplog.text
    assert _accept_all(gateway, segments) == ["duplicate", "stored", "duplicate"]
