"""The robot goes on whatever the disk does; files stay within bounds and each can be replayed."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from robot_edge.flight_recorder.events import Gap
from robot_edge.flight_recorder.replay import read_records, replay
from robot_edge.flight_recorder.writer import Writer
from tests.robot_edge.flight_recorder.bench import Bench, make_loop, shared


def until(condition: object, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_files_follow_each_other_and_each_can_be_replayed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, file_bytes=20_000, files=3, flush_s=0.01).ready()
    for _ in range(60):
        bench.fly(20)
        time.sleep(0.012)
    bench.land()
    files = sorted(tmp_path.glob("*.flight"))
    assert len(files) == 3
    assert all(file.stat().st_size < 60_000 for file in files)
    spans = []
    for file in files:
        result = replay(file, make_loop)
        assert result.differences == []
        spans.append((result.first_tick, result.last_tick))
    assert spans[0][0] > 1
    assert spans[0][1] + 1 == spans[1][0]
    assert spans[1][1] + 1 == spans[2][0]
    assert spans[2][1] == 1200
    whole = replay(tmp_path, make_loop)
    assert (whole.first_tick, whole.last_tick, whole.differences) == (spans[0][0], 1200, [])


@pytest.mark.slow
def test_a_full_disk_stops_the_record_and_not_the_robot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = threading.Event()
    write = Writer._write

    def limited(self: Writer, data: bytes) -> None:
        if full.is_set():
            # a disk fills up in the middle of a write
            write(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    monkeypatch.setattr(Writer, "_write", limited)
    bench = Bench(tmp_path, flush_s=0.01, retry_s=0.02).ready().fly(40)
    until(lambda: any(r.stat().st_size > 500 for r in tmp_path.glob("*.flight")))
    time.sleep(0.1)
    full.set()
    bench.fly(5)
    until(lambda: bench.flight.writer.failure != "")
    assert "no space left" in bench.flight.writer.failure
    for _ in range(20):
        bench.fly(10)
        time.sleep(0.01)
    assert bench.loop.rate.ticks == 245
    assert bench.loop.tracker.ended >= 2
    full.clear()
    for _ in range(100):
        bench.fly(10)
        time.sleep(0.005)
    bench.land()
    assert caplog.text.count("the flight recorder pauses") == 1
    assert bench.flight.writer.failure == ""
    assert bench.flight.lost >= 200
    # a file that holds nothing is not kept
    assert all(file.stat().st_size > 500 for file in tmp_path.glob("*.flight"))
    ticks: list[int] = []
    result = replay(tmp_path, make_loop, on_tick=lambda record, calls: ticks.append(record.tick))
    assert result.differences == []
    assert result.last_tick == bench.flight.ticks
    assert 40 in ticks
    assert not set(range(60, 240)) & set(ticks)
    assert any("are missing" in note and "no space left" in note for note in result.notes)


def test_a_slow_disk_costs_ticks_of_the_record_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    go.set()
    write = Writer._write

    def slow(self: Writer, data: bytes) -> None:
        go.wait(60)
        write(self, data)

    monkeypatch.setattr(Writer, "_write", slow)
    bench = Bench(tmp_path, flush_s=0.01, queue_ticks=30).ready().fly(20)
    time.sleep(0.1)
    go.clear()
    began = time.monotonic()
    bench.fly(300)
    assert time.monotonic() - began < 50.0, "nobody waited for the disk, which takes 60 s"
    assert 150 < bench.flight.lost < 300
    go.set()
    time.sleep(0.1)
    bench.fly(20).land()
    gaps = [record.what for record in read_records(tmp_path)[1] if isinstance(record.what, Gap)]
    assert {gap.reason for gap in gaps} == {"the disk is too slow"}
    assert sum(gap.last - gap.first + 1 for gap in gaps) == bench.flight.lost
    result = replay(tmp_path, make_loop)
    assert (result.differences, result.last_tick) == ([], 340)
    assert result.ticks == 340 - bench.flight.lost


def test_a_directory_that_cannot_be_made_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("a file, not a directory")
    bench = Bench(tmp_path / "taken", flush_s=0.01).ready().fly(5)
    until(lambda: bench.flight.writer.failure != "")
    bench.fly(100).land()
    assert bench.loop.rate.ticks == 105
    assert caplog.text.count("the flight recorder pauses") == 1


def test_frames_are_digested_where_they_lie_and_a_replay_may_begin_at_any_of_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "flight", snapshot_ticks=20)
    shared(bench, tmp_path / "frames", keep_s=100.0)
    bench.ready().fly(130).land()
    for first in (1, 50, 100):
        result = replay(tmp_path / "flight", make_loop, first)
        assert (result.differences, result.last_tick) == ([], 130)


def test_frames_that_are_overwritten_before_they_are_digested_leave_a_gap(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "flight", flush_s=0.01, retry_s=0.02)
    shared(bench, tmp_path / "frames", keep_s=1.0)
    bench.ready().fly(8)
    until(lambda: not bench.flight.writer._queue)
    # The thread that digests does not get to run.
    drain, bench.flight.writer._drain = bench.flight.writer._drain, lambda: None  # type: ignore[method-assign]
    bench.fly(120)
    bench.flight.writer._drain = drain  # type: ignore[method-assign]
    until(lambda: "overwritten before they were digested" in bench.flight.writer.failure)
    for _ in range(40):
        bench.fly(4)
        time.sleep(0.005)
    bench.land()
    assert bench.flight.writer.failure == ""
    result = replay(tmp_path / "flight", make_loop)
    assert (result.differences, result.last_tick) == ([], bench.flight.ticks)
    assert any("are missing: frames were overwritten" in note for note in result.notes)
