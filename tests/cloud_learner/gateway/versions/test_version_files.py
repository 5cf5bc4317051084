"""The files of versions at a real gateway: what is kept on a full disk, and who waits for whom."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from cloud_learner.rollout.config import RolloutConfig
from tests.cloud_learner.gateway.versions.test_rollout_service import CANARY, NAMES, change, fleet, hear
from wire.messages import Message
from wire.messages.fleet import VersionAction
from wire.messages.gateway import FetchWeights, WeightBytes
from wire.types import PolicyVersion


@pytest.mark.parametrize("robots", ["away", "back"])
@pytest.mark.parametrize("config", [RolloutConfig(), CANARY])
def test_a_disk_that_is_full_after_a_restart_keeps_all_that_may_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: RolloutConfig, robots: str
) -> None:
    hall = fleet(tmp_path, config, versions=8)
    change(hall, console := hall.peer(), VersionAction.pin, 3, NAMES[0])
    if not config.canary:
        # what is newer goes, with files that nobody needs any more
        assert not change(hall, console, VersionAction.rollback, 5).refused
    needed = hall.gateway._rollout.controller.needed
    again = hall.killed()
    controller, store = again.gateway._rollout.controller, again.gateway._rollout._weights
    monkeypatch.setattr(store._fetched, "now", set)
    if robots == "back":
        for edge in again.edges:
            edge.hello()
            hear(again)
            edge.status()
        hear(again)
    again.gateway._rollout.prune(full=True)
    hear(again)
    there = {number for number in range(1, 9) if store.sizes(number).here}
    assert {3, controller.current, controller.reference, *needed} - {0} <= there and len(there) < 8
    assert dict(controller.pins) == {NAMES[0]: 3}


def test_robots_have_their_parts_while_a_version_that_came_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hall = fleet(tmp_path)
    store, begun, goes_on = hall.gateway._rollout._weights, threading.Event(), threading.Event()
    receive = store.receive

    def slow(part: WeightBytes) -> PolicyVersion | None:
        begun.set()
        assert goes_on.wait(60)
        return receive(part)

    monkeypatch.setattr(store, "receive", slow)
    for thread in hall.gateway._threads:
        thread.start()
    try:
        hall.publish(2)
        assert begun.wait(60)
        robot = hall.edges[0].channel
        hall.received(robot)
        robot.send(FetchWeights(1, 0, 100))
        deadline_s, found = time.monotonic() + 60, list[Message]()
        while not any(isinstance(one, WeightBytes) for one in found):
            hall.gateway.poll()
            found += hall.received(robot)
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert hall.ledger.version(2) is None
    finally:
        goes_on.set()
        for thread in hall.gateway._threads:
            thread.close(60)
