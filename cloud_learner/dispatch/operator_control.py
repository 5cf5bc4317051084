"""Who drives or stops a robot: people at the page, at a device of their own, or beside the robot.

Whoever takes a robot over holds it by a lease above all jobs; an emergency stop is a lease above that, which lasts
until the robot is started. A robot whose operator vanished stays held, by `dropped:NAME`, until somebody takes it over
or hands it back: no job can use it so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from cloud_learner.dispatch.requests import MAX_NAME_LENGTH, same_key
from cloud_learner.dispatch.robot_stops import BESIDE, RobotStops
from cloud_learner.operator.view_models import DROPPED, WEB_OPERATOR
from hal.resource.lease import ESTOP, Leases, Priority
from hal.scheduler.scheduler import Scheduler
from wire.errors import RejectedError
from wire.messages import Message
from wire.messages.gateway import LAST_SEQUENCE, EdgeStatus, OperatorCommand
from wire.stop_state import StopState
from wire.types import EPISODE_COMMANDS, Lease, Mode, OperatorCommandKind

log = logging.getLogger(__name__)

TTL_NS = 15_000_000_000


class RobotClaim(msgspec.Struct):
    """What people do with one robot now."""

    stopped_by: str = ""
    """'' when nobody stops it; the last who did until it is started"""
    stops: RobotStops = msgspec.field(default_factory=RobotStops)
    driver: str = ""
    dropped: bool = False
    """the driver vanished: the robot holds and waits for a person"""
    driver_lease: int = 0
    """number of the lease by which the driver took over: the robot takes commands of that one"""

    @property
    def empty(self) -> bool:
        return not (self.stopped_by or self.driver)

    def lease(self) -> tuple[str, str, Priority]:
        """(holder, purpose, priority) of the lease that this is."""
        if self.stopped_by:
            return self.stopped_by, ESTOP, Priority.estop
        return (DROPPED if self.dropped else "") + self.driver, "operator", Priority.operator


class OperatorControl:
    """The claims of people on robots, and the leases that follow from them."""

    def __init__(
        self,
        leases: Leases,
        scheduler: Scheduler,
        on_lease_ended: Callable[[Lease, str, int], None],
        send: Callable[[str, Message], bool],
    ) -> None:
        """`on_lease_ended(lease, reason, now_ns)` is called for leases that ended for a person."""
        self._leases = leases
        self._scheduler = scheduler
        self._on_lease_ended = on_lease_ended
        self._send = send
        self._claims: dict[str, RobotClaim] = {}
        self._lease_numbers: dict[str, int] = {}
        self._orphans: set[str] = set()
        """robots whose operator's page went with the gateway before, which have not heard of it"""

    def driver(self, robot: str) -> str:
        """Who has taken `robot` over, '' when nobody has or whoever did vanished."""
        claim = self._claims.get(robot)
        return claim.driver if claim is not None and not claim.dropped else ""

    def lease_number(self, robot: str) -> int:
        """Of the lease by which `robot` was taken over, 0 when it was not."""
        claim = self._claims.get(robot)
        return claim.driver_lease if claim is not None else 0

    def stamp(self, command: OperatorCommand) -> OperatorCommand:
        """`command` with the lease that it is from. What somebody else than the driver does (hands a dropped robot
        back, starts one, says that the driver is gone) is done in the driver's place, and ends their lease if it hands
        back."""
        claim, kind = self._claims.get(command.robot), command.kind
        if claim is None or not claim.driver:
            return command
        command = msgspec.structs.replace(command, lease=claim.driver_lease)
        if kind == OperatorCommandKind.hand_back and (claim.dropped or command.operator != claim.driver):
            return msgspec.structs.replace(command, operator=claim.driver, sequence=LAST_SEQUENCE)
        return command

    def stop_states(self) -> dict[str, StopState]:
        """Who stops which robot."""
        return {robot: claim.stops.state for robot, claim in self._claims.items() if claim.stopped_by}

    def require_free(self, robot: str) -> None:
        """Raise `RejectedError` when `robot` is stopped."""
        if state := self.stop_states().get(robot):
            then = "Release the stop first." if state.stops else "Start it first."
            raise RejectedError(f"{robot} is {state if not state.free else 'stopped'}. {then}")

    def note_stops(self, lease: Lease) -> Lease:
        """`lease`, with what must outlive this process."""
        claim = self._claims.get(lease.robot)
        if claim is None or lease.purpose != ESTOP:
            return lease
        return msgspec.structs.replace(lease, stops=claim.stops.unshown)

    # --- commands -----------------------------------------------------------------------------------------------

    def handle_command(self, command: OperatorCommand, who: str, now_ns: int) -> bool:
        """Whether a command of `who` may go to its robot. Raises `RejectedError`."""
        robot = command.robot
        match command.kind:
            case OperatorCommandKind.command:
                return self.driver(robot) == who
            case OperatorCommandKind.estop:
                self.estop(robot, command.stop or who, who, now_ns)
            case OperatorCommandKind.release_estop:
                self.release_estop(robot, command.stop, now_ns)
            case OperatorCommandKind.start:
                self.check_start(robot, who)
            case OperatorCommandKind.take_over:
                self.take_over(robot, who, now_ns)
            case OperatorCommandKind.hand_back:
                self.hand_back(robot, who, now_ns)
            case OperatorCommandKind.drop_link:
                return self.drop(robot, who, now_ns)
            case kind if kind in EPISODE_COMMANDS:
                driver = self.driver(robot)
                if driver and not same_key(driver, who):
                    raise RejectedError(f"{kind}: '{robot}' is driven by '{driver}', who says how its episodes end.")
        return True

    def take_over(self, robot: str, who: str, now_ns: int) -> None:
        """`who` drives from now on. Raises `RejectedError` when another person does, or the robot is stopped."""
        self.require_free(robot)
        before = self._claims.get(robot)
        if before is not None and before.driver and not before.dropped and before.driver != who:
            raise RejectedError(f"{robot} is driven by '{before.driver}'. Wait until it is handed back.")
        claim, lease = RobotClaim(driver=who), self._leases.of(robot, now_ns)
        kept = self._lease_numbers.get(robot)
        if lease and lease.holder == who and lease.priority >= Priority.operator and lease.number != kept:
            # Their own lease holds the robot now, not one that is kept for a claim.
            self._lease_numbers.pop(robot, None)
            claim.driver_lease = lease.number
        else:
            claim.driver_lease = self._hold(robot, claim, now_ns)
        self._claims[robot] = claim

    def hand_back(self, robot: str, who: str, now_ns: int) -> bool:
        """`who` drives no more, or lets a robot go on that somebody else dropped; '': whoever drives does no more.

        Whether somebody drove. Raises `RejectedError` while another person drives.
        """
        claim = self._claims.get(robot)
        if claim is None:
            return False
        if claim.driver and not claim.dropped and who not in ("", claim.driver):
            raise RejectedError(f"{robot} is driven by '{claim.driver}', who has to hand it back.")
        self._change(robot, msgspec.structs.replace(claim, driver="", dropped=False), now_ns)
        return bool(claim.driver)

    def drop(self, robot: str, who: str, now_ns: int) -> bool:
        """`who` vanished; whether the robot was driven by them, so that it has to hold now."""
        claim = self._claims.get(robot)
        if claim is None or claim.driver != who or claim.dropped:
            return False
        self._change(robot, msgspec.structs.replace(claim, dropped=True), now_ns)
        return True

    def estop(self, robot: str, stop: str, who: str, now_ns: int) -> None:
        """Anybody may stop a robot, whoever holds it. The caller sends the stop; here it is sent again if need be."""
        claim = self._claims.setdefault(robot, RobotClaim())
        claim.stops.add(stop, who, now_ns)
        self._follow_stops(robot, claim, now_ns)

    def release_estop(self, robot: str, stop: str, now_ns: int) -> None:
        """Take back that stop; whoever drove the robot drives on when it is started. Raises `RejectedError`."""
        state = self.stop_states().get(robot, StopState())
        if not state.stops:
            raise RejectedError(f"release_estop: '{robot}' is {state}.")
        if stop not in state.stops:
            raise RejectedError(f"release_estop: '{stop[:MAX_NAME_LENGTH]}' is no stop of '{robot}'. It is {state}.")
        claim = self._claims[robot]
        claim.stops.release(stop, now_ns)
        self._follow_stops(robot, claim, now_ns)

    def check_start(self, robot: str, who: str) -> None:
        """Raise `RejectedError` unless the robot waits to be started, by somebody who may drive it."""
        state, driver = self.stop_states().get(robot), self.driver(robot)
        if state is None:
            raise RejectedError(f"start: '{robot}' is not stopped.")
        if state.stops:
            raise RejectedError(f"start: '{robot}' is {state}. Release that first.")
        if not state.ready:
            raise RejectedError(f"start: '{robot}' has not shown yet that its stops are released. Wait until it does.")
        if driver and not same_key(driver, who):
            raise RejectedError(f"start: '{robot}' is driven by '{driver}', who has to start it.")

    def _follow_stops(self, robot: str, claim: RobotClaim, now_ns: int) -> None:
        """The lease follows who stops the robot."""
        holder = "" if claim.stops.over else claim.stopped_by
        if not claim.stops.over and holder not in claim.stops.state.stops.values():
            holder = claim.stops.holder or holder or BESIDE
        if holder != claim.stopped_by or claim.empty:
            self._change(robot, msgspec.structs.replace(claim, stopped_by=holder), now_ns)

    # --- what robots say ----------------------------------------------------------------------------------------

    def on_hello(self, robot: str, anew: bool, now_ns: int) -> None:
        """A robot said hello; `anew`: its control process is a new one, which a stop may not have reached."""
        if robot in self._orphans:
            self._orphans.discard(robot)
            self._send(robot, self.stamp(OperatorCommand(robot, OperatorCommandKind.drop_link, operator="gateway")))
        claim = self._claims.get(robot)
        if claim is not None and claim.stopped_by:
            if anew:
                claim.stops.doubt()
            self._resend_stops(robot, claim, now_ns)

    def on_status(self, status: EdgeStatus, now_ns: int) -> None:
        """A robot may be stopped, released, started or driven by somebody beside it."""
        robot, mode = status.robot, status.mode
        self.show_stops(robot, status.stop, now_ns)
        if (claim := self._claims.get(robot)) is not None:
            self._resend_stops(robot, claim, now_ns)
        if not status.stop.free or (claim is not None and claim.stopped_by):
            return
        if claim is not None and claim.driver == BESIDE and mode in (Mode.policy, Mode.script, Mode.reset):
            self.hand_back(robot, BESIDE, now_ns)
        elif mode == Mode.human and claim is None:
            lease = self._leases.of(robot, now_ns)
            if lease is None or lease.priority < Priority.operator:
                self._change(robot, RobotClaim(driver=BESIDE), now_ns)

    def show_stops(self, robot: str, shown: StopState, now_ns: int) -> None:
        """A robot says who stops it."""
        claim = self._claims.get(robot)
        if claim is not None or not shown.free:
            claim = self._claims.setdefault(robot, RobotClaim())
            claim.stops.show(shown, now_ns)
            self._follow_stops(robot, claim, now_ns)

    def _resend_stops(self, robot: str, claim: RobotClaim, now_ns: int) -> None:
        for stop, who in claim.stops.resend(now_ns).items():
            self._send(robot, OperatorCommand(robot, OperatorCommandKind.estop, operator=who, stop=stop))

    # --- leases -------------------------------------------------------------------------------------------------

    def restore(self, lease: Lease) -> None:
        """A lease of before the gateway was started again; a page is gone with the old one."""
        if lease.purpose == ESTOP:
            # The robot shows the others itself.
            claim = self._claims[lease.robot] = RobotClaim(stopped_by=lease.holder)
            for stop, who in lease.stops.items():
                claim.stops.add(stop, who, 0)
            self._lease_numbers[lease.robot] = lease.number
        elif lease.priority >= Priority.operator:
            gone = lease.holder.startswith((DROPPED, WEB_OPERATOR))
            self._claims[lease.robot] = RobotClaim(
                driver=lease.holder.removeprefix(DROPPED), dropped=gone, driver_lease=lease.number
            )
            if gone or lease.holder == BESIDE:
                self._lease_numbers[lease.robot] = lease.number
            if lease.holder.startswith(WEB_OPERATOR):
                self._orphans.add(lease.robot)

    def poll(self, now_ns: int) -> None:
        """A claim lasts until it is taken back: its lease lives on meanwhile."""
        for robot, number in list(self._lease_numbers.items()):
            claim, lease = self._claims[robot], self._leases.of(robot, now_ns)
            if lease is None or (lease.holder, lease.purpose) != claim.lease()[:2]:
                self._try_hold(robot, now_ns)
            elif lease.number == number and lease.expires_ns - now_ns < lease.ttl_ns // 2:
                self._leases.renew(robot, number, now_ns)

    def _change(self, robot: str, claim: RobotClaim, now_ns: int) -> None:
        """From one claim to the next: the old lease ends, the new one begins."""
        if claim.empty:
            self._claims.pop(robot, None)
            number, lease = self._lease_numbers.pop(robot, 0), self._leases.of(robot, now_ns)
            if lease is not None and lease.number == number:
                self._scheduler.release(robot, number, now_ns)
            return
        self._claims[robot] = claim
        self._try_hold(robot, now_ns)

    def _try_hold(self, robot: str, now_ns: int) -> None:
        """Take the lease of the claim; what outranks a person holds the robot as safely."""
        try:
            self._hold(robot, self._claims[robot], now_ns)
        except RejectedError as error:
            self._lease_numbers.setdefault(robot, 0)
            log.debug("%s", error)

    def _hold(self, robot: str, claim: RobotClaim, now_ns: int) -> int:
        """Take the lease of the claim; its number. Raises `RejectedError` when what outranks it holds the robot."""
        holder, purpose, priority = claim.lease()
        lease = self._leases.of(robot, now_ns)
        if lease is not None and (lease.holder, lease.purpose) == (holder, purpose):
            self._lease_numbers[robot] = lease.number
            return lease.number
        if lease is not None and (lease.number == self._lease_numbers.get(robot) or lease.holder.startswith(DROPPED)):
            self._scheduler.release(robot, lease.number, now_ns)
        # Who only corrects or stops a running job leaves it its job: its episodes go on.
        lease, preempted = self._scheduler.acquire(robot, holder, purpose, priority, TTL_NS, now_ns, rest=False)
        self._lease_numbers[robot] = lease.number
        if preempted is not None:
            self._on_lease_ended(preempted, f"'{holder}' took it for {purpose}", now_ns)
        return lease.number
