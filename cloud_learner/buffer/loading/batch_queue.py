"""Batches of plans in turn: made when they are asked for, or some ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from cloud_learner.buffer.loading.loader import LoadPlan
from cloud_learner.buffer.loading.windows import Batch, BatchSlot

_END_S = 30.0


class BatchQueue:
    """Batches in the order in which plans were put; up to `depth` are made before they are asked for, in a thread."""

    def __init__(self, make: Callable[[LoadPlan, BatchSlot], Batch | None], depth: int) -> None:
        self._make, self._depth = make, depth
        self._plans: deque[LoadPlan] = deque()
        self._waiting: queue.SimpleQueue[LoadPlan | None] = queue.SimpleQueue()
        self._slots: queue.SimpleQueue[BatchSlot | None] = queue.SimpleQueue()
        for _ in range(depth):
            self._slots.put(BatchSlot())
        self._made: queue.SimpleQueue[tuple[Batch | None, BatchSlot] | BaseException] = queue.SimpleQueue()
        self._again: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._failed = False
        # one more than `depth`: what was taken stays whole until the next is asked for
        self._taken = BatchSlot()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        if depth:
            self._thread.start()

    def put(self, plan: LoadPlan) -> None:
        """The next one."""
        (self._waiting.put if self._depth else self._plans.append)(plan)

    def take(self) -> Batch | None:
        """The batch of the oldest plan not taken; what was taken before may be overwritten.

        None if nothing of it can be read. After an error the same plan is tried again by the next call.
        """
        if not self._depth:
            batch = self._make(self._plans[0], self._taken)
            self._plans.popleft()
            return batch
        if self._failed:
            self._failed = False
            self._again.put(True)
        made = self._made.get()
        if isinstance(made, BaseException):
            self._failed = True
            raise made
        batch, slot = made
        self._slots.put(self._taken)
        self._taken = slot
        return batch

    def close(self) -> None:
        """End the thread."""
        self._again.put(False)
        self._slots.put(None)
        self._waiting.put(None)
        if self._depth:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while (plan := self._waiting.get()) is not None and (slot := self._slots.get()) is not None:
            while True:
                try:
                    self._made.put((self._make(plan, slot), slot))
                    break
                except BaseException as error:  # noqa: BLE001 - it is raised where the batch is asked for
                    self._made.put(error)
                    if not self._again.get():
                        return
