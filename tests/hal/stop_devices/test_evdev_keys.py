"""Keys by evdev: its own reader on the kernel's bytes. No device node can be made here."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hal.stop_devices import evdev_keys
from hal.stop_devices.device import KeyEvent
from hal.stop_devices.evdev_keys import Keys, find_keys, key_bytes, key_code, open_keys
from wire.errors import ConfigError

evdev = pytest.importorskip("evdev")
B, ENTER = key_code("KEY_B"), key_code("KEY_ENTER")


class Pedal:
    """A FIFO that stands for a device; whoever treads on it writes what the kernel would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def say(self, data: bytes) -> None:
        os.write(self._fd, data)

    def unplug(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        if self._fd >= 0:
            self.unplug()


@pytest.fixture
def pedal(tmp_path: Path) -> Iterator[Pedal]:
    made = Pedal(tmp_path / "pedal")
    yield made
    made.close()


def test_presses_are_read_and_repeats_are_not(pedal: Pedal) -> None:
    keys = open_keys(str(pedal.path))
    repeat = evdev_keys._EVENT.pack(1, 2, evdev.ecodes.EV_KEY, B, 2)
    pedal.say(key_bytes("KEY_B", True) + repeat + key_bytes("KEY_ENTER", True))
    assert keys.read() == [KeyEvent(B, True), KeyEvent(ENTER, True)]
    pedal.say(repeat)
    assert keys.read() == []
    pedal.say(key_bytes("KEY_B", False))
    assert keys.read() == [KeyEvent(B, False)]
    assert keys.down() == set()
    keys.close()


def test_more_presses_than_one_read_takes_come_in_order(pedal: Pedal) -> None:
    keys = open_keys(str(pedal.path))
    pedal.say(b"".join(key_bytes("KEY_B", i % 2 == 0) for i in range(100)))
    found: list[KeyEvent] = []
    while len(found) < 100:
        found += keys.read()
    assert [event.down for event in found] == [i % 2 == 0 for i in range(100)]
    keys.close()


def test_what_was_unplugged_is_an_error(pedal: Pedal) -> None:
    keys = open_keys(str(pedal.path))
    pedal.say(key_bytes("KEY_B", True))
    pedal.unplug()
    assert keys.read() == [KeyEvent(B, True)], "what came before counts"
    with pytest.raises(OSError, match="unplugged"):
        keys.read()
    keys.close()


def test_events_that_were_lost_are_an_error(pedal: Pedal) -> None:
    keys = open_keys(str(pedal.path))
    pedal.say(evdev_keys._EVENT.pack(1, 2, evdev.ecodes.EV_SYN, evdev.ecodes.SYN_DROPPED, 0))
    with pytest.raises(OSError, match="some are lost"):
        keys.read()
    keys.close()


class Node(SimpleNamespace):
    """Answers as `evdev.InputDevice` does for a device that is there."""

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *error: object) -> None: ...

    def capabilities(self) -> dict[int, list[int]]:
        return {evdev.ecodes.EV_KEY: [B]} if self.keys else {evdev.ecodes.EV_REL: [0]}

    def close(self) -> None: ...

    def active_keys(self) -> list[int]:
        return [B]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two pedals of one make, one with a name in by-id, and a mouse without keys."""
    names = {"event0": ("FootSwitch", True), "event1": ("FootSwitch", True), "event2": ("Mouse", False)}
    names["event3"] = ("Pad: left", True)
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "by-id").mkdir()
    (tmp_path / "by-id" / "usb-Foot-event-kbd").symlink_to(tmp_path / "event1")
    monkeypatch.setattr(evdev_keys, "_INPUT", tmp_path)
    monkeypatch.setattr(evdev, "list_devices", lambda place, writable: [f"{place}/{name}" for name in names])

    def make(path: str, readonly: bool) -> Node:
        if not os.path.exists(path):
            raise OSError(errno.ENOENT, "No such file or directory", path)
        name, keys = names[os.path.basename(os.path.realpath(path))]
        return Node(path=path, name=name, keys=keys)

    monkeypatch.setattr(evdev, "InputDevice", make)
    return tmp_path


def test_a_device_is_found_by_path_by_id_and_by_its_own_name(nodes: Path) -> None:
    assert [one.name for one in find_keys()] == ["FootSwitch", "FootSwitch", "Pad: left"]
    for device in (str(nodes / "event1"), "usb-Foot-event-kbd", "Pad: left"):
        assert open_keys(device).down() == {B}


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("FootSwitch", "2 devices have that name"),
        ("Footswitch", "Did you mean 'FootSwitch'"),
        ("/dev/input/event99", "No such file or directory"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(nodes: Path, device: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_keys(device)
    assert said in str(refused.value)
    assert f"'FootSwitch' ({nodes}/event1, usb-Foot-event-kbd)" in str(refused.value)


def test_a_computer_without_devices_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evdev_keys, "_INPUT", tmp_path)
    with pytest.raises(ConfigError, match="sees no device with keys"):
        open_keys("pedal")


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'KEY_ENTER'"):
        key_code("KEY_ENTR")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "evdev", None)
    with pytest.raises(ConfigError, match=r"pip install 'vla-fleet\[beside\]'"):
        open_keys("pedal")


def test_nothing_yet_is_no_error() -> None:
    def read() -> list[object]:
        raise BlockingIOError(errno.EAGAIN, "again")

    assert Keys(SimpleNamespace(read=read)).read() == []
