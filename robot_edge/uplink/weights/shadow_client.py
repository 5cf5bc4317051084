"""Fetches a version that will not act, while the one that will is not under way."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from robot_edge.uplink.weights.client import WeightClient
from robot_edge.uplink.weights.relay_source import RelaySource
from robot_edge.uplink.weights.window import MOST_PART, RequestWindow
from wire.clock import Clock
from wire.task_thread import Task
from wire.transport.channel import Channel


class ShadowWeightClient(WeightClient):
    """One part at a time, into a directory of its own, and nothing while `acting` fetches.

    What `acting` has is linked there first, so that deltas can start from it.
    """

    def __init__(
        self, directory: Path, channel: Channel, clock: Clock, acting: WeightClient, relay: RelaySource | None = None
    ) -> None:
        """As `WeightClient`. `acting`: fetches the version to act by."""
        super().__init__(directory, channel, clock, keep=1, relay=relay)
        self._acting, self._paused = acting, False
        self._requests.window = RequestWindow(MOST_PART)
        self.clear()

    def link_bases(self) -> None:
        """Have what `acting` has at hand; before a fetch."""
        self.tasks.submit(Task(self._link))

    def clear(self) -> None:
        """No version is wanted, and none is kept."""
        self._following, self.ready, self.fault = None, None, ""
        self._drop()
        self.tasks.submit(Task(self._unlink))
        self.tasks.poll()

    def poll(self) -> bool:
        if self._acting.fetching:
            self._paused = True
            self.tasks.poll()
            return False
        if self._paused:
            self._paused = False
            self._requests.touch()
            if self._plan is not None and not (self._requests.under_way or self._busy or self._checks):
                self._ask()
        return super().poll()

    def _ask(self) -> None:
        if not self._acting.fetching:
            super()._ask()

    def _link(self) -> None:
        for path in self._acting.directory.glob("*.safetensors"):
            with contextlib.suppress(OSError):  # another file system: then the whole is fetched
                os.link(path, self.directory / path.name)

    def _unlink(self) -> None:
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):
                path.unlink()
