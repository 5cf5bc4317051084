"""Who holds which robot, until when. One holder a robot; what outranks it takes it away."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from wire.errors import RejectedError
from wire.types import Lease


class Priority(IntEnum):
    """The usual ones. A lease ends for one of higher priority, never for an equal one."""

    rollout = 10
    evaluation = 20
    teleoperation = 30
    operator = 80
    estop = 90


ESTOP = "estop"
"""purpose of the lease by which a robot is stopped"""


class Leases:
    """All leases of a fleet. Times are of one clock that does not go back.

    A lease lives for its time to live and is renewed by a heartbeat. Its `number` grows with every lease of the fleet:
    a robot, or whoever acts on it, refuses what carries a smaller one than it has seen (a fencing token, as in
    Kleppmann, "How to do distributed locking", 2016). After a restart, start from a number no smaller than
    `last_number` was.
    """

    def __init__(self, last_number: int = 0) -> None:
        self.last_number = last_number
        """of the newest lease; keep it over a restart"""
        self._held: dict[str, Lease] = {}
        self._ended: list[Lease] = []

    def acquire(
        self, robot: str, holder: str, purpose: str, priority: int, ttl_ns: int, now_ns: int
    ) -> tuple[Lease, Lease | None]:
        """A new lease of `robot`, and the one that ended for it.

        The holder itself may ask again: its old lease ends without a preemption. Raises `RejectedError` when another
        holds the robot with the same priority or a higher one.
        """
        held = self.of(robot, now_ns)
        if held is None and robot in self._held:
            # It ran out just now and nobody has asked yet: whoever asks for the ended ones still hears of it.
            self._ended.append(self._held.pop(robot))
        if held is not None and held.holder != holder and priority <= held.priority:
            raise RejectedError(
                f"robot '{robot}' is held by '{held.holder}' for {held.purpose} (priority {held.priority}) for another "
                f"{(held.expires_ns - now_ns) / 1e9:.1f} s unless it is renewed. Wait, or ask with a higher priority "
                f"than {held.priority}."
            )
        self.last_number += 1
        lease = Lease(robot, holder, purpose, int(priority), now_ns + ttl_ns, self.last_number, ttl_ns)
        self._held[robot] = lease
        return lease, held if held is not None and held.holder != holder else None

    def restore(self, lease: Lease) -> None:
        """A lease from before a restart runs on."""
        self.last_number = max(self.last_number, lease.number)
        self._held[lease.robot] = lease

    def renew(self, robot: str, number: int, now_ns: int) -> Lease:
        """The lease runs for its time to live from now. Raises `RejectedError` when it has ended, or for another
        number.
        """
        lease = self.require(robot, number, now_ns)
        lease = msgspec.structs.replace(lease, expires_ns=max(lease.expires_ns, now_ns + lease.ttl_ns))
        self._held[robot] = lease
        return lease

    def release(self, robot: str, number: int, now_ns: int) -> Lease:
        """The robot is free again. `number` 0: whoever holds it. Raises `RejectedError` when that lease has ended."""
        lease = self.require(robot, number, now_ns, whoever=number == 0)
        del self._held[robot]
        return lease

    def expire(self, now_ns: int) -> list[Lease]:
        """The leases that ran out since the last call, in the order of their numbers."""
        over = [lease for lease in self._held.values() if lease.expires_ns <= now_ns]
        for lease in over:
            del self._held[lease.robot]
        ended, self._ended = sorted([*self._ended, *over], key=lambda lease: lease.number), []
        return ended

    def of(self, robot: str, now_ns: int | None = None) -> Lease | None:
        """The lease of `robot`; with `now_ns`, only if it has not run out."""
        lease = self._held.get(robot)
        return lease if lease is not None and (now_ns is None or lease.expires_ns > now_ns) else None

    def all(self) -> tuple[Lease, ...]:
        """Every lease, by the robot's name."""
        return tuple(self._held[robot] for robot in sorted(self._held))

    def require(self, robot: str, number: int, now_ns: int, whoever: bool = False) -> Lease:
        """The lease of `robot`, if it is this one or `whoever` holds it. Raises `RejectedError` when it has ended."""
        lease = self.of(robot, now_ns)
        if lease is None:
            raise RejectedError(f"robot '{robot}' is not held by anybody: lease {number} has ended. Ask for a new one.")
        if number != lease.number and not whoever:
            raise RejectedError(
                f"lease {number} of robot '{robot}' has ended; '{lease.holder}' holds it by lease {lease.number}."
            )
        return lease
