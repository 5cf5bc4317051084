"""Who is there: robots join and leave at any time, and their health is watched all along."""

from __future__ import annotations

from collections import deque

import msgspec

from hal.resource.health import HealthConfig, HealthReport, HealthWatch, RobotHealth
from hal.resource.lease import Leases
from wire.errors import RejectedError
from wire.messages.fleet import Capabilities, RobotState

_LOOK_NS = 200_000_000
"""silence is looked for so often; reports are judged as they come"""
_BUCKET_NS, _BUCKETS = 5_000_000_000, 12
_LONGEST_NS = 1_000_000_000
"""time a report may count for: nobody knows what a silent robot does"""


class Change(msgspec.Struct, frozen=True):
    """A robot came, left, or is better or worse."""

    robot: str
    health: RobotHealth | None
    """None: it left"""
    reason: str = ""
    joined: bool = False
    """it came, came back as a new process or has other capabilities"""


class _Load:
    """Share of the last minute in which a robot worked."""

    def __init__(self, now_ns: int) -> None:
        self._buckets: deque[tuple[int, int, int]] = deque([(now_ns // _BUCKET_NS, 0, 0)], maxlen=_BUCKETS)
        """(number of the bucket, time worked, time passed)"""
        self._last_ns = now_ns

    def note(self, works: bool, now_ns: int) -> None:
        """From the last report until now it worked, or not."""
        spent_ns = min(now_ns - self._last_ns, _LONGEST_NS)
        self._last_ns, number = now_ns, now_ns // _BUCKET_NS
        _, worked, passed = self._buckets.pop() if self._buckets[-1][0] == number else (number, 0, 0)
        self._buckets.append((number, worked + works * spent_ns, passed + spent_ns))

    def share(self, now_ns: int) -> float:
        recent = [bucket for bucket in self._buckets if bucket[0] > now_ns // _BUCKET_NS - _BUCKETS]
        return sum(worked for _, worked, _ in recent) / max(1, sum(passed for *_, passed in recent))


class _Robot:
    def __init__(self, capabilities: Capabilities, identity: str, now_ns: int, config: HealthConfig) -> None:
        self.capabilities = capabilities
        self.identity = identity
        self.watch = HealthWatch(now_ns, config)
        self.load = _Load(now_ns)
        self.job = ""


class RobotRegistry:
    """All robots of the fleet. Times are of one clock that does not go back."""

    def __init__(self, leases: Leases | None = None, config: HealthConfig | None = None) -> None:
        """`leases` are shown in `robots()`."""
        self._leases = leases
        self._config = config or HealthConfig()
        self._robots: dict[str, _Robot] = {}
        self._changes: list[Change] = []
        self._looked_ns: int | None = None
        self._now_ns = 0

    def __contains__(self, name: str) -> bool:
        return name in self._robots

    def join(self, name: str, capabilities: Capabilities, now_ns: int, identity: str = "") -> None:
        """A robot is there. Saying it again changes nothing.

        `identity` tells two processes that use one name apart, '' does not. Raises `RejectedError` that names the field
        `name` while another one with this name reports.
        """
        self._now_ns = max(self._now_ns, now_ns)
        if not name:
            raise RejectedError("name: a robot without a name cannot join. Give it one.")
        known = self._robots.get(name)
        if known is not None and known.identity == identity:
            if known.capabilities != capabilities:
                known.capabilities = capabilities
                self._changes.append(Change(name, known.watch.health, "other capabilities", joined=True))
            return
        if known is not None:
            silent_s = (now_ns - known.watch.heard_ns) / 1e9
            reports = known.watch.health not in (RobotHealth.lost, RobotHealth.starting)
            if reports and silent_s < self._config.late_after_s:
                raise RejectedError(
                    f"name: there is a robot '{name}' already ({known.identity or 'of the same name'}, heard "
                    f"{silent_s:.1f} s ago), and '{identity}' is another one. Give each robot a name of its own."
                )
        self._robots[name] = _Robot(capabilities, identity, now_ns, self._config)
        self._changes.append(Change(name, RobotHealth.starting, joined=True))

    def report(self, name: str, report: HealthReport, now_ns: int, job: str = "") -> None:
        """What it says of itself; a robot that has not joined is not heard."""
        self._now_ns = max(self._now_ns, now_ns)
        robot = self._robots.get(name)
        if robot is None:
            return
        robot.load.note(report.mode in ("policy", "script", "human", "reset"), now_ns)
        robot.job = job
        if robot.watch.report(report, now_ns):
            self._changes.append(Change(name, robot.watch.health, robot.watch.reason))

    def leave(self, name: str, reason: str, now_ns: int) -> None:
        """It said goodbye, or is sent away."""
        self._now_ns = max(self._now_ns, now_ns)
        if self._robots.pop(name, None) is not None:
            self._changes.append(Change(name, None, reason))

    def poll(self, now_ns: int) -> list[Change]:
        """What changed since the last call."""
        self._now_ns = max(self._now_ns, now_ns)
        if self._looked_ns is None or now_ns - self._looked_ns >= _LOOK_NS:
            self._looked_ns = now_ns
            for name, robot in self._robots.items():
                if robot.watch.look(now_ns):
                    self._changes.append(Change(name, robot.watch.health, robot.watch.reason))
        changes, self._changes = self._changes, []
        return changes

    def health(self, name: str) -> RobotHealth | None:
        """None: it is not there."""
        robot = self._robots.get(name)
        return robot.watch.health if robot is not None else None

    def capabilities(self, name: str) -> Capabilities | None:
        """None: it is not there."""
        robot = self._robots.get(name)
        return robot.capabilities if robot is not None else None

    def robots(self) -> tuple[RobotState, ...]:
        """Every robot as it is now, by name."""
        return tuple(
            RobotState(
                name=name,
                capabilities=robot.capabilities,
                health=str(robot.watch.health),
                reason=robot.watch.reason,
                load=round(robot.load.share(self._now_ns), 3),
                lease=self._leases.of(name, self._now_ns) if self._leases is not None else None,
                job=robot.job,
                since_ns=robot.watch.since_ns,
            )
            for name, robot in sorted(self._robots.items())
        )
