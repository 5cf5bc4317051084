"""What the page draws of a training run: the trainer's figures, and the fleet's beside them, over the whole run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloud_learner.operator.view_models import finite
from wire.messages.gateway import TrainerStatus

MAX_POINTS = 600
_MOST_CURVES = 64
_LONGEST_NAME = 64
_SPEED = "throughput/gradient_steps_per_second"


class RunCurves:
    """Bounded, however long the run and whatever a trainer says. One caller at a time."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int, dict[str, float | None]]] = []
        self._every = 1
        """of so many reports one is kept"""
        self._reports = 0
        self._names: dict[str, None] = {}

    def add(self, t_s: float, status: TrainerStatus, more: Mapping[str, float]) -> None:
        """A report of the trainer, and what else is to be drawn beside it."""
        self._reports += 1
        if (self._reports - 1) % self._every:
            return
        kept: dict[str, float | None] = {}
        values = {"loss": status.loss, _SPEED: status.steps_per_s, **more, **status.curves}
        for long, value in values.items():
            name = long[:_LONGEST_NAME]
            if name in self._names or len(self._names) < _MOST_CURVES:
                self._names.setdefault(name)
                kept[name] = finite(value)
        self._points.append((round(t_s, 3), status.gradient_steps, kept))
        if len(self._points) > MAX_POINTS:
            # the whole run, half as densely
            self._points, self._every = self._points[::2], 2 * self._every

    def model(self) -> dict[str, Any]:
        """For JSON: lists of one length, null where nothing was said or a value is no number."""
        return {
            "t_s": [t_s for t_s, _, _ in self._points],
            "gradient_steps": [steps for _, steps, _ in self._points],
            "curves": {name: [kept.get(name) for _, _, kept in self._points] for name in self._names},
        }
