"""A serial bus of simulated Feetech STS3215 servos on a pseudo-terminal, byte for byte.

Protocol 0 of the STS series: FF FF id length instruction parameters checksum; status FF FF id length error parameters
checksum. A servo has its register file and moves to its goal at a limited speed while its torque is on. What opens
`port` talks to it as to a real bus, timing apart.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import threading
import time
import tty
from collections.abc import Callable, Iterator
from multiprocessing.managers import BaseManager
from typing import Any

PING, READ, WRITE, REG_WRITE, ACTION, SYNC_READ, SYNC_WRITE = 1, 2, 3, 4, 5, 0x82, 0x83
BROADCAST = 0xFE
MODEL, MIN_LIMIT, MAX_LIMIT, OFFSET, TORQUE, GOAL, LOCK, PRESENT, MOVING = 3, 9, 11, 31, 40, 42, 55, 56, 66
VOLTAGE, TEMPERATURE = 62, 63
"""in tenths of a volt and degrees Celsius"""
STS3215 = 777
STEPS = 4096


def _signed(value: int, bit: int) -> int:
    """Sign and magnitude, as the servos write negative numbers."""
    return abs(value) | (1 << bit if value < 0 else 0)


def _unsigned(value: int, bit: int) -> int:
    return -(value & ~(1 << bit)) if value >> bit & 1 else value


class Servo:
    """One servo: 128 registers and a shaft."""

    def __init__(self, number: int, position: float, speed: float, now_s: Callable[[], float]) -> None:
        """`position`: of its encoder, in steps; `speed`: steps per second."""
        self.number = number
        self.shaft = float(position)
        self.speed = speed
        self.blocked = False
        self.wakings = 0
        """how often it got torque"""
        self._now_s = now_s
        self._moved_s = now_s()
        self._later: tuple[int, bytes] | None = None
        self.registers = bytearray(128)
        self.put(0, 3, 1)
        self.put(1, 10, 1)
        self.put(MODEL, STS3215)
        self.put(5, number, 1)
        self.put(MAX_LIMIT, STEPS - 1)
        self.put(VOLTAGE, 74, 1)
        self.put(TEMPERATURE, 31, 1)

    def get(self, address: int, size: int = 2) -> int:
        return int.from_bytes(self.registers[address : address + size], "little")

    def put(self, address: int, value: int, size: int = 2) -> None:
        self.registers[address : address + size] = value.to_bytes(size, "little")

    @property
    def offset(self) -> int:
        return _unsigned(self.get(OFFSET), 11)

    @property
    def present(self) -> int:
        """As the servo reports it: encoder less homing offset."""
        return round(self.shaft) - self.offset

    def live(self) -> None:
        """Move on to now."""
        now_s = self._now_s()
        elapsed_s, self._moved_s = now_s - self._moved_s, now_s
        if self.get(TORQUE, 1) and not self.blocked:
            goal = min(self.get(MAX_LIMIT), max(self.get(MIN_LIMIT), _unsigned(self.get(GOAL), 15))) + self.offset
            reach = self.speed * elapsed_s
            self.shaft += min(reach, max(-reach, goal - self.shaft))
        self.put(PRESENT, _signed(self.present, 15))

    def read(self, address: int, size: int) -> bytes:
        self.live()
        return bytes(self.registers[address : address + size])

    def write(self, address: int, data: bytes) -> None:
        self.live()
        woken = address <= TORQUE < address + len(data) and not self.get(TORQUE, 1) and data[TORQUE - address]
        self.registers[address : address + len(data)] = data
        if woken:
            self.wakings += 1
            # A servo that gets its torque back stays where it is.
            self.put(GOAL, _signed(self.present, 15))

    def keep(self, address: int, data: bytes) -> None:
        self._later = (address, data)

    def act(self) -> None:
        if self._later is not None:
            self.write(*self._later)
            self._later = None


class FeetechBus:
    """Servos 1 to `count` on a pseudo-terminal; a context manager. `port` is what a driver opens."""

    def __init__(
        self,
        count: int = 6,
        position: float = 2048,
        speed: float = 4000,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servos = {number: Servo(number, position, speed, now_s) for number in range(1, count + 1)}
        self.packets: list[int] = []
        """instructions heard, in order"""
        self.mute = 0
        """so many next answers are lost"""
        self._master, self._slave = os.openpty()
        tty.setraw(self._slave)
        self.port = os.ttyname(self._slave)
        self._wake_read, self._wake_write = os.pipe()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="feetech-bus", daemon=True)

    def __enter__(self) -> FeetechBus:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.unplug()

    def calibrate(self, ranges: dict[int, tuple[int, int]]) -> None:
        """Write (least, greatest) position into the servos, as lerobot does after a calibration."""
        for number, (low, high) in ranges.items():
            self.servos[number].put(MIN_LIMIT, low)
            self.servos[number].put(MAX_LIMIT, high)

    def move(self, number: int, present: int) -> None:
        """Turn a shaft by hand."""
        with self._lock:
            self.servos[number].shaft = present + self.servos[number].offset

    def present(self, number: int) -> int:
        with self._lock:
            self.servos[number].live()
            return self.servos[number].present

    def torque(self, number: int) -> bool:
        with self._lock:
            return bool(self.servos[number].get(TORQUE, 1))

    def unplug(self) -> None:
        """Pull the cable out. May be called twice."""
        if self._thread.is_alive():
            os.write(self._wake_write, b"x")
            self._thread.join()
        for end in (self._master, self._slave, self._wake_read, self._wake_write):
            if end >= 0:
                os.close(end)
        self._master = self._slave = self._wake_read = self._wake_write = -1

    # --- the bytes ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        waiting = b""
        while True:
            ready, _, _ = select.select([self._master, self._wake_read], [], [])
            if self._wake_read in ready:
                return
            waiting += os.read(self._master, 4096)
            waiting = self._hear(waiting)

    def _hear(self, data: bytes) -> bytes:
        """Act on the whole packets in `data`; the rest is returned."""
        while (start := data.find(b"\xff\xff")) >= 0:
            data = data[start:]
            if len(data) < 4 or len(data) < data[3] + 4:
                return data
            packet, data = data[: data[3] + 4], data[data[3] + 4 :]
            if ~sum(packet[2:-1]) & 0xFF == packet[-1]:
                with self._lock:
                    self._act(packet[2], packet[4], packet[5:-1])
        return data[-1:] if data.endswith(b"\xff") else b""

    def _act(self, number: int, instruction: int, given: bytes) -> None:
        self.packets.append(instruction)
        if instruction == SYNC_READ:
            for servo in (self.servos[n] for n in given[2:] if n in self.servos):
                self._answer(servo, servo.read(given[0], given[1]))
            return
        if instruction == SYNC_WRITE:
            address, size = given[0], given[1]
            for at in range(2, len(given), size + 1):
                if given[at] in self.servos:
                    self.servos[given[at]].write(address, given[at + 1 : at + 1 + size])
            return
        for servo in self.servos.values() if number == BROADCAST else filter(None, [self.servos.get(number)]):
            answer = b""
            if instruction == READ:
                answer = servo.read(given[0], given[1])
            elif instruction == WRITE:
                servo.write(given[0], given[1:])
            elif instruction == REG_WRITE:
                servo.keep(given[0], given[1:])
            elif instruction == ACTION:
                servo.act()
            if number != BROADCAST or instruction == PING:
                self._answer(servo, answer)

    def _answer(self, servo: Servo, data: bytes) -> None:
        if self.mute > 0:
            self.mute -= 1
            return
        body = bytes([servo.number, len(data) + 2, 0]) + data
        os.write(self._master, b"\xff\xff" + body + bytes([~sum(body) & 0xFF]))


class _Elsewhere(FeetechBus):
    def start(self) -> str:
        return self.__enter__().port


class _Buses(BaseManager):
    """A process with buses."""


_Buses.register("bus", _Elsewhere, exposed=("start", "calibrate", "move", "present", "torque", "unplug"))


@contextlib.contextmanager
def buses_elsewhere(count: int, **options: float) -> Iterator[list[Any]]:
    """So many `FeetechBus` at work, with `port` and what a hand can do, in a process of their own: whatever keeps this
    one busy, they answer."""
    with _Buses(ctx=multiprocessing.get_context("spawn")) as process:
        buses = [process.bus(**options) for _ in range(count)]  # type: ignore[attr-defined]
        for bus in buses:
            bus.port = bus.start()
        yield buses
        for bus in buses:
            bus.unplug()
