from dataclasses import dataclass, field

from lerobot.cameras import CameraConfig
from lerobot.robots import RobotConfig


@CameraConfig.register_subclass("standin")
@dataclass
class StandinCameraConfig(CameraConfig):
    slow_s: float = 0.15
    color_mode: str = "rgb"


@RobotConfig.register_subclass("standin")
@dataclass
class StandinConfig(RobotConfig):
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
    own_picture: bool = False
    fail: str = ""
