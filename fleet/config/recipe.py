"""What makes one fleet: a frozen dataclass, made by the functions in `fleet.config.recipes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloud_learner.algorithms.interface import AlgorithmConfig
from cloud_learner.buffer.maintenance.retention import Retention
from cloud_learner.buffer.sampling.target import StalenessBound
from cloud_learner.rollout.config import RolloutConfig
from cloud_learner.training.config import ActionCheckConfig, PublisherConfig, TrainingConfig
from fleet.evaluation.evaluator import EvaluatorConfig
from hal.interfaces.dynamics import DynamicsModel
from hal.stop_devices.config import StopDevicesConfig
from policies.interface.policy import LearnedPolicy, Policy
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.control.config import LoopConfig
from robot_edge.inference.server import SlowConfig
from wire.types import RobotSpec


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What a person teleoperates with."""

    kind: str
    """its name in the registry"""
    config: dict[str, Any]
    """its fields"""


@dataclass(frozen=True)
class Recipe:
    """A whole job: robots, tasks, policy, algorithm and their pace."""

    name: str
    tasks: tuple[str, ...]
    instructions: dict[str, str]
    """the sentence for each task"""
    robot: str
    """driver by its registered name"""
    robot_config: Any
    """frozen config of that driver, paced like real hardware"""
    unpaced_config: Any
    """the same robot as fast as the machine allows, for demonstrations and evaluation"""
    spec: RobotSpec
    make_policy: Callable[[RobotSpec, int], LearnedPolicy]
    """(spec, seed) to a fresh policy; imports torch only when called, for the control process runs without it"""
    algorithm: AlgorithmConfig
    """what is learned from the data"""
    training: TrainingConfig
    """how gradient steps are made, whatever the algorithm"""
    tiny: str = ""
    """what `vla-fleet up` builds in DATA/policy when it starts there first, `smolvla` or `act`, and gives to every part
    as --policy; '' for a recipe that makes its policy itself"""
    demonstrations: int = 3
    """per task, before anything is learned"""
    people_only: bool = False
    """people demonstrate and correct, on the robots themselves: there is neither a scripted operator nor a simulator to
    demonstrate or to evaluate in"""
    teleoperator: DeviceChoice | None = None
    """what `vla-fleet teleop` drives with unless it is told otherwise"""
    modules: tuple[str, ...] = ()
    """that the robot's driver takes long to import: `up` imports them once for all its processes"""
    config: Path | None = None
    """the file that it was made from (--config); filled in by `get_recipe`"""
    chunking: ChunkingConfig = field(default_factory=ChunkingConfig)
    """how chunks are asked for, and what is done about actions that come late"""
    delay: str = "0"
    """latency injected into every robot, as `fleet.evaluation.injected_delay.parse_delay` reads it"""
    slow: SlowConfig = field(default_factory=SlowConfig)
    """pace of the slow path, and what happens when it falls silent"""
    make_local: Callable[[RobotSpec], Policy] | None = None
    """a small policy, loaded and ready, for while the slow path is silent and `slow.fallback` is `local`; without one
    the policy itself thinks in the inference process then"""
    think_apart: bool = False
    """think in a process of its own on the robot's computer; for policies whose `think` would hold up `act`"""
    motion: DynamicsModel | None = None
    """how the robot's state follows from its actions; None: no state is rolled forward"""
    loop: LoopConfig = field(default_factory=LoopConfig)
    stop_devices: StopDevicesConfig = field(default_factory=StopDevicesConfig)
    """what the person beside each robot stops it with"""
    speed_limit: float = 1.0
    """share of its velocity limits at which each robot moves at most"""
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    checkpoint_every_s: float = 30.0
    keep_checkpoints: int = 2
    """the newest so many stay, and that of the best version by held-out success"""
    publisher: PublisherConfig = field(default_factory=PublisherConfig)
    """how versions travel"""
    action_check: ActionCheckConfig = field(default_factory=ActionCheckConfig)
    """which versions are not let out for what they do"""
    retention: Retention = field(default_factory=Retention)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """what of the experience is forgotten by itself; nothing unless it says so"""
    cache_bytes: int = 4 * 1024**3
    """RAM the trainer's cache of decoded experience may take"""
    echo: float = 1.0
    """how often a step is drawn, on average, while it is in the cache; raised by itself, up to 8, while the
    trainer waits for decoding; without meaning where all fits"""
    samples_per_insert: float = 0.0
    """online, at most so many steps are drawn for each step that was recorded since that phase began; 0: as many as
    the trainer manages"""
    min_corrected_steps: int = 200
    """a policy that is pretrained takes its first gradient step once so many steps can be imitated"""
    max_samples_per_insert: float = 500.0
    """and online at most so many steps are drawn for each step that can be imitated; 0: as many as the trainer
    manages"""
    staleness: StalenessBound | None = None
    """how many versions a rollout may be behind when it arrives, and what the trainer makes of those further behind;
    None: they count like all others"""
    validation: float = 0.0
    """share of the episodes that are never trained on, by their ids: the same ones for good"""
    cache_workers: int = 0
    """threads that read and decode for the cache; 0: the trainer does it itself"""
    prefetch: int = 0
    """batches gathered ahead in a thread of the trainer; 0: none"""
