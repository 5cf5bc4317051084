"""The jobs this project ships. A recipe is a function that returns a frozen `Recipe`; copy one to make your own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.training.config import PopulationConfig, TrainingConfig, pixels_training
from fleet.config.recipe import NamedPolicy, Recipe, share_policy
from fleet.config.so101 import so101
from fleet.evaluation.evaluator import EvaluatorConfig
from hal.drivers.fake import FAKE_INSTRUCTIONS, FAKE_LIMITS, FakeConfig, FakeRobot
from hal.drivers.gym.presets import fetch
from hal.drivers.gym.spec import gym_spec
from hal.drivers.metaworld.dynamics import HandMotion, metaworld_limits
from hal.drivers.metaworld.robot import MetaWorldConfig, metaworld_spec
from hal.drivers.metaworld.tasks import instruction
from hal.interfaces.dynamics import ActionStateMapping, SpecMotion
from policies.interface.registry import PolicyChoice
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.control.config import GateConfig, LoopConfig
from robot_edge.inference.server import SlowConfig
from wire.errors import ConfigError, suggest
from wire.types import RobotSpec

if TYPE_CHECKING:
    from policies.flow.shared.policy import SharedFlowPolicy
    from policies.interface.policy import LearnedPolicy

PIXEL_TASKS = ("drawer-open", "button-press-topdown", "window-open", "door-open")
STATE_TASKS = ("push", "pick-place")
SHAPES_TASKS = ("button-press-topdown", "drawer-open")
MAX_DELAY = 24
"""ticks of age that training simulates, at 80 Hz: a thought every 0.2 s and a tenth of a second of inference delay"""
_PIXELS_POLICY = NamedPolicy(PolicyChoice("flow", "pixels", {"max_offset": MAX_DELAY}))


def pixels(seed: int = 0) -> Recipe:
    """Four tasks from a 64x64 camera, proprioception and the instruction; no object poses."""
    paced = MetaWorldConfig(tasks=PIXEL_TASKS, observation="pixels", render_in_thread=True)
    unpaced = MetaWorldConfig(tasks=PIXEL_TASKS, observation="pixels", render_in_thread=False)
    return Recipe(
        name="pixels",
        tasks=PIXEL_TASKS,
        instructions={task: instruction(task) for task in PIXEL_TASKS},
        robot="metaworld",
        robot_config=paced,
        unpaced_config=unpaced,
        spec=metaworld_spec(paced),
        make_policy=_PIXELS_POLICY,
        motion=HandMotion(metaworld_spec(paced)),
        # the picture is thought about five times a second, actions are made twenty times a second
        slow=SlowConfig(every_s=0.2),
        chunking=ChunkingConfig(execute_ticks=4),
        algorithm=HGDagger(recent_share=0.25),
        training=pixels_training(),
        # 1.5 s: the operator needs up to 94 ticks on these tasks, a robot gets a quarter more.
        loop=LoopConfig(
            max_ticks=120,
            safety=metaworld_limits(),
            gate=GateConfig(disagreement=0.35, min_ticks=50, stall_ticks=40),
        ),
        evaluator=EvaluatorConfig(max_ticks=120),
    )


def tuned(seed: int = 0) -> Recipe:
    """`pixels`, where `vla-fleet train` has a population tune how it learns."""
    fields = ("training.learning_rate=3e-4..6e-3", "training.weight_decay=1e-5..1e-2", "algorithm.recent_share=0..0.5")
    return replace(pixels(seed), name="tuned", validation=0.1, population=PopulationConfig(4, fields))


def state(seed: int = 0) -> Recipe:
    """Push and pick-place with object poses: quick, for tests and for comparing algorithms."""
    config = MetaWorldConfig(tasks=STATE_TASKS, observation="state", render_in_thread=False)
    return Recipe(
        name="state",
        tasks=STATE_TASKS,
        instructions={task: instruction(task) for task in STATE_TASKS},
        robot="metaworld",
        robot_config=config,
        unpaced_config=config,
        spec=metaworld_spec(config),
        make_policy=NamedPolicy(PolicyChoice("flow", "state")),
        algorithm=HGDagger(),
        training=TrainingConfig(batch=128, ema_decay=0.995, pretrain_steps=800),
        evaluator=EvaluatorConfig(episodes=10, every_s=30.0, final_episodes=40),
    )


def fake(seed: int = 0) -> Recipe:
    """A point that moves to a goal it sees: no simulator, for seconds-long tests of the whole."""
    config = FakeConfig()
    robot = FakeRobot(config)
    tasks = config.tasks
    return Recipe(
        name="fake",
        tasks=tasks,
        instructions={task: FAKE_INSTRUCTIONS[task] for task in tasks},
        robot="fake",
        robot_config=config,
        unpaced_config=config,
        spec=robot.spec,
        make_policy=_PIXELS_POLICY,
        motion=SpecMotion(robot.spec, [ActionStateMapping(f"move_{axis}", axis, 0.01) for axis in "xyz"]),
        algorithm=HGDagger(),
        training=TrainingConfig(batch=16, pretrain_steps=20, publish_every_s=1.0),
        loop=LoopConfig(max_ticks=60, safety=FAKE_LIMITS),
        evaluator=EvaluatorConfig(episodes=2, every_s=5.0, final_episodes=3, max_ticks=60),
        checkpoint_every_s=2.0,
    )


def shapes(seed: int = 0) -> Recipe:
    """Two kinds of arm, and a third one that may join, share one policy; object poses, no camera."""
    config = MetaWorldConfig(tasks=SHAPES_TASKS, observation="state", render_in_thread=False)
    metaworld = replace(
        state(seed),
        tasks=SHAPES_TASKS,
        instructions={task: instruction(task) for task in SHAPES_TASKS},
        robot_config=config,
        unpaced_config=config,
        spec=metaworld_spec(config),
        make_policy=_shared_policy,
        demonstrations=10,
    )
    members = {"metaworld": metaworld, "fetch": _fetch(metaworld, "push"), "reach": _fetch(metaworld, "reach")}
    return share_policy("shapes", members)


def _fetch(like: Recipe, task: str) -> Recipe:
    """One task of the Fetch arm, learned as `like` is. Its scenes end after 50 ticks by themselves."""
    config = fetch(task)
    return replace(
        like,
        tasks=(task,),
        instructions={one.name: one.instruction for one in config.tasks},
        robot="gym-fetch",
        robot_config=config,
        unpaced_config=config,
        spec=gym_spec(config)[0],
        # an action moves the hand by up to 5 cm
        chunking=ChunkingConfig(execute_ticks=2),
        loop=LoopConfig(max_ticks=50),
        evaluator=replace(like.evaluator, max_ticks=50),
    )


def vla(seed: int = 0) -> Recipe:
    """The tasks of `pixels` for a vision-language-action policy of lerobot: without --policy a tiny one, built here."""
    return replace(
        pixels(seed),
        name="vla",
        make_policy=_built_by_up,
        tiny="smolvla",
    )


def _built_by_up(spec: RobotSpec, seed: int) -> LearnedPolicy:
    raise ConfigError(
        "this recipe's policy is a directory that `vla-fleet up` builds: give a part that is started by itself "
        "--policy lerobot:DATA/policy."
    )


def _shared_policy(spec: RobotSpec, seed: int) -> SharedFlowPolicy:
    from policies.flow.shared.factory import SharedOptions, network
    from policies.flow.shared.policy import SharedFlowPolicy

    # Fetch's push, 40 demonstrations, 2,500 steps, one seed: 0.75 with "action", 0.55 with "velocity"
    return SharedFlowPolicy(spec, network("state", SharedOptions(capacity=4, predict="action")), seed)


RECIPES: dict[str, Callable[..., Recipe]] = {
    "pixels": pixels,
    "tuned": tuned,
    "state": state,
    "fake": fake,
    "shapes": shapes,
    "vla": vla,
    "so101": so101,
}


def get_recipe(name: str, seed: int = 0, config: Path | None = None) -> Recipe:
    """The recipe called `name`, or what the function `module:function` returns for `seed`; `RECIPE@MEMBER`: a member.

    `config`: the file of --config, for a function that takes one. Raises `ConfigError` that suggests the nearest name,
    or says why the function cannot be used.
    """
    name, at, member = name.partition("@")
    make = RECIPES.get(name)
    if make is None and ":" in name:
        make = _load(name)
    if make is None:
        raise ConfigError(
            f"there is no recipe '{name}'.{suggest(name, RECIPES)} Known: {', '.join(RECIPES)}, or module:function."
        )
    config = config.resolve() if config is not None else None
    if config is not None and "config" not in signature(make).parameters:
        raise ConfigError(f"--config {config}: recipe '{name}' takes none; leave it out.")
    try:
        recipe = make(seed) if config is None else make(seed, config=config)
    except TypeError as error:
        raise ConfigError(f"recipe '{name}' cannot be made: {error}. It must be a function of a seed.") from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"recipe '{name}' returned a {type(recipe).__name__}; it must return a fleet.config.recipe.Recipe."
        )
    if at and member not in recipe.members:
        known = ", ".join(f"{name}@{one}" for one in recipe.members) or "no members: it is for robots of one shape"
        raise ConfigError(f"recipe '{name}' has no member '{member}'.{suggest(member, recipe.members)} It has {known}.")
    recipe = replace(recipe, name=name, config=config)
    recipe = replace(recipe, members={short: recipe.as_member(short) for short in recipe.members})
    return recipe.members[member] if at else recipe


def _load(name: str) -> Callable[..., Recipe]:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"recipe '{name}': {error}. Install its package, or set PYTHONPATH to the folder it is in."
        ) from error
