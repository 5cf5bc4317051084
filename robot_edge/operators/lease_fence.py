"""Whose messages may drive a robot: those of the newest lease that has taken it over, each once.

A lease number is a fencing token (Kleppmann, "How to do distributed locking", 2016): the gateway gives none twice, and
the robot takes none that is smaller than one it has seen. Within a lease, numbers grow with every message. Operators
beside the robot have leases of their own count and outrank the gateway's, as they see the robot and need no link.

    take_over   of a newer lease, or of the same one and operator; not from afar while somebody beside the robot drives
    command     of exactly the lease and the operator that have taken over
    hand_back   of them, or of a newer lease
    drop_link   of them or of a newer lease; it only ever stops, so it may come twice
"""

from __future__ import annotations

from enum import StrEnum

from wire.messages.gateway import OperatorCommand
from wire.messages.local import OperatorState
from wire.types import OperatorCommandKind


class Refusal(StrEnum):
    """Why a person's message is not followed."""

    none = ""
    no_lease = "it names no lease. Take over by the page or `vla-fleet teleop`"
    old_lease = (
        "its lease is over, a newer one has been here. Take over again; if the gateway's records were begun anew, "
        "restart the robot's edge"
    )
    replayed = "it, or one that was made after it, has been here before"
    other_operator = "somebody else has taken the robot over by this lease"
    not_taken_over = "the robot is not taken over by this lease. Take over again"
    beside = "somebody beside the robot drives it. Wait until they hand it back"
    stale = "it came too late: the link stalls"
    future = "it is from the future by the measured clocks. Does a clock jump?"
    untimed = "it does not say when it was made"
    invalid = "its action is not one of this robot"


class LeaseFence:
    """Knows no time: who is late is for `OperatorOverride` to say."""

    def __init__(self) -> None:
        self.holder: OperatorCommand | None = None
        """the takeover that stands"""
        self._seen: dict[bool, tuple[int, int]] = {False: (0, 0), True: (0, 0)}
        """newest lease and newest number of it, by whether it is one beside the robot"""

    def admit(self, command: OperatorCommand) -> Refusal:
        """Whether a message of somebody who drives or wants to is followed. It uses up its number."""
        refusal = self._refusal(command)
        if refusal or command.kind == OperatorCommandKind.drop_link:
            return refusal
        self._seen[command.beside] = command.lease, command.sequence
        if command.kind == OperatorCommandKind.take_over:
            self.holder = command
        elif command.kind == OperatorCommandKind.hand_back:
            self.holder = None
        return Refusal.none

    def state(self, linked: bool) -> OperatorState:
        """What a fence must know that takes this one's place."""
        return OperatorState(self.holder, linked, self._seen[False], self._seen[True])

    def restore(self, state: OperatorState) -> bool:
        """Know what another fence knew; whether that is more. It is not if the other began later than this one."""
        seen = {False: state.seen, True: state.seen_beside}
        more = seen != self._seen and all(seen[beside] >= self._seen[beside] for beside in seen)
        if more:
            self.holder, self._seen = state.taken_over, seen
        return more

    def _refusal(self, command: OperatorCommand) -> Refusal:
        kind, holder = command.kind, self.holder
        ours = holder is not None and holder.beside == command.beside
        lease, sequence = self._seen[command.beside]
        if command.lease <= 0:
            return Refusal.no_lease
        if command.lease < lease:
            return Refusal.old_lease
        if kind == OperatorCommandKind.drop_link:
            return Refusal.none if ours else Refusal.not_taken_over
        if command.lease == lease and command.sequence <= sequence:
            return Refusal.replayed
        if holder is not None and holder.beside and not command.beside:
            return Refusal.beside
        same = ours and holder is not None and command.lease == holder.lease
        if same and holder is not None and command.operator != holder.operator:
            return Refusal.other_operator
        hands_back = kind == OperatorCommandKind.hand_back and (ours or holder is None)
        follows = same or hands_back or kind == OperatorCommandKind.take_over
        return Refusal.none if follows else Refusal.not_taken_over
