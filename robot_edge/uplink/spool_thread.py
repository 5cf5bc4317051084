"""The thread that waits for the spool's disk, so that the uplink's loop does not."""

from __future__ import annotations

import logging
from functools import partial

from robot_edge.uplink.spool import Dropped, Spool
from wire.clock import Clock
from wire.errors import StorageError
from wire.task_thread import Task, TaskQueue

log = logging.getLogger(__name__)

_REPORT_NS = 10_000_000_000
"""between two words on what was dropped"""
_FORGET_NS = 1_000_000_000
"""so long at most what was acknowledged waits to be forgotten together with something that is written"""


class SpoolThread(TaskQueue):
    """The only one that reads and writes the spool once it is started. Whoever submits tasks bounds what waits: the
    recorder has one at a time, the sender as many as its window has room for, and here are one of each kind."""

    def __init__(self, name: str, spool: Spool, clock: Clock) -> None:
        """`name`: the robot's."""
        super().__init__("spool")
        self._robot, self._spool, self._clock = name, spool, clock
        self._acknowledged: list[str] = []
        self._forgetting = False
        self._forget_ns = 0
        self.is_draining = False
        """nothing more will be written"""
        self._reported = spool.reported
        """what people were told of what was dropped, also when that is not noted yet"""
        self._report_ns = 0

    def forget(self, ids: tuple[str, ...]) -> None:
        """Drop what is acknowledged; what a full disk does not let go of stays until there is room again."""
        if not self._acknowledged:
            self._forget_ns = self._clock.now_ns() + _FORGET_NS
        self._acknowledged += ids

    def report_dropped(self) -> str:
        """What to tell people of what there was no room for, '' for nothing: all of it in the end, and not more often
        than can be read."""
        dropped, now_ns = self._spool.dropped, self._clock.now_ns()
        if dropped == self._reported or now_ns < self._report_ns:
            return ""
        news = Dropped(*(now - then for now, then in zip(dropped, self._reported, strict=True)))
        self._reported, self._report_ns = dropped, now_ns + _REPORT_NS
        self.submit(Task(partial(self._spool.note_reported, dropped), failed=self._log_fault, wakes=False))
        return (
            f"the spool had no room (quota {self._spool.max_bytes / 1e9:.3g} GB): dropped {news.episodes} episodes of "
            f"the policy alone, {news.steps} steps, {news.bytes / 1e6:.1f} MB; {dropped.steps} steps in all. Give it "
            "more with --spool-max, or mend the connection."
        )

    def poll(self) -> None:
        if self._acknowledged and not self._forgetting and self._may_forget():
            ids, self._acknowledged, self._forgetting = tuple(self._acknowledged), [], True
            forget = partial(self._spool.forget, ids)
            self.submit(Task(forget, self._on_forgotten, partial(self._on_not_forgotten, ids), wakes=False))
        super().poll()

    def _may_forget(self) -> bool:
        """Whether the thread is awake anyway: to wake it costs more than a step of a robot."""
        awake = self.inline or bool(self._tasks) or self.busy_s > 0
        return awake or self.is_draining or self._spool.is_full or self._clock.now_ns() >= self._forget_ns

    def _on_forgotten(self, _: None) -> None:
        self._forgetting = False

    def _on_not_forgotten(self, ids: tuple[str, ...], error: Exception) -> None:
        self._forgetting = False
        self._acknowledged = [*ids, *self._acknowledged]
        self._log_fault(error)

    def _log_fault(self, error: Exception) -> None:
        if not isinstance(error, StorageError):
            raise error
        log.error("robot '%s': %s", self._robot, error)
