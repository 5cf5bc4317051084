"""What ROS 2 between a driver and its robot costs: added latency of reading and writing, and pictures lost.

One robot, a seven-joint arm with a 640x480 camera at 30 Hz that does nothing else, is driven at a control rate

- `direct`: by a driver in the same process;
- through topics between two processes (`sim_robot_node`, the driver `ros2`, every command confirmed by `executed`):
  with Fast DDS as it comes, pictures best effort or reliable, and with the profile that is shipped here.

Every picture carries its number, so what is lost is counted, not guessed. Arms take turns, and figures are medians of
the rounds: this machine also does other things.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np

from benchmarks.common.cpu import Others
from benchmarks.common.table import Goal, Result, require, run
from hal.interfaces.robot import Feedback, Robot
from hal.safety.limiter import limit_action
from wire.errors import FleetError
from wire.types import CameraSpec, Dimension, Frame, Observation, RobotSpec

JOINTS = 7
CAMERA_HZ = 30.0
WARM_TICKS = 30
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class OverheadArm:
    """One way from driver to robot."""

    name: str
    topics: bool = True
    own_profile: bool = False
    reliable: bool = True
    """the camera's pictures; everything else always is"""


DIRECT = OverheadArm("direct", topics=False)
OURS = OverheadArm("ROS 2, our profile, reliable", own_profile=True)
ARMS = (
    DIRECT,
    OverheadArm("ROS 2, default, best effort", reliable=False),
    OverheadArm("ROS 2, default, reliable"),
    OURS,
)


@dataclass(frozen=True, slots=True)
class OverheadSize:
    """How much of everything."""

    arms: tuple[OverheadArm, ...] = ARMS
    rates_hz: tuple[float, ...] = (50.0, 100.0)
    seconds: float = 4.0
    rounds: int = 3


FULL = OverheadSize()
QUICK = OverheadSize(rates_hz=(100.0,), seconds=1.0, rounds=1)


class BenchArm:
    """Keeps the `Robot` protocol: goes at once where it is told, and films its number."""

    def __init__(self, control_hz: float) -> None:
        joints = tuple(Dimension(f"joint_{index}", "rad", -3.0, 3.0) for index in range(JOINTS))
        self.spec = RobotSpec("bench-arm", joints, joints, (CameraSpec("front", 480, 640, CAMERA_HZ),), control_hz)
        self.tasks = ("follow",)
        self._state = np.zeros(JOINTS, np.float32)
        self._begun_s = 0.0
        self._period = self._number = 0
        self._frame: Frame | None = None

    def connect(self) -> None:
        self._begun_s = time.monotonic()

    def reset(self, task: str, seed: int) -> None:
        self._frame = None

    def read(self) -> Observation:
        period = int((time.monotonic() - self._begun_s) * CAMERA_HZ)
        if self._frame is None or period != self._period:
            self._period, self._number = period, self._number + 1
            number = self._number
            image = np.full((480, 640, 3), number % 251, np.uint8)
            image[0, 0] = number >> 16, number >> 8 & 255, number & 255
            self._frame = Frame(time.monotonic_ns(), image)
        return Observation(time.monotonic_ns(), self._state.copy(), {"front": self._frame}, "follow")

    def write(self, action: np.ndarray) -> Feedback:
        self._state = limit_action(self.spec, action)
        return Feedback(self._state.copy())

    def close(self) -> None:
        return None


def number_of(frame: Frame) -> int:
    """Which of the camera's pictures it is."""
    high, middle, low = (int(value) for value in frame.image[0, 0])
    return high << 16 | middle << 8 | low


def measure(quick: bool) -> Result:
    """All arms at all rates."""
    require("rclpy", extra="ros")
    return compare(QUICK if quick else FULL)


def compare(size: OverheadSize) -> Result:
    """The table for `size`, which must have the direct arm and ours."""
    others = Others()
    found: dict[tuple[OverheadArm, float], list[dict[str, float]]] = {}
    for _ in range(size.rounds):
        for rate_hz in size.rates_hz:
            for arm in size.arms:
                found.setdefault((arm, rate_hz), []).append(_apart(arm, rate_hz, size.seconds))
    figures = {
        key: {name: float(np.median([one[name] for one in rounds])) for name in rounds[0]}
        for key, rounds in found.items()
    }
    lost = {key: sum(one["lost"] for one in rounds) for key, rounds in found.items()}
    shown = {key: sum(one["shown"] for one in rounds) for key, rounds in found.items()}
    rows = [_row(arm, rate_hz, figures, lost, shown) for rate_hz in size.rates_hz for arm in size.arms]
    fastest = max(size.rates_hz)
    ours, direct = figures[OURS, fastest], figures[DIRECT, fastest]
    added_ms = ours["read p50"] + ours["write p50"] - direct["read p50"] - direct["write p50"]
    all_lost = sum(lost[OURS, rate_hz] for rate_hz in size.rates_hz)
    pictures_hz = min(figures[OURS, rate_hz]["pictures/s"] for rate_hz in size.rates_hz)
    return Result(
        "What ROS 2 topics between driver and robot cost",
        rows,
        [
            Goal("pictures lost, our profile", float(all_lost), "0", all_lost == 0),
            Goal("pictures/s, our profile", pictures_hz, "at least 29", pictures_hz >= 29),
            Goal(
                f"ms added to read and write, p50, {fastest:g} Hz",
                added_ms,
                f"below a control period of {1000 / fastest:g} ms",
                added_ms < 1000 / fastest,
            ),
        ],
        [
            f"Medians of {size.rounds} round(s) of {size.seconds:g} s each; pictures are counted over all. Others kept "
            f"{others.cores():.1f} of {os.cpu_count()} cores busy meanwhile.",
            "`read` takes what has come and waits for nothing; `write` publishes a JointTrajectory and waits for the "
            "robot's `executed`. `state age`: from the measurement to the driver's read.",
            "`added` is `write` and `read` together, less the same of the direct driver.",
        ],
    )


def _row(
    arm: OverheadArm,
    rate_hz: float,
    figures: dict[tuple[OverheadArm, float], dict[str, float]],
    lost: dict[tuple[OverheadArm, float], float],
    shown: dict[tuple[OverheadArm, float], float],
) -> dict[str, Any]:
    mine, direct = figures[arm, rate_hz], figures[DIRECT, rate_hz]
    pair = {
        end: mine[f"read {end}"] + mine[f"write {end}"] - direct[f"read {end}"] - direct[f"write {end}"]
        for end in ("p50", "p99")
    }
    return {
        "way": arm.name,
        "Hz": rate_hz,
        "read p50/p99 (ms)": f"{mine['read p50']:.2f}/{mine['read p99']:.2f}",
        "write p50/p99 (ms)": f"{mine['write p50']:.2f}/{mine['write p99']:.2f}",
        "added p50/p99 (ms)": f"{pair['p50']:.2f}/{pair['p99']:.2f}" if arm.topics else "",
        "state age p50/p99 (ms)": f"{mine['age p50']:.2f}/{mine['age p99']:.2f}",
        "picture age p50/p99 (ms)": f"{mine['picture p50']:.1f}/{mine['picture p99']:.1f}" if arm.topics else "",
        "pictures/s": round(mine["pictures/s"], 1),
        "pictures lost": f"{lost[arm, rate_hz]:.0f} of {shown[arm, rate_hz]:.0f}",
        "ticks failed": int(mine["refused"]) if arm.topics else "",
    }


def _apart(arm: OverheadArm, rate_hz: float, seconds: float) -> dict[str, float]:
    """One run of one arm in processes of its own: Fast DDS reads its profile once a process."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ExitStack() as running, tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as logs:
        environment = {
            "ROS_DOMAIN_ID": str(os.getpid() % 101 + 1),
            "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
            "ROS_LOG_DIR": logs,
            # what a user sets is kept: transports as they are without a profile
            "FASTDDS_BUILTIN_TRANSPORTS": "" if arm.own_profile else "DEFAULT",
        }
        ours, theirs = context.Pipe()
        work = [context.Process(target=_drive, args=(arm, rate_hz, seconds, environment, theirs), daemon=True)]
        if arm.topics:
            work.append(context.Process(target=_serve, args=(rate_hz, environment, stop), daemon=True))
        for process in work:
            process.start()
            running.callback(process.join, 10.0)
        running.callback(stop.set)
        theirs.close()
        if not ours.poll(PATIENCE_S + seconds):
            raise FleetError(f"'{arm.name}' at {rate_hz:g} Hz: no figures within {PATIENCE_S + seconds:g} s.")
        answer = ours.recv()
    if isinstance(answer, str):
        raise FleetError(f"'{arm.name}' at {rate_hz:g} Hz: {answer}")
    return answer


def _prepare(environment: dict[str, str]) -> None:
    for name, value in environment.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def _serve(rate_hz: float, environment: dict[str, str], stop: Event) -> None:
    from hal.drivers.ros2.sim_node import SimRobotNode

    _prepare(environment)
    node = SimRobotNode(BenchArm(rate_hz))
    try:
        node.open()
        node.run(stop.is_set)
    finally:
        node.close()


def _drive(arm: OverheadArm, rate_hz: float, seconds: float, environment: dict[str, str], answer: Connection) -> None:
    _prepare(environment)
    robot: Robot = BenchArm(rate_hz)
    if arm.topics:
        from hal.drivers.ros2.config import QosConfig, Ros2Config
        from hal.drivers.ros2.robot import Ros2Robot

        qos = QosConfig(images="reliable" if arm.reliable else "best_effort")
        robot = Ros2Robot(
            Ros2Config(
                robot.spec,
                executed=True,
                reset=True,
                simulated=True,
                qos=qos,
                connect_timeout_s=PATIENCE_S / 2,
                max_age_s=2.0,
                max_skew_s=2.0,
            )
        )
    try:
        robot.connect()
        robot.reset("follow", 0)
        answer.send(drive(robot, rate_hz, seconds))
    except FleetError as error:
        answer.send(str(error))
    finally:
        robot.close()


def drive(robot: Robot, rate_hz: float, seconds: float) -> dict[str, float]:
    """Times in ms of a loop of `seconds` at `rate_hz`, and what became of the camera's pictures."""
    times: dict[str, list[float]] = {"read": [], "write": [], "age": [], "picture": []}
    refused = first = heard_first = 0
    begun_s = time.perf_counter()
    ticks = WARM_TICKS + round(seconds * rate_hz)
    for tick in range(ticks):
        time.sleep(max(0.0, begun_s + tick / rate_hz - time.perf_counter()))
        start = time.perf_counter()
        try:
            observation = robot.read()
        except FleetError:
            # a picture or a state that is too late for the limits of the driver
            if tick <= WARM_TICKS:
                raise
            refused += 1
            continue
        done = time.perf_counter()
        now_ns, frame = time.monotonic_ns(), observation.images["front"]
        action = np.full(JOINTS, np.sin(tick / 20), np.float32)
        written = time.perf_counter()
        try:
            robot.write(action)
        except FleetError:
            refused += 1
        if tick == WARM_TICKS:
            (heard_first, first), first_s = _pictures(robot, frame), time.perf_counter()
        if tick < WARM_TICKS:
            continue
        times["read"].append(1e3 * (done - start))
        times["write"].append(1e3 * (time.perf_counter() - written))
        times["age"].append((now_ns - observation.time_ns) / 1e6)
        times["picture"].append((now_ns - frame.time_ns) / 1e6)
    took_s = time.perf_counter() - first_s
    heard, last = _pictures(robot, frame)
    heard, shown = heard - heard_first, last - first
    found = {f"{name} p{q}": float(np.percentile(of, q)) for name, of in times.items() for q in (50, 99)}
    return {**found, "pictures/s": heard / took_s, "shown": shown, "lost": shown - heard, "refused": refused}


def _pictures(robot: Robot, seen: Frame) -> tuple[int, int]:
    """(how many pictures came, the number of the newest); the direct driver hears of all it sees."""
    heard = getattr(robot, "heard", None)
    count, newest = heard("front") if heard is not None else (number_of(seen), seen)
    return count, number_of(newest)


if __name__ == "__main__":
    raise SystemExit(run("ros2_overhead", measure))
