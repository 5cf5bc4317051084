"""Stops the robots of this computer by their hosts' stop lines: past gateway, uplink and control.

Imports little: whoever runs it is in a hurry.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hal.driver_host.stop_line import ANSWER_S, StopOrder, send_order
from hal.safety.stop_latch import MORE, StopLatch
from robot_edge.runtime.robot_host import STOP_FILE, announced_hosts
from wire.errors import ConfigError, RejectedError, RobotError, suggest
from wire.stop_state import StopState, new_stop_id

WHO = "cli"
"""who stops a robot by this command"""
ALL = "all"


class LocalRobot(msgspec.Struct, frozen=True):
    """A robot whose edge runs on this computer, or has run."""

    home: Path
    """its own directory"""
    hosts: tuple[Path, ...] = ()
    """sockets where its host may listen: those of killed edges may be left"""

    @property
    def name(self) -> str:
        return self.home.name

    def give_order(self, order: StopOrder) -> StopState:
        """What follows from `order`. Raises `RobotError` when no host answers in time."""
        problem = RobotError(f"no edge of robot '{self.name}' runs on this computer.")
        for host in self.hosts:
            try:
                return send_order(host, order, ANSWER_S)
            except RobotError as error:
                problem = error
        raise problem

    def keep_stop(self, stop: str) -> Path:
        """Have a host that is started later start stopped; where that is noted. Raises `RobotError` if it is not."""
        file = self.home / STOP_FILE
        latch = StopLatch(file)
        latch.stop(stop, WHO)
        latch.save()
        if stop not in StopLatch(file).state.stops:
            raise RobotError(f"the stop could not be noted in {file} either.")
        return file


def robots_here(name: str, data: Path) -> list[LocalRobot]:
    """Those that run here, or the one called `name`, which may have run here on data below `data`.

    Raises `ConfigError` when there is none.
    """
    running: dict[Path, list[Path]] = defaultdict(list)
    for home, host in announced_hosts():
        running[home].append(host)
    found = [LocalRobot(home, tuple(hosts)) for home, hosts in running.items() if name in ("", home.name)]
    if not found and name:
        homes = [*data.glob("edges/*"), *data.glob("*/edges/*")]
        found = [LocalRobot(home.resolve()) for home in homes if home.name == name]
        known = {home.name for home in (*homes, *running)}
        if not found:
            raise ConfigError(
                f"no robot '{name}' runs on this computer, and none did on data below {data}.{suggest(name, known)} "
                "If it moves, cut its power."
            )
    if not found:
        raise ConfigError(
            "no robot's edge runs on this computer for this user. Name a robot and its --data to have it start "
            "stopped. If a robot moves, cut its power."
        )
    return sorted(found, key=lambda robot: robot.home)


def stop_robots(robots: list[LocalRobot], say: Callable[[str], None]) -> int:
    """Stop all of `robots` at once; the exit status."""
    stop = new_stop_id(WHO)

    def one(robot: LocalRobot) -> tuple[bool, str]:
        begun_s = time.monotonic()
        try:
            state = robot.give_order(StopOrder("stop", stop, WHO))
        except RobotError as error:
            return False, f"{robot.name}: NOT STOPPED: {error} {_kept(robot, stop)} IF IT MOVES, CUT ITS POWER."
        took_ms = 1e3 * (time.monotonic() - begun_s)
        return True, (
            f"{robot.name}: {state}; answered in {took_ms:.0f} ms. When all is clear: vla-fleet stop {robot.name} "
            f"--release {stop}, then vla-fleet stop {robot.name} --start"
        )

    return _each(robots, one, say)


def release_robots(robots: list[LocalRobot], stop: str, say: Callable[[str], None]) -> int:
    """Take back one stop of `robots`, or `ALL`; the exit status."""

    def one(robot: LocalRobot) -> tuple[bool, str]:
        state = robot.give_order(StopOrder("ask"))
        every = sorted(state.stops, key=lambda each: each == MORE)
        for each in every if stop == ALL else {stop} & state.stops.keys():
            state = robot.give_order(StopOrder("release", each, WHO))
            if each in state.stops:
                why = "the others are not" if each == MORE else "what made it is pressed, open or not there"
                return False, f"{robot.name}: {state}; {each} cannot be released while {why}"
        return True, f"{robot.name}: {state}"

    if stop != ALL:
        states = {robot.name: robot.give_order(StopOrder("ask")) for robot in robots}
        if not any(stop in state.stops for state in states.values()):
            raise RejectedError(f"nobody has made a stop '{stop}': {_listed(states.items())}.")
    return _each(robots, one, say)


def start_robots(robots: list[LocalRobot], say: Callable[[str], None]) -> int:
    """Let `robots` whose stops are all released move again; the exit status."""

    def one(robot: LocalRobot) -> tuple[bool, str]:
        before = robot.give_order(StopOrder("ask"))
        if not before.ready:
            return not before.stops, f"{robot.name}: {before}{'; not started' if before.stops else ''}"
        after = robot.give_order(StopOrder("start", before.last, WHO))
        return after.free, f"{robot.name}: {'started' if after.free else after}"

    return _each(robots, one, say)


def _each(robots: list[LocalRobot], one: Callable[[LocalRobot], tuple[bool, str]], say: Callable[[str], None]) -> int:
    """Do it to all at once, for one that does not answer must keep nobody waiting."""

    def guarded(robot: LocalRobot) -> tuple[bool, str]:
        try:
            return one(robot)
        except RobotError as error:
            return False, f"{robot.name}: {error}"

    good = True
    with ThreadPoolExecutor(len(robots)) as threads:
        for fine, text in threads.map(guarded, robots):
            say(text)
            good &= fine
    return 0 if good else 1


def _kept(robot: LocalRobot, stop: str) -> str:
    try:
        return f"Its host starts stopped, by {robot.keep_stop(stop)}."
    except RobotError as error:
        return str(error)


def _listed(states: Iterable[tuple[str, StopState]]) -> str:
    return "; ".join(f"{name} is {state}" for name, state in states)
