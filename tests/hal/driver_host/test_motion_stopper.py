"""A stop by the driver's own way that failed, or did not end what moves, is tried again; nobody waits for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hal.driver_host import motion_stopper
from hal.driver_host.motion_stopper import MotionStopper
from hal.driver_host.proxy import RobotProxy
from hal.driver_host.server import run_driver_server
from hal.driver_host.stop_line import StopOrder, send_order
from hal.interfaces.robot import Feedback
from hal.safety.limited_robot import LimitedRobot
from tests.hal.driver_host.test_proxy import place  # noqa: F401
from wire.errors import RobotError, RobotStoppedError
from wire.types import Dimension, Observation, RobotSpec

SPEC = RobotSpec("arm", (Dimension("j", "deg", -90, 90),), (Dimension("j", "deg", -90, 90),), (), 50)
LONG_S = 30.0


class Arm:
    """Its reset moves it until `answers`, what `stop_motion` does from its second call on, has stopped it."""

    def __init__(self, *answers: Callable[[Arm], None]) -> None:
        self.spec, self.answers, self.calls = SPEC, list(answers), 0
        self.resets, self.halted, self.free = threading.Event(), threading.Event(), threading.Event()

    def connect(self) -> None: ...

    def reset(self, task: str, seed: int) -> None:
        self.resets.set()
        assert self.halted.wait(LONG_S), "it moved on"

    def read(self) -> Observation:
        return Observation(time.monotonic_ns(), np.zeros(1, np.float32), {}, "t")

    def write(self, action: np.ndarray) -> Feedback:
        return Feedback(action)

    def stop_motion(self) -> None:
        self.calls += 1
        # The first one comes from whoever connects it.
        if self.calls > 1 and self.answers:
            self.answers.pop(0)(self)

    def close(self) -> None: ...


def fails(arm: Arm) -> None:
    raise RobotError("its bus is taken by another call")


def halts(arm: Arm) -> None:
    arm.halted.set()


def takes_long(arm: Arm) -> None:
    assert arm.free.wait(LONG_S)


def nothing(arm: Arm) -> None: ...


@contextlib.contextmanager
def hosted(arm: Arm, path: Path) -> Iterator[RobotProxy]:
    over = threading.Event()
    host = threading.Thread(target=run_driver_server, args=(arm, path, over.is_set))
    host.start()
    robot = RobotProxy(SPEC, path, attach_s=60.0)
    try:
        robot.connect()
        yield robot
    finally:
        arm.halted.set()
        arm.free.set()
        with contextlib.suppress(RobotError):
            robot.close()
        over.set()
        host.join(60)
        assert not host.is_alive()


@pytest.mark.parametrize("first", [(fails,), (fails, fails, fails), (nothing, fails), (nothing, nothing)])
def test_a_reset_is_stopped_though_the_first_tries_fail_or_do_not_end_it(
    place: Path,  # noqa: F811
    first: tuple[Callable[[Arm], None], ...],
) -> None:
    arm = Arm(*first, halts)
    with hosted(arm, place) as robot:
        refused: list[RobotError] = []

        def reset() -> None:
            with pytest.raises(RobotStoppedError, match="was stopped while it reset") as error:
                robot.reset("t", 0)
            refused.append(error.value)

        control = threading.Thread(target=reset)
        control.start()
        assert arm.resets.wait(LONG_S)
        assert send_order(place, StopOrder("stop", "a", "anna"), LONG_S).stops == {"a": "anna"}
        control.join(LONG_S)
        assert refused, "one press, and nobody pressed again"
        assert arm.calls == 1 + len(first) + 1


def test_nobody_who_stops_it_waits_for_its_driver(place: Path) -> None:  # noqa: F811
    arm = Arm(takes_long)
    with hosted(arm, place):
        assert send_order(place, StopOrder("stop", "a", "anna"), LONG_S).stops == {"a": "anna"}
        # The driver is still at the first.
        assert send_order(place, StopOrder("stop", "b", "ben"), LONG_S).stops == {"a": "anna", "b": "ben"}
        assert not arm.free.is_set()


def test_without_a_host_each_new_press_tries_again() -> None:
    arm = Arm(fails, fails, halts)
    robot = LimitedRobot(arm)
    robot.connect()
    for press in ("a", "b", "b", "c"):
        robot.stop(press, "anna")
    assert arm.calls == 1 + 3 and arm.halted.is_set()


def test_it_rests_when_it_is_done_and_while_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(motion_stopper, "_AGAIN_S", 0.001)
    wanted, tried = True, threading.Semaphore(0)

    def note(fail: bool) -> Callable[[Arm], None]:
        def answer(arm: Arm) -> None:
            tried.release()
            if fail:
                raise RobotError("busy")

        return answer

    arm = Arm(*[note(True)] * 3, note(False), note(True), *[nothing] * 9)
    robot = LimitedRobot(arm)
    robot.connect()
    stopper = MotionStopper(robot, lambda: wanted)
    stopper.start()
    stopper.ask()
    for _ in range(4):
        assert tried.acquire(timeout=LONG_S)
    time.sleep(0.05)
    assert arm.calls == 1 + 4, "the last one was taken"
    wanted = False
    stopper.ask()
    assert tried.acquire(timeout=LONG_S)
    time.sleep(0.05)
    assert arm.calls == 1 + 5, "it failed, but is released by now"
    stopper.close()
    stopper.close()
