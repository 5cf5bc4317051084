"""Where a robot will be after actions that are already decided: what an asynchronous policy must start from.

VLASH (arXiv 2512.01031, section 3.2) rolls the state forward to the moment a chunk begins. Here the actions *as
executed* are integrated by what each dimension means, and a robot may bring a model of its own (`DynamicsModel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from wire.errors import ConfigError, suggest
from wire.types import CommandType, RobotSpec


class DynamicsModel(Protocol):
    """A model of one robot: how its state follows from its actions."""

    rolled: np.ndarray
    """bool[ds]: the state dimensions it foretells; the others stay as they were seen. Training mixes the later state
    and the seen one the same way"""

    def rollout(self, state: np.ndarray, past: np.ndarray, coming: np.ndarray) -> np.ndarray:
        """float32[ds] after `coming`.

        `state`: float32[ds] as seen; `past`: float32[m, da] executed before it in this episode, oldest first, for
        models with memory (m may be 0); `coming`: float32[d, da] that will be executed from then on.
        """
        ...


class ActionStateMapping(msgspec.Struct, frozen=True):
    """An action dimension and the state dimension it moves."""

    action: str
    state: str
    gain: float = 1.0
    """state units per action unit"""


def require_dimension(what: str, name: str, names: Sequence[str]) -> None:
    """Raise `ConfigError`, which begins with `what`, for a name that is not one of `names`."""
    if name not in names:
        raise ConfigError(f"{what} names '{name}'.{suggest(name, names)} It has {', '.join(names) or 'none'}.")


class SpecMotion:
    """Integrates actions by their meaning, within the limits of the state.

    absolute: the state goes to `gain * a`; delta: it changes by `gain * a` a tick; velocity: by `gain * a` times the
    control period.
    """

    def __init__(self, spec: RobotSpec, mappings: Sequence[ActionStateMapping] | None = None) -> None:
        """Without `mappings`, action and state dimensions of one name belong together.

        Raises `ConfigError` for a name the spec has not, or a state dimension that two actions move.
        """
        actions, states = [d.name for d in spec.action], [d.name for d in spec.state]
        if mappings is None:
            mappings = [ActionStateMapping(name, name) for name in actions if name in states]
        for mapping in mappings:
            require_dimension(f"motion of '{spec.embodiment}': an action", mapping.action, actions)
            require_dimension(f"motion of '{spec.embodiment}': a state", mapping.state, states)
        moved = [mapping.state for mapping in mappings]
        if len(set(moved)) < len(moved):
            raise ConfigError(f"motion of '{spec.embodiment}': a state dimension is moved by two actions: {moved}.")
        self._from = np.array([actions.index(c.action) for c in mappings], int)
        self._to = np.array([states.index(c.state) for c in mappings], int)
        meanings = [spec.action[i].meaning for i in self._from]
        period_s = spec.period_ns / 1e9
        gains = [
            c.gain * (period_s if m is CommandType.velocity else 1.0) for c, m in zip(mappings, meanings, strict=True)
        ]
        self._axes = [
            (meaning is CommandType.absolute, gain, spec.state[i].low, spec.state[i].high)
            for meaning, gain, i in zip(meanings, gains, self._to, strict=True)
        ]
        self.rolled = np.zeros(len(states), bool)
        self.rolled[self._to] = True

    def rollout(self, state: np.ndarray, past: np.ndarray, coming: np.ndarray) -> np.ndarray:
        """See `DynamicsModel.rollout`; it needs no past."""
        rolled = np.array(state, np.float32)
        at = rolled[self._to].tolist()
        for action in coming[:, self._from].tolist():
            for i, (absolute, gain, low, high) in enumerate(self._axes):
                change = action[i] * gain
                at[i] = min(max(change if absolute else at[i] + change, low), high)
        rolled[self._to] = at
        return rolled
