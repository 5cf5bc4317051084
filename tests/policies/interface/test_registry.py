"""Policies by name: what is parsed, what is refused and in which words, and that nothing heavy is loaded for it."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from policies.interface import registry
from policies.interface.registry import (
    POLICIES,
    PolicyChoice,
    PolicyDefaults,
    defaults,
    make_policy,
    parse_policy,
    same_network,
)
from tests.samples import spec
from wire.errors import ConfigError, PolicyError, SpecMismatchError
from wire.types import RobotSpec


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """`echo`, whose `made` keeps what it was asked for, and some that are broken."""
    from policies.flow.factory import state_network
    from policies.flow.policy import FlowPolicy

    echo: Any = types.ModuleType("echo_kind")
    echo.made = []

    def make(name_or_path: str, config: dict[str, Any], robot: RobotSpec, seed: int) -> FlowPolicy:
        echo.made.append((name_or_path, config, seed))
        return FlowPolicy(robot, state_network(robot), seed)

    echo.make, echo.defaults = make, lambda name_or_path, config, robot: PolicyDefaults(horizon=16, batch=len(config))
    half: Any = types.ModuleType("half_kind")
    half.make = make
    monkeypatch.setitem(sys.modules, "echo_kind", echo)
    monkeypatch.setitem(sys.modules, "half_kind", half)
    points = [
        EntryPoint("echo", "echo_kind", POLICIES),
        EntryPoint("half", "half_kind", POLICIES),
        EntryPoint("gone", "no_such_module", POLICIES),
        EntryPoint("flow", "echo_kind", POLICIES),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    yield echo


def test_a_choice_is_a_kind_a_name_and_a_configuration(kinds: Any) -> None:
    assert parse_policy("echo:small", '{"a": 1}') == PolicyChoice("echo", "small", {"a": 1})
    assert str(parse_policy("echo:owner/name:v2")) == "echo:owner/name:v2"
    assert str(parse_policy("echo")) == "echo"
    with pytest.raises(ConfigError, match=r"Known: .*echo.*flow.*lerobot.*tokens"):
        parse_policy("unheard-of:small")


def test_a_path_that_is_there_means_the_same_everywhere(
    kinds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_policy("echo:run").name_or_path == str(tmp_path / "run")
    assert parse_policy("echo:owner/name").name_or_path == "owner/name"
    kinds.absolute = lambda place: f"<{place}>"
    assert parse_policy("echo:run").name_or_path == "<run>"


def test_a_configured_path_that_is_there_means_the_same_everywhere(
    kinds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    text = '{"vlm": "models", "word": "models", "gone": "nowhere"}'
    assert parse_policy("echo:small", text).config["vlm"] == "models", "it was not said to be a path"
    kinds.PATHS = ("vlm", "gone", "left out")
    found = parse_policy("echo:small", text).config
    assert found == {"vlm": str(tmp_path / "models"), "word": "models", "gone": "nowhere"}


@pytest.mark.parametrize(
    ("text", "config", "words"),
    [
        ("ecko:small", "", "Did you mean 'echo'"),
        ("", "", "Known: "),
        ("echo:small", "{", "configuration of policy 'echo:small': not JSON"),
        ("echo:small", "[1]", "must be an object of its fields, not a list"),
    ],
)
def test_what_cannot_be_meant_is_refused(kinds: Any, text: str, config: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_policy(text, config)


@pytest.mark.parametrize(("kind", "words"), [("gone", "no_such_module"), ("half", "has no defaults")])
def test_a_broken_kind_is_named_with_its_owner(kinds: Any, kind: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        parse_policy(f"{kind}:x")


def test_a_package_cannot_take_the_place_of_a_kind_that_is_built_in(kinds: Any) -> None:
    found = registry._found()
    assert found["flow"].value == "policies.flow.factory"


def test_a_policy_is_made_for_a_robot_with_its_seed(kinds: Any) -> None:
    robot = spec(camera=False)
    choice = parse_policy("echo:small", '{"a": 1}')
    policy = make_policy(choice, robot, 7)
    assert policy.spec == robot
    assert kinds.made == [("small", {"a": 1}, 7)]
    assert choice.config == {"a": 1}, "a choice is not changed"
    assert defaults(choice, robot) == PolicyDefaults(horizon=16, batch=1)


def test_a_policy_for_another_robot_is_refused(kinds: Any) -> None:
    made = kinds.make
    kinds.make = lambda place, config, other, seed: made(place, config, spec(camera=False, control_hz=10.0), seed)
    with pytest.raises(SpecMismatchError, match="policy 'echo:small' was made for another robot"):
        make_policy(parse_policy("echo:small"), spec(camera=False), 0)


@pytest.mark.parametrize(
    ("library", "text", "words"),
    [
        ("tokenizers", "tokens:fast", r"needs the library tokenizers.*'vla-fleet\[vlm\]'"),
        ("scipy", "tokens:residual_vq", r"needs the library scipy.*'vla-fleet\[vlm\]'"),
        (
            "transformers",
            "echo:transformers",
            r"needs the library transformers.*'vla-fleet\[vlm\]'",
        ),
        ("lerobot", "echo:lerobot", r"needs the library lerobot.*'vla-fleet\[lerobot\]'"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_the_extra_that_brings_it(
    library: str, text: str, words: str, kinds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    kinds.make = lambda name_or_path, config, robot, seed: importlib.import_module(name_or_path)
    with pytest.raises(ConfigError, match=words):
        make_policy(parse_policy(text), spec(camera=False), 0)


def test_a_library_that_nobody_knows_is_left_to_its_kind(kinds: Any) -> None:
    kinds.make = lambda name_or_path, config, robot, seed: importlib.import_module(name_or_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        make_policy(parse_policy("echo:no_such_library"), spec(camera=False), 0)


def test_where_a_policy_runs_does_not_make_it_another_network() -> None:
    one = PolicyChoice("echo", "small", {"horizon": 8})
    there = PolicyChoice("echo", "small", {"horizon": 8, "runtime": {"device": "cuda"}})
    assert same_network(one, there)
    assert not same_network(one, PolicyChoice("echo", "small", {"horizon": 16}))
    assert not same_network(one, PolicyChoice("echo", "large", {"horizon": 8}))
    assert not same_network(one, None)
    assert same_network(None, None)
