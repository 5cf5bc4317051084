"""New weights into a policy that acts: loaded beside it, looked at, and put in its place whole or not at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from policies.interface.policy import Policy
from robot_edge.inference.verified_load import load_verified
from robot_edge.runtime.rejection_log import not_taken
from wire.errors import CorruptDataError, FleetError, HalfLoadedError
from wire.messages.local import LoadWeights, SwapReverted
from wire.types import PolicyVersion

log = logging.getLogger(__name__)


class WeightSwapper:
    """The policy that acts, and the one that takes its place once all is ready.

    With a single policy object the weights are replaced in place, between two inferences.
    """

    def __init__(self, name: str, policy: Policy, standby: Policy | None) -> None:
        """`standby`: a second policy object like `policy`; then weights are read and loaded in a thread."""
        self._name = name
        self._standby = standby
        self._thread = ThreadPoolExecutor(1, "weights") if standby is not None else None
        self._loading: tuple[LoadWeights | None, Future[None]] | None = None
        """what, None when it is not wanted any more"""
        self._next: LoadWeights | None = None
        self.active = policy
        """the policy that acts"""
        self.running: LoadWeights | None = None
        """what it has loaded, None when nothing"""
        self.waiting: LoadWeights | None = None
        """the version that is loaded in the standby and waits for `switch`"""
        self.rejection = ""
        """why the newest weights were not taken, '' when they were"""
        self._unfit: PolicyVersion | None = None
        """what the policy refused last: it would again"""
        self._reverted: SwapReverted | None = None

    def submit(self, message: LoadWeights) -> bool:
        """These weights are wanted; True when they are the ones that run already.

        Of an older version: what is newer, and has not begun to act, does not any more.
        """
        if message.version == self._unfit:
            return False
        newest = self._next or (self._loading and self._loading[0]) or self.waiting or self.running
        if newest is not None and newest.version.number > message.version.number:
            self._next = self.waiting = None
            if self._loading is not None:
                self._loading = None, self._loading[1]
            newest = self.running
        if newest is None or newest.version != message.version:
            self._next = message
        return self._next is None and self.running is not None and self.running.version == message.version

    def poll(self, *, hurry: bool) -> bool:
        """Load what is wanted; True when `waiting` has just become ready or, in place, `active` has just changed.

        A version that waits is given up for a newer one only in a `hurry`.
        """
        if self._loading is not None and self._loading[1].done():
            (message, future), self._loading = self._loading, None
            if message is not None and self._succeeded(message, future.result):
                self.waiting = message
                return True
        if self._next is None or self._loading is not None or (self.waiting is not None and not hurry):
            return False
        message, self._next = self._next, None
        if self._thread is None:
            if not self._succeeded(message, lambda: self._load(self.active, message)):
                return False
            self.running = message
            return True
        assert self._standby is not None
        self.waiting = None
        self._loading = message, self._thread.submit(self._load, self._standby, message)
        return False

    @property
    def loaded(self) -> Policy:
        """The policy that has the newest loaded weights: the waiting one, or the active one when none waits."""
        return self._standby if self.waiting is not None and self._standby is not None else self.active

    def switch(self) -> None:
        """The waiting version acts from now on."""
        assert self._standby is not None
        self.active, self._standby = self._standby, self.active
        self.running, self.waiting = self.waiting, None

    def pop_reverted(self) -> SwapReverted | None:
        """What was taken back since the last call."""
        reverted, self._reverted = self._reverted, None
        return reverted

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _load(self, policy: Policy, message: LoadWeights) -> None:
        began = time.perf_counter()
        load_verified(policy, message.version, Path(message.path))
        took_s = time.perf_counter() - began
        log.info("robot '%s': version %d loaded in %.3f s.", self._name, message.version.number, took_s)

    def _succeeded(self, message: LoadWeights, result: Callable[[], None]) -> bool:
        try:
            result()
        except Exception as error:  # whatever a policy raises must not stop the one that runs
            known = isinstance(error, FleetError | OSError)
            damaged = isinstance(error, CorruptDataError)
            if damaged or isinstance(error, HalfLoadedError) or not known:
                self._reverted = SwapReverted(message.version, damaged)
            # A file that cannot be read now may be read the next time.
            again = damaged or isinstance(error, OSError | HalfLoadedError)
            self._unfit = None if again else message.version
            self.rejection = not_taken(message.version.number, str(error) if known else repr(error))
            self._restore()
            stays = f"stays on version {self.active.version}" if self.active.version else "has no version now"
            log.error("robot '%s' %s: %s", self._name, stays, self.rejection, exc_info=not known)
            return False
        self.rejection = ""
        return True

    def _restore(self) -> None:
        """Go back to the version that ran: only what was loaded in place can lack it now."""
        if self.running is None or self.active.version == self.running.version.number:
            return
        before, self.running = self.running, None
        try:
            self._load(self.active, before)
        except Exception:
            # It acts by nothing rather than by a mixture.
            self.active.version = 0
            log.exception("robot '%s': version %d cannot be loaded again.", self._name, before.version.number)
        else:
            self.running = before
