"""Who was in control of an episode, and how often somebody took it from the policy.

An intervention is a change from the policy to a human or a script; ticks at which the robot held belong to nobody and
are skipped. An episode that starts under a human counts none, and neither do demonstrations.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from wire.messages import ACTORS

POLICY, HUMAN, SCRIPT, HOLD = (ACTORS.index(name) for name in ("policy", "human", "script", "hold"))
NOBODY = -1


class Control(msgspec.Struct, frozen=True):
    """Who was in control of one segment."""

    human_steps: int
    """steps of a human or a script"""
    entry: int
    """first actor that was not hold, -1 when there was none"""
    exit: int
    """last actor that was not hold, -1 when there was none"""
    takeovers: int
    """interventions within the segment; the seam to the one before is not counted"""


def by_human(actor: np.ndarray) -> np.ndarray:
    """bool[T] of uint8[T]: whether a human or a script acted."""
    return (actor == HUMAN) | (actor == SCRIPT)


def summarise_control(actor: np.ndarray) -> Control:
    """What the ledger keeps of uint8[T] indices into `ACTORS`."""
    human = by_human(actor)
    active = actor[actor != HOLD]
    if not len(active):
        return Control(0, NOBODY, NOBODY, 0)
    takeovers = int(((active[:-1] == POLICY) & by_human(active[1:])).sum())
    return Control(int(human.sum()), int(active[0]), int(active[-1]), takeovers)


def count_interventions(segments: Iterable[tuple[int, int, int]]) -> int:
    """Interventions of an episode from (entry, exit, takeovers) of its segments in order."""
    total, before = 0, NOBODY
    for entry, leave, takeovers in segments:
        total += takeovers + (before == POLICY and entry in (HUMAN, SCRIPT))
        before = leave if leave != NOBODY else before
    return total
