"""How quick a robot is, and how soon it stands still: measured at its own rate, with its own motion."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from hal.conformance.report import Figure
from hal.conformance.rules import Rules
from hal.interfaces.robot import Robot
from hal.safety.limiter import hold_action
from hal.safety.rest import rest_action
from wire.clock import Clock
from wire.types import Observation, RobotSpec

_REST_TICKS = 10
_STILL_TICKS = 3
_STOP_S = 2.0
"""a robot that was told to hold must stand within so long"""


def measure(rules: Rules, seconds: float) -> tuple[Figure, ...]:
    """Drive a robot for `seconds` of the rules' clock with their small swing and then tell it to hold."""
    with closing(rules.make()) as robot:
        began_ns = rules.clock.now_ns()
        robot.connect()
        connected_ns = rules.clock.now_ns()
        robot.reset(rules.task, 0)
        figures = [
            Figure("connect", (connected_ns - began_ns) / 1e9, "s"),
            Figure("reset", (rules.clock.now_ns() - connected_ns) / 1e9, "s"),
        ]
        run = _TimedRun(robot, rules.clock)
        noise = run.rest()
        first = len(run.seen)
        for tick in range(max(_REST_TICKS, round(seconds * robot.spec.control_hz))):
            run.step(rules.action(robot, tick, run.pose if rules.gentle else None))
        figures += run.paces(first)
        figures += _cameras(robot.spec, run.seen[first:])
        return (*figures, *_stop(run, noise))


class _TimedRun:
    """Reads and commands one robot at its rate and remembers how long everything took."""

    def __init__(self, robot: Robot, clock: Clock) -> None:
        self.robot = robot
        self.seen: list[Observation] = []
        self.executed: np.ndarray = np.zeros(robot.spec.action_dim, np.float32)
        self.pose: np.ndarray = np.zeros(robot.spec.state_dim, np.float32)
        """float32[ds]: where it stood before it was moved"""
        self._clock = clock
        self._read_ms: list[float] = []
        self._write_ms: list[float] = []
        self._due_ns = clock.now_ns()
        self._missed = 0

    def step(self, action: np.ndarray | None) -> None:
        """One control period; no action: hold."""
        period_ns = self.robot.spec.period_ns
        if self._clock.now_ns() > self._due_ns + period_ns:
            # What is late stays late; the rhythm begins anew.
            self._missed += 1
            self._due_ns = self._clock.now_ns()
        self._clock.sleep_until(self._due_ns)
        self._due_ns += period_ns
        began_ns = self._clock.now_ns()
        self.seen.append(self.robot.read())
        read_ns = self._clock.now_ns()
        action = hold_action(self.robot.spec, self.executed) if action is None else action
        self.executed = self.robot.write(action).executed
        self._read_ms.append((read_ns - began_ns) / 1e6)
        self._write_ms.append((self._clock.now_ns() - read_ns) / 1e6)

    def rest(self) -> np.ndarray:
        """float32[ds]: the largest change of a state that nobody commands, between two ticks."""
        self.pose = self.robot.read().state
        self.executed = rest_action(self.robot.spec, self.pose)
        self._due_ns = self._clock.now_ns()
        for _ in range(_REST_TICKS):
            self.step(None)
        states = np.array([observation.state for observation in self.seen])
        # The first moments after a reset may still settle.
        return np.abs(np.diff(states[_REST_TICKS // 2 :], axis=0)).max(axis=0)

    def paces(self, first: int) -> list[Figure]:
        """Latency of calls and the rate that was kept, from tick `first` on."""
        spec = self.robot.spec
        period_ms = 1e3 / spec.control_hz
        both = np.array(self._read_ms[first:]) + np.array(self._write_ms[first:])
        advice = "answer from a thread that reads ahead, lower control_hz, or look at what else this computer does."
        figures = []
        for name, took in (("read", self._read_ms[first:]), ("write", self._write_ms[first:])):
            for percent in (50, 99):
                figures.append(Figure(f"{name} p{percent}", float(np.percentile(took, percent)), "ms"))
        figures.append(Figure("read + write p99", float(np.percentile(both, 99)), "ms", period_ms, advice=advice))
        late = self._missed / len(both)
        figures.append(
            Figure("missed periods", 100 * late, "%", 1.0, advice=f"{spec.control_hz:g} Hz is not kept; {advice}")
        )
        return figures


def _cameras(spec: RobotSpec, seen: list[Observation]) -> list[Figure]:
    figures = []
    for camera in spec.cameras:
        frames = [observation.images[camera.name].time_ns for observation in seen]
        different = np.unique(frames)
        span_s = (different[-1] - different[0]) / 1e9
        rate = (len(different) - 1) / span_s if span_s > 0 else 0.0
        # A camera slower than the control loop is seen at its own rate, a faster one at the loop's.
        wanted = min(camera.rate_hz, spec.control_hz)
        figures.append(
            Figure(
                f"camera {camera.name}",
                rate,
                "Hz",
                0.8 * wanted,
                at_least=True,
                advice=f"the spec says {camera.rate_hz:g} Hz; more light, a smaller picture or another bus may help.",
            )
        )
        ages = [(o.time_ns - o.images[camera.name].time_ns) / 1e6 for o in seen]
        figures.append(Figure(f"camera {camera.name} age p99", float(np.percentile(ages, 99)), "ms"))
    return figures


def _stop(run: _TimedRun, noise: np.ndarray) -> list[Figure]:
    """How long after being told to hold the robot still moves, and how far it goes."""
    spec = run.robot.spec
    span = np.array([d.high - d.low for d in spec.state], np.float32)
    still = np.maximum(3 * noise, 1e-4 * span)
    first = len(run.seen)
    quiet = 0
    for _ in range(round(_STOP_S * spec.control_hz) + _STILL_TICKS):
        run.step(None)
        change = np.abs(run.seen[-1].state - run.seen[-2].state)
        quiet = quiet + 1 if (change <= still).all() else 0
        if quiet == _STILL_TICKS:
            break
    took_s = (len(run.seen) - first - quiet) / spec.control_hz
    way = np.abs(run.seen[-1].state - run.seen[first].state) / span
    far = int(way.argmax())
    moving = [d.name for d, moves in zip(spec.state, change > still, strict=True) if moves]
    advice = f"{', '.join(moving) or 'it'} goes on; its controller must hold the last target, or stop on zero velocity."
    return [
        Figure("stands still after", took_s * 1e3, "ms", _STOP_S * 1e3 * 0.999, advice=advice),
        Figure(f"way to standstill ({spec.state[far].name})", 100 * float(way[far]), "% of range"),
    ]
