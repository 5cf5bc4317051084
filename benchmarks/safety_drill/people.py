"""The people of the drill: they take over, drive and hand back, and what must not move the robot arrives as well."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from benchmarks.safety_drill.plant import CALM, PERIOD_S, Plant
from robot_edge.operators.sticky_commands import StickyCommands
from wire.clock import Clock
from wire.messages.gateway import OperatorCommand


class People:
    """Whoever may drive drives backwards; what must not reach the robot would drive it forwards."""

    def __init__(
        self, rng: np.random.Generator, clock: Clock, plant: Plant, deliver: Callable[[OperatorCommand], object]
    ) -> None:
        self.driving = ""
        """who drives, '' when nobody does"""
        self.sticky = StickyCommands()
        """of the uplink"""
        self._rng, self._clock, self._plant, self._deliver = rng, clock, plant, deliver
        self._sent: list[OperatorCommand] = []
        """the newest takeover, and what came last after it"""
        self._before: tuple[str, int] | None = None
        """who drove before, by which lease"""
        self._lease = self._newest = self._sequence = self._scene = 0
        self._device = 0.0
        """the joint of what the person holds in the hand"""

    def on_new_control(self) -> None:
        """A control process has begun, and commands have come to nobody for a while."""
        if self.driving and self._plant.truth.holder != "nobody":
            self._plant.truth.holder, self._plant.truth.released = "human", True

    def take_over(self) -> None:
        """By a newer lease, or again by the one that was handed back."""
        again = self._before is not None and not self.driving and self._rng.random() < 0.3
        if again and self._before is not None:
            self.driving, self._lease = self._before
        else:
            if self.driving:
                self._before = self.driving, self._lease
            self.driving = str(self._rng.choice(["web-1", "web-2"]))
            self._newest += 1
            self._lease = self._newest
        self._say("take_over")
        self._sit_down()
        self._plant.truth.holder, self._plant.truth.released, self._plant.truth.gently = "human", True, 0

    def _sit_down(self) -> None:
        """At a device that is anywhere near."""
        self._scene = self._plant.scenes
        self._device = float(np.clip(self._plant.state[0] + self._rng.uniform(-20, 20), -160, 160))

    def drive(self) -> None:
        """A burst of commands, now and then of nobody who drives, or a released key."""
        if not self.driving:
            self._send(self._command("web-9", self._lease, 1.0))
            return
        if self._scene != self._plant.scenes:
            self._sit_down()
        if self._rng.random() < 0.15:
            self._send(self._command(self.driving, self._lease, None))
            self._plant.truth.released = True
        else:
            for _ in range(int(self._rng.choice([1, 3, 30]))):
                speed = -float(self._rng.uniform(0.2, 1.0)) * (self._plant.state[1] > -1.2)
                self._device += float(self._rng.uniform(-0.01, 0.01))
                self._send(self._command(self.driving, self._lease, speed))
            self._plant.truth.released = False
        self._plant.truth.holder, self._plant.truth.commanded_ns = "human", self._clock.now_ns()

    def intrude(self) -> None:
        """What must not move the robot arrives: of an older lease, of somebody else, from the past or the future, or a
        second time."""
        now_ns, lease = self._clock.now_ns(), self._lease
        kind = str(self._rng.choice(["old lease", "other", "stalled", "future", "again", "again"]))
        if kind == "again":
            self._say_again()
            return
        if not self.driving:
            return
        for n in range(int(self._rng.choice([2, 30]))):
            if kind == "old lease":
                for one in ("take_over", "command"):
                    rogue = self._command("web-1" if n % 2 else "web-2", lease - 1, 1.0)
                    self._send(msgspec.structs.replace(rogue, kind=one))
            elif kind == "other":
                self._send(self._command("web-3", lease, 1.0))
            else:
                made_ns = now_ns + int(2e8 if kind == "future" else -3e8 + n * 1e6)
                self._send(msgspec.structs.replace(self._command(self.driving, lease, 1.0), captured_ns=made_ns))

    def _say_again(self) -> None:
        """Some of what was said, so that it is not what was said last that is said last again."""
        for command in self._sent[: int(self._rng.integers(len(self._sent) + 1))]:
            self._send(command)

    def hand_back(self) -> None:
        if self.driving:
            self._say("hand_back")
            if self._rng.random() < 0.2:
                self._say_again()
            self._before = self.driving, self._lease
            self._plant.truth.gently = 3 if self._plant.blends else 0
        self.driving, self._plant.truth.holder = "", "policy"

    def drop(self) -> None:
        if self.driving:
            self._say("drop_link")
            self._plant.truth.holder = "nobody"

    def _say(self, kind: str) -> None:
        self._send(msgspec.structs.replace(self._command(self.driving, self._lease, None), kind=kind))

    def _command(self, operator: str, lease: int, speed: float | None) -> OperatorCommand:
        """`speed`: share of a calm one; None: nothing is pressed."""
        self._sequence += 1
        action = () if speed is None else (self._device, speed * CALM[1] * PERIOD_S, 0.3 * speed)
        made_ns = self._clock.now_ns()
        return OperatorCommand("drill", "command", action, self._sequence, operator, captured_ns=made_ns, lease=lease)

    def _send(self, command: OperatorCommand) -> None:
        self.sticky.remember(command)
        self._deliver(command)
        if command.kind == "take_over":
            self._sent = []
        self._sent = [*self._sent[:1], *[*self._sent[1:], command][-40:]]
