"""Policies of lerobot in the whole system: made by `lerobot-train`, run by `vla-fleet up`, and trained on there."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.algorithms.interface import Metrics
from cloud_learner.training.learner import BatchSource
from fleet.cli.__main__ import app
from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.overrides import Overrides
from fleet.tools.policy_commands import read_version
from tests.command_line import vla_fleet
from tests.e2e.reach_recipe import TASKS, one_side, reach
from tests.e2e.test_processes import Job, number, robot

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LeRobotDataset of a few scripted demonstrations of one of two tasks, exported from a buffer."""
    root = tmp_path_factory.mktemp("demonstrated")
    recipe = one_side()
    with DataDirectory(root / "data").prepare(RunIdentity("tests.e2e.reach_recipe:one_side", 0, recipe.spec.hash)):
        InProcessFleet(root / "data", recipe, robots=0).close()
    run("buffer", "export-lerobot", str(root / "set"), "--data", str(root / "data"), "--no-video")
    return root / "set"


@pytest.fixture(scope="module")
def checkpoint(demonstrated: Path) -> Path:
    """What `lerobot-train` makes of them with a small ACT in a moment."""
    import datasets
    from lerobot.scripts import lerobot_train

    policy = {
        **{"type": "act", "device": "cpu", "push_to_hub": "false", "pretrained_backbone_weights": "null"},
        **{"chunk_size": 8, "n_action_steps": 8, "dim_model": 64, "n_heads": 4, "dim_feedforward": 128},
        **{"n_encoder_layers": 2, "use_vae": "false", "dropout": 0},
        **{"optimizer_lr": 3e-4, "optimizer_lr_backbone": 3e-4},
    }
    words = [f"--policy.{name}={value}" for name, value in policy.items()]
    words += ["--dataset.repo_id=local/reach", f"--dataset.root={demonstrated}", "--dataset.video_backend=pyav"]
    words += ["--steps=4", "--save_freq=4", "--batch_size=8", "--num_workers=0", "--eval_freq=0", "--seed=1"]
    out, root = demonstrated.parent / "run", logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lerobot-train", *words, "--wandb.enable=false", f"--output_dir={out}"])
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", demonstrated.parent / "cache")
        lerobot_train.main()
    root.handlers[:], root.level = handlers, level
    return out


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for one in made:
        one.end()


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def learned(up: Job, report: Path) -> dict[str, Any]:
    """The report of a job that was watched until its robot acted on what the fleet had learned."""
    up.wait("the robot acts", lambda s: robot(s, "robot-0").get("mode") in ("policy", "script"), 300)
    first = max(1, number(up.snapshot()))
    up.wait("the robot has a version that was learned", lambda s: robot(s, "robot-0").get("version", 0) > first, 300)
    assert up.stop(180) == 0, up.log.read_text()
    return json.loads(report.read_text())


def test_a_checkpoint_of_lerobot_train_learns_in_the_fleet(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the backbone's 11 million weights need not travel for this
    overrides = Overrides(policy=f"lerobot:{checkpoint}", policy_config='{"training": {"freeze": ["*backbone*"]}}')
    recipe, data, out = overrides.applied(reach()), tmp_path / "data", tmp_path / "out"
    name = "tests.e2e.reach_recipe:reach"
    with DataDirectory(data).prepare(RunIdentity(name, 0, recipe.spec.hash, overrides.choice())):
        fleet = InProcessFleet(data, recipe)
    try:
        fleet.turn(60, 0.1)
        versions = fleet.ledger.newest_version()
        assert versions is not None, "it acts from the first moment on: nothing had to be learned"
        untouched = recipe.make_policy(recipe.spec, 0).save()
        assert read_version(data, 1)[1] == untouched
        learner, losses = fleet.trainer.learner, []
        step = learner.step

        def noted(source: BatchSource) -> Metrics:
            metrics = step(source)
            losses.append(metrics["loss"])
            return metrics

        monkeypatch.setattr(learner, "step", noted)
        acting: set[str] = set()
        for _ in range(20):
            fleet.turn(50, 0.2)
            acting = {row.robot for row in fleet.ledger.applied() if row.version > 1}
            if len(acting) == 2 and len(losses) >= 30:
                break
        fleet.drain()
        newest = fleet.ledger.newest_version()
        assert newest is not None
        assert acting == {"robot-0", "robot-1"}
        assert read_version(data, None)[1] != untouched
        assert mean(losses[-10:]) < 0.8 * mean(losses[:5]), losses
    finally:
        fleet.close()
    # what was learned can be taken out
    run("policy", "export", str(out), "--data", str(data))
    assert json.loads((out / "config.json").read_text())["type"] == "act"
    run("policy", "show", "--recipe", name, "--policy", f"lerobot:{out}", "--rounds", "1")


def test_a_checkpoint_of_lerobot_train_runs_the_main_job(checkpoint: Path, tmp_path: Path, jobs: list[Job]) -> None:
    words = ["--policy", f"lerobot:{checkpoint}", "--report", str(tmp_path / "r.json")]
    jobs.append(Job(tmp_path / "fleet", *words, recipe="tests.e2e.reach_recipe:reach", robots=1))
    found = learned(jobs[0], tmp_path / "r.json")
    assert found["demonstrations"] == 0, "nothing but corrections"
    assert found["versions_refused"] == {}
    assert (found["steps_lost"], found["steps_duplicated"]) == (0, 0)
    assert found["steps_stored"] == found["steps_recorded"] > 50


def test_a_part_of_our_own_policy_learns_in_the_main_job(tmp_path: Path, jobs: list[Job]) -> None:
    """The fast path alone is trained; its versions act on the robot, whose slow path is as the trainer's."""
    report, data = tmp_path / "r.json", tmp_path / "fleet"
    words = ["--policy", "flow:pixels", "--policy-config", '{"training": {"freeze": ["slow.*"]}}']
    jobs.append(Job(data, *words, "--report", str(report), recipe="tests.e2e.small_recipes:fake", robots=1))
    found = learned(jobs[0], report)
    assert "trying the policy flow:pixels" in jobs[0].log.read_text()
    assert found["versions_refused"] == {}
    assert (found["steps_lost"], found["steps_duplicated"]) == (0, 0)
    assert found["steps_stored"] == found["steps_recorded"] > 50

    # another policy does not go on there
    other = ["up", "--recipe", "tests.e2e.small_recipes:fake", "--data", str(data), "--policy", "flow:small"]
    done = vla_fleet(*other)
    assert done.returncode == 1
    assert "its versions and checkpoints are of another network" in done.stderr
    assert "trying" not in done.stderr, "that is known without making it"


def test_a_tiny_vision_language_model_is_built_and_runs_the_main_job(tmp_path: Path, jobs: list[Job]) -> None:
    report = tmp_path / "r.json"
    jobs.append(Job(tmp_path / "fleet", "--report", str(report), recipe="tests.e2e.reach_recipe:reach_vla", robots=1))
    found = learned(jobs[0], report)
    assert (tmp_path / "fleet" / "policy" / "vlm").is_dir()
    assert found["demonstrations"] == 2 * len(TASKS)
    assert (found["steps_lost"], found["steps_duplicated"]) == (0, 0)
    assert found["steps_stored"] == found["steps_recorded"] > 50
