"""`vla-fleet eval` and `compare`: figures on held-out scenes, by themselves and against each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet.config.data_directory import DataDirectory
from fleet.config.recipes import fake
from fleet.config.settings import with_settings
from fleet.config.weights_source import read_version
from fleet.launch.run_record import keep_record, make_record
from tests.command_line import vla_fleet

SHORT = ("--set", "evaluator.max_ticks=8", "--episodes", "2")
STEERING = "tests.fleet.cli.offline.steering_recipe:steering"
TASKS = fake().tasks


def measured(*words: str, file: Path) -> dict:
    done = vla_fleet(*words, *SHORT, "--json", str(file))
    assert done.returncode == 0, done.stderr
    return {**json.loads(file.read_text()), "stdout": done.stdout}


def test_a_version_is_measured_on_held_out_seeds(fleet: Path, tmp_path: Path) -> None:
    found = measured("eval", str(fleet), "--version", "1", file=tmp_path / "found.json")
    assert (found["version"], found["recipe"]) == (1, "fake")
    assert {(one["task"], one["seed"]) for one in found["episodes"]} == {
        (task, seed) for task in TASKS for seed in (2_000_000, 2_000_001)
    }
    assert list(found["success"]) == [*TASKS, "all"]
    assert found["success"]["all"]["episodes"] == 8 and found["success"]["go-up"]["episodes"] == 2
    rows = [line.split() for line in found["stdout"].splitlines() if "go-up" in line]
    assert len(rows) == 1 and f"{found['success']['go-up']['share']:.2f}" in rows[0]


def test_every_way_to_the_same_weights_finds_the_same(fleet: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(read_version(fleet, 2)[1])
    ways = (
        (str(fleet), "--version", "newest"),
        (str(fleet), "--version", "current"),
        (f"{fleet}:2",),
        (str(file), "--recipe", "fake"),
    )
    found = [measured("eval", *way, file=tmp_path / f"{n}.json") for n, way in enumerate(ways)]
    assert len({one["sha256"] for one in found}) == 1
    assert all(one["episodes"] == found[0]["episodes"] for one in found)
    assert [one["version"] for one in found] == [2, 2, 2, 0]


def test_an_untrained_policy_needs_a_recipe(tmp_path: Path) -> None:
    found = measured("eval", "untrained", "--recipe", "fake", file=tmp_path / "found.json")
    assert (found["sha256"], found["success"]["all"]["episodes"]) == ("", 8)
    refused = vla_fleet("eval", "untrained")
    assert refused.returncode == 1 and "Give --recipe NAME" in refused.stderr


def test_success_and_its_steps_are_counted(tmp_path: Path) -> None:
    done = vla_fleet("eval", "untrained", "--recipe", STEERING, "--episodes", "4", "--json", str(tmp_path / "a.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    won = [one for one in found["episodes"] if one["success"]]
    every = found["success"]["all"]
    assert 0 < len(won) < 16 and (every["successes"], every["share"]) == (len(won), len(won) / 16)
    assert every["low"] < every["share"] < every["high"]
    assert every["steps"] == pytest.approx(sum(one["steps"] for one in won) / len(won))
    assert all(one["steps"] == 60 for one in found["episodes"] if not one["success"]), "they were given all the time"


def test_the_better_one_is_named_and_the_status_is_0_either_way(tmp_path: Path) -> None:
    still, steered = tmp_path / "still.safetensors", tmp_path / "steered.safetensors"
    still.write_bytes(b"still")
    steered.write_bytes(b"steered")
    said, found = {}, {}
    for name, pair in {"b": (still, steered), "a": (steered, still), "none": (still, still)}.items():
        words = ("compare", *map(str, pair), "--recipe", STEERING, "--episodes", "10")
        done = vla_fleet(*words, "--json", str(tmp_path / f"{name}.json"))
        assert done.returncode == 0, done.stderr
        said[name], found[name] = done.stdout, json.loads((tmp_path / f"{name}.json").read_text())
    won = found["a"]["A"]["success"]["all"]["successes"]
    assert won > 5
    assert f"A is better: {won} against 0 of the same 40 episodes succeed, A alone in {won}" in said["a"]
    assert f"B is better: 0 against {won} of the same 40 episodes" in said["b"]
    assert (
        "no difference shown: 0 against 0 of the same 40" in said["none"] and "p 1.000 (exact McNemar)" in said["none"]
    )
    every = found["a"]["all"]
    assert every["p"] == pytest.approx(2 / 2**won) and every["difference"] == won / 40
    assert {one["verdict"] for one in found["a"]["tasks"].values()} == {"no difference shown"}
    scenes = [[(one["task"], one["seed"]) for one in found["a"]["episodes"][name]] for name in "AB"]
    assert scenes[0] == scenes[1] and len(scenes[0]) == 40


def test_what_two_trainings_differ_in_is_said(fleet: Path, tmp_path: Path) -> None:
    homes = []
    for name, rate in (("a", "1e-3"), ("b", "2e-3")):
        home = DataDirectory(tmp_path / name)
        with home.prepare(DataDirectory(fleet).identity()):
            recipe = with_settings(fake(), [f"training.learning_rate={rate}"])
            keep_record(home, make_record("train", recipe, 0, None, []))
        home.trained.write_bytes(read_version(fleet, 1)[1])
        homes.append(str(home.root))
    found = measured("compare", *homes, file=tmp_path / "found.json")
    assert "  training.learning_rate: A 0.001, B 0.002" in found["stdout"]
    assert found["settings"] == [["training.learning_rate", 0.001, 0.002]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("eval", "{fleet}", "--json", "/nowhere/found.json"), "create it first"),
        (("eval", "{fleet}:7"), "there is no version 7 in {fleet}, which has 1 to 2"),
        (("eval", "{fleet}", "--version", "0"), "a version is a number from 1 on"),
        (("compare", "{fleet}:0", "{fleet}:2"), "{fleet}:0: a version is a number from 1 on"),
        (("eval", "{fleet}", "--policy", "flow:small"), "made by a network with"),
        (("eval", "{fleet}", "--set", "evaluator.final_first_seed=5"), "those of training and of demonstrations"),
        (("compare", "{fleet}", "untrained", "--episodes", "1", "--recipe", "fkae"), "Did you mean 'fake'"),
    ],
)
def test_what_it_cannot_do_is_said(words: tuple[str, ...], said: str, fleet: Path) -> None:
    done = vla_fleet(*(word.format(fleet=fleet) for word in words))
    assert done.returncode == 1 and said.format(fleet=fleet) in done.stderr, done.stderr
