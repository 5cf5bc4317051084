"""Logs of processes that write through a descriptor: bounded, and whole where they are needed."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from robot_edge.runtime.log_files import last_line, old_log, rotate_log
from robot_edge.runtime.rejection_log import RejectionLogTail, not_taken
from robot_edge.runtime.supervisor import Child, Supervisor
from tests.robot_edge.runtime.test_supervisor import until


@pytest.mark.slow
def test_a_process_that_talks_for_ever_stays_within_its_bounds_and_its_last_words_are_kept(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        f"from pathlib import Path; end = Path({str(tmp_path / 'end')!r})\n"
        "n = 0\n"
        "while not end.exists():\n"
        "    for _ in range(20):\n"
        "        n += 1; print(f'line {n:07d} ' + 'x' * 50, flush=True)\n"
        "    time.sleep(0.002)\n"
        "print('last', n, flush=True); sys.exit('vla-fleet: the arm is on fire')"
    )
    kid = Child("kid", [sys.executable, "-c", code], tmp_path / "kid.log", give_up_after=1)
    supervisor = Supervisor([kid], log_bytes=20_000)
    supervisor.start("kid")
    largest, begun_anew = 0, 0

    def often() -> bool:
        nonlocal largest, begun_anew
        size = kid.log_file.stat().st_size
        begun_anew += size < largest
        largest = size if size < largest else max(largest, size)
        supervisor._logs_due_s = 0.0
        return begun_anew >= 10

    until(supervisor, often)
    (tmp_path / "end").touch()
    until(supervisor, lambda: kid.failed)
    assert "the arm is on fire" in kid.failed
    # As large as the bound, and what came between two looks.
    assert kid.log_file.stat().st_size + old_log(kid.log_file).stat().st_size < 2_000_000
    text = old_log(kid.log_file).read_text() + kid.log_file.read_text()
    numbers = [int(line.split()[1]) for line in text.splitlines() if line.startswith("line") and len(line) == 63]
    last = int(next(line for line in text.splitlines() if line.startswith("last")).split()[1])
    assert numbers[-1] == last and "\0" not in text
    gaps = sum(b - a - 1 for a, b in pairwise(numbers))
    assert gaps <= 200, "what is written in the microseconds of the cut, or while a busy machine lets it wait there"


def test_what_a_process_said_last_is_found_behind_the_cut(tmp_path: Path) -> None:
    log = tmp_path / "kid.log"
    log.write_text("first\nvla-fleet: no such port\n")
    rotate_log(log, most_bytes=1000)
    assert last_line(log) == "vla-fleet: no such port" and not old_log(log).exists(), "it is small"
    writer = log.open("a")
    rotate_log(log, most_bytes=10)
    assert (log.read_text(), last_line(log)) == ("", "vla-fleet: no such port")
    writer.write("went on\n")
    writer.close()
    assert (log.read_text(), last_line(log)) == ("went on\n", "went on")


def test_a_disk_that_does_not_let_it_costs_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "kid.log"
    log.write_text("words\n" * 10)
    old_log(log).mkdir()
    rotate_log(log, most_bytes=10)
    assert log.read_text() == "words\n" * 10 and "stays as it is" in caplog.text


def test_a_refusal_is_told_though_the_log_began_anew_before_anybody_looked(tmp_path: Path) -> None:
    log = tmp_path / "robot.inference.log"
    log.write_text("some words of no interest\n" * 100)
    tail = RejectionLogTail("robot-0", log)
    with log.open("a") as writer:
        writer.write(not_taken(7, "it has two arms") + "\n")
        writer.flush()
        rotate_log(log, most_bytes=10)
        writer.write(not_taken(8, "it has no head") + "\n")
    told = tail.lines()
    assert len(told) == 2 and "two arms" in told[0] and "no head" in told[1]
    assert tail.lines() == []
