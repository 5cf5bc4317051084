import itertools
import time

import numpy as np
from lerobot.cameras import Camera
from lerobot.cameras.utils import make_cameras_from_configs
from lerobot.robots import Robot

from .config_standin import StandinCameraConfig, StandinConfig


class StandinCamera(Camera):
    """Each picture takes its time, and whoever reads waits for it."""

    def __init__(self, config: StandinCameraConfig):
        super().__init__(config)
        self.config, self.color_mode = config, config.color_mode
        self._open, self._count = False, itertools.count(1)

    @property
    def is_connected(self) -> bool:
        return self._open

    @staticmethod
    def find_cameras() -> list:
        return []

    def connect(self, warmup: bool = True) -> None:
        self._open = True

    def read(self, color_mode=None) -> np.ndarray:
        return self.async_read()

    def async_read(self, timeout_ms: float = 200) -> np.ndarray:
        time.sleep(self.config.slow_s)
        image = np.zeros((self.height, self.width, 3), np.uint8)
        image[..., 0] = next(self._count) % 256
        return image

    def disconnect(self) -> None:
        self._open = False


class Standin(Robot):
    """A lift and two wheels: one dimension that is set and two that go on."""

    config_class = StandinConfig
    name = "standin"

    def __init__(self, config: StandinConfig):
        super().__init__(config)
        self.config = config
        self.cameras = make_cameras_from_configs(config.cameras)
        self.lift, self.wheels, self.commands, self._open = 0.2, [0.0, 0.0], [], False

    @property
    def observation_features(self) -> dict:
        pictures = {name: (c.height, c.width, 3) for name, c in self.config.cameras.items()}
        own = {"own": (8, 8, 3)} if self.config.own_picture else {}
        return {"lift.height": float, "left.vel": float, "right.vel": float, "battery": float, **pictures, **own}

    @property
    def action_features(self) -> dict:
        return {"lift.height": float, "left.vel": float, "right.vel": float}

    @property
    def is_connected(self) -> bool:
        return self._open

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        if self.config.fail == "connect":
            raise OSError("no such bus")
        for camera in self.cameras.values():
            camera.connect()
        self._open = True

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_observation(self) -> dict:
        if self.config.fail == "shape":
            return {"lift.height": self.lift}
        if self.config.fail == "raise":
            raise ZeroDivisionError("division by zero")
        seen = {"lift.height": self.lift, "left.vel": self.wheels[0], "right.vel": self.wheels[1], "battery": 0.9}
        for name, camera in self.cameras.items():
            seen[name] = camera.async_read()
        if self.config.own_picture:
            seen["own"] = np.full((8, 8, 3), int(100 * self.lift), np.uint8)
        return seen

    def send_action(self, action: dict) -> dict:
        self.commands.append(action)
        # It rises by at most a tenth of a metre at once, and says so.
        self.lift += min(0.1, max(-0.1, action["lift.height"] - self.lift))
        self.wheels = [action["left.vel"], action["right.vel"]]
        return {**action, "lift.height": self.lift}

    def disconnect(self) -> None:
        for camera in self.cameras.values():
            camera.disconnect()
        self._open = False
