"""Requests whose images lie in shared memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from robot_edge.runtime.shared_frames import SharedFrameChannel, intact, without_previews
from tests import samples
from tests.wire.transport.rings import SLOTS, SPEC, Rings, frame
from tests.wire.transport.rings import rings as rings
from wire.messages.all import ChunkReply, ChunkRequest, Heartbeat, SharedFrameEnvelope, ThinkRequest
from wire.transport.frame_ring import FrameRing
from wire.transport.memory_channel import memory_pair
from wire.transport.shared_channel import SharedChannel
from wire.types import CameraSpec, Frame, Observation, RobotSpec


def seen(number: int, preview: bool = False) -> Observation:
    made = frame(number)
    if preview:
        made = Frame(made.time_ns, made.image, np.zeros((16, 16, 3), np.uint8))
    return Observation(10 * number + 5, np.zeros(4, np.float32), {"front": made}, "reach")


def test_a_robot_without_cameras(tmp_path: Path) -> None:
    spec = samples.spec(camera=False)
    writer, reader = FrameRing(tmp_path / "none", spec, write=True), FrameRing(tmp_path / "none", spec, write=False)
    near, far = memory_pair()
    plain = Observation(1, np.zeros(4, np.float32), {}, "reach")
    assert SharedFrameChannel(near, writer).send(ChunkRequest(1, plain, 1, plain.state))
    came = SharedFrameChannel(far, reader).recv()
    assert isinstance(came, ChunkRequest)
    assert came.observation.images == {}


def test_requests_cross_without_their_images(rings: Rings) -> None:
    writer, reader = rings
    near, far = memory_pair()
    control, inference = SharedFrameChannel(near, writer), SharedFrameChannel(far, reader)
    sent = seen(4, preview=True)
    assert control.send(ChunkRequest(7, sent, 9, sent.state + 1, None, True))
    raw = far.recv()
    assert isinstance(raw, SharedFrameEnvelope)
    assert raw.message.observation.images == {}
    assert raw.frames == {"front": 1}

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


def test_a_view_is_passed_on_by_its_number(rings: Rings) -> None:
    """Inference, which cannot write, lets a thinking process see the same frame."""
    writer, reader = rings
    near, far = memory_pair()
    SharedFrameChannel(near, writer).send(ChunkRequest(1, seen(5), 1, seen(5).state))
    came = SharedFrameChannel(far, reader).recv()
    assert isinstance(came, ChunkRequest)
    near, far = memory_pair()
    SharedFrameChannel(near, reader).send(ThinkRequest(1, (1,), came.observation))
    raw = far.recv()
    assert isinstance(raw, SharedFrameEnvelope)
    assert raw.frames == {"front": 1}
    # What is in no ring goes as it is.
    SharedFrameChannel(near, reader).send(ThinkRequest(2, (1,), seen(6, preview=True)))
    whole = far.recv()
    assert isinstance(whole, ThinkRequest)
    assert (whole.observation.images["front"].image == 6).all()
    assert whole.observation.images["front"].preview is None


def test_a_request_that_waited_too_long_is_dropped(rings: Rings, caplog: pytest.LogCaptureFixture) -> None:
    writer, reader = rings
    near, far = memory_pair()
    control, inference = SharedFrameChannel(near, writer), SharedFrameChannel(far, reader)
    for number in range(1, SLOTS + 3):
        control.send(ChunkRequest(number, seen(number), number, seen(number).state))
    ticks = []
    while (message := inference.recv()) is not None:
        assert isinstance(message, ChunkRequest)
        ticks.append(message.tick)
    assert ticks == list(range(3, SLOTS + 3))
    assert inference.late == 2
    assert "overwritten; it is dropped (2 so far)" in caplog.text


def test_other_messages_pass(rings: Rings) -> None:
    near, far = memory_pair()
    SharedFrameChannel(near, rings[0]).send(Heartbeat(3))
    message = SharedFrameChannel(far, rings[1]).recv()
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
from robot_edge.runtime.shared_frames import SharedFrameChannel
from tests.robot_edge.runtime.test_shared_frames import BIG
from wire.transport.frame_ring import FrameRing
from wire.messages.all import ChunkRequest
from wire.transport.shared_channel import SharedChannel
from wire.types import Frame, Observation
place = Path(sys.argv[1])
line = SharedFrameChannel(SharedChannel(place / "line", bind=True), FrameRing(place / "frames", BIG, write=True))
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
    line = SharedFrameChannel(SharedChannel(tmp_path / "line", bind=False), ring)
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
