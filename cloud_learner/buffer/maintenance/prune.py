"""Forgetting whole episodes, so that the buffer stays in bounds."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cloud_learner.buffer.ledger.ledger import EPISODES_AT_ONCE, Ledger
from cloud_learner.buffer.maintenance.retention import Retention


class Pruned(msgspec.Struct, frozen=True):
    """What was forgotten, or would be."""

    episodes: int
    segments: int
    bytes: int
    warning: str = ""
    """what a person should know about the bounds"""


def prune(
    ledger: Ledger,
    retention: Retention,
    now_ns: int,
    *,
    dry_run: bool = False,
    wait_s: float = 30,
    stop: Callable[[], bool] = lambda: False,
) -> Pruned:
    """Forget whole episodes, some at a time until `stop`; with `dry_run` only say how many.

    One that got a segment while it was chosen stays this time. Room comes back with `compact`. `now_ns`: nanoseconds
    since 1970. Raises `StorageError` when somebody else is at work for longer than `wait_s`.
    """
    totals = ledger.totals()
    if not retention.may_forget(totals.bytes):
        return Pruned(0, 0, 0)
    episodes = ledger.kept_episodes()
    chosen = retention.choose(episodes, now_ns)
    warnings = [retention.warning(episodes)]
    if chosen and (held := ledger.snapshots_of([one.id for one in chosen])):
        names = ", ".join(f"'{name}'" for name in held)
        warnings.append(
            f"what goes is missing from snapshots {names}; `vla-fleet buffer snapshots` counts what is left."
        )
    found = (len(chosen), sum(one.segments for one in chosen), sum(one.bytes for one in chosen))
    if not dry_run:
        found = (0, 0, 0)
        for first in range(0, len(chosen), EPISODES_AT_ONCE):
            if stop():
                break
            with ledger.exclusive(wait_s=wait_s):
                some = [one.id for one in chosen[first : first + EPISODES_AT_ONCE]]
                more = ledger.prune(some, now_ns, totals.newest_row)
            found = (found[0] + more[0], found[1] + more[1], found[2] + more[2])
    return Pruned(*found, " ".join(filter(None, warnings)))
