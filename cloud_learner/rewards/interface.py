"""What a model is that says of an episode whether it succeeded, and what it is shown of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloud_learner.rewards.calibration import SuccessMeasurement, Thresholds
from wire.types import RobotSpec


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeEnd:
    """The last k steps of an episode, 1 <= k <= the model's `steps`, as the policy saw them."""

    episode: str
    task: str
    state: np.ndarray
    """float32[k, ds]"""
    images: dict[str, np.ndarray]
    """{camera: uint8[k, h, w, 3]}, RGB"""


class SuccessModel(ABC):
    """Made of a file, which it knows by its hash: the same bytes are the same model."""

    sha256: str
    steps: int
    """how many of an episode's last steps it looks at, at most"""
    tasks: tuple[str, ...]
    """those that it can tell of; empty: any"""
    thresholds: Thresholds | None = None
    """found when it was trained; None: they have to be found on what is judged here"""
    measured: SuccessMeasurement | None = None
    """likewise, on episodes that neither it nor its thresholds were made with"""

    @abstractmethod
    def require(self, spec: RobotSpec) -> None:
        """Raise `SpecMismatchError` unless it can tell of what robots of `spec` see."""

    @abstractmethod
    def score(self, ends: Sequence[EpisodeEnd]) -> np.ndarray:
        """float32[n] chance of success, 0 to 1, of n episodes."""
