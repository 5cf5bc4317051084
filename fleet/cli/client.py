"""A person's or a program's connection to the gateway: what robots and jobs there are, work to hand in, robots to hold.

with FleetClient("tcp://127.0.0.1:5760", Path("data/state/keys")) as fleet:
    lease = fleet.lease("robot-0", ttl_s=30, purpose="maintenance")
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from wire.clock import MonotonicClock, clock_name
from wire.errors import ConfigError, RejectedError, WireError
from wire.messages import Message
from wire.messages.fleet import (
    AcquireLease,
    CancelJob,
    ChangeVersions,
    JobRequest,
    JobState,
    ListFleet,
    Preempted,
    ReleaseLease,
    RenewLease,
    Response,
    RobotState,
    SubmitJob,
    VersionAction,
    VersionStatus,
)
from wire.messages.gateway import Hello, Rejection
from wire.transport.channel import PEER_SUFFIX, Channel
from wire.transport.keys import default_role, load_pair
from wire.transport.session import GatewaySession
from wire.transport.zmq_channel import ZmqClient, wait_any
from wire.types import CALLERS, Lease

ANSWER_S = 10.0
_HELLO_EVERY_S = 0.5


class FleetClient:
    """One connection to the gateway; for one thread. Every method may raise `RejectedError`, with the gateway's
    reason, and `WireError` when no answer comes in `answer_s`."""

    def __init__(
        self,
        gateway: str,
        keys: Path | None = None,
        name: str = "console",
        *,
        answer_s: float = ANSWER_S,
        channel: Channel | None = None,
    ) -> None:
        """`gateway`: tcp://HOST:PORT; `keys`: the directory that has the key of `name`; `channel`: instead of both.

        Nothing is sent before `connect`. Raises `ConfigError` for a key that is not there or has no such role.
        """
        if channel is None and keys is None:
            raise ConfigError(f"FleetClient '{name}': give the key directory, or a channel.")
        role = default_role(name) if keys is None else load_pair(keys, name).role
        if role not in CALLERS:
            raise ConfigError(
                f"'{name}' cannot call the gateway: its key was made for role {role}. Make one on the gateway's "
                f"machine: `vla-fleet keys NAME --role {CALLERS[0]}`, or {CALLERS[1]}."
            )
        self.name, self.role = name, role
        self._gateway = gateway
        self._keys = keys
        self._answer_s = answer_s
        self._given = channel
        self._session: GatewaySession | None = None
        self._call = secrets.randbits(40)
        self._preempted: list[Preempted] = []

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def connect(self) -> None:
        """Introduce ourselves and wait until the gateway accepts us."""
        channel = self._given
        if channel is None:
            assert self._keys is not None
            channel = ZmqClient(self._gateway, self.name, self._keys)
        hello = Hello(self.name, self.role, clock_name(), 0, os.getpid())
        self._session = GatewaySession(channel, hello, MonotonicClock(), _HELLO_EVERY_S)
        try:
            self._introduce(time.monotonic() + self._answer_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the connection up. Leases that are held run out by themselves."""
        if self._session is not None and self._given is None:
            self._session.channel.close()
        self._session = None

    # --- what there is --------------------------------------------------------------------------------------------

    def robots(self) -> tuple[RobotState, ...]:
        """All robots of the fleet, by name."""
        return self._ask(ListFleet).robots

    def jobs(self) -> tuple[JobState, ...]:
        """All open jobs and those that ended lately, in the order they were submitted."""
        return self._ask(ListFleet).jobs

    def fleet(self) -> Response:
        """Robots, jobs and the robots' specs, by spec hash, of one moment."""
        return self._ask(ListFleet)

    def versions(
        self,
        action: VersionAction = VersionAction.list,
        number: int = 0,
        robot: str = "",
        robots: tuple[str, ...] = (),
    ) -> tuple[VersionStatus, ...]:
        """The newest policy versions and all that are needed, oldest first, once `action` is done with `number`.

        `robot`: to pin; `robots`: to compute a shadow.
        """
        return self._ask(lambda call: ChangeVersions(call, action, number, robot, robots)).versions

    # --- work -----------------------------------------------------------------------------------------------------

    def submit(self, request: JobRequest) -> JobState:
        """Hand a job in; one that is there already under this id is left as it is."""
        return self._ask(lambda call: SubmitJob(call, request)).jobs[0]

    def cancel(self, job: str) -> JobState:
        """End a job; its robots finish the episode they are in."""
        return self._ask(lambda call: CancelJob(call, job)).jobs[0]

    # --- robots to hold -------------------------------------------------------------------------------------------

    def lease(self, robot: str, ttl_s: float = 60.0, purpose: str = "maintenance", priority: int = 0) -> Lease:
        """Hold `robot` for `ttl_s` from now or from the last `renew`. `priority` 0: the usual one of the purpose."""
        return self._leased(self._ask(lambda call: AcquireLease(call, robot, purpose, priority, ttl_s)))

    def renew(self, lease: Lease) -> Lease:
        """Hold it longer: due well before it ends. Raises `RejectedError` when it is not ours any more."""
        return self._leased(self._ask(lambda call: RenewLease(call, lease.robot, lease.number)))

    def release(self, lease: Lease | str, force: bool = False) -> None:
        """Give a robot back: our lease of it, or with its name and `force` whoever's it is."""
        robot, number = (lease, 0) if isinstance(lease, str) else (lease.robot, lease.number)
        if number == 0 and not force:
            found = next((one.lease for one in self.robots() if one.name == robot), None)
            if found is not None and found.holder.partition(PEER_SUFFIX)[0] == self.name:
                number = found.number
            else:
                holder = f"is held by '{found.holder}' ({found.purpose})" if found else "is not held by anybody"
                raise RejectedError(f"'{robot}' {holder}, not by '{self.name}'. Force it only if you know who that is.")
        self._ask(lambda call: ReleaseLease(call, robot, number))

    def preempted(self) -> list[Preempted]:
        """Leases of ours that ended before their time, since the last call."""
        self.listen()
        ended, self._preempted = self._preempted, []
        return ended

    def listen(self, timeout_s: float = 0.0) -> None:
        """Take in what came; waits up to `timeout_s` for the first of it."""
        while self._recv(timeout_s) is not None:
            timeout_s = 0.0

    # --- inside ---------------------------------------------------------------------------------------------------

    def _ask(self, make: Callable[[int], Message]) -> Response:
        self._call += 1
        call, deadline_s = self._call, time.monotonic() + self._answer_s
        session, message, sent = self._open(), make(self._call), False
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not (sent and session.accepted):
                # It must hear first who we are: the connection was down, or this is a new gateway.
                self._introduce(deadline_s)
                session.accepted = sent = session.channel.send(message)
            response = self._recv(min(left_s, 0.2))
            if isinstance(response, Response) and response.call == call:
                if response.refused:
                    raise RejectedError(response.refused)
                return response
        raise WireError(f"the gateway at {self._gateway} did not answer {type(message).__name__}: see its log.")

    def _introduce(self, deadline_s: float) -> None:
        session = self._open()
        while not session.accepted:
            if time.monotonic() > deadline_s:
                raise WireError(
                    f"no gateway answers at {self._gateway}. Start one with `vla-fleet up` or `vla-fleet gateway`, or "
                    "name another with --gateway."
                )
            session.poll()
            self._recv(0.02)
            if session.refusal:
                raise RejectedError(session.refusal)

    def _recv(self, timeout_s: float) -> Message | None:
        """The next message, with what is about the connection and about leases taken in."""
        session = self._open()
        if isinstance(session.channel, ZmqClient):
            wait_any([session.channel], timeout_s)
        message = session.channel.recv()
        match message:
            case Rejection(reason=reason):
                raise RejectedError(reason)
            case Preempted():
                self._preempted.append(message)
            case Message():
                session.handle_message(message)
        return message

    def _open(self) -> GatewaySession:
        if self._session is None:
            raise WireError(f"'{self.name}' is not connected to {self._gateway}: use `with`, or `connect`.")
        return self._session

    @staticmethod
    def _leased(answer: Response) -> Lease:
        if answer.lease is None:
            raise WireError("the gateway's answer has no lease in it: is it of another version?")
        return answer.lease
