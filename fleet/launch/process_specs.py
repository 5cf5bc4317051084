"""What each part of a fleet is started with: the words after `vla-fleet`, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from fleet.launch.backend import Part
from fleet.launch.builders import THINKER
from wire.transport.keys import GATEWAY
from wire.types import Role

TRAINER, EVALUATOR, DEMONSTRATOR = "trainer", "evaluator", "demonstrator"
BEFORE, AFTER = "before", "after"
HELPERS = (TRAINER, EVALUATOR, DEMONSTRATOR, THINKER)
"""what is neither robot nor gateway, nor measures once"""


def minute_label(minute: float) -> str:
    """Of a measurement of what was the newest version then."""
    return f"minute {minute:g}"


def measurer(label: str) -> str:
    """Name of the part that makes a measurement."""
    return f"{EVALUATOR}-{label.replace(' ', '-')}"


@dataclass(frozen=True, slots=True)
class Parts:
    """Makes the parts of one fleet."""

    recipe: str
    gateway: str
    """tcp://HOST:PORT, as the parts reach it"""
    seed: int
    operated: bool
    """with the scripted operator beside the robots"""
    overrides: Overrides

    def make_gateway(self, host: str, port: int, web_host: str, web_port: int) -> Part:
        options = GatewayOptions(recipe=self.recipe, host=host, port=port, web_host=web_host, web_port=web_port)
        return _part(GATEWAY, "gateway", options)

    def make_trainer(self) -> Part:
        options = TrainerOptions(
            recipe=self.recipe, gateway=self.gateway, seed=self.seed, name=TRAINER, overrides=self.overrides
        )
        return _part(TRAINER, "trainer", options, nice=5)

    def make_evaluator(self) -> Part:
        return _part(EVALUATOR, "evaluator", self._evaluator(EVALUATOR), nice=15)

    def make_measurer(self, label: str, version: int) -> Part:
        """Measures one version once; `label`: before, after or `minute_label` of some moment."""
        name = measurer(label)
        options = replace(self._evaluator(name), version=version, label=label)
        return _part(name, "evaluator", options, restart=False)

    def make_demonstrator(self, episodes: int) -> Part:
        options = DemonstratorOptions(recipe=self.recipe, gateway=self.gateway, name=DEMONSTRATOR, episodes=episodes)
        return _part(DEMONSTRATOR, "demonstrate", options, restart=False)

    def make_thinker(self) -> Part:
        options = ThinkServerOptions(recipe=self.recipe, gateway=self.gateway, overrides=self.overrides)
        return _part(THINKER, "think-server", options, nice=5)

    def make_edge(self, robot: str, think: str = "") -> Part:
        """A robot is never given up: what ails it may pass, and the others go on meanwhile.

        `think`: address of the think server, '' for its own computer.
        """
        options = EdgeOptions(
            recipe=self.recipe,
            gateway=self.gateway,
            name=robot,
            operator=self.operated,
            think=think,
            overrides=self.overrides,
        )
        return _part(robot, "edge", options, give_up_after=0)

    def _evaluator(self, name: str) -> EvaluatorOptions:
        return EvaluatorOptions(
            recipe=self.recipe, gateway=self.gateway, seed=self.seed, name=name, overrides=self.overrides
        )


_ROLES = {"demonstrate": "demonstrator", "think-server": "thinker"}
"""by command, where they differ"""


def _part(name: str, command: str, options: ProcessOptions, **kept: Any) -> Part:
    return Part(name, Role(_ROLES.get(command, command)), (command, *options.arguments()), **kept)
