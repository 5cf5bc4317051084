"""One checkpoint for benchmarks of late actions: the real policy, learner and feed on demonstrations on disk."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.dataset import open_dataset
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.sampling.target import imitation
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.learner import Learner
from hal.interfaces.dynamics import DynamicsModel
from policies.common.weights import read_header
from policies.flow.config import FlowConfig
from policies.flow.policy import FlowPolicy
from wire.types import RobotSpec


@dataclass(frozen=True, slots=True)
class Training:
    """How long and on what."""

    steps: int
    settings: TrainingConfig = TrainingConfig(batch=256, learning_rate=1e-3, ema_decay=0.998)  # noqa: RUF009 - frozen
    cache_bytes: int = 512 * 1024**2


def policy_of(weights: bytes, spec: RobotSpec) -> FlowPolicy:
    """The policy with the network that `weights` describes."""
    policy = FlowPolicy(spec, msgspec.convert(read_header(weights).config, FlowConfig))
    policy.load(weights, 1)
    return policy


def train(
    place: BufferLocation,
    spec: RobotSpec,
    tasks: dict[str, str],
    network: FlowConfig,
    motion: DynamicsModel,
    training: Training,
    seed: int,
) -> bytes:
    """The averaged weights after `training.steps` of imitation on the demonstrations in `place`.

    `tasks`: the instruction of each.
    """
    policy = FlowPolicy(spec, network, seed)
    settings = training.settings
    config = DatasetConfig(
        tasks=tasks,
        target=imitation(),
        batch=settings.batch,
        horizon=policy.horizon,
        ticks_ahead=policy.ticks_ahead,
        ticks_per_frame=settings.ticks_per_frame if spec.cameras else 1,
        max_offset=policy.max_offset,
        rolled=tuple(bool(rolled) for rolled in motion.rolled),
        later=network.residual,
        seed=seed,
        cache_bytes=training.cache_bytes,
        prefetch=0,
    )
    learner = Learner(policy, HGDagger(), settings, seed)
    with open_dataset(place, spec, config) as feed:
        feed.refresh()
        policy.set_normalization(feed.examples())
        while learner.gradient_steps < training.steps:
            learner.step(feed)
    return learner.weights()
