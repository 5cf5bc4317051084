"""Stops on their way to robots: a thread with a port of its own, which no segment, weight or disk stands in front of.

    page's thread ────────────────┐
    teleoperators, on this port ──┼──► this thread ──► robots, on this port ──► their hosts
    the gateway's loop ───────────┘         │
                                            └──► the gateway's loop: leases, ledger, events, view

It knows names, and which stops a robot has not shown; what a stop means is decided in the gateway's loop, afterwards.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque

import msgspec

from cloud_learner.gateway.peers import AuthenticatedServerChannel, PeerBudget, event_budget
from wire.clock import Clock, clock_name
from wire.errors import RejectedError
from wire.identity.permissions import Port, may_send
from wire.identity.refusals import RefusalReason
from wire.messages import Message
from wire.messages.gateway import Heartbeat, HelloAck, OperatorCommand, StopShown
from wire.stop_state import StopState, new_stop_id
from wire.transport.channel import PEER_SUFFIX
from wire.transport.zmq_channel import ZmqServer, wait_any
from wire.types import OperatorCommandKind
from wire.wakeup import Wakeup

log = logging.getLogger(__name__)

_UP_NS = 2_000_000_000
"""a robot that was heard on this port so lately is sent to on it; it speaks twice a second"""
_RESEND_NS = 100_000_000
_FRESH_NS = 500_000_000
"""what may take as long as the way to a robot and back"""
_ANSWERED_NS = 1_000_000_000
"""for so long after a host's answer its robot need not be told again, though no status shows the stop yet"""
_MOST = 4096
_MOST_OF_ONE = 32
"""as many as a robot remembers (`hal.safety.stop_latch`)"""
_MOST_ROBOTS = 1000
"""that have not shown a stop; more only while all of them are heard"""
_LONGEST = 128
"""characters of a robot's name, and of a stop's id, that somebody else chose"""
_AT_ONCE = 500
"""messages that are handled before what is due goes out"""
_WAIT_S = 0.05
_FAILED_S = 0.1


class _Unshown(msgspec.Struct):
    """A stop that its robot has not shown."""

    command: OperatorCommand
    given_ns: int
    sent_ns: int


class StopServer:
    """`start` its thread, or call `poll` again and again. All other methods may be called by any thread."""

    def __init__(self, channel: AuthenticatedServerChannel, clock: Clock, port: int = 0) -> None:
        """`channel` listens at `port`; the thread's from now on."""
        self.port = port
        self._channel = channel
        self._clock = clock
        self._lock = threading.Lock()
        self._outbox: deque[OperatorCommand] = deque()
        self._undelivered: deque[OperatorCommand] = deque(maxlen=_MOST)
        self._given: deque[tuple[str, OperatorCommand]] = deque()
        self._answers: deque[tuple[str, StopState]] = deque(maxlen=_MOST)
        self._unshown: dict[str, dict[str, _Unshown]] = {}
        self._answered_ns: dict[tuple[str, str], int] = {}
        self._heard_ns: dict[str, dict[str, int]] = {}
        """by name, when each connection of it was heard last"""
        self._wake = Wakeup()
        self.refused: Counter[str] = Counter()
        """what is no matter of stopping, or of those who may not stop, by reason"""
        self._told = event_budget()
        self._pressed, self._pressed_of_one = PeerBudget(50, 50_000_000), PeerBudget(5, 1_000_000_000)
        """stops of each key; and, beyond that, of each key for each robot that is heard here"""
        self._closing = False
        self._thread: threading.Thread | None = None

    # --- for other threads --------------------------------------------------------------------------------------

    def give(self, command: OperatorCommand, peer: str = "") -> None:
        """A person stops a robot: it goes out at once. The gateway's loop gets it from `pop_given`, with whose it is;
        `peer`: '' for the page."""
        with self._lock:
            if len(self._given) >= _MOST:
                ((most, _),) = Counter(who for who, _ in self._given).most_common(1)
                del self._given[next(at for at, (who, _) in enumerate(self._given) if who == most)]
            self._given.append((peer, command))
            self._send_stop(command)
        self._wake.ring()

    def pop_given(self) -> list[tuple[str, OperatorCommand]]:
        """Stops that went out since the last call: (who made it, '' for the page; the stop)."""
        with self._lock:
            given = list(self._given)
            self._given.clear()
            now_ns = self._clock.now_ns()
            for _, command in given:
                if (key := (command.robot, command.stop)) in self._answered_ns:
                    self._answered_ns[key] = now_ns
            return given

    def send(self, command: OperatorCommand) -> bool:
        """Send a stop, a release or a start; False when its robot was not heard here lately. A stop is sent in any case
        as soon as it is, and again until it is shown or released.

        Raises `RejectedError` for a start of a robot that somebody has just stopped.
        """
        robot = command.robot
        with self._lock:
            up = self._is_up(robot)
            if command.kind == OperatorCommandKind.estop:
                self._send_stop(command)
            elif command.kind == OperatorCommandKind.start and any(one.robot == robot for _, one in self._given):
                raise RejectedError(f"start: somebody has just stopped '{robot}'.")
            else:
                if command.kind == OperatorCommandKind.release_estop:
                    self._forget(robot, command.stop)
                if up:
                    self._outbox.append(command)
        self._wake.ring()
        return up

    def pop_undelivered(self) -> list[OperatorCommand]:
        """Releases and starts that found no connection after all."""
        with self._lock:
            undelivered = list(self._undelivered)
            self._undelivered.clear()
            return undelivered

    def pop_answers(self) -> list[tuple[str, StopState]]:
        """(robot, what its host answered) since the last call."""
        with self._lock:
            answers = list(self._answers)
            self._answers.clear()
            return answers

    def is_answered(self, command: OperatorCommand) -> bool:
        """Whether the robot's host has just shown that it heard this stop."""
        with self._lock:
            answered_ns = self._answered_ns.get((command.robot, command.stop))
            return answered_ns is not None and self._clock.now_ns() - answered_ns < _ANSWERED_NS

    def is_fresh(self, command: OperatorCommand) -> bool:
        """Whether this stop was given so lately, to a robot that is heard here, that its answer may be on its way."""
        with self._lock:
            unshown = self._unshown.get(command.robot, {}).get(command.stop)
            fresh = unshown is not None and self._clock.now_ns() - unshown.given_ns < _FRESH_NS
            return fresh and self._is_up(command.robot)

    def is_up(self, robot: str) -> bool:
        """Whether `robot` was heard here lately."""
        with self._lock:
            return self._is_up(robot)

    def show(self, robot: str, state: StopState) -> None:
        """A robot says who stops it: those need not be sent again."""
        with self._lock:
            for stop in state.stops:
                self._forget(robot, stop)

    def forget(self, command: OperatorCommand) -> None:
        """There is no such robot."""
        with self._lock:
            self._forget(command.robot, command.stop)

    def start(self) -> None:
        """Have a thread `poll` from now on."""
        self._thread = threading.Thread(target=self._run, name="stops", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._wake.ring()
        if self._thread is not None:
            self._thread.join()
        self._channel.close()
        self._wake.close()

    # --- the thread ---------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Send what is to be sent and take in what came; never waits."""
        while self._outbox:
            self._deliver(self._outbox.popleft())
        for received in itertools.islice(iter(self._channel.recv, None), _AT_ONCE):
            self._handle(*received)
        now_ns = self._clock.now_ns()
        with self._lock:
            for robot, unshown in self._unshown.items():
                due = [one for one in unshown.values() if now_ns - one.sent_ns >= _RESEND_NS]
                if due and self._is_up(robot):
                    for one in due:
                        one.sent_ns = now_ns
                        self._outbox.append(one.command)
            for key, answered_ns in list(self._answered_ns.items()):
                if now_ns - answered_ns > 60 * _ANSWERED_NS:
                    del self._answered_ns[key]
        while self._outbox:
            self._deliver(self._outbox.popleft())

    def _handle(self, peer: str, message: Message) -> None:
        name = peer.partition(PEER_SUFFIX)[0]
        if not may_send(Port.stops, self._channel.role(peer), message):
            self._drop(peer, message)
            return
        match message:
            case Heartbeat(sent_ns=sent_ns):
                now_ns = self._clock.now_ns()
                with self._lock:
                    heard = self._heard_ns.setdefault(name, {})
                    heard[peer] = now_ns
                    for gone in [one for one, heard_ns in heard.items() if now_ns - heard_ns >= _UP_NS]:
                        del heard[gone]
                self._channel.send(peer, HelloAck(clock_name(), now_ns, sent_ns, stop_port=self.port))
            case StopShown(stop=state):
                with self._lock:
                    self._answers.append((name, state))
                    for stop in itertools.islice(state.stops, _MOST_OF_ONE):
                        self._answered_ns[name, stop] = self._clock.now_ns()
                        self._forget(name, stop)
                    while len(self._answered_ns) > _MOST:
                        del self._answered_ns[next(iter(self._answered_ns))]
            case OperatorCommand(kind=OperatorCommandKind.estop):
                if len(message.robot) > _LONGEST:
                    self.refused[RefusalReason.rejected] += 1
                    return
                if not self._may_stop(name, message.robot):
                    self.refused[RefusalReason.too_often] += 1
                    return
                stop = message.stop if 0 < len(message.stop) <= _LONGEST else new_stop_id(name)
                self.give(msgspec.structs.replace(message, operator=name, stop=stop), name)
            case _:
                self._drop(peer, message)

    def _may_stop(self, name: str, robot: str) -> bool:
        """As often as people press, and a whole fleet at once; no other key takes anything of that."""
        now_ns = self._clock.now_ns()
        if self._pressed.take(name, now_ns):
            return True
        with self._lock:
            up = self._is_up(robot)
        return up and self._pressed_of_one.take(f"{name} {robot}", now_ns)

    def _drop(self, peer: str, message: Message) -> None:
        self.refused[RefusalReason.wrong_role] += 1
        if self._told.take(peer, self._clock.now_ns()):
            kind = type(message).__name__
            log.error("dropped a %s of '%s': only stops are sent here, by those who may.", kind, peer)

    def _deliver(self, command: OperatorCommand) -> None:
        """To every connection of its robot's name: a process that hangs must not hide the one that does not."""
        now_ns = self._clock.now_ns()
        peers = self._heard_ns.get(command.robot, {})
        sent = False
        for peer, heard_ns in list(peers.items()):
            if now_ns - heard_ns >= _UP_NS or not self._channel.send(peer, command):
                with self._lock:
                    del peers[peer]
            else:
                sent = True
        if not sent and command.kind != OperatorCommandKind.estop:
            with self._lock:
                self._undelivered.append(command)

    def _run(self) -> None:
        while not self._closing:
            try:
                channels = [self._channel] if isinstance(self._channel, ZmqServer) else []
                wait_any([self._wake.fd, *channels], _WAIT_S)
                self._wake.silence()
                self.poll()
            except Exception:
                # Whatever it is: the next stop must go out.
                log.exception("the way of stops failed; it goes on.")
                time.sleep(_FAILED_S)

    # --- with the lock held -------------------------------------------------------------------------------------

    def _send_stop(self, command: OperatorCommand) -> None:
        if command.robot not in self._unshown and len(self._unshown) >= _MOST_ROBOTS:
            self._make_room()
        unshown = self._unshown.setdefault(command.robot, {})
        if command.stop in unshown:
            return
        now_ns = self._clock.now_ns()
        if len(unshown) < _MOST_OF_ONE:
            unshown[command.stop] = _Unshown(command, now_ns, now_ns)
        self._outbox.append(command)

    def _make_room(self) -> None:
        """Forget a robot that is not heard here, the first one of whoever stops most of these: a stop that was noted
        is sent again by the gateway's loop."""
        away: dict[str, list[str]] = {}
        for robot, unshown in self._unshown.items():
            if not self._is_up(robot):
                away.setdefault(next(iter(unshown.values())).command.operator, []).append(robot)
        if away:
            del self._unshown[max(away.values(), key=len)[0]]

    def _forget(self, robot: str, stop: str) -> None:
        if (unshown := self._unshown.get(robot)) is not None:
            unshown.pop(stop, None)
            if not unshown:
                del self._unshown[robot]

    def _is_up(self, robot: str) -> bool:
        now_ns = self._clock.now_ns()
        return any(now_ns - heard_ns < _UP_NS for heard_ns in self._heard_ns.get(robot, {}).values())
