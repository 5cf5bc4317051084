"""A target that swings, wind, and a policy that knows how it swings: what is not kept is lost by the strategy."""

from __future__ import annotations

import math

import numpy as np

from hal.interfaces.dynamics import ActionStateMapping, SpecMotion
from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from robot_edge.chunking.scheduler import DelayEstimator
from tests.robot_edge.chunking.simulated import Simulated, reply_to
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import CommandType, Dimension, PolicyCapabilities, RobotSpec

STEP_M = 0.1
"""the farthest in a tick"""
CHASER = RobotSpec(
    embodiment="chaser",
    state=(Dimension("x", "m", -10, 10), Dimension("goal", "m", -10, 10), Dimension("goal_v", "m/tick", -10, 10)),
    action=(Dimension("x", "m", -STEP_M, STEP_M, CommandType.delta),),
    cameras=(),
    control_hz=50.0,
)
TRAINED = PolicyCapabilities(12, state_aligned=True, prefix_trained=True, residual_trained=True)
HORIZON, EXECUTE_TICKS = 24, 8
SWING_M, TOLERANCE_M, SETTLE_TICKS = 0.3, 0.05, 50
_OMEGA = 2 * math.pi / 90
"""a tick"""
_GAIN = 0.25
"""share of the distance to the target that the policy closes in a tick"""
_WIND_M, _WIND_TICKS = 0.1, 25
"""how far it blows the robot off in a tick, about once in so many"""


def swinging(request: ChunkRequest) -> ChunkReply:
    """Follows the target from the state it is given, with what is committed done.

    The rest of a guided prefix weighs as arXiv 2506.07339, equation 5, says.
    """
    x, goal, speed = (float(number) for number in request.state)
    ahead, prefix = request.first_tick - request.tick, request.prefix
    known = [] if prefix is None else [float(action[0]) for action in prefix.actions]
    actions = np.zeros((HORIZON, 1), np.float32)
    for i in range(HORIZON):
        now, later = (
            goal * math.cos(_OMEGA * (ahead + k)) + speed / _OMEGA * math.sin(_OMEGA * (ahead + k)) for k in (i, i + 1)
        )
        wanted = later - now + _GAIN * (now - x)
        if prefix is not None and i < len(known):
            left = (len(known) - i) / (len(known) - prefix.committed + 1)
            share = 1.0 if i < prefix.committed else left * math.expm1(left) / (math.e - 1)
            wanted = share * known[i] + (1 - share) * wanted
        actions[i] = min(max(wanted, -STEP_M), STEP_M)
        x += float(actions[i, 0])
    return reply_to(request, actions)


def kept(strategy: str, delays: list[int], seed: int, safety: SafetyLimits | None, ticks: int = 600) -> float:
    """The share of the time after settling within `TOLERANCE_M` of the target; `seed` is of the wind."""
    motion = SpecMotion(CHASER, [ActionStateMapping("x", "x", 1.0)])
    config, delay = ChunkingConfig(strategy, EXECUTE_TICKS), DelayEstimator(first=min(delays))
    scheduler = make_scheduler(config, CHASER, TRAINED, motion, safety=safety, delay=delay)
    limiter = SafetyLimiter(CHASER, safety or SafetyLimits())
    rng = np.random.default_rng(seed)
    wind = rng.choice((-_WIND_M, _WIND_M), ticks) * (rng.random(ticks) < 1 / _WIND_TICKS)
    off: list[float] = []

    def seen(x: float, tick: int) -> np.ndarray:
        angle = _OMEGA * tick
        return np.array([x, SWING_M * math.sin(angle), SWING_M * _OMEGA * math.cos(angle)], np.float32)

    def move(state: np.ndarray, action: np.ndarray) -> np.ndarray:
        after = seen(float(state[0] + action[0]) + wind[len(off)], len(off) + 1)
        off.append(abs(float(after[0] - after[1])))
        return after

    def limit(action: np.ndarray) -> np.ndarray:
        executed = limiter.limit(action, simulated.last, simulated.state)
        limiter.note(executed, simulated.last)
        return executed

    simulated = Simulated(scheduler, delays, CHASER, swinging, seen(0.0, 0), move, limit=limit)
    simulated.run(ticks)
    return float(np.mean(np.array(off[SETTLE_TICKS:]) < TOLERANCE_M))
