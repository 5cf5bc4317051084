"""A PostgreSQL that falls silent, with real threads: people go on at once, and all is stored when it answers again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cloud_learner.buffer.ledger import engine
from cloud_learner.gateway.storage import storage_thread
from tests.cloud_learner.dispatch.hall import Hall, commands, page
from tests.cloud_learner.gateway.test_people_first import acquired, threads, until
from tests.postgres import Server

pytestmark = pytest.mark.slow


def test_a_database_that_hangs_keeps_nobody_waiting(
    tmp_path: Path, postgres_server: Server, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_SILENT_S", 1.0)
    # the least that PostgreSQL's clients take
    monkeypatch.setattr(engine, "_PROBE_S", 2)
    monkeypatch.setattr(engine, "_CONNECT_S", 2)
    monkeypatch.setattr(storage_thread, "_SILENT_S", 0.3)
    hall = Hall(tmp_path, ledger=postgres_url)
    edge, other = hall.edge("robot-0"), hall.edge("robot-1")
    with threads(hall):
        edge.episode()
        until(hall, lambda: not edge.spool)
        with postgres_server.stopped():
            edge.episode()
            until_s = time.monotonic() + 6.0
            for number in range(1000):
                if time.monotonic() > until_s:
                    break
                page(hall, 1, "take_over" if number % 2 == 0 else "hand_back")
                assert len(commands(edge)) == number + 1, "each in the poll that follows it"
                time.sleep(0.1)
            assert len(commands(edge)) >= 4, "more than a loop that waits would come to"
            _, (answer,) = acquired(hall, "teleoperator", "robot-1")
            assert answer.lease is not None
            assert hall.view.snapshot()["storage"]["fault"]
            assert edge.spool
        edge.welcomed = False
        edge.hello()
        until(hall, lambda: not edge.spool)
        until(hall, lambda: not hall.view.snapshot()["storage"]["fault"])
        until(hall, lambda: "robot-1" in {lease.robot for lease in hall.ledger.kept_leases()})
    assert hall.ledger.totals().segments == 2 and other.welcomed
    kinds = [event.kind for event in hall.ledger.events()]
    assert kinds.count("take_over") == commands(edge).count("take_over"), "nothing of it is forgotten"
    hall.ledger.close()
