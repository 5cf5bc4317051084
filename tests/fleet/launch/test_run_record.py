"""What is kept of a start, and what of it differs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fleet.config.data_directory import DataDirectory
from fleet.config.recipes import fake
from fleet.config.settings import with_settings
from fleet.launch.run_record import differing_settings, keep_record, make_record, newest_record
from wire.errors import CorruptDataError


def test_a_record_has_every_setting_and_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = "postgresql://fleet:secret@db:5432/fleet"
    monkeypatch.setattr(sys, "argv", ["vla-fleet", "up", "--ledger", ledger])
    recipe = with_settings(fake(), ["training.batch=3"])
    path = keep_record(DataDirectory(tmp_path), make_record("up", recipe, 7, None, ["training.batch=3"], steps=20))
    text = path.read_text()
    assert "secret" not in text and "postgresql://fleet:***@db:5432/fleet" in text
    found = json.loads(text)
    assert (found["command"], found["seed"], found["steps"], found["algorithm"]) == ("up", 7, 20, "hg-dagger")
    assert found["settings"]["training.batch"] == 3
    assert found["settings"]["training.learning_rate"] == fake().training.learning_rate
    assert found["versions"]["vla-fleet"] and found["versions"]["torch"] and found["versions"]["python"]
    assert newest_record(DataDirectory(tmp_path)).settings == found["settings"]


def test_starts_are_kept_one_by_one_and_the_newest_is_found(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path)
    assert newest_record(data) is None
    first = make_record("train", fake(), 0, None, [])
    second = msgspec.structs.replace(first, began="2099-01-01T00:00:00.000+00:00")
    paths = {keep_record(data, one) for one in (second, first)}
    assert set(data.runs.glob("*")) == paths and len(paths) == 2, "nothing else is left there"
    assert newest_record(data) == second


def test_what_two_runs_differ_in(tmp_path: Path) -> None:
    one = make_record("train", fake(), 0, None, [])
    other = make_record("up", with_settings(fake(), ["training.batch=3", "training.schedule=cosine"]), 1, None, [])
    assert differing_settings(one, other) == [
        ("seed", 0, 1),
        ("training.batch", 16, 3),
        ("training.schedule", "constant", "cosine"),
    ]
    assert differing_settings(one, one) == []


def test_a_damaged_one_is_named(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path)
    path = keep_record(data, make_record("train", replace(fake(), people_only=True), 0, None, []))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CorruptDataError, match=r"runs/.*Move it away"):
        newest_record(data)
