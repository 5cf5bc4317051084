"""What a report and the statistics say of people's part."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from cloud_learner.buffer.control import HUMAN, POLICY
from cloud_learner.buffer.maintenance.stats import collect, render
from fleet.config.data_directory import DataDirectory
from fleet.config.recipes import get_recipe
from fleet.tools.report import RunCounters, make_report, retention
from tests.cloud_learner.buffer.stored import SPEC, Buffer
from tests.cloud_learner.buffer.synthetic import fake_episode
from wire.messages.gateway import Evaluation
from wire.types import PolicyVersion


def test_recoveries_and_corrections_are_counted(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path)
    buffer = Buffer(data.buffer)
    (plain,) = fake_episode(SPEC, "e", steps=40, actor=[POLICY] * 10 + [HUMAN] * 25 + [POLICY] * 5)
    buffer.add((msgspec.structs.replace(plain, recovery=np.arange(40) // 10 == 1),))
    said = render(collect(buffer.store))
    buffer.ledger.close()
    report = make_report(data, get_recipe("fake"), RunCounters(), 1.0)
    assert [report[name] for name in ("interventions", "recoveries", "recovery_steps", "correction_steps")] == [
        1,
        1,
        10,
        15,
    ]
    assert "1 recoveries of 10 steps, and 15 steps of corrections" in said


def test_how_long_it_took_until_a_robot_acted_by_what_was_trained(tmp_path: Path) -> None:
    data, second = DataDirectory(tmp_path), 1_000_000_000
    buffer = Buffer(data.buffer)
    ledger = buffer.ledger
    ledger.see_robot("trainer", None, "clock", second)
    ledger.set_clock_offset("trainer", second, second)
    # at 2 s by the trainer's clock, which is 3 s by the gateway's
    ledger.commit_version(PolicyVersion(1, "0" * 64, 10, 0, 1, 1, 0, created_ns=2 * second), "1.safetensors")
    ledger.note_applied("robot-0", 1, 4 * second, 4 * second + second // 2)
    ledger.close()
    report = make_report(data, get_recipe("fake"), RunCounters(), 1.0)
    assert report["publish_to_applied_s"] == {"p50": 0.5, "p99": 0.5, "count": 1}
    assert report["trained_to_applied_s"] == {"p50": 1.5, "p99": 1.5, "count": 1}


def test_a_task_is_lost_once_its_intervals_part_and_says_since_which_version(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path)
    ledger = Buffer(data.buffer).ledger
    curve = [(1, 0.2, 0.3), (2, 0.9, 0.3), (3, 0.9, 0.5), (4, 0.7, 0.6), (5, 0.3, 0.9)]
    for number, old, new in curve:
        found = Evaluation(number, {"old": old, "new": new}, 20, 1_000_000, "cadence", number, 1.0)
        ledger.add_evaluation(found, number)
    ledger.add_evaluation(Evaluation(5, {"old": 1.0, "new": 1.0}, 20, 2_000_000, "after", 6, 1.0), 6)
    ledger.close()
    report = make_report(data, get_recipe("fake"), RunCounters(), 1.0)
    old = {"best": 0.9, "newest": 0.3, "best_version": 2, "newest_version": 5, "lost": True}
    new = {"best": 0.9, "newest": 0.9, "best_version": 5, "newest_version": 5, "lost": False}
    assert report["retention"] == {"new": new, "old": old}
    assert retention(()) == {}
