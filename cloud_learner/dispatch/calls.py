"""Answers consoles and teleoperators: what there is, work they hand in, robots they hold."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from cloud_learner.dispatch.people import PAGE, OperatorControl
from cloud_learner.operator.cards import DROPPED
from cloud_learner.operator.desk import check_action
from cloud_learner.operator.view import FleetView
from hal.resource import Leases, Priority
from hal.scheduler.scheduler import Scheduler
from wire.errors import RejectedError
from wire.messages import Message
from wire.messages.fleet import AcquireLease, Preempted, ReleaseLease, RenewLease, Response
from wire.messages.gateway import EdgeStatus, OperatorCommand
from wire.transport.channel import PEER_SUFFIX
from wire.types import Lease, Role

log = logging.getLogger(__name__)

SHORTEST_TTL_S = 0.2
LONGEST_TTL_S = 24 * 3600.0
LONGEST_ROBOT = 64
"""characters of a name, as `wire.transport.keys` has it"""
MAINTENANCE = 50
"""priority of a lease that says nothing else: above all jobs, below those who drive"""
_USUAL = {"teleoperation": Priority.operator, "operator": Priority.operator}


def wanted_priority(purpose: str, priority: int) -> int:
    """What a lease for `purpose` is given; 0 asks for the usual. Raises `RejectedError`, naming the field."""
    if not purpose or len(purpose) > 60 or not purpose.isprintable():
        raise RejectedError("purpose: say in up to 60 characters what the robot is needed for.")
    if purpose == "estop":
        raise RejectedError(
            "purpose: 'estop' is the emergency stop's own. Stop the robot at the page, or say another word."
        )
    found = priority or int(_USUAL.get(purpose, MAINTENANCE))
    if not 0 < found < Priority.estop:
        raise RejectedError(
            f"priority: {found} is not possible; give 1 to {Priority.estop - 1}, or 0 for the usual one."
        )
    return found


def wanted_ttl_ns(ttl_s: float) -> int:
    """A time to live as a client asks for it. Raises `RejectedError`, naming the field."""
    if not SHORTEST_TTL_S <= ttl_s <= LONGEST_TTL_S:
        raise RejectedError(f"ttl_s: {ttl_s:g} s is not possible; give {SHORTEST_TTL_S:g} to {LONGEST_TTL_S:g} s.")
    return round(ttl_s * 1e9)


def same_key(holder: str, peer: str) -> bool:
    """Whether two lines speak with one key: a client whose line was cut comes back by another one."""
    return holder.partition(PEER_SUFFIX)[0] == peer.partition(PEER_SUFFIX)[0]


def check_robot(robot: str) -> None:
    """Raise `RejectedError` for what is too long to be a robot's name: it is not repeated in full."""
    if len(robot) > LONGEST_ROBOT:
        raise RejectedError(
            f"robot: '{robot[:LONGEST_ROBOT]}' and so on cannot be a name: it has more than {LONGEST_ROBOT} characters."
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


def of_the_page(holder: str) -> bool:
    """Whether a lease's holder is somebody at the page, there or vanished."""
    return holder.removeprefix(DROPPED).startswith(PAGE)


class ClientSessions:
    """The leases of clients, and what a teleoperator wants of a robot it holds."""

    def __init__(
        self,
        leases: Leases,
        scheduler: Scheduler,
        view: FleetView,
        send: Callable[[str, Message], bool],
        keep: Callable[[], str],
        examined: Callable[[str], bool],
        known: Callable[[str], bool],
    ) -> None:
        """`keep` notes the leases and says why it could not; `examined`: whether a robot is being evaluated; `known`:
        whether there is such a robot, here now or not."""
        self._leases = leases
        self._scheduler = scheduler
        self._view = view
        self._send = send
        self._keep = keep
        self._examined = examined
        self._known = known
        self._held: dict[str, tuple[Lease, str]] = {}
        self.people: OperatorControl
        """set when both are made: each ends leases of the other"""

    # --- leases -------------------------------------------------------------------------------------------------

    def acquire(self, peer: str, call: AcquireLease, now_ns: int) -> Response:
        """Hold a robot for `peer`. Raises `RejectedError`, `StorageError` is answered by the caller."""
        robot = call.robot
        check_robot(robot)
        priority, ttl_ns = wanted_priority(call.purpose, call.priority), wanted_ttl_ns(call.ttl_s)
        if stopped_by := self.people.stopped_by(robot):
            raise RejectedError(f"robot '{robot}' is stopped by '{stopped_by}'. Release the stop first.")
        drives = priority >= Priority.operator
        if drives:
            self.people.make_room(robot, now_ns)
        rest = not drives or self._examined(robot)
        lease, preempted = self._scheduler.acquire(robot, peer, call.purpose, priority, ttl_ns, now_ns, rest)
        if trouble := self._keep():
            self._scheduler.release(robot, lease.number, now_ns)
            raise RejectedError(f"the lease cannot be noted: {trouble}")
        if preempted is not None:
            self.ended(preempted, f"'{peer}' took it for {call.purpose} (priority {priority})", now_ns)
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
        driver = self.people.force(robot, now_ns)
        if driver:
            # Whoever gives a robot back drives it no more, nor does who had it taken away.
            self._send(robot, OperatorCommand(robot, "hand_back", operator=peer))
        if (left := self._leases.of(robot, now_ns)) is not None and left.number == lease.number:
            self._scheduler.release(robot, lease.number, now_ns)
        if other and other != peer:
            self._send(other, Preempted(lease, f"'{peer}' released it by force"))
        if of_the_page(lease.holder):
            self._view.refuse(
                OperatorCommand(robot, "take_over", operator=lease.holder), f"{robot} was released by '{peer}'."
            )
        return Response(call.call, lease=lease)

    def ended(self, lease: Lease, reason: str, now_ns: int) -> None:
        """A lease of somebody who is not a job ended before its time: the holder hears of it, the robot holds."""
        robot = lease.robot
        held, peer = self._held.get(robot, (None, ""))
        if held is not None and held.number == lease.number:
            del self._held[robot]
            self._send(peer, Preempted(lease, reason))
            self._view.event("lease", f"'{lease.holder}' lost it: {reason}", robot)
        if self.people.drop(robot, lease.holder, now_ns):
            self._send(robot, OperatorCommand(robot, "drop_link", operator=lease.holder))
            if of_the_page(lease.holder):
                self._view.refuse(OperatorCommand(robot, "take_over", operator=lease.holder), f"{robot}: {reason}")

    def restore(self, lease: Lease) -> None:
        """A client's lease of before the gateway was started again: it renews it, or loses it."""
        self._held[lease.robot] = (lease, lease.holder)

    def turn(self, now_ns: int) -> None:
        """Tell of leases that ran out."""
        for robot, (lease, _) in list(self._held.items()):
            now = self._leases.of(robot, now_ns)
            if now is None or now.number != lease.number:
                silent = f"no heartbeat for {lease.ttl_ns / 1e9:g} s"
                self.ended(lease, f"'{now.holder}' took it for {now.purpose}" if now else silent, now_ns)

    # --- driving ------------------------------------------------------------------------------------------------

    def watch(self, status: EdgeStatus) -> None:
        """Whoever drives a robot sees what it does."""
        _, peer = self._held.get(status.robot, (None, ""))
        if peer.startswith(Role.teleoperator):
            self._send(peer, status)

    def drive(self, peer: str, wish: OperatorCommand, now_ns: int) -> None:
        """A teleoperator's wish: passed on if the robot is its own; a stop always is. Raises `RejectedError`."""
        robot, kind = wish.robot, wish.kind
        check_robot(robot)
        if kind == "estop":
            self._stop(peer, wish, now_ns)
            return
        spec = self._view.spec(robot)
        if spec is None and kind != "release_estop":
            raise RejectedError(f"there is no robot '{robot}' that said what its actions mean.")
        lease = self._leases.of(robot, now_ns)
        mine = lease is not None and lease.priority >= Priority.operator and same_key(lease.holder, peer)
        if kind == "release_estop":
            self._check_stopped_by(robot, peer)
            self.people.release_estop(robot, now_ns)
        elif not mine:
            holder = f"is held by '{lease.holder}' ({lease.purpose})" if lease is not None else "is not held"
            raise RejectedError(
                f"{kind[:LONGEST_ROBOT]}: '{robot}' {holder}, not by '{peer}'. Acquire its lease first."
            )
        elif kind == "take_over":
            assert lease is not None
            self.people.take_over(robot, lease.holder, now_ns)
        elif kind == "hand_back":
            assert lease is not None
            self.people.hand_back(robot, lease.holder, now_ns)
        elif kind == "command":
            if not same_key(self.people.driver(robot), peer):
                raise RejectedError(f"command: '{peer}' has not taken '{robot}' over.")
            assert spec is not None
            check_action(robot, spec, wish.action)
        else:
            raise RejectedError(f"kind: a teleoperator cannot ask for '{kind[:LONGEST_ROBOT]}'.")
        if not self._send(robot, msgspec.structs.replace(wish, operator=peer)) and kind != "command":
            raise RejectedError(f"{kind}: '{robot}' has no link to the gateway now; it did not hear of it.")

    def _stop(self, peer: str, wish: OperatorCommand, now_ns: int) -> None:
        """A stop goes out before anything is asked, and stands also when the robot cannot hear of it now."""
        robot = wish.robot
        sent = self._send(robot, msgspec.structs.replace(wish, operator=peer))
        if not sent and not self._known(robot):
            raise RejectedError(f"estop: there is no robot '{robot}'. `robots` lists them.")
        self.people.estop(robot, peer, now_ns)
        if not sent:
            raise RejectedError(
                f"estop: '{robot}' has no link to the gateway now; it hears of it as soon as it is back. Use the stop "
                "on the robot."
            )

    def _check_stopped_by(self, robot: str, peer: str) -> None:
        stopped_by = self.people.stopped_by(robot)
        if not stopped_by:
            raise RejectedError(f"release_estop: '{robot}' is not stopped.")
        if not same_key(stopped_by, peer):
            raise RejectedError(
                f"release_estop: '{robot}' is stopped by '{stopped_by}', not by '{peer}'. Release the stop at the page "
                "or at the robot."
            )

    def _is_job(self, holder: str) -> bool:
        return self._scheduler.job(holder) is not None
