"""What leaves control for the uplink."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from robot_edge.edge import record_line
from robot_edge.recorder import Recorder
from tests import samples
from wire.messages import EpisodeStarted, FrameTaken, Message, StepTaken
from wire.shared_channel import SharedChannel
from wire.types import Frame, Observation


def heard(line: SharedChannel) -> list[Message]:
    found: list[Message] = []
    while (message := line.recv()) is not None:
        found.append(message)
    return found


def test_steps_and_each_frame_once_through_shared_memory(tmp_path: Path) -> None:
    uplink, control = (record_line(tmp_path, samples.spec(), uplink=side) for side in (True, False))
    recorder = Recorder(control)
    recorder.start(samples.episode())
    for tick in range(3):
        recorder.step(samples.observation(frame_ns=90), samples.step(tick))
    assert recorder.healthy
    assert [type(message) for message in heard(uplink)] == [EpisodeStarted, FrameTaken, *[StepTaken] * 3]
    uplink.close()
    control.close()


def test_with_nobody_there_it_is_not_healthy_and_keeps_what_it_has(tmp_path: Path) -> None:
    control = record_line(tmp_path, samples.spec(), uplink=False)
    recorder = Recorder(control, backlog=3)
    recorder.start(samples.episode())
    recorder.step(samples.observation(), samples.step(0))
    assert not recorder.healthy
    uplink = record_line(tmp_path, samples.spec(), uplink=True)
    assert recorder.healthy
    assert [type(message) for message in heard(uplink)] == [EpisodeStarted, FrameTaken, StepTaken]
    uplink.close()
    control.close()


def test_a_picture_for_people_that_is_too_large_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    uplink, control = (SharedChannel(tmp_path / "line", bind=side, capacity_bytes=1 << 16) for side in (True, False))
    recorder = Recorder(control)
    recorder.start(samples.episode())
    seen = samples.observation()
    image = seen.images["front"].image
    larger = Frame(90, image, np.zeros((300, 300, 3), np.uint8))
    recorder.step(Observation(seen.time_ns, seen.state, {"front": larger}, seen.task), samples.step(0))
    frame = next(message.frame for message in heard(uplink) if isinstance(message, FrameTaken))
    assert frame.preview is None and np.array_equal(frame.image, image)
    uplink.close()
    control.close()
