"""LeRobot's reward classifier (`lerobot.policies.sac.reward_model`) as a model that judges episodes.

A checkpoint is read as data (docs/decisions/0031): its configuration by the fields known here, its encoder from a
directory that is checked before transformers opens it, its statistics without lerobot's processors. LeRobot's usual
encoder, `helper2424/resnet10`, is Python of the hub and is not run; one that transformers has itself is, such as
`microsoft/resnet-18`. `Classifier.predict` is used: `predict_reward` of 0.4.4 calls what is no longer there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F

from cloud_learner.rewards.interface import EpisodeEnd, SuccessModel
from policies.common.allocation import AllocationCap
from policies.common.untrusted import require_tensors
from policies.lerobot.checkpoint import load_weights
from policies.lerobot.checkpoint_checks import require_sizes, state_path
from policies.lerobot.checkpoint_path import CONFIG, locate, one_line, read_config, read_json, resolve, weights_file
from wire.errors import ConfigError, FleetError, SpecMismatchError
from wire.types import RobotSpec

if TYPE_CHECKING:
    from lerobot.policies.sac.reward_model.modeling_classifier import Classifier

TYPE = "reward_classifier"
_IMAGE, _IMAGES = "observation.image", "observation.images."
_PREPROCESSORS = ("classifier_preprocessor.json", "policy_preprocessor.json")
_SIZES = ("hidden_dim", "latent_dim", "image_embedding_pooling_dim", "num_cameras")
_STEPS = 4
"""last ones of an episode, over which its chances are averaged: it was made to look at single frames"""


class LeRobotClassifier(SuccessModel):
    """What `lerobot-train` or `save_pretrained` wrote."""

    def __init__(
        self, network: Classifier, shapes: dict[str, tuple[int, int]], stats: dict[str, torch.Tensor], sha256: str
    ) -> None:
        """`shapes`: (h, w) by feature, in the network's order; `stats`: `FEATURE.mean` and `FEATURE.std`, if it was
        trained on normalised pictures."""
        self.network, self.shapes, self.stats, self.sha256 = network, shapes, stats, sha256
        self.steps, self.tasks = _STEPS, ()

    def require(self, spec: RobotSpec) -> None:
        have = {camera.name for camera in spec.cameras}
        if missing := [name for name in map(_camera, self.shapes) if name not in have]:
            raise SpecMismatchError(
                f"LeRobot reward classifier: it looks at the cameras {', '.join(map(_camera, self.shapes))}, and robot "
                f"'{spec.embodiment}' has {', '.join(sorted(have)) or 'none'}: '{missing[0]}' is missing. Train one on "
                "what this robot sees, or export with the names that it knows."
            )

    def score(self, ends: Sequence[EpisodeEnd]) -> np.ndarray:
        scores = []
        for end in ends:
            shown = [self._picture(name, end.images[_camera(name)]) for name in self.shapes]
            with torch.no_grad():
                scores.append(self.network.predict(shown).probabilities.mean().item())
        return np.array(scores, np.float32)

    def _picture(self, feature: str, image: np.ndarray) -> torch.Tensor:
        """float32[k, 3, h, w] as the network was trained on, of uint8[k, h', w', 3]."""
        picture = torch.from_numpy(image).permute(0, 3, 1, 2).float() / 255
        if tuple(picture.shape[2:]) != self.shapes[feature]:
            picture = F.interpolate(picture, self.shapes[feature], mode="bilinear", antialias=True)
        if (mean := self.stats.get(f"{feature}.mean")) is not None:
            picture = (picture - mean.view(-1, 1, 1)) / (self.stats[f"{feature}.std"].view(-1, 1, 1) + 1e-8)
        return picture


def open_classifier(path: Path) -> LeRobotClassifier:
    """The checkpoint in a directory, or of a name of the hub that is in the cache.

    Raises `ConfigError` or `WeightsError` naming the file and the way out.
    """
    directory = locate(str(path), fetch=False)
    stored, file = read_config(directory), directory / CONFIG
    if stored["type"] != TYPE:
        raise ConfigError(f"{file}: a '{stored['type']}' policy, no reward classifier ('{TYPE}').")
    require_sizes(stored, file)
    weights = weights_file(directory)
    shapes, values = _shapes(stored, file), {}
    for name in _SIZES:
        if not isinstance(stored.get(name), int) or not stored[name] > 0:
            raise ConfigError(f"{file}: '{name}' is {stored.get(name)!r}, not a size. Copy the checkpoint again.")
        values[name] = stored[name]
    if stored.get("num_classes") != 2 or stored.get("model_type") not in ("cnn", "transformer"):
        raise ConfigError(
            f"{file}: num_classes {stored.get('num_classes')!r}, model_type {stored.get('model_type')!r}; read are 2 "
            "classes, failure and success, of a cnn or transformer."
        )
    if not isinstance(stored.get("model_name"), str):
        raise ConfigError(f"{file}: it does not say which encoder it has (model_name).")
    encoder = resolve(directory, stored["model_name"], "model_name", file)
    network = _build(file, weights, {**values, "model_type": stored["model_type"], "model_name": encoder}, shapes)
    stats = _statistics(directory, stored, shapes)
    digest = hashlib.sha256(weights.read_bytes() + file.read_bytes())
    for name, value in sorted(stats.items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return LeRobotClassifier(network, shapes, stats, digest.hexdigest())


def _build(file: Path, weights: Path, values: dict[str, Any], shapes: dict[str, tuple[int, int]]) -> Classifier:
    try:
        from lerobot.configs.types import FeatureType, PolicyFeature
        from lerobot.policies.sac.reward_model.configuration_classifier import RewardClassifierConfig
        from lerobot.policies.sac.reward_model.modeling_classifier import Classifier
    except ImportError as error:
        raise ConfigError(f"{file}: {error}. `pip install 'vla-fleet[lerobot]'` brings what it needs.") from error
    seen = {name: PolicyFeature(type=FeatureType.VISUAL, shape=(3, *shape)) for name, shape in shapes.items()}
    try:
        with torch.random.fork_rng(devices=[]), AllocationCap(weights, file):
            network = Classifier(RewardClassifierConfig(input_features=seen, device="cpu", **values))
    except FleetError:
        raise
    except Exception as error:  # transformers raises anything for an encoder that is not as it should be
        raise ConfigError(
            f"{file}: this reward classifier cannot be built: {one_line(error)}. Copy the whole checkpoint and its "
            "encoder again."
        ) from error
    load_weights(network, weights)
    return network.eval()


def _shapes(stored: dict[str, Any], file: Path) -> dict[str, tuple[int, int]]:
    """(h, w) of each picture by feature."""
    features, found = stored.get("input_features"), {}
    for name, said in features.items() if isinstance(features, dict) else ():
        if not name.startswith(_IMAGE):
            continue
        shape = said.get("shape") if isinstance(said, dict) else None
        sizes = isinstance(shape, list) and len(shape) == 3 and all(isinstance(n, int) and n > 0 for n in shape)
        if not sizes or shape[0] != 3:  # type: ignore[index]
            raise ConfigError(f"{file}: feature '{name[:100]}' has shape {shape!r}; a picture's is [3, h, w].")
        found[name] = (shape[1], shape[2])  # type: ignore[index]
    if not found or len(found) != stored.get("num_cameras"):
        raise ConfigError(
            f"{file}: {len(found)} pictures among input_features, and num_cameras is {stored.get('num_cameras')!r}. "
            "Copy the checkpoint again."
        )
    return found


def _statistics(directory: Path, stored: dict[str, Any], shapes: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """`FEATURE.mean` and `FEATURE.std`, float32[3], if pictures are normalised. Raises `ConfigError`."""
    mapping = stored.get("normalization_mapping")
    mode = mapping.get("VISUAL") if isinstance(mapping, dict) else None
    if mode == "IDENTITY":
        return {}
    if mode != "MEAN_STD":
        raise ConfigError(f"{directory / CONFIG}: pictures are normalised by {mode!r}; read are MEAN_STD and IDENTITY.")
    file = next((directory / name for name in _PREPROCESSORS if (directory / name).is_file()), None)
    if file is None:
        raise ConfigError(f"{directory}: no {_PREPROCESSORS[0]}, by which its pictures are normalised. Copy it, too.")
    steps = read_json(file).get("steps")
    for step in steps if isinstance(steps, list) else ():
        if isinstance(step, dict) and step.get("registry_name") == "normalizer_processor" and "state_file" in step:
            path = state_path(directory, step["state_file"], file)
            require_tensors(path, directory)
            found = safetensors.torch.load_file(path)
            names = [f"{feature}.{which}" for feature in shapes for which in ("mean", "std")]
            if all(name in found and found[name].numel() == 3 and bool(found[name].isfinite().all()) for name in names):
                return {name: found[name].float().flatten() for name in names}
    raise ConfigError(f"{file}: no step has mean and deviation of {', '.join(shapes)}. Copy the checkpoint again.")


def _camera(feature: str) -> str:
    """The robot's name of a feature."""
    return feature.removeprefix(_IMAGES) if feature.startswith(_IMAGES) else feature.removeprefix("observation.")
