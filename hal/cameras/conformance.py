"""The `Camera` contract as checks that run on any camera, in its own tests or at the bench:

from hal.cameras.conformance import check_camera
print(check_camera(lambda: MyCamera(config)))
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hal.cameras.capture import check_spec
from hal.conformance import CheckOutcome, ConformanceReport, Figure
from hal.interfaces.camera import Camera
from wire.errors import FleetError, RobotError
from wire.types import CameraSpec, Frame

LOOKS_HZ = 200.0
"""how often the newest picture is asked for"""


def check_camera(
    make: Callable[[], Camera], seconds: float = 2.0, sleep: Callable[[float], None] = time.sleep
) -> ConformanceReport:
    """Run every check on cameras from `make`, and watch one for `seconds`. Nothing is open when it returns."""
    run = _CameraRun(make, seconds, sleep)
    checks = []
    for rule in (run.spec, run.unready_is_refused, run.connect_twice, run.pictures, run.close_twice):
        try:
            wrong = rule()
        except Exception as error:  # noqa: BLE001 - a camera may raise anything; the report must say what
            wrong = f"raised {type(error).__name__}: {error}"
        checks.append(CheckOutcome(rule.__name__, not wrong, wrong))
    return ConformanceReport(tuple(checks), run.figures)


class _CameraRun:
    """Each rule gives what is wrong, '' when nothing is."""

    def __init__(self, make: Callable[[], Camera], seconds: float, sleep: Callable[[float], None]) -> None:
        self._make, self._seconds, self._sleep = make, seconds, sleep
        self.figures: tuple[Figure, ...] = ()

    def spec(self) -> str:
        camera = self._make()
        if not isinstance(camera, Camera):
            return "lacks a method of hal.interfaces.camera.Camera; add it."
        if not isinstance(camera.spec, CameraSpec):
            return "`spec` must be a CameraSpec, set by the constructor."
        check_spec(camera.spec, "this camera")
        return "" if self._make().spec == camera.spec else "two cameras of the same configuration have other specs."

    def unready_is_refused(self) -> str:
        return _refused(self._make(), "before connect()")

    def connect_twice(self) -> str:
        camera = self._make()
        try:
            camera.connect()
            camera.connect()
            camera.read()
        finally:
            camera.close()
        return ""

    def pictures(self) -> str:
        camera = self._make()
        try:
            camera.connect()
            return self._watch(camera)
        finally:
            camera.close()

    def close_twice(self) -> str:
        camera = self._make()
        camera.close()
        camera.connect()
        camera.close()
        camera.close()
        if wrong := _refused(camera, "after close()"):
            return wrong
        try:
            camera.connect()
            camera.read()
        except FleetError as error:
            return f"cannot be opened again after close(): {error}"
        finally:
            camera.close()
        return ""

    def _watch(self, camera: Camera) -> str:
        spec = camera.spec
        seen: list[Frame] = []
        waits_s, ages_s = [], []
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            begun = time.perf_counter()
            frame = camera.read()
            waits_s.append(time.perf_counter() - begun)
            age_s = (time.monotonic_ns() - frame.time_ns) / 1e9
            if age_s < 0:
                return f"a picture is {-age_s:.3f} s from the future; stamp by time.monotonic_ns()."
            got = f"{frame.image.dtype}{list(frame.image.shape)}"
            if got != f"uint8[{spec.height}, {spec.width}, 3]":
                return f"gave {got}; the spec says uint8[{spec.height}, {spec.width}, 3]."
            if seen and frame.time_ns < seen[-1].time_ns:
                return "a picture is older than the one before it."
            if not seen or frame.time_ns != seen[-1].time_ns:
                seen.append(frame)
                ages_s.append(age_s)
            elif not np.array_equal(frame.image, seen[-1].image):
                return (
                    "a picture changed after it was given, or its time stands still: give each its own memory and time."
                )
            self._sleep(1 / LOOKS_HZ)
        if len(seen) < 2:
            return f"gave {len(seen)} picture in {self._seconds:g} s: it stands still, or its rate_hz is not true."
        span_s = (seen[-1].time_ns - seen[0].time_ns) / 1e9
        faster = "leave pictures out: nobody expects more than the spec says."
        self.figures = (
            Figure("read p99", 1e3 * float(np.percentile(waits_s, 99)), "ms", 5.0, advice="read() must not wait."),
            Figure("rate", (len(seen) - 1) / span_s, "Hz", 1.25 * min(spec.rate_hz, LOOKS_HZ), advice=faster),
            Figure("age of a new picture p99", 1e3 * float(np.percentile(ages_s, 99)), "ms"),
        )
        return ""


def _refused(camera: Camera, when: str) -> str:
    try:
        camera.read()
    except RobotError:
        return ""
    finally:
        camera.close()
    return f"read() {when} must raise RobotError that says what to do."
