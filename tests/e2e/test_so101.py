"""A bench with an SO-101: two arms of simulated servos, two cameras, one person, and the processes of a fleet.

A person teaches with the leader, the arm does it by itself, is corrected, and gets what was learned of that. lerobot's
own drivers talk to the servos' bytes, through the same command line as at a bench.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.test_processes import ROOT, Job, number, robot
from tests.e2e.test_small_fleet import Typist, human_rows
from tests.extras import needs
from tests.hal.drivers.lerobot.feetech_bus import FeetechBus, buses_elsewhere
from tests.hal.drivers.lerobot.so_arm import calibrated

pytestmark = [needs("lerobot"), pytest.mark.slow]

RECIPE = "tests.e2e.bench_recipe:bench"
MIDDLE, STEPS_PER_DEG = 2000, 4095 / 360


class Bench:
    """Both arms and the file that describes them."""

    def __init__(self, root: Path, follower: FeetechBus, leader: FeetechBus) -> None:
        self.follower, self.leader = follower, leader
        self.config = root / "bench.toml"
        arms = {
            "robot": calibrated(self.follower, root / "calibration"),
            "leader": calibrated(self.leader, root / "calibration", "leader") | {"engage": "always", "speed": 2.0},
        }
        lines = [f"[{arm}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in arms[arm].items()) for arm in arms]
        for camera in ("front", "wrist"):
            lines.append(f'[cameras.{camera}]\nkind = "pattern"\npicture = [32, 32]\nfps = 15\n')
        lines.append('[tasks]\nwave = "wave to the person"\n')
        lines.append("[episodes]\nseconds = 1.5\ndemonstrations = 1\n[rest_pose]\n")
        self.config.write_text("\n".join(lines))

    def lead(self, seconds: float, meanwhile: Callable[[], object]) -> None:
        """Move the leader's first two joints to and fro, as a hand would."""
        end = time.monotonic() + seconds
        while (t := time.monotonic()) < end:
            way = 20 * STEPS_PER_DEG * np.sin(2 * np.pi * t / 6)
            self.leader.move(1, round(MIDDLE + way))
            self.leader.move(2, round(MIDDLE - way))
            meanwhile()
            time.sleep(0.01)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with buses_elsewhere(2, position=MIDDLE) as (follower, leader):
        yield Bench(tmp_path, follower, leader)


class Person:
    """Somebody with the leader in one hand and the other one at a terminal."""

    def __init__(self, up: Job, bench: Bench) -> None:
        self.typist = Typist()
        self._next_look = 0.0
        words = ["teleop", "robot-0", "--recipe", RECIPE, "--config", str(bench.config), "--data", str(up.data.root)]
        terminal: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), self.typist.slave)
        command = [sys.executable, "-m", "fleet.cli", *words]
        self.process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **terminal)

    def press(self, key: str) -> None:
        self.typist.type(key, 0.02)

    def reads(self, text: str, times: int = 1, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while self.typist.look().count(text) < times:
            assert self.process.poll() is None and time.monotonic() < end, self.typist.seen[-3000:]
            time.sleep(0.05)

    def prepares_the_scene(self) -> None:
        """Say that the next episode may begin, if the arm waits for that."""
        if time.monotonic() > self._next_look and "scene is ready" in self.newest_line():
            self.press("n")
            self._next_look = time.monotonic() + 0.5

    def newest_line(self) -> str:
        return self.typist.look().rpartition("robot-0   ")[2]

    def until(self, words: str, seconds: float = 90) -> None:
        """Press Enter, and again whenever that brought something else: a busy machine may lose the lease meanwhile."""
        end = time.monotonic() + seconds
        while words not in self.newest_line():
            assert self.process.poll() is None and time.monotonic() < end, self.typist.seen[-2000:]
            self.press("\r")
            patience = time.monotonic() + 2.0
            while words not in self.newest_line() and time.monotonic() < patience:
                time.sleep(0.05)

    def drives(self, bench: Bench, least_s: float, seconds: float = 150) -> None:
        """Take over, lead until the arm was seen to follow, hand back, and say that it went well."""
        seen: list[tuple[int, int]] = []
        begun = time.monotonic()
        while True:
            self.until("DRIVING")
            bench.lead(2.0, lambda: self._looks_at(bench, seen))
            follower, leader = np.array(seen[-1000:]).T / STEPS_PER_DEG
            driven_s = time.monotonic() - begun
            if driven_s > least_s and np.ptp(follower) > 25 and np.corrcoef(follower, leader)[0, 1] > 0.7:
                break
            assert driven_s < seconds, f"the arm does not go where the leader is: {self.newest_line()}"
        self.until("enter: take over")
        self.press("v")

    def _looks_at(self, bench: Bench, seen: list[tuple[int, int]]) -> None:
        self.prepares_the_scene()
        seen.append((bench.follower.present(1), bench.leader.present(1)))

    def leave(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _acts(snapshot: dict[str, Any], person: Person, version: int = 1) -> bool:
    """Whether the policy moves the arm by `version` or a later one; the person sees to the scene meanwhile."""
    person.prepares_the_scene()
    now = robot(snapshot, "robot-0")
    return now.get("mode") == "policy" and now.get("version", 0) >= version


@pytest.mark.timeout(580)
def test_an_so101_is_taught_works_is_corrected_and_learns(bench: Bench, tmp_path: Path) -> None:
    up = Job(tmp_path / "fleet", "--config", str(bench.config), recipe=RECIPE, robots=1)
    person = None
    try:
        up.wait("the arm waits for a person", lambda s: robot(s, "robot-0").get("reason") == "no policy version yet")
        person = Person(up, bench)
        assert not number(up.snapshot())

        # recorded by teleoperation
        person.reads("robot-0 is yours.")
        person.drives(bench, 8.0)

        # trained, and run on the arm
        up.wait("a version of what was shown", lambda s: person.prepares_the_scene() or number(s) >= 1)
        acting = up.wait("the policy moves the arm", lambda s: _acts(s, person))
        assert robot(acting, "robot-0")["version"] >= 1
        shown = human_rows(up.data, 6)
        assert len(shown) > 90 and np.ptp(shown[:, 0]) > 25

        # corrected, and a later version is applied
        person.drives(bench, 4.0)
        # The end of an episode waits for a last word on it, which the next scene is.
        up.wait(
            "corrections are stored",
            lambda s: person.prepares_the_scene() or len(human_rows(up.data, 6)) > len(shown) + 50,
        )
        corrected = number(up.snapshot())
        later = up.wait("what was learned of it acts", lambda s: _acts(s, person, corrected + 2))
        assert robot(later, "robot-0")["interventions"] >= 1
        assert not up.pid("evaluator"), "nothing is evaluated without a simulator"
        person.press("q")
        assert person.process.wait(30) == 0
        assert up.stop(60) == 0, up.log.read_text()[-3000:]
    finally:
        if person is not None:
            person.leave()
        up.end()
    # The limit is 3 degrees a tick; a busy machine skips some, and the rows are of several episodes.
    assert np.abs(np.diff(human_rows(up.data, 6), axis=0)).max() < 30, "no jump"
