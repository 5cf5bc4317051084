"""Parts as children of this process: kept, ended, and what is said about them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fleet.config.overrides import Overrides
from fleet.launch.backend import LocalBackend, News, ProcessSpec, command
from fleet.launch.process_specs import ProcessSpecs

_BROKEN = ProcessSpec("robot-0", "edge", ("edge", "--recipe", "no-such-recipe", "--name", "robot-0"), give_up_after=0)


def _await(true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_robot_that_cannot_start_is_named_with_its_last_words_and_never_given_up(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, tmp_path / "logs", ("robot-0",))
    assert backend.robots() == {"robot-0": ""}
    said: list[str] = []
    backend.start(_BROKEN)
    try:
        _await(lambda: said.extend(backend.poll()) or backend.parts["robot-0"].starts > 1)
    finally:
        backend.stop(["robot-0", "nobody"], 5.0)
    state = backend.parts["robot-0"]
    assert not state.failed
    assert "there is no recipe 'no-such-recipe'" in state.fault
    assert (tmp_path / "logs" / "robot-0.log").exists()
    assert len(said) == 1, "once, though it died more than once"
    assert "robot-0" in said[0]
    assert "there is no recipe" in said[0]


def test_a_part_that_runs_once_and_ends_well_is_no_trouble(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, tmp_path / "logs", environment={"COLUMNS": "200"})
    backend.start(ProcessSpec("one", "demonstrator", ("demonstrate", "--help"), restart=False))
    said = []
    _await(lambda: said.extend(backend.poll()) or not backend.parts["one"].running)
    said += backend.poll()
    state = backend.parts["one"]
    assert (said, state.failed, state.fault, state.starts) == ([], "", "", 1)


def test_a_part_that_runs_once_and_fails_says_so(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, tmp_path / "logs")
    backend.start(ProcessSpec("one", "demonstrator", ("demonstrate", "--recipe", "no-such-recipe"), restart=False))
    _await(lambda: backend.poll() or backend.parts["one"].failed)
    assert "one ended with exit status 1: vla-fleet: there is no recipe" in backend.parts["one"].failed


def test_a_think_server_says_where_it_is(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, tmp_path / "logs")
    backend.start(ProcessSpec("thinker", "thinker", ("think-server", "--recipe", "no-such-recipe"), restart=False))
    backend.stop(["thinker"], 5.0)
    host, _, port = backend.parts["thinker"].address.removeprefix("tcp://").partition(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536


def test_each_place_adds_its_own_directories(tmp_path: Path) -> None:
    parts = ProcessSpecs("fake", "tcp://10.0.0.1:5760", 3, operator=False, overrides=Overrides(delay="4"))
    words = command(parts.make_edge("arm-1"), tmp_path, tmp_path / "keys")
    assert words[1:4] == ["-m", "fleet.cli", "edge"]
    for option, value in (
        ("--name", "arm-1"),
        ("--gateway", "tcp://10.0.0.1:5760"),
        ("--data", str(tmp_path)),
        ("--keys", str(tmp_path / "keys")),
        ("--delay", "4"),
    ):
        assert words[words.index(option) + 1] == value
    assert "--no-operator" in words
    gateway = command(parts.make_gateway("0.0.0.0", 1, "127.0.0.1", 2), tmp_path, tmp_path / "keys")
    assert "--keys" not in gateway
    assert parts.make_edge("arm-1").give_up_after == 0, "a robot is never given up"
    assert not parts.make_measurer("after", 7).restart


def test_the_same_news_is_told_once() -> None:
    news = News()
    told = [news.is_new("robot-0", "ill"), news.is_new("robot-0", "ill"), news.is_new("robot-1", "ill")]
    assert told == [True, False, True]
    assert news.is_new("robot-0", "worse")
