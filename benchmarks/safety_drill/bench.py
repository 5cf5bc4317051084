"""One robot of the drill: the shipped loop, schedulers, host and limits, on a clock that the drill moves."""

from __future__ import annotations

import logging
import math

import numpy as np

from benchmarks.safety_drill.people import People
from benchmarks.safety_drill.plant import (
    BLEND_TICKS,
    CALM,
    LATEST_TICKS,
    LIMITS,
    OPEN,
    PERIOD_S,
    SPEC,
    WILD_NS,
    Plant,
    Truth,
)
from hal.driver_host.watched_robot import WatchedRobot
from hal.interfaces.dynamics import ActionStateMapping, SpecMotion
from hal.interfaces.robot import Feedback, RestPose
from hal.safety.limited_robot import LimitedRobot
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from robot_edge.control.config import EpisodeRules, LoopConfig, ObservationLimits, RobotTimeouts
from robot_edge.control.loop import ControlLoop
from wire.clock import ManualClock
from wire.messages.gateway import Job, Nack, OperatorCommand, VersionActivated
from wire.messages.local import ChunkReply, ChunkRequest, EpisodeLost
from wire.stop_state import StopState
from wire.transport.memory_channel import memory_pair
from wire.types import EPISODE_COMMANDS, ActionChunk, Observation, OperatorCommandKind, PolicyCapabilities

STRATEGIES = ("sync", "naive", "aligned", "ensemble", "future_state", "rtc_guided", "rtc_trained")
TRAINED = PolicyCapabilities(trained_max_delay=8, state_aligned=True, prefix_trained=True)
HORIZON = 24
_CALM = CALM.tolist()
_EVENTS, _BOUT_EVENTS = 0.04, 0.4
"""of periods, in which something happens: mostly, and in a bout, in which one thing meets another"""
_BOUT_BEGINS, _BOUT_ENDS = 1 / 400, 1 / 40
BOOT_PERIODS = (3, 6, 30)
"""what a control process may take to come back: while its robot still slows down, or long after"""
MOTION = SpecMotion(
    SPEC,
    [
        ActionStateMapping("joint", "joint", 1.0),
        ActionStateMapping("move", "x", 1.0),
        ActionStateMapping("wheel", "y", 1.0),
    ],
)


class DrillClock(ManualClock):
    """While somebody sleeps on it, the host does what is due."""

    host: Host | None = None

    def sleep_until(self, deadline_ns: int) -> None:
        while self.now_ns() < deadline_ns:
            left_ns = deadline_ns - self.now_ns()
            if self.host is not None:
                left_ns = min(left_ns, max(1, int(min(self.host.watched.left_s(), 1e3) * 1e9)))
            self.advance(left_ns)
            if self.host is not None:
                self.host.watched.poll("the drill")
                self.host.plant.look()


class Host:
    """Keeps the `HoldingRobot` protocol as the host's process does, without its sockets."""

    def __init__(self, plant: Plant, clock: DrillClock) -> None:
        self.spec, self.plant = SPEC, plant
        self.robot = LimitedRobot(plant, LIMITS if plant.limited else OPEN)
        self.watched = WatchedRobot(self.robot, clock)
        self.robot.on_stop = self.watched.on_stop
        self.late_ns = 0
        """for so long the next command waits in front of a driver that blocks"""
        self._truth, self._clock = plant.truth, clock

    def connect(self) -> None:
        self.robot.connect()

    def reset(self, task: str, seed: int) -> RestPose | None:
        return self.watched.reset(task, seed)

    def read(self) -> Observation:
        return self.robot.read()

    def write(self, action: np.ndarray) -> Feedback:
        return self._execute(action)

    def hold(self) -> Feedback:
        return self._execute(None)

    def _execute(self, action: np.ndarray | None) -> Feedback:
        sent_ns = self._clock.now_ns()
        self._truth.late = self.late_ns > 2 * PERIOD_S * 1e9
        # the driver blocks: its host can do nothing meanwhile
        self._clock.advance(self.late_ns)
        if self.late_ns:
            self.plant.on_blocked()
        self.late_ns = 0
        try:
            return self.watched.execute(action, sent_ns)
        finally:
            self._truth.late = False

    def stop_state(self) -> StopState:
        return self.robot.stop_state()

    def limit_speed(self, who: str, share: float) -> None:
        self._truth.speed_limits[who] = share
        self.robot.limit_speed(who, share)

    # what a stop means is kept here a second time, in other words
    def stop(self, stop: str, who: str) -> StopState:
        self._truth.stops.add(stop)
        self._truth.started, self._truth.newest_stop = False, stop
        return self.robot.stop(stop, who)

    def release(self, stop: str) -> StopState:
        self._truth.stops.discard(stop)
        return self.robot.release(stop)

    def start(self, after: str = "") -> StopState:
        right = not self._truth.stops and after in ("", self._truth.newest_stop)
        self._truth.started = self._truth.started or right
        return self.robot.start(after)

    def close(self) -> None:
        self.watched.come_to_hold("it is to be closed")
        self.watched.end_scene()
        self.robot.close()


class Bench:
    """`step` is one control period, whoever takes part in it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.clock, self.truth = DrillClock(1_000_000_000), Truth()
        limited = seed // len(STRATEGIES) % 2 == 0
        self.strategy = STRATEGIES[seed % len(STRATEGIES)]
        self.limits = LIMITS if limited else OPEN
        self.plant = Plant(self.clock, self.truth, limited, moves_to_rest=seed // (2 * len(STRATEGIES)) % 2 == 1)
        # by its definition it begins late actions from the first one
        self.plant.sees_jumps &= self.strategy != "naive"
        self.host = Host(self.plant, self.clock)
        self.clock.host = self.host
        self.ticks = 0
        self.modes: dict[str, int] = {}
        self._stop_number = 0
        self._said_stops: list[str] = []
        self._bursty = self._bout = False
        self._outward_until = 0
        self._attended = seed % 3 == 0
        self._coming: list[tuple[int, ChunkReply]] = []
        self.plant.blends = bool(self.rng.random() < 0.5)
        self.people = People(self.rng, self.clock, self.plant, lambda command: self.uplink.send(command))
        self._boot()

    def _boot(self) -> None:
        """A control process begins."""
        self.uplink, uplink = memory_pair()
        self.inference, inference = memory_pair()
        self.loop = ControlLoop(
            "drill",
            str(self.ticks),
            self.host,
            uplink,
            inference,
            lambda trained: make_scheduler(ChunkingConfig(self.strategy), SPEC, trained, MOTION, safety=self.limits),
            self.clock,
            LoopConfig(
                max_ticks=400,
                safety=self.limits,
                driver=RobotTimeouts(first_pause_s=0.2, longest_pause_s=1.0, give_up_s=1.0),
                observation_limits=ObservationLimits(recover_ticks=2),
                hand_back_blend_s=BLEND_TICKS * PERIOD_S if self.plant.blends else 0.0,
                episodes=EpisodeRules(reset_by_person=self._attended, reset_s=1.0),
                write_after_s=0.008 if self.rng.random() < 0.3 else 0.0,
            ),
        )
        self.loop.driver.start_disconnected()
        self.uplink.send(Job("job", ("drill",), int(self.rng.integers(0, 2**30))))
        self.uplink.send(VersionActivated("drill", 1, 0, TRAINED))
        self.uplink.send(self.people.sticky.state())
        self.people.on_new_control()
        self._coming.clear()

    # --- one period -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self._happen()
        self._deliver()
        self.loop.tick()
        self.uplink.discard()
        self.plant.look()
        self.plant.on_tick(self.loop.mode)
        self._answer()
        self.ticks += 1
        self.modes[self.loop.mode.value] = self.modes.get(self.loop.mode.value, 0) + 1

    def _happen(self) -> None:
        """Mostly nothing; each of these some times a minute."""
        if self.rng.random() < (_BOUT_ENDS if self._bout else _BOUT_BEGINS):
            self._bout = not self._bout
        if self.people.driving and self.rng.random() < (0.3 if self._bout else 0.1):
            self.people.drive()
        chance = self.rng.random() / (_BOUT_EVENTS if self._bout else _EVENTS)
        if chance >= 1:
            return
        people = self.people
        kinds = (
            self._fail_reading, self._refuse, self._stall, self._restart_control, self._stop, self._release,
            self._start, self._start, self._start, people.take_over, people.drive, people.hand_back, people.drop,
            people.intrude, people.intrude, self._storage, self._be_late, self._change_weather, self._new_uplink,
            self._slow, self._speak, self._speak, self._go_outward,
        )  # fmt: skip
        kinds[int(chance * len(kinds))]()

    def _fail_reading(self) -> None:
        self.plant.fault = str(self.rng.choice(["raise", "nan", "old", "camera", "jump"]))
        self.plant.fault_reads = int(self.rng.choice([1, 2, 5, 12, 40, 80]))

    def _refuse(self) -> None:
        self.plant.refuses = int(self.rng.choice([1, 2, 5, 60]))

    def _stall(self) -> None:
        self.clock.sleep_until(self.clock.now_ns() + int(self.rng.choice([0.5, 1, 2, 5, 20]) * PERIOD_S * 1e9))

    def _restart_control(self) -> None:
        self.host.watched.on_disconnect()
        self.clock.sleep_until(self.clock.now_ns() + int(self.rng.choice(BOOT_PERIODS) * PERIOD_S * 1e9))
        self._boot()

    def _stop(self) -> None:
        self._stop_number += 1
        stop, who = f"s{self._stop_number}", str(self.rng.choice(["page", "pedal", "cli"]))
        self._said_stops = [*self._said_stops, stop][-6:]
        if self.rng.random() < 0.5:
            self.host.stop(stop, who)
            self.host.watched.poll("the drill")
        else:
            self.uplink.send(OperatorCommand("drill", "estop", operator=who, stop=stop))

    def _slow(self) -> None:
        """One of two who are beside it; there is nothing to scale where nothing limits its velocity."""
        if self.plant.limited:
            self.host.limit_speed(str(self.rng.choice(["cli", "ros"])), float(self.rng.choice([1.0, 1.0, 0.6, 0.25])))

    def _release(self) -> None:
        """Of any stop of late, some of which were released before; mostly all of them."""
        some = self._said_stops if self.rng.random() < 0.7 else self.rng.choice([*self._said_stops, "", "s0"], 1)
        for stop in some:
            self.uplink.send(OperatorCommand("drill", "release_estop", stop=str(stop)))

    def _start(self) -> None:
        if self.rng.random() < 0.7:
            self._release()
        # Mostly of the newest stop, now and then of one that others came after.
        after = str(self.rng.choice([*self._said_stops, ""])) if self.rng.random() < 0.4 else ""
        self.uplink.send(OperatorCommand("drill", "start", stop=after))

    def _speak(self) -> None:
        """A word about the episode or its scene, mostly that the scene is ready."""
        kinds = (*sorted(EPISODE_COMMANDS), *[OperatorCommandKind.scene_ready] * 7)
        word, now_ns = str(self.rng.choice(kinds)), self.clock.now_ns()
        self.uplink.send(OperatorCommand("drill", word, operator=self.people.driving, captured_ns=now_ns))

    def _storage(self) -> None:
        self.uplink.send(Nack(str(self.rng.choice(["", "", "the disk is full"]))))

    def _be_late(self) -> None:
        self.host.late_ns = int(self.rng.choice([0.3, 1.5, 3, 10]) * PERIOD_S * 1e9)

    def _change_weather(self) -> None:
        self._bursty = not self._bursty

    def _go_outward(self) -> None:
        """The policy runs into the walls of the workspace, where jumps from one such plan to the next are limited."""
        if self.plant.limited:
            self._outward_until = self.ticks + int(self.rng.choice([100, 200]))

    def _new_uplink(self) -> None:
        if (episode := self.loop.tracker.episode) is not None:
            self.uplink.send(EpisodeLost(episode.id))

    # --- inference --------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        while (request := self.inference.recv()) is not None:
            if not isinstance(request, ChunkRequest):
                continue
            reply, fate = self._make(request), self.rng.random()
            if fate < 0.04:
                continue
            slow = self._bursty and self.rng.random() < 0.3
            delay = int(self.rng.integers(8, LATEST_TICKS) if slow else self.rng.integers(0, 7))
            self._coming.append((self.ticks + delay, reply))
            if fate > 0.96:
                self._coming.append((self.ticks + delay + int(self.rng.integers(0, 30)), reply))

    def _deliver(self) -> None:
        due = [reply for at, reply in self._coming if at <= self.ticks]
        self._coming = [(at, reply) for at, reply in self._coming if at > self.ticks]
        for reply in due:
            self.inference.send(reply)

    def _make(self, request: ChunkRequest) -> ChunkReply:
        """A calm chunk from where the robot is said to be, or one that is none."""
        rng, state = self.rng, np.asarray(request.state, float)
        kind = rng.choice(["calm", "wild", "nan", "empty", "elsewhere", "short"], p=[0.9, 0.03, 0.02, 0.01, 0.02, 0.02])
        rows = calm_path(state, outward=self.ticks < self._outward_until)
        first = request.first_tick
        if kind == "wild":
            rows = rng.uniform([-400, -0.2, -3], [400, 0.2, 3], rows.shape)
            # Those that are made while it is executed, and those that they are averaged with, are no calmer.
            self.truth.wild_until = self.clock.now_ns() + WILD_NS
        elif kind == "nan":
            rows[int(rng.integers(HORIZON)), int(rng.integers(3))] = np.nan
        elif kind == "empty":
            rows = rows[:0]
        elif kind == "elsewhere":
            first += int(rng.choice([-3, 2, 50]))
        elif kind == "short":
            rows = rows[:3]
        now_ns = request.observation.time_ns
        chunk = ActionChunk(rows.astype(np.float32), first, SPEC.period_ns, 1, now_ns, now_ns)
        return ChunkReply(chunk, tick=request.tick)


def calm_path(state: np.ndarray, outward: bool = False) -> np.ndarray:
    """[HORIZON, 3] actions along a field that only the state decides: wherever a chunk of it begins, it goes on as the
    one before would have.

    Joint and x run to a circle and around it; y swings. `outward`: all three run away from the middle.
    """
    joint, x, y = state.tolist()
    rows = []
    for _ in range(HORIZON):
        u, w = joint / 60, x / 0.8
        inward = min(max(1 - math.hypot(u, w), -0.5), 0.5)
        speeds = 60 * (-w + inward * u), 0.8 * (u + inward * w), 0.4 * min(max(w - y, -1.0), 1.0)
        if outward:
            turn, slide, swing = (math.copysign(calm, at) for calm, at in zip(_CALM, (joint, x, y), strict=True))
            speeds = turn, slide, swing
        share = min(1.0, *(calm / max(abs(speed), 1e-9) for calm, speed in zip(_CALM, speeds, strict=True)))
        turn, slide, swing = (0.9 * share * speed for speed in speeds)
        joint, x, y = joint + turn * PERIOD_S, x + slide * PERIOD_S, y + swing * PERIOD_S
        rows.append((joint, slide * PERIOD_S, swing))
    return np.array(rows)


def quiet() -> None:
    """What the drill provokes thousands of times is not logged."""
    logging.disable(logging.CRITICAL)
