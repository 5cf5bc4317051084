"""A simulated servo bus, and servos that are given time on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hal.drivers.lerobot.feetech_bus import FeetechBus
from tests.hal.drivers.lerobot.so_arm import be_patient


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def bus() -> Iterator[FeetechBus]:
    with FeetechBus() as bus:
        yield bus
