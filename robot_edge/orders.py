"""What the control loop was told by the outside: its job, people's wishes, what the other processes can do."""

from __future__ import annotations

import logging

from robot_edge.human import Human
from wire.messages import Applied, Hello, Job, Message, Nack, Operator, Stop
from wire.types import Trained

log = logging.getLogger(__name__)


class Orders:
    """Hears messages between two ticks and remembers what they come to."""

    def __init__(self, name: str, human: Human) -> None:
        self._name = name
        self.human = human
        self.job: Job | None = None
        self.version = 0
        """policy version that inference runs, 0 when none"""
        self.trained = Trained()
        """what that version was trained for"""
        self.storage_ok = True
        self.estop = False
        self.stopping = False
        self.interventions = 0
        """takeovers by people"""
        self.new_recorder = False
        """the uplink is another one than before: what it had of the running episode is gone"""
        self._next = 0

    def next_episode(self) -> tuple[str, int]:
        """(task, seed) of the job's next episode."""
        assert self.job is not None
        task, seed = self.job.tasks[self._next % len(self.job.tasks)], self.job.first_seed + self._next
        self._next += 1
        return task, seed

    def hear(self, message: Message) -> None:
        match message:
            case Job():
                if self.job is None or message.id != self.job.id:
                    self.job, self._next = message, 0
            case Applied():
                self.version, self.trained = message.number, message.trained
            case Nack():
                self.storage_ok = not message.reason
            case Operator(kind="estop"):
                self.estop = True
            case Operator(kind="release_estop"):
                self.estop = False
            case Operator():
                self.interventions += self.human.hear(message)
            case Hello(role="uplink"):
                self.new_recorder = True
            case Stop():
                self.stopping = True
            case _:
                log.warning("robot '%s': control does not understand %s.", self._name, type(message).__name__)
