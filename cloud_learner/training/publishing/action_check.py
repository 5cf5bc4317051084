"""What a version would do, before robots do it: its actions on recorded observations, against its parent's.

The policy that acts here is another one than the trainer's, and is given the very file that robots would rebuild.

A version may differ from its parent by `max_change`, and by more if that brought it nearer to what people did there, or
took it no farther: so learning that moves on is never held up for good by a parent that stays what it was, and random
weights, which move away from both, are. After a refusal other observations are taken: none is refused twice by what a
few of them have of their own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cloud_learner.buffer.loading.observations import ShownStep
from cloud_learner.training.config import ActionCheckConfig
from cloud_learner.training.status import VersionFault, VersionRefusal
from policies.interface.policy import Policy
from wire.errors import InvalidDataError, PolicyError, WeightsError
from wire.types import ActionChunk, Observation

_EDGE = 1e-3
"""share of its range within which an action is at its limit"""
_REMEMBERED = 3
"""versions: a parent, and what its child is as it was trained and as robots rebuild it"""
_SEED = 1
"""of the noise of each chunk: the same for all versions, or what is compared would be that"""


@dataclass(frozen=True, slots=True, eq=False)
class HeldSource:
    """Where observations come from."""

    choose: Callable[[int, int], list[int]]
    """which so many to take, fewer where there are fewer, by the number of a draw; for the trainer's thread"""
    read: Callable[[Sequence[int]], list[ShownStep]]
    """those; for any thread. Raises `StorageError`"""


class ActionCheck:
    """Acts by a version and says what is wrong with it. All but `choose` is for one thread."""

    def __init__(
        self,
        policy: Policy,
        source: HeldSource,
        config: ActionCheckConfig,
        exclusive: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        """`policy`: of the recipe, its own object. `exclusive`: held while it acts, see `Learner.random_lock`."""
        self.config = config
        self._policy, self._source = policy, source
        self._exclusive = exclusive or contextlib.nullcontext()
        low, high = policy.spec.action_low(), policy.spec.action_high()
        self._low, self._high = low, high
        self._range = np.where(np.isfinite(high - low) & (high > low), high - low, np.float32(1))
        act: Callable[..., ActionChunk] = policy.act
        self._chunk = partial(act, seed=_SEED) if "seed" in inspect.signature(act).parameters else act
        self._chosen: list[int] = []
        self._draw = self._chosen_by = 0
        self._held: tuple[list[int], list[ShownStep]] = [], []
        self._acted: dict[str, np.ndarray] = {}
        """float32[n, H, da] on the held observations by the sha256 of a version's file: the last three asked for"""

    def choose(self) -> None:
        """Choose observations, unless there are enough and they refused nothing: more may have been recorded."""
        draw = self._draw
        if len(self._chosen) < self.config.observations or draw != self._chosen_by:
            self._chosen, self._chosen_by = self._source.choose(self.config.observations, draw), draw

    @property
    def ready(self) -> bool:
        """Whether there is anything to act on. Raises `StorageError` when it cannot be read."""
        chosen = self._chosen
        if chosen != self._held[0]:
            self._held = chosen, self._source.read(chosen)
            self._acted.clear()
        return bool(self._held[1])

    def knows(self, sha256: str) -> bool:
        """Whether that version acted on these observations already; it is then not forgotten for the next one."""
        if sha256 not in self._acted:
            return False
        self._acted[sha256] = self._acted.pop(sha256)
        return True

    def act(self, weights: bytes, sha256: str = "") -> np.ndarray | VersionRefusal:
        """float32[n, H, da], all finite, of a version on the held observations; with its `sha256` it acts once."""
        if sha256 and self.knows(sha256):
            return self._acted[sha256]
        try:
            self._policy.load(weights, 1)
            found = np.stack([self._act(each.observation) for each in self._held[1]])
        except (WeightsError, PolicyError, InvalidDataError) as error:
            return VersionRefusal(VersionFault.cannot_act, f"the policy that robots run cannot act by it: {error}")
        if not np.isfinite(found).all():
            return VersionRefusal(
                VersionFault.cannot_act, "the policy that robots run gives actions that are not finite"
            )
        if sha256:
            self._acted[sha256] = found
            while len(self._acted) > _REMEMBERED:
                del self._acted[next(iter(self._acted))]
        return found

    def compare(self, actions: np.ndarray, parent_sha256: str) -> tuple[float, VersionRefusal | None]:
        """How far `actions` are from its parent's, which acted already, and what is wrong with them."""
        before = self._acted[parent_sha256]
        change = self.change(before, actions)
        refusal = self._find_fault(before, actions, change)
        self._draw += refusal is not None
        return change, refusal

    def distance(self, actions: np.ndarray) -> float | None:
        """Of float32[n, H, da] from what people did: root mean square, in ranges of the dimensions. None: they did
        nothing there."""
        squares: list[np.ndarray] = []
        for chunk, step in zip(actions, self._held[1], strict=True):
            count = min(len(chunk), len(step.shown))
            squares.append(np.square((chunk[:count] - step.shown[:count]) / self._range))
        found = np.concatenate(squares)
        return float(np.sqrt(np.mean(found, dtype=np.float64))) if len(found) else None

    def _find_fault(self, before: np.ndarray, actions: np.ndarray, change: float) -> VersionRefusal | None:
        config = self.config  # what is no number is within no bound
        rise = self._saturated(actions) - self._saturated(before)
        moved, saturated = not change <= config.max_change, not rise <= config.max_saturation_rise
        if (moved or saturated) and (farther := self._find_farther(before, actions)):
            if moved:
                return VersionRefusal(
                    VersionFault.moved,
                    f"its actions are {change:.3f} of their range away from its parent's, more than the max_change of "
                    f"{config.max_change:g} that the recipe's action_check allows, and {farther}",
                )
            return VersionRefusal(
                VersionFault.saturated,
                f"{self._saturated(actions):.0%} of its actions are at their limits, {rise:.0%} more than its "
                f"parent's, and {farther}",
            )
        spread, usual = self._spread(actions), self._spread(before)
        if not spread >= config.min_spread * usual:
            return VersionRefusal(
                VersionFault.constant,
                f"its actions are nearly the same whatever it sees: they differ by {spread:.2g} of their range, its "
                f"parent's by {usual:.2g}",
            )
        return None

    def _find_farther(self, before: np.ndarray, actions: np.ndarray) -> str:
        """How it went away from what people did; '' when it did not."""
        mine, parents = self.distance(actions), self.distance(before)
        if mine is None or parents is None:
            return "nobody showed what is right there"
        return f"they are {mine:.3f} away from what people did there, its parent's {parents:.3f}" * (
            not mine <= parents
        )

    def change(self, before: np.ndarray, after: np.ndarray) -> float:
        """Root mean square of the difference, in ranges of the dimensions."""
        return float(np.sqrt(np.mean(np.square((after - before) / self._range), dtype=np.float64)))

    def _act(self, observation: Observation) -> np.ndarray:
        with self._exclusive:
            latent = self._policy.think(observation)
        with self._exclusive:
            actions = self._chunk(observation, latent, 0).actions
        return actions.astype(np.float32)

    def _saturated(self, actions: np.ndarray) -> float:
        near = _EDGE * self._range
        return float(np.mean((actions <= self._low + near) | (actions >= self._high - near)))

    def _spread(self, actions: np.ndarray) -> float:
        """Of what differs between observations."""
        return self.change(actions.mean(0), actions)
