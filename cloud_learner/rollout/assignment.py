"""Which robots try a new version, and which keep the reference: by hash, so that everybody finds the same ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
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

    ceil(share * robots) canaries and ceil(control * robots) controls, but one robot at least is neither; a single robot
    is a canary. A robot that joins or leaves changes the place of one other at most in each group: robots are ranked by
    a hash of their name and the version (rendezvous hashing, Thaler and Ravishankar 1998).
    """
    count = len(robots)
    canaries = 0 if not share else 1 if count == 1 else min(math.ceil(share * count - 1e-9), count - 1)
    controls = max(min(math.ceil(control * count - 1e-9), count - canaries - 1), 0)
    keep = frozenset(_ranked(robots, f"reference {reference}")[:controls]) if reference else frozenset()
    left = [robot for robot in robots if robot not in keep]
    try_it = frozenset(_ranked(left, f"canary {canary}")[:canaries]) if canary else frozenset()
    return FleetSplit(try_it, keep, frozenset(left) - try_it)


def few(robots: Collection[str], number: int, count: int) -> frozenset[str]:
    """`count` of them at most, the same ones whoever asks; others for another version."""
    return frozenset(_ranked(robots, f"shadow {number}")[:count])


def _ranked(robots: Collection[str], salt: str) -> list[str]:
    return sorted(robots, key=lambda robot: (hashlib.sha256(f"{salt}:{robot}".encode()).digest(), robot))
