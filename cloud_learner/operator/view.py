"""What people see of the fleet, and what they command: one object between the gateway's loop and the page.

The gateway calls the small methods (`update_status`, `add_version`, ...) from its loop; the page's thread calls
`snapshot` and `previews` and queues commands, which the gateway pops. Every history is bounded, every method
takes one lock for a short while and none waits for anything else.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from cloud_learner.operator.command_queue import CommandQueue, VersionChange
from cloud_learner.operator.run_curves import RunCurves
from cloud_learner.operator.view_models import (
    LOST_AFTER_S,
    MODE_EVENTS,
    FleetObservation,
    RobotView,
    UnaidedSuccess,
    finite,
    job_model,
    robot_model,
    version_model,
    version_status_models,
)
from wire.clock import Clock, MonotonicClock
from wire.messages.fleet import JobState, RobotState, VersionStatus
from wire.messages.gateway import GATE, EdgeStatus, Evaluation, OperatorCommand, Preview, TrainerStatus
from wire.stop_state import StopState
from wire.types import Lease, Mode, OperatorCommandKind, PolicyVersion, RobotSpec

MAX_CURVE_POINTS = 600
MAX_EVENTS = 100
_NOBODY: Mapping[str, StopState] = {}
_SAMPLES = 512
_LONGEST = 2000
"""characters of an event"""
_MOST_LABELS = 32
_LOOK_NS = 100_000_000


class FleetView:
    """Thread-safe. Times are of `clock`; `t_s` in a snapshot counts from the making of this object."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        instructions: Mapping[str, str] | None = None,
        steps_stored: int = 0,
        age_s: float = 0.0,
    ) -> None:
        """`instructions`: the sentence for each task name; `steps_stored`: what the buffer holds at the start.

        `age_s`: how long the fleet had been at work before, for a curve that goes on where it was.
        """
        self._clock = clock or MonotonicClock()
        self._instructions = dict(instructions or {})
        self._lock = threading.Lock()
        self._started_ns = self._clock.now_ns() - int(age_s * 1e9)
        self._robots: dict[str, RobotView] = {}
        self._previews: dict[tuple[str, str], tuple[int, bytes]] = {}
        self._preview_serial = 0
        self._next_look_ns = 0
        self.pages = 0
        """that are open somewhere; counted by the page's thread alone"""
        self._trainer: tuple[TrainerStatus, int] | None = None
        self._version: PolicyVersion | None = None
        self._versions: tuple[VersionStatus, ...] = ()
        self._curve: list[dict[str, Any]] = []
        self._curve_revision = 0
        self._run = RunCurves()
        self._measured: dict[str, dict[str, Any]] = {}
        self._unaided = UnaidedSuccess()
        self._steps_stored = steps_stored
        self._ingest_s: deque[float] = deque(maxlen=_SAMPLES)
        self._applied_s: deque[float] = deque(maxlen=_SAMPLES)
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._events_revision = 0
        self._queue = CommandQueue()
        self._jobs: tuple[JobState, ...] = ()
        self._storage_fault, self._away_ns = "", 0
        self.on_command: Callable[[], None] = lambda: None
        """called by the page's thread when there is something to `pop_commands` or to `pop_version_changes`"""

    # --- the gateway's side -------------------------------------------------------------------------------------

    def add_robot(self, name: str, spec: RobotSpec | None) -> None:
        """A robot said hello. Calling it again (the hello is repeated) changes nothing but the spec."""
        with self._lock:
            robot = self._robots.get(name)
            if robot is None:
                self._robots[name] = RobotView(name, spec, self._clock.now_ns())
                self._add_event("link", "connected", name)
            elif spec is not None:
                robot.spec = spec

    def update_status(self, status: EdgeStatus) -> None:
        """The newest status of a robot; a robot never seen before appears with it."""
        with self._lock:
            now_ns = self._clock.now_ns()
            robot = self._robots.get(status.robot)
            if robot is None:
                robot = self._robots[status.robot] = RobotView(status.robot, None, now_ns)
            if robot.lost:
                self._add_event("link", f"back after {(now_ns - robot.seen_ns) / 1e9:.1f} s", robot.name)
            robot.lost = False
            robot.seen_ns = now_ns
            robot.status = status
            # A taken-over robot that lost its operator holds; that is still the same intervention.
            held = status.mode if status.mode in (Mode.human, Mode.estop) else ""
            if robot.held_mode == Mode.human and status.mode == Mode.hold:
                held = Mode.human
            if held != robot.held_mode:
                for step in ((robot.held_mode, ""), ("", held)):
                    if step in MODE_EVENTS:
                        self._add_event(*MODE_EVENTS[step], robot.name)
                robot.held_mode = held
            if now_ns >= self._next_look_ns:
                # it looks at all robots: not with the status of each
                self._next_look_ns = now_ns + _LOOK_NS
                self._mark_lost(now_ns)

    def update_preview(self, preview: Preview) -> None:
        """The newest picture of a robot's camera; only the newest is kept."""
        with self._lock:
            self._preview_serial += 1
            self._previews[preview.robot, preview.camera] = (self._preview_serial, preview.jpeg)

    def update_trainer(self, status: TrainerStatus) -> None:
        """How learning goes."""
        with self._lock:
            before = self._trainer[0].phase if self._trainer else None
            if status.phase != before:
                self._add_event("trainer", f"trainer is {status.phase}")
            now_ns = self._clock.now_ns()
            self._trainer = (status, now_ns)
            t_s = (now_ns - self._started_ns) / 1e9
            acting = [one.status.version for one in self._robots.values() if one.status is not None and not one.lost]
            behind = [self._version.number - number for number in acting if number and self._version is not None]
            self._run.add(t_s, status, {"fleet/versions_behind": max(behind)} if behind else {})

    def add_version(self, version: PolicyVersion) -> None:
        """A version has been published. Call it before its announcement leaves."""
        with self._lock:
            self._version = version
            # Versions come every few seconds; one line that is kept up to date leaves room for what people must see.
            text = f"version {version.number} published at {version.gradient_steps:,} gradient steps"
            self._add_event("version", text, replace=True)

    def update_versions(self, versions: tuple[VersionStatus, ...]) -> None:
        """How far each version is."""
        with self._lock:
            self._versions = versions

    def add_activation(self, applied_s: float) -> None:
        """A robot runs a version now, `applied_s` seconds after it was published."""
        with self._lock:
            self._applied_s.append(applied_s)

    def add_evaluation(self, evaluation: Evaluation, t_s: float | None = None) -> None:
        """Measured success. `cadence` goes on the curve at `t_s`, by default when the measurement began.

        Others (`before`, `after`, `canary`, ...) use other seeds or other robots: they stand beside it. What the gate
        measures, a few episodes at a time, is told with what it decides.
        """
        if evaluation.label == GATE:
            return
        success = {task: finite(rate) or 0.0 for task, rate in sorted(evaluation.success.items())}
        if not success:
            return
        point = {"version": evaluation.number, "mean": statistics.fmean(success.values()), "tasks": success}
        with self._lock:
            if evaluation.label != "cadence":
                self._measured.pop(evaluation.label, None)
                if len(self._measured) >= _MOST_LABELS:
                    del self._measured[next(iter(self._measured))]
                self._measured[evaluation.label] = point | {"episodes": evaluation.episodes}
                self._add_event("evaluation", f"{evaluation.label}: version {evaluation.number} at {point['mean']:.0%}")
                return
            if t_s is None:
                t_s = (self._clock.now_ns() - self._started_ns) / 1e9 - (finite(evaluation.duration_s) or 0.0)
            self._curve.append({"t_s": max(0.0, round(t_s, 3)), "episodes": evaluation.episodes, **point})
            self._curve.sort(key=lambda p: p["t_s"])
            if len(self._curve) > MAX_CURVE_POINTS:
                # Thin the older part, so that the curve always spans the whole run.
                half = MAX_CURVE_POINTS // 2
                self._curve = self._curve[:half:2] + self._curve[half:]
            self._curve_revision += 1
            self._add_event(
                "evaluation", f"version {evaluation.number} succeeds in {point['mean']:.0%} of held-out episodes"
            )

    def update_fleet(
        self, robots: tuple[RobotState, ...], jobs: tuple[JobState, ...], stops: Mapping[str, StopState] = _NOBODY
    ) -> None:
        """The robots as resources and the jobs, as the scheduler sees them now; by robot, who `stops` it."""
        with self._lock:
            self._jobs = jobs
            for state in robots:
                known = self._robots.get(state.name)
                if known is not None:
                    known.state = state
            for name, known in self._robots.items():
                known.stop = stops.get(name, StopState())

    def reject_command(self, command: OperatorCommand, reason: str) -> None:
        """A command that could not be carried out: its operator is told why."""
        lost = command.robot if command.kind == OperatorCommandKind.take_over else ""
        self._queue.reject(command.operator, lost, reason)
        self.add_event("refused", reason, command.robot)

    def reject_version_change(self, change: VersionChange, reason: str) -> None:
        """What an operator wanted with versions could not be done: that one is told why."""
        self._queue.reject(change.operator, "", reason)
        self.add_event("refused", reason, change.robot)

    def add_episode(
        self, robot: str, task: str, outcome: str, human_steps: int, *, version: int = 0, practised: bool = False
    ) -> None:
        """An episode has ended; `human_steps` of it were driven by a person.

        `practised`: a robot of the fleet worked on the policy, `version` acting last.
        """
        with self._lock:
            if practised:
                self._unaided.add(version, outcome, helped=human_steps > 0)
            known = self._robots.get(robot)
            if known is not None:
                known.recent.append({"task": task, "outcome": outcome, "human_steps": human_steps})

    def add_stored_steps(self, steps: int, ingest_s: float | None = None) -> None:
        """`steps` have been committed, `ingest_s` seconds after the edge closed their segment."""
        with self._lock:
            self._steps_stored += steps
            if ingest_s is not None and math.isfinite(ingest_s):
                self._ingest_s.append(ingest_s)

    def update_storage(self, fault: str) -> None:
        """Why disk or database take nothing now, '' when they do."""
        with self._lock:
            if bool(fault) != bool(self._storage_fault):
                now_ns = self._clock.now_ns()
                self._add_event("storage", fault or f"storage is back after {self._away_s(now_ns)} s")
                self._away_ns = now_ns
            self._storage_fault = fault

    def add_event(self, kind: str, text: str, robot: str = "") -> None:
        """A line for the list of events. `kind` chooses its colour: see `.event[data-kind]` in style.css."""
        with self._lock:
            self._add_event(kind, text, robot)

    def pop_commands(self) -> list[OperatorCommand]:
        """People's commands since the last call, oldest first."""
        return self._queue.pop()

    def pop_version_changes(self) -> list[VersionChange]:
        """What people want with versions since the last call, oldest first."""
        return self._queue.pop_version_changes()

    # --- the page's side ----------------------------------------------------------------------------------------

    def submit_command(self, command: OperatorCommand) -> bool:
        """Queue `command` (`CommandQueue.submit`); False when the gateway's loop does not drain the queue."""
        submitted = self._queue.submit(command)
        self.on_command()
        return submitted

    def submit_version_change(self, change: VersionChange) -> bool:
        """Queue what an operator wants with versions; False when the queue is full."""
        submitted = self._queue.submit_version_change(change)
        self.on_command()
        return submitted

    def pop_rejections(self, operator: str) -> list[tuple[str, str]]:
        """(robot that was not given, or '', and why) for `operator` since the last call."""
        return self._queue.pop_rejections(operator)

    def leases(self) -> dict[str, Lease]:
        """Who holds which robot now."""
        with self._lock:
            states = [robot.state for robot in self._robots.values()]
        return {state.name: state.lease for state in states if state is not None and state.lease is not None}

    def stops(self, robot: str) -> dict[str, str]:
        """Who stops a robot, by the id of the stop."""
        with self._lock:
            known = self._robots.get(robot)
            return known.stop.stops if known else {}

    def spec(self, robot: str) -> RobotSpec | None:
        """The spec of a robot that said hello, else None."""
        with self._lock:
            known = self._robots.get(robot)
            return known.spec if known else None

    def robots(self) -> list[str]:
        """Names of all robots seen."""
        with self._lock:
            return sorted(self._robots)

    def is_lost(self, robot: str) -> bool:
        """Whether a robot has been silent for `LOST_AFTER_S` or never spoke."""
        with self._lock:
            known = self._robots.get(robot)
            return known is None or self._clock.now_ns() - known.seen_ns > LOST_AFTER_S * 1e9

    def previews(self, after: int) -> tuple[int, list[tuple[str, str, bytes]]]:
        """The serial to go on with, and the newest pictures after serial `after` as (robot, camera, JPEG)."""
        with self._lock:
            fresh = [(*key, jpeg) for key, (serial, jpeg) in self._previews.items() if serial > after]
            return self._preview_serial, fresh

    def observe(self) -> FleetObservation:
        """What is known now, as it was reported."""
        with self._lock:
            now_ns = self._clock.now_ns()
            return FleetObservation(
                {name: ((now_ns - one.seen_ns) / 1e9, one.status, one.state) for name, one in self._robots.items()},
                self._trainer and ((now_ns - self._trainer[1]) / 1e9, self._trainer[0]),
                self._version,
                self._steps_stored,
                self._jobs,
                self._curve[-1]["tasks"] if self._curve else {},
                self._away_s(now_ns),
            )

    def snapshot(self) -> dict[str, Any]:
        """All that the page shows but the pictures, ready for JSON: no NaN, no infinities."""
        with self._lock:
            now_ns = self._clock.now_ns()
            self._mark_lost(now_ns)
            return {
                "t_s": round((now_ns - self._started_ns) / 1e9, 3),
                "robots": [robot_model(robot, now_ns, self._instructions) for _, robot in sorted(self._robots.items())],
                "trainer": self._trainer_now(now_ns),
                "storage": {"fault": self._storage_fault, "away_s": self._away_s(now_ns)},
                "version": self._version and version_model(self._version),
                "versions": version_status_models(self._versions),
                "totals": {
                    "steps_stored": self._steps_stored,
                    "ingest_p50_s": _median(self._ingest_s),
                    "applied_p50_s": _median(self._applied_s),
                },
                "jobs": [job_model(job) for job in self._jobs],
                "measured": dict(self._measured),
                "unaided": self._unaided.summary(),
                "curve": list(self._curve),
                "curve_revision": self._curve_revision,
                "events": list(self._events),
                "events_revision": self._events_revision,
            }

    def run(self) -> dict[str, Any]:
        """How the training run went until now, ready for JSON."""
        with self._lock:
            return self._run.model()

    # --- inside, with the lock held -----------------------------------------------------------------------------

    def _add_event(self, kind: str, text: str, robot: str = "", *, replace: bool = False) -> None:
        """A line for the events; with `replace` it takes the place of the last one of its kind."""
        t_s = round((self._clock.now_ns() - self._started_ns) / 1e9, 3)
        if replace:
            last = next((event for event in reversed(self._events) if event["kind"] == kind), None)
            if last is not None:
                self._events.remove(last)
        self._events.append({"t_s": t_s, "kind": kind[:64], "robot": robot[:64], "text": text[:_LONGEST]})
        self._events_revision += 1

    def _mark_lost(self, now_ns: int) -> None:
        for robot in self._robots.values():
            if not robot.lost and robot.status is not None and now_ns - robot.seen_ns > LOST_AFTER_S * 1e9:
                robot.lost = True
                self._add_event("link", f"no word for {LOST_AFTER_S:.0f} s", robot.name)

    def _away_s(self, now_ns: int) -> float | None:
        return round((now_ns - self._away_ns) / 1e9, 1) if self._storage_fault else None

    def _trainer_now(self, now_ns: int) -> dict[str, Any] | None:
        if self._trainer is None:
            return None
        status, seen_ns = self._trainer
        return {
            **{field: getattr(status, field) for field in status.__struct_fields__ if field != "curves"},
            "refusal": status.refusal[:_LONGEST],
            "loss": finite(status.loss),
            "steps_per_s": finite(status.steps_per_s),
            "age_s": round((now_ns - seen_ns) / 1e9, 1),
        }


def _median(samples: deque[float]) -> float | None:
    return statistics.median(samples) if samples else None
