"""What consoles and teleoperators may do with robots: hold them by a lease, drive them, stop them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cloud_learner.dispatch.lease_store import WhenNoted
from cloud_learner.dispatch.notes import Notes
from cloud_learner.dispatch.operator_control import OperatorControl
from cloud_learner.dispatch.requests import (
    MAX_NAME_LENGTH,
    check_release,
    check_robot,
    lease_priority,
    lease_ttl_ns,
    same_key,
)
from cloud_learner.operator.sessions import check_action
from cloud_learner.operator.view import FleetView
from cloud_learner.operator.view_models import DROPPED, WEB_OPERATOR
from hal.resource.lease import ESTOP, Leases, Priority
from hal.scheduler.scheduler import Scheduler
from wire.errors import RejectedError
from wire.messages import Message
from wire.messages.fleet import AcquireLease, Preempted, ReleaseLease, RenewLease
from wire.messages.gateway import LAST_SEQUENCE, EdgeEvent, EdgeStatus, OperatorCommand
from wire.stop_state import StopState, new_stop_id
from wire.types import EPISODE_COMMANDS, Lease, OperatorCommandKind, Role

_LETS_GO = (OperatorCommandKind.release_estop, OperatorCommandKind.start)


class ClientSessions:
    """The leases of clients, and the commands of teleoperators to robots they hold."""

    def __init__(
        self,
        leases: Leases,
        scheduler: Scheduler,
        view: FleetView,
        send: Callable[[str, Message], bool],
        when_noted: WhenNoted,
        notes: Notes,
        is_evaluated: Callable[[str], bool],
        exists: Callable[[str], bool],
        role_of: Callable[[str], str],
    ) -> None:
        """`when_noted(then, failed)`: when the ledger knows of the leases of now; `is_evaluated`: whether a robot is
        being evaluated; `exists`: whether there is such a robot, here now or not; `role_of` a peer's key."""
        self._leases = leases
        self._scheduler = scheduler
        self._view = view
        self._send = send
        self._when_noted = when_noted
        self._notes = notes
        self._is_evaluated = is_evaluated
        self._exists = exists
        self._role_of = role_of
        self._held: dict[str, tuple[Lease, str]] = {}
        self.operators = OperatorControl(leases, scheduler, self.on_lease_ended, send)

    # --- leases -------------------------------------------------------------------------------------------------

    def acquire(
        self,
        peer: str,
        call: AcquireLease,
        now_ns: int,
        answer: Callable[[Lease], None],
        refuse: Callable[[Exception], None],
    ) -> None:
        """Hold a robot for `peer`. Raises `RejectedError`.

        A person has it at once. For whoever else holds it the next gateway must know of it before they rely on it: then
        `answer` is called when it is noted, or `refuse` if it cannot be.
        """
        robot = call.robot
        check_robot(robot)
        priority, ttl_ns = lease_priority(call.purpose, call.priority), lease_ttl_ns(call.ttl_s)
        self.operators.require_free(robot)
        drives = priority >= Priority.operator
        if not drives and (fault := self._notes.fault):
            raise RejectedError(f"the lease cannot be noted: {fault}")
        held = self._leases.of(robot, now_ns)
        if drives and held is not None and held.holder.startswith(DROPPED):
            # Whoever looks after a robot that was dropped may hold it.
            self._scheduler.release(robot, held.number, now_ns)
        rest = not drives or self._is_evaluated(robot)
        lease, preempted = self._scheduler.acquire(robot, peer, call.purpose, priority, ttl_ns, now_ns, rest)
        if preempted is not None:
            self.on_lease_ended(preempted, f"'{peer}' took it for {call.purpose} (priority {priority})", now_ns)
        self._held[robot] = (lease, peer)
        if drives:
            answer(lease)
            return

        def give_up(error: Exception) -> None:
            if (left := self._leases.of(robot)) is not None and left.number == lease.number:
                self._held.pop(robot, None)
                self._scheduler.release(robot, lease.number, now_ns)
            refuse(RejectedError(f"the lease cannot be noted: {error}"))

        self._when_noted(lambda: answer(lease), give_up)

    def renew(self, peer: str, call: RenewLease, now_ns: int) -> Lease:
        """The holder lives. Raises `RejectedError` when the lease is not its own any more."""
        check_robot(call.robot)
        lease = self._leases.require(call.robot, call.number, now_ns)
        if not same_key(lease.holder, peer):
            raise RejectedError(f"lease {call.number} of '{call.robot}' belongs to '{lease.holder}'.")
        if lease.purpose == ESTOP:
            raise RejectedError(
                f"lease {call.number} of '{call.robot}' is its stop's, which lasts until it is released."
            )
        lease = self._leases.renew(call.robot, call.number, now_ns)
        self._held[call.robot] = (lease, peer)
        return lease

    def release(self, peer: str, call: ReleaseLease, now_ns: int) -> Lease:
        """Give a robot back. Raises `RejectedError`."""
        robot = call.robot
        check_robot(robot)
        lease = self._leases.require(robot, call.number, now_ns, whoever=call.number == 0)
        check_release(lease, peer, call.number, self._scheduler.is_job)
        _, other = self._held.pop(robot, (None, ""))
        end = OperatorCommand(robot, OperatorCommandKind.hand_back, operator=peer, sequence=LAST_SEQUENCE)
        handed_back = self.operators.stamp(end)
        if self.operators.hand_back(robot, "", now_ns):
            # Whoever gives a robot back drives it no more, nor does who had it taken away.
            self._send(robot, handed_back)
        if (left := self._leases.of(robot, now_ns)) is not None and left.number == lease.number:
            self._scheduler.release(robot, lease.number, now_ns)
        if other and other != peer:
            self._send(other, Preempted(lease, f"'{peer}' released it by force"))
        self._reject_page_operator(lease, f"{robot} was released by '{peer}'.")
        return lease

    def on_lease_ended(self, lease: Lease, reason: str, now_ns: int) -> None:
        """A lease of somebody who is not a job ended before its time: the holder is notified, the robot holds."""
        robot = lease.robot
        held, peer = self._held.get(robot, (None, ""))
        if held is not None and held.number == lease.number:
            del self._held[robot]
            self._send(peer, Preempted(lease, reason))
            self._view.add_event("lease", f"'{lease.holder}' lost it: {reason}", robot)
        if self.operators.drop(robot, lease.holder, now_ns):
            gone = OperatorCommand(robot, OperatorCommandKind.drop_link, operator=lease.holder)
            self._send(robot, self.operators.stamp(gone))
            self._reject_page_operator(lease, f"{robot}: {reason}")

    def restore(self, lease: Lease, now_ns: int) -> None:
        """A lease of before the gateway was started again: whose it is renews it, or loses it."""
        # The clock may have started over: it has its whole time to live again.
        self._leases.restore(msgspec.structs.replace(lease, expires_ns=now_ns + lease.ttl_ns))
        self.operators.restore(lease)
        if lease.purpose != ESTOP and not lease.holder.startswith((DROPPED, WEB_OPERATOR)):
            self._held[lease.robot] = (lease, lease.holder)

    def poll(self, now_ns: int) -> None:
        """End the leases that ran out."""
        for robot, (lease, _) in list(self._held.items()):
            now = self._leases.of(robot, now_ns)
            if now is None or now.number != lease.number:
                silent = f"no heartbeat for {lease.ttl_ns / 1e9:g} s"
                self.on_lease_ended(lease, f"'{now.holder}' took it for {now.purpose}" if now else silent, now_ns)

    # --- driving ------------------------------------------------------------------------------------------------

    def forward(self, message: EdgeStatus | EdgeEvent) -> None:
        """A teleoperator sees what the robot it holds does, and hears what happens to it."""
        _, peer = self._held.get(message.robot, (None, ""))
        if self._role_of(peer) == Role.teleoperator:
            self._send(peer, message)

    def handle_command(self, peer: str, command: OperatorCommand, now_ns: int) -> None:
        """A teleoperator's command: passed on if the robot is its own; a stop always is. Raises `RejectedError`."""
        robot, kind = command.robot, command.kind
        check_robot(robot)
        if kind == OperatorCommandKind.estop:
            self._stop(peer, command, now_ns)
            return
        spec = self._view.spec(robot)
        if spec is None and kind not in _LETS_GO:
            raise RejectedError(f"there is no robot '{robot}' that said what its actions mean.")
        lease = self._leases.of(robot, now_ns)
        if kind in _LETS_GO:
            self._check_own(command, peer)
        elif lease is None or lease.priority < Priority.operator or not same_key(lease.holder, peer):
            holder = f"is held by '{lease.holder}' ({lease.purpose})" if lease is not None else "is not held"
            raise RejectedError(
                f"{kind[:MAX_NAME_LENGTH]}: '{robot}' {holder}, not by '{peer}'. Acquire its lease first."
            )
        elif command.lease != lease.number and kind != OperatorCommandKind.hand_back:
            raise RejectedError(
                f"{kind[:MAX_NAME_LENGTH]}: lease {command.lease} of '{robot}' is over; '{lease.holder}' holds it by "
                f"lease {lease.number}."
            )
        elif kind == OperatorCommandKind.command:
            if not same_key(self.operators.driver(robot), peer):
                raise RejectedError(f"command: '{peer}' has not taken '{robot}' over.")
            assert spec is not None
            if command.action:
                check_action(robot, spec, command.action)
        elif kind not in EPISODE_COMMANDS | {OperatorCommandKind.take_over, OperatorCommandKind.hand_back}:
            raise RejectedError(f"kind: a teleoperator cannot ask for '{kind[:MAX_NAME_LENGTH]}'.")
        who = peer if kind in _LETS_GO or lease is None else lease.holder
        # By the holder's name: another connection of the same key drives on by the same lease.
        command = msgspec.structs.replace(command, operator=who)
        if kind == OperatorCommandKind.hand_back:
            last = command.lease != self.operators.lease_number(robot)
            command = msgspec.structs.replace(command, sequence=LAST_SEQUENCE if last else command.sequence)
            command = self.operators.stamp(command)
        self.operators.handle_command(command, who, now_ns)
        sent = self._send(robot, command)
        if not sent and kind != OperatorCommandKind.command:
            raise RejectedError(f"{kind}: '{robot}' has no link to the gateway now; it did not hear of it.")

    def _stop(self, peer: str, command: OperatorCommand, now_ns: int) -> None:
        """A stop goes out before anything is asked, and stands also when the robot cannot hear of it now."""
        robot = command.robot
        stop = command.stop if 0 < len(command.stop) <= 2 * MAX_NAME_LENGTH else new_stop_id(peer)
        sent = self._send(robot, msgspec.structs.replace(command, operator=peer, stop=stop))
        # Nothing that may fail or take its time comes before a stop of a robot that is known.
        if not sent and self._view.spec(robot) is None and not self._exists(robot):
            raise RejectedError(f"estop: there is no robot '{robot}'. `robots` lists them.")
        self.operators.estop(robot, stop, peer, now_ns)
        if not sent:
            raise RejectedError(
                f"estop: '{robot}' has no link to the gateway now; it hears of it as soon as it is back. Use the stop "
                "on the robot."
            )

    def _check_own(self, command: OperatorCommand, peer: str) -> None:
        """Raise `RejectedError` for a stop that somebody else made."""
        stops = self.operators.stop_states().get(command.robot, StopState()).stops
        if command.kind == OperatorCommandKind.release_estop and not same_key(stops.get(command.stop, peer), peer):
            raise RejectedError(
                f"release_estop: '{command.stop}' is the stop of '{stops[command.stop]}', not of '{peer}'. Release it "
                "at the page or at the robot."
            )

    def _reject_page_operator(self, lease: Lease, reason: str) -> None:
        """An operator at the page is told why they do not hold the robot any more."""
        if lease.holder.removeprefix(DROPPED).startswith(WEB_OPERATOR):
            command = OperatorCommand(lease.robot, OperatorCommandKind.take_over, operator=lease.holder)
            self._view.reject_command(command, reason)
