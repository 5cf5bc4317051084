"""Pedals, keyboards and buttons through the kernel's input events (evdev).

A pedal of the usual kind is a keyboard with one key. It is not grabbed: what it types reaches a terminal too.
A FIFO with `struct input_event`s in it is taken for a device as well: what tests and benchmarks press.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hal.stop_devices.device import KeyEvent
from wire.errors import ConfigError, suggest

_INPUT = Path("/dev/input")
_EVENT = struct.Struct("@llHHi")
"""`struct input_event` (linux/input.h): seconds, microseconds, type, code, value"""


class FoundKeys(NamedTuple):
    """A device with keys that is there."""

    path: str
    name: str
    aliases: tuple[str, ...]
    """names in /dev/input/by-id"""

    def __str__(self) -> str:
        return f"'{self.name}' ({', '.join((self.path, *self.aliases))})"


def find_keys() -> list[FoundKeys]:
    """Those that may be read, in the order of their paths. Raises `ConfigError` without the package."""
    evdev = _evdev()
    aliases: dict[str, list[str]] = {}
    for link in sorted((_INPUT / "by-id").glob("*")):
        aliases.setdefault(os.path.realpath(link), []).append(link.name)
    found = []
    for path in sorted(evdev.list_devices(str(_INPUT), writable=False)):
        try:
            with evdev.InputDevice(path, readonly=True) as device:
                if evdev.ecodes.EV_KEY in device.capabilities():
                    found.append(FoundKeys(path, device.name, tuple(aliases.get(os.path.realpath(path), ()))))
        except OSError:
            # Unplugged meanwhile.
            continue
    return found


def key_code(name: str) -> int:
    """The kernel's number of a key. Raises `ConfigError` for a name it has not."""
    codes = _evdev().ecodes.ecodes
    if name not in codes:
        known = [each for each in codes if each.startswith(("KEY_", "BTN_"))]
        raise ConfigError(f"there is no key '{name}'.{suggest(name, known)} `evtest` shows what a pedal sends.")
    return int(codes[name])


def open_keys(device: str) -> Keys:
    """The device with that path, name in by-id, or own name. Raises `ConfigError` that says which ones there are."""
    path = _path_of(device)
    try:
        return Keys(
            _Stream(path) if stat.S_ISFIFO(os.stat(path).st_mode) else _evdev().InputDevice(path, readonly=True)
        )
    except OSError as error:
        raise ConfigError(
            f"--stop-key {device}: {error.strerror or error}. {_there(find_keys())} A user in the group 'input' may "
            "read them."
        ) from error


class Keys:
    """Keeps the `InputDevice` protocol."""

    def __init__(self, source: Any) -> None:
        """`source`: an `evdev.InputDevice`, or what reads as one."""
        self._source, codes = source, _evdev().ecodes
        self._key, self._lost = codes.EV_KEY, (codes.EV_SYN, codes.SYN_DROPPED)

    def fileno(self) -> int:
        return int(self._source.fileno())

    def read(self) -> list[KeyEvent]:
        found: list[KeyEvent] = []
        try:
            events = list(self._source.read())
        except BlockingIOError:
            return []
        for event in events:
            if (event.type, event.code) == self._lost:
                raise OSError("its events came faster than they were read, and some are lost")
            # 2 is a key that repeats.
            if event.type == self._key and event.value in (0, 1):
                found.append(KeyEvent(event.code, bool(event.value)))
        if not events:
            raise OSError("it was unplugged")
        return found

    def down(self) -> set[int]:
        return set(self._source.active_keys())

    def close(self) -> None:
        self._source.close()


class _Stream:
    """The part of `evdev.InputDevice` that is used here, on a FIFO: evdev's own reader of the kernel's bytes."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._read = _evdev().eventio.EventIO.read

    def fileno(self) -> int:
        return self.fd

    def read(self) -> Iterable[Any]:
        events: Iterable[Any] = self._read(self)
        return events

    def active_keys(self) -> list[int]:
        return []

    def close(self) -> None:
        os.close(self.fd)


def key_bytes(key: str, down: bool) -> bytes:
    """What the kernel sends when a key goes down or up, for a FIFO that stands for a device."""
    codes = _evdev().ecodes
    now = divmod(time.time_ns() // 1000, 1_000_000)
    pressed = _EVENT.pack(*now, codes.EV_KEY, key_code(key), int(down))
    return pressed + _EVENT.pack(*now, codes.EV_SYN, codes.SYN_REPORT, 0)


def _path_of(device: str) -> str:
    if device.startswith("/"):
        return device
    if (alias := _INPUT / "by-id" / device).exists():
        return str(alias)
    there = find_keys()
    named = [one.path for one in there if one.name == device]
    if len(named) == 1:
        return named[0]
    names = [*(one.name for one in there), *(alias for one in there for alias in one.aliases)]
    what = f"{len(named)} devices have that name" if named else f"no such device.{suggest(device, names)}"
    raise ConfigError(f"--stop-key {device}: {what} {_there(there)}")


def _there(found: list[FoundKeys]) -> str:
    if not found:
        return "This user sees no device with keys in /dev/input."
    return f"There are {'; '.join(map(str, found))}."


def _evdev() -> Any:
    try:
        import evdev
    except ImportError as error:
        raise ConfigError("pedals and keys need the package evdev: pip install 'vla-fleet[beside]'.") from error
    return evdev
