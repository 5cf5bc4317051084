"""What comes on the topics of a robot on ROS 2, one class for each kind: when it was made, and the newest of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.drivers.ros2.config import ImageTopic, Ros2Config, StampSource, WrenchTopic
from hal.drivers.ros2.messages import decode_picture, fit_picture, read_wrench, stamp_ns
from hal.drivers.ros2.time import ClockMap, StampOrder, read_together
from wire.clock import Clock
from wire.errors import InvalidDataError
from wire.types import CameraSpec, Frame, RobotSpec

_PICTURES_KEPT = 32


class Stamps:
    """When a message was made, as `config.stamps` says, and when that was on the machine's clock."""

    def __init__(self, config: Ros2Config, ros_now: Callable[[], int], clock: Clock | None) -> None:
        """`clock`: a simulation's own, which stamps everything as it comes; None for the machine's."""
        self._config = config
        self._ros_now = ros_now
        self._clock = clock
        self._map = ClockMap(config.use_sim_time, config.jump_s)
        self._one_at_a_time = threading.Lock()

    def now_ns(self) -> int:
        """In the time of the stamps."""
        return time.monotonic_ns() if self._config.stamps == StampSource.arrival else self._ros_now()

    def read(self, message: Any, topic: str) -> tuple[int, int, str]:
        """(its stamp, its time on our clock, '' or how the ROS clock jumped).

        Raises `InvalidDataError` for a message without a stamp, or from the future.
        """
        if self._config.stamps == StampSource.arrival:
            machine_ns = time.monotonic_ns()
            return machine_ns, self._clock.now_ns() if self._clock else machine_ns, ""
        stamp = stamp_ns(message)
        if stamp == 0:
            raise InvalidDataError(
                f"'{topic}': header.stamp is 0. Have the robot stamp its messages, or set `stamps` to arrival."
            )
        # Two threads hear messages; to note an earlier moment after a later one would look like a clock going back.
        with self._one_at_a_time:
            ros_ns, machine_ns = read_together(self._ros_now)
            if self._config.use_sim_time and ros_ns == 0:
                raise InvalidDataError(
                    "nothing came on '/clock', and use_sim_time is set. Start it, or unset use_sim_time."
                )
            jump = self._map.note(ros_ns, machine_ns)
        ahead_s = (stamp - ros_ns) / 1e9
        if ahead_s > self._config.future_s:
            raise InvalidDataError(
                f"'{topic}': stamped {ahead_s:.3f} s ahead of this computer's ROS time. Synchronise the two computers' "
                "clocks (chrony, PTP), check use_sim_time on both, or set `stamps` to arrival."
            )
        return stamp, self._clock.now_ns() if self._clock else self._map.to_machine(stamp), jump


class ReceivedPictures:
    """One camera's topic: converts what comes and keeps the last few. Its owner holds the lock that it needs."""

    def __init__(self, spec: CameraSpec, config: Ros2Config, topic: str, how: ImageTopic) -> None:
        self.spec = spec
        self.topic = topic
        self.frames: dict[int, Frame] = {}
        """by stamp"""
        # As far back as a state may be that still wants its picture.
        self._keep = int(np.clip(np.ceil(spec.rate_hz * config.max_age_s) + 2, 4, _PICTURES_KEPT))
        self._how = how
        self._order = StampOrder(topic, config.jump_s)

    def convert(self, message: Any, time_ns: int) -> Frame:
        """Slow, needs no lock. Raises `InvalidDataError`."""
        seen = decode_picture(message, self.topic, self._how.depth)
        image = fit_picture(seen, self.spec, self._how, self.topic)
        return Frame(time_ns, image, None if image is seen else seen)

    def add(self, stamp: int, frame: Frame) -> str:
        """Also one that comes late. '' or how its stamps jumped."""
        _, jump = self._order.note(stamp)
        if jump:
            self.frames.clear()
        self.frames.setdefault(stamp, frame)
        if len(self.frames) > self._keep:
            del self.frames[min(self.frames)]
        return jump

    def at(self, stamp: int) -> int | None:
        """The stamp of the newest at or before `stamp`."""
        return max((known for known in self.frames if known <= stamp), default=None)

    @property
    def newest(self) -> int | None:
        """Its stamp."""
        return max(self.frames, default=None)

    def clear_before(self, stamp: int) -> None:
        """Forget what was captured before."""
        self.frames = {known: frame for known, frame in self.frames.items() if known >= stamp}


@dataclass(frozen=True, slots=True)
class TopicState:
    """Numbers that came at once."""

    stamp: int
    time_ns: int
    values: np.ndarray


class ReceivedWrenches:
    """The newest of one force and torque sensor. Its owner holds the lock that it needs."""

    def __init__(self, spec: RobotSpec, config: Ros2Config, sensor: WrenchTopic, topic: str) -> None:
        """`topic`: its name in full."""
        states = [d.name for d in spec.state]
        self.topic = topic
        self.which = np.array([states.index(name) for name in sensor.axes], int)
        self.newest: TopicState | None = None
        self._axes = tuple(sensor.axes.values())
        self._order = StampOrder(topic, config.jump_s)

    def add(self, stamp: int, time_ns: int, message: Any) -> str:
        """'' or how its stamps jumped."""
        is_newest, jump = self._order.note(stamp)
        if is_newest:
            self.newest = TopicState(stamp, time_ns, read_wrench(message, self._axes))
        return jump
