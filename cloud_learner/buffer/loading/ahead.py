"""Makes batches of orders in turn: in the thread that asks for them, or in one of its own, some batches ahead."""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Protocol

from cloud_learner.buffer.loading.batch_builder import BatchBuilder
from cloud_learner.buffer.loading.decoding.orders import Order
from cloud_learner.buffer.loading.windows import Batch, BatchSlot

_END_S = 30.0


class Maker(Protocol):
    """Batches in the order in which orders were put."""

    def put(self, order: Order) -> None: ...

    def take(self) -> Batch | None:
        """The batch of the oldest order not taken; what was taken before may be overwritten.

        None if nothing of it can be read. After an error the same order is tried again by the next call.
        """
        ...

    def close(self) -> None: ...


class Inline:
    """Makes a batch when it is asked for."""

    def __init__(self, assembly: BatchBuilder, pin: bool) -> None:
        self._assembly = assembly
        self._slot = BatchSlot(pin)
        self._orders: deque[Order] = deque()

    def put(self, order: Order) -> None:
        self._orders.append(order)

    def take(self) -> Batch | None:
        batch = self._assembly.make(self._orders[0], self._slot)
        self._orders.popleft()
        return batch

    def close(self) -> None:
        self._orders.clear()


class Ahead:
    """Makes up to `depth` batches before they are asked for, in a thread."""

    def __init__(self, assembly: BatchBuilder, depth: int, pin: bool) -> None:
        self._assembly = assembly
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._slots: queue.SimpleQueue[BatchSlot | None] = queue.SimpleQueue()
        for _ in range(depth):
            self._slots.put(BatchSlot(pin))
        self._made: queue.SimpleQueue[tuple[Batch | None, BatchSlot] | BaseException] = queue.SimpleQueue()
        self._again: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._failed = False
        # one more than `depth`: what was taken stays whole until the next is asked for
        self._taken = BatchSlot(pin)
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def put(self, order: Order) -> None:
        self._orders.put(order)

    def take(self) -> Batch | None:
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
        self._again.put(False)
        self._slots.put(None)
        self._orders.put(None)
        self._thread.join(_END_S)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None and (slot := self._slots.get()) is not None:
            while True:
                try:
                    self._made.put((self._assembly.make(order, slot), slot))
                    break
                except BaseException as error:  # noqa: BLE001 - it is raised where the batch is asked for
                    self._made.put(error)
                    if not self._again.get():
                        return
