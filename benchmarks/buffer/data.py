"""What `benchmarks.buffer` fills all buffers with: pictures and motions like those of a robot with two cameras.

A picture is a smooth scene with edges, seen by a camera that drifts, with an arm that moves before it and a sensor's
noise. It is encoded once, at the quality of an edge, and everybody gets what comes out of the decoder: the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import cv2
import numpy as np

from robot_edge.uplink.segments import encode_jpeg
from wire.messages.gateway import ACTORS, CameraFrames, Segment
from wire.types import CameraSpec, Dimension, Episode, RobotSpec

CAMERAS = ("front", "wrist")
STATES = ACTIONS = 14
CONTROL_HZ = 80.0
JPEG_QUALITY = 95
HORIZON = 16
SEGMENT_STEPS = 80
TASK = "drawer-open"
START_NS = 10**12
_NOISE = 3.0
"""standard deviation of a sensor's noise, of 255"""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much data, and how often the cameras see something new."""

    episodes: int
    frames: int
    """of each camera in each episode"""
    steps_per_frame: int
    """control steps that see the same frame: 4 for cameras of 20 Hz, 1 for a frame at every step"""
    size: int = 128

    @property
    def episode_steps(self) -> int:
        return self.frames * self.steps_per_frame

    @property
    def steps(self) -> int:
        return self.episodes * self.episode_steps

    @property
    def decoded_bytes(self) -> int:
        """of all frames of all cameras, each once"""
        return self.episodes * self.frames * len(CAMERAS) * self.size**2 * 3

    def spec(self) -> RobotSpec:
        rate = CONTROL_HZ / self.steps_per_frame
        return RobotSpec(
            embodiment="two-arms",
            state=tuple(Dimension(f"joint{i}", "rad", *_range(i)) for i in range(STATES)),
            action=tuple(Dimension(f"target{i}", "rad", *_range(i)) for i in range(ACTIONS)),
            cameras=tuple(CameraSpec(name, self.size, self.size, rate) for name in CAMERAS),
            control_hz=CONTROL_HZ,
        )


def _range(i: int) -> tuple[float, float]:
    """Of dimension `i` of states and actions: the first two say which episode and which step it is."""
    return (0.0, 1e9) if i < 2 else (-4.0, 4.0)


@dataclass(slots=True)
class Raw:
    """All steps and decoded frames of `Scale.episodes` episodes, flat."""

    scale: Scale
    frames: tuple[np.ndarray, ...]
    """by camera: uint8[F, h, w, 3]"""
    state: np.ndarray
    """float32[T, ds]; the first two numbers are those of the episode and of the tick"""
    actions: np.ndarray
    """float32[T, da]"""

    @property
    def frame(self) -> np.ndarray:
        """int64[T]: the frame each step saw, the same of both cameras"""
        return np.arange(len(self.state)) // self.scale.steps_per_frame

    def windows(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64[b, H] steps of the windows at `starts` int64[b], the episode's last where it is over, and float32[b, H]
        the mask."""
        length = self.scale.episode_steps
        wanted = starts[:, None] + np.arange(HORIZON)
        last = (starts // length * length + length - 1)[:, None]
        return np.minimum(wanted, last), (wanted <= last).astype(np.float32)


class Scene:
    """One camera's pictures of one episode."""

    def __init__(self, rng: np.random.Generator, size: int) -> None:
        wide = size * 3 // 2
        coarse = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
        self._scene = cv2.resize(coarse, (wide, wide), interpolation=cv2.INTER_CUBIC)
        for _ in range(6):
            corner = rng.integers(0, wide, 2)
            colour = rng.integers(0, 256, 3).tolist()
            cv2.rectangle(self._scene, corner.tolist(), (corner + rng.integers(6, size // 3, 2)).tolist(), colour, -1)
        self._size, self._rng = size, rng
        self._phase, self._speed = rng.uniform(0, 6.28, 4), rng.uniform(0.02, 0.09, 4)
        # one field of noise, seen at another place in each frame: drawing it anew would take longer than all else
        self._noise = rng.normal(0, _NOISE, (wide, wide, 3)).astype(np.int16)

    def picture(self, number: int) -> np.ndarray:
        """uint8[h, w, 3]"""
        size, reach = self._size, self._size // 2
        swing = np.sin(self._phase + self._speed * number)
        y, x = (reach * (swing[:2] + 1) / 2).astype(int)
        image = self._scene[y : y + size, x : x + size].copy()
        elbow = (size / 2 + size / 3 * swing[2:]).astype(int)
        hand = elbow + (size / 4 * swing[:2]).astype(int)
        cv2.line(image, (size // 2, size), elbow.tolist(), (60, 60, 70), size // 12)
        cv2.line(image, elbow.tolist(), hand.tolist(), (200, 120, 40), size // 16)
        y, x = self._rng.integers(0, reach, 2)
        return np.clip(image + self._noise[y : y + size, x : x + size], 0, 255).astype(np.uint8)


def make(scale: Scale, take: Callable[[Segment], object], seed: int = 0, first_episode: int = 0) -> Raw:
    """Give every segment to `take`, in order; answers with the same data flat and decoded."""
    size, rng = scale.size, np.random.default_rng(seed)
    frames = tuple(np.empty((scale.episodes * scale.frames, size, size, 3), np.uint8) for _ in CAMERAS)
    length = scale.episode_steps
    state = np.empty((scale.steps, STATES), np.float32)
    actions = np.empty((scale.steps, ACTIONS), np.float32)
    for episode in range(scale.episodes):
        here = slice(episode * length, (episode + 1) * length)
        state[here], actions[here] = motion(rng, length, first_episode + episode)
        encoded = encoded_frames(rng, scale)
        for store, images in zip(frames, encoded, strict=True):
            for number, image in enumerate(images):
                store[episode * scale.frames + number] = decode(image)
        for segment in segments(scale, first_episode + episode, state[here], actions[here], encoded):
            take(segment)
    return Raw(scale, frames, state, actions)


def motion(rng: np.random.Generator, steps: int, episode: int) -> tuple[np.ndarray, np.ndarray]:
    """float32[T, ds] states and float32[T, da] actions of smooth swings with a little noise."""
    phase, speed = rng.uniform(0, 6.28, ACTIONS), rng.uniform(0.005, 0.04, ACTIONS)
    actions = np.sin(phase + speed * np.arange(steps)[:, None]).astype(np.float32)
    state = (actions + rng.normal(0, 0.01, actions.shape)).astype(np.float32)
    # whoever reads a sample can tell where it must come from
    state[:, 0], state[:, 1] = episode, np.arange(steps)
    return state, actions


def encoded_frames(rng: np.random.Generator, scale: Scale) -> tuple[tuple[bytes, ...], ...]:
    """By camera: the JPEG pictures of one episode."""
    scenes = [Scene(rng, scale.size) for _ in CAMERAS]
    return tuple(
        tuple(encode_jpeg(scene.picture(number), JPEG_QUALITY) for number in range(scale.frames)) for scene in scenes
    )


def decode(image: bytes) -> np.ndarray:
    """uint8[h, w, 3], RGB"""
    found = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)
    assert found is not None
    return cv2.cvtColor(found, cv2.COLOR_BGR2RGB)


def segments(
    scale: Scale,
    number: int,
    state: np.ndarray,
    actions: np.ndarray,
    encoded: tuple[tuple[bytes, ...], ...],
    robot: str = "robot-0",
    segment_steps: int = SEGMENT_STEPS,
) -> Iterator[Segment]:
    """The segments of episode `number`: a demonstration by script, all of whose steps may be learned from."""
    spec, steps = scale.spec(), len(state)
    episode = Episode(f"{robot}-{number:06d}", robot, spec.hash, TASK, number, "demonstration", START_NS)
    ticks = np.arange(steps, dtype=np.int64)
    times = START_NS + ticks * spec.period_ns
    seen = times[ticks // scale.steps_per_frame * scale.steps_per_frame] - 1000
    for index, first in enumerate(range(0, steps, segment_steps)):
        here = slice(first, min(first + segment_steps, steps))
        count, last = here.stop - first, here.stop == steps
        # a frame comes with the segment in which it was first seen
        new = slice(-(-first // scale.steps_per_frame), -(-here.stop // scale.steps_per_frame))
        taken = times[:: scale.steps_per_frame][new] - 1000
        yield Segment(
            id=f"{episode.id}/{index}",
            episode=episode,
            index=index,
            first_tick=first,
            last=last,
            outcome="success" if last else "",
            closed_ns=int(times[here.stop - 1]) + 1_000_000,
            times_ns=times[here],
            state=state[here],
            proposed=actions[here],
            executed=actions[here],
            actor=np.full(count, ACTORS.index("script"), np.uint8),
            chunk_tick=np.full(count, -1, np.int32),
            delay_ticks=np.full(count, -1, np.int16),
            version=np.zeros(count, np.int32),
            reward=(ticks[here] == steps - 1).astype(np.float32),
            terminated=ticks[here] == steps - 1,
            truncated=np.zeros(count, bool),
            frame_times_ns=dict.fromkeys(CAMERAS, seen[here]),
            frames={camera: CameraFrames(taken, images[new]) for camera, images in zip(CAMERAS, encoded, strict=True)},
        )
