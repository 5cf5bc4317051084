"""How a robot is, watched from its reports: quick to doubt it, slow to trust it again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from wire.errors import ConfigError
from wire.messages.gateway import EdgeStatus


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

    def __post_init__(self) -> None:
        """Raises `ConfigError` for thresholds that contradict each other."""
        for name in ("late_after_s", "degrade_after_s", "recover_s", "steady_s", "missed_share"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"HealthConfig: {name} is {getattr(self, name)}; give more than 0.")
        for less, more in (
            ("late_after_s", "lost_after_s"),
            ("lost_after_s", "gone_after_s"),
            ("degrade_after_s", "drain_after_s"),
            ("steady_s", "longest_steady_s"),
        ):
            if getattr(self, less) > getattr(self, more):
                raise ConfigError(
                    f"HealthConfig: {less} is {getattr(self, less)}, above {more} {getattr(self, more)}; swap them."
                )


class HealthReport(msgspec.Struct, frozen=True):
    """What a robot says of itself, several times a second."""

    mode: str = "policy"
    """estop, hold, reset, policy, script or human"""
    reason: str = ""
    """why it holds"""
    fault: str = ""
    """what its driver or a health check says is wrong"""
    ticks: int = 0
    missed_ticks: int = 0

    @classmethod
    def of(cls, status: EdgeStatus) -> HealthReport:
        return cls(status.mode, status.reason, status.fault, status.ticks, status.missed_ticks)


class HealthWatch:
    """One robot's health. Times are of one clock that does not go back."""

    def __init__(self, now_ns: int, config: HealthConfig | None = None) -> None:
        self._config = config or HealthConfig()
        self._report: HealthReport | None = None
        self._unwell_ns: int | None = None
        self._well_ns: int | None = None
        self._drained = 0
        self.heard_ns = now_ns
        self.health = RobotHealth.starting
        self.reason = "has not reported yet"
        self.since_ns = now_ns

    def report(self, report: HealthReport, now_ns: int) -> bool:
        """It reported; whether that changed its health or the reason."""
        before, silent_s = (self.health, self.reason), (now_ns - self.heard_ns) / 1e9
        complaint, late = self._complaint(report), self._report is not None and silent_s > self._config.late_after_s
        self._report, self.heard_ns = report, now_ns
        if complaint:
            self._unwell_ns = now_ns if self._unwell_ns is None else self._unwell_ns
            self._well_ns = None
        else:
            self._unwell_ns = None
            self._well_ns = now_ns if self._well_ns is None or late else self._well_ns
        if report.mode == "estop":
            self._become(RobotHealth.stopped, complaint, now_ns)
            return (self.health, self.reason) != before
        if self.health is RobotHealth.lost:
            health = RobotHealth.draining if silent_s > self._config.gone_after_s else RobotHealth.degraded
            self._become(health, f"back after {silent_s:.0f} s of silence", now_ns)
        elif self.health is RobotHealth.starting:
            self._become(RobotHealth.ready, "", now_ns)
        self._judge(complaint, now_ns)
        return (self.health, self.reason) != before

    def look(self, now_ns: int) -> bool:
        """Time has passed; whether that changed its health or the reason."""
        before, silent_s = (self.health, self.reason), (now_ns - self.heard_ns) / 1e9
        if silent_s > self._config.lost_after_s:
            self._become(RobotHealth.lost, "silent", now_ns)
        elif silent_s > self._config.late_after_s and self.health is RobotHealth.ready:
            self._become(RobotHealth.degraded, "reports late", now_ns)
        return (self.health, self.reason) != before

    def _judge(self, complaint: str, now_ns: int) -> None:
        """What the time it has been well or unwell makes of it."""
        config = self._config
        if self._unwell_ns is not None:
            unwell_s = (now_ns - self._unwell_ns) / 1e9
            if self.health is RobotHealth.draining or unwell_s >= config.drain_after_s:
                self._become(RobotHealth.draining, complaint, now_ns)
            elif unwell_s >= config.degrade_after_s and self.health is not RobotHealth.stopped:
                self._become(RobotHealth.degraded, complaint, now_ns)
        elif self.health is RobotHealth.ready:
            if now_ns - self.since_ns >= config.forget_s * 1e9:
                self._drained = 0
        elif self._well_ns is not None:
            needed_s = config.recover_s
            if self.health is RobotHealth.draining:
                needed_s = min(config.longest_steady_s, config.steady_s * 2 ** (min(self._drained, 32) - 1))
            if now_ns - self._well_ns >= needed_s * 1e9:
                self._become(RobotHealth.ready, "", now_ns)

    def _become(self, health: RobotHealth, reason: str, now_ns: int) -> None:
        if health is not self.health:
            self.since_ns = now_ns
            self._drained += health is RobotHealth.draining
        self.health, self.reason = health, reason

    def _complaint(self, report: HealthReport) -> str:
        """What is wrong according to a report, and to what changed since the one before; '' when nothing is."""
        if report.mode == "estop":
            return report.reason or "emergency stop"
        if report.fault:
            return report.fault
        if report.mode == "hold" and report.reason not in self._config.calm_holds:
            return report.reason or "holds"
        if self._report is not None and (ticks := report.ticks - self._report.ticks) > 0:
            missed = report.missed_ticks - self._report.missed_ticks
            # the counter of ticks leaves out those that were missed
            if missed > self._config.missed_share * (ticks + missed):
                return f"misses {missed / (ticks + missed):.0%} of its ticks"
        return ""
