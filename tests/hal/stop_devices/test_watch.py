"""Pedals, lines and keys stop a robot by its host, and nothing but a release lets it go."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hal.driver_host.server import run_driver_server
from hal.driver_host.stop_line import StopOrder, send_order, stop_address
from hal.drivers.fake import FAKE_LIMITS, FakeConfig, FakeRobot
from hal.safety.limited_robot import LimitedRobot
from hal.safety.stop_latch import StopLatch
from hal.stop_devices.config import StopDevicesConfig
from hal.stop_devices.device import KeyEvent
from hal.stop_devices.evdev_keys import key_bytes, key_code
from hal.stop_devices.watch import Beside, DeviceWatch, WatchedDevice, check_devices, watched_devices
from tests.hal.driver_host.test_proxy import place  # noqa: F401
from tests.hal.stop_devices.test_evdev_keys import Pedal, pedal  # noqa: F401
from wire.clock import ManualClock
from wire.errors import ConfigError, StorageError

S = 10**9


class Contact:
    """A device that a test presses: what it says is in `events`."""

    def __init__(self) -> None:
        self.events: list[KeyEvent] = []
        self.held: set[int] = set()
        self.there = self.readable = True
        self.left, self.right = socket.socketpair()

    def open(self) -> Contact:
        if not self.there:
            raise ConfigError("--stop-key contact: no such device. There are 'FootSwitch'.")
        return self

    def set(self, down: bool, key: int = 0) -> None:
        self.events.append(KeyEvent(key, down))
        (self.held.add if down else self.held.discard)(key)
        self.right.send(b"!")

    def unplug(self) -> None:
        self.there = False
        self.right.send(b"!")

    def fileno(self) -> int:
        return self.left.fileno()

    def read(self) -> list[KeyEvent]:
        self.left.recv(64)
        if not self.there:
            raise OSError(19, "No such device")
        found, self.events = self.events, []
        return found

    def down(self) -> set[int]:
        if not self.there:
            raise OSError(19, "No such device")
        return set(self.held)

    def close(self) -> None: ...


class Bench:
    """A robot, a contact that stops it, and a clock."""

    def __init__(self, **how: object) -> None:
        self.contact, self.clock = Contact(), ManualClock(S)
        self.latch, self.said = StopLatch(), list[str]()
        self.robot = LimitedRobot(FakeRobot(), FAKE_LIMITS, self.latch)
        self.device = WatchedDevice("pedal foot", self.contact.open, **{"stop_keys": frozenset({0}), **how})
        self.watch: DeviceWatch | None = None

    def begin(self) -> Bench:
        self.watch = DeviceWatch([self.device], self.robot, on_command=self.said.append, clock=self.clock)
        return self

    def pressed(self, down: bool = True, key: int = 0) -> dict[str, str]:
        self.contact.set(down, key)
        return self.poll()

    def poll(self, after_s: float = 0.0) -> dict[str, str]:
        self.clock.advance(int(after_s * S))
        assert self.watch is not None
        self.watch.poll(0.0)
        return self.stops

    @property
    def stops(self) -> dict[str, str]:
        return self.robot.stop_state().stops


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    if made.watch is not None:
        made.watch.close()
        made.watch.close()


class TestPress:
    def test_it_stops_under_an_id_and_a_name_and_letting_go_releases_nothing(self, bench: Bench) -> None:
        assert bench.begin().stops == {}
        ((stop, who),) = bench.pressed().items()
        assert who == "pedal foot" and stop.startswith("pedal-")
        assert bench.pressed(False) == {stop: who}
        assert bench.pressed(False) == {stop: who}
        assert bench.robot.release(stop).ready, "and after the release it waits for a start"
        assert bench.poll() == {}

    def test_it_cannot_be_released_while_it_is_down(self, bench: Bench) -> None:
        (stop,) = bench.begin().pressed()
        assert bench.robot.release(stop).stops
        assert bench.robot.start().stops
        bench.pressed(False)
        assert bench.robot.release(stop).ready

    def test_each_press_is_a_stop_but_a_bounce_is_none(self, bench: Bench) -> None:
        bench.begin().pressed()
        bench.pressed(False)
        bench.clock.advance(S // 10)
        assert len(bench.pressed()) == 1, "it bounced"
        bench.pressed(False)
        bench.clock.advance(S)
        assert len(bench.pressed()) == 2
        first = next(iter(bench.stops))
        bench.pressed(False)
        assert len(bench.robot.release(first).stops) == 1, "a late release of the first leaves the second"

    def test_who_hammers_makes_no_more_than_can_be_released(self, bench: Bench) -> None:
        bench.begin()
        for _ in range(50):
            bench.pressed()
            bench.pressed(False)
            bench.clock.advance(S)
        assert len(bench.stops) == 8

    def test_what_is_down_at_the_start_has_stopped_it(self, bench: Bench) -> None:
        bench.contact.held.add(0)
        ((stop, who),) = bench.begin().stops.items()
        assert who == "pedal foot"
        assert bench.robot.release(stop).stops

    def test_a_press_that_nobody_told_of_is_found(self, bench: Bench) -> None:
        bench.begin()
        bench.contact.held.add(0)
        assert len(bench.poll()) == 1

    def test_it_is_kept_by_whoever_keeps_stops(self, bench: Bench, tmp_path: Path) -> None:
        latch = StopLatch(tmp_path / "estop")
        robot = LimitedRobot(FakeRobot(), FAKE_LIMITS, latch)
        watch = DeviceWatch([bench.device], robot, latch.save, clock=bench.clock)
        bench.contact.set(True)
        watch.poll(0.0)
        assert StopLatch(tmp_path / "estop").state.stops == robot.stop_state().stops != {}
        watch.close()


class TestFailing:
    """Nobody else hears the next press."""

    @pytest.fixture
    def watching(self, bench: Bench) -> Iterator[tuple[Bench, Contact]]:
        """Two contacts that are watched by the thread; with the second."""
        second = Contact()
        devices = [
            WatchedDevice("pedal foot", bench.contact.open, frozenset({0}), {1: "start"}),
            WatchedDevice("pedal knee", second.open, frozenset({0})),
        ]
        bench.watch = DeviceWatch(devices, bench.robot, on_command=self.says_no)
        bench.watch.start()
        yield bench, second

    @staticmethod
    def says_no(command: str) -> None:
        raise ValueError(f"no '{command}'")

    @staticmethod
    def until(holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    @pytest.mark.parametrize("call", ["close", "fileno", "down", "read"])
    def test_a_device_that_fails_at_anything_stops_the_robot_and_the_others_go_on(
        self, watching: tuple[Bench, Contact], call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench, second = watching

        def fails() -> set[int]:
            raise RuntimeError("it is no device any more")

        monkeypatch.setattr(bench.contact, call, fails)
        bench.contact.unplug() if call == "close" else bench.contact.set(True)
        self.until(lambda: "pedal foot (unplugged)" in bench.stops.values())
        second.set(True)
        self.until(lambda: "pedal knee" in bench.stops.values())

    def test_a_key_whose_command_fails_is_said_and_stops_go_on(
        self, watching: tuple[Bench, Contact], caplog: pytest.LogCaptureFixture
    ) -> None:
        bench, second = watching
        bench.contact.set(True, 1)
        self.until(lambda: "'start' went nowhere: ValueError: no 'start'" in caplog.text)
        second.set(True)
        self.until(lambda: list(bench.stops.values()) == ["pedal knee"])

    def test_whatever_else_fails_stops_the_robot_and_is_tried_again(
        self, watching: tuple[Bench, Contact], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench, second = watching
        assert bench.watch is not None
        poll = bench.watch.poll

        def fails(wait_s: float) -> None:
            raise SystemExit

        monkeypatch.setattr(bench.watch, "poll", fails)
        bench.contact.set(True)
        self.until(lambda: "stop devices (not watched)" in bench.stops.values())
        ((stop, _),) = ((stop, who) for stop, who in bench.stops.items() if "not watched" in who)
        assert stop in bench.robot.release(stop).stops, "as long as nobody watches"
        monkeypatch.setattr(bench.watch, "poll", poll)
        second.set(True)
        self.until(lambda: "pedal knee" in bench.stops.values())
        self.until(lambda: stop not in bench.robot.release(stop).stops)


class TestGone:
    def test_unplugging_stops_it_and_plugging_in_releases_nothing(self, bench: Bench) -> None:
        bench.begin()
        bench.contact.unplug()
        ((stop, who),) = bench.poll().items()
        assert who == "pedal foot (unplugged)"
        assert bench.robot.release(stop).stops, "as long as nobody can press it"
        bench.contact.there = True
        assert bench.poll(after_s=2.0) == {stop: who}
        assert bench.robot.release(stop).ready
        assert list(bench.pressed().values()) == ["pedal foot"], "and it is watched again"

    def test_one_that_is_not_there_at_the_start_stops_it(self, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        bench.contact.there = False
        ((stop, who),) = bench.begin().stops.items()
        assert who == "pedal foot (not there)"
        assert "There are 'FootSwitch'" in caplog.text
        for _ in range(5):
            assert list(bench.poll(after_s=2.0)) == [stop], "it is one stop"

    def test_a_host_that_starts_again_without_it_makes_no_second_stop(self, bench: Bench, tmp_path: Path) -> None:
        bench.contact.there = False
        for _ in range(3):
            latch = StopLatch(tmp_path / "estop")
            robot = LimitedRobot(FakeRobot(), FAKE_LIMITS, latch)
            DeviceWatch([bench.device], robot, latch.save, clock=bench.clock).close()
            assert len(robot.stop_state().stops) == 1

    def test_one_that_is_held_while_it_is_unplugged_can_be_released_when_it_is_back(self, bench: Bench) -> None:
        bench.begin().pressed()
        bench.contact.unplug()
        assert len(bench.poll()) == 2
        bench.contact.held.clear()
        bench.contact.there = True
        bench.poll(after_s=2.0)
        for stop in bench.stops:
            bench.robot.release(stop)
        assert bench.robot.stop_state().ready

    def test_whatever_is_wrong_with_a_device_is_a_stop(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.begin()
        monkeypatch.setattr(bench.contact, "down", lambda: 1 / 0)
        assert list(bench.poll().values()) == ["pedal foot (unplugged)"]


class TestCommands:
    def test_a_key_says_what_it_means_and_stops_nothing(self) -> None:
        bench = Bench(stop_keys=frozenset(), commands={5: "start"})
        bench.contact.held.add(5)
        assert bench.begin().said == [], "it was down before anybody looked"
        bench.pressed(False, 5)
        assert bench.pressed(True, 5) == {}
        assert bench.said == ["start"]
        bench.contact.unplug()
        assert bench.poll() == {}, "nobody stops the robot by it"
        bench.watch.close()

    def test_beside_a_key_with_a_meaning_every_other_one_stops(self) -> None:
        bench = Bench(stop_keys=None, commands={5: "start"}).begin()
        assert bench.pressed(True, 5) == {}
        assert list(bench.pressed(True, 6).values()) == ["pedal foot"]
        bench.watch.close()

    def test_a_command_that_goes_nowhere_does_not_cost_the_pedal(self) -> None:
        bench = Bench(commands={5: "start"})

        def fail(command: str) -> None:
            raise StorageError("no room")

        bench.watch = DeviceWatch([bench.device], bench.robot, on_command=fail, clock=bench.clock)
        assert bench.pressed(True, 5) == {}
        assert list(bench.pressed(True, 0).values()) == ["pedal foot"]
        bench.watch.close()


class TestConfig:
    def test_what_is_written_down_is_what_is_watched(self, pedal: Pedal) -> None:  # noqa: F811
        path = str(pedal.path)
        config = StopDevicesConfig(
            (f"{path}:KEY_B", f"{path}:KEY_C", "Pad: left"), ("gpiochip0:17",), (f"{path}:KEY_ENTER=start",)
        )
        keys, pad, line = watched_devices(config)
        assert keys.who == f"pedal {path}" and keys.stop_keys == {key_code("KEY_B"), key_code("KEY_C")}
        assert keys.commands == {key_code("KEY_ENTER"): "start"}
        assert pad.stop_keys is None and pad.who == "pedal Pad: left"
        assert line.who == "line gpiochip0:17" and line.is_stop(0)
        check_devices([keys])
        with pytest.raises(ConfigError, match="Pad: left"):
            check_devices([pad])

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"keys": ("/dev/x:KEY_B=scuccess",)}, "no command 'scuccess'"),
            ({"keys": ("/dev/x:KEY_B=estop",)}, "no command 'estop'"),
            ({"keys": ("/dev/x=start",)}, "DEVICE:KEY=COMMAND"),
            ({"keys": ("/dev/x:KEY_B",)}, "DEVICE:KEY=COMMAND"),
            ({"stop_lines": ("17",)}, "CHIP:LINE"),
            ({"stop_lines": ("gpiochip0:17:high",)}, "CHIP:LINE:active-low"),
            ({"stop_keys": (":KEY_B",)}, "DEVICE:KEY"),
            ({"stop_keys": ("/dev/x:KEY_BB",)}, "no key 'KEY_BB'"),
            ({"stop_keys": ("x:KEY_B",), "keys": ("x:KEY_B=start",)}, "another meaning"),
            ({"keys": ("x:KEY_B=start", "x:KEY_B=take_over")}, "another meaning"),
        ],
    )
    def test_what_cannot_be_is_named(self, given: dict[str, tuple[str, ...]], said: str) -> None:
        with pytest.raises(ConfigError) as refused:
            watched_devices(StopDevicesConfig(**given))
        assert said in str(refused.value)

    def test_what_a_recipe_and_a_person_say_adds_up(self) -> None:
        both = StopDevicesConfig(("a", "b")) + StopDevicesConfig(("b", "c"), ("gpiochip0:1",))
        assert both == StopDevicesConfig(("a", "b", "c"), ("gpiochip0:1",))


@contextlib.contextmanager
def hosted(path: Path, beside: Beside) -> Iterator[None]:
    over = threading.Event()
    robot = FakeRobot(FakeConfig(control_hz=50.0, image_px=16))
    thread = threading.Thread(
        target=run_driver_server, args=(robot, path, over.is_set), kwargs={"safety": FAKE_LIMITS, "beside": beside}
    )
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not stop_address(path).exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield
    finally:
        over.set()
        thread.join(30)
        assert not thread.is_alive()


def until(path: Path, stops: int) -> dict[str, str]:
    deadline = time.monotonic() + 10
    while len(found := send_order(path, StopOrder("ask"), 5.0).stops) < stops:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return found


def test_a_host_is_stopped_by_the_kernels_bytes_and_by_their_end(place: Path, pedal: Pedal) -> None:  # noqa: F811
    said = list[str]()
    config = StopDevicesConfig((str(pedal.path),), (), (f"{pedal.path}:KEY_ENTER=start",))
    with hosted(place, Beside(watched_devices(config), said.append)):
        pedal.say(key_bytes("KEY_ENTER", True) + key_bytes("KEY_ENTER", False) + key_bytes("KEY_B", True))
        ((stop, who),) = until(place, 1).items()
        assert who == f"pedal {pedal.path}"
        assert said == ["start"]
        assert send_order(place, StopOrder("release", stop), 5.0).stops, "it is down"
        pedal.say(key_bytes("KEY_B", False))
        deadline = time.monotonic() + 10
        while not send_order(place, StopOrder("release", stop), 5.0).ready:
            assert time.monotonic() < deadline
        pedal.unplug()
        assert list(until(place, 1).values()) == [f"pedal {pedal.path} (unplugged)"]
