"""What every process of a robot computer needs: end on SIGTERM, end when the parent has gone."""

from __future__ import annotations

import os
import signal
from types import FrameType


class Lifeline:
    """`cut` turns true when this process should finish: it was asked to, or its parent is no more."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._asked = False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    @property
    def cut(self) -> bool:
        return self._asked or os.getppid() != self._parent

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
