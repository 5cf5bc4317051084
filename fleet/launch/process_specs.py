"""What each part of a fleet is started with: the words after `vla-fleet`, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.config.overrides import Tuning
from fleet.launch.backend import Part
from fleet.launch.builders import THINKER
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
    tuning: Tuning

    def make_gateway(self, host: str, port: int, web_host: str, web_port: int) -> Part:
        words = ["gateway", "--recipe", self.recipe, "--host", host, "--port", str(port)]
        return Part("gateway", Role.gateway, (*words, "--web-host", web_host, "--web-port", str(web_port)))

    def make_trainer(self) -> Part:
        words = (TRAINER, *self._connected(), *self.tuning.policy_flags(), "--seed", str(self.seed))
        return Part(TRAINER, Role.trainer, words, nice=5)

    def make_evaluator(self) -> Part:
        return Part(EVALUATOR, Role.evaluator, self._evaluator(), nice=15)

    def make_measurer(self, label: str, version: int) -> Part:
        """Measures one version once; `label`: before, after or `minute_label` of some moment."""
        name = measurer(label)
        words = ["--name", name, "--version", str(version), "--label", label]
        return Part(name, Role.evaluator, (*self._evaluator(), *words), restart=False)

    def make_demonstrator(self, episodes: int) -> Part:
        words = ("demonstrate", *self._connected(), "--episodes", str(episodes))
        return Part(DEMONSTRATOR, Role.demonstrator, words, restart=False)

    def make_thinker(self) -> Part:
        words = ("think-server", *self._connected(), *self.tuning.policy_flags())
        return Part(THINKER, Role.thinker, words, nice=5)

    def make_edge(self, robot: str, think: str = "") -> Part:
        """A robot is never given up: what ails it may pass, and the others go on meanwhile.

        `think`: address of the think server, '' for its own computer.
        """
        words = ["edge", *self._connected(), *self.tuning.flags(), "--name", robot]
        words += ["--operator" if self.operated else "--no-operator", *(["--think", think] if think else [])]
        return Part(robot, Role.edge, tuple(words), give_up_after=0)

    def _connected(self) -> list[str]:
        return ["--recipe", self.recipe, "--gateway", self.gateway]

    def _evaluator(self) -> tuple[str, ...]:
        return ("evaluator", *self._connected(), "--seed", str(self.seed), *self.tuning.flags())
