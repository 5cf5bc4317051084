"""What each part of a fleet is started with: the words after `vla-fleet`, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
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
    operator: bool
    """with the scripted operator beside the robots"""
    overrides: Overrides

    def make_gateway(self, host: str, port: int, web_host: str, web_port: int, retention: str = "") -> Part:
        given = {"host": host, "port": port, "web_host": web_host, "web_port": web_port, "retention": retention}
        return self._part(GATEWAY, Role.gateway, "gateway", GatewayOptions, **given)

    def make_trainer(self) -> Part:
        return replace(self._part(TRAINER, Role.trainer, "trainer", TrainerOptions), nice=5)

    def make_evaluator(self) -> Part:
        return replace(self._part(EVALUATOR, Role.evaluator, "evaluator", EvaluatorOptions), nice=15)

    def make_measurer(self, label: str, version: int) -> Part:
        """Measures one version once; `label`: before, after or `minute_label` of some moment."""
        asked = {"version": version, "label": label}
        part = self._part(measurer(label), Role.evaluator, "evaluator", EvaluatorOptions, **asked)
        return replace(part, restart=False)

    def make_demonstrator(self, episodes: int) -> Part:
        part = self._part(DEMONSTRATOR, Role.demonstrator, "demonstrate", DemonstratorOptions, episodes=episodes)
        return replace(part, restart=False)

    def make_thinker(self) -> Part:
        return replace(self._part(THINKER, Role.thinker, "think-server", ThinkServerOptions), nice=5)

    def make_edge(self, robot: str, think: str = "") -> Part:
        """A robot is never given up: what ails it may pass, and the others go on meanwhile.

        `think`: address of the think server, '' for its own computer.
        """
        return replace(self._part(robot, Role.edge, "edge", EdgeOptions, think=think), give_up_after=0)

    def _part(self, name: str, role: Role, command: str, kind: type[ProcessOptions], **given: Any) -> Part:
        """With those options of a `kind` that all parts of the fleet share, and those that are `given`."""
        shared = {"name": name, **{one.name: getattr(self, one.name) for one in fields(self)}}
        options = kind(**{one.name: shared[one.name] for one in fields(kind) if one.name in shared}, **given)
        return Part(name, role, (command, *options.arguments()))
