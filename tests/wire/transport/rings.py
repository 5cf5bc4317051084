"""A ring of frames with its two ends, for tests of it and of what travels by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import samples
from wire.transport.frame_ring import FrameRing
from wire.types import Frame

SPEC = samples.spec()
SLOTS = 22
"""20 Hz for one second, one that is written and one to spare"""

Rings = tuple[FrameRing, FrameRing]


@pytest.fixture
def rings(tmp_path: Path) -> Iterator[Rings]:
    """(writer, reader); a reader may come first."""
    reader = FrameRing(tmp_path / "frames", SPEC, write=False)
    writer = FrameRing(tmp_path / "frames", SPEC, write=True)
    yield writer, reader
    writer.close()
    reader.close()


def frame(number: int) -> Frame:
    return Frame(10 * number, np.full((8, 8, 3), number % 256, np.uint8))
