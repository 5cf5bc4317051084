"""What was decided is decided again; what is not is named."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hal.drivers.fake import FakeConfig
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.scheduler import AlignedScheduler
from robot_edge.control.loop import ControlLoop
from robot_edge.control.mode import HoldReason
from robot_edge.flight_recorder.command import replay_command
from robot_edge.flight_recorder.events import (
    Call,
    FlightHeader,
    PreviewFrame,
    Raised,
    SnapshotRecord,
    TickBlock,
    TickRecord,
)
from robot_edge.flight_recorder.file import MAGIC, MAX_RECORD_BYTES, frame, frames
from robot_edge.flight_recorder.replay import read_records, replay
from tests.robot_edge.flight_recorder.bench import FAKE, Bench, eventful, make_loop, shared
from wire.errors import ConfigError, CorruptDataError, FleetError, RobotDisconnectedError, RobotError
from wire.messages.local import EpisodeEnded, EpisodeLost, StepRecorded
from wire.types import Frame, Observation, PolicyCapabilities

ROOT = Path(__file__).resolve().parents[3]


def flights(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.flight"))


@pytest.fixture(scope="module")
def flown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """(directory, ticks) of an eventful flight."""
    directory = tmp_path_factory.mktemp("flight")
    bench = eventful(directory)
    assert bench.flight.lost == 0
    return directory, bench.flight.ticks


def test_an_eventful_flight_is_decided_again_to_the_last_bit(flown: tuple[Path, int]) -> None:
    directory, ticks = flown
    seen: list[TickRecord] = []
    written: list[np.ndarray] = []

    def look(record: TickRecord, calls: list[Call]) -> None:
        seen.append(record)
        written.extend(call.result.executed for call in calls if call.name in ("robot.write", "robot.hold"))

    result = replay(directory, make_loop, on_tick=look)
    assert (result.differences, result.notes) == ([], [])
    assert (result.first_tick, result.last_tick, result.ticks) == (1, ticks, ticks)
    assert [played.tick for played in seen] == list(range(1, ticks + 1))
    assert {played.mode for played in seen} == {"policy", "script", "human", "hold", "estop"}
    reasons = {played.reason for played in seen}
    assert {HoldReason.no_recorder, HoldReason.bad_observation, HoldReason.no_action, HoldReason.estop} <= reasons
    # the robot was moved, so there was something to compare
    assert len(written) > 80
    assert np.abs(np.array(written)).max() > 0.5


def test_an_environment_that_ended_and_an_episode_that_was_lost_do_so_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path).ready()
    write = bench.robot.write
    bench.robot.write = lambda action: msgspec.structs.replace(write(action), terminated=True)  # type: ignore[method-assign]
    bench.fly(4)
    bench.robot.write = write  # type: ignore[method-assign]
    bench.fly(5)
    assert bench.loop.tracker.episode is not None
    bench.uplink.send(EpisodeLost(bench.loop.tracker.episode.id))
    bench.fly(5)
    bench.flight.close()
    outcomes = [message.outcome for message in bench.sent if isinstance(message, EpisodeEnded)]
    assert outcomes == ["failure", "failure", "aborted"]
    result = replay(tmp_path, make_loop)
    assert (result.ticks, result.differences, result.notes) == (14, [], [])


def test_a_stretch_begins_at_the_snapshot_before_it(flown: tuple[Path, int]) -> None:
    directory, ticks = flown
    for first in (2, 30, 65, 90, ticks - 5, ticks):
        last = min(ticks, first + 25)
        result = replay(directory, make_loop, first, last)
        assert result.differences == [], first
        assert (result.first_tick, result.last_tick) == (first, last)


def test_the_ends_of_episodes_and_their_chunks_are_decided_again_from_any_snapshot(tmp_path: Path) -> None:
    bench = Bench(tmp_path, snapshot_ticks=7, boundary_ticks=7).ready().fly(140).land()
    ends = [m for m in bench.sent if isinstance(m, EpisodeEnded)]
    assert len(ends) == 2 and all(end.terminal is not None for end in ends)
    assert sum(isinstance(m, StepRecorded) and m.chunk is not None for m in bench.sent) > 10
    for first in range(1, 140, 7):
        assert replay(tmp_path, make_loop, first, first + 6).differences == [], first


def test_another_rule_of_decision_is_named(flown: tuple[Path, int]) -> None:
    def other(header: FlightHeader, *borders: object) -> ControlLoop:
        chunking = ChunkingConfig("aligned", execute_ticks=3)
        return make_loop(msgspec.structs.replace(header, chunking=chunking), *borders)  # type: ignore[arg-type]

    result = replay(flown[0], other)
    assert result.differences
    assert result.differences[0].what == "order of calls"
    assert result.differences[0].replayed == "inference.send"


def rewritten(path: Path, tick: int, old: bytes, new: bytes) -> None:
    """Change bytes of one tick of a flight; the checksums are made anew."""
    with path.open("rb") as file:
        found = list(frames(file))
    out = [MAGIC]
    for record in found:
        if isinstance(record, TickBlock):
            ticks = {one.tick: one for one in record.ticks}
            if tick in ticks:
                calls = ticks[tick].calls
                # the first place is what the robot said; what the loop made of it comes later
                at = next(index for index, call in enumerate(calls) if old in call)
                calls[at] = calls[at].replace(old, new)
            record = TickBlock(list(ticks.values()))
        out.append(frame(record))
    path.write_bytes(b"".join(out))


def test_one_flipped_bit_of_a_state_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(tmp_path).ready().fly(60).land()
    (path,) = flights(tmp_path)
    found: list[Observation] = []
    replay(path, make_loop, 33, 33, lambda _, calls: found.extend(c.result for c in calls if c.name == "robot.read"))
    state = found[0].state
    flipped = bytearray(state.tobytes())
    flipped[5] ^= 1
    rewritten(path, 33, state.tobytes(), bytes(flipped))
    result = replay(path, make_loop)
    assert bench.flight.ticks == 60
    difference = result.differences[0]
    assert difference.tick == result.last_tick == 33
    assert difference.what.endswith("state[1]")
    assert difference.recorded == pytest.approx(state[1], abs=1e-4)
    assert difference.recorded != difference.replayed
    assert replay_command(path, make_loop, 10, 50) == 1
    out = capsys.readouterr().out
    assert "tick 33 is decided otherwise now, after 23 that are not" in out
    assert "state[1]: recorded" in out
    assert replay_command(path, make_loop, 10, 32) == 0
    assert "23 decided again, all the same" in capsys.readouterr().out


def test_a_torn_end_is_cut_off(tmp_path: Path) -> None:
    Bench(tmp_path).ready().fly(80).land()
    (path,) = flights(tmp_path)
    whole = path.read_bytes()
    reached = set()
    for size in range(len(whole) - 400, len(whole), 57):
        path.write_bytes(whole[:size])
        result = replay(path, make_loop)
        assert result.differences == []
        reached.add(result.last_tick)
    assert max(reached) < 80
    path.write_bytes(whole + b"\xff" * 40)
    assert replay(path, make_loop).last_tick == 80
    path.write_bytes(whole[:20])
    with pytest.raises(ConfigError, match="no file"):
        replay(path, make_loop)
    path.write_bytes(b"something else")
    with pytest.raises(CorruptDataError, match="not a flight file"):
        replay(path, make_loop)


def test_damage_anywhere_cuts_the_flight_there(tmp_path: Path) -> None:
    Bench(tmp_path).ready().fly(150).land()
    (path,) = flights(tmp_path)
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    reached = []
    for place in rng.integers(len(MAGIC) + 1500, len(whole), 12):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        try:
            result = replay(path, make_loop)
        except FleetError:
            continue
        assert result.differences == []
        reached.append(result.last_tick)
    assert reached and max(reached) < 150


def test_a_frozen_camera_is_found_again_though_no_pixel_was_kept(tmp_path: Path) -> None:
    """The same picture with new times, from a tick on: health compares pixels, the replay stand-ins."""

    bench = Bench(tmp_path, FakeConfig(image_px=32, camera_every_ticks=1), frames_hz=0.0)
    film = bench.robot._film
    bench.ready().fly(8)
    image = bench.robot._frame.image  # type: ignore[union-attr]
    bench.robot._film = lambda: msgspec.structs.replace(film(), image=image.copy())  # type: ignore[method-assign]
    bench.fly(50).land()
    reasons: list[str] = []
    result = replay(tmp_path, make_loop, on_tick=lambda record, calls: reasons.append(record.reason))
    assert result.differences == []
    assert HoldReason.frozen_camera in reasons


class SerialGoneError(OSError):
    """What a driver's own library raises."""


@pytest.mark.parametrize("call", ["connect", "reset", "read", "write"])
@pytest.mark.parametrize(
    "error", [RobotError("the arm does not answer"), RobotDisconnectedError("its host ended"), SerialGoneError("gone")]
)
def test_a_robot_that_fails_and_is_tried_again_is_replayed(tmp_path: Path, call: str, error: Exception) -> None:
    bench = Bench(tmp_path, FakeConfig(image_px=32), operated=True, queue_ticks=5000).ready()
    bench.loop.driver.start_disconnected()
    works, failing = getattr(bench.robot, call), [call == "connect"]

    def fails(*given: object) -> object:
        if failing[0]:
            raise error
        return works(*given)

    setattr(bench.robot, call, fails)
    bench.fly(20)
    failing[0] = True
    bench.fly(270)
    assert bench.modes[-1] == "hold"
    assert bench.loop.driver.fault.detail or call == "reset"
    failing[0] = False
    bench.fly(400).land()
    assert {"policy", "script"} & set(bench.modes[-60:])
    seen: list[TickRecord] = []
    assert replay(tmp_path, make_loop, on_tick=lambda record, calls: seen.append(record)).differences == []
    assert seen[-1].tick == 690


def test_a_tick_that_ended_with_an_error_is_replayed(tmp_path: Path) -> None:
    def broken(loop: ControlLoop) -> ControlLoop:
        listen = loop._handle_messages

        def failing() -> None:
            listen()
            if loop.rate.ticks == 4:
                raise RobotError("a bug of ours")

        loop._handle_messages = failing  # type: ignore[method-assign]
        return loop

    bench = Bench(tmp_path, FakeConfig(image_px=32)).ready()
    broken(bench.loop)
    with pytest.raises(RobotError, match="a bug of ours"):
        bench.fly(5)
    bench.land()
    seen: list[TickRecord] = []
    result = replay(
        tmp_path, lambda *borders: broken(make_loop(*borders)), on_tick=lambda record, calls: seen.append(record)
    )
    assert (result.differences, seen[-1].tick) == ([], 4)
    last = [record.what for record in read_records(tmp_path)[1] if isinstance(record.what, TickRecord)][-1]
    assert isinstance(last.error, Raised) and last.error.kind == "RobotError"
    (differs,) = replay(tmp_path, make_loop).differences[-1:]
    assert differs.tick == 4


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no flight"):
        replay(tmp_path / "nothing", make_loop)
    Bench(tmp_path).ready().fly(10).land()
    with pytest.raises(ConfigError, match="ticks 90 to 95 were not recorded; the last tick looked at is 10"):
        replay(tmp_path, make_loop, 90, 95)
    with pytest.raises(ConfigError, match="no start 'other'; it holds boot"):
        replay(tmp_path, make_loop, session_id="other")


_PILOT = """
import sys, time
from pathlib import Path
from tests.robot_edge.flight_recorder.bench import Bench
bench = Bench(Path(sys.argv[1]), flush_s=0.05).ready()
while True:
    bench.fly(1)
    print(bench.flight.ticks, flush=True)
    time.sleep(0.005)
"""


def test_a_killed_process_leaves_a_flight_that_replays(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PILOT, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        ticks = 0
        while ticks < 100:
            ticks = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    result = replay(tmp_path, make_loop)
    assert result.differences == []
    # at most what 50 ms brought is lost, and a slow machine's thread a little more
    assert result.last_tick > 60


def test_pictures_are_kept_at_their_rate(tmp_path: Path) -> None:
    """60 ticks at 80 Hz are 0.75 s."""
    Bench(tmp_path, FAKE, frames_hz=8.0, frames_px=16).ready().fly(60).land()
    pictures = [r.what for r in read_records(tmp_path)[1] if isinstance(r.what, PreviewFrame)]
    assert 5 <= len(pictures) <= 8
    import cv2

    image = cv2.imdecode(np.frombuffer(pictures[0].jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert image.shape == (16, 16, 3)


@pytest.mark.parametrize(("boundary_ticks", "snapshots"), [(0, 4), (100, 2), (1000, 1)])
def test_episodes_that_end_soon_after_each_other_share_a_snapshot(
    tmp_path: Path, boundary_ticks: int, snapshots: int
) -> None:
    """Three episodes of 60 ticks end within 200."""
    Bench(tmp_path, boundary_ticks=boundary_ticks).ready().fly(200).land()
    found = [r.what.tick for r in read_records(tmp_path)[1] if isinstance(r.what, SnapshotRecord)]
    assert len(found) == snapshots
    assert replay(tmp_path, make_loop, 150, 160).differences == []


def test_a_new_schedule_of_another_class_is_brought_back(tmp_path: Path) -> None:
    """The loop makes its schedule when weights come; a new loop has another one until the snapshot is read."""
    bench = Bench(tmp_path, snapshot_ticks=20).ready().fly(70).land()
    kinds, loops = set(), list[ControlLoop]()

    def make(*borders: Any) -> ControlLoop:
        loops.append(make_loop(*borders))
        return loops[0]

    result = replay(tmp_path, make, 50, 60, lambda record, calls: kinds.add(type(loops[0].chunks.scheduler)))
    assert result.differences == []
    assert kinds == {AlignedScheduler} == {type(bench.loop.chunks.scheduler)}


STRATEGIES = [
    ("sync", {}),
    ("naive", {}),
    ("aligned", {"speed_up": 2}),
    ("ensemble", {}),
    ("future_state", {}),
    ("rtc_guided", {}),
    ("rtc_trained", {}),
    ("residual", {}),
]


@pytest.mark.parametrize(("strategy", "more"), STRATEGIES)
def test_every_strategy_can_be_taken_up_in_the_middle(tmp_path: Path, strategy: str, more: dict[str, int]) -> None:
    """Snapshots every 17 ticks carry each strategy's plans, forecasts and reckoning."""
    trained = PolicyCapabilities(8, state_aligned=True, prefix_trained=True, residual_trained=True)
    chunking = {"strategy": strategy, **more}
    bench = Bench(tmp_path, chunking=chunking, snapshot_ticks=16).ready(trained).fly(110).land()
    assert len({mode for mode in bench.modes if mode == "policy"}) == 1
    assert replay(tmp_path, make_loop).differences == []
    for first in (25, 60, 100):
        seen: list[TickRecord] = []
        assert (
            replay(
                tmp_path, make_loop, first, first + 10, on_tick=lambda record, calls: seen.append(record)
            ).differences
            == []
        )
        assert [played.tick for played in seen] == list(range(first, min(first + 10, 110) + 1))


def test_a_driver_may_use_a_frames_memory_again(tmp_path: Path) -> None:
    """Its process copies them into memory of its own, where they stay whole."""
    bench = Bench(tmp_path / "flight", FakeConfig(image_px=32, camera_every_ticks=1), flush_s=0.3).ready()
    memory = np.zeros((32, 32, 3), np.uint8)
    film = bench.robot._film

    def again() -> Frame:
        frame = film()
        memory[...] = frame.image
        memory[0, 0, 0] = bench.flight.ticks % 251
        return Frame(frame.time_ns, memory)

    bench.robot._film = again  # type: ignore[method-assign]
    shared(bench, tmp_path / "frames", keep_s=100.0)
    bench.fly(60).land()
    images: list[bytes] = []

    def look(record: TickRecord, calls: list[Call]) -> None:
        images.extend(c.result.images["front"].image.tobytes() for c in calls if c.name == "robot.read")

    assert replay(tmp_path / "flight", make_loop, on_tick=look).differences == []
    assert len(set(images)) > 50


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (zlib.compress(bytes(MAX_RECORD_BYTES + 1)), "larger than .* when unpacked"),
        (zlib.compress(bytes(100))[:-6], "is torn"),
        (zlib.compress(b"\xdd\xff\xff\xff\xff"), "cannot be read"),  # a list of so many
        (b"\x80\x04N.", "cannot be read"),
    ],
)
def test_a_record_that_unpacks_without_end(tmp_path: Path, record: bytes, message: str) -> None:
    path = tmp_path / "a.flight"
    path.write_bytes(MAGIC + struct.pack("<II", len(record), zlib.crc32(record)) + record)
    with pytest.raises(CorruptDataError, match=rf"a\.flight: a record .*{message}"):
        replay(path, make_loop)


def test_a_record_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.flight"
    path.write_bytes(MAGIC + struct.pack("<II", 2**32 - 1, 0))
    os.truncate(path, 2**33)
    with pytest.raises(ConfigError, match="with a whole header"):
        replay(path, make_loop)
