"""The options of chunking, spelt once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from wire.errors import ConfigError, suggest


class Strategy(StrEnum):
    """What is done about actions that come late."""

    sync = "sync"
    """stand still and wait for each chunk"""
    naive = "naive"
    """execute each chunk from its beginning, whenever it comes"""
    aligned = "aligned"
    """skip the actions that came too late"""
    ensemble = "ensemble"
    """average what several chunks say about a tick"""
    future_state = "future_state"
    """ask with the state the robot will have when the chunk begins"""
    rtc_guided = "rtc_guided"
    """steer each chunk to continue the running one; any policy that generates by flow"""
    rtc_trained = "rtc_trained"
    """the same with a policy that was trained to"""
    residual = "residual"
    """correct each action from the newest state"""
    auto = "auto"
    """what the checkpoint was trained for"""


def check_strategy(name: str) -> Strategy:
    """The strategy called `name`. Raises `ConfigError` that lists all."""
    try:
        return Strategy(name)
    except ValueError:
        known = [strategy.value for strategy in Strategy]
        raise ConfigError(f"strategy '{name}' is not one.{suggest(name, known)} Known: {', '.join(known)}.") from None


@dataclass(frozen=True, slots=True)
class ChunkingConfig:
    """How chunks are asked for and executed. Raises `ConfigError` for an unknown strategy and for numbers below 1."""

    strategy: str = Strategy.auto.value
    """how actions that come late are dealt with: a name of `Strategy`"""
    execute_ticks: int = 8
    """ticks a chunk is executed before the next one takes over"""
    speed_up: int = 1
    """execute every q-th action"""
    timeout_ticks: int = 40
    """a request that nobody answers is repeated after so long"""

    def __post_init__(self) -> None:
        strategy = check_strategy(self.strategy)
        for name in ("execute_ticks", "speed_up", "timeout_ticks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"strategy '{strategy}': {name} is {getattr(self, name)}; give 1 or more.")
