"""What wakes a thread that waits for messages: a file descriptor that `wait_any` takes beside its channels."""

from __future__ import annotations

import contextlib
import os


class Wakeup:
    """`ring` from any thread; whoever waits for `fd` wakes, and calls `silence`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)
