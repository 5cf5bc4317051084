"""What the edge node says of itself and its robot on /diagnostics, as plain values: no rclpy in here.

Levels are those of diagnostic_msgs/DiagnosticStatus (REP 107).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from robot_edge.control.mode import HoldReason, Mode
from wire.messages.gateway import EdgeStatus

OK, WARN, ERROR, STALE = range(4)
SILENT_S = 3.0
"""an active edge that has said nothing for so long is stale"""
STARTING_S = 60.0
"""so long may an edge take from its start to its first word"""
_WAITING = (HoldReason.no_job, HoldReason.scene, HoldReason.no_version, HoldReason.no_action)
"""holds that are no fault: there is nothing to do yet"""
_NOT_SHOWN = ("robot", "time_ns", "state", "late_p99_s")


class Diagnosis(NamedTuple):
    """One DiagnosticStatus."""

    level: int
    message: str
    values: dict[str, str]


def diagnose(phase: str, reason: str, status: EdgeStatus | None, age_s: float, processes: str = "") -> Diagnosis:
    """What is known of the edge now.

    `phase`: state of the node's life cycle; `reason`: why the last transition went wrong, '' when it did not; `status`:
    the newest of an active edge and `age_s` its age, or the time since the edge was started when there is none yet;
    `processes`: how one that does not run steadily ended last.
    """
    values = {"lifecycle": phase, "processes": processes, **(_values(status) if status is not None else {})}
    because = f": {processes}" if processes else ""
    if reason:
        return Diagnosis(ERROR, reason, values)
    if phase != "active":
        return Diagnosis(OK, f"{phase}: no edge process runs and the robot holds", values)
    if status is None:
        if age_s > STARTING_S:
            return Diagnosis(STALE, f"the edge has said nothing in the {age_s:.0f} s since its start{because}", values)
        return Diagnosis(WARN, f"the edge processes are starting{because}", values)
    if age_s > SILENT_S:
        return Diagnosis(STALE, f"the edge has said nothing for {age_s:.0f} s{because}", values)
    if status.fault:
        return Diagnosis(ERROR, status.fault, values)
    if processes:
        return Diagnosis(WARN, processes, values)
    if status.mode == Mode.estop or status.stop.stops:
        return Diagnosis(WARN, f"{status.stop}; ~/release_estop takes back what was stopped through ROS", values)
    if status.stop.ready:
        return Diagnosis(WARN, f"{status.stop}; ~/start lets it go on", values)
    if status.stop.speed_limits and status.mode != Mode.hold:
        return Diagnosis(WARN, f"{status.mode}: {status.stop}", values)
    if status.mode == Mode.hold:
        level = OK if status.reason in _WAITING else WARN
        return Diagnosis(level, f"the robot holds: {status.reason}", values)
    return Diagnosis(OK, f"{status.mode}: {status.task}" if status.task else status.mode, values)


def _values(status: EdgeStatus) -> dict[str, str]:
    plain = {name: str(value) for name, value in msgspec.structs.asdict(status).items() if name not in _NOT_SHOWN}
    return {**plain, "late_p99_ms": f"{1e3 * status.late_p99_s:.3f}"}
