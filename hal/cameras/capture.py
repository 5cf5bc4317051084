"""What all cameras share: a thread of its own that takes pictures as they come, and the newest one to read.

The thread opens the device, as some take seconds and block; takes every picture, so that none waits in a buffer and
grows old; keeps those that the wanted rate has room for; and opens the device again when it fails or falls silent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hal.cameras.picture import Fit, make_frame
from hal.driver_host.priority import ordinary
from wire.errors import ConfigError, FleetError, RobotError
from wire.types import CameraSpec, Frame

log = logging.getLogger(__name__)
_RETRY_S = 0.5
"""the pause before the device is opened again"""
_END_S = 1.0
"""how long closing waits for a device that does not answer"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraConfig:
    """What every camera is told."""

    name: str = "camera"
    height: int = 480
    width: int = 640
    rate_hz: float = 30.0
    """pictures that come faster are left out"""
    preview_height: int = 0
    preview_width: int = 0
    """of the larger picture for people; 0: they see the policy's"""
    fit: Fit = "stretch"
    stall_timeout_s: float = 2.0
    """without a new picture for so long the camera has failed"""
    first_frame_timeout_s: float = 10.0


class CaptureDevice(Protocol):
    """A device that gives pictures one after the other, at its own pace. Used in one thread only."""

    def open(self) -> None:
        """Raises `RobotError` that names the device and what to do."""
        ...

    def grab(self) -> tuple[int, np.ndarray] | None:
        """Wait for the next picture: monotonic ns of its capture and uint8[h, w, 3] RGB. None: there is no further one.

        Raises `RobotError` when the device gives no more.
        """
        ...

    def close(self) -> None:
        """Give it back; may be called without `open`."""
        ...


class ThreadedCamera:
    """Keeps the `Camera` protocol: takes pictures of a `CaptureDevice` in a thread and keeps the newest."""

    def __init__(self, config: CameraConfig, device: str, make: Callable[[], CaptureDevice]) -> None:
        """`device`: how errors name it. Raises `ConfigError` for what no camera can be."""
        self._preview = config.preview_height, config.preview_width
        self._what = f"camera '{config.name}' ({device})"
        self.spec = CameraSpec(config.name, config.height, config.width, config.rate_hz)
        check_spec(self.spec, device)
        if min(self._preview) < 0 or max(self._preview) > 8192 or bool(self._preview[0]) != bool(self._preview[1]):
            raise ConfigError(f"{self._what}: preview of {self._preview}: give two sides up to 8192.")
        if not config.stall_timeout_s > 0 or not config.first_frame_timeout_s > 0:
            raise ConfigError(f"{self._what}: stall_timeout_s and first_frame_timeout_s must be above 0.")
        self.config = config
        self._make = make
        self._newest: Frame | None = None
        self._alive_ns = 0
        self._error = ""
        self._ended = False
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def connect(self) -> None:
        """Open the device and wait for its first picture; twice is once. Raises `RobotError`."""
        if self._thread is not None:
            return
        self._stop = threading.Event()
        self._newest, self._error, self._ended = None, "", False
        thread = threading.Thread(target=self._run, args=(self._stop,), name=f"camera-{self.spec.name}", daemon=True)
        self._thread = thread
        thread.start()
        wait_s = self.config.first_frame_timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or bool(self._error), wait_s)
            there, error = self._newest is not None, self._error
        if there:
            return
        self.close()
        raise RobotError(error or f"{self._what} gave no picture within {wait_s:g} s. {_REMEDY}")

    def read(self) -> Frame:
        """The newest picture. Raises `RobotError` when the last one is older than `stall_timeout_s`, and why."""
        frame = self._newest
        if frame is None:
            raise RobotError(f"{self._what}: read before connect(); call connect() first.")
        silent_s = (time.monotonic_ns() - self._alive_ns) / 1e9
        if self._ended or silent_s <= self.config.stall_timeout_s:
            return frame
        why = self._error or f"{self._what} stands still. {_REMEDY}"
        raise RobotError(f"{why} Its last picture came {silent_s:.1f} s ago; it is tried again.")

    def close(self) -> None:
        """End the thread and give the device back. May be called twice."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)
            if thread.is_alive():
                log.warning("%s: its thread waits for the device and ends with the process.", self._what)
        self._newest = None

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self, stop: threading.Event) -> None:
        # taking pictures must not compete with control loops
        ordinary()
        while not stop.is_set() and not self._ended:
            try:
                self._film(stop)
            except Exception as error:  # noqa: BLE001 - read() raises it in the caller's thread
                self._fail(stop, error)
                stop.wait(_RETRY_S)

    def _film(self, stop: threading.Event) -> None:
        """Take pictures until the device ends or `stop` is set."""
        device = self._make()
        period_ns = 1e9 / self.spec.rate_hz
        due_ns = 0.0
        try:
            device.open()
            while not stop.is_set():
                taken = device.grab()
                if stop.is_set():
                    return  # a thread that was given up must not speak for its successor
                if taken is None:
                    self._ended = True
                    return
                time_ns, image = taken
                self._alive_ns = time.monotonic_ns()
                # Half a period of tolerance keeps a camera of just this rate whole; the average rate is kept.
                if time_ns < due_ns - period_ns / 2:
                    continue
                late = time_ns - due_ns > period_ns
                due_ns = (time_ns if late else due_ns) + period_ns
                size = self.spec.height, self.spec.width
                self._keep(make_frame(time_ns, image, size, self._preview, self.config.fit))
        finally:
            device.close()

    def _keep(self, frame: Frame) -> None:
        with self._changed:
            if self._error:
                log.info("%s gives pictures again.", self._what)
            self._newest, self._error = frame, ""
            self._changed.notify_all()

    def _fail(self, stop: threading.Event, error: Exception) -> None:
        text = str(error) if isinstance(error, FleetError) else f"{self._what}: {type(error).__name__}: {error}."
        with self._changed:
            if not stop.is_set():
                if not self._error:
                    log.warning("%s", text)
                self._error = text
                self._changed.notify_all()


_REMEDY = "Check its cable and power, and that no other program uses it."


def check_spec(spec: CameraSpec, device: str) -> None:
    """Raise `ConfigError` naming what a camera of `spec` cannot be."""
    where = f"camera '{spec.name}' ({device})"
    if not spec.name:
        raise ConfigError(f"camera ({device}): name is empty; the policy knows a camera by its name.")
    if not (1 <= spec.height <= 8192 and 1 <= spec.width <= 8192):
        raise ConfigError(f"{where}: height {spec.height} and width {spec.width}: each is 1 to 8192.")
    if not 0 < spec.rate_hz <= 1000:
        raise ConfigError(f"{where}: rate_hz {spec.rate_hz:g} is none; give 1 to 1000.")
