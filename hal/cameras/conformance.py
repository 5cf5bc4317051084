"""The `Camera` contract as checks that run on any camera, in its own tests or at the bench:

from hal.cameras.conformance import check_camera
print(check_camera(lambda: MyCamera(config)))
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hal.cameras.capture import check_spec
from hal.conformance import ConformanceReport, Figure
from hal.conformance.rules import check_picture, refuses, require, run_rules
from hal.interfaces.camera import Camera
from wire.errors import RobotError
from wire.types import CameraSpec, Frame

LOOKS_HZ = 200.0
"""how often the newest picture is asked for"""


def check_camera(make: Callable[[], Camera], seconds: float = 2.0) -> ConformanceReport:
    """Run every check on cameras from `make`, and watch one for `seconds`. Nothing is open when it returns."""
    rules = _CameraRules(make, seconds)
    wanted = (rules.spec, rules.unready_is_refused, rules.connect_twice, rules.pictures, rules.close_twice)
    return ConformanceReport(tuple(run_rules(make, wanted)), rules.figures)


class _CameraRules:
    """Each rule is called with a new camera, as `make` gives it."""

    def __init__(self, make: Callable[[], Camera], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self.figures: tuple[Figure, ...] = ()

    def spec(self, camera: Camera) -> None:
        require(isinstance(camera, Camera), "lacks a method of hal.interfaces.camera.Camera; add it.")
        require(isinstance(camera.spec, CameraSpec), "`spec` must be a CameraSpec, set by the constructor.")
        check_spec(camera.spec, "this camera")
        require(self._make().spec == camera.spec, "two cameras of the same configuration have other specs.")

    def unready_is_refused(self, camera: Camera) -> None:
        refuses(camera.read, "read() before connect()", RobotError)

    def connect_twice(self, camera: Camera) -> None:
        camera.connect()
        camera.connect()
        camera.read()

    def close_twice(self, camera: Camera) -> None:
        camera.close()
        camera.connect()
        camera.close()
        camera.close()
        refuses(camera.read, "read() after close()", RobotError)
        camera.connect()
        camera.read()

    def pictures(self, camera: Camera) -> None:
        camera.connect()
        spec = camera.spec
        seen: list[Frame] = []
        waits_s, ages_s = [], []
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            begun = time.perf_counter()
            frame = camera.read()
            waits_s.append(time.perf_counter() - begun)
            age_s = (time.monotonic_ns() - frame.time_ns) / 1e9
            require(age_s >= 0, f"a picture is {-age_s:.3f} s from the future; stamp by time.monotonic_ns().")
            check_picture(spec, frame)
            before = seen[-1] if seen else None
            if before is None or frame.time_ns != before.time_ns:
                require(before is None or frame.time_ns > before.time_ns, "a picture is older than the one before it.")
                seen.append(frame)
                ages_s.append(age_s)
            else:
                same = np.array_equal(frame.image, before.image)
                require(same, "a picture changed and its time did not: give each its own memory and time.")
            time.sleep(1 / LOOKS_HZ)
        require(
            len(seen) > 1,
            f"gave {len(seen)} picture in {self._seconds:g} s: it stands still, or its rate_hz is not true.",
        )
        span_s = (seen[-1].time_ns - seen[0].time_ns) / 1e9
        faster = "leave pictures out: nobody expects more than the spec says."
        self.figures = (
            Figure("read p99", 1e3 * float(np.percentile(waits_s, 99)), "ms", 5.0, advice="read() must not wait."),
            Figure("rate", (len(seen) - 1) / span_s, "Hz", 1.25 * min(spec.rate_hz, LOOKS_HZ), advice=faster),
            Figure("age of a new picture p99", 1e3 * float(np.percentile(ages_s, 99)), "ms"),
        )
