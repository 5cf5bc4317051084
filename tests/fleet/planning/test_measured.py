"""Figures of a plan are taken from whoever knows them best, and it is said who that was."""

from __future__ import annotations

import http.server
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.algorithms.interface import DataNeeds
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.sampling.target import StalenessBound
from fleet.config.recipes import get_recipe
from fleet.planning.measured import PlanFigure, of_data, of_metrics, of_recipe, read_metrics, settle
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.errors import ConfigError
from wire.types import PolicyVersion

SPEC = fake_spec(1, size=64)
SAID = {"gradient_step_s": PlanFigure(0.1, "given"), "version_bytes": PlanFigure(2e6, "given")}
GATEWAY = """# TYPE vla_fleet_trainer_steps_per_second gauge
vla_fleet_trainer_steps_per_second 4.0
# TYPE vla_fleet_ingest_steps counter
vla_fleet_ingest_steps_total 100.0
# TYPE vla_fleet_ingest_bytes counter
vla_fleet_ingest_bytes_total 450000.0
# TYPE vla_fleet_robot_ticks counter
vla_fleet_robot_ticks_total{robot="r1"} 5.0
"""
TRAINER = """vla_fleet_trainer_steps_per_second 4.0
vla_fleet_trainer_gradient_step_seconds_total 30.0
vla_fleet_trainer_batch_wait_seconds_total 10.0
vla_fleet_trainer_publish_seconds_count 4.0
vla_fleet_trainer_publish_seconds_sum 2.0
"""


def test_who_knows_best_is_believed_and_named() -> None:
    recipe = of_recipe(get_recipe("pixels"))
    figures, lag, sources = settle(
        {**SAID, "control_hz": PlanFigure(10, "given")}, {"control_hz": PlanFigure(20, "x")}, recipe
    )
    assert (figures.control_hz, sources["control_hz"].source) == (10, "given")
    assert (figures.draws_per_step, sources["draws_per_step"].source) == (256, "recipe pixels")
    assert (lag, sources["max_lag"].source) == (6, "ECHO-2")
    assert figures.robot_up_bytes_s == 50e6 / 8
    assert next(iter(sources)) == "gradient_step_s" and list(sources)[-1] == "max_lag"
    bounded = replace(get_recipe("pixels"), staleness=StalenessBound(3), samples_per_insert=12.0)
    figures, lag, _ = settle(SAID, of_recipe(bounded))
    assert (lag, figures.draws_per_insert) == (3, 12.0)


def test_a_recipe_without_a_bound_of_draws_has_that_of_its_algorithm() -> None:
    @dataclass(frozen=True)
    class Sparing(HGDagger):
        def needs(self) -> DataNeeds:
            return replace(super().needs(), samples_per_insert=7.0)

    recipe = replace(get_recipe("pixels"), algorithm=Sparing())
    assert of_recipe(recipe)["draws_per_insert"].value == 7.0
    assert of_recipe(replace(recipe, samples_per_insert=3.0))["draws_per_insert"].value == 3.0


@pytest.mark.parametrize(
    ("missing", "way"), [("gradient_step_s", "--gradient-step SECONDS"), ("version_bytes", "--version-mb MB")]
)
def test_what_nobody_knows_is_asked_for(missing: str, way: str) -> None:
    known = {name: figure for name, figure in SAID.items() if name != missing}
    with pytest.raises(ConfigError, match=f"plan: nobody has said .*{way}"):
        settle(known, of_recipe(get_recipe("fake")))


def test_a_ledger_tells_the_pace_of_trainer_and_robots(tmp_path: Path) -> None:
    ledger, store = BufferLocation(tmp_path).open_writer()
    ledger.see_robot("r1", SPEC, "clock", 1)
    assert of_data(tmp_path, SPEC.control_hz) == {}
    for number in range(3):
        store.append_all([(one, 5) for one in fake_episode(SPEC, f"e{number}", steps=120, segment_steps=60)], 6)
    # the trainer's clock began anew before version 4
    for number, created_s, steps in ((1, 10, 100), (2, 14, 120), (3, 18, 140), (4, 2, 150), (5, 6, 170)):
        version = PolicyVersion(number, "ab", 1000 * number, number - 1, steps, 5, 0, created_s * 10**9)
        ledger.commit_version(version, f"{number}.safetensors")
    for robot, number, took_ns in (("r1", 1, 9 * 10**8), ("r2", 1, 3 * 10**8), ("r1", 2, 5 * 10**8)):
        ledger.note_applied(robot, number, 10**9, 10**9 + took_ns)
    totals = ledger.totals()
    store.close()
    ledger.close()
    found = of_data(tmp_path, SPEC.control_hz)
    values = {name: figure.value for name, figure in found.items()}
    assert 0 < values.pop("active") <= 1
    assert values == pytest.approx(
        {
            "version_bytes": 5000,
            "publish_every_s": 4.0,
            "gradient_step_s": 0.2,
            "step_bytes": totals.bytes / 360,
            "segment_s": 60 / SPEC.control_hz,
            "apply_s": 0.4,
        }
    )
    assert "waits included" in found["gradient_step_s"].source


def test_pages_of_metrics_tell_the_pace_of_the_trainer() -> None:
    assert read_metrics(GATEWAY, "url") == {"gradient_step_s": 0.25, "step_bytes": 4500.0}
    assert read_metrics(TRAINER, "url") == pytest.approx({"gradient_step_s": 0.1875, "publish_s": 0.5})
    idle = "vla_fleet_trainer_steps_per_second 0.0\nvla_fleet_ingest_steps_total 0.0\n"
    assert read_metrics(idle, "url") == {}


@pytest.mark.parametrize(
    ("page", "message"), [("<html>{ no", "is no page of metrics"), ("up 1.0\n", "shows nothing of a fleet")]
)
def test_other_pages_are_refused(page: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_metrics(page, "url")


def test_a_page_is_fetched_and_one_that_cannot_be_says_why() -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(GATEWAY.encode())

        def log_message(self, *words: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        assert of_metrics([url])["step_bytes"] == PlanFigure(4500.0, url)
        server.shutdown()
        thread.join()
    with pytest.raises(ConfigError, match=r"--metrics http://127\.0\.0\.1:.* cannot be read"):
        of_metrics([url])
    for wrong in ("file:///etc/passwd", "localhost:8080"):
        with pytest.raises(ConfigError, match="give http://HOST:PORT/metrics"):
            of_metrics([wrong])
