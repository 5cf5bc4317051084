"""Which robots try a new version, and which keep the reference: by hash, so that everybody finds the same ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetSplit:
    """Robots that are not pinned; none is in two of these."""

    canaries: frozenset[str] = frozenset()
    controls: frozenset[str] = frozenset()
    """keep the reference while another version is current"""
    others: frozenset[str] = frozenset()


def split_fleet(robots: Collection[str], canary: int, reference: int, share: float, control: float) -> FleetSplit:
    """Those that try version `canary`, and those that keep version `reference`; 0: no such version.

    Of a share that is not 0 at least one robot, otherwise rounded down: 0.2 of 3 to 9 robots is one. But one robot at
    least is neither; a single robot is a canary. A robot that joins or leaves changes the place of one other at most in
    each group: robots are ranked by a hash of their name and the version (rendezvous hashing, Thaler and Ravishankar
    1998).
    """
    count = len(robots)
    canaries = 1 if share and count == 1 else min(_share_of(count, share), max(count - 1, 0))
    controls = max(min(_share_of(count, control), count - canaries - 1), 0)
    keep = frozenset(_ranked(robots, f"reference {reference}")[:controls]) if reference else frozenset()
    left = [robot for robot in robots if robot not in keep]
    try_it = frozenset(_ranked(left, f"canary {canary}")[:canaries]) if canary else frozenset()
    return FleetSplit(try_it, keep, frozenset(left) - try_it)


def split_by_shape(robots: Mapping[str, str], canary: int, reference: int, share: float, control: float) -> FleetSplit:
    """As `split_fleet`, of the robots of each shape by themselves: only they can be compared. `robots`: shape by robot.

    A robot that is the only one of its shape keeps the current version, unless there are two of no shape: then each is
    a canary, to be compared with what it did before.
    """
    groups: dict[str, list[str]] = {}
    for robot, shape in robots.items():
        groups.setdefault(shape, []).append(robot)
    compared = [group for group in groups.values() if len(group) > 1] or list(groups.values())
    splits = [split_fleet(group, canary, reference, share, control) for group in compared]
    canaries = frozenset[str]().union(*(one.canaries for one in splits))
    controls = frozenset[str]().union(*(one.controls for one in splits))
    return FleetSplit(canaries, controls, frozenset(robots) - canaries - controls)


def few(robots: Collection[str], number: int, count: int) -> frozenset[str]:
    """`count` of them at most, the same ones whoever asks; others for another version."""
    return frozenset(_ranked(robots, f"shadow {number}")[:count])


def _share_of(count: int, share: float) -> int:
    return max(math.floor(share * count + 1e-9), 1) if share else 0


def _ranked(robots: Collection[str], salt: str) -> list[str]:
    return sorted(robots, key=lambda robot: (hashlib.sha256(f"{salt}:{robot}".encode()).digest(), robot))
