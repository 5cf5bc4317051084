"""The checkpoints of one training run: a copy of its state is written in a thread while gradient steps go on.

One at a time: `begin`, then `pop_result` once `has_result`. Without `start` it is written by whoever asks.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.checkpoints import checkpoint
from cloud_learner.training.embodiment_mix import EmbodimentMix
from cloud_learner.training.learner import Learner
from wire.errors import InvalidDataError, StorageError
from wire.task_thread import Task, TaskQueue

log = logging.getLogger(__name__)
_WAIT_S = 0.01


class RunCheckpoints:
    """Of a learner and of what its batches come from. Apart from the tasks all is for the trainer's thread."""

    def __init__(
        self,
        directory: Path,
        learner: Learner,
        source: ReplayDataset | EmbodimentMix,
        ledger: Ledger,
        kept: int = checkpoint.KEPT,
    ) -> None:
        """kept: so many of the newest stay, and that of the version that `ledger` knows the best held-out success of"""
        self.there = False
        """whether this run can be resumed"""
        self.busy = False
        """whether one is being written, or was and its result is still here"""
        self.directory, self._kept = directory, kept
        self._learner, self._source, self._ledger = learner, source, ledger
        self._tasks = TaskQueue("checkpoints")
        self._ended = False
        self._error: Exception | None = None
        self._success: dict[int, float] = {}

    def start(self) -> None:
        """Write in a thread from now on."""
        self._tasks.start()

    def close(self, timeout_s: float = 60.0) -> None:
        """End the thread, after what it is about unless that takes longer: the checkpoint before is then the newest."""
        if self._tasks.inline:
            self._tasks.poll()
        if not self._tasks.close(timeout_s):
            log.warning("the checkpoint that was being written is given up.")

    def resume(self) -> dict[str, Any] | None:
        """Go on from the newest one; its `meta`, None when there is none.

        Sampling begins anew where it cannot go on: the weights are what matters, and it costs nothing but the exact
        order of batches. Raises `PolicyError` for a checkpoint of another network, and as `checkpoint.load_newest`
        does.
        """
        found = self._load()
        if found is None:
            return None
        self._learner.restore(found.state)
        self.there = True
        try:
            if not self._source.restore(found.sampling):
                log.info("episodes were forgotten since the checkpoint: sampling begins a new pass.")
        except InvalidDataError as error:
            log.warning("sampling begins anew: %s", error)
        return found.meta

    def go_back(self) -> None:
        """Take the learner back to the newest one, and whoever joined since out of a mix; sampling goes on, so other
        batches come. Raises as `resume` does."""
        self.wait()
        found = self._load()
        if found is None:
            raise StorageError(f"there is no checkpoint in {self.directory} to go back to.")
        self._learner.restore(found.state)
        if isinstance(self._source, EmbodimentMix):
            self._source.go_back(found.sampling)

    def begin(self, meta: dict[str, Any]) -> None:
        """Copy the state and have it written with `meta`, which is JSON, once the one before is written. Of several
        ranks all do so at once."""
        self.wait()
        self.busy, self._ended, self._error, group = True, False, None, self._learner.group
        state, sampling = self._learner.state(), self._source.state()

        def write() -> None:
            success = self._held_out_success() if group.rank == 0 else {}
            checkpoint.save(self.directory, state, meta, sampling, kept=self._kept, success=success, group=group)

        self._tasks.submit(Task(write, lambda _: self._end(None), self._end))

    @property
    def has_result(self) -> bool:
        self._tasks.poll()
        return self.busy and self._ended

    def pop_result(self) -> None:
        """Raises `StorageError` if what was begun last could not be written; the earlier ones are then untouched."""
        error, self._error, self.busy, self._ended = self._error, None, False, False
        if error is not None:
            raise error
        self.there = True

    def wait(self) -> None:
        """Until what was begun has its result."""
        while self.busy and not self.has_result:
            time.sleep(_WAIT_S)

    def _load(self) -> checkpoint.Checkpoint | None:
        learner, group = self._learner, self._learner.group
        like = learner.empty_shards if group.world > 1 else None
        return checkpoint.load_newest(self.directory, like, group.rank)

    def _end(self, error: Exception | None) -> None:
        self._ended, self._error = True, error

    def _held_out_success(self) -> dict[int, float]:
        """By version, of those that an evaluator measured."""
        # a database that is away keeps no checkpoint back: what was known before is good enough
        with contextlib.suppress(StorageError):
            found = self._ledger.evaluations()
            self._success = {one.number: sum(one.success.values()) / len(one.success) for one in found if one.success}
        return self._success
