"""Flights for people: a table and a Rerun recording."""

from __future__ import annotations

import io
import itertools
import sys
from pathlib import Path

import pytest

from robot_edge.flight_recorder.command import replay_command
from robot_edge.flight_recorder.rows import Row, print_table, read_rows
from robot_edge.flight_recorder.view import write_rerun
from tests.robot_edge.flight_recorder.bench import eventful, make_loop
from wire.errors import ConfigError


@pytest.fixture(scope="module")
def flown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    directory = tmp_path_factory.mktemp("flight")
    return directory, eventful(directory).flight.ticks


def test_rows_say_what_happened(flown: tuple[Path, int]) -> None:
    header, found = read_rows(flown[0])
    every = [row for row in found if isinstance(row, Row)]
    assert header.spec.embodiment == "fake-point"
    assert [row.tick for row in every] == list(range(1, flown[1] + 1))
    assert all(row.time_ns < later.time_ns for row, later in itertools.pairwise(every))
    replies = [row for row in every if row.latency_s >= 0]
    assert replies
    assert all(0 < row.latency_s < 10 * 0.0125 for row in replies)
    notes = "\n".join(row.notes for row in every)
    for text in (
        "reset: go-left, seed 500000",
        "OperatorCommand take_over",
        "episode ends: aborted",
        "inference takes no",
    ):
        assert text in notes
    human = [row for row in every if row.mode == "human"]
    assert human and all(row.executed is not None and row.executed[2] == pytest.approx(0.3) for row in human)


def test_a_table_has_one_line_a_tick(flown: tuple[Path, int]) -> None:
    out = io.StringIO()
    assert print_table(flown[0], out, 30, 45) == 16
    lines = out.getvalue().splitlines()
    assert lines[0].split()[:3] == ["tick", "late", "ms"]
    assert [int(line.split()[0]) for line in lines[1:]] == list(range(30, 46))
    assert any(" human " in line for line in lines)
    with pytest.raises(ConfigError, match="no tick from 5000"):
        print_table(flown[0], out, 5000, 5001)


@pytest.mark.slow
def test_a_rerun_recording_holds_curves_decisions_and_pictures(flown: tuple[Path, int], tmp_path: Path) -> None:
    rerun = pytest.importorskip("rerun")
    path = tmp_path / "new" / "flight.rrd"
    assert write_rerun(flown[0], path, 1, 60) == 60
    recording = rerun.dataframe.load_recording(path)
    table = recording.view(index="tick", contents="/**").select().read_all()
    assert table.num_rows == 60
    columns = table.column_names
    for entity in ("state", "executed", "proposed", "decisions", "camera/front", "inference/latency_ms"):
        assert any(name.startswith(f"/{entity}:") for name in columns), (entity, columns)
    assert "time" in columns


def test_without_rerun_the_way_out_is_named(
    flown: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(ConfigError, match="pip install 'rerun-sdk"):
        write_rerun(flown[0], tmp_path / "flight.rrd")


def test_the_command_prints_and_says_whether_all_is_the_same(
    flown: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay_command(flown[0], make_loop, 30, 40, table=True) == 0
    out = capsys.readouterr().out
    assert "ticks 30 to 40: 11 decided again, all the same" in out
    assert len(out.splitlines()) == 13
