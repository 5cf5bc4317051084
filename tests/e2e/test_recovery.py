"""Real processes: somebody at a keyboard recovers, corrects and hands back, and the episode ends there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cloud_learner.buffer.control import HUMAN, POLICY
from tests.e2e.test_processes import Job
from tests.e2e.test_small_fleet import Typist, run, start, until
from wire.messages.gateway import Segment

pytestmark = pytest.mark.slow


def helped(fleet: Job) -> list[list[Segment]]:
    """The segments of each episode in which a person acted, in order."""
    ledger, store = fleet.data.buffer.open_reader()
    rows = [row for row in ledger.segments_after(0, limit=1_000_000) if row.source == "online"]
    wanted = {row.episode for row in rows if row.human_steps}
    found: dict[str, list[Segment]] = {}
    for segment in store.read([row.row for row in rows if row.episode in wanted]).segments.values():
        found.setdefault(segment.episode.id, []).append(segment)
    ledger.close()
    return [sorted(segments, key=lambda segment: segment.index) for segments in found.values()]


def test_an_intervention_has_both_parts_and_the_episode_ends_after_it(tmp_path: Path) -> None:
    rules = ("--set", "loop.episodes.after_correction=end", "--set", "loop.max_ticks=4000")
    options = ("--no-operator", *rules)
    fleet = Job(tmp_path / "fleet", *options, recipe="tests.e2e.small_recipes:fake", robots=1)
    typist = Typist()
    try:
        fleet.wait("the robot practises", lambda snapshot: snapshot["version"] and practising(snapshot))
        words = (
            "teleop",
            "robot-0",
            "--device-config",
            json.dumps({"terminal": typist.name, "speeds": (0.05,), "speed": 0}),
        )
        terminal = dict.fromkeys(("stdin", "stdout", "stderr"), typist.slave)
        person = start(fleet, tmp_path / "teleop.log", *words, **terminal)
        try:
            until("the robot is ours", lambda: "robot-0 is yours." in typist.look() or person.poll() is not None)
            typist.type("\r", 0.02)
            until("the person drives", lambda: "You drive robot-0." in typist.look(), typist.look)
            typist.type("1", 0.02)
            typist.type("d", 2.0)
            fleet.wait("the page says so", lambda snapshot: snapshot["robots"][0]["part"] == "recovery")
            typist.type("2", 0.02)
            typist.type("r", 2.0)
            fleet.wait("the page says so", lambda snapshot: snapshot["robots"][0]["part"] == "correction")
            typist.type("\r", 0.02)
            until("the robot goes on", lambda: "is handed back" in typist.look(), typist.look)
        finally:
            typist.type("q", 0.02)
            person.wait(60)
        until("it is stored", lambda: any(part[-1].last for part in helped(fleet)), fleet.log.read_text)
        fleet.wait("the policy has the next scene", lambda snapshot: snapshot["robots"][0]["part"] == "")
        (segments,) = helped(fleet)
        actor = np.concatenate([segment.actor for segment in segments])
        recovery = np.concatenate(
            [s.recovery if isinstance(s.recovery, np.ndarray) else np.zeros(s.steps, bool) for s in segments]
        )
        people = np.flatnonzero(actor == HUMAN)
        assert recovery[people[0]] and not recovery[people[-1]] and (np.diff(recovery[people].astype(int)) <= 0).all()
        assert recovery.sum() > 20 and (actor[recovery] == HUMAN).all() and (~recovery[people]).sum() > 20
        assert not (actor[people[0] :] == POLICY).any()
        assert (segments[-1].outcome, segments[-1].truncated[-1]) == ("unjudged", True)
        said = run(fleet, "buffer", "stats")
        counted = f"1 recoveries of {recovery.sum()} steps, and {len(people) - recovery.sum()} steps of corrections"
        assert counted in said, said
    finally:
        fleet.end()


def practising(snapshot: dict) -> bool:
    return [robot["mode"] for robot in snapshot["robots"]] == ["policy"]
