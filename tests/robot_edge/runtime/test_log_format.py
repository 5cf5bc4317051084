"""Logs as JSON: whatever a process says is one object a line, and whoever reads logs finds in it what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from robot_edge.runtime.log_files import last_line
from robot_edge.runtime.log_format import configure_logging, message_of
from robot_edge.runtime.rejection_log import RejectionLogTail, not_taken
from wire.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import logging, sys, threading
from robot_edge.runtime.log_format import configure_logging, report_end
configure_logging("uplink", "robot-7")
log = logging.getLogger("some.module")
log.info("two\\nlines: %s", "ü")
try:
    raise ValueError("inside")
except ValueError:
    log.exception("it failed")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
report_end("vla-fleet", "the arm is on fire")
{}["missing"]
"""


def said(kind: str) -> list[str]:
    """Lines of a process that says all sorts of things."""
    environment = {**os.environ, "VLA_FLEET_LOG_FORMAT": kind, "VLA_FLEET_LOG": "INFO"}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()


def test_every_line_is_an_object() -> None:
    lines = [json.loads(line) for line in said("json")]
    messages = [line["message"] for line in lines]
    assert messages[:2] == ["two\nlines: ü", "it failed"]
    assert sorted(messages[2:]) == [
        "KeyError: 'missing'",
        "ZeroDivisionError: division by zero",
        "vla-fleet: the arm is on fire",
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"]) for line in lines)
    assert {(line["process"], line["robot"]) for line in lines} == {("uplink", "robot-7")}
    assert len({line["pid"] for line in lines}) == 1
    assert [lines[0][key] for key in ("level", "logger")] == ["INFO", "some.module"]
    assert "exception" not in lines[0]
    assert "ValueError: inside" in lines[1]["exception"]


def test_text_is_as_it_was() -> None:
    lines = said("")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO some\.module: two", lines[0])
    assert "vla-fleet: the arm is on fire" in lines
    assert lines[-1] == "KeyError: 'missing'"


def test_an_unknown_format_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_FLEET_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="VLA_FLEET_LOG_FORMAT is 'xml': set it to json"):
        configure_logging("gateway")


def test_readers_of_logs_find_what_was_said(tmp_path: Path) -> None:
    log = tmp_path / "robot-7.inference.log"
    log.write_text("")
    tail = RejectionLogTail("robot-7", log)
    line = {"time": "", "level": "ERROR", "logger": "x", "message": not_taken(3, 'no "head"'), "process": "", "pid": 1}
    log.write_text(json.dumps(line) + "\n")
    assert tail.lines() == ['robot-7 refuses version 3: no "head"']
    assert last_line(log) == not_taken(3, 'no "head"')
    for other in ("{not JSON", '{"message": 3}', "plain"):
        assert message_of(other) == other
