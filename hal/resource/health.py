"""How a robot is, watched from its reports: quick to doubt it, slow to trust it again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from wire.messages.gateway import EdgeStatus
from wire.types import Mode

_LOAD_NS = 60_000_000_000
_WORKING = (Mode.policy, Mode.script, Mode.human, Mode.reset)


class RobotHealth(StrEnum):
    """How a robot is, as far as the fleet can tell."""

    starting = "starting"
    """connected, has not reported yet"""
    ready = "ready"
    degraded = "degraded"
    """works, but holds, reports late or misses ticks"""
    draining = "draining"
    """was unwell for long: gives its job back, and gets work again after a steady time"""
    lost = "lost"
    """no report for too long; it goes on by itself"""
    stopped = "stopped"
    """emergency stop: a person has to look"""

    @property
    def works(self) -> bool:
        """Whether it may be given work."""
        return self in (RobotHealth.starting, RobotHealth.ready, RobotHealth.degraded)


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """When a robot counts as unwell, and when as well again."""

    late_after_s: float = 1.0
    """silent for so long: degraded"""
    lost_after_s: float = 5.0
    """silent for so long: lost"""
    gone_after_s: float = 15.0
    """back from a longer silence it must be well for `steady_s` first; its lease has ended meanwhile"""
    degrade_after_s: float = 2.0
    """unwell for so long without a break: degraded"""
    drain_after_s: float = 20.0
    """unwell for so long without a break: draining"""
    recover_s: float = 3.0
    """well for so long without a break: degraded, or stopped by a person, ends"""
    steady_s: float = 10.0
    """well for so long without a break: draining ends; doubles with every draining"""
    longest_steady_s: float = 300.0
    """but is never longer than this"""
    forget_s: float = 600.0
    """ready for so long without a break: earlier drainings are forgotten"""
    missed_share: float = 0.2
    """a robot that misses a larger share of its ticks from one report to the next is unwell"""
    calm_holds: tuple[str, ...] = (
        "no job yet",
        "no policy version yet",
        "the job's policy version does not act yet",
        "the operator presses no key",
        "the operator's link is lost",
    )
    """reasons to hold that say nothing about the robot"""


class HealthWatch:
    """One robot's health. Times are of one clock that does not go back."""

    def __init__(self, now_ns: int, config: HealthConfig | None = None) -> None:
        self._config = config or HealthConfig()
        self._status: EdgeStatus | None = None
        self._well = True
        self._steady_ns = now_ns  # since then it has been well, or unwell, without a break
        self._drained = 0
        self.heard_ns = now_ns
        self._reports: deque[tuple[int, bool]] = deque(maxlen=600)  # when, and whether it worked; more than a minute's
        self.health = RobotHealth.starting
        self.reason = "has not reported yet"
        self.since_ns = now_ns

    def report(self, status: EdgeStatus, now_ns: int) -> bool:
        """It reported; whether that changed its health or the reason."""
        before, silent_s = (self.health, self.reason), (now_ns - self.heard_ns) / 1e9
        complaint = self._complaint(status)
        well, late = not complaint, self._status is None or silent_s > self._config.late_after_s
        self._reports.append((now_ns, status.mode in _WORKING))
        self._status, self.heard_ns = status, now_ns
        if well != self._well or (well and late):
            self._well, self._steady_ns = well, now_ns
        if status.mode == Mode.estop or not status.stop.free:
            self._become(RobotHealth.stopped, complaint, now_ns)
        else:
            self._judge(complaint, silent_s, now_ns)
        return (self.health, self.reason) != before

    def check_silence(self, now_ns: int) -> bool:
        """Time has passed; whether that changed its health or the reason."""
        before, silent_s = (self.health, self.reason), (now_ns - self.heard_ns) / 1e9
        if silent_s > self._config.lost_after_s:
            self._become(RobotHealth.lost, "silent", now_ns)
        elif silent_s > self._config.late_after_s and self.health is RobotHealth.ready:
            self._become(RobotHealth.degraded, "reports late", now_ns)
        return (self.health, self.reason) != before

    def load(self, now_ns: int) -> float:
        """Share of its reports of the last minute in which it worked."""
        recent = [works for time_ns, works in self._reports if time_ns > now_ns - _LOAD_NS]
        return sum(recent) / max(1, len(recent))

    def _judge(self, complaint: str, silent_s: float, now_ns: int) -> None:
        """What the time it has been silent, well or unwell makes of it."""
        config = self._config
        if self.health is RobotHealth.lost:
            health = RobotHealth.draining if silent_s > config.gone_after_s else RobotHealth.degraded
            self._become(health, f"back after {silent_s:.0f} s of silence", now_ns)
        elif self.health is RobotHealth.starting:
            self._become(RobotHealth.ready, "", now_ns)
        steady_s = (now_ns - self._steady_ns) / 1e9
        if not self._well:
            if self.health is RobotHealth.draining or steady_s >= config.drain_after_s:
                self._become(RobotHealth.draining, complaint, now_ns)
            elif steady_s >= config.degrade_after_s and self.health is not RobotHealth.stopped:
                self._become(RobotHealth.degraded, complaint, now_ns)
        elif self.health is RobotHealth.ready:
            if now_ns - self.since_ns >= config.forget_s * 1e9:
                self._drained = 0
        else:
            needed_s = config.recover_s
            if self.health is RobotHealth.draining:
                needed_s = min(config.longest_steady_s, config.steady_s * 2 ** (min(self._drained, 32) - 1))
            if steady_s >= needed_s:
                self._become(RobotHealth.ready, "", now_ns)

    def _become(self, health: RobotHealth, reason: str, now_ns: int) -> None:
        if health is not self.health:
            self.since_ns = now_ns
            self._drained += health is RobotHealth.draining
        self.health, self.reason = health, reason

    def _complaint(self, status: EdgeStatus) -> str:
        """What is wrong according to a report, and to what changed since the one before; '' when nothing is."""
        if status.mode == Mode.estop or not status.stop.free:
            return status.reason or "emergency stop"
        if status.fault:
            return status.fault
        if status.mode == Mode.hold and status.reason not in self._config.calm_holds:
            return status.reason or "holds"
        if self._status is not None and (ticks := status.ticks - self._status.ticks) > 0:
            missed = status.missed_ticks - self._status.missed_ticks
            # the counter of ticks leaves out those that were missed
            if missed > self._config.missed_share * (ticks + missed):
                return f"misses {missed / (ticks + missed):.0%} of its ticks"
        return ""
