"""How a trainer waits for the buffer that it is to read, and who drives no real robot."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from cloud_learner.gateway.stop_server import StopServer
from cloud_learner.training.status import TrainerCounts
from fleet.config.data_directory import DataDirectory
from fleet.config.process_options import (
    DemonstratorOptions,
    EvaluatorOptions,
    GatewayOptions,
    TrainerOptions,
    UpOptions,
)
from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from fleet.launch import builders, factories, learning
from fleet.launch.builders import run_demonstrator, run_evaluator, wait_for_buffer
from fleet.launch.up import Up
from hal.drivers.fake import FakeRobot
from hal.registry import register
from wire.errors import (
    ConfigError,
    CorruptDataError,
    FormatError,
    InvalidDataError,
    NothingStoredError,
    NotWritableError,
    StorageError,
)
from wire.transport.keys import GATEWAY, make_keys


def test_it_says_why_it_waits_once_and_goes_on_when_the_buffer_is_there(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    results = [NothingStoredError("no ledger."), *[StorageError("connection refused.")] * 2, "the trainer"]

    def make() -> str:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    assert wait_for_buffer(make, lambda: False) == "the trainer"
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the buffer: no ledger.",
        "waiting for the buffer: connection refused.",
        "waiting for the buffer: that is over.",
    ]


@pytest.mark.parametrize("kind", [FormatError, CorruptDataError, NotWritableError, ConfigError, InvalidDataError])
def test_what_waiting_does_not_mend_ends_it(kind: type[Exception]) -> None:
    def make() -> None:
        raise kind("it stays so.")

    with pytest.raises(kind, match="it stays so"):
        wait_for_buffer(make, lambda: False)


def test_it_ends_when_it_is_asked_to() -> None:
    asked = iter([False, True])

    def make() -> None:
        raise StorageError("away.")

    assert wait_for_buffer(make, lambda: next(asked)) is None


def test_a_trainer_shows_its_figures_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pages = []

    class Learning:
        """Ends with its first step."""

        learner = SimpleNamespace(gradient_steps=0)
        session = SimpleNamespace(raise_if_rejected=lambda: None)
        counts = TrainerCounts(version=7)
        stopping = False

        def start(self) -> None:
            pages.append(b"started")

        def step(self) -> bool:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                pages.append(answer.read())
            self.stopping = True
            return True

        def close(self) -> None:
            pages.append(b"closed")

    monkeypatch.setattr(builders, "gateway_channel", lambda options, name: contextlib.nullcontext())
    monkeypatch.setattr(learning, "make_trainer", lambda *args, **options: Learning())
    heard = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        builders.run_trainer(TrainerOptions(recipe="fake", metrics_port=port))
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)
    assert b"vla_fleet_trainer_policy_version 7.0" in pages[1]
    assert pages[::2] == [b"started", b"closed"]


def test_a_gateway_that_is_started_while_its_database_is_away_waits_and_hears_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = DataDirectory(tmp_path)
    make_keys(data.keys, [GATEWAY])
    tried: list[bool] = []

    def make(*_: object, stops: StopServer, secret: bytes) -> object:
        tried.append(stops._thread is not None and stops._thread.is_alive())
        if len(tried) < 3:
            raise StorageError("connection refused.")
        raise ConfigError("that is enough.")

    monkeypatch.setattr(factories, "make_gateway", make)
    heard = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(ConfigError, match="that is enough"):
            builders.run_gateway(GatewayOptions(data=tmp_path, recipe="fake", port=0, web_port=0, canary=0.2))
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)
    assert tried == [True] * 3
    assert caplog.text.count("connection refused") == 1


class RealRobot(FakeRobot):
    real = True

    def connect(self) -> None:
        raise AssertionError("nobody may touch it")


def real_recipe(seed: int = 0) -> Recipe:
    """With all limits, and nothing said of people."""
    register("real-fake", RealRobot)
    return replace(fake(seed), name="bench", robot="real-fake")


@pytest.mark.parametrize(
    "run",
    [
        lambda data, recipe: run_evaluator(EvaluatorOptions(recipe=recipe, data=data)),
        lambda data, recipe: run_demonstrator(DemonstratorOptions(recipe=recipe, data=data)),
        lambda data, recipe: Up(UpOptions(recipe=recipe, data=data, headless=True)).run(),
    ],
)
def test_a_real_robot_is_driven_by_its_edge_alone(run: Callable[[Path, str], None], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the real robot 'real-fake' as fast.*`unpaced_config`.*vla-fleet edge"):
        run(tmp_path / "data", "tests.fleet.launch.test_builders:real_recipe")
    assert not (tmp_path / "data").exists()
