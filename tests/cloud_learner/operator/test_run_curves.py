"""The curves of a run, bounded whatever a trainer says."""

from __future__ import annotations

import json
import math

from cloud_learner.operator.run_curves import MAX_POINTS, RunCurves
from cloud_learner.operator.view import FleetView
from tests.cloud_learner.operator.fakes import edge_status
from wire.messages.gateway import TrainerStatus
from wire.types import PolicyVersion


def status(step: int, **curves: float) -> TrainerStatus:
    return TrainerStatus(step, 1.0 / (step + 1), 20.0, 100, 3, "online", curves=curves)


def test_a_figure_that_was_not_said_or_is_no_number_is_a_gap() -> None:
    run = RunCurves()
    run.add(0.5, status(10, gradient_norm=2.0), {})
    run.add(1.0, status(20, gradient_norm=math.nan), {"fleet/versions_behind": 1.0})
    found = json.loads(json.dumps(run.model(), allow_nan=False))
    assert (found["t_s"], found["gradient_steps"]) == ([0.5, 1.0], [10, 20])
    assert found["curves"]["gradient_norm"] == [2.0, None]
    assert found["curves"]["fleet/versions_behind"] == [None, 1.0]
    assert found["curves"]["throughput/gradient_steps_per_second"] == [20.0, 20.0]


def test_a_long_run_and_many_names_stay_bounded_and_span_the_whole() -> None:
    run = RunCurves()
    for step in range(5000):
        run.add(step / 2, status(step, **{f"{step}{'x' * 100}": 1.0}), {})
    found = run.model()
    assert MAX_POINTS // 2 <= len(found["t_s"]) <= MAX_POINTS
    assert found["t_s"][0] == 0.0 and found["t_s"][-1] > 2480
    gaps = {round(b - a, 3) for a, b in zip(found["t_s"], found["t_s"][1:], strict=False)}
    assert len(gaps) == 1, "evenly"
    assert len(found["curves"]) <= 64 and max(map(len, found["curves"])) <= 64


def test_the_view_says_how_far_robots_are_behind() -> None:
    view = FleetView()
    view.update_status(edge_status("r1", version=3))
    view.update_status(edge_status("r2", version=5))
    view.add_version(PolicyVersion(7, "ab" * 32, 10, 6, 4200, 0, 0))
    view.update_trainer(status(1, **{"drawn/reach": 0.25}))
    curves = view.run()["curves"]
    assert (curves["fleet/versions_behind"], curves["drawn/reach"]) == ([4.0], [0.25])
    assert "curves" not in view.snapshot()["trainer"], "asked for by those who look"
