"""A robot package as a third party ships it for lerobot; it knows nothing of this project."""

from .config_standin import StandinCameraConfig, StandinConfig
from .standin import Standin, StandinCamera

__all__ = ["Standin", "StandinCamera", "StandinCameraConfig", "StandinConfig"]
