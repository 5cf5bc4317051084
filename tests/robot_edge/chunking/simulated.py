"""A line with delays and an oracle behind it whose actions say what they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from hal.safety.limiter import hold_action
from robot_edge.chunking.scheduler import ChunkScheduler
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import ActionChunk, CameraSpec, CommandType, Dimension, Observation, RobotSpec

LOST = None
"""a delay that never ends"""

SPEC = RobotSpec(
    embodiment="oracle",
    state=(Dimension("x", "m", -1e4, 1e4),),
    action=(Dimension("meant", "tick", -10, 1e4), Dimension("asked", "tick", -10, 1e4)),
    cameras=(),
    control_hz=50.0,
)
"""absolute actions: [the tick an action is meant for, the tick its chunk was asked at]"""

LINE = RobotSpec(
    embodiment="line",
    state=(Dimension("x", "m", -100, 100), Dimension("goal", "m", -100, 100)),
    action=(Dimension("x", "m", -1, 1, CommandType.delta),),
    cameras=(),
    control_hz=50.0,
)
"""one delta that moves x; the goal is only seen"""


def oracle(request: ChunkRequest, horizon: int = 16) -> ChunkReply:
    meant = np.arange(request.first_tick, request.first_tick + horizon, dtype=np.float32)
    actions = np.stack([meant, np.full(horizon, request.tick, np.float32)], axis=1)
    return reply_to(request, actions)


def reply_to(request: ChunkRequest, actions: np.ndarray) -> ChunkReply:
    made_ns = request.observation.time_ns
    return ChunkReply(ActionChunk(actions, request.first_tick, 20_000_000, 1, made_ns, made_ns), tick=request.tick)


@dataclass
class Tick:
    """What happened in one."""

    tick: int
    request: ChunkRequest | None
    action: np.ndarray | None
    """the policy's, whoever acted"""
    chunk: ActionChunk | None
    delay_ticks: int
    executed: np.ndarray

    waited: bool
    """the robot stood still for want of an action"""

    @property
    def said(self) -> tuple[int, int] | None:
        """(tick the action is meant for, tick it was asked at) of the oracle."""
        return None if self.action is None else (round(float(self.action[0])), round(float(self.action[1])))


@dataclass
class Simulated:
    """Drives a scheduler as a control loop does. `delays`: of each request in turn, the last one goes on."""

    scheduler: ChunkScheduler
    delays: Iterable[int | None] = (0,)
    spec: RobotSpec = SPEC
    policy: Callable[[ChunkRequest], ChunkReply] = oracle
    state: np.ndarray = field(default_factory=lambda: np.zeros(1, np.float32))
    move: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda state, action: state
    takeover: dict[int, np.ndarray] = field(default_factory=dict)
    """what somebody else does, by tick; the tick after it nobody acts, and then the plan is void"""
    limit: Callable[[np.ndarray], np.ndarray] = lambda action: action

    def __post_init__(self) -> None:
        self._delays = iter(self.delays)
        self._delay: int | None = 0
        self.coming: list[tuple[int, ChunkReply]] = []
        self.now = 0
        self._interrupted = False
        self.rows: list[Tick] = []
        self.last = hold_action(self.spec, np.zeros(self.spec.action_dim, np.float32))
        self.scheduler.reset(0)

    def reset(self, now: int | None = None) -> None:
        """A new episode; what is under way stays under way."""
        self.now = self.now if now is None else now
        self.scheduler.reset(self.now)
        self._interrupted = False
        self.last = hold_action(self.spec, np.zeros(self.spec.action_dim, np.float32))

    def run(self, ticks: int) -> list[Tick]:
        start = len(self.rows)
        for _ in range(ticks):
            self.rows.append(self._tick())
            self.now += 1
        return self.rows[start:]

    def _tick(self) -> Tick:
        tick = self.now
        if self._interrupted and tick - 1 not in self.takeover:
            self.scheduler.void()
            self._interrupted = False
        observation = Observation(tick * self.spec.period_ns, np.array(self.state, np.float32), {}, "")
        self._deliver()
        request = self.scheduler.request_chunk(tick, observation)
        if request is not None:
            assert request.tick == tick
            assert request.first_tick >= tick
            self._delay = next(self._delays, self._delay)
            if self._delay is not LOST:
                self.coming.append((tick + self._delay, self.policy(request)))
                self._deliver()
        chosen = self.scheduler.next_action(tick, observation)
        if tick in self.takeover:
            self._interrupted = True
        elif self._interrupted:
            chosen = None
        action = hold_action(self.spec, self.last) if chosen is None else chosen[0]
        executed = np.asarray(self.takeover.get(tick, self.limit(action)), np.float32)
        waited = chosen is None and tick not in self.takeover
        self.scheduler.on_executed(tick, executed, waited)
        self.state = self.move(self.state, executed)
        self.last = executed
        return Tick(tick, request, *(chosen or (None, None)), self.scheduler.delay_ticks, executed, waited)

    def _deliver(self) -> None:
        due = [reply for at, reply in self.coming if at <= self.now]
        self.coming = [(at, reply) for at, reply in self.coming if at > self.now]
        for reply in due:
            self.scheduler.submit(reply, self.now)


def asked(rows: list[Tick]) -> list[int]:
    return [row.tick for row in rows if row.request is not None]


def on_time(rows: list[Tick]) -> bool:
    """Whether each action is executed at the tick the oracle meant it for.

    Later only by the ticks the robot waited since its chunk was to begin; earlier only where the robot would have stood
    still until then.

    `rows`: of one episode from its beginning, of a strategy with one running chunk.
    """
    by_tick, begun = {row.tick: row for row in rows}, {}
    for row in rows:
        if row.said is None:
            continue
        meant, of = row.said
        request, start = by_tick[of].request, begun.setdefault(of, row.tick)
        assert request is not None
        shift = sum(by_tick[tick].waited for tick in range(request.first_tick, start))
        before = by_tick[start - 1].chunk if start > rows[0].tick else None
        if start < request.first_tick and (before is None or before.first_tick + len(before.actions) <= start):
            shift = start - request.first_tick
        if meant + shift != row.tick:
            return False
    return True


def starved(rows: list[Tick]) -> list[int]:
    """Ticks without an action after the first one with."""
    first = next((i for i, row in enumerate(rows) if row.action is not None), len(rows))
    return [row.tick for row in rows[first:] if row.action is None]


def plain(camera: bool = False) -> RobotSpec:
    """Absolute, delta and velocity in one spec."""
    return RobotSpec(
        embodiment="plain",
        state=(Dimension("a", "rad", -2, 2), Dimension("d", "m", -5, 5), Dimension("v", "m", -5, 5)),
        action=(
            Dimension("a", "rad", -2, 2),
            Dimension("d", "m", -1, 1, CommandType.delta),
            Dimension("v", "m/s", -1, 1, CommandType.velocity),
        ),
        cameras=(CameraSpec("front", 8, 8, 20.0),) if camera else (),
        control_hz=10.0,
    )
