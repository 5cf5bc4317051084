"""Which robots are here, where several gateways share a ledger: each robot is at one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import TakenRobots
from cloud_learner.dispatch.lease_store import RESERVED, LeaseStore
from cloud_learner.dispatch.notes import Note, Notes

SILENT_S = 5.0
"""a gateway that has not heard of a robot for so long gives it up"""
_KEEP_NS = 1_500_000_000


class RobotHolds:
    """For the gateway's loop. Where the ledger is this machine's alone every robot is here."""

    def __init__(self, ledger: Ledger, notes: Notes, leases: LeaseStore) -> None:
        """A robot that comes from another gateway refuses lower numbers than those of its `leases` there."""
        self._ledger, self._notes, self._leases = ledger, notes, leases
        self.on_moved: Callable[[str], None] = lambda robot: None
        """called for each robot that has come from another gateway"""
        self._heard_ns: dict[str, int] = {}
        self._next_ns = 0

    def hear(self, robot: str, now_ns: int) -> None:
        """It has said something, and is one of ours."""
        self._heard_ns[robot] = now_ns

    def is_here(self, robot: str, now_ns: int) -> bool:
        """Whether no other gateway can have taken it since it was heard last."""
        return not self._ledger.shared or now_ns - self._heard_ns.get(robot, -(2**62)) < SILENT_S * 1e9

    def ask(self, robot: str) -> TakenRobots:
        """For the thread of storage: have `robot` here, unless another gateway hears it. Raises `StorageError`."""
        if not self._ledger.shared:
            return TakenRobots()
        return self._ledger.take_robots([robot], SILENT_S, RESERVED)

    def take(self, robot: str, taken: TakenRobots) -> str:
        """What came of `ask`: why the robot is not let in, '' when it is here."""
        self._on_taken(taken)
        if (other := taken.elsewhere.get(robot)) is None:
            return ""
        return (
            f"name: robot '{robot}' is at gateway '{other}', which hears it. Stop it there, and it is let in here "
            f"{SILENT_S:g} s later. Two robots need two names."
        )

    def poll(self, now_ns: int) -> None:
        """Note who was heard, now and then."""
        if not self._ledger.shared or now_ns < self._next_ns:
            return
        heard = sorted(robot for robot, at_ns in self._heard_ns.items() if now_ns - at_ns < 2 * _KEEP_NS)
        self._next_ns = now_ns + _KEEP_NS
        if heard:
            run = partial(self._ledger.take_robots, heard, SILENT_S, RESERVED)
            self._notes.submit(Note(run, self._on_taken, key="robots here", lasting=False))

    def _on_taken(self, taken: TakenRobots) -> None:
        self._leases.skip_to(taken.reserved)
        for robot in taken.moved:
            self.on_moved(robot)
