"""The command line: one clear error, the nearest name, nothing half-written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.recipes import RECIPES, get_recipe
from tests.command_line import vla_fleet
from wire.errors import ConfigError, CorruptDataError, DiskFullError
from wire.transport.keys import make_keys

ROOT = Path(__file__).resolve().parents[3]


def test_help_names_the_commands() -> None:
    command = [sys.executable, "-m", "fleet.cli", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True).stdout
    for name in ("up", "gateway", "trainer", "evaluator", "edge", "keys", "recipes", "demonstrate", "plot"):
        assert name in shown
    assert "edge-part" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--recipe", "pixls"), "Did you mean 'pixels'?"),
        (("up", "--robot", "2"), "--robots"),
        (("upp",), "No such command 'upp'"),
        (("up", "--robots", "0"), "'0' is no number of robots from 1"),
        (("up", "--recipe", "nowhere:make"), "PYTHONPATH"),
        (("up", "--recipe", "os:getcwd"), "recipe 'os:getcwd'"),
        (("up", "--recipe", "so101"), "needs --config FILE.toml"),
        (("edge", "--recipe", "so101"), "needs --config FILE.toml"),
        (("edge", "--name", "robot-0", "--keys", "/nonexistent"), "vla-fleet keys robot-0"),
        (("edge", "--name", "../evil"), "cannot be a name"),
        (("plot", "nothing.json", "a.png"), "reading the report"),
        (("up", "--policy", "flwo:small"), "Did you mean 'flow'?"),
        (("up", "--policy", "flow:smal"), "Did you mean 'small'?"),
        (("up", "--recipe", "state", "--policy", "tokens:fats"), "Did you mean 'fast'?"),
        (("up", "--policy", "lerobot:/nonexistent"), "there is no directory /nonexistent"),
        (("up", "--policy", "flow:small", "--policy-config", '{"horizn": 8}'), "Did you mean 'horizon'?"),
        (("up", "--policy-config", "{}"), "--policy-config needs --policy"),
        (("policy", "show", "--policy", "flow:smal"), "Did you mean 'small'?"),
    ],
)
def test_mistakes_are_answered_in_one_clear_line(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = vla_fleet(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert words in done.stderr


def test_a_mistake_is_one_object_where_logs_are_json(tmp_path: Path) -> None:
    words = ["edge", "--name", "robot-0", "--keys", "/nonexistent", "--data", str(tmp_path)]
    environment = {**os.environ, "VLA_FLEET_LOG_FORMAT": "json"}
    command = [sys.executable, "-m", "fleet.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert done.returncode == 1
    assert (line["process"], line["robot"], line["level"]) == ("edge", "robot-0", "CRITICAL")
    assert "vla-fleet keys robot-0" in line["message"]


def test_a_port_for_figures_that_is_taken_is_named(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["gateway", "robot-0"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = vla_fleet("edge", "--recipe", "fake", "--data", str(tmp_path), "--metrics-port", str(port))
    assert done.returncode == 1
    assert f"metrics: port {port} on 127.0.0.1 is used by another program" in done.stderr


def test_an_unknown_task_gets_the_nearest(tmp_path: Path) -> None:
    robot = get_recipe("fake")
    from hal.registry import make_robot

    made = make_robot(robot.robot, robot.robot_config)
    made.connect()
    with pytest.raises(ConfigError, match="Did you mean 'go-left'"):
        made.reset("go-leff", 0)


def up(*options: str) -> subprocess.CompletedProcess[str]:
    return vla_fleet("up", "--recipe", "fake", *options)


@pytest.mark.parametrize("option", ["--port", "--web-port"])
def test_a_port_in_use_starts_nothing(option: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        other = "--web-port" if option == "--port" else "--port"
        done = vla_fleet(
            "up", "--recipe", "fake", "--data", str(tmp_path / "d"), option, port, other, "0", "--headless"
        )
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert option in done.stderr
    assert not (tmp_path / "d" / "ledger.sqlite").exists()


def test_a_data_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = vla_fleet(
        "up", "--recipe", "fake", "--data", str(tmp_path / "file" / "below"), "--port", "0", "--web-port", "0"
    )
    assert done.returncode == 1
    assert "opening the data directory" in done.stderr


def test_a_report_without_a_directory_is_said_before_anything_starts(tmp_path: Path) -> None:
    done = vla_fleet(
        "up", "--recipe", "fake", "--data", str(tmp_path / "d"), "--report", str(tmp_path / "no" / "r.json")
    )
    assert done.returncode == 1
    assert "its directory does not exist" in done.stderr
    assert not (tmp_path / "d").exists()


def identity(recipe: str = "pixels") -> RunIdentity:
    return RunIdentity(recipe, 0, get_recipe(recipe).spec.hash)


def test_one_fleet_at_a_time_and_one_recipe_for_ever(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path / "d")
    with data.prepare(identity()), pytest.raises(ConfigError, match="in use by another running fleet"):
        data.prepare(identity())
    with data.prepare(identity()):
        pass
    with pytest.raises(ConfigError, match="belongs to recipe 'pixels'"):
        data.prepare(identity("state"))


def test_a_damaged_identity_says_so(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text("{")
    with pytest.raises(CorruptDataError, match=r"fleet\.json"):
        DataDirectory(tmp_path).prepare(identity())


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr("fleet.config.data_directory.shutil.disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError, match="1 MB free"):
        DataDirectory(tmp_path / "d").prepare(identity())
    assert not (tmp_path / "d" / "fleet.json").exists()


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_is_complete(name: str) -> None:
    config = ROOT / "docs" / "examples" / "bench.toml"
    recipe = get_recipe(name, config=config if name == "so101" else None)
    assert recipe.name == name
    assert set(recipe.instructions) == set(recipe.tasks)
    if recipe.tiny:
        with pytest.raises(ConfigError, match="--policy lerobot:DATA/policy"):
            recipe.make_policy(recipe.spec, 0)
        return
    policy = recipe.make_policy(recipe.spec, 0)
    assert policy.horizon > recipe.chunking.execute_ticks
    assert policy.spec.hash == recipe.spec.hash


def test_keys_are_made_once(tmp_path: Path) -> None:
    make_keys(tmp_path, ["gateway", "robot-0"])
    before = (tmp_path / "robot-0.key_secret").read_bytes()
    done = vla_fleet("keys", "robot-0", "robot-1", "--keys", str(tmp_path))
    assert done.returncode == 0
    assert (tmp_path / "robot-0.key_secret").read_bytes() == before
    assert (tmp_path / "public" / "robot-1.key").exists()


def test_a_report_can_be_drawn(tmp_path: Path) -> None:
    report = {
        "recipe": "pixels",
        "machine": "a machine",
        "success_before": 0.3,
        "success_after": 0.9,
        "evaluation_episodes_per_task": 25,
        "success_curve": [
            {"time_s": 60.0 * n, "version": n, "mean": n / 10, "success": {"a": n / 10, "b": n / 10}} for n in range(5)
        ],
    }
    (tmp_path / "r.json").write_text(json.dumps(report))
    done = vla_fleet("plot", str(tmp_path / "r.json"), str(tmp_path / "curve.png"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    (tmp_path / "bad.json").write_text("[]")
    assert "is no report" in vla_fleet("plot", str(tmp_path / "bad.json"), str(tmp_path / "c.png")).stderr
