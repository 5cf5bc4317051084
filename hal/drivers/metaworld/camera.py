"""Two ways to film a simulation: between two control ticks, or beside them in a thread, as a real camera would."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from hal.cameras.picture import resize_image
from hal.driver_host.priority import ordinary
from hal.drivers.metaworld.render import Renderer, render_error
from hal.drivers.metaworld.simulation import Pose, Simulation, import_simulator
from wire.clock import Clock
from wire.errors import RenderError
from wire.types import Frame

log = logging.getLogger(__name__)

_PREVIEW_NS = 95_000_000
"""least time between two previews: ten a second, with room for a camera that is a little early"""
_TIMEOUT_S = 10.0
"""so long a reset waits for the thread's first frame, and `close` for its end"""


class _FrameMaker:
    """Makes frames of drawn pictures."""

    def __init__(self, size_px: int) -> None:
        self._size_px = size_px
        self._previewed_ns = -_PREVIEW_NS

    def frame(self, time_ns: int, picture: np.ndarray, preview: bool) -> Frame:
        """The policy's view of `picture`, with the picture itself if a `preview` is wanted and due."""
        small = resize_image(picture, self._size_px, self._size_px)
        if not preview or 0 <= time_ns - self._previewed_ns < _PREVIEW_NS:
            return Frame(time_ns, small)
        self._previewed_ns = time_ns
        return Frame(time_ns, small, picture)


class InlineCamera:
    """Draws inside `frame()`, at tick 0 and every `every_ticks` after it: the same run gives the same pictures."""

    def __init__(self, name: str, image_px: int, preview_px: int, every_ticks: int, clock: Clock) -> None:
        self.previews = False
        """whether some frames bring the picture as it was drawn"""
        self._renderer = Renderer(name, preview_px)
        self._maker = _FrameMaker(image_px)
        self._every_ticks = every_ticks
        self._clock = clock
        self._simulation: Simulation | None = None
        self._tick = 0
        self._drawn = -1
        self._frame: Frame | None = None

    def pause(self) -> None:
        """Stop filming: the scene is about to be rebuilt."""
        self._simulation, self._frame, self._drawn = None, None, -1

    def start(self, simulation: Simulation) -> None:
        """Film `simulation` from now on. Raises `RenderError`."""
        self._simulation, self._tick = simulation, 0
        self.frame()

    def on_step(self, simulation: Simulation) -> None:
        """One control period of `simulation` has passed."""
        self._tick += 1

    def frame(self) -> Frame:
        """The newest frame of the simulation last started. Raises `RenderError`."""
        assert self._simulation is not None, "start() comes first"
        due = self._tick // self._every_ticks
        if self._frame is None or due > self._drawn:
            time_ns = self._clock.now_ns()
            picture = self._renderer.render(self._simulation.model, self._simulation.data)
            self._frame, self._drawn = self._maker.frame(time_ns, picture, self.previews), due
        return self._frame

    def close(self) -> None:
        """Give the GL context back. May be called twice."""
        self._renderer.close()


class _Scene(NamedTuple):
    episode: int
    simulation: Simulation
    pose: Pose


class ThreadedMetaWorldCamera:
    """Films at its own wall-clock rate in a thread that alone owns the GL context; has the methods of `InlineCamera`.

    The robot leaves a copy of the pose after each step (about 3 us); the thread takes the newest one. Neither waits for
    the other: a reference is handed over, no lock is held. The drawing itself runs outside Python's global lock.
    """

    def __init__(self, name: str, image_px: int, preview_px: int, rate_hz: float, clock: Clock) -> None:
        self.previews = False
        self._name = name
        self._maker = _FrameMaker(image_px)
        self._drawn_px = preview_px
        self._period_s = 1.0 / rate_hz
        self._clock = clock
        self._episode = 0
        self._scene: _Scene | None = None
        self._newest: tuple[int, Frame] | None = None
        self._error: RenderError | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"camera-{name}", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        self._scene = None

    def start(self, simulation: Simulation) -> None:
        with self._changed:
            self._episode += 1
            self._scene = _Scene(self._episode, simulation, simulation.pose())
            self._changed.notify_all()
            fresh = self._changed.wait_for(
                lambda: self._error or (self._newest and self._newest[0] == self._episode), _TIMEOUT_S
            )
        self._raise_error()
        if not fresh:
            raise RenderError(
                f"camera '{self._name}' gave no frame within {_TIMEOUT_S:g} s of the reset. "
                "The machine is too busy to draw; run fewer simulated robots on it."
            )

    def on_step(self, simulation: Simulation) -> None:
        self._scene = _Scene(self._episode, simulation, simulation.pose())

    def frame(self) -> Frame:
        self._raise_error()
        assert self._newest is not None, "start() comes first"
        return self._newest[1]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("camera '%s': its thread has not ended after %g s.", self._name, _TIMEOUT_S)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RenderError(str(self._error)) from self._error

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Drawing takes a third of a control period: it must not compete with control loops.
        ordinary()
        try:
            with contextlib.closing(Renderer(self._name, self._drawn_px)) as renderer:
                self._film(renderer)
        except Exception as error:  # noqa: BLE001 - handed to the control thread, which raises it
            failed = error if isinstance(error, RenderError) else render_error(error, f"camera '{self._name}' died")
            with self._changed:
                self._error = failed
                self._changed.notify_all()

    def _film(self, renderer: Renderer) -> None:
        mujoco, _ = import_simulator()
        own: dict[Simulation, Any] = {}
        filmed, deadline = 0, 0.0
        while (scene := self._next_scene(filmed, deadline)) is not None:
            now = time.monotonic()
            # A camera that cannot keep up drops frames; it does not film the same moment several times to catch up.
            late = scene.episode != filmed or deadline + self._period_s < now
            filmed, deadline = scene.episode, (now if late else deadline) + self._period_s
            time_ns = self._clock.now_ns()
            model = scene.simulation.model
            if scene.simulation not in own:
                own[scene.simulation] = mujoco.MjData(model)
            data = own[scene.simulation]
            data.qpos[:], data.mocap_pos[:], data.mocap_quat[:] = scene.pose
            # Positions are all a picture needs: cheaper than a whole forward pass.
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            mujoco.mj_camlight(model, data)
            frame = self._maker.frame(time_ns, renderer.render(model, data), self.previews)
            with self._changed:
                if scene.episode == self._episode:
                    self._newest = scene.episode, frame
                    self._changed.notify_all()

    def _next_scene(self, filmed: int, deadline: float) -> _Scene | None:
        """The newest scene when its frame is due; None to end."""
        with self._changed:
            while not self._closed:
                scene, wait_s = self._scene, deadline - time.monotonic()
                if scene is not None and (scene.episode != filmed or wait_s <= 0):
                    return scene
                self._changed.wait(wait_s if scene is not None else None)
        return None
