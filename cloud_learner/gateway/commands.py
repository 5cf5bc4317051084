"""People's commands on their way through the gateway: whether they may go, and by which way they go."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from cloud_learner.dispatch.dispatcher import Dispatcher
from cloud_learner.gateway.stop_server import StopServer
from cloud_learner.operator.view import FleetView
from wire.clock import Clock
from wire.errors import RejectedError
from wire.messages import Message
from wire.messages.fleet import Response
from wire.messages.gateway import START_FRESH_S, OperatorCommand
from wire.stop_state import StopState
from wire.transport.channel import ServerChannel
from wire.types import OperatorCommandKind

log = logging.getLogger(__name__)

_CONNECTS_NS = 10_000_000_000
_REMIND_NS = 600_000_000_000
_APART = (OperatorCommandKind.estop, OperatorCommandKind.release_estop, OperatorCommandKind.start)


class CommandForwarder:
    """For the gateway's loop. `send` is how everything reaches a peer: a matter of stopping by its own way, where there
    is one."""

    def __init__(
        self,
        channel: ServerChannel,
        stops: StopServer | None,
        view: FleetView,
        clock: Clock,
        add_event: Callable[[str, str, str], None],
    ) -> None:
        """`add_event(robot, kind, detail)` enters it in the ledger."""
        self._channel, self._stops, self._view, self._clock, self._add_event = channel, stops, view, clock, add_event
        self._without_ns: dict[str, int] = {}
        """since when a robot that is there has not been heard by the way of stops"""
        self.dispatcher: Dispatcher
        """set before the first command comes"""

    @property
    def stop_port(self) -> int:
        """Where stops have their own way, 0: they have none."""
        return self._stops.port if self._stops is not None else 0

    def send(self, peer: str, message: Message) -> bool:
        """Queue `message` for `peer`; whether it may have left. Raises `RejectedError` for a start after a stop."""
        if not isinstance(message, OperatorCommand) or message.kind not in _APART:
            return self._channel.send(peer, message)
        if message.kind == OperatorCommandKind.start:
            message = msgspec.structs.replace(message, stop=self._stops_of(peer).last)
        if self._stops is None:
            return self._channel.send(peer, message)
        if message.kind != OperatorCommandKind.estop:
            # By one way, so that none of them comes before a stop that it was given after.
            return self._stops.send(message) or self._channel.send(peer, message)
        if self._stops.is_answered(message):
            return True
        apart = self._stops.send(message)
        # By both ways only if need be: the copy may be late and come after the release.
        return self._stops.is_fresh(message) or self._channel.send(peer, message) or apart

    def show(self, robot: str, state: StopState) -> None:
        """A robot's status says who stops it."""
        if self._stops is None:
            return
        self._stops.show(robot, state)
        now_ns = self._clock.now_ns()
        if self._stops.is_up(robot):
            self._without_ns.pop(robot, None)
        elif now_ns - self._without_ns.setdefault(robot, now_ns) > _CONNECTS_NS:
            self._without_ns[robot] = now_ns + _REMIND_NS
            text = (
                "has no connection for stops, which so wait behind everything else. Let it reach port "
                f"{self._stops.port} of the gateway, too."
            )
            log.warning("robot '%s' %s", robot, text)
            self._view.add_event("error", text, robot)

    def poll(self) -> None:
        """Note what has gone out by the way of stops, then forward what people do at the page. To be called before, and
        again between, anything that may take its time."""
        self._poll_stops()
        for command in self._view.pop_commands():
            self._forward_page_command(command)

    def _poll_stops(self) -> None:
        if self._stops is None:
            return
        for peer, command in self._stops.pop_given():
            if peer:
                self.forward_teleop_command(peer, command)
            else:
                self._forward_page_command(command)
        # A stop that is released at once may be in no status: then it must not be sent again.
        for robot, state in self._stops.pop_answers():
            self.dispatcher.operators.show_stops(robot, state, self._clock.now_ns())
        for command in self._stops.pop_undelivered():
            self._channel.send(command.robot, command)

    def forward_teleop_command(self, peer: str, command: OperatorCommand) -> None:
        """A teleoperator drives a robot it holds; anybody may stop one."""
        stop = command.kind == OperatorCommandKind.estop
        # It comes by both ways.
        noted = stop and command.stop in self._stops_of(command.robot).stops
        try:
            self.dispatcher.clients.handle_command(peer, command, self._clock.now_ns())
        except RejectedError as error:
            if self._stops is not None and stop and not self._known(command.robot):
                self._stops.forget(command)
            self._channel.send(peer, Response(0, refused=str(error)))
            return
        if command.kind != OperatorCommandKind.command and not noted:
            self._add_event(command.robot, command.kind, f"by {peer}")

    def _forward_page_command(self, command: OperatorCommand) -> None:
        """Send a command of the page to its robot, if it may go."""
        stop = command.kind == OperatorCommandKind.estop
        # Nothing that may fail or take its time comes before a stop.
        sent = stop and self.send(command.robot, command)
        try:
            self._check_fresh(command)
            if (stamped := self.dispatcher.handle_page_command(command, self._clock.now_ns())) is None:
                return
            sent = sent if stop else self.send(command.robot, stamped)
        except RejectedError as error:
            self._view.reject_command(command, str(error))
            return
        if command.kind != OperatorCommandKind.command:
            note = "" if sent else " (the robot cannot be reached)"
            self._add_event(command.robot, command.kind, f"by {command.operator}{note}")
            if not sent:
                later = "; it is sent again as soon as the robot is back" if stop else ""
                self._view.add_event("error", f"{command.kind} did not reach the robot{later}", command.robot)

    def _check_fresh(self, command: OperatorCommand) -> None:
        if command.kind == OperatorCommandKind.start and command.captured_ns:
            late_s = (self._clock.now_ns() - command.captured_ns) / 1e9
            if late_s > START_FRESH_S:
                raise RejectedError(
                    f"start: it came {late_s:.1f} s after it was made, so '{command.robot}' was not started. Look "
                    "whether all is clear, and start it again."
                )

    def _stops_of(self, robot: str) -> StopState:
        return self.dispatcher.operators.stop_states().get(robot, StopState())

    def _known(self, robot: str) -> bool:
        return robot in self.dispatcher.operators.stop_states()
