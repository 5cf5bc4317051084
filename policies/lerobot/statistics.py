"""Normalisation statistics: those of a checkpoint's processors as buffers of the network, so that they travel with it.

lerobot keeps them beside the network, in the normalising steps of the processors. As buffers they are in every
weights file, in the trainer's checkpoints and in the average; the steps read the very same memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from lerobot.configs.types import FeatureType, NormalizationMode
from lerobot.processor import (
    NormalizerProcessorStep,
    PolicyProcessorPipeline,
    TokenizerProcessorStep,
    UnnormalizerProcessorStep,
)
from torch import nn

from policies.interface.policy import NormalizationData
from wire.errors import ConfigError
from wire.types import RobotSpec

log = logging.getLogger(__name__)

ATTRIBUTE = "fleet_statistics"
"""name under which the buffers hang below lerobot's policy"""

_NEEDED = {
    NormalizationMode.MEAN_STD: ("mean", "std"),
    NormalizationMode.MIN_MAX: ("min", "max"),
    NormalizationMode.QUANTILES: ("q01", "q99"),
    NormalizationMode.QUANTILE10: ("q10", "q90"),
}
_PICTURES = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""of ImageNet, which lerobot's training takes for pictures as well"""
_SMALLEST = 1e-3
"""of a dimension's limits: recorded data that moves less is taken to move so much"""

Step: TypeAlias = NormalizerProcessorStep | UnnormalizerProcessorStep
Values = dict[str, dict[str, Any]]


class Statistics(nn.Module):
    """The statistics of two processors, each number once per step that uses it."""

    def __init__(self, before: PolicyProcessorPipeline, after: PolicyProcessorPipeline) -> None:
        super().__init__()
        self._entries: list[tuple[Step, str, str, str]] = []
        for side, pipeline in (("before", before), ("after", after)):
            for number, step in _steps(pipeline):
                for key, values in step.state_dict().items():
                    feature, _, name = key.rpartition(".")
                    if name not in _needed(step, feature):
                        continue  # of what a dataset has beside, so that all checkpoints of a type carry the same
                    buffer = f"{side}/{number}/{key.replace('.', ':')}"
                    self.register_buffer(buffer, values.detach().to(torch.float32).clone())
                    self._entries.append((step, feature, name, buffer))

    def __deepcopy__(self, memo: dict[int, Any]) -> Statistics:
        # A copy holds numbers alone: the steps belong to the policy that acts and learns with the original.
        twin = Statistics.__new__(Statistics)
        nn.Module.__init__(twin)
        twin._entries = []
        for name, buffer in self.named_buffers():
            twin.register_buffer(name, memo.get(id(buffer), buffer.clone()))
        memo[id(self)] = twin
        return twin

    def attach(self) -> None:
        """Let the steps read these buffers; after the network has moved to a device or values were written."""
        given: dict[int, tuple[Step, Values]] = {}
        for step, feature, name, buffer in self._entries:
            given.setdefault(id(step), (step, {}))[1].setdefault(feature, {})[name] = self.get_buffer(buffer)
        for step, values in given.values():
            step.stats = values
            device = next(iter(next(iter(values.values())).values())).device
            step.to(device=device, dtype=torch.float32)

    def put(self, values: Values) -> None:
        """Write the given ones in place; others stay."""
        for _, feature, name, buffer in self._entries:
            if name in values.get(feature, {}):
                own = self.get_buffer(buffer)
                own.copy_(torch.as_tensor(values[feature][name], dtype=torch.float32).reshape(own.shape))


def require_sound(pipeline: PolicyProcessorPipeline, features: dict[str, Any], where: str) -> None:
    """Raise `ConfigError` for statistics that are absent or not finite, of another width than the feature, or without
    range.

    lerobot would pass on as it is what it has none for. `features` are those of the policy's configuration, `where`
    names the file. A dimension that never moved while others did is divided by lerobot's epsilon, as everywhere in
    lerobot; that is logged.
    """
    remedy = (
        "Copy the checkpoint again, or set `statistics` to 'spec' (the robot's limits) or 'buffer' (recorded data)."
    )
    for _, step in _steps(pipeline):
        known = step.state_dict()
        for feature in step.features:
            shape = tuple(features.get(feature, step.features[feature]).shape)
            found = {}
            for name in _needed(step, feature):
                if f"{feature}.{name}" not in known:
                    raise ConfigError(
                        f"{where}: it has no statistics {feature}.{name}, so nothing would be normalised. {remedy}"
                    )
                values = found[name] = known[f"{feature}.{name}"]
                if not values.isfinite().all():
                    raise ConfigError(f"{where}: statistics '{feature}.{name}' are not finite. {remedy}")
                if not _broadcasts(tuple(values.shape), shape):
                    raise ConfigError(
                        f"{where}: statistics '{feature}.{name}' have shape {list(values.shape)}, the feature has "
                        f"{list(shape)}. {remedy}"
                    )
            still = _without_range(found)
            if still is None or not still.any():
                continue
            if still.all() and step.features[feature].type is not FeatureType.VISUAL:
                raise ConfigError(
                    f"{where}: statistics of '{feature}' say that nothing in it ever moved ({' and '.join(found)}). "
                    f"{remedy}"
                )
            few = f"{int(still.sum())} of its {still.numel()} dimensions"
            log.warning("%s: '%s' never moved in %s; they are divided by lerobot's epsilon.", where, feature, few)


def state_alone(before: PolicyProcessorPipeline, state: torch.Tensor) -> PolicyProcessorPipeline:
    """A preprocessor of the same steps, but those that cannot do without pictures or are for words.

    A type may bring steps of its own; each is tried on `state` float32[1, ds] alone.
    """
    chosen: list[Any] = []
    transition = before.to_transition({"observation.state": state, "task": [""]})
    for step in before.steps:
        if isinstance(step, TokenizerProcessorStep):
            continue
        try:
            transition = step(transition)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            log.info("%s is not for the state alone: %s", type(step).__name__, error)
            continue
        chosen.append(step)
    return PolicyProcessorPipeline(chosen, "felt", to_transition=before.to_transition, to_output=before.to_output)


def of_limits(spec: RobotSpec, features: dict[str, Any]) -> Values:
    """Statistics that map the spec's limits to [-1, 1] in every mode, and ImageNet's for pictures."""
    values: Values = {}
    for name, feature in features.items():
        if feature.type is FeatureType.VISUAL:
            channels = {stat: np.asarray(v, np.float32).reshape(3, 1, 1) for stat, v in _PICTURES.items()}
            zero, one = np.zeros((3, 1, 1), np.float32), np.ones((3, 1, 1), np.float32)
            values[name] = channels | _range(zero, one)
        elif feature.type in (FeatureType.STATE, FeatureType.ACTION):
            dimensions = spec.action if feature.type is FeatureType.ACTION else spec.state
            low = np.array([d.low for d in dimensions], np.float32)
            high = np.array([d.high for d in dimensions], np.float32)
            values[name] = {"mean": (high + low) / 2, "std": (high - low) / 2} | _range(low, high)
    return values


def of_examples(spec: RobotSpec, features: dict[str, Any], examples: NormalizationData) -> Values:
    """Statistics of recorded states and actions; of the limits where nothing was recorded."""
    values = of_limits(spec, features)
    for name, feature in features.items():
        if feature.type not in (FeatureType.STATE, FeatureType.ACTION):
            continue
        data = examples.chunks if feature.type is FeatureType.ACTION else examples.states
        rows = data.reshape(-1, data.shape[-1]).astype(np.float64)
        if not len(rows):
            continue
        least = _SMALLEST * (values[name]["max"] - values[name]["min"])
        found = {"mean": rows.mean(0), "std": np.maximum(rows.std(0), least)}
        for below, above, share in (("min", "max", 0.0), ("q01", "q99", 0.01), ("q10", "q90", 0.1)):
            low, high = np.quantile(rows, (share, 1 - share), axis=0)
            widened = np.maximum(0, least - (high - low)) / 2
            found[below], found[above] = low - widened, high + widened
        values[name] = {stat: value.astype(np.float32) for stat, value in found.items()}
    return values


def _needed(step: Step, feature: str) -> tuple[str, ...]:
    """The statistics that `step` reads of a feature."""
    if feature not in step.features:
        return ()
    mode = step.norm_map.get(step.features[feature].type, NormalizationMode.IDENTITY)
    return _NEEDED.get(mode, ())


def _broadcasts(shape: tuple[int, ...], feature: tuple[int, ...]) -> bool:
    """Whether statistics of `shape` are for values [..., *feature]."""
    while len(shape) > len(feature) and shape[0] == 1:
        shape = shape[1:]
    pairs = zip(reversed(shape), reversed(feature), strict=False)
    return len(shape) <= len(feature) and all(own in (1, wanted) for own, wanted in pairs)


def _without_range(found: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Which dimensions would be divided by 0; None where nothing is normalised."""
    if "std" in found:
        return found["std"] == 0
    if not found:
        return None
    low, high = found.values()
    return high == low


def _range(low: np.ndarray, high: np.ndarray) -> dict[str, np.ndarray]:
    return {"min": low, "q01": low, "q10": low, "max": high, "q99": high, "q90": high}


def _steps(pipeline: PolicyProcessorPipeline) -> Iterator[tuple[int, Step]]:
    for number, step in enumerate(pipeline.steps):
        if isinstance(step, Step):
            yield number, step
