"""What a version of a shared network would do with each shape of robot, before robots do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from cloud_learner.training.config import ActionCheckConfig
from cloud_learner.training.publishing.action_check import ActionCheck
from cloud_learner.training.status import VersionRefusal
from wire.errors import SpecMismatchError

Actions: TypeAlias = Any
"""what a check's own `act` gave"""


class VersionCheck(Protocol):
    """An `ActionCheck`, or those of several robots."""

    config: ActionCheckConfig

    def choose(self) -> None: ...

    @property
    def ready(self) -> bool: ...

    def knows(self, sha256: str) -> bool: ...

    def act(self, weights: bytes, sha256: str = "") -> Actions | VersionRefusal: ...

    def compare(self, actions: Actions, parent_sha256: str) -> tuple[float, VersionRefusal | None]: ...

    def change(self, before: Actions, after: Actions) -> float: ...


class ActionChecks:
    """A version goes out if it may for every robot that it can drive. As `ActionCheck`; actions are by member."""

    def __init__(self, checks: Mapping[str, ActionCheck]) -> None:
        """One at least, by the names of the members."""
        self._checks = dict(checks)
        self.config = next(iter(self._checks.values())).config

    def choose(self) -> None:
        for one in self._checks.values():
            one.choose()

    @property
    def ready(self) -> bool:
        return any(one.ready for one in self._checks.values())

    def knows(self, sha256: str) -> bool:
        # all are asked, for who is asked for a version does not forget it
        known = [one.knows(sha256) for one in self._checks.values()]
        return any(known)

    def act(self, weights: bytes, sha256: str = "") -> dict[str, np.ndarray] | VersionRefusal:
        """By name of those that can act by these weights and have something to act on."""
        found: dict[str, np.ndarray] = {}
        for name, one in self._checks.items():
            if not one.ready:
                continue
            try:
                actions = one.act(weights, sha256)
            except SpecMismatchError:
                # its robots have no row in them yet
                continue
            if isinstance(actions, VersionRefusal):
                return _of(name, actions)
            found[name] = actions
        return found

    def compare(self, actions: dict[str, np.ndarray], parent_sha256: str) -> tuple[float, VersionRefusal | None]:
        """The largest change, and the first refusal."""
        most = 0.0
        for name, own in actions.items():
            one = self._checks[name]
            if not one.knows(parent_sha256):
                continue
            change, refusal = one.compare(own, parent_sha256)
            most = max(most, change)
            if refusal is not None:
                return change, _of(name, refusal)
        return most, None

    def change(self, before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float:
        """The largest."""
        return max(
            (self._checks[name].change(before[name], after[name]) for name in before.keys() & after), default=0.0
        )


def _of(name: str, refusal: VersionRefusal) -> VersionRefusal:
    return replace(refusal, detail=f"for '{name}': {refusal.detail}")
