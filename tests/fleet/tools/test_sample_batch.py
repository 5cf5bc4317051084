"""`vla-fleet buffer sample`: a batch as the trainer draws it, in numbers and pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.sampling.segment_index import on_side
from fleet.cli.__main__ import app
from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.overrides import Overrides
from fleet.config.recipes import get_recipe
from fleet.launch.learning import dataset_config
from fleet.tools import sample_batch
from fleet.tools.sample_batch import DrawnBatch, contact_sheet, draw_batches, render, summarize
from tests.cloud_learner.buffer.synthetic import fake_episode
from wire.errors import ConfigError, InvalidDataError
from wire.messages.gateway import ACTORS

RECIPE = get_recipe("fake")
ARM = get_recipe("state")
STEPS = 40


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """What a fleet of the recipe `fake` recorded: demonstrations, a snapshot, and corrections after it."""
    root = tmp_path / "data"
    directory = DataDirectory(root)
    directory.prepare(RunIdentity("fake", 0, RECIPE.spec.hash)).close()
    ledger, store = directory.buffer.open_writer()
    ledger.see_robot("r1", RECIPE.spec, "clock", 1)
    for number in range(8):
        source, actor = ("demonstration", "human") if number < 4 else ("online", "script")
        if number == 4:
            ledger.take_snapshot("demonstrations")
        task = RECIPE.tasks[number % len(RECIPE.tasks)]
        actors = [ACTORS.index(actor)] * STEPS
        segments = fake_episode(
            RECIPE.spec, f"e{number}", task=task, source=source, steps=STEPS, actor=actors, seed=number
        )
        store.append_all([(segment, 5) for segment in segments], 6)
    store.close()
    ledger.close()
    return root


def draw_batch(root: Path, **options) -> DrawnBatch:
    """As the fleet's own recipe does."""
    (drawn,), missing = draw_batches(root, {"": 1.0}, **options)
    assert not missing and (drawn.share, drawn.turns) == (1.0, 1)
    return drawn


def episodes(root: Path, **options) -> set[str]:
    """Ids of the episodes of a batch."""
    found = set(np.asarray(draw_batch(root, **options).batch["episode"]).tolist())
    with DataDirectory(root).open_buffer() as (ledger, _store):
        return {row.id for row in ledger.episodes() if row.number in found}


def test_it_is_the_first_batch_of_the_trainer(data: Path) -> None:
    drawn = draw_batch(data, seed=3)
    config = dataset_config(RECIPE, RECIPE.make_policy(RECIPE.spec, 3), 3)
    with (
        DataDirectory(data).open_buffer() as (ledger, store),
        ReplayDataset(ledger, store, RECIPE.spec, config) as dataset,
    ):
        dataset.refresh()
        batch = dataset.next()
    assert drawn.batch.keys() == batch.keys()
    for name in ("episode", "tick", "actions", "mask", "probability"):
        assert np.array_equal(np.asarray(drawn.batch[name]), np.asarray(batch[name])), name


def test_it_says_what_the_batch_holds(data: Path) -> None:
    drawn = draw_batch(data)
    found = summarize(drawn)
    assert found.recipe == "fake" and found.segments == 8 and found.steps == 8 * STEPS
    assert found.windows == np.asarray(drawn.batch["actor"]).size
    for shares, known in ((found.actors, {"human", "script"}), (found.tasks, set(RECIPE.tasks))):
        assert shares.keys() <= known and sum(shares.values()) == pytest.approx(1)
    assert found.actors["script"] == pytest.approx(found.online)
    assert found.outcomes == {"success": 1.0}
    mask, state = np.asarray(drawn.batch["mask"]), np.asarray(drawn.batch["state"])
    assert found.kept == pytest.approx(mask.mean()) and found.kept + found.padded == pytest.approx(1)
    assert found.terminated == pytest.approx(np.asarray(drawn.batch["terminated"]).any(-1).mean())
    array = found.arrays["state"]
    assert (array.shape, array.dtype) == (state.shape, "float32")
    assert (array.min, array.mean, array.max) == pytest.approx((state.min(), state.mean(), state.max()), abs=1e-5)
    camera = RECIPE.spec.cameras[0]
    assert found.arrays[f"images/{camera.name}"].shape[1:] == (camera.height, camera.width, 3)
    text = render(found)
    assert "as recipe 'fake' trains on them" in text and "outcomes: success 100%" in text
    assert "the mask keeps" in text and "terminate" in text and "versions on average" in text
    assert all(name in text for name in found.arrays)


def test_n_step_brings_what_follows(data: Path) -> None:
    drawn = draw_batch(data, n_step=5)
    found = summarize(drawn).arrays
    assert found["next_ticks"].max == 5 and "n_step_return" in found
    assert found["tick"].shape == (RECIPE.training.batch,), "one window behind each image"


def test_only_what_a_snapshot_holds_and_one_side_of_the_split(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RECIPE.make_policy(RECIPE.spec, 0)
    large = replace(RECIPE, training=replace(RECIPE.training, batch=200), make_policy=lambda _spec, _seed: policy)
    monkeypatch.setattr(sample_batch, "recipe_of", lambda _root: (large, Overrides()))
    names = {f"e{number}" for number in range(8)}
    assert episodes(data) == names
    assert episodes(data, snapshot="demonstrations") == {"e0", "e1", "e2", "e3"}
    held_out = {name for name in names if on_side(name, 0.5, True)}
    assert 0 < len(held_out) < 8
    assert episodes(data, validation=0.5, held_out=True) == held_out
    assert episodes(data, validation=0.5) == names - held_out
    holding_out = replace(large, validation=0.5)
    monkeypatch.setattr(sample_batch, "recipe_of", lambda _root: (holding_out, Overrides()))
    assert episodes(data, held_out=True) == held_out, "the recipe's share"
    assert episodes(data) == names - held_out
    assert episodes(data, validation=0.0) == names
    monkeypatch.setattr(sample_batch, "recipe_of", lambda _root: (large, Overrides()))
    with pytest.raises(InvalidDataError, match=r"no snapshot 'demonstration'.*Did you mean 'demonstrations'"):
        draw_batch(data, snapshot="demonstration")
    with pytest.raises(ConfigError, match="held_out needs the share"):
        draw_batch(data, held_out=True)
    with pytest.raises(ConfigError, match=r"no fleet has worked there.*--recipe NAME"):
        draw_batch(data.parent)


def test_a_contact_sheet_has_a_row_for_each_camera(data: Path) -> None:
    drawn = draw_batch(data)
    ((name, pictures),) = drawn.batch["images"].items()  # type: ignore[attr-defined]
    one = contact_sheet(drawn)
    assert one.dtype == np.uint8 and one.shape == (2 * (160 + 30), 8 * 160, 3), "16 square pictures, 8 a line"
    middle = cv2.resize(pictures[8], (160, 160), interpolation=cv2.INTER_AREA)[:, :, ::-1]
    assert np.array_equal(one[190 : 190 + 160, :160], middle)
    assert one[160:190, :160].any() and one[350:, -160:].any(), "captions"
    two = msgspec.structs.replace(drawn, batch={**drawn.batch, "images": {name: pictures, "hand": pictures}})
    assert contact_sheet(two).shape == (2 * (160 + 160 + 30), 8 * 160, 3)
    few = {key: value[:11] for key, value in drawn.batch.items() if key in ("task", "actor", "tick")}
    eleven = msgspec.structs.replace(drawn, batch={**few, "images": {name: pictures[:11]}})
    assert not contact_sheet(eleven)[190:, 3 * 160 :].any(), "nothing beside the last three"
    with pytest.raises(ConfigError, match="has no camera"):
        contact_sheet(msgspec.structs.replace(drawn, batch={**drawn.batch, "images": {}}))


def test_the_command(data: Path, tmp_path: Path) -> None:
    words = "--snapshot", "demonstrations", "--n-step", "3"
    done = sample(data, *words, "--json", "--pictures", str(tmp_path / "sheet.png"))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["actors"] == {"human": 1.0} and "next_state" in found["arrays"]
    assert cv2.imread(str(tmp_path / "sheet.png")).shape == (2 * 190, 8 * 160, 3)
    assert "actors: human 100%" in sample(data, *words).output


@pytest.fixture
def two_robots(data: Path) -> Path:
    """And what another kind of robot recorded, without a camera."""
    ledger, store = DataDirectory(data).buffer.open_writer()
    ledger.see_robot("r2", ARM.spec, "clock", 1)
    for number in range(2):
        for segment in fake_episode(
            ARM.spec, f"arm{number}", robot="r2", task=ARM.tasks[0], source="demonstration", steps=STEPS, seed=number
        ):
            store.append_all([(segment, 5)], 6)
    store.close()
    ledger.close()
    return data


def sample(root: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["buffer", "sample", "--data", str(root), *words])


def test_two_kinds_of_robots_have_their_shares_of_the_batches(two_robots: Path, tmp_path: Path) -> None:
    words = "--recipe", "fake=0.7", "--recipe", "state=0.3"
    done = sample(two_robots, *words, "--json", "--pictures", str(tmp_path / "sheet.png"))
    assert done.exit_code == 0, done.output
    fake, arm = json.loads(done.stdout)
    assert [(one["recipe"], one["turns"]) for one in (fake, arm)] == [("fake", 7), ("state", 3)]
    assert [fake["share"], arm["share"]] == pytest.approx([0.7, 0.3])
    assert (fake["segments"], arm["segments"]) == (8, 2)
    for found, recipe in ((fake, RECIPE), (arm, ARM)):
        assert found["arrays"]["state"]["shape"][-1] == recipe.spec.state_dim
        assert sum(name.startswith("images/") for name in found["arrays"]) == len(recipe.spec.cameras)
    assert RECIPE.spec.state_dim != ARM.spec.state_dim
    assert [path.name for path in tmp_path.glob("*.png")] == ["sheet-fake.png"], "the other has no camera"
    text = sample(two_robots, *words).stdout
    assert "70.0% of the batches, 7 of 10 drawn:" in text and "30.0% of the batches, 3 of 10 drawn:" in text
    assert "recipe 'fake' trains" in text and "recipe 'state' trains" in text


def test_a_small_share_is_shown_too(two_robots: Path) -> None:
    (often, seldom), _ = draw_batches(two_robots, {"fake": 1.0, "state": 0.001})
    assert (often.turns, seldom.turns) == (10, 0) and seldom.share == pytest.approx(0.001, rel=0.01)
    assert np.asarray(seldom.batch["state"]).shape[-1] == ARM.spec.state_dim


def test_a_recipe_without_data_gives_its_share_to_the_others_and_it_says_so(data: Path) -> None:
    done = sample(data, "--recipe", "fake", "--recipe", "state=3")
    assert done.exit_code == 0
    assert "recipe 'state' gives its share to the others: no segment of" in done.stderr
    assert "as recipe 'fake' trains" in done.stdout and "state' trains" not in done.stdout
    with pytest.raises(InvalidDataError, match=r"no step to learn from yet\. state: no segment of"):
        draw_batches(data, {"state": 1.0})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("fake", "stat=0.5"), "no recipe 'stat'. Did you mean 'state'"),
        (("fake=0", "state"), "must be positive"),
        (("fake=-1", "state"), "must be positive"),
        (("fake=nan", "state"), "must be positive"),
        (("fake=much",), "give a number"),
        (("fake", "fake=2"), "each name once"),
        (("=2", "fake"), "write NAME or NAME=SHARE"),
    ],
)
def test_recipes_and_shares_that_cannot_be_are_refused(data: Path, words: tuple[str, ...], says: str) -> None:
    done = sample(data, *(word for name in words for word in ("--recipe", name)))
    assert isinstance(done.exception, ConfigError)
    assert says in str(done.exception)
