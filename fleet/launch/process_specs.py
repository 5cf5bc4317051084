"""What each part of a fleet is started with: its arguments, how it is kept, and what it may import beforehand."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fleet.config.overrides import Overrides
from fleet.config.process_options import (
    DemonstratorOptions,
    EdgeOptions,
    EvaluatorOptions,
    GatewayOptions,
    ProcessOptions,
    ThinkServerOptions,
    TrainerOptions,
)
from fleet.config.recipe import Recipe
from fleet.launch.backend import ProcessSpec
from fleet.launch.builders import THINKER
from robot_edge.runtime.forking import has_gpu
from wire.transport.keys import GATEWAY
from wire.types import Role

TRAINER, EVALUATOR, DEMONSTRATOR = "trainer", "evaluator", "demonstrator"
BEFORE, AFTER = "before", "after"
HELPERS = (TRAINER, EVALUATOR, THINKER)
"""what is neither robot nor gateway, nor demonstrates or measures once"""


def minute_label(minute: float) -> str:
    """Of a measurement of what was the newest version then."""
    return f"minute {minute:g}"


def measurer(label: str) -> str:
    """Name of the part that makes a measurement."""
    return f"{EVALUATOR}-{label.replace(' ', '-')}"


def demonstrator(member: str = "") -> str:
    """Name of the part that demonstrates with the robot of a member, '' in a job of one shape."""
    return f"{DEMONSTRATOR}-{member}" if member else DEMONSTRATOR


@dataclass(frozen=True, slots=True)
class ProcessSpecs:
    """Makes the parts of one fleet."""

    recipe: str
    gateway: str
    """tcp://HOST:PORT, as the parts reach it"""
    seed: int
    operator: bool
    """with the scripted operator beside the robots"""
    overrides: Overrides
    config: Path | None = None
    """that the recipe was made from, absolute"""

    def make_gateway(
        self,
        host: str,
        port: int,
        web_host: str,
        web_port: int,
        retention: str = "",
        stop_port: int | None = None,
        canary: float = 0.0,
        gate_success: float = 0.0,
    ) -> ProcessSpec:
        given = {"host": host, "port": port, "web_host": web_host, "web_port": web_port, "retention": retention}
        given |= {"stop_port": stop_port, "canary": canary, "gate_success": gate_success}
        return self._part(GATEWAY, Role.gateway, "gateway", GatewayOptions, **given)

    def make_trainer(self, max_lag: str = "") -> ProcessSpec:
        """`max_lag`: as `fleet.config.overrides.read_staleness` reads it."""
        return replace(self._part(TRAINER, Role.trainer, "trainer", TrainerOptions, max_lag=max_lag), nice=5)

    def make_evaluator(self) -> ProcessSpec:
        return replace(self._part(EVALUATOR, Role.evaluator, "evaluator", EvaluatorOptions), nice=15)

    def make_measurer(self, label: str, version: int) -> ProcessSpec:
        """Measures one version once; `label`: before, after or `minute_label` of some moment."""
        asked = {"version": version, "label": label}
        part = self._part(measurer(label), Role.evaluator, "evaluator", EvaluatorOptions, **asked)
        return replace(part, restart=False)

    def make_demonstrator(self, episodes: int, member: str = "") -> ProcessSpec:
        """`member`: whose robot, '' in a job of one shape."""
        name, made = demonstrator(member), self._of(member)
        part = made._part(name, Role.demonstrator, "demonstrate", DemonstratorOptions, episodes=episodes)
        return replace(part, restart=False)

    def make_thinker(self) -> ProcessSpec:
        return replace(self._part(THINKER, Role.thinker, "think-server", ThinkServerOptions), nice=5)

    def make_edge(self, robot: str, think: str = "", member: str = "") -> ProcessSpec:
        """A robot is never given up: what ails it may pass, and the others go on meanwhile.

        `think`: address of the think server, '' for its own computer; `member`: as of a demonstrator.
        """
        return replace(self._of(member)._part(robot, Role.edge, "edge", EdgeOptions, think=think), give_up_after=0)

    def _of(self, member: str) -> ProcessSpecs:
        return replace(self, recipe=f"{self.recipe}@{member}") if member else self

    def _part(self, name: str, role: Role, command: str, kind: type[ProcessOptions], **given: Any) -> ProcessSpec:
        """With those options of a `kind` that all parts of the fleet share, and those that are `given`."""
        shared = {"name": name, **{one.name: getattr(self, one.name) for one in fields(self)}}
        options = kind(**{one.name: shared[one.name] for one in fields(kind) if one.name in shared}, **given)
        return ProcessSpec(name, role, (command, *options.arguments()))


# --- what processes have in common and import once, by what they do; these import the rest ----------------------------

_GATEWAY_MODULES = (
    "fleet.cli.__main__",
    "cloud_learner.gateway.server",
    "cloud_learner.operator.app",
    "cloud_learner.buffer.location",
    "cloud_learner.buffer.maintenance.maintenance",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
)
_EDGE_MODULES = ("fleet.cli.__main__", "fleet.evaluation.demonstrations")
_SIMULATORS = {
    "metaworld": (
        "hal.drivers.metaworld.simulation:import_simulator",
        "hal.drivers.metaworld.expert",
        "metaworld.policies",
    )
}
_POLICY_MODULES = ("torch", "policies.flow.policy", "robot_edge.inference.server", "robot_edge.inference.latent_server")
_LEROBOT_MODULES = ("policies.lerobot.policy", "lerobot.policies.factory")
# An optimizer imports the second when it is made.
_TRAINER_MODULES = ("cloud_learner.training.trainer", "torch._dynamo")
_THINKING = (Role.trainer, Role.evaluator, Role.thinker)
"""roles that run the policy in their own process"""


def _robot_modules(recipe: Recipe) -> tuple[str, ...]:
    return *_SIMULATORS.get(recipe.robot, ()), *recipe.modules


def modules_by_role(recipe: Recipe, policy: str) -> dict[Role, tuple[str, ...]]:
    """What each role of a part needs before it begins, most urgent roles first.

    `policy`: KIND:NAME of another one than the recipe's. Where there is a GPU nothing shared may touch it: roles that
    run the policy are left out.
    """
    robots = [word for one in recipe.members.values() or (recipe,) for word in _robot_modules(one)]
    robot = (*_EDGE_MODULES, *dict.fromkeys(robots))
    lerobot = _LEROBOT_MODULES if recipe.tiny or policy.startswith("lerobot:") else ()
    needs = {Role.gateway: _GATEWAY_MODULES, Role.demonstrator: robot}
    if has_gpu():
        return {**needs, Role.edge: robot}
    thinking = (*robot, *_POLICY_MODULES, *lerobot)
    return {**needs, Role.edge: thinking, **dict.fromkeys(_THINKING, (*thinking, *_TRAINER_MODULES))}
