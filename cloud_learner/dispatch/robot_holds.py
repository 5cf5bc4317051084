"""Which robots are here, where several gateways share a ledger: each robot is at one of them."""

from __future__ import annotations

import logging

from cloud_learner.buffer.ledger.ledger import Ledger
from wire.errors import StorageError

log = logging.getLogger(__name__)

SILENT_S = 5.0
"""a gateway that has not heard of a robot for so long gives it up"""
_KEEP_NS = 1_500_000_000


class RobotHolds:
    """What is noted in the ledger of who has which robot. Nothing where the ledger is this machine's alone."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._heard: set[str] = set()
        self._next_ns = 0

    def take(self, robot: str) -> tuple[str, bool]:
        """(why `robot` cannot be let in, whether it comes from another gateway): as long as another one hears it.

        While the ledger cannot be asked it is let in: people have to reach it.
        """
        if not self._ledger.shared:
            return "", False
        try:
            other, moved = self._ledger.take_robot(robot, SILENT_S)
        except StorageError as error:
            log.error("which gateway has robot '%s' cannot be asked now: %s", robot, error)
            return "", False
        if not other:
            return "", moved
        return (
            f"name: robot '{robot}' is at gateway '{other}', which hears it. Stop it there; {SILENT_S:g} s later it is "
            "let in here. Two robots need two names.",
            False,
        )

    def hear(self, robot: str) -> None:
        """It has said something."""
        self._heard.add(robot)

    def poll(self, now_ns: int) -> None:
        """Note who was heard, now and then."""
        if not self._ledger.shared or now_ns < self._next_ns:
            return
        self._next_ns = now_ns + _KEEP_NS
        heard, self._heard = self._heard, set()
        try:
            if heard:
                self._ledger.keep_robots(sorted(heard))
        except StorageError as error:
            log.error("which robots are here cannot be noted now: %s", error)
