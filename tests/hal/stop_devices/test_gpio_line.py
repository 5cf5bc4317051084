"""A GPIO line as far as gpiod goes without a chip: its own types and errors, around a request that plays the kernel."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hal.stop_devices import gpio_line
from hal.stop_devices.device import KeyEvent
from hal.stop_devices.gpio_line import open_line
from wire.errors import ConfigError

gpiod = pytest.importorskip("gpiod")
OPEN, CLOSED = KeyEvent(0, True), KeyEvent(0, False)


class Request:
    """A `gpiod.LineRequest` of one line."""

    def __init__(self) -> None:
        self.fd, self.value, self.released = 7, gpiod.line.Value.INACTIVE, False
        self.events: list[Any] = []

    def edge(self, rising: bool, noticed: bool = True) -> None:
        self.value = gpiod.line.Value.ACTIVE if rising else gpiod.line.Value.INACTIVE
        kinds = gpiod.EdgeEvent.Type
        if noticed:
            self.events.append(SimpleNamespace(event_type=kinds.RISING_EDGE if rising else kinds.FALLING_EDGE))

    def read_edge_events(self) -> list[Any]:
        found, self.events = self.events, []
        return found

    def get_value(self, line: int) -> Any:
        assert line == 17
        return self.value

    def release(self) -> None:
        self.released = True


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    said: dict[str, Any] = {"request": Request()}

    def request_lines(path: str, consumer: str, config: dict[Any, Any]) -> Request:
        said.update(path=path, config=config)
        return said["request"]

    monkeypatch.setattr(gpiod, "request_lines", request_lines)
    return said


@pytest.mark.parametrize(("text", "pull"), [("gpiochip0:17", "PULL_UP"), ("/dev/gpiochip0:17:active-low", "PULL_DOWN")])
def test_a_cut_cable_reads_as_open(asked: dict[str, Any], text: str, pull: str) -> None:
    open_line(text)
    settings = asked["config"][17]
    assert asked["path"] == "/dev/gpiochip0"
    assert settings.bias == gpiod.line.Bias[pull]
    assert settings.active_low == (pull == "PULL_DOWN"), "what it is pulled to is what stops the robot"
    assert settings.edge_detection == gpiod.line.Edge.BOTH
    assert settings.direction == gpiod.line.Direction.INPUT


def test_it_is_down_while_the_contact_is_open(asked: dict[str, Any]) -> None:
    line, request = open_line("gpiochip0:17"), asked["request"]
    assert line.fileno() == 7
    assert line.down() == set()
    request.edge(True)
    assert line.read() == [OPEN]
    assert line.down() == {0}
    request.edge(False)
    request.edge(True)
    assert line.read() == [CLOSED, OPEN]
    line.close()
    assert request.released


def test_what_the_line_is_counts_when_edges_were_lost(asked: dict[str, Any]) -> None:
    line, request = open_line("gpiochip0:17"), asked["request"]
    request.edge(True)
    request.edge(False)
    request.edge(True, noticed=False)
    assert line.read() == [OPEN, CLOSED, OPEN]


@pytest.mark.parametrize("text", ["gpiochip77:17", "/dev/null:17", "gpiochip77:ESTOP"])
def test_what_gpiod_raises_for_a_chip_that_is_none_says_which_there_are(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpio_line, "find_chips", lambda: ["/dev/gpiochip4"])
    with pytest.raises(ConfigError, match=r"No such .*Chips of this computer: /dev/gpiochip4;"):
        open_line(text)


def test_a_line_that_the_chip_has_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def request_lines(path: str, **given: Any) -> None:
        raise ValueError("line offset of out range")  # in gpiod's words

    monkeypatch.setattr(gpiod, "request_lines", request_lines)
    with pytest.raises(ConfigError, match="--stop-line gpiochip0:99: line offset"):
        open_line("gpiochip0:99")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpiod", None)
    with pytest.raises(ConfigError, match=r"pip install 'vla-fleet\[beside\]'"):
        open_line("gpiochip0:17")
