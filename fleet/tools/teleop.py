"""Drives one robot of a fleet with a device of one's own, over one connection to the gateway.

It holds the robot by a lease of a second that it renews, takes over when the person engages the device, commands at a
steady rate, and hands back. When the lease is lost, or the gateway silent, it stops commanding and says so; nothing
goes on until the person has let go once. A program that dies leaves a lease that ends, and a robot that holds.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable

import numpy as np

from hal.interfaces.teleop import TeleopCommand, TeleopDevice
from hal.teleop.pose import neutral_action, pose_of
from hal.teleop.terminal import EPISODE_HINT
from wire.clock import Clock, clock_name
from wire.errors import ConfigError, RejectedError, WireError, suggest
from wire.messages import Message
from wire.messages.fleet import AcquireLease, ListFleet, Preempted, ReleaseLease, RenewLease, Response
from wire.messages.gateway import (
    COMMAND_FRESH_S,
    EdgeEvent,
    EdgeStatus,
    Hello,
    HelloAck,
    OperatorCommand,
    ReintroduceRequest,
    Rejection,
)
from wire.stop_state import new_stop_id
from wire.transport.channel import Channel
from wire.transport.keys import default_role
from wire.transport.peer_clock import PeerClock
from wire.transport.session import GatewaySession
from wire.transport.stop_connection import StopConnection
from wire.types import Lease, OperatorCommandKind, RobotSpec, Role

log = logging.getLogger(__name__)

ROLE = Role.teleoperator
TTL_S = 1.0
RENEW_S = 0.3
SILENT_S = 0.8
"""no word from the gateway for so long: the line is lost, a little before the lease is"""
FIRST_WORD_S = 10.0
PRIORITY = 80
"""of an operator (hal.resource.lease.Priority): only an emergency stop outranks it"""
_ASK_S = 1.0
_STOP_AGAIN_NS = 500_000_000
_STATUS_S = 1.0
"""a status older than this says nothing of where the robot is"""


class Teleop:
    """`step` once a period until it returns False; then `close`."""

    def __init__(
        self,
        channel: Channel,
        device: TeleopDevice,
        robot: str,
        name: str,
        clock: Clock,
        *,
        hz: float = 30.0,
        notify: Callable[[str], None] = log.info,
        stops: StopConnection | None = None,
        role: Role | None = None,
    ) -> None:
        """`notify` is told in a sentence whatever the person should know. `stops`: stops go by it, too; `role` of
        the key, by default the one that its name says. Raises `ConfigError` for a key or rate that cannot be."""
        if (role := role or default_role(name)) != ROLE:
            raise ConfigError(
                f"'{name}' cannot teleoperate: its key is for role {role}. `vla-fleet keys {ROLE}-{name}` makes one."
            )
        if not 5 <= hz <= 200:
            raise ConfigError(
                f"--hz {hz:g}: give 5 to 200 commands a second; a robot forgets a command after {COMMAND_FRESH_S:g} s."
            )
        self.robot = robot
        self.period_ns = round(1e9 / hz)
        self.status: EdgeStatus | None = None
        self.lease: Lease | None = None
        self.driving = False
        self.link_s = float("nan")
        """how long the gateway took to answer last"""
        self._channel, self._stops = channel, stops
        self._device = device
        self._name = name
        self._clock = clock
        self._notify = notify
        self._last_notice = ""
        self._spec: RobotSpec | None = None
        self._session = GatewaySession(channel, Hello(name, ROLE, clock_name(), 0, os.getpid()), clock, RENEW_S)
        self._started_ns = self._heard_ns = clock.now_ns()
        self._silent = False
        self._due_ns: dict[str, int] = {}
        self._status_ns = 0
        self._call = secrets.randbits(40)
        self._asked: dict[int, tuple[str, int]] = {}
        self._barred = False
        """nothing is commanded until the device was let go once"""
        self._given_up = self._had_it = self._engaged = False
        """given up: the robot is asked for again only when the person engages anew"""
        self._taken = False
        """whether the gateway may still believe that we drive"""
        self._commanded: np.ndarray | None = None
        self._sequence = 0
        """of what was sent, over all leases"""
        self._gateway_clock = PeerClock()
        self._stop_due, self._next_stop_ns = "", 0
        """id of a stop that the gateway has not answered yet, and when it is said again"""
        self._stopping = False

    # --- one period ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Handle messages, read the device, send a command. False when the person is done.

        Raises `RejectedError` when the gateway does not let us in or the robot is somebody's, `ConfigError` for a robot
        that is not there or that the device cannot drive, `WireError` when no gateway answers, `RobotError` of the
        device.
        """
        while (message := self._channel.recv()) is not None:
            self._handle_message(message)
        if self._stops is not None:
            self._stops.poll()
            while self._stops.recv() is not None:
                pass
        self._watch_connection()
        self._keep_connection()
        self._keep_stopping()
        if self._spec is None:
            return True
        return self._follow_device(self._device.read(self._pose(), self.driving))

    def close(self) -> None:
        """Hand back and release what is held. Not after a device that failed: its robot should hold."""
        if self._taken and self._send_command("hand_back"):
            self.driving = self._taken = False
        if self.lease is not None:
            self._channel.send(ReleaseLease(self._next_call(""), self.robot, self.lease.number))
            self.lease = None

    def status_line(self) -> str:
        """What is going on, in one line."""
        status = self.status if self._fresh() else None
        what = "waits for the gateway" if self._spec is None else "not held" if self.lease is None else "held"
        if status is not None:
            reason = f" ({status.reason})" if status.reason else ""
            what = "   ".join(filter(None, (f"{status.mode}{reason}", status.part, status.task)))
        link = f"link {1e3 * self.link_s:.0f} ms"
        if self._silent or not self._session.accepted:
            what, link = f"no link   {what}", ""
        hint = getattr(self._device, "hint", "")
        if self._barred:
            hint = f"let go, then take over again   {hint}"
        was = f"(it was: {status.open_outcome})" if status is not None and status.open_outcome else ""
        parts = (self.robot, what, "DRIVING" * self.driving, was, hint, link)
        return "   ".join(part for part in parts if part)

    # --- the connection ------------------------------------------------------------------------------------------

    def _handle_message(self, message: Message) -> None:
        now_ns = self._clock.now_ns()
        if self._silent:
            self._report("The gateway answers again.")
        self._heard_ns, self._silent = now_ns, False
        match message:
            case HelloAck(echo_ns=echo_ns, stop_port=stop_port):
                self.link_s = (now_ns - echo_ns) / 1e9
                if self._stops is not None:
                    self._stops.follow(stop_port)
                self._gateway_clock.on_answer(message, now_ns)
            case Rejection(reason=reason):
                raise RejectedError(f"the gateway refuses '{self._name}': {reason}")
            case ReintroduceRequest():
                # A gateway that has just started: it may know our lease, or another may have come first.
                self._due_ns.clear()
            case Response():
                self._handle_response(message, now_ns)
            case Preempted(lease=lease, reason=reason) if self.lease and lease.number == self.lease.number:
                self._given_up = True
                self._lose_lease(f"{self.robot} was taken away: {reason}.")
            case EdgeStatus(robot=robot) if robot == self.robot:
                if message.by_person and self.status is None:
                    self._report(f"A person has the last word of an episode: {EPISODE_HINT}.")
                self.status, self._status_ns = message, now_ns
            case EdgeEvent(robot=robot, kind="refused", detail=detail) if robot == self.robot:
                self._report(f"{robot} refuses: {detail}")
            case _:
                log.debug("nothing is done about a %s.", type(message).__name__)
        self._session.handle_message(message)

    def _handle_response(self, answer: Response, now_ns: int) -> None:
        what, sent_ns = self._asked.pop(answer.call, ("", now_ns))
        if what:
            self.link_s = (now_ns - sent_ns) / 1e9
        if what == "list":
            self._learn_spec(answer)
        elif what == "stop":
            self._on_stop_heard()
        elif what == "acquire" and answer.lease is not None:
            self.lease, self._had_it = answer.lease, True
            self._report(f"{self.robot} is yours.")
        elif what == "acquire" and not self._had_it:
            raise RejectedError(f"{self.robot} cannot be had: {answer.refused or 'the gateway gave no lease'}")
        elif what == "acquire":
            self._given_up = True
            self._stop_driving(f"{self.robot} cannot be had now: {answer.refused}")
        elif what == "renew" and self.lease is not None:
            if answer.refused:
                self._lose_lease(f"The lease of {self.robot} is over: {answer.refused}")
            elif answer.lease is not None:
                self.lease = answer.lease
        elif answer.refused and self.driving:
            # A command was rejected: the gateway sees it otherwise than we do.
            self._stop_driving(answer.refused)
        elif answer.refused and not self._barred:
            self._report(answer.refused)

    def _learn_spec(self, answer: Response) -> None:
        """Learn what the robot is."""
        names = {state.name: state for state in answer.robots}
        state = names.get(self.robot)
        if state is None:
            raise ConfigError(
                f"the fleet has no robot '{self.robot}'.{suggest(self.robot, names)} "
                f"There are: {', '.join(sorted(names)) or 'none'}."
            )
        spec = answer.specs.get(state.capabilities.spec_hash)
        if spec is None:
            raise ConfigError(f"the gateway does not know what the actions of '{self.robot}' mean; is it connected?")
        if self._spec is not None and self._spec.hash == spec.hash:
            return
        self._device.connect(spec)
        self._spec = spec
        if state.health not in ("ready", "degraded"):
            self._report(f"{self.robot} is {state.health}: {state.reason or 'no reason given'}.")

    def _watch_connection(self) -> None:
        silent_s = (self._clock.now_ns() - self._heard_ns) / 1e9
        if not self._session.accepted and self._spec is None:
            if self._session.refusal:
                raise RejectedError(self._session.refusal)
            if (self._clock.now_ns() - self._started_ns) / 1e9 > FIRST_WORD_S:
                raise WireError(
                    f"no gateway has answered in {FIRST_WORD_S:g} s. Is it running, and is its address right?"
                )
        elif silent_s > SILENT_S and not self._silent:
            self._silent = True
            # The robot is not told: it hears nothing of us either, and holds by itself.
            self._stop_driving(
                f"The gateway has been silent for {SILENT_S:g} s: nothing is commanded, and {self.robot} holds."
            )

    def _keep_connection(self) -> None:
        now_ns = self._clock.now_ns()
        self._session.poll()
        if not self._session.accepted:
            return
        if self._spec is None:
            if self._due("list", _ASK_S):
                self._channel.send(ListFleet(self._next_call("list")))
        elif self.lease is None:
            if not self._given_up and self._due("acquire", _ASK_S):
                self._channel.send(
                    AcquireLease(self._next_call("acquire"), self.robot, "teleoperation", PRIORITY, TTL_S)
                )
        elif self._due("renew", RENEW_S):
            self._channel.send(RenewLease(self._next_call("renew"), self.robot, self.lease.number))
        # What was never answered is not waited for.
        self._asked = {call: asked for call, asked in self._asked.items() if now_ns - asked[1] < 10e9}

    def _due(self, what: str, every_s: float) -> bool:
        now_ns = self._clock.now_ns()
        if now_ns < self._due_ns.get(what, 0):
            return False
        self._due_ns[what] = now_ns + round(every_s * 1e9)
        return True

    def _next_call(self, what: str) -> int:
        self._call += 1
        if what:
            self._asked[self._call] = (what, self._clock.now_ns())
        return self._call

    # --- the person ----------------------------------------------------------------------------------------------

    def _follow_device(self, command: TeleopCommand) -> bool:
        if command.estop and not self._stopping:
            # A button that is held is one stop.
            self._stop_due, self._next_stop_ns = self._stop_due or new_stop_id(self._name), 0
            # The stop holds the robot, above our own lease; it is not handed back, or it would go on by itself when
            # the stop is released.
            self._given_up, self.lease = True, None
            self.driving, self._commanded = False, None
            self._keep_stopping()
        self._stopping = command.estop
        for kind in command.episode:
            self._say(kind)
        if command.quit:
            return False
        if not command.engaged:
            if self.driving and self._send_command("hand_back"):
                self.driving = self._taken = False
                self._report(f"{self.robot} is handed back.")
            self._barred &= self._silent
            self._engaged = False
            return True
        if not self._engaged:
            self._engaged, self._given_up = True, False
        if self._barred or self._silent or self.lease is None:
            return True
        if not self.driving:
            if not self._send_command("take_over"):
                return True
            self.driving = self._taken = True
            self._commanded = None
            self._report(f"You drive {self.robot}.")
        self._command(command.action, command.time_ns)
        return True

    def _keep_stopping(self) -> None:
        """Say a stop until the gateway has answered what was asked right behind it."""
        now_ns = self._clock.now_ns()
        if not self._stop_due or now_ns < self._next_stop_ns:
            return
        waits = self._next_stop_ns > 0
        sent = self._send_command("estop", stop=self._stop_due)
        self._next_stop_ns = now_ns + (_STOP_AGAIN_NS if sent else 1)
        if not sent or waits:
            self._report(f"The gateway has not heard the stop yet: no link. Use the stop on {self.robot}.")
        if sent:
            self._channel.send(ListFleet(self._next_call("stop")))

    def _on_stop_heard(self) -> None:
        stop, self._stop_due = self._stop_due, ""
        if stop:
            self._report(
                f"{self.robot} was told to stop ({stop}). Once all is clear, release this stop and then start the "
                f"robot: at the page, or on the robot's computer by `vla-fleet stop {self.robot} --release {stop}` and "
                f"`vla-fleet stop {self.robot} --start`."
            )

    def _say(self, kind: OperatorCommandKind) -> None:
        """Pass on what the person says of the episode or its scene."""
        if self.lease is None or self._silent or not self._send_command(kind):
            self._report(f"'{kind}' was not said: {self.robot} is not held. Try again.")
        else:
            self._report(f"{self.robot}: {kind.replace('_', ' ')}.")

    def _command(self, action: np.ndarray | None, time_ns: int = 0) -> None:
        assert self._spec is not None
        if action is None:
            # A released key: the robot holds now and not when the command has become old.
            if self._commanded is not None:
                self._send_command("command")
            return
        if self._commanded is None:
            action = neutral_action(self._spec, self._pose(), action)
        # A float32 may lie a hair outside a limit that is given in double precision.
        numbers = tuple(min(max(float(a), d.low), d.high) for a, d in zip(action, self._spec.action, strict=True))
        if self._send_command("command", numbers, time_ns=time_ns):
            self._commanded = action

    def _send_command(self, kind: str, action: tuple[float, ...] = (), stop: str = "", time_ns: int = 0) -> bool:
        self._sequence += 1
        made_ns = self._gateway_clock.theirs(time_ns or self._clock.now_ns())
        lease = self.lease.number if self.lease is not None else 0
        command = OperatorCommand(self.robot, kind, action, self._sequence, self._name, stop, made_ns, lease)
        apart = kind == "estop" and self._stops is not None and self._stops.send(command)
        return self._channel.send(command) or apart

    def _lose_lease(self, why: str) -> None:
        self.lease, self.status = None, None
        self._stop_driving(why)

    def _stop_driving(self, why: str) -> None:
        self.driving, self._barred, self._commanded = False, True, None
        self._report(why)

    def _report(self, sentence: str) -> None:
        # Thirty commands a second may be refused for one reason.
        if sentence != self._last_notice:
            self._notify(sentence)
        self._last_notice = sentence

    def _fresh(self) -> bool:
        return self.status is not None and self._clock.now_ns() - self._status_ns < _STATUS_S * 1e9

    def _pose(self) -> np.ndarray:
        assert self._spec is not None
        if self.status is None or not self._fresh() or len(self.status.state) != self._spec.state_dim:
            return pose_of(self._spec, None)
        return pose_of(self._spec, self.status.state)
