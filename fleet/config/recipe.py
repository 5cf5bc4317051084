"""What makes one fleet: a frozen dataclass, made by the functions in `fleet.config.recipes`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cloud_learner.algorithms.interface import AlgorithmConfig
from cloud_learner.buffer.maintenance.retention import Retention
from cloud_learner.buffer.sampling.target import StalenessBound
from cloud_learner.rewards.config import RewardConfig
from cloud_learner.rollout.config import RolloutConfig
from cloud_learner.training.config import (
    LONGEST_S,
    ActionCheckConfig,
    PopulationConfig,
    PublisherConfig,
    TrainingConfig,
    require_finite,
)
from fleet.config.weights_source import WeightsSource
from fleet.evaluation.evaluator import EvaluatorConfig
from fleet.evaluation.injected_delay import parse_delay
from hal.interfaces.dynamics import DynamicsModel
from hal.stop_devices.config import StopDevicesConfig
from policies.interface.policy import LearnedPolicy, Policy
from policies.interface.registry import PolicyChoice, make_policy
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.control.config import LoopConfig
from robot_edge.inference.server import SlowConfig
from wire.errors import ConfigError, FleetError
from wire.types import RobotSpec


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """Makes the policy of a choice, as `--policy` does: an algorithm may want it configured otherwise."""

    choice: PolicyChoice

    def __call__(self, spec: RobotSpec, seed: int) -> LearnedPolicy:
        return make_policy(self.choice, spec, seed)


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
    """(spec, seed) to a fresh policy; imports torch only when called, for the control process runs without it. A
    `NamedPolicy` where algorithms may configure it (`AlgorithmConfig.policy_options`)"""
    algorithm: AlgorithmConfig
    """what is learned from the data"""
    training: TrainingConfig
    """how gradient steps are made, whatever the algorithm"""
    rewards: RewardConfig = field(default_factory=RewardConfig)
    """by whose word the algorithm knows what an episode was"""
    population: PopulationConfig = field(default_factory=PopulationConfig)
    """of `vla-fleet train`: how many train beside each other, and what of algorithm and training they tune"""
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
    start: WeightsSource | None = None
    """weights that training begins with (--from), in place of the policy's first ones"""
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
    """what of the experience is forgotten by itself; nothing unless it says so"""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """how versions are tried before all robots run them"""
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
    members: Mapping[str, Recipe] = field(default_factory=dict)
    """for robots of several shapes that share the policy: each one's own recipe by a short name, see `share_policy`;
    empty for a job of one shape"""
    share: float = 1.0
    """of the trainer's batches, where it is a member: beside the shares of the others"""

    def __post_init__(self) -> None:
        what = f"recipe '{self.name}'"
        if not 0 <= self.checkpoint_every_s <= LONGEST_S:
            raise ConfigError(
                f"{what}: checkpoint_every_s is {self.checkpoint_every_s}; it must be from 0 to {LONGEST_S:g} seconds."
            )
        require_finite(self, what)
        if self.keep_checkpoints < 1:
            raise ConfigError(
                f"{what}: keep_checkpoints is {self.keep_checkpoints}; it must be 1 or more, for training goes on from "
                "the newest."
            )
        for name, (least, most) in _LIMITS.items():
            if not least <= getattr(self, name) <= most:
                to = f" and at most {most:g}" if most < math.inf else ""
                raise ConfigError(f"{what}: {name} is {getattr(self, name):g}; it must be at least {least:g}{to}.")
        if self.share <= 0 or self.validation == 1:
            raise ConfigError(
                f"{what}: share {self.share} must be above 0, and validation {self.validation} below 1: something has "
                "to be trained on."
            )
        if not 0 < self.speed_limit <= 1:
            raise ConfigError(f"{what}: speed_limit is {self.speed_limit}; it must be above 0 and at most 1.")
        parse_delay(self.delay)
        # an algorithm's settings that cannot be are refused here, whoever wrote it
        self.algorithm.needs()

    @property
    def measured_tasks(self) -> tuple[str, ...]:
        """Those of which success is measured: the recipe's, then its evaluator's earlier ones."""
        return tuple(dict.fromkeys((*self.tasks, *self.evaluator.earlier_tasks)))

    def as_member(self, name: str) -> Recipe:
        """The recipe of a member in this job: what is its robot's is its own, everything else is the job's."""
        one = self.members[name]
        own = {field: getattr(one, field) for field in _OF_ROBOT}
        return replace(self, **own, name=f"{self.name}@{name}", members={})

    def require_one_shape(self, what: str) -> None:
        """Raise `ConfigError` for a job of several shapes: `what` is done with one of them."""
        if self.members:
            named = ", ".join(f"{self.name}@{name}" for name in self.members)
            raise ConfigError(f"recipe '{self.name}' is for robots of several shapes, and {what} is of one: {named}.")

    def member_of(self, spec: RobotSpec) -> Recipe | None:
        """The recipe by which robots of `spec` work in this job; None when there is none."""
        if not self.members:
            return self if self.spec.hash == spec.hash else None
        named = (name for name, one in self.members.items() if one.spec.hash == spec.hash)
        return next((self.as_member(name) for name in named), None)

    def refusal(self, spec: RobotSpec) -> str:
        """Why no robot of `spec` can work in this job; '' if one can."""
        if self.member_of(spec) is not None:
            return ""
        if self.members:
            known = ", ".join(f"'{one.spec.embodiment}' ({name})" for name, one in self.members.items())
            return (
                f"robot '{spec.embodiment}' ({spec.hash}) is none of recipe '{self.name}', which has {known}. Start it "
                "with the recipe of one of them, or add its own to the members."
            )
        try:
            self.spec.require(spec, f"recipe '{self.name}'")
        except FleetError as error:
            return str(error)
        return ""


_LIMITS = {
    "demonstrations": (0, math.inf),
    "echo": (0, math.inf),
    "samples_per_insert": (0, math.inf),
    "max_samples_per_insert": (0, math.inf),
    "min_corrected_steps": (0, math.inf),
    "validation": (0, 1),
    "cache_bytes": (1, math.inf),
    "cache_workers": (0, math.inf),
    "prefetch": (0, math.inf),
}
_OF_ROBOT = (
    "tasks",
    "instructions",
    "robot",
    "robot_config",
    "unpaced_config",
    "spec",
    "demonstrations",
    "people_only",
    "teleoperator",
    "modules",
    "chunking",
    "slow",
    "make_local",
    "motion",
    "loop",
    "stop_devices",
    "speed_limit",
    "evaluator",
    "share",
)


def share_policy(name: str, members: Mapping[str, Recipe], **changes: Any) -> Recipe:
    """A job of robots of several shapes: `members` by a short name. Policy, algorithm, training and what else is asked
    of a whole job are those of the first one, or of `changes`.

    Raises `ConfigError` for members that cannot go together.
    """
    if not members:
        raise ConfigError(f"recipe '{name}': robots of several shapes need members.")
    job = replace(next(iter(members.values())), name=name, **changes)
    tasks: dict[str, str] = {}
    specs: dict[str, str] = {}
    for short, member in members.items():
        if "@" in short or not short or member.members:
            raise ConfigError(f"recipe '{name}': member '{short}' needs a name without an @, and no members itself.")
        if (other := specs.setdefault(member.spec.data_hash, short)) != short:
            raise ConfigError(
                f"recipe '{name}': members '{other}' and '{short}' are of one robot, '{member.spec.embodiment}'; make "
                "one of them, with the tasks of both."
            )
        for task, sentence in member.instructions.items():
            if tasks.setdefault(task, sentence) != sentence:
                raise ConfigError(
                    f"recipe '{name}': task '{task}' is \"{tasks[task]}\" for one member and \"{sentence}\" for "
                    f"'{short}'; give one of them another name."
                )
    job = replace(job, tasks=tuple(tasks), instructions=tasks, members=members)
    return replace(job, members={short: job.as_member(short) for short in members})
