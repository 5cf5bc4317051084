"""`vla-fleet train`: from a buffer or a dataset to weights, interrupted, killed and resumed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloud_learner.training.checkpoints import checkpoint
from fleet.config.data_directory import DataDirectory
from fleet.config.recipes import fake
from fleet.launch.run_record import newest_record
from tests.command_line import vla_fleet

FAST = ("--recipe", "fake", "--set", "training.batch=4")


def steps(out: Path) -> int:
    found = checkpoint.load_newest(DataDirectory(out).training)
    return found.state.meta["gradient_steps"] if found is not None else 0


def test_it_writes_weights_that_the_policy_takes_and_says_how_they_were_made(fleet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = vla_fleet("train", *FAST, "--data", str(fleet), "--steps", "5", "--out", str(out), "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}/trained.safetensors: after 5 gradient steps, loss 0.")
    (events,) = (out / "curves").glob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes() and b"algorithm/gradient_norm" in events.read_bytes()
    recipe = fake()
    recipe.make_policy(recipe.spec, 0).load((out / "trained.safetensors").read_bytes(), 1)
    record = newest_record(DataDirectory(out))
    assert (record.command, record.seed, record.steps, record.data) == ("train", 3, 5, str(fleet))
    assert record.settings["training.batch"] == 4 and record.given == ["training.batch=4"]


def test_the_same_command_goes_on_and_more_steps_go_further(fleet: Path, tmp_path: Path) -> None:
    words = ("train", *FAST, "--data", str(fleet), "--out", str(tmp_path / "out"))
    assert vla_fleet(*words, "--steps", "2").returncode == 0
    done = vla_fleet(*words, "--steps", "4")
    assert "resumed at gradient step 2." in done.stderr and "after 4 gradient steps" in done.stdout
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2, "each start is noted"
    assert vla_fleet(*words, "--steps", "4").stdout.endswith("after 4 gradient steps.\n")


def test_it_begins_with_a_version_and_a_fleet_may_begin_with_its_weights(fleet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("train", *FAST, "--data", str(fleet), "--steps", "1", "--from", f"{fleet}:1", "--out", str(out))
    assert vla_fleet(*words).returncode == 0
    assert newest_record(DataDirectory(out)).start == f"{fleet}:1"
    refused = vla_fleet("up", "--recipe", "state", "--data", str(tmp_path / "other"), "--from", str(out / "nothing"))
    assert refused.returncode == 1 and "there is no" in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data", "{empty}"), "no fleet has recorded anything in {empty}"),
        (("--data", "{fleet}", "--snapshot", "never"), "never"),
        (("--data", "{fleet}", "--dataset", "{empty}"), "--dataset is trained on alone"),
        (("--data", "{fleet}", "--set", "training.pretrain_steps=0", "--steps", "0"), "say --steps N"),
        (("--data", "{fleet}", "--set", 'tasks=["fly"]', "--set", 'instructions={"fly": "fly"}'), "no step to learn"),
        (("--dataset", "{empty}"), "{empty}"),
        (("--data", "{fleet}", "--ray-address", "auto"), "--ray-address auto needs --ranks N, of 2 or more"),
        (("--data", "{fleet}", "--ranks", "3"), "3 ranks cannot share a batch of 16 evenly"),
        (("--data", "{fleet}", "--recipe", "shapes", "--ranks", "2"), "several shapes, which one rank trains"),
    ],
)
def test_what_it_cannot_do_is_said(words: tuple[str, ...], said: str, fleet: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    given = [word.replace("{empty}", str(empty)).replace("{fleet}", str(fleet)) for word in words]
    done = vla_fleet("train", "--recipe", "fake", "--out", str(tmp_path / "out"), "--steps", "3", *given)
    assert done.returncode == 1
    assert said.replace("{empty}", str(empty)) in done.stderr
    assert not (tmp_path / "out" / "trained.safetensors").exists()


def test_a_directory_belongs_to_one_recipe_and_one_training_at_a_time(fleet: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    words = ("train", *FAST, "--data", str(fleet), "--steps", "1", "--out", out)
    assert vla_fleet(*words).returncode == 0
    other = vla_fleet(*words, "--policy", "flow:small")
    assert other.returncode == 1 and f"{out} belongs to the recipe's own policy" in other.stderr
    with DataDirectory(tmp_path / "out").prepare(DataDirectory(tmp_path / "out").identity()):
        taken = vla_fleet(*words)
    assert taken.returncode == 1 and "is in use" in taken.stderr


@pytest.fixture(scope="module")
def begun(fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of one step, of which tests take copies."""
    out = tmp_path_factory.mktemp("begun") / "out"
    done = vla_fleet("train", *FAST, "--data", str(fleet), "--steps", "1", "--out", str(out), "--seed", "3")
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seed", "4"), "--seed 3 (now 4)"),
        ((), "--seed 3 (now 0)"),
        (("--seed", "3", "--data", "{copy}"), "--data {fleet} (now {copy})"),
        (("--seed", "3", "--snapshot", "then"), "--snapshot none (now then)"),
        (("--seed", "3", "--from", "{fleet}:1"), "--from none (now {fleet}:1)"),
        (("--seed", "3", "--dataset", "{copy}"), "--data {fleet} (now none), --dataset none (now {copy})"),
    ],
)
def test_what_was_begun_otherwise_is_not_gone_on_with(
    words: tuple[str, ...], said: str, begun: Path, fleet: Path, tmp_path: Path
) -> None:
    out, copy = shutil.copytree(begun, tmp_path / "out"), tmp_path / "copy"
    if "--data" in words:
        shutil.copytree(fleet, copy)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    given = [word.format(fleet=fleet, copy=copy) for word in words]
    if not {"--data", "--dataset"} & set(words):
        given += ["--data", str(fleet)]
    done = vla_fleet("train", *FAST, "--steps", "2", "--out", str(out), *given)
    assert done.returncode == 1
    assert f"{out} was begun with {said.format(fleet=fleet, copy=copy)}: " in done.stderr, done.stderr
    assert "say the same to go on, or choose another --out" in done.stderr
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_members_of_a_population_have_begun_too(begun: Path, fleet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name, place in (("runs", "runs"), ("training", "population/1/training"), ("fleet.json", "fleet.json")):
        (shutil.copytree if (begun / name).is_dir() else shutil.copy)(begun / name, out / place)
    done = vla_fleet("train", *FAST, "--data", str(fleet), "--steps", "1", "--out", str(out))
    assert done.returncode == 1 and "--seed 3 (now 0)" in done.stderr


def test_other_settings_go_on_and_are_said(
    begun: Path, fleet: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = shutil.copytree(begun, tmp_path / "out")
    words = ("train", "--recipe", "fake", "--data", str(fleet), "--out", str(out), "--seed", "3", "--set")
    with caplog.at_level(logging.INFO):
        assert vla_fleet(*words, "training.batch=4", "--steps", "1").returncode == 0
        assert "goes on" not in caplog.text, "the same command has nothing to say"
        assert vla_fleet(*words, "training.batch=8", "--steps", "2").returncode == 0
    said = [one for one in caplog.messages if "goes on" in one]
    assert said == [f"{out} goes on with other settings: steps 2 (was 1), training.batch 8 (was 4)."]


def test_nothing_was_begun_where_nothing_was_learned(fleet: Path, tmp_path: Path) -> None:
    words = ("train", *FAST, "--data", str(fleet), "--steps", "1", "--out", str(tmp_path / "out"))
    assert vla_fleet(*words, "--snapshot", "never").returncode == 1
    done = vla_fleet(*words)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_dataset_is_not_mixed_with_another(fleet: Path, tmp_path: Path) -> None:
    dataset, out = tmp_path / "dataset", tmp_path / "out"
    exported = ("buffer", "export-lerobot", str(dataset), "--data", str(fleet), "--recipe", "fake", "--no-video")
    assert vla_fleet(*exported).returncode == 0
    other = shutil.copytree(dataset, tmp_path / "other")
    words = ("train", *FAST, "--out", str(out), "--steps", "1", "--dataset")
    # a typing error takes nothing in, and nothing is held against the right word
    assert vla_fleet(*words, str(tmp_path / "nowhere")).returncode == 1
    assert vla_fleet(*words, str(dataset)).returncode == 0
    shutil.rmtree(DataDirectory(out).training)
    DataDirectory(out).trained.unlink()
    mixed = vla_fleet(*words, str(other))
    assert mixed.returncode == 1 and f"--dataset {dataset} (now {other})" in mixed.stderr


@pytest.mark.slow
def test_a_dataset_is_taken_in_once_and_trained_on(fleet: Path, tmp_path: Path) -> None:
    dataset, out = tmp_path / "dataset", tmp_path / "out"
    exported = ("buffer", "export-lerobot", str(dataset), "--data", str(fleet), "--recipe", "fake", "--no-video")
    assert vla_fleet(*exported).returncode == 0
    words = ("train", *FAST, "--dataset", str(dataset), "--out", str(out), "--steps")
    first, second = vla_fleet(*words, "2"), vla_fleet(*words, "3")
    assert first.returncode == second.returncode == 0, first.stderr
    assert "12 episodes taken in, 0 were there" in first.stderr
    assert "0 episodes taken in, 12 were there" in second.stderr
    assert "resumed at gradient step 2" in second.stderr
    assert newest_record(DataDirectory(out)).dataset == str(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_it_goes_on_from_its_checkpoint_and_interrupted_from_its_last_step(
    number: signal.Signals, fleet: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("train", *FAST, "--set", "checkpoint_every_s=0", "--data", str(fleet), "--out", str(out), "--steps")
    command = [sys.executable, "-m", "fleet.cli", *words, "1000000"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ)
    try:
        deadline = time.monotonic() + 120
        # by their names: what is in them is dropped while one looks
        while not any(int(one.name[:8]) >= 3 for one in DataDirectory(out).training.glob("0*-*")):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "said").read_text()
            time.sleep(0.05)
        process.send_signal(number)
        status = process.wait(60)
    finally:
        process.kill()
        process.wait()
    reached = steps(out)
    assert status == (0 if number == signal.SIGINT else -signal.SIGKILL)
    assert ("the same command goes on" in (tmp_path / "said").read_text()) == (number == signal.SIGINT)
    done = vla_fleet(*words, str(reached + 1))
    assert done.returncode == 0 and f"resumed at gradient step {reached}." in done.stderr
    assert f"after {reached + 1} gradient steps" in done.stdout
    once = tmp_path / "once"
    vla_fleet(*(str(once) if word == str(out) else word for word in words), str(reached + 1))
    made = [(place / "trained.safetensors").read_bytes() for place in (out, once)]
    assert made[0] == made[1], "as if it had never stopped"
