"""Curves: what is written can be read, goes on after a kill, and never stops a trainer."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tensorboardX")

from tensorboardX.proto.event_pb2 import Event

from cloud_learner.training.reporting.run_log import RunLog
from cloud_learner.training.status import TrainerCounts
from wire.messages.gateway import TrainerStatus


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def counts(step: int, loss: float) -> TrainerCounts:
    status = TrainerStatus(step, loss, 20.0, 100, 3, "online", 1.0, 0, "", 0, 0)
    return TrainerCounts(
        status=status, metrics={"loss": loss, "value": 2 * loss}, batch_wait_s=1.0, gradient_step_s=3.0
    )


def events(directory: Path) -> Iterator[Event]:
    """Of all event files, as TensorBoard reads them: a length, its checksum, the event, its checksum."""
    for path in sorted(directory.glob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def points(directory: Path, name: str) -> list[tuple[int, float]]:
    return [
        (event.step, round(value.simple_value, 4))
        for event in events(directory)
        for value in event.summary.value
        if value.tag == name
    ]


def test_each_gradient_step_that_was_reported_is_a_point_of_each_curve(tmp_path: Path) -> None:
    log = RunLog.open(tmp_path, "run", 0, {})
    for step, loss in ((10, 0.5), (10, 0.4), (20, 0.25)):
        log.poll(counts(step, loss))
    log.close()
    assert points(tmp_path, "loss") == [(10, 0.5), (20, 0.25)]
    assert points(tmp_path, "algorithm/value") == [(10, 1.0), (20, 0.5)]
    assert points(tmp_path, "time/share_waiting_for_batches") == [(10, 0.25), (20, 0.25)]


def test_after_a_kill_what_was_written_behind_the_checkpoint_is_not_shown(tmp_path: Path) -> None:
    first = RunLog.open(tmp_path, "run", 0, {})
    first.poll(counts(30, 0.5))
    first.close()
    again = RunLog.open(tmp_path, "run", 20, {})
    again.poll(counts(25, 0.3))
    again.close()
    # TensorBoard drops what it knows from that step on
    assert [event.step for event in events(tmp_path) if event.session_log.status == event.session_log.START] == [20]


def test_a_directory_that_cannot_be_written_is_said_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "curves").write_text("a file")
    with caplog.at_level(logging.WARNING):
        log = RunLog.open(tmp_path / "curves", "run", 0, {})
    log.poll(counts(1, 1.0))
    log.close()
    assert "no curves there" in caplog.text


def test_a_writer_that_fails_is_given_up_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def write(self, step: int, values: object) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise AssertionError("it was given up")

    class Kept:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def write(self, step: int, values: object) -> None:
            self.steps.append(step)

        def close(self) -> None:
            self.steps.append(-1)

    kept = Kept()
    log = RunLog([Failing(), kept])
    for step in (1, 2):
        log.poll(counts(step, 1.0))
    log.close()
    assert kept.steps == [1, 2, -1] and caplog.text.count("disk full") == 1


@pytest.mark.slow
def test_weights_and_biases_gets_them_where_it_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = RunLog.open(tmp_path, "run", 0, {"learning_rate": 1e-3})
    log.poll(counts(10, 0.5))
    log.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert (tmp_path / "wandb-run").read_text() in run.name
    deadline = time.monotonic() + 30
    # its own process writes it
    while b"learning_rate" not in next(run.glob("*.wandb")).read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)
