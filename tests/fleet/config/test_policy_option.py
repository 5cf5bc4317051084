"""`--policy`: what it changes in a recipe, which parts it reaches, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet.cli.__main__ import app
from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.overrides import Overrides
from fleet.config.process_options import EdgeOptions, EvaluatorOptions, TrainerOptions, UpOptions
from fleet.config.recipes import get_recipe
from fleet.launch import robot_builders
from fleet.launch.process_specs import ProcessSpecs
from fleet.launch.robot_builders import edge_processes
from fleet.launch.up import Up
from fleet.tools.policy_process import _last_word, build_policy, try_policy
from hal.drivers.fake import FakeRobot
from policies.conformance.check import PolicyCheck
from policies.interface import registry
from policies.interface.policy import Policy
from policies.interface.registry import POLICIES, PolicyChoice, PolicyDefaults
from tests.fleet.tools import echo_kind
from wire.errors import ConfigError, FleetError, PolicyError
from wire.transport.keys import GATEWAY, make_keys

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"


def test_a_policy_is_on_a_graphics_card_where_that_was_asked_for() -> None:
    def asked(**runtime: str) -> bool:
        return Overrides(policy="flow:small", policy_config=json.dumps({"runtime": runtime})).uses_gpu

    assert asked(device="cuda") and asked(device="cuda:1")
    assert not (asked() or asked(device="cpu") or Overrides().uses_gpu or Overrides(policy="flow:small").uses_gpu)


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("echo", "tests.fleet.tools.echo_kind", POLICIES)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    monkeypatch.setattr(echo_kind, "DEFAULTS", PolicyDefaults())


def set_defaults(monkeypatch: pytest.MonkeyPatch, **defaults: Any) -> None:
    monkeypatch.setattr(echo_kind, "DEFAULTS", PolicyDefaults(**defaults))


def options(data: Path, **changes: object) -> UpOptions:
    given = UpOptions(
        recipe="fake",
        robots="1",
        minutes=None,
        data=data,
        seed=0,
        headless=True,
        report=None,
        port=0,
        web_port=0,
        web_host="127.0.0.1",
        operator=True,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def test_a_policy_without_defaults_leaves_the_job_as_it_is() -> None:
    recipe = get_recipe("fake")
    tuned = Overrides(policy="echo:small").applied(recipe)
    assert replace(tuned, make_policy=recipe.make_policy) == recipe
    assert tuned.make_policy(recipe.spec, 3).horizon == 16


def test_defaults_change_algorithm_and_pace_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {
        "batch": 3,
        "ticks_per_frame": 1,
        "learning_rate": 1e-5,
        "weight_decay": 0.0,
        "gradient_clip": 2.0,
    }
    given |= {"ema_decay": 0.5, "shift_px": 0, "pretrain_steps": 0, "publish_every_s": 60.0}
    set_defaults(monkeypatch, horizon=16, think_every_s=3.0, demonstrations=0, **given)
    recipe = get_recipe("pixels")
    tuned = Overrides(policy="echo:small").applied(recipe)
    assert tuned.training == replace(recipe.training, **given)
    assert tuned.slow.every_s == 3.0
    assert tuned.slow.max_age_s > 3.0, "a latent serves until the next one is there"
    assert tuned.chunking == recipe.chunking
    assert (recipe.demonstrations, tuned.demonstrations) == (3, 0)


@pytest.mark.parametrize(("horizon", "speed_up", "ticks"), [(16, 0, 8), (8, 0, 4), (9, 0, 8), (16, 2, 4), (2, 0, 1)])
def test_chunks_are_replaced_before_they_end(
    horizon: int, speed_up: int, ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_defaults(monkeypatch, horizon=horizon)
    recipe = get_recipe("fake")
    assert recipe.chunking.execute_ticks == 8
    assert Overrides(speed_up=speed_up, policy="echo:small").applied(recipe).chunking.execute_ticks == ticks


def test_chunks_of_one_action_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_defaults(monkeypatch, horizon=3)
    with pytest.raises(ConfigError, match=r"gives 3 actions at a time at speed-up 2.*longer chunks"):
        Overrides(speed_up=2, policy="echo:small").applied(get_recipe("fake"))


def test_a_short_policy_that_did_not_say_so_is_refused_when_it_is_made() -> None:
    recipe = Overrides(policy="echo:small", policy_config='{"horizon": 8}').applied(get_recipe("fake"))
    with pytest.raises(ConfigError, match=r"'echo:small' gives 8 actions at a time.*after 8 ticks"):
        recipe.make_policy(recipe.spec, 0)


def test_flags_mean_the_same_in_every_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "c.json").write_text('{"horizon": 12}')
    monkeypatch.chdir(tmp_path)
    overrides = Overrides(strategy="naive", policy="echo:run", policy_config="c.json")
    options = TrainerOptions(overrides=overrides).arguments()
    assert options[-4:] == ["--policy", f"echo:{tmp_path / 'run'}", "--policy-config", '{"horizon": 12}']
    assert EvaluatorOptions(overrides=overrides).arguments()[-6:] == ["--strategy", "naive", *options[-4:]]
    again = Overrides(policy=options[-3], policy_config=options[-1])
    assert again.choice() == overrides.choice()


def test_whoever_runs_or_trains_the_policy_is_told_and_nobody_else() -> None:
    overrides = Overrides(delay="4", policy="echo:small", policy_config='{"horizon": 12}')
    parts = ProcessSpecs("fake", "tcp://10.0.0.1:5760", 3, operator=True, overrides=overrides)
    told = [parts.make_trainer(), parts.make_evaluator(), parts.make_measurer("after", 3), parts.make_thinker()]
    for part in (*told, parts.make_edge("robot-0")):
        assert part.argv[part.argv.index("--policy") + 1] == "echo:small", part.name
        assert json.loads(part.argv[part.argv.index("--policy-config") + 1]) == {"horizon": 12}
    for part in (parts.make_gateway("", 1, "", 2), parts.make_demonstrator(3)):
        assert "--policy" not in part.argv
    assert "--delay" not in parts.make_trainer().argv


def test_an_edge_tells_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys(tmp_path / "keys", [GATEWAY, "robot-0"])
    options = EdgeOptions(recipe="fake", data=tmp_path, gateway="tcp://x:1", operator=False)
    edge = edge_processes(replace(options, overrides=Overrides(policy="echo:small")))
    assert set(edge._commands) == {"robot", "control", "inference", "shadow", "uplink"}
    for command in edge._commands.values():
        assert command[command.index("--policy") + 1] == "echo:small"
        assert "--cpu-control" not in command
        assert command[command.index("--reset-by") + 1] == "robot"
    core = min(os.sched_getaffinity(0))
    pinned = edge_processes(replace(options, cpu_control=core))
    assert all(command[command.index("--cpu-control") + 1] == str(core) for command in pinned._commands.values())
    with pytest.raises(ConfigError, match="--cpu-driver 4095: this process may run on cores"):
        edge_processes(replace(options, cpu_driver=4095))
    with monkeypatch.context() as real:
        real.setattr(FakeRobot, "real", True, raising=False)
        real.setattr(robot_builders, "require_limits", lambda robot, limits: None)
        told = edge_processes(options)._commands["control"]
        assert told[told.index("--reset-by") + 1] == "person"
    with pytest.raises(ConfigError, match="nothing in it fits robot 'fake-point'"):
        edge_processes(replace(options, overrides=Overrides(policy="echo:broken")))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"policy": "ecko:small"}, "Did you mean 'echo'"),
        ({"policy": "echo:broken"}, "nothing in it fits robot 'fake-point'"),
        ({"policy": "echo:small", "policy_config": "{"}, "--policy-config: not JSON"),
        ({"policy": "echo:small", "policy_config": "[]"}, "--policy-config must be an object"),
        ({"policy": "echo:small", "policy_config": "no.json"}, "--policy-config no.json: No such file"),
        ({"policy_config": "{}"}, "--policy-config needs --policy"),
    ],
)
def test_a_policy_that_cannot_be_is_said_before_anything_is_there(
    overrides: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        Up(options(tmp_path / "d", overrides=Overrides(**overrides)))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ({}, None),
        ({"horizon": 8}, {"horizon": 8}),
        (
            {"horizon": 8, "runtime": {"device": "cuda:1", "compile": True, "dtype": "bfloat16"}},
            {"horizon": 8, "runtime": {"device": "cpu", "compile": False, "dtype": "bfloat16"}},
        ),
    ],
)
def test_a_shadow_leaves_graphics_cards_alone(given: dict[str, object], config: dict[str, object] | None) -> None:
    overrides = Overrides(policy="echo:/a/run", policy_config=json.dumps(given) if given else "", speed_up=2)
    choice = overrides.on_cpu().choice()
    assert choice == PolicyChoice("echo", "/a/run", config or {}) and overrides.on_cpu().speed_up == 2
    assert Overrides().on_cpu() == Overrides()


def test_one_policy_for_ever(tmp_path: Path) -> None:
    data, spec = DataDirectory(tmp_path / "d"), get_recipe("fake").spec
    one = RunIdentity("fake", 0, spec.hash, PolicyChoice("echo", "/a/run", {"horizon": 8}))
    with data.prepare(one):
        pass
    faster = PolicyChoice("echo", "/a/run", {"horizon": 8, "runtime": {"int8": True}})
    with data.prepare(replace_policy(one, faster)):
        pass
    with pytest.raises(ConfigError, match="belongs to --policy echo:/a/run --policy-config"):
        data.prepare(replace_policy(one, PolicyChoice("echo", "/a/run")))
    with pytest.raises(ConfigError, match=r"not to the recipe's own policy \(no --policy\)"):
        data.prepare(replace_policy(one, None))


def test_a_directory_from_before_there_was_a_choice_goes_on(tmp_path: Path) -> None:
    spec = get_recipe("fake").spec
    (tmp_path / "fleet.json").write_text(json.dumps({"recipe": "fake", "seed": 0, "spec_hash": spec.hash}))
    with DataDirectory(tmp_path).prepare(RunIdentity("fake", 0, spec.hash)):
        pass
    with pytest.raises(ConfigError, match="not to --policy echo:small"):
        DataDirectory(tmp_path).prepare(RunIdentity("fake", 0, spec.hash, PolicyChoice("echo", "small")))


def replace_policy(identity: RunIdentity, policy: PolicyChoice | None) -> RunIdentity:
    return RunIdentity(identity.recipe, identity.seed, identity.spec_hash, policy)


def test_a_recipe_with_a_directory_for_a_policy_builds_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    up = Up(options(tmp_path, recipe="vla"))
    assert up._builds
    said: list[str] = []
    up.parts = ProcessSpecs("vla", "tcp://127.0.0.1:5760", 0, operator=True, overrides=up.overrides)
    up.dashboard = type("Screen", (), {"say": lambda self, text: said.append(text)})()
    monkeypatch.setattr(registry, "_BUILT_IN", (EntryPoint("lerobot", "tests.fleet.tools.echo_kind", POLICIES),))
    up.data.policy.mkdir()
    up._build_policy()
    assert said == [], "it is there"
    words = up.parts.make_trainer().argv
    assert words[words.index("--policy") + 1] == f"lerobot:{tmp_path / 'policy'}"
    assert not up._builds


def test_a_part_of_such_a_recipe_wants_to_be_told() -> None:
    with pytest.raises(ConfigError, match="--policy lerobot:DATA/policy"):
        Overrides().applied(get_recipe("vla"))


@pytest.mark.slow
def test_a_build_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path)
    with pytest.raises(FleetError, match="there is no recipe"):
        build_policy("smolvla", data, "no-such-recipe", 0, lambda: False)
    assert not data.policy.exists()


def test_a_build_is_ended_with_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **kept: started.append(popen(*given, **kept)) or started[0])

    def ends() -> None:
        assert started[0].poll() is None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_policy("smolvla", DataDirectory(tmp_path), "fake", 0, ends)
    assert started[0].returncode not in (None, 0)
    assert not DataDirectory(tmp_path).policy.exists()


@pytest.mark.parametrize(("detail", "status", "words"), [("", 0, "2 checks, all passed"), ("it moves", 1, "1 failed")])
def test_the_check_prints_every_promise_and_its_status_says_whether_all_are_kept(
    detail: str, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checks(make: Callable[[], Policy]) -> list[PolicyCheck]:
        return [PolicyCheck(f"{make().horizon} actions", True), PolicyCheck("it rests", not detail, detail)]

    monkeypatch.setattr("policies.conformance.check.check_policy", checks)
    done = CliRunner().invoke(app, ["policy", "check", "--recipe", "fake", "--policy", "echo:small"])
    assert done.exit_code == status
    assert "ok      16 actions" in done.output
    assert words in done.output
    assert ("FAILED  it rests: it moves" in done.output) == bool(detail)


def test_show_tells_what_a_policy_costs() -> None:
    words = ["policy", "show", "--recipe", "fake", "--policy", "echo:small", "--rounds", "2"]
    shown = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    policy = echo_kind.make("", {}, get_recipe("fake").spec, 0)
    assert shown["parameters"] == shown["trained_parameters"] == sum(p.numel() for p in policy.module.parameters())
    assert shown["version_bytes"] == len(policy.save())
    assert (shown["horizon"], shown["horizon_s"], shown["latent_shape"]) == (16, 0.2, [policy.module.slow.width])
    assert 0 < shown["act_ms"] < 60_000
    assert f"{shown['parameters']:,}" in CliRunner().invoke(app, words).stdout


@pytest.mark.parametrize("command", ["up", "edge"])
@pytest.mark.slow
def test_a_policy_is_tried_before_anything_starts(command: str, tmp_path: Path) -> None:
    """Files do not show which parameters there are."""
    data = tmp_path / "d"
    words = [command, "--recipe", "fake", "--data", str(data), "--policy", "flow:small"]
    words += ["--policy-config", '{"training": {"freeze": ["no.such.*"]}}']
    if command == "edge":
        make_keys(tmp_path / "keys", [GATEWAY, "robot-0"])
        words += ["--keys", str(tmp_path / "keys")]
    done = subprocess.run(
        [sys.executable, "-m", "fleet.cli", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    trying, error = done.stderr.splitlines()
    assert trying == "trying the policy flow:small …"
    assert error.startswith("vla-fleet: ")
    assert "no.such.*" in error
    assert not data.exists(), "the directory may still be given to another policy"


@pytest.mark.slow
def test_a_policy_that_the_algorithm_cannot_use_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(EXAMPLES), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.syspath_prepend(EXAMPLES)
    words = ["up", "--recipe", "own_policy:regression", "--data", str(tmp_path / "d")]
    words += ["--algorithm", "own_algorithm:FilteredImitation"]
    done = subprocess.run(
        [sys.executable, "-m", "fleet.cli", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    trying, error = done.stderr.splitlines()
    assert trying == "trying the policy of recipe 'own_policy:regression' with own_algorithm:FilteredImitation …"
    assert "needs a policy that says its imitation loss sample by sample" in error
    assert not (tmp_path / "d").exists()


def test_a_trial_ends_when_somebody_asks(capfd: pytest.CaptureFixture[str]) -> None:
    assert not try_policy("fake", Overrides(policy="echo:small"), 0, lambda: True)
    assert "trying the policy echo:small" in capfd.readouterr().err


def test_whatever_a_policy_raises_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(place: str, config: dict[str, Any], spec: object, seed: int) -> None:
        raise RuntimeError("no room on the device")

    words = ["policy", "try", "--recipe", "fake", "--policy", "echo:small"]
    assert CliRunner().invoke(app, words).exit_code == 0
    monkeypatch.setattr(echo_kind, "make", broken)
    with pytest.raises(PolicyError, match="policy echo:small cannot be made: RuntimeError: no room on the device"):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ("a warning\nvla-fleet: flow policy: no\n  such thing.\n", 1, "flow policy: no such thing."),
        ("vla-fleet: vla-fleet: is here.\n", 1, "vla-fleet: is here."),
        (
            "Traceback\nOSError: full\n",
            1,
            "its process ended with exit status 1: OSError: full.",
        ),
        ("", -9, "its process ended with signal 9."),
    ],
)
def test_the_last_word_of_a_trial(said: str, status: int, words: str) -> None:
    assert _last_word(said, status, "p").removeprefix("policy 'p' cannot be made: ") == words


def test_the_command_line_itself_loads_no_torch() -> None:
    code = "import sys, fleet.cli.__main__, fleet.config.overrides; print(*{'torch', 'lerobot'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []
