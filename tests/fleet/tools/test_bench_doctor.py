"""`vla-fleet doctor --config` on a bench of simulated servos: what is right, what is wrong, and limits by hand."""

from __future__ import annotations

import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fleet.cli import doctor
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe
from fleet.tools.bench_doctor import examine_bench, limits_tables, measure_by_hand
from hal.safety.limits import SafetyLimits
from tests.extras import needs
from tests.hal.drivers.lerobot.feetech_bus import OFFSET, TEMPERATURE, VOLTAGE, FeetechBus
from tests.hal.drivers.lerobot.so_arm import be_patient, calibrated
from wire.clock import MonotonicClock

pytestmark = [needs("lerobot"), pytest.mark.slow]

MIDDLE, STEP_DEG = 2000, 360 / 4095


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def arms() -> Iterator[tuple[FeetechBus, FeetechBus]]:
    with FeetechBus(position=MIDDLE) as follower, FeetechBus(position=MIDDLE) as leader:
        yield follower, leader


def bench(arms: tuple[FeetechBus, FeetechBus], root: Path, camera: str = "") -> Recipe:
    lines = ['[tasks]\nwave = "wave"\n', f'[cameras.front]\nkind = "pattern"\nfps = 20\npicture = [32, 32]\n{camera}\n']
    for table, name, bus in (("robot", "arm", arms[0]), ("leader", "leader", arms[1])):
        fields = calibrated(bus, root, name)
        lines.append(f"[{table}]\n" + "".join(f'{key} = "{value}"\n' for key, value in fields.items()))
    config = root / "bench.toml"
    config.write_text("\n".join(lines))
    return get_recipe("so101", config=config)


def test_a_sound_bench_passes_without_torque(arms: tuple[FeetechBus, FeetechBus], tmp_path: Path) -> None:
    steps: list[str] = []
    report = examine_bench(bench(arms, tmp_path), 1.0, steps.append)
    assert report.passed, str(report)
    assert steps == ["robot", "limits", "leader", "leader match", "camera front"]
    for words in (
        f"ok   so101_follower port {arms[0].port}",
        "ok   so101_leader motors and calibration",
        "lowest voltage (shoulder_pan) 7.4 V",
        "temperature (shoulder_pan) 31 degrees C",
        "ok   camera front rate",
        "ok   leader match",
    ):
        assert words in str(report)
    assert [servo.wakings for bus in arms for servo in bus.servos.values()] == [0] * 12


def test_what_is_wrong_is_named_and_the_rest_is_still_examined(
    arms: tuple[FeetechBus, FeetechBus], tmp_path: Path
) -> None:
    recipe = bench(arms, tmp_path, "config = { unplugged_after = 1, back_after_s = 60.0, stall_timeout_s = 0.3 }")
    arms[0].servos[2].put(OFFSET, 7)
    arms[1].servos[4].put(TEMPERATURE, 66, 1)
    arms[1].servos[3].put(VOLTAGE, 39, 1)
    report = examine_bench(recipe, 1.0, lambda name: None)
    assert not report.passed
    for words in (
        "FAIL so101_follower motors and calibration: so101_follower: its motors hold another calibration",
        "shoulder_lift: homing offset 7 instead of 0",
        "FAIL so101_leader lowest voltage (elbow_flex) 3.9 V",
        "FAIL so101_leader temperature (wrist_flex) 66 degrees C",
        "FAIL camera front",
    ):
        assert words in str(report), str(report)


def test_a_port_that_is_not_there_ends_with_status_1_and_says_which_there_are(
    arms: tuple[FeetechBus, FeetechBus], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = bench(arms, tmp_path)
    assert recipe.config is not None
    recipe.config.write_text(recipe.config.read_text().replace(arms[1].port, "/dev/ttyACM77"))
    import typer

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(doctor.doctor)
    words = ["--recipe", "so101", "--config", str(recipe.config), "--no-move", "--seconds", "0.5"]
    status = app(words, standalone_mode=False)
    said = capsys.readouterr().out
    assert status == 1 and "there is no serial port /dev/ttyACM77. There are: " in said
    assert "ok   camera front rate" in said


def test_limits_are_measured_by_hand_with_the_torque_off(arms: tuple[FeetechBus, FeetechBus], tmp_path: Path) -> None:
    recipe, over = bench(arms, tmp_path), threading.Event()

    def hand() -> None:
        begun = time.monotonic()
        while not over.wait(0.005):
            arms[0].move(1, round(MIDDLE + 30 * np.sin(np.pi * (time.monotonic() - begun)) / STEP_DEG))

    moving = threading.Thread(target=hand)
    moving.start()
    try:
        found = measure_by_hand(recipe, 4.0, MonotonicClock())
    finally:
        over.set()
        moving.join()
    assert set(found.velocity) == {"shoulder_pan.pos"}, "nothing else was moved"
    # The hand may be late by a scheduler's whim, never slower than it was.
    assert 0.8 * 30 * np.pi * 0.7 < found.velocity["shoulder_pan.pos"] < 0.8 * 30 * np.pi * 3
    assert not any(arms[0].torque(number) for number in range(1, 7))


def test_proposals_are_a_part_of_the_benchs_file() -> None:
    text = limits_tables(SafetyLimits({"elbow_flex.pos": 70.5}, {"elbow_flex.pos": 300.0}, {"elbow_flex.pos": 600.0}))
    assert tomllib.loads(text) == {
        "limits": {
            "velocity": {"elbow_flex": 70.5},
            "acceleration": {"elbow_flex": 300.0},
            "stop_deceleration": {"elbow_flex": 600.0},
        }
    }
