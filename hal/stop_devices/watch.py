"""Watches stop devices in a thread of the robot's host and stops the robot by them, without any other process.

A press stops the robot under an id of its own. Letting go, closing the contact or plugging in again releases nothing:
it only makes the stop one that can be released, from where stops are released (ISO 13850: the reset is a deliberate act
of its own, and does not start the machine). A device that is not there, or goes, is a stop too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hal.driver_host.priority import watching
from hal.safety.limited_robot import LimitedRobot
from hal.stop_devices.config import StopDevicesConfig, read_command_key, read_key
from hal.stop_devices.device import InputDevice
from hal.stop_devices.evdev_keys import key_code, open_keys
from hal.stop_devices.gpio_line import LINE_KEY, open_line
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError
from wire.stop_state import new_stop_id

log = logging.getLogger(__name__)

STARTED = "--speed-limit"
"""who slows a robot by how its host was started"""
_POLL_S = 0.5
_RETRY_NS = 1_000_000_000
"""between two looks for a device that is not there"""
_REBOUND_NS = 300_000_000
"""a contact that opens again so soon after it opened has bounced: the same press"""
_FAILED_S = 0.1
_FAILED = "stop devices (not watched)"
"""who stops the robot when watching them fails"""
_MOST_STOPS = 8
"""of one device, that stand at once"""


@dataclass(frozen=True, slots=True)
class WatchedDevice:
    """What is watched of one device."""

    who: str
    """who stops the robot by it"""
    open: Callable[[], InputDevice]
    """raises `ConfigError` when it is not there"""
    stop_keys: frozenset[int] | None
    """None: every key that says nothing else"""
    commands: Mapping[int, str] = field(default_factory=dict)
    """what a key says, by the key"""

    @property
    def stops(self) -> bool:
        """Whether it stops the robot at all."""
        return self.stop_keys is None or bool(self.stop_keys)

    def is_stop(self, key: int) -> bool:
        return key not in self.commands if self.stop_keys is None else key in self.stop_keys


@dataclass(frozen=True, slots=True)
class Beside:
    """What a person beside the robot has."""

    devices: Sequence[WatchedDevice] = ()
    on_command: Callable[[str], None] = lambda command: None
    """gets the `OperatorCommandKind` that a key of them says; called by another thread"""
    speed_limit: float = 1.0
    """share of its velocity limits at which the robot starts, whatever else slows it"""


def watched_devices(config: StopDevicesConfig) -> list[WatchedDevice]:
    """Opens none of them. Raises `ConfigError` for a key that there is not or that has two meanings, and for a package
    that is missing.
    """
    stops: dict[str, set[int] | None] = {}
    commands: dict[str, dict[int, str]] = {}
    for text in config.stop_keys:
        device, key = read_key(text)
        known = stops.setdefault(device, set())
        if not key or known is None:
            stops[device] = None
        else:
            known.add(key_code(key))
    for text in config.keys:
        device, key, command = read_command_key(text)
        code, given = key_code(key), commands.setdefault(device, {})
        if given.setdefault(code, command) != command or code in (stops.get(device) or ()):
            raise ConfigError(f"--key '{text}': that key has another meaning already.")
    found = []
    for device in dict.fromkeys((*stops, *commands)):
        keys = stops.get(device, set())
        only = None if keys is None else frozenset(keys)
        found.append(WatchedDevice(f"pedal {device}", _opener(open_keys, device), only, commands.get(device, {})))
    for text in config.stop_lines:
        found.append(WatchedDevice(f"line {text}", _opener(open_line, text), frozenset({LINE_KEY})))
    return found


def check_devices(devices: Iterable[WatchedDevice]) -> None:
    """Raise `ConfigError` for one that is not there, naming those that are."""
    for device in devices:
        device.open().close()


def _opener(open_: Callable[[str], InputDevice], text: str) -> Callable[[], InputDevice]:
    return lambda: open_(text)


class _Watched:
    """A device and what it does."""

    def __init__(self, what: WatchedDevice) -> None:
        self.what = what
        self.device: InputDevice | None = None
        self.missing = ""
        """stop that stands because the device is not there"""
        self.down: dict[int, str] = {}
        """stop by the key that is down"""
        self.made: list[str] = []
        """its stops, in order"""
        self.made_ns = -_REBOUND_NS
        """when the last one was made"""
        self.retry_ns = 0


class DeviceWatch:
    """What is down or missing has stopped the robot when the constructor returns. `start` has it watch on."""

    def __init__(
        self,
        devices: Sequence[WatchedDevice],
        robot: LimitedRobot,
        save: Callable[[], None] = lambda: None,
        on_command: Callable[[str], None] = lambda command: None,
        clock: Clock | None = None,
    ) -> None:
        """`save`: keeps the stops; called last; must not wait for a disk. `on_command` gets what keys say."""
        self._robot, self._save, self._on_command = robot, save, on_command
        self._clock = clock or MonotonicClock()
        self._all = [_Watched(device) for device in devices]
        self._wake, self._woken = os.pipe()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failed = ""
        """stop that stands because they were not watched"""
        self.poll(0.0)

    def start(self) -> None:
        """Nothing to watch needs no thread."""
        if self._all:
            self._thread = threading.Thread(target=self._run, name="stop-devices", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """May be called twice."""
        if self._closing:
            return
        self._closing = True
        os.write(self._woken, b"!")
        if self._thread is not None:
            self._thread.join()
        for watched in self._all:
            _put_away(watched)
        os.close(self._wake)
        os.close(self._woken)

    def _run(self) -> None:
        watching()
        while not self._closing:
            try:
                self.poll(_POLL_S)
            except BaseException as error:  # noqa: BLE001 - whatever it is: nobody else hears the next press
                self._on_failure(error)
                continue
            if self._failed:
                self._robot.end_cause(self._failed)
                self._failed = ""

    def _on_failure(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = new_stop_id("devices")
            self._robot.stop(self._failed, _FAILED, lasting=True)
            log.error("stop devices could not be watched and stop the robot.", exc_info=error)
        # It may be what fails.
        with contextlib.suppress(Exception):
            self._save()
        time.sleep(_FAILED_S)

    def poll(self, wait_s: float) -> None:
        """Do what the devices say; waits for `wait_s` until one says something."""
        for watched in self._all:
            if watched.device is None and self._clock.now_ns() >= watched.retry_ns:
                self._open(watched)
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        by_fd: dict[int, _Watched] = {}
        for watched in self._all:
            if watched.device is not None:
                try:
                    waiting.register(fd := watched.device.fileno(), select.POLLIN)
                    by_fd[fd] = watched
                except Exception as error:  # noqa: BLE001 - as in `_open`
                    self._lose(watched, "unplugged", error)
        ready = {fd for fd, _ in waiting.poll(1e3 * wait_s)}
        for fd, watched in by_fd.items():
            self._look(watched, fd in ready)
        self._save()

    def _open(self, watched: _Watched) -> None:
        watched.retry_ns = self._clock.now_ns() + _RETRY_NS
        try:
            watched.device = watched.what.open()
            down = watched.device.down()
        except Exception as error:  # noqa: BLE001 - a device that cannot be watched for any reason is none
            self._lose(watched, "not there", error)
            return
        log.info("%s is watched.", watched.what.who)
        for key, stop in list(watched.down.items()):
            if key not in down:
                self._robot.end_cause(stop)
                del watched.down[key]
        for key in down:
            self._on_down(watched, key, seen=False)
        if watched.missing:
            self._robot.end_cause(watched.missing)
            watched.missing = ""

    def _look(self, watched: _Watched, ready: bool) -> None:
        assert watched.device is not None
        try:
            events = watched.device.read() if ready else []
            # Also when nothing was said: it tells that the device is there.
            held = watched.device.down() if not ready else set()
        except Exception as error:  # noqa: BLE001 - as above
            self._lose(watched, "unplugged", error)
            return
        for event in events:
            if event.down:
                self._on_down(watched, event.key)
            elif stop := watched.down.pop(event.key, ""):
                self._robot.end_cause(stop)
        for key in held - watched.down.keys():
            self._on_down(watched, key, seen=False)

    def _on_down(self, watched: _Watched, key: int, seen: bool = True) -> None:
        """`seen`: it went down just now, and was not found so."""
        what = watched.what
        if not what.is_stop(key):
            if seen and (command := what.commands.get(key)):
                log.info("%s: %s.", what.who, command)
                try:
                    self._on_command(command)
                except Exception as error:  # noqa: BLE001 - of whoever gets it; the stops of this device go on
                    log.error("%s: '%s' went nowhere: %s: %s", what.who, command, type(error).__name__, error)
        elif key not in watched.down:
            watched.down[key] = self._stop(watched, what.who, new=seen)

    def _lose(self, watched: _Watched, how: str, error: Exception) -> None:
        if not watched.missing and watched.what.stops:
            # Before anything else of it is touched.
            watched.missing = self._stop(watched, f"{watched.what.who} ({how})", new=False)
            log.error("%s is %s and stops the robot: %s", watched.what.who, how, error)
        _put_away(watched)

    def _stop(self, watched: _Watched, who: str, new: bool) -> str:
        """Stop the robot now; the id. Not `new`: it is the same stop as one that stands already."""
        now_ns, stops = self._clock.now_ns(), self._robot.stop_state().stops
        own = [stop for stop in watched.made if stop in stops]
        if new and own and (now_ns - watched.made_ns < _REBOUND_NS or len(own) >= _MOST_STOPS):
            stop = own[-1]
        else:
            same = () if new else (stop for stop, by in stops.items() if by == who)
            stop = next(iter(same), "") or new_stop_id(who.partition(" ")[0])
            watched.made = [*own, stop]
        watched.made_ns = now_ns
        self._robot.stop(stop, who, lasting=True)
        log.warning("stopped by %s (%s).", who, stop)
        return stop


def _put_away(watched: _Watched) -> None:
    """Close its device; one that is gone may fail at that too."""
    if watched.device is not None:
        try:
            watched.device.close()
        except Exception as error:  # noqa: BLE001 - as in `_open`
            log.warning("%s could not be closed: %s", watched.what.who, error)
        watched.device = None
