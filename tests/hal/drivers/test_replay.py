"""A fake robot's episode, through a real store, exported and shown again."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import seal
from fleet.cli.__main__ import app
from fleet.config.recipes import get_recipe
from hal.conformance import check_robot
from hal.drivers.replay import ReplayConfig, ReplayOperator, ReplayRobot
from hal.registry import make_operator, make_robot, read_config
from tests.hal.drivers.recorded import ID, Recorded, record, stored
from wire.clock import ManualClock
from wire.episode_file import MAGIC, read_episode, read_header
from wire.errors import ConfigError, CorruptDataError, InvalidDataError, RobotError

QUALITY = 95
"""of the recorder's JPEGs"""


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return record()


@pytest.fixture
def data(tmp_path: Path, recorded: Recorded) -> Path:
    return stored(tmp_path / "data", recorded)


@pytest.fixture(scope="module")
def exported(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("exported")
    run("export-episode", ID, place / "e7.episode", "--data", stored(place / "data", recorded))
    return (place / "e7.episode").read_bytes()


@pytest.fixture
def file(exported: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "e7.episode"
    path.write_bytes(exported)
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["buffer", *map(str, arguments)])
    if isinstance(result.exception, Exception):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def ready(path: Path, executed: str = "recorded") -> tuple[ReplayRobot, ManualClock]:
    clock = ManualClock(9 * 10**12)
    robot = ReplayRobot(ReplayConfig(str(path), executed), clock)  # type: ignore[arg-type]
    robot.connect()
    robot.reset("go-right", 0)
    return robot, clock


def as_jpeg(image: np.ndarray) -> np.ndarray:
    """`image`, uint8[h, w, 3] RGB, as it comes out of the recorder's JPEG."""
    _, encoded = cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    return cv2.imdecode(encoded, cv2.IMREAD_COLOR)[:, :, ::-1]


@pytest.mark.parametrize("sealed", [False, True])
def test_what_was_recorded_is_shown_again(data: Path, tmp_path: Path, recorded: Recorded, sealed: bool) -> None:
    if sealed:
        ledger, store = BufferLocation(data).open_writer()
        assert seal(store, 7, force=True).shards == 1
        store.close()
        ledger.close()
    path = tmp_path / "one.episode"
    said = run("export-episode", ID, path, "--data", data, "--recipe", "fake")
    assert "60 steps, 15 pictures" in said and "ended with success" in said
    robot, clock = ready(path)
    operator = ReplayOperator(robot)
    assert operator.progress() == 60
    for tick, (seen, proposed, done) in enumerate(zip(recorded.seen, recorded.proposed, recorded.done, strict=True)):
        again = robot.read()
        assert again.state.tobytes() == seen.state.tobytes()
        frame, then = again.images["front"], seen.images["front"]
        assert np.array_equal(frame.image, as_jpeg(then.image))
        assert np.abs(frame.image.astype(int) - then.image).mean() < 4
        assert again.time_ns - frame.time_ns == seen.time_ns - then.time_ns
        wanted = operator.propose(again)
        assert wanted is not None and np.array_equal(wanted, proposed)
        feedback = robot.write(wanted)
        assert np.array_equal(feedback.executed, done.executed)
        assert not np.array_equal(feedback.executed, proposed)
        assert feedback.reward == pytest.approx(done.reward)
        assert (feedback.success, feedback.terminated, feedback.truncated) == (tick == 59, tick == 59, False)
        clock.advance(robot.spec.period_ns)
    assert again.task == get_recipe("fake").instructions["go-right"]


def test_it_stays_at_the_last_step(file: Path, recorded: Recorded) -> None:
    robot, _ = ready(file)
    for _ in range(65):
        feedback = robot.write(np.ones(4, np.float32))
    assert feedback.success and feedback.reward == 0
    assert feedback.executed[:3].tolist() == [0, 0, 0]  # deltas are not repeated
    assert np.array_equal(robot.read().state, recorded.seen[-1].state)
    assert ReplayOperator(robot).propose(robot.read()) is None
    robot.reset("go-right", 1)
    assert np.array_equal(robot.read().state, recorded.seen[0].state)


def test_it_keeps_the_contract_when_it_says_what_it_is_told(file: Path) -> None:
    clock = ManualClock(9 * 10**12)
    config = ReplayConfig(str(file), "given")
    report = check_robot(lambda: ReplayRobot(config, clock), "go-right", clock=clock)
    assert report.passed, str(report)
    recorded_one = ReplayConfig(str(file))
    report = check_robot(lambda: ReplayRobot(recorded_one, clock), "go-right", clock=clock)
    # it moved then, and says so
    assert report.failed == ("hold",)


def test_an_episode_that_failed_or_was_not_finished_has_no_success(tmp_path: Path) -> None:
    for name, options in (("failed", {"outcome": "failure"}), ("open", {"finished": False})):
        path = tmp_path / f"{name}.episode"
        said = run("export-episode", ID, path, "--data", stored(tmp_path / name, record(60, **options)))
        assert ("ended with failure" if name == "failed" else "not ended") in said
        robot, _ = ready(path)
        steps = read_header(path).steps
        assert steps == (60 if name == "failed" else 50)
        done = [robot.write(np.zeros(4, np.float32)) for _ in range(steps + 2)]
        assert not any(feedback.success or feedback.terminated for feedback in done)
        assert [feedback.truncated for feedback in done] == [False] * (steps - 1) + [name == "failed"] * 3


def test_it_is_made_from_plain_values(file: Path, recorded: Recorded) -> None:
    robot = make_robot("replay", read_config("replay", {"path": str(file), "executed": "given"}))
    assert robot.spec.hash == recorded.segments[0].episode.spec_hash
    assert make_operator("replay", robot).progress() == float("inf")
    with pytest.raises(ConfigError, match="'replay' needs a configuration with path"):
        make_robot("replay")
    with pytest.raises(ConfigError, match=r"executed|\$\.executed"):
        read_config("replay", {"path": str(file), "executed": "both"})


def test_what_it_is_not_ready_for_is_refused(file: Path) -> None:
    robot = ReplayRobot(ReplayConfig(str(file)))
    with pytest.raises(RobotError, match="connect"):
        robot.reset("go-right", 0)
    robot.connect()
    with pytest.raises(RobotError, match="reset"):
        robot.read()
    with pytest.raises(ConfigError, match="Did you mean 'go-right'"):
        robot.reset("go-rigth", 0)
    robot.reset("go-right", 0)
    with pytest.raises(InvalidDataError, match="not finite"):
        robot.write(np.full(4, np.nan, np.float32))
    assert robot.tick == 0


def test_what_cannot_be_exported_says_why(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.episode"
    with pytest.raises(ConfigError, match=r"'robot-0/e8' is not stored\. Did you mean 'robot-0/e7'"):
        run("export-episode", "robot-0/e8", path, "--data", data)
    with pytest.raises(ConfigError, match="no directory"):
        run("export-episode", ID, tmp_path / "none" / "x", "--data", data)
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match="there already"):
        run("export-episode", ID, path, "--data", data)
    assert path.read_bytes() == b"mine"
    run("prune", "--data", data, "--max-size", "0", "--no-keep-human")
    with pytest.raises(ConfigError, match="was pruned"):
        run("export-episode", ID, tmp_path / "y.episode", "--data", data)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "x.episode"]


def test_an_episode_with_a_hole_is_not_exported(tmp_path: Path, recorded: Recorded) -> None:
    holed = Recorded(segments=[recorded.segments[0], recorded.segments[2]])
    data = stored(tmp_path / "data", holed)
    with pytest.raises(InvalidDataError, match="the steps from tick 25 to 50 are missing"):
        run("export-episode", ID, tmp_path / "x.episode", "--data", data)
    assert not list(tmp_path.glob("x*"))


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_holds_the_segments_to_the_last_bit(file: Path, recorded: Recorded) -> None:
    header, segments = read_episode(file)
    assert [s.id for s in segments] == [s.id for s in recorded.segments]
    assert b"".join(s.state.tobytes() for s in segments) == b"".join(s.state.tobytes() for s in recorded.segments)
    assert [s.frames["front"].encoded for s in segments] == [s.frames["front"].encoded for s in recorded.segments]
    assert (header.outcome, header.steps, header.episode) == ("success", 60, recorded.segments[0].episode)
    assert file.read_bytes()[:8] == MAGIC


@pytest.mark.parametrize("kept", [0, 5, 8, 12, 200, -9, -8, -1])
def test_half_a_file_is_noticed(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises((CorruptDataError, ConfigError), match=r"ends in the middle|is no episode file"):
        read_episode(file)


def test_every_kind_of_damage_is_noticed(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    for at in range(8, len(whole), 997):
        broken = bytearray(whole)
        broken[at] ^= 0x40
        file.write_bytes(broken)
        with pytest.raises(CorruptDataError, match=str(file)):
            read_episode(file)
    file.write_bytes(whole + b"more")
    with pytest.raises(CorruptDataError, match="goes on after its end"):
        read_episode(file)


def test_other_files_are_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(MAGIC[:-1] + b"\x01" + whole[8:])
    with pytest.raises(ConfigError, match="has format 1, this vla-fleet reads format 2"):
        ReplayRobot(ReplayConfig(str(file)))
    file.write_bytes(b"\x89PNG and so on")
    with pytest.raises(ConfigError, match="is no episode file"):
        ReplayRobot(ReplayConfig(str(file)))
    with pytest.raises(ConfigError, match="No such file"):
        ReplayRobot(ReplayConfig(str(tmp_path / "none.episode")))
    # a length that would fill the memory is not believed
    file.write_bytes(MAGIC + struct.pack("<QI", 2**62, 0))
    with pytest.raises(CorruptDataError, match="ends in the middle"):
        read_header(file)


def test_a_file_of_another_robot_than_when_it_was_made_is_refused(file: Path, tmp_path: Path) -> None:
    robot = ReplayRobot(ReplayConfig(str(file)))
    header, segments = read_episode(file)
    from wire.episode_file import write_episode

    other = msgspec.structs.replace(header, spec=msgspec.structs.replace(header.spec, control_hz=40.0))
    write_episode(file, other, segments)
    with pytest.raises(Exception, match="the file changed since the robot was made"):
        robot.connect()


def test_a_picture_that_claims_gigabytes_is_not_decoded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, segments = read_episode(file)
    bomb = b"\xff\xd8\xff\xc0\x00\x0b\x08\x7f\xff\x7f\xff\x01\x01\x11\x00\xff\xd9"
    frames = segments[0].frames["front"]
    changed = msgspec.structs.replace(frames, encoded=(bomb,) * len(frames.encoded))
    first = msgspec.structs.replace(segments[0], frames={"front": changed})
    from wire.episode_file import write_episode

    write_episode(file, header, (first, *segments[1:]))
    robot = ReplayRobot(ReplayConfig(str(file)))
    robot.connect()
    robot.reset(robot.tasks[0], 0)
    with pytest.raises(CorruptDataError, match="is of 32767x32767"):
        robot.read()


def test_a_pipe_under_the_name_of_an_episode_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.episode")
    with pytest.raises(ConfigError, match="no regular file"):
        read_header(tmp_path / "a.episode")


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # a list of so many
        b"\xc6\xff\xff\xff\xff",  # so many bytes
        b"\x92" * 10**6,
        b"\x80\x04N.",
        b"",
    ],
)
def test_a_body_that_claims_more_than_there_is(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "a.episode"
    path.write_bytes(MAGIC + struct.pack("<QI", len(body), zlib.crc32(body)) + body)
    with pytest.raises(CorruptDataError, match=r"a\.episode: its header cannot be read"):
        read_header(path)
