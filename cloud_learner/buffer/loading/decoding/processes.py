"""Loads blocks in processes of their own; one that ends is replaced and what it was at is done again."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from cloud_learner.buffer.loading.decoding.block import Loaded, LoadJob
from cloud_learner.buffer.loading.decoding.loader import FreshSegments, LoaderStats, Taken, no_room, taken
from cloud_learner.buffer.loading.decoding.worker import Begin, LoadFailed, LoadTask, Ready, receive_answer, send
from cloud_learner.buffer.loading.frame_cache import FrameCache, Rows
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.location import BufferLocation
from wire import codec
from wire.errors import StorageError

log = logging.getLogger(__name__)
_AHEAD = 2
"""jobs a process holds at once, so that it need not wait for the next one"""
_TRIES = 3
_END_S = 5.0


class ProcessLoader:
    """`loader.Loader` over a number of processes. Its methods may be called in any thread."""

    def __init__(
        self, cache: FrameCache, place: BufferLocation, layout: Layout, workers: int, fresh: FreshSegments
    ) -> None:
        """Raises `ConfigError` where memory cannot be shared."""
        self._cache, self._fresh = cache, fresh
        self._begin = Begin(str(place.data), place.ledger, place.store, layout, cache.mappings())
        self.stats = LoaderStats()
        self._changed = threading.Condition()
        self._waiting: deque[LoadJob] = deque()
        """not given to a process yet, in order"""
        self._done: dict[int, tuple[LoadJob, Taken]] = {}
        self._failed: dict[int, tuple[LoadJob, str]] = {}
        self._tries: dict[int, int] = {}
        """by job, how many processes ended over it"""
        self._never_ready = 0
        self._broken = ""
        self._closing = False
        self._workers: list[_Worker] = []
        with self._changed:
            self._workers += [_Worker(self._begin, self._serve) for _ in range(workers)]

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes."""
        with self._changed:
            return tuple(worker.process.pid for worker in self._workers)

    def submit(self, job: LoadJob) -> None:
        with self._changed:
            self._waiting.append(job)
            self._hand_out()

    def take(self, number: int) -> Taken:
        with self._changed:
            while True:
                if number in self._done:
                    return self._done.pop(number)[1]
                if number in self._failed:
                    job, reason = self._failed.pop(number)
                    self._put_back([job])
                    self._hand_out()
                    raise StorageError(reason)
                if self._broken or self._closing:
                    raise StorageError(self._broken or "the loader was closed.")
                if not any(worker.jobs for worker in self._workers) and any(w.ready for w in self._workers):
                    self._make_room(number)
                self._changed.wait()

    def release(self, frames: Rows, other_bytes: int) -> None:
        with self._changed:
            self._cache.release(frames, other_bytes)
            self._hand_out()

    def close(self) -> None:
        """End the processes and wait for them."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
            workers = list(self._workers)
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.thread.join(_END_S)

    # --- all below with the lock held -----------------------------------------------------------------------------

    def _hand_out(self) -> None:
        while self._waiting and not self._closing:
            job = self._waiting[0]
            alone = job.number in self._tries
            able = [
                worker
                for worker in self._workers
                if worker.ready
                and len(worker.jobs) < (1 if alone else _AHEAD)
                and not any(number in self._tries for number in worker.jobs)
            ]
            if not able or (room := self._cache.reserve(job.room, job.other_bytes)) is None:
                return
            worker = min(able, key=lambda worker: len(worker.jobs))
            self._waiting.popleft()
            worker.jobs[job.number] = job, room
            given = self._fresh.get(
                [row for w in (*job.wanted, *job.follow) for row in (w.row, *w.before[:1], *w.after)]
            )
            self.stats.from_gateway += len(given)
            encoded = {row: codec.encode(segment) for row, segment in given.items()}
            worker.send(LoadTask(job, tuple(rows.tobytes() for rows in room), encoded))

    def _make_room(self, number: int) -> None:
        """Nothing is under way and the job still waits: later ones that were done earlier have to be done again."""
        self._hand_out()
        if any(worker.jobs for worker in self._workers):
            return
        later = sorted(n for n in self._done if n > number)
        if not later:
            raise no_room(self._waiting[0], self._cache)
        for job, done in (self._done.pop(n) for n in later):
            self._cache.release(done.frames, job.other_bytes)
            self._put_back([job])
        self._hand_out()

    def _put_back(self, jobs: list[LoadJob]) -> None:
        self._waiting = deque(sorted((*jobs, *self._waiting), key=lambda job: job.number))

    def _answer(self, worker: _Worker, answer: Ready | Loaded | LoadFailed) -> None:
        if isinstance(answer, Ready):
            worker.ready, self._never_ready = True, 0
            return
        if isinstance(answer, LoadFailed) and answer.job < 0:
            self._broken = answer.reason
            return
        job, room = worker.jobs.pop(answer.job)
        if isinstance(answer, LoadFailed):
            self._cache.release(room, job.other_bytes)
            self._failed[job.number] = job, answer.reason
        elif answer.short:
            self._cache.release(room, job.other_bytes)
            self._put_back([msgspec.structs.replace(job, room=answer.short)])
        else:
            self._tries.pop(job.number, None)
            self.stats.note(answer)
            self._done[job.number] = job, taken(self._cache, answer, room)

    def _lost(self, worker: _Worker) -> None:
        """A process ended by itself: do what it was at again, with another one."""
        code = worker.process.wait()
        self.stats.restarts += 1
        log.error("a loading process (%d) ended with code %d and is replaced.", worker.process.pid, code)
        for job, room in worker.jobs.values():
            self._tries[job.number] = self._tries.get(job.number, 0) + 1
            if self._tries[job.number] < _TRIES:
                self._cache.release(room, job.other_bytes)
                self._put_back([job])
                continue
            reason = f"{_TRIES} loading processes ended over it"
            left_out = Loaded(job.number, missing={w.row: reason for w in job.wanted})
            self.stats.note(left_out)
            self._done[job.number] = job, taken(self._cache, left_out, room)
        if not worker.ready:
            self._never_ready += 1
        if self._never_ready >= _TRIES and not self._broken:
            self._broken = (
                f"loading processes end with code {code} before they are ready; their errors stand above. "
                "Use workers=0 to load in this process."
            )
        number = self._workers.index(worker)
        if self._broken:
            del self._workers[number]
        else:
            self._workers[number] = _Worker(self._begin, self._serve)

    # --- one thread for each process ------------------------------------------------------------------------------

    def _serve(self, worker: _Worker) -> None:
        while (answer := receive_answer(worker.connection)) is not None:
            with self._changed:
                self._answer(worker, answer)
                self._hand_out()
                self._changed.notify_all()
        # it may have closed its socket only
        worker.process.kill()
        with self._changed:
            if not self._closing:
                self._lost(worker)
                self._hand_out()
            worker.connection.close()
            self._changed.notify_all()


class _Worker:
    """One process, its socket and the thread that listens to it."""

    def __init__(self, begin: Begin, serve: Callable[[_Worker], None]) -> None:
        self.jobs: dict[int, tuple[LoadJob, Rows]] = {}
        self.ready = False
        self.connection, other = socket.socketpair()
        with other:
            passed = (other.fileno(), *(mapping.descriptor for mapping in begin.frames))
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cloud_learner.buffer.loading.decoding.worker", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.thread = threading.Thread(target=serve, args=(self,), name="loading process", daemon=True)
        self.thread.start()
        self.send(begin)

    def send(self, message: msgspec.Struct) -> None:
        try:
            send(self.connection, message)
        except ConnectionError:
            # its thread sees the same and replaces it
            log.debug("a loading process ended before it got a message.")

    def end(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("a loading process had ended already.")
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
