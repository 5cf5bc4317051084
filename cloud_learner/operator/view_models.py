"""What a snapshot says of robots, jobs and the success without help: plain values, ready for JSON."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cloud_learner.rollout.records import VersionState
from hal.resource.health import RobotHealth
from wire.messages.fleet import JobKind, JobState, RobotState, VersionStatus
from wire.messages.gateway import EdgeStatus, TrainerStatus
from wire.stop_state import StopState
from wire.transport.session import SILENT_AFTER_S
from wire.types import CommandType, EpisodeOutcome, Lease, Mode, PolicyVersion, RobotSpec

LOST_AFTER_S = SILENT_AFTER_S
"""a robot without a status for this long counts as lost to people"""
MAX_VERSIONS = 12
"""that people see"""
RECENT_EPISODES = 12
DROPPED = "dropped:"
"""the holder of a robot whose operator vanished begins with it"""
WEB_OPERATOR = "web-"
"""the names of operators at the page begin with it"""
UNAIDED_EPISODES = 60
"""the newest, which the success without help is over"""
FINISHED = (EpisodeOutcome.success, EpisodeOutcome.failure)
"""outcomes that say how well the policy does"""
_GRIPPER_WORDS = ("grip", "effort", "finger")

MODE_EVENTS: dict[tuple[str, str], tuple[str, str]] = {
    ("", Mode.human): ("intervention", "a person took over"),
    (Mode.human, ""): ("intervention", "handed back"),
    ("", Mode.estop): ("estop", "emergency stop"),
    (Mode.estop, ""): ("estop", "emergency stop released"),
}
"""(kind, text) of the event when a mode that people see gives way to another"""


class FleetObservation(msgspec.Struct, frozen=True):
    """The fleet at one moment, for programs."""

    robots: dict[str, tuple[float, EdgeStatus | None, RobotState | None]]
    """by name: seconds since it was heard, its status, and how the scheduler sees it"""
    trainer: tuple[float, TrainerStatus] | None
    """seconds since it was heard, and its status"""
    version: PolicyVersion | None
    """the newest"""
    steps_stored: int
    jobs: tuple[JobState, ...]
    success: dict[str, float]
    """by task: of the newest version on the curve"""
    storage_away_s: float | None
    """since disk or database take nothing, None: they do"""


class RobotView:
    """What is known of one robot."""

    def __init__(self, name: str, spec: RobotSpec | None, seen_ns: int) -> None:
        self.name = name
        self.spec = spec
        self.seen_ns = seen_ns
        self.status: EdgeStatus | None = None
        self.state: RobotState | None = None
        """as the scheduler sees it"""
        self.stop = StopState()
        """as the gateway knows it: also what the robot has not shown yet"""
        self.lost = False
        self.held_mode = ""
        """human or estop while the robot is in that mode, for the events"""
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_EPISODES)


def is_telling(outcome: str, helped: bool) -> bool:
    """Whether an episode says how the policy does on its own: the verdict does, or that somebody helped it, whatever
    came of that."""
    return outcome in FINISHED or (helped and outcome == EpisodeOutcome.unjudged)


class UnaidedSuccess:
    """Share of the newest finished episodes that succeeded with nobody's help.

    An episode that somebody helped in did not succeed on its own, whatever came of it. Scenes are those the robots
    practise, and several versions acted in them: the held-out figure is the one to compare policies by.
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[int, bool]] = deque(maxlen=UNAIDED_EPISODES)

    def add(self, version: int, outcome: str, *, helped: bool) -> None:
        """An episode has ended, `version` being the last that acted in it; aborted ones do not count."""
        if is_telling(outcome, helped):
            self._newest.append((version, outcome == EpisodeOutcome.success and not helped))

    def summary(self) -> dict[str, Any] | None:
        """`success` 0 to 1, `episodes`, and the oldest and newest of their `versions`; None before the first."""
        if not self._newest:
            return None
        versions = [version for version, _ in self._newest]
        return {
            "success": sum(alone for _, alone in self._newest) / len(self._newest),
            "episodes": len(self._newest),
            "versions": [min(versions), max(versions)],
        }


def robot_model(robot: RobotView, now_ns: int, instructions: Mapping[str, str]) -> dict[str, Any]:
    """All that the page shows of a robot but its pictures: no NaN, no infinities."""
    status, spec, state = robot.status, robot.spec, robot.state
    age_s = (now_ns - robot.seen_ns) / 1e9
    task = status.task if status else ""
    link = "lost" if age_s > LOST_AFTER_S else "ok" if status else "waiting"
    return {
        "name": robot.name,
        "embodiment": spec.embodiment if spec is not None else "",
        "link": link,
        "age_s": round(age_s, 1),
        "mode": status.mode if status else Mode.hold,
        "reason": status.reason if status else "waiting for its first status",
        "detail": status.detail if status and status.detail != status.fault else "",
        "health": state.health if state else RobotHealth.starting,
        "health_reason": state.reason if state else "",
        "fault": status.fault if status else "",
        "site": state.capabilities.site if state else "",
        "job": state.job if state else "",
        "lease": lease_model(state.lease) if state and state.lease else None,
        "stops": [{"id": stop, "who": who} for stop, who in robot.stop.stops.items()],
        "ready": robot.stop.ready,
        "speed_limits": dict(status.stop.speed_limits) if status else {},
        "by_person": bool(status and status.by_person),
        "episode": status.episode if status else "",
        "open_outcome": status.open_outcome if status else "",
        "part": status.part if status else "",
        "task": task,
        "instruction": instructions.get(task, ""),
        "version": status.version if status else 0,
        "episodes": status.episodes if status else 0,
        "interventions": status.interventions if status else 0,
        "missed_percent": round(100 * status.missed_ticks / status.ticks, 3) if status and status.ticks else 0.0,
        "ticks": status.ticks if status else 0,
        "missed_ticks": status.missed_ticks if status else 0,
        "starved_ticks": status.starved_ticks if status else 0,
        "pids": [status.control_pid, status.inference_pid, status.uplink_pid] if status else [],
        "state": [finite(float(x)) for x in status.state.ravel()[:64]] if status else [],
        "recent": list(robot.recent),
        "spec": None
        if spec is None
        else {
            "action": [msgspec.to_builtins(d) for d in spec.action],
            "state": [d.name for d in spec.state[:64]],
            "cameras": [camera.name for camera in spec.cameras],
        },
        "not_drivable": not_drivable(spec),
    }


def lease_model(lease: Lease) -> dict[str, Any]:
    """Who holds a robot and for what."""
    return {
        "holder": lease.holder,
        "purpose": lease.purpose,
        "priority": lease.priority,
        "number": lease.number,
    }


def version_model(version: PolicyVersion) -> dict[str, Any]:
    """The newest version."""
    return {"number": version.number, "gradient_steps": version.gradient_steps, "sha256": version.sha256[:12]}


def version_status_models(statuses: Sequence[VersionStatus]) -> list[dict[str, Any]]:
    """The newest versions, newest first; before others those that somebody may have to change."""

    def rank(status: VersionStatus) -> tuple[bool, int]:
        needed = status.current or status.reference or bool(status.pinned) or status.state == VersionState.canary
        needed = needed or (status.shadow is not None and bool(status.shadow.robots))
        return needed, status.version.number

    shown = sorted(statuses, key=rank)[-MAX_VERSIONS:]
    return [version_status_model(one) for one in sorted(shown, key=lambda one: -one.version.number)]


def version_status_model(status: VersionStatus) -> dict[str, Any]:
    """A version and how far it is."""
    return {
        "number": status.version.number,
        "state": status.state,
        "current": status.current,
        "reference": status.reference,
        "robots": list(status.robots),
        "pinned": list(status.pinned),
        "episodes": status.episodes,
        "successes": status.successes,
        "unjudged": status.unjudged,
        "note": status.note,
        "frozen": status.frozen,
        "shadow": status.shadow and msgspec.to_builtins(status.shadow),
    }


def job_model(job: JobState) -> dict[str, Any]:
    """A job and how far it is."""
    request = job.request
    return {
        "id": request.id,
        "kind": request.kind,
        "phase": job.phase,
        "note": job.note,
        "robots": list(job.robots),
        "episodes": job.episodes,
        "successes": job.successes,
        "judged": job.episodes - job.unjudged,
        "wanted": request.episodes * (len(request.tasks) if request.kind == JobKind.evaluation else 1),
        "version": request.version,
        "tasks": list(request.tasks),
    }


def not_drivable(spec: RobotSpec | None) -> str:
    """Why keys cannot drive a robot, '' when they can.

    Keys give directions, so all dimensions but a gripper must be deltas or velocities, for which 0 is rest.
    """
    if spec is None:
        return "it has not said what its actions mean yet"
    for dimension in spec.action:
        if dimension.meaning == CommandType.absolute:
            if not any(word in dimension.name.lower() for word in _GRIPPER_WORDS):
                return f"its action '{dimension.name}' is an absolute target, which keys cannot give"
        elif not dimension.low <= 0 <= dimension.high:
            return f"its action '{dimension.name}' has no rest: 0 is outside [{dimension.low}, {dimension.high}]"
    return ""


def finite(value: float) -> float | None:
    """`value`, or None for what JSON has no number for."""
    return value if math.isfinite(value) else None
