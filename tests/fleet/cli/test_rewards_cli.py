"""`vla-fleet rewards` on a real buffer, as a person types it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.sampling.target import uniform
from cloud_learner.rewards.config import RewardConfig
from fleet.cli.__main__ import app
from fleet.config.recipes import get_recipe
from fleet.config.settings import with_settings
from fleet.launch.learning import open_replay
from tests.cloud_learner.rewards.told import CONFIG, SPEC, episode, label, opened
from wire.errors import ConfigError, InvalidDataError


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["rewards", *map(str, arguments)])
    if isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Judged episodes, two that nobody judged, and one that was judged wrongly."""
    root = tmp_path_factory.mktemp("data")
    told = [("good", "success"), ("bad", "failure")]
    judged = [episode(f"{name}{n}", outcome, steps=8) for n in range(45) for name, outcome in told]
    wrong = [episode("wrong", "success", steps=8)]
    wrong[0][-1] = msgspec.structs.replace(wrong[0][-1], outcome="failure")
    with opened(root, *judged, episode("open", "unjudged", steps=8), *wrong):
        pass
    return root


def test_train_label_and_show(data: Path) -> None:
    assert "no model has judged anything" in run("show", "--data", data)
    said = run("train", "--data", data, "--updates", 150, "--last-steps", 4, "--precision", "0.6")
    assert "classifier-000001.safetensors" in said
    assert "precision 1.00 [" in said
    assert "calibration error" in said
    # the same episodes and seed make the same model
    assert "classifier-000001.safetensors" in run(
        "train", "--data", data, "--updates", 150, "--last-steps", 4, "--precision", "0.6"
    )
    assert "92 episodes labelled by classifier model 1." in run("relabel", "--data", data)
    assert "0 episodes labelled by classifier model 1." in run("relabel", "--data", data)
    shown = run("show", "--data", data)
    assert "labelled 92 of 92 episodes" in shown
    assert shown.splitlines()[-1] == "  wrong"
    found = json.loads(run("show", "--data", data, "--json"))["classifier"]
    assert (found["by_model"], found["contradicts"]) == ({"1": 92}, ["wrong"])
    assert found["says_failure"] >= 40
    # another model: what the first said is told apart until this one has looked
    assert "model 2, measured" in run("train", "--data", data, "--updates", 150, "--last-steps", 3)
    assert "do not count: 92 of model 1" in run("show", "--data", data)
    with pytest.raises(ConfigError, match="labels of an old model"):
        run("relabel", f"classifier:{data / 'rewards' / 'classifier-000001.safetensors'}", "--data", data)
    assert "92 episodes labelled by classifier model 2." in run("relabel", "--data", data)
    assert "do not count" not in run("show", "--data", data)


def test_what_cannot_be_is_said(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lies somewhere"):
        run("relabel", "lerobot", "--data", data)
    with pytest.raises(ConfigError, match="no reward model 'clasifier'"):
        run("relabel", "clasifier:x", "--data", data)
    with pytest.raises(ConfigError, match="no episode of task 'fly'"):
        run("train", "--data", data, "--task", "fly")
    with opened(tmp_path, episode("e1", "success")):
        pass
    with pytest.raises(InvalidDataError, match="0 of these failed"):
        run("train", "--data", tmp_path)
    with pytest.raises(ConfigError, match="no success classifier yet"):
        run("relabel", "--data", tmp_path)


def test_a_recipe_chooses_its_sources_by_name_and_a_trainer_draws_by_them(tmp_path: Path) -> None:
    recipe = get_recipe("state")
    assert recipe.rewards == RewardConfig()
    one = 'rewards.sources=["outcome","classifier"]'
    with pytest.raises(ConfigError, match="no single model's word counts"):
        with_settings(recipe, [one])
    assert with_settings(recipe, [one, "rewards.doubt=true"]).rewards.doubt
    three = 'rewards.sources=["label","outcome","classifier","lerobot"]'
    chosen = with_settings(recipe, ["rewards.doubt=true", three])
    asked, drawn = msgspec.structs.replace(CONFIG, target=uniform()), []
    with opened(tmp_path, episode("e1", "success"), episode("e2", "unjudged"), episode("e3", "success")) as both:
        label(both[0], "classifier", {"e1": 1.0, "e2": 0.0, "e3": 0.0})
        label(both[0], "lerobot", {"e2": 0.0})
        for which in (recipe, chosen):
            with open_replay(replace(which, spec=SPEC), *both, asked) as dataset:
                dataset.refresh()
                batch = dataset.next()
                pairs = zip(np.asarray(batch["episode"]).tolist(), np.asarray(batch["outcome"]).tolist(), strict=True)
                drawn.append({number: OUTCOMES[outcome] for number, outcome in pairs})
    assert drawn == [
        {1: "success", 2: "unjudged", 3: "success"},
        {1: "success", 2: "failure", 3: "unjudged"},
    ]
