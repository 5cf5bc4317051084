"""What leaves control for the uplink."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from robot_edge.control.episodes.tracker import StepRecorder
from robot_edge.runtime.process_group import record_channel
from tests import samples
from wire.errors import InvalidDataError
from wire.messages import Message
from wire.messages.local import EpisodeStarted, FrameRecorded, StepRecorded
from wire.transport.frame_ring import FrameRing, SharedFrame, with_preview
from wire.transport.shared_channel import SharedChannel
from wire.types import CameraSpec, Frame, Observation


def heard(line: SharedChannel) -> list[Message]:
    found: list[Message] = []
    while (message := line.recv()) is not None:
        found.append(message)
    return found


def test_steps_and_each_frame_once_through_shared_memory(tmp_path: Path) -> None:
    uplink, control = (record_channel(tmp_path, samples.spec(), uplink=side) for side in (True, False))
    recorder = StepRecorder(control)
    recorder.start(samples.episode())
    for tick in range(3):
        recorder.step(samples.observation(frame_ns=90), samples.step(tick))
    assert recorder.healthy
    assert [type(message) for message in heard(uplink)] == [EpisodeStarted, FrameRecorded, *[StepRecorded] * 3]
    uplink.close()
    control.close()


def test_with_nobody_there_it_is_not_healthy_and_keeps_what_it_has(tmp_path: Path) -> None:
    control = record_channel(tmp_path, samples.spec(), uplink=False)
    recorder = StepRecorder(control, backlog=3)
    recorder.start(samples.episode())
    recorder.step(samples.observation(), samples.step(0))
    assert not recorder.healthy
    uplink = record_channel(tmp_path, samples.spec(), uplink=True)
    assert recorder.healthy
    assert [type(message) for message in heard(uplink)] == [EpisodeStarted, FrameRecorded, StepRecorded]
    uplink.close()
    control.close()


def test_a_picture_for_people_that_is_too_large_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    uplink, control = (SharedChannel(tmp_path / "line", bind=side, capacity_bytes=1 << 16) for side in (True, False))
    recorder = StepRecorder(control)
    recorder.start(samples.episode())
    seen = samples.observation()
    image = seen.images["front"].image
    larger = Frame(90, image, np.zeros((300, 300, 3), np.uint8))
    recorder.step(Observation(seen.time_ns, seen.state, {"front": larger}, seen.task), samples.step(0))
    frame = next(message.frame for message in heard(uplink) if isinstance(message, FrameRecorded))
    assert frame.preview is None and np.array_equal(frame.image, image)
    uplink.close()
    control.close()


# --- frames that lie in memory that is used again -------------------------------------------------------------------


class Shared:
    """A ring of frames, and observations of what lies there."""

    def __init__(self, place: Path) -> None:
        self.ring = FrameRing(place / "frames", samples.spec(), write=True)

    def see(self, number: int) -> Observation:
        at = self.ring.put("front", Frame(10 * number, np.full((8, 8, 3), number, np.uint8)))
        frame = self.ring.view("front", at)
        assert frame is not None
        return Observation(10 * number + 1, np.zeros(4, np.float32), {"front": frame}, "reach")

    def go_round(self) -> None:
        """Overwrite all that lies there."""
        for number in range(200, 230):
            self.ring.put("front", Frame(10 * number, np.full((8, 8, 3), number, np.uint8)))


def pictures(messages: list[Message]) -> list[tuple[int, int]]:
    """(time, colour) of each frame; every pixel has it."""
    found = []
    for message in messages:
        if isinstance(message, FrameRecorded):
            assert message.frame.image.min() == message.frame.image.max()
            found.append((message.frame.time_ns, int(message.frame.image[0, 0, 0])))
    return found


def test_a_frame_that_waits_for_the_uplink_is_kept_before_it_is_overwritten(tmp_path: Path) -> None:
    shared = Shared(tmp_path)
    control = record_channel(tmp_path, samples.spec(), uplink=False)
    recorder = StepRecorder(control)
    recorder.start(samples.episode())
    for number in (1, 2):
        recorder.step(shared.see(number), samples.step(number, frame_ns=10 * number))
    shared.go_round()
    uplink = record_channel(tmp_path, samples.spec(), uplink=True)
    assert recorder.healthy
    assert pictures(heard(uplink)) == [(10, 1), (20, 2)]
    uplink.close()
    control.close()


class Slow:
    """A ring that goes round whenever a picture has been copied out of it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def __call__(self, camera: str, number: int) -> bool:
        self._shared.go_round()
        return FrameRing.has(self._shared.ring, camera, number)


@pytest.mark.parametrize("uplink_there", [True, False])
def test_a_frame_that_is_overwritten_while_it_is_copied_is_never_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uplink_there: bool
) -> None:
    shared = Shared(tmp_path)
    ends = [
        record_channel(tmp_path, samples.spec(), uplink=side) for side in ((True, False) if uplink_there else (False,))
    ]
    recorder = StepRecorder(ends[-1])
    recorder.start(samples.episode())
    recorder.step(shared.see(1), samples.step(1, frame_ns=10))
    spoiled = shared.see(2)
    with monkeypatch.context() as patched:
        patched.setattr(shared.ring, "has", Slow(shared))
        with pytest.raises(InvalidDataError, match="the frame of 20 ns was overwritten"):
            recorder.step(spoiled, samples.step(2, frame_ns=20))
    recorder.end("aborted", 1)
    if not uplink_there:
        ends.insert(0, record_channel(tmp_path, samples.spec(), uplink=True))
    assert recorder.healthy
    messages = heard(ends[0])
    assert pictures(messages) == [(10, 1)]
    assert [m.step.tick for m in messages if isinstance(m, StepRecorded)] == [1], "nor a step that saw it"
    for end in ends:
        end.close()


def test_a_frame_without_its_picture_for_people_is_still_known_to_lie_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Shared(tmp_path)
    large = msgspec.structs.replace(samples.spec(), cameras=(CameraSpec("front", 300, 300, 20.0),))
    previews = FrameRing(tmp_path / "previews", large, write=True)
    line = [SharedChannel(tmp_path / "line", bind=side, capacity_bytes=1 << 16) for side in (True, False)]
    recorder = StepRecorder(line[1])
    recorder.start(samples.episode())
    seen = shared.see(1)
    larger = previews.view("front", previews.put("front", Frame(10, np.zeros((300, 300, 3), np.uint8))))
    assert larger is not None and isinstance(seen.images["front"], SharedFrame)
    both = with_preview(seen.images["front"], larger)
    monkeypatch.setattr(shared.ring, "has", Slow(shared))
    with pytest.raises(InvalidDataError, match="the frame of 10 ns was overwritten"):
        recorder.step(Observation(seen.time_ns, seen.state, {"front": both}, seen.task), samples.step(0))
    assert pictures(heard(line[0])) == []
    for end in line:
        end.close()
