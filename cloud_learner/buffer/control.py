"""Who was in control of an episode, and how often somebody took it from the policy.

An intervention is a change from the policy to a human or a script; ticks at which the robot held belong to nobody and
are skipped. An episode that starts under a human counts none, and neither do demonstrations.
"""

from __future__ import annotations

import msgspec
import numpy as np

from wire.messages.gateway import ACTORS, Segment

POLICY, HUMAN, SCRIPT, HOLD = (ACTORS.index(name) for name in ("policy", "human", "script", "hold"))
NOBODY = -1
RECOVERY = 128
"""on top of an actor who only brings the robot back (`Segment.recovery`): runs, and steps in memory, have actors that
are marked so"""


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


def marked_actor(segment: Segment) -> np.ndarray:
    """uint8[T] indices into `ACTORS`, with `RECOVERY` on top where somebody recovers."""
    if isinstance(segment.recovery, msgspec.UnsetType):
        return segment.actor
    return segment.actor | np.uint8(RECOVERY) * segment.recovery


def actor_index(marked: np.ndarray) -> np.ndarray:
    """uint8[T] indices into `ACTORS` of marked ones."""
    return marked & np.uint8(RECOVERY - 1)


def is_recovery(marked: np.ndarray) -> np.ndarray:
    """bool[T] of marked actors."""
    return marked >= RECOVERY


def by_human(actor: np.ndarray) -> np.ndarray:
    """bool[T] of uint8[T], marked or not: whether a human or a script acted."""
    who = actor & (RECOVERY - 1)
    return (who == HUMAN) | (who == SCRIPT)


def summarise_control(actor: np.ndarray) -> Control:
    """What the ledger keeps of uint8[T] indices into `ACTORS`."""
    human = by_human(actor)
    active = actor[actor != HOLD]
    if not len(active):
        return Control(0, NOBODY, NOBODY, 0)
    takeovers = int(((active[:-1] == POLICY) & by_human(active[1:])).sum())
    return Control(int(human.sum()), int(active[0]), int(active[-1]), takeovers)


def is_takeover(before: int, after: int) -> bool:
    """Whether `after` took the robot from `before`, both indices into `ACTORS` or -1 for nobody."""
    return before == POLICY and after in (HUMAN, SCRIPT)


def rollout_steps(actor: np.ndarray, demonstration: bool | np.ndarray) -> np.ndarray:
    """bool[T] of uint8[T]: what the policy did by itself. Only that can be stale: what people, scripts and
    demonstrations do is a label whatever version the robot had, and a tick at which it held is nobody's."""
    return (actor == POLICY) & ~np.asarray(demonstration, bool)


def arrival_lag(version: np.ndarray, newest_version: int | np.ndarray) -> np.ndarray:
    """int64[T] lag of steps int32[T] by their versions: the newest version that the fleet had committed when their
    segment arrived minus the one that acted, 0 at least (ECHO-2's version lag, arXiv 2602.02192). It never changes."""
    return np.maximum(np.asarray(newest_version, np.int64) - version, 0)


def largest_lag(actor: np.ndarray, version: np.ndarray, demonstration: bool, newest_version: int) -> int:
    """Largest `arrival_lag` of a segment's rollout steps, 0 without any."""
    mine = version[rollout_steps(actor, demonstration)]
    return int(arrival_lag(mine, newest_version).max(initial=0))


def find_runs(actor: np.ndarray, version: np.ndarray) -> np.ndarray:
    """int32[k, 4]: first offset, count, actor, marked or not, and version of each stretch in which neither changes."""
    if not len(actor):
        return np.zeros((0, 4), np.int32)
    changes = (actor[1:] != actor[:-1]) | (version[1:] != version[:-1])
    first = np.concatenate([[0], np.flatnonzero(changes) + 1])
    count = np.diff(first, append=len(actor))
    return np.stack([first, count, actor[first], version[first]], axis=1).astype(np.int32)
