"""A new version's weights are loaded beside the ones that act, so that nobody waits for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from policies.interface.policy import Policy
from robot_edge.runtime.rejection_log import not_taken
from wire.errors import FleetError
from wire.messages.local import LoadWeights

log = logging.getLogger(__name__)


class WeightSwapper:
    """The policy that acts, and the one that takes its place once all is ready.

    With a single policy object the weights are replaced in place, between two inferences.
    """

    def __init__(self, name: str, policy: Policy, spare: Policy | None, read: Callable[[str], bytes]) -> None:
        """`spare`: a second policy object like `policy`; then weights are read and loaded in a thread."""
        self._name = name
        self._spare = spare
        self._read = read
        self._thread = ThreadPoolExecutor(1, "weights") if spare is not None else None
        self._loading: tuple[LoadWeights, Future[float]] | None = None
        self._next: LoadWeights | None = None
        self._running: LoadWeights | None = None
        self.active = policy
        """the policy that acts"""
        self.waiting: LoadWeights | None = None
        """the version that is loaded in the spare and waits for `switch`"""
        self.refused = ""
        """why the newest weights were not taken, '' when they were"""
        self.load_s = 0.0
        """how long reading and loading the newest weights took"""

    def offer(self, message: LoadWeights) -> bool:
        """These weights are wanted; True when they are the ones that run already."""
        newest = self._next or (self._loading and self._loading[0]) or self.waiting or self._running
        if newest is None or newest.version != message.version:
            self._next = message
        return self._next is None and self._running is not None and self._running.version == message.version

    def turn(self, *, hurry: bool) -> bool:
        """Load what is wanted; True when `waiting` has just become ready or, in place, `active` has just changed.

        A version that waits is given up for a newer one only in a `hurry`.
        """
        if self._loading is not None and self._loading[1].done():
            (message, future), self._loading = self._loading, None
            if self._succeeded(message, future.result):
                self.waiting = message
                return True
        if self._next is None or self._loading is not None or (self.waiting is not None and not hurry):
            return False
        message, self._next = self._next, None
        if self._thread is None:
            if not self._succeeded(message, lambda: self._load(self.active, message)):
                return False
            self._running = message
            return True
        assert self._spare is not None
        self.waiting = None
        self._loading = message, self._thread.submit(self._load, self._spare, message)
        return False

    @property
    def loaded(self) -> Policy:
        """The policy that has the newest loaded weights: the waiting one, or the active one when none waits."""
        return self._spare if self.waiting is not None and self._spare is not None else self.active

    @property
    def running(self) -> LoadWeights | None:
        """What `active` has loaded, None when nothing."""
        return self._running

    def switch(self) -> None:
        """The waiting version acts from now on."""
        assert self._spare is not None
        self.active, self._spare = self._spare, self.active
        self._running, self.waiting = self.waiting, None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _load(self, policy: Policy, message: LoadWeights) -> float:
        began = time.perf_counter()
        policy.load(self._read(message.path), message.version.number)
        return time.perf_counter() - began

    def _succeeded(self, message: LoadWeights, result: Callable[[], float]) -> bool:
        try:
            self.load_s = result()
        except Exception as error:  # whatever a policy raises must not stop the one that runs
            known = isinstance(error, FleetError | OSError)
            self.refused = not_taken(message.version.number, str(error) if known else repr(error))
            stays = f"stays on version {self.active.version}" if self.active.version else "has no version yet"
            log.error("robot '%s' %s: %s", self._name, stays, self.refused, exc_info=not known)
            return False
        self.refused = ""
        return True
