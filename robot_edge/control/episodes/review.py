"""The newest episode while a person may still say how it ended."""

from __future__ import annotations

from robot_edge.control.command_inbox import CommandInbox
from robot_edge.control.episodes.tracker import StepRecorder
from wire.types import Episode, EpisodeOutcome


class EpisodeReview:
    """The recorder keeps the end of an episode open meanwhile; what was said last holds, also should control die."""

    def __init__(self, recorder: StepRecorder, inbox: CommandInbox) -> None:
        self.episode: Episode | None = None
        """None while none is open"""
        self.outcome = ""
        self._recorder, self._inbox = recorder, inbox

    @property
    def judged(self) -> bool:
        """Whether nothing has to be asked of its outcome."""
        return self.outcome != EpisodeOutcome.unjudged

    def open(self, episode: Episode, outcome: str) -> None:
        """It has ended, as `outcome` unless somebody says otherwise."""
        self.episode, self.outcome = episode, outcome

    def judge(self, outcome: EpisodeOutcome) -> None:
        """A person says how it ended. Nothing happens when none is open."""
        if self.episode is not None:
            self.outcome = outcome
            self._inbox.count_episode(self.episode, outcome)
            self._recorder.judge(self.episode, outcome, final=False)

    def close(self) -> None:
        """It stays what it is."""
        if self.episode is not None:
            self._recorder.judge(self.episode, self.outcome, final=True)
        self.episode, self.outcome = None, ""

    def check(self) -> None:
        """An episode that the recorder has lost some of is over, as it says."""
        if self.episode is not None and self.episode.id == self._inbox.lost_episode:
            self.episode, self.outcome = None, ""
