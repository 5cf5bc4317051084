"""Progress that is noted in another process, as people see it."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from fleet.cli.offline import progress
from fleet.cli.offline.progress import NotedProgress, WorkProgress, request_stop, say_beside, show_noted_progress


def test_a_progress_that_is_taken_back_says_so_and_has_no_negative_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LINE_S", 0.0)
    shown = WorkProgress(100, "steps")
    shown.update(60)
    shown.update(20)
    assert shown.per_s == 0.0
    time.sleep(0.01)
    shown.update(30)
    assert shown.per_s > 0
    assert [line.split(" steps")[0] for line in capsys.readouterr().err.splitlines()] == [
        "60 of 100",
        "20 of 100",
        "30 of 100",
    ]


def test_what_ranks_note_and_say_is_shown_and_they_are_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_NOTE_S", "_LINE_S"):
        monkeypatch.setattr(progress, name, 0.0)
    # pytest's own loses what a thread writes while it is read
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    noted = tmp_path / "ranks" / "progress.json"
    noted.parent.mkdir()
    request_stop(noted)
    say_beside(noted, "of an earlier run")

    def wait_for(text: str) -> None:
        deadline_s = time.monotonic() + 20
        while text not in said.getvalue():
            assert time.monotonic() < deadline_s, said.getvalue()
            time.sleep(0.001)

    with show_noted_progress(noted, 100, "steps"):
        one = NotedProgress(noted)
        assert not one.stop_requested
        one.begin(40)
        one.update(50, "loss 1")
        wait_for("50 of 100 steps")
        say_beside(noted, "rank 1 died")
        wait_for("rank 1 died\n")
        again = NotedProgress(noted)
        again.begin(45)
        wait_for("45 of 100 steps")
        request_stop(noted)
        assert again.stop_requested
        say_beside(noted, "the last word")
    assert "the last word\n" in said.getvalue() and "earlier" not in said.getvalue()
