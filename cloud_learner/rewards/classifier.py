"""A success classifier: a small network on what the policy sees in an episode's last steps, and its file.

The file is safetensors with one metadata entry, the JSON of `ClassifierHeader`; it is never a pickle. What it says of
sizes is held against its tensors before anything is made of them.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from cloud_learner.rewards.calibration import SuccessMeasurement, Thresholds
from cloud_learner.rewards.interface import EpisodeEnd, SuccessModel
from wire.errors import ConfigError, SpecMismatchError, WeightsError
from wire.types import RobotSpec
from wire.untrusted import parse_json, read_file, read_safetensors_header

FORMAT = 1
_KEY = "vla_fleet_success_classifier"
_MOST_BYTES = 1 << 28
_MOST_WIDTH, _MOST_STEPS = 4096, 1024
_TASK_WIDTH = 8
_CELLS = 4
_REMEDY = "Train it again: `vla-fleet rewards train`."


class ClassifierHeader(msgspec.Struct, frozen=True):
    """What stands beside the tensors."""

    spec: RobotSpec
    """whose observations it reads"""
    tasks: tuple[str, ...]
    steps: int
    """last steps of an episode that it looks at"""
    width: int
    thresholds: Thresholds
    measured: SuccessMeasurement
    """on episodes that neither the network nor the thresholds were made with"""
    learned_from: tuple[int, int]
    """(failures, successes)"""
    format: int = FORMAT


class SuccessNetwork(nn.Module):
    """Logit of success of single steps."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, spec: RobotSpec, tasks: int, width: int) -> None:
        super().__init__()
        self.cameras = tuple(camera.name for camera in spec.cameras)
        self.eyes = nn.ModuleList(_eye(width) for _ in self.cameras)
        self.task = nn.Embedding(tasks, _TASK_WIDTH)
        seen = spec.state_dim + _TASK_WIDTH + width * len(self.cameras)
        self.head = nn.Sequential(
            nn.Linear(seen, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.register_buffer("mean", torch.zeros(spec.state_dim))
        self.register_buffer("deviation", torch.ones(spec.state_dim))

    def forward(self, state: torch.Tensor, images: Sequence[torch.Tensor], task: torch.Tensor) -> torch.Tensor:
        """float32[n] of state float32[n, ds], uint8[n, h, w, 3] by camera in their order, and task int64[n]."""
        seen = [((state - self.mean) / self.deviation).clamp(-5, 5), self.task(task)]
        for eye, image in zip(self.eyes, images, strict=True):
            seen.append(eye(image.permute(0, 3, 1, 2).float() / 127.5 - 1))
        logits: torch.Tensor = self.head(torch.cat(seen, 1))[:, 0]
        return logits


class SuccessClassifier(SuccessModel):
    """A trained one."""

    def __init__(self, network: SuccessNetwork, header: ClassifierHeader, sha256: str = "") -> None:
        self.network, self.header, self.sha256 = network.eval(), header, sha256
        self.steps, self.tasks = header.steps, header.tasks
        self.thresholds, self.measured = header.thresholds, header.measured

    @classmethod
    def load(cls, data: bytes, what: str) -> SuccessClassifier:
        """Raises `WeightsError` for anything that is no classifier's file."""
        header = _read_header(data, what)
        try:
            tensors = safetensors.torch.load(data)
        except (SafetensorError, KeyError, ValueError) as error:
            raise WeightsError(f"{what}: the tensors cannot be read: {error}. {_REMEDY}") from error
        with torch.device("meta"):
            network = SuccessNetwork(header.spec, len(header.tasks), header.width)
        expected = {name: (one.shape, one.dtype) for name, one in network.state_dict().items()}
        if expected != {name: (one.shape, one.dtype) for name, one in tensors.items()}:
            raise WeightsError(f"{what}: its tensors are not those of the network that its header describes. {_REMEDY}")
        if wrong := sorted(name for name, one in tensors.items() if not bool(one.isfinite().all())):
            raise WeightsError(f"{what}: not finite in {', '.join(wrong[:3])}. {_REMEDY}")
        network.load_state_dict(tensors, assign=True)
        return cls(network, header, hashlib.sha256(data).hexdigest())

    def save(self) -> bytes:
        """A file of it."""
        tensors = {name: one.detach().cpu().contiguous() for name, one in sorted(self.network.state_dict().items())}
        return safetensors.torch.save(tensors, metadata={_KEY: msgspec.json.encode(self.header).decode()})

    def require(self, spec: RobotSpec) -> None:
        own = self.header.spec
        if own.data_hash == spec.data_hash:
            return
        theirs, mine = ({one.name: (one.height, one.width) for one in each.cameras} for each in (spec, own))
        cameras = f"its cameras are {mine or 'none'}, the robot's {theirs or 'none'}. " if theirs != mine else ""
        raise SpecMismatchError(
            f"success classifier: it was trained for robot '{own.embodiment}' ({own.data_hash}), this one is "
            f"'{spec.embodiment}' ({spec.data_hash}). {cameras}Train one on what this robot sees: `vla-fleet rewards "
            "train`."
        )

    def score(self, ends: Sequence[EpisodeEnd]) -> np.ndarray:
        if unknown := sorted({end.task for end in ends} - set(self.tasks)):
            raise ConfigError(f"success classifier: it never saw task '{unknown[0]}', only {', '.join(self.tasks)}.")
        scores = []
        with torch.no_grad():
            for end in ends:
                logits = self.network(*as_tensors([end], self.tasks, self.network.cameras))
                scores.append(logits.mean().sigmoid().item())
        return np.array(scores, np.float32)


def open_classifier(path: Path) -> SuccessClassifier:
    """The one in a file, or the newest in a directory. Raises `WeightsError` or `ConfigError`."""
    if path.is_dir() or not path.exists():
        numbered = {int(one.stem.rpartition("-")[2]): one for one in path.glob("classifier-*[0-9].safetensors")}
        if not numbered:
            raise ConfigError(f"{path}: there is no success classifier yet. `vla-fleet rewards train` makes one.")
        path = numbered[max(numbered)]
    return SuccessClassifier.load(read_file(path, _MOST_BYTES, wrong=WeightsError), str(path))


def as_tensors(
    ends: Sequence[EpisodeEnd], tasks: Sequence[str], cameras: Sequence[str]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """All steps of these episodes, as a network takes them."""
    state = torch.from_numpy(np.concatenate([end.state for end in ends]))
    images = [torch.from_numpy(np.concatenate([end.images[camera] for end in ends])) for camera in cameras]
    task = np.repeat([tasks.index(end.task) for end in ends], [len(end.state) for end in ends])
    return state, images, torch.from_numpy(task)


def _eye(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, 2, 2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(_CELLS),
        nn.Flatten(),
        nn.Linear(32 * _CELLS**2, width),
        nn.ReLU(),
    )


def _read_header(data: bytes, what: str) -> ClassifierHeader:
    try:
        metadata = read_safetensors_header(io.BytesIO(data), len(data), what).metadata
        header = msgspec.convert(parse_json(metadata[_KEY], what, wrong=WeightsError), ClassifierHeader)
    except WeightsError as error:
        raise WeightsError(f"{error} {_REMEDY}") from error
    except KeyError as error:
        raise WeightsError(f"{what}: a safetensors file that is no success classifier's. {_REMEDY}") from error
    except (msgspec.ValidationError, ConfigError) as error:
        raise WeightsError(f"{what}: its header cannot be read: {error}. {_REMEDY}") from error
    sizes = 0 < header.width <= _MOST_WIDTH and 0 < header.steps <= _MOST_STEPS and 0 < len(header.tasks) <= 10_000
    if header.format != FORMAT or not sizes:
        raise WeightsError(f"{what}: format {header.format}, width {header.width}, {header.steps} steps. {_REMEDY}")
    return header
