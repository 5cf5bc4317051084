"""What consoles and teleoperators may do with robots: hold them by a lease, drive them, stop them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cloud_learner.dispatch.operator_control import OperatorControl
from cloud_learner.operator.sessions import check_action
from cloud_learner.operator.view import FleetView
from cloud_learner.operator.view_models import DROPPED, WEB_OPERATOR
from hal.resource import Leases, Priority
from hal.scheduler.scheduler import Scheduler
from wire.errors import RejectedError
from wire.messages import Message
from wire.messages.fleet import AcquireLease, Preempted, ReleaseLease, RenewLease, Response
from wire.messages.gateway import EdgeStatus, OperatorCommand
from wire.transport.channel import PEER_SUFFIX
from wire.types import Lease, OperatorCommandKind, Role

MIN_TTL_S = 0.2
MAX_TTL_S = 24 * 3600.0
MAX_NAME_LENGTH = 64
"""characters of a name, as `wire.transport.keys` has it"""
MAINTENANCE = 50
"""priority of a lease that says nothing else: above all jobs, below those who drive"""
_USUAL_PRIORITIES = {"teleoperation": Priority.operator, "operator": Priority.operator}


def lease_priority(purpose: str, priority: int) -> int:
    """What a lease for `purpose` is given; 0 asks for the usual. Raises `RejectedError`, naming the field."""
    if not purpose or len(purpose) > 60 or not purpose.isprintable():
        raise RejectedError("purpose: say in up to 60 characters what the robot is needed for.")
    if purpose == "estop":
        raise RejectedError(
            "purpose: 'estop' is the emergency stop's own. Stop the robot at the page, or say another word."
        )
    found = priority or int(_USUAL_PRIORITIES.get(purpose, MAINTENANCE))
    if not 0 < found < Priority.estop:
        raise RejectedError(
            f"priority: {found} is not possible; give 1 to {Priority.estop - 1}, or 0 for the usual one."
        )
    return found


def lease_ttl_ns(ttl_s: float) -> int:
    """A time to live as a client asks for it. Raises `RejectedError`, naming the field."""
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise RejectedError(f"ttl_s: {ttl_s:g} s is not possible; give {MIN_TTL_S:g} to {MAX_TTL_S:g} s.")
    return round(ttl_s * 1e9)


def same_key(holder: str, peer: str) -> bool:
    """Whether two connections have one key: a client whose connection was cut comes back by another one."""
    return holder.partition(PEER_SUFFIX)[0] == peer.partition(PEER_SUFFIX)[0]


def check_robot(robot: str) -> None:
    """Raise `RejectedError` for what is too long to be a robot's name: it is not repeated in full."""
    if len(robot) > MAX_NAME_LENGTH:
        raise RejectedError(
            f"robot: '{robot[:MAX_NAME_LENGTH]}' and so on cannot be a name: it has more than {MAX_NAME_LENGTH} "
            "characters."
        )


def check_release(lease: Lease | None, robot: str, peer: str, number: int, is_job: Callable[[str], bool]) -> Lease:
    """The lease that `peer` may end. Raises `RejectedError` for one of somebody else, unless `number` is 0."""
    if lease is None:
        raise RejectedError(f"robot '{robot}' is not held by anybody.")
    if lease.purpose == "estop":
        raise RejectedError(
            f"robot '{robot}' is stopped by '{lease.holder}'. Release the stop at the page or at the robot."
        )
    if number == 0:
        if is_job(lease.holder):
            raise RejectedError(
                f"robot '{robot}' works on job '{lease.holder}'. Cancel the job, or take a lease of the robot, which "
                "outranks it."
            )
        return lease
    if number != lease.number:
        raise RejectedError(
            f"lease {number} of robot '{robot}' has ended; '{lease.holder}' holds it by lease {lease.number}."
        )
    if not same_key(lease.holder, peer):
        raise RejectedError(
            f"robot '{robot}' is held by '{lease.holder}' ({lease.purpose}). Only its holder gives it back."
        )
    return lease


class ClientSessions:
    """The leases of clients, and the commands of teleoperators to robots they hold."""

    def __init__(
        self,
        leases: Leases,
        scheduler: Scheduler,
        view: FleetView,
        send: Callable[[str, Message], bool],
        keep_leases: Callable[[], str],
        is_evaluated: Callable[[str], bool],
        exists: Callable[[str], bool],
    ) -> None:
        """`keep_leases` notes the leases and says why it could not; `is_evaluated`: whether a robot is being evaluated;
        `exists`: whether there is such a robot, here now or not."""
        self._leases = leases
        self._scheduler = scheduler
        self._view = view
        self._send = send
        self._keep_leases = keep_leases
        self._is_evaluated = is_evaluated
        self._exists = exists
        self._held: dict[str, tuple[Lease, str]] = {}
        self.operators: OperatorControl
        """set when both are made: each ends leases of the other"""

    # --- leases -------------------------------------------------------------------------------------------------

    def acquire(self, peer: str, call: AcquireLease, now_ns: int) -> Response:
        """Hold a robot for `peer`. Raises `RejectedError`, `StorageError` is answered by the caller."""
        robot = call.robot
        check_robot(robot)
        priority, ttl_ns = lease_priority(call.purpose, call.priority), lease_ttl_ns(call.ttl_s)
        if stopped_by := self.operators.stopped_by(robot):
            raise RejectedError(f"robot '{robot}' is stopped by '{stopped_by}'. Release the stop first.")
        drives = priority >= Priority.operator
        if drives:
            self.operators.release_dropped(robot, now_ns)
        rest = not drives or self._is_evaluated(robot)
        lease, preempted = self._scheduler.acquire(robot, peer, call.purpose, priority, ttl_ns, now_ns, rest)
        if fault := self._keep_leases():
            self._scheduler.release(robot, lease.number, now_ns)
            raise RejectedError(f"the lease cannot be noted: {fault}")
        if preempted is not None:
            self.on_lease_ended(preempted, f"'{peer}' took it for {call.purpose} (priority {priority})", now_ns)
        self._held[robot] = (lease, peer)
        return Response(call.call, lease=lease)

    def renew(self, peer: str, call: RenewLease, now_ns: int) -> Response:
        """The holder lives. Raises `RejectedError` when the lease is not its own any more."""
        check_robot(call.robot)
        lease = self._leases.of(call.robot, now_ns)
        if lease is not None and lease.number == call.number:
            if not same_key(lease.holder, peer):
                raise RejectedError(f"lease {call.number} of '{call.robot}' belongs to '{lease.holder}'.")
            if lease.purpose == "estop":
                raise RejectedError(
                    f"lease {call.number} of '{call.robot}' is its stop's, which lasts until it is released."
                )
        lease = self._leases.renew(call.robot, call.number, now_ns)
        self._held[call.robot] = (lease, peer)
        return Response(call.call, lease=lease)

    def release(self, peer: str, call: ReleaseLease, now_ns: int) -> Response:
        """Give a robot back. Raises `RejectedError`."""
        robot = call.robot
        check_robot(robot)
        lease = check_release(self._leases.of(robot, now_ns), robot, peer, call.number, self._is_job)
        _, other = self._held.pop(robot, (None, ""))
        driver = self.operators.revoke(robot, now_ns)
        if driver:
            # Whoever gives a robot back drives it no more, nor does who had it taken away.
            self._send(robot, OperatorCommand(robot, OperatorCommandKind.hand_back, operator=peer))
        if (left := self._leases.of(robot, now_ns)) is not None and left.number == lease.number:
            self._scheduler.release(robot, lease.number, now_ns)
        if other and other != peer:
            self._send(other, Preempted(lease, f"'{peer}' released it by force"))
        self._reject_page_operator(lease, f"{robot} was released by '{peer}'.")
        return Response(call.call, lease=lease)

    def on_lease_ended(self, lease: Lease, reason: str, now_ns: int) -> None:
        """A lease of somebody who is not a job ended before its time: the holder is notified, the robot holds."""
        robot = lease.robot
        held, peer = self._held.get(robot, (None, ""))
        if held is not None and held.number == lease.number:
            del self._held[robot]
            self._send(peer, Preempted(lease, reason))
            self._view.add_event("lease", f"'{lease.holder}' lost it: {reason}", robot)
        if self.operators.drop(robot, lease.holder, now_ns):
            self._send(robot, OperatorCommand(robot, OperatorCommandKind.drop_link, operator=lease.holder))
            self._reject_page_operator(lease, f"{robot}: {reason}")

    def restore(self, lease: Lease) -> None:
        """A client's lease of before the gateway was started again: it renews it, or loses it."""
        self._held[lease.robot] = (lease, lease.holder)

    def poll(self, now_ns: int) -> None:
        """End the leases that ran out."""
        for robot, (lease, _) in list(self._held.items()):
            now = self._leases.of(robot, now_ns)
            if now is None or now.number != lease.number:
                silent = f"no heartbeat for {lease.ttl_ns / 1e9:g} s"
                self.on_lease_ended(lease, f"'{now.holder}' took it for {now.purpose}" if now else silent, now_ns)

    # --- driving ------------------------------------------------------------------------------------------------

    def forward_status(self, status: EdgeStatus) -> None:
        """A teleoperator sees what the robot it holds does."""
        _, peer = self._held.get(status.robot, (None, ""))
        if peer.startswith(Role.teleoperator):
            self._send(peer, status)

    def handle_command(self, peer: str, command: OperatorCommand, now_ns: int) -> None:
        """A teleoperator's command: passed on if the robot is its own; a stop always is. Raises `RejectedError`."""
        robot, kind = command.robot, command.kind
        check_robot(robot)
        if kind == OperatorCommandKind.estop:
            self._stop(peer, command, now_ns)
            return
        spec = self._view.spec(robot)
        if spec is None and kind != OperatorCommandKind.release_estop:
            raise RejectedError(f"there is no robot '{robot}' that said what its actions mean.")
        lease = self._leases.of(robot, now_ns)
        mine = lease is not None and lease.priority >= Priority.operator and same_key(lease.holder, peer)
        if kind == OperatorCommandKind.release_estop:
            self._check_stopped_by(robot, peer)
            self.operators.release_estop(robot, now_ns)
        elif not mine:
            holder = f"is held by '{lease.holder}' ({lease.purpose})" if lease is not None else "is not held"
            raise RejectedError(
                f"{kind[:MAX_NAME_LENGTH]}: '{robot}' {holder}, not by '{peer}'. Acquire its lease first."
            )
        elif kind == OperatorCommandKind.take_over:
            assert lease is not None
            self.operators.take_over(robot, lease.holder, now_ns)
        elif kind == OperatorCommandKind.hand_back:
            assert lease is not None
            self.operators.hand_back(robot, lease.holder, now_ns)
        elif kind == OperatorCommandKind.command:
            if not same_key(self.operators.driver(robot), peer):
                raise RejectedError(f"command: '{peer}' has not taken '{robot}' over.")
            assert spec is not None
            check_action(robot, spec, command.action)
        else:
            raise RejectedError(f"kind: a teleoperator cannot ask for '{kind[:MAX_NAME_LENGTH]}'.")
        sent = self._send(robot, msgspec.structs.replace(command, operator=peer))
        if not sent and kind != OperatorCommandKind.command:
            raise RejectedError(f"{kind}: '{robot}' has no link to the gateway now; it did not hear of it.")

    def _stop(self, peer: str, command: OperatorCommand, now_ns: int) -> None:
        """A stop goes out before anything is asked, and stands also when the robot cannot hear of it now."""
        robot = command.robot
        sent = self._send(robot, msgspec.structs.replace(command, operator=peer))
        if not sent and not self._exists(robot):
            raise RejectedError(f"estop: there is no robot '{robot}'. `robots` lists them.")
        self.operators.estop(robot, peer, now_ns)
        if not sent:
            raise RejectedError(
                f"estop: '{robot}' has no link to the gateway now; it hears of it as soon as it is back. Use the stop "
                "on the robot."
            )

    def _check_stopped_by(self, robot: str, peer: str) -> None:
        stopped_by = self.operators.stopped_by(robot)
        if not stopped_by:
            raise RejectedError(f"release_estop: '{robot}' is not stopped.")
        if not same_key(stopped_by, peer):
            raise RejectedError(
                f"release_estop: '{robot}' is stopped by '{stopped_by}', not by '{peer}'. Release the stop at the page "
                "or at the robot."
            )

    def _reject_page_operator(self, lease: Lease, reason: str) -> None:
        """An operator at the page is told why they do not hold the robot any more."""
        if lease.holder.removeprefix(DROPPED).startswith(WEB_OPERATOR):
            command = OperatorCommand(lease.robot, OperatorCommandKind.take_over, operator=lease.holder)
            self._view.reject_command(command, reason)

    def _is_job(self, holder: str) -> bool:
        return self._scheduler.job(holder) is not None
