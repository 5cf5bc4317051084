"""The options of a process come back from the command line they were turned into, whatever they say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_learner.rollout.config import RolloutConfig
from fleet.cli.options import command
from fleet.config.overrides import Overrides
from fleet.config.process_options import (
    POLICY,
    DemonstratorOptions,
    EdgeOptions,
    EvaluatorOptions,
    GatewayOptions,
    ProcessOptions,
    ThinkServerOptions,
    TrainerOptions,
    UpOptions,
)
from fleet.config.recipes import get_recipe
from robot_edge.control.config import EpisodeRules
from wire.errors import ConfigError

KINDS = (
    GatewayOptions,
    TrainerOptions,
    EvaluatorOptions,
    DemonstratorOptions,
    ThinkServerOptions,
    EdgeOptions,
    UpOptions,
)
TEXT = st.text("ab -=ü/'\"{}", max_size=6)
VALUES = {
    str: TEXT,
    int: st.integers(1, 64),
    bool: st.booleans(),
    float: st.floats(0, 9),
    Path: st.text("ab/", min_size=1).map(Path),
}


def parsed(kind: type[ProcessOptions], words: list[str]) -> ProcessOptions:
    app, found = typer.Typer(pretty_exceptions_enable=False), []
    command(app, kind, name="it")(found.append)
    app(words, standalone_mode=False)
    return found[0]


def _value(default: Any, name: str) -> st.SearchStrategy[Any]:
    if name == "measure_at":
        return st.lists(st.floats(0, 9), max_size=3)
    if isinstance(default, list):
        return st.lists(TEXT, max_size=3)
    if default is None:
        kinds = {"robots": int, "minutes": float, "stop_port": int, "cpu_control": int, "cpu_driver": int}
        return VALUES[kinds.get(name, Path)]
    return VALUES[type(default)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_they_come_back_as_they_went(kind: type[ProcessOptions], data: st.DataObject) -> None:
    changed: dict[str, Any] = {}
    for one in dataclasses.fields(kind):
        default = getattr(kind(), one.name)
        if not isinstance(default, Overrides) and data.draw(st.booleans()):
            changed[one.name] = data.draw(_value(default, one.name))
    if any(one.name == "overrides" for one in dataclasses.fields(kind)):
        taken = {"delay": "4", "speed_up": 2} if kind in (EvaluatorOptions, EdgeOptions, UpOptions) else {}
        changed["overrides"] = Overrides(**taken)
    options = kind(**changed)
    assert parsed(kind, options.arguments()) == options


def test_a_process_takes_only_the_overrides_that_concern_it() -> None:
    overrides = Overrides(delay="4", robot="fake", policy="flow:small")
    told = TrainerOptions(overrides=overrides).arguments()
    assert [word for word in told if word.startswith("--")] == ["--name", "--recipe", "--gateway", "--policy"]
    assert "--robot" not in EvaluatorOptions(overrides=overrides).arguments()
    assert "--robot" in EdgeOptions(overrides=overrides).arguments()
    rules = EdgeOptions(overrides=Overrides(reset_by="person", reset_time_s=60.0, episode_time_s=30.0))
    assert rules.arguments()[-6:] == ["--reset-by", "person", "--reset-time-s", "60.0", "--episode-time-s", "30.0"]
    assert parsed(EdgeOptions, rules.arguments()) == rules
    loop = rules.overrides.applied(get_recipe("fake")).loop
    assert loop.episodes == EpisodeRules(reset_by_person=True, reset_s=60.0, max_s=30.0)
    for wrong in ({"reset_by": "dog"}, {"reset_time_s": -1.0}, {"episode_time_s": float("inf")}):
        with pytest.raises(ConfigError):
            Overrides(**wrong)
    assert {f"--{name.replace('_', '-')}" for name in POLICY} & set(told) == {"--policy"}
    with pytest.raises(Exception, match="No such option"):
        parsed(TrainerOptions, ["--delay", "4"])


def test_what_tells_processes_apart_comes_first() -> None:
    assert EdgeOptions(name="arm", data=Path("d")).arguments()[:4] == ["--data", "d", "--name", "arm"]


def test_canary_and_gate_are_what_was_asked_for_and_else_the_recipes() -> None:
    usual = RolloutConfig(canary=0.1, gate_success=0.3, keep=5)
    assert GatewayOptions(recipe="fake").rollout(usual) == usual
    asked = GatewayOptions(recipe="fake", canary=0.5, gate_success=0.1).rollout(usual)
    assert asked == RolloutConfig(canary=0.5, gate_success=0.1, keep=5)
    with pytest.raises(ConfigError, match="gate_success is 2"):
        UpOptions(recipe="fake", gate_success=2.0).check()
