"""What the robots of `benchmarks.wire` send: encoded once, so that the load costs little where it is made.

An episode has four segments of 80 steps, with two cameras of 128 pixels that take 20 pictures a second: some 350 kB a
second and robot.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cv2
import msgspec
import numpy as np

from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from robot_edge.uplink.segments import SegmentBuilder, encode_jpeg
from wire.codec import encode
from wire.messages.gateway import EdgeStatus, Preview, RecordedChunk, Segment, TerminalObservation
from wire.types import Actor, CameraSpec, CommandType, Dimension, Episode, EpisodeSource, Mode, RobotSpec, Step

RECIPE = "benchmarks.wire.samples:recipe"
TASKS = ("go-left",)
HZ, CAMERA_HZ, PIXELS, STEPS, SEGMENTS = 80.0, 20.0, 128, 80, 4
SEGMENT_S = STEPS / HZ
STATUS_S = 0.2
"""as control sends them"""
_JOINTS = 7
SPEC = RobotSpec(
    embodiment="wire-benchmark-arm",
    state=tuple(Dimension(f"joint_{number}", "rad", -3.0, 3.0) for number in range(_JOINTS)),
    action=tuple(Dimension(f"joint_{number}", "rad/s", -3.0, 3.0, CommandType.velocity) for number in range(_JOINTS)),
    cameras=tuple(CameraSpec(name, PIXELS, PIXELS, CAMERA_HZ) for name in ("front", "wrist")),
    control_hz=HZ,
)
_ROBOT, _EPISODE = "robot-name", "episode-" + 24 * "x"
"""stand for the names that are put in their place: as long"""
_HEAD_BYTES = 512
_TICKS_PER_FRAME, _TICKS_PER_CHUNK, _HORIZON = int(HZ / CAMERA_HZ), 8, 16


def recipe(seed: int = 0) -> Recipe:
    """The fake job, for robots of `SPEC`."""
    return replace(fake(seed), spec=SPEC, tasks=TASKS, instructions={task: task for task in TASKS}, motion=None)


def robot_names(count: int) -> list[str]:
    """All of one length."""
    return [f"robot-{number:04d}" for number in range(count)]


class EncodedSegment(NamedTuple):
    """A segment on its way."""

    id: str
    data: bytes


def segments_of(robot: str, run: str, number: int) -> list[EncodedSegment]:
    """Episode `number` of a robot in this `run`, whose name has 8 characters: ids change, all else is as ever."""
    name = f"{robot}-{run}-{number:012d}"
    assert len(robot) == len(_ROBOT)
    assert len(name) == len(_EPISODE)
    found = []
    for index, (head, tail) in enumerate(_templates()):
        head = head.replace(_EPISODE.encode(), name.encode()).replace(_ROBOT.encode(), robot.encode())
        found.append(EncodedSegment(f"{name}/{index}", head + tail))
    return found


def status(robot: str) -> bytes:
    """Its status, encoded: it works by its policy."""
    plain: dict[str, Any] = {
        field.name: _blank(field.type) for field in msgspec.structs.fields(EdgeStatus) if field.required
    }
    plain |= {
        "robot": robot,
        "mode": Mode.policy,
        "task": TASKS[0],
        "job": "main",
        "state": np.zeros(_JOINTS, np.float32),
    }
    return encode(EdgeStatus(**plain))


def previews(robot: str) -> list[bytes]:
    """A picture of each camera for people, encoded."""
    return [encode(Preview(robot, camera.name, 1, _picture(number))) for number, camera in enumerate(SPEC.cameras)]


def _blank(kind: object) -> object:
    return {str: "", int: 0, float: 0.0}.get(kind)  # type: ignore[call-overload]


@functools.cache
def _picture(seed: int) -> bytes:
    """JPEG of something smooth with the noise of a camera."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=(18, 18, 3)).astype(np.float32)
    smooth = cv2.resize(coarse, (PIXELS, PIXELS), interpolation=cv2.INTER_CUBIC)
    noisy = 128 + 50 * smooth + rng.normal(scale=4, size=smooth.shape)
    return encode_jpeg(np.clip(noisy, 0, 255).astype(np.uint8))


@functools.cache
def _templates() -> Sequence[tuple[bytes, bytes]]:
    """The segments of an episode in two parts; the names lie in the first."""
    episode = Episode(_EPISODE, _ROBOT, SPEC.hash, TASKS[0], 1, EpisodeSource.online, 1)
    builder, rng, made = SegmentBuilder(episode, STEPS), np.random.default_rng(1), list[Segment | None]()
    # pictures are drawn below: encoding eight hundred of them would take seconds
    blank, frame_ns = np.zeros((8, 8, 3), np.uint8), 0
    for tick in range(SEGMENTS * STEPS):
        now_ns = 1 + round((1 + tick) * 1e9 / HZ)
        if tick % _TICKS_PER_FRAME == 0:
            frame_ns = now_ns - 1
            for camera in SPEC.cameras:
                builder.frame(camera.name, frame_ns, blank)
        state, action = rng.uniform(-1, 1, (2, _JOINTS)).astype(np.float32)
        chunk_tick = tick - tick % _TICKS_PER_CHUNK
        frames = {camera.name: frame_ns for camera in SPEC.cameras}
        step = Step(tick, now_ns, state, action, action, Actor.policy, frames, chunk_tick, 2, 0, 0.0)
        chunk = RecordedChunk(tick, 0, rng.uniform(-1, 1, (_HORIZON, _JOINTS)).astype(np.float32), now_ns, 1, 0.0)
        made.append(builder.step(step, chunk if chunk_tick == tick else None))
    end = TerminalObservation(now_ns + 1, state, frames)
    made.append(builder.end("failure", now_ns + 2, end))
    return [_split(segment, number) for number, segment in enumerate(filter(None, made))]


def _split(segment: Segment, number: int) -> tuple[bytes, bytes]:
    frames = {
        camera: msgspec.structs.replace(
            some, encoded=tuple(_picture(10 * number + picture % 10) for picture in range(len(some.encoded)))
        )
        for camera, some in segment.frames.items()
    }
    data = encode(msgspec.structs.replace(segment, frames=frames))
    return data[:_HEAD_BYTES], data[_HEAD_BYTES:]
