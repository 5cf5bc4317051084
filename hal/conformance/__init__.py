"""The `Robot` contract as checks that run on any driver, in its own tests or at the bench: `check_robot`.

For authors of drivers and for `vla-fleet doctor`. It moves the robot.
"""

from __future__ import annotations

from collections.abc import Callable

from hal.conformance.measure import measure
from hal.conformance.report import CheckOutcome, ConformanceReport, Figure
from hal.conformance.rules import Rules, run_rules
from hal.interfaces.robot import Robot
from wire.clock import Clock, MonotonicClock

__all__ = ["CheckOutcome", "ConformanceReport", "Figure", "check_robot"]


def check_robot(
    make: Callable[[], Robot],
    task: str,
    ticks: int = 24,
    seeded: bool = True,
    clock: Clock | None = None,
    *,
    measure_s: float = 0.0,
    move: bool = True,
    gentle: bool = False,
    notify: Callable[[str], None] = lambda name: None,
) -> ConformanceReport:
    """Run every check on robots from `make`, each on a robot of its own.

    `print(check_robot(lambda: MyRobot(config), "task"))` says what came of it. It connects, resets and moves the robot
    over half of its limits: clear the workspace first.

    `ticks`: control periods of a run; `seeded`: False for a real robot, whose scene no seed can rebuild; `clock`: the
    robot's (default: this computer's). `measure_s`: also measure rates, latencies and the way to a standstill over so
    many seconds; `move`: False connects and does no more; `gentle`: swing a little about the pose the robot stands in
    and never command a limit; `notify` is called with the name of each check before it runs.
    """
    rules = Rules(make, task, ticks, seeded, clock or MonotonicClock(), move, gentle)
    checks = list(run_rules(make, rules.rules(), notify))
    figures: tuple[Figure, ...] = ()
    if measure_s and move:
        notify("figures")
        try:
            figures = measure(rules, measure_s)
        except Exception as error:  # noqa: BLE001 - as in `run_rules`
            checks.append(CheckOutcome("figures", False, f"raised {type(error).__name__}: {error}"))
    return ConformanceReport(tuple(checks), figures)
