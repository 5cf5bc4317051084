"""Requests whose images lie in shared memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests import samples
from tests.wire.transport.rings import SLOTS, SPEC, Rings, frame
from tests.wire.transport.rings import rings as rings
from wire.messages.gateway import Heartbeat
from wire.messages.local import ChunkReply, ChunkRequest, SharedFrameEnvelope, ThinkRequest
from wire.transport.frame_ring import FrameRing, intact, without_previews
from wire.transport.shared_channel import SharedChannel
from wire.types import CameraSpec, Frame, Observation, RobotSpec


def seen(number: int, preview: bool = False) -> Observation:
    made = frame(number)
    if preview:
        made = Frame(made.time_ns, made.image, np.zeros((16, 16, 3), np.uint8))
    return Observation(10 * number + 5, np.zeros(4, np.float32), {"front": made}, "reach")


def ends(place: Path, rings: Rings) -> tuple[SharedChannel, SharedChannel]:
    """Control's end, whose process writes the frames, and that of inference."""
    writer, reader = rings
    path = place / "line"
    return SharedChannel(path, bind=True, ring=writer), SharedChannel(path, bind=False, ring=reader)


def test_a_robot_without_cameras(tmp_path: Path) -> None:
    spec = samples.spec(camera=False)
    writer, reader = FrameRing(tmp_path / "none", spec, write=True), FrameRing(tmp_path / "none", spec, write=False)
    near, far = ends(tmp_path, (writer, reader))
    plain = Observation(1, np.zeros(4, np.float32), {}, "reach")
    assert near.send(ChunkRequest(1, plain, 1, plain.state))
    came = far.recv()
    assert isinstance(came, ChunkRequest)
    assert came.observation.images == {}


def test_requests_cross_without_their_images(rings: Rings, tmp_path: Path) -> None:
    control, _ = ends(tmp_path, rings)
    raw_end = SharedChannel(tmp_path / "line", bind=False)
    sent = seen(4, preview=True)
    assert control.send(ChunkRequest(7, sent, 9, sent.state + 1, None, True))
    raw = raw_end.recv()
    assert isinstance(raw, SharedFrameEnvelope)
    assert raw.message.observation.images == {}
    assert raw.frames == {"front": 1}

    inference = SharedChannel(tmp_path / "line", bind=False, ring=rings[1])
    control.send(ChunkRequest(7, sent, 9, sent.state + 1, None, True))
    came = inference.recv()
    assert isinstance(came, ChunkRequest)
    assert (came.tick, came.first_tick, came.residual, came.observation.task) == (7, 9, True, "reach")
    picture = came.observation.images["front"]
    assert (picture.time_ns, picture.preview) == (40, None)
    assert (picture.image == 4).all()
    assert intact(came.observation)

    assert inference.send(ChunkReply(None, "no", 7))
    reply = control.recv()
    assert isinstance(reply, ChunkReply)
    assert reply.error == "no"


def test_a_view_is_passed_on_by_its_number(rings: Rings, tmp_path: Path) -> None:
    """Inference, which cannot write, lets a thinking process see the same frame."""
    control, inference = ends(tmp_path, rings)
    control.send(ChunkRequest(1, seen(5), 1, seen(5).state))
    came = inference.recv()
    assert isinstance(came, ChunkRequest)
    near = SharedChannel(tmp_path / "think", bind=True, ring=rings[1])
    far = SharedChannel(tmp_path / "think", bind=False)
    near.send(ThinkRequest(1, (1,), came.observation))
    raw = far.recv()
    assert isinstance(raw, SharedFrameEnvelope)
    assert raw.frames == {"front": 1}
    # What is in no ring goes as it is.
    near.send(ThinkRequest(2, (1,), seen(6, preview=True)))
    whole = far.recv()
    assert isinstance(whole, ThinkRequest)
    assert (whole.observation.images["front"].image == 6).all()
    assert whole.observation.images["front"].preview is None


def test_a_request_that_waited_too_long_is_dropped(
    rings: Rings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    control, inference = ends(tmp_path, rings)
    for number in range(1, SLOTS + 3):
        control.send(ChunkRequest(number, seen(number), number, seen(number).state))
    ticks = []
    while (message := inference.recv()) is not None:
        assert isinstance(message, ChunkRequest)
        ticks.append(message.tick)
    assert ticks == list(range(3, SLOTS + 3))
    assert inference.lost == 2
    assert "overwritten; it is dropped (2 so far)" in caplog.text


def test_other_messages_pass(rings: Rings, tmp_path: Path) -> None:
    near, far = ends(tmp_path, rings)
    near.send(Heartbeat(3))
    message = far.recv()
    assert isinstance(message, Heartbeat)


def test_plain_observations_are_always_intact_and_stay_what_they_are() -> None:
    plain = samples.observation()
    assert intact(plain)
    assert without_previews(plain) is plain


BIG = RobotSpec("big", SPEC.state, SPEC.action, (CameraSpec("front", 480, 640, 5.0),), 50.0)

WRITER = """
import os, sys
from pathlib import Path
import numpy as np
from tests.wire.transport.test_shared_frames import BIG
from wire.transport.frame_ring import FrameRing
from wire.messages.local import ChunkRequest
from wire.transport.shared_channel import SharedChannel
from wire.types import Frame, Observation
place = Path(sys.argv[1])
line = SharedChannel(place / "line", bind=True, ring=FrameRing(place / "frames", BIG, write=True))
number, state, parent = 0, np.zeros(4, np.float32), os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    number += 1
    image = np.full((480, 640, 3), number % 256, np.uint8)
    line.send(ChunkRequest(number, Observation(number, state, {"front": Frame(number, image)}, ""), number, state))
"""


@pytest.mark.slow
def test_a_control_process_killed_in_the_middle_of_a_frame(tmp_path: Path) -> None:
    """Whatever is still called intact after it was used has one colour only; the successor's frames are new ones."""
    ring = FrameRing(tmp_path / "frames", BIG, write=False)
    line = SharedChannel(tmp_path / "line", bind=False, ring=ring)
    used = 0
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == "ready\n"
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                request = None
                while (message := line.recv()) is not None:
                    request = message
                if request is None:
                    continue
                assert isinstance(request, ChunkRequest)
                image = request.observation.images["front"].image
                low, high, tick = image.min(), image.max(), request.tick
                if intact(request.observation):
                    used += 1
                    assert low == high == tick % 256
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait(60)
            writer.stdout.close()
    assert used > 5
    line.close()
    ring.close()
