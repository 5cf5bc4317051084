"""Takes segments of a site's robots, and brings them to the gateway when the line allows it.

A robot's segment is acknowledged when it is on this relay's disk. What the relay says of it is believed by nobody: the
robot sealed it for the gateway, which acknowledges it to the relay in turn.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial

from robot_edge.relay.upload_rows import PutResult
from robot_edge.relay.upload_spool import UploadSpool
from robot_edge.uplink.segment_sender import SegmentSender
from wire.clock import Clock
from wire.errors import StorageError
from wire.messages.gateway import (
    Ack,
    FetchPictures,
    HelloAck,
    Nack,
    PicturesGone,
    Rejection,
    SealedSegment,
)
from wire.task_thread import Task, TaskQueue
from wire.transport.channel import Channel, ServerChannel

log = logging.getLogger(__name__)

CREDIT_BYTES = 4 * 1024 * 1024
"""what one robot may have under way here"""
_ARRIVED_BYTES = 128 * 1024 * 1024
"""what waits for the disk, at most"""
_TOGETHER_BYTES = 16 * 1024 * 1024
"""what is written with one flush, at most, unless it is a single one"""
_LOOK_NS = 5_000_000_000
"""between two looks at a disk that was full"""
_SLOW_S = 5.0
"""a disk that takes longer has stopped: robots send to the gateway meanwhile"""


class UploadRelay:
    """`poll` is called in a loop. Disk and database are waited for in `disk`, once that is started."""

    def __init__(
        self, spool: UploadSpool, robots: ServerChannel, gateway: Channel, clock: Clock, refused: Counter[str]
    ) -> None:
        """`refused`: what came and is nothing, by reason."""
        self.spool = spool
        self.disk = TaskQueue("relay spool")
        self.sender = SegmentSender(spool, self.disk, gateway, clock)
        self.taken = self.sent = 0
        """segments, since this process began"""
        self.fault = ""
        """why nothing can be stored now, '' when it can"""
        self._robots, self._gateway, self._clock, self._refused = robots, gateway, clock, refused
        self._arrived: list[tuple[str, SealedSegment, int]] = []
        """from whom, and how large: they wait for the disk"""
        self._arrived_bytes = 0
        self._writing = False
        self._look_ns = 0

    @property
    def credit_bytes(self) -> int:
        """What a robot may have under way here; 0: it had better send to the gateway."""
        stuck = self.fault or self.spool.is_full or self.disk.busy_s > _SLOW_S
        return 0 if stuck else CREDIT_BYTES

    def on_segment(self, robot: str, message: SealedSegment) -> None:
        """A robot sends one."""
        if message.robot != robot:
            self._refuse(robot, f"robot: '{robot}' cannot send a segment of '{message.robot[:64]}'.")
            return
        size = len(message.body) + sum(len(one) for pictures in message.pictures.values() for one in pictures)
        if self.fault or self._arrived_bytes + size > _ARRIVED_BYTES:
            self._robots.send(robot, Nack(self.fault or "the relay has more waiting than it keeps in memory."))
            return
        self._arrived.append((robot, message, size))
        self._arrived_bytes += size

    def on_answer(self, message: Ack) -> None:
        """The gateway says what it has."""
        done = (*message.segments, *message.quarantined)
        if message.quarantined:
            log.error("the gateway put aside %s: not valid, see its log.", message.quarantined)
        if message.refused:
            log.error("the gateway does not believe %s; they are kept here while there is room.", message.refused)
            self._refused["refused_by_gateway"] += len(message.refused)
            self._submit(partial(self.spool.set_aside, message.refused))
        if done:
            self.sent += len(done)
            self._submit(partial(self.spool.forget, done))
        self.sender.on_answer((*done, *message.refused))
        self.sender.on_credit(message.credit_bytes)

    def on_nack(self, message: Nack) -> None:
        self.sender.on_refused()
        log.warning("the gateway cannot store now: %s", message.reason)

    def on_alive(self, message: HelloAck, connected: bool) -> None:
        """The gateway is there; `connected`: it has just let this relay in."""
        if connected:
            self.sender.on_connected()
        self.sender.on_credit(message.credit_bytes)

    def on_request(self, message: FetchPictures) -> None:
        """The gateway wants what is held back."""
        self.disk.submit(Task(partial(self.spool.ask, message.segments), self._on_asked, self._log_fault))

    def poll(self, may_send: bool) -> None:
        """`may_send`: whether the gateway is heard."""
        if self.fault and self._clock.now_ns() >= self._look_ns:
            self._look_ns = self._clock.now_ns() + _LOOK_NS
            self.disk.submit(Task(self.spool.has_room_again, self._on_looked))
        if self._arrived and not self._writing:
            self._write()
        self.disk.poll()
        if may_send:
            self.sender.poll()
        else:
            self.sender.pause()

    def close(self, timeout_s: float) -> None:
        if self.disk.close(timeout_s):
            self.spool.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Have what has arrived written together."""
        size, count = 0, 0
        for _, _, more in self._arrived:
            if count and size + more > _TOGETHER_BYTES:
                break
            size, count = size + more, count + 1
        some, self._arrived = self._arrived[:count], self._arrived[count:]
        self._arrived_bytes -= size
        self._writing = True
        whose = {message.id: robot for robot, message, _ in some}
        run = partial(self.spool.put_all, [message for _, message, _ in some])
        self.disk.submit(Task(run, partial(self._on_written, whose), partial(self._on_not_written, whose)))

    def _on_written(self, whose: dict[str, str], result: PutResult) -> None:
        self._writing = False
        self.taken += len(result.stored)
        for segment_id in result.stored:
            self._robots.send(whose[segment_id], Ack((segment_id,), credit_bytes=self.credit_bytes))
        for segment_id, reason in result.invalid.items():
            self._refuse(whose[segment_id], reason)

    def _on_not_written(self, whose: dict[str, str], error: Exception) -> None:
        self._writing = False
        self._log_fault(error)
        self.fault, self._look_ns = str(error), self._clock.now_ns() + _LOOK_NS
        for robot in set(whose.values()):
            self._robots.send(robot, Nack(self.fault))

    def _on_asked(self, gone: tuple[str, ...]) -> None:
        if gone:
            self._gateway.send(PicturesGone(gone))

    def _on_looked(self, has_room: bool) -> None:
        if has_room and not self.spool.is_full:
            log.info("there is room again: segments of robots are taken.")
            self.fault = ""

    def _refuse(self, robot: str, reason: str) -> None:
        self._refused["invalid_segment"] += 1
        log.error("a segment of '%s' is not taken: %s", robot, reason)
        self._robots.send(robot, Rejection(reason))

    def _submit(self, run: partial[None]) -> None:
        self.disk.submit(Task(run, failed=self._log_fault, wakes=False))

    def _log_fault(self, error: Exception) -> None:
        if not isinstance(error, StorageError):
            raise error
        log.error("%s", error)
