"""What the control loop was told from outside: its job, people's commands, what the other processes can do."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass

from robot_edge.control.operator_override import OperatorOverride
from wire.messages import Message
from wire.messages.gateway import Job, Nack, OperatorCommand, Stop, VersionActivated
from wire.messages.local import EpisodeLost, OperatorState, RequestPreviews
from wire.types import (
    EPISODE_COMMANDS,
    Episode,
    EpisodeOutcome,
    EpisodeSource,
    OperatorCommandKind,
    PolicyCapabilities,
)

log = logging.getLogger(__name__)

_REMEMBERED = 32
"""jobs whose progress is known when they come back"""
_UNCOUNTED = (EpisodeOutcome.aborted, EpisodeOutcome.discarded)


@dataclass(slots=True)
class JobProgress:
    """How far this robot is with a job."""

    first_seed: int
    begun: int = 0
    """episodes, which is also how many seeds and turns at a task were used up"""
    finished: int = 0
    """episodes, those left out that were aborted, discarded, or are not judged and should have been measured"""


class CommandInbox:
    """Takes in messages between two ticks and remembers what they come to."""

    def __init__(self, name: str, override: OperatorOverride) -> None:
        self._name = name
        self._override = override
        self.job: Job | None = None
        """what the robot works on; it changes between two episodes only"""
        self.version = 0
        """policy version that inference runs, 0 when none"""
        self.trained = PolicyCapabilities()
        """what that version was trained for"""
        self.storage_ok = True
        self.stop_orders: deque[OperatorCommand] = deque()
        """what people said of stopping and starting, to be passed on to the robot in this order"""
        self.stopping = False
        self.previews_wanted = False
        """somebody looks at larger pictures"""
        self.interventions = 0
        """takeovers by people"""
        self.lost_episode = ""
        """id of the newest one of which the uplink has not all steps: it does not count"""
        self._newest = ("", "", False)
        """id of the newest episode that ended, of its job, and whether it counts for it"""
        self._episode_commands: list[OperatorCommandKind] = []
        self._next_job: Job | None = None
        self._progress: OrderedDict[str, JobProgress] = OrderedDict()

    @property
    def finished(self) -> int:
        """Episodes of the job that were finished here."""
        return self._of_job().finished if self.job is not None else 0

    @property
    def resting(self) -> bool:
        """Whether there is nothing to begin: no job, one without tasks, or one whose episodes are done."""
        job = self.job
        return job is None or not job.tasks or 0 < job.episodes <= self._of_job().finished

    @property
    def wants_other_version(self) -> bool:
        """Whether the job is to be done by another policy version than the one that acts."""
        return self.job is not None and self.job.version > 0 and self.job.version != self.version

    @property
    def evaluating(self) -> bool:
        """Whether the policy is being measured: nobody helps it, and nobody learns from it."""
        return self.job is not None and self.job.kind == "evaluation"

    def adopt_job(self) -> None:
        """No episode runs: the newest job holds from now on."""
        if self._next_job is None:
            return
        self.job, self._next_job = self._next_job, None
        progress = self._of_job()
        if progress.first_seed != self.job.first_seed:
            # Another stretch of the job's seeds, with its own number of episodes.
            self._progress[self.job.id] = JobProgress(self.job.first_seed)
            self._newest = (self._newest[0], "", False)

    def next_episode(self) -> tuple[str, int]:
        """(task, seed) of the job's next episode; the same again until `on_episode_begun`."""
        assert self.job is not None
        count = self._of_job().begun
        return self.job.tasks[count % len(self.job.tasks)], self.job.first_seed + count

    def on_episode_begun(self) -> None:
        """The task and seed of the next episode are used up."""
        self._of_job().begun += 1

    def count_episode(self, episode: Episode, outcome: str) -> None:
        """An episode of the job is over, or somebody has said now how it ended."""
        if self._newest[0] != episode.id:
            self._newest = (episode.id, self.job.id if self.job is not None else "", False)
        measured = outcome != EpisodeOutcome.unjudged or episode.source != EpisodeSource.evaluation
        self._count_newest(measured and outcome not in _UNCOUNTED and episode.id != self.lost_episode)

    def repeat_episode(self, episode: Episode) -> None:
        """The task and seed of the newest episode come again, when its job goes on."""
        progress = self._progress.get(self._newest[1])
        if progress is not None and progress.first_seed + progress.begun - 1 == episode.seed:
            progress.begun -= 1

    def pop_episode_commands(self) -> list[OperatorCommandKind]:
        """What people said of episodes since the last call, in this order."""
        commands, self._episode_commands = self._episode_commands, []
        return commands

    def handle_message(self, message: Message) -> None:
        match message:
            case Job():
                self._next_job = message
            case VersionActivated():
                self.version, self.trained = message.number, message.trained
            case Nack():
                self.storage_ok = not message.reason
            case OperatorCommand(kind="estop" | "release_estop" | "start"):
                self.stop_orders.append(message)
            case OperatorCommand(kind=kind) if kind in EPISODE_COMMANDS:
                if self._override.is_timely(message):
                    self._episode_commands.append(OperatorCommandKind(kind))
            case OperatorCommand():
                self.interventions += self._override.handle_command(message)
            case OperatorState():
                self._override.restore(message)
            case EpisodeLost(episode_id=episode_id):
                self._on_episode_lost(episode_id)
            case RequestPreviews(wanted=wanted):
                self.previews_wanted = wanted
            case Stop():
                self.stopping = True
            case _:
                log.warning("robot '%s': control does not understand %s.", self._name, type(message).__name__)

    def _on_episode_lost(self, episode_id: str) -> None:
        self.lost_episode = episode_id
        if episode_id == self._newest[0]:
            self._count_newest(False)

    def _count_newest(self, counts: bool) -> None:
        episode, job, counted = self._newest
        if job in self._progress:
            self._progress[job].finished += counts - counted
            self._newest = (episode, job, counts)

    def _of_job(self) -> JobProgress:
        """A job that was interrupted by another goes on where it was."""
        assert self.job is not None
        known = self._progress.setdefault(self.job.id, JobProgress(self.job.first_seed))
        self._progress.move_to_end(self.job.id)
        if len(self._progress) > _REMEMBERED:
            self._progress.popitem(last=False)
        return known
