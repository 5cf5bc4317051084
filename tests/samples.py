"""Small valid values that many tests start from."""

from __future__ import annotations

import json

import numpy as np

from policies.interface.policy import NormalizationData
from wire.messages.gateway import CameraFrames, Segment
from wire.transport.keys import Teaching
from wire.types import (
    ActionChunk,
    Actor,
    CameraSpec,
    CommandType,
    Dimension,
    Episode,
    Frame,
    Observation,
    RobotSpec,
    Step,
)


def spec(camera: bool = True, control_hz: float = 80.0) -> RobotSpec:
    """Four state and four action dimensions, one 8x8 camera."""
    return RobotSpec(
        embodiment="sample",
        state=tuple(Dimension(name, "m", -1.0, 1.0) for name in ("x", "y", "z", "grip")),
        action=(
            *(Dimension(name, "cm/step", -1.0, 1.0, CommandType.delta) for name in ("dx", "dy", "dz")),
            Dimension("grip", "effort", -1.0, 1.0, CommandType.absolute),
        ),
        cameras=(CameraSpec("front", 8, 8, 20.0),) if camera else (),
        control_hz=control_hz,
    )


def episode(name: str = "robot-0", number: int = 0, source: str = "online") -> Episode:
    return Episode(f"{name}-boot-{number:06d}", name, spec().hash, "reach", 500_000 + number, source, 1_000)


def step(tick: int, actor: Actor = Actor.policy, frame_ns: int | None = None, version: int = 3) -> Step:
    return Step(
        tick=tick,
        time_ns=1_000_000 * tick + 10,
        state=np.full(4, tick / 1000, np.float32),
        proposed=np.full(4, 0.5, np.float32),
        executed=np.full(4, 0.25, np.float32),
        actor=actor,
        frames={} if frame_ns is None else {"front": frame_ns},
        chunk_tick=tick,
        delay_ticks=1,
        version=version,
        reward=0.0,
    )


def all_teach(peer: str) -> tuple[Teaching, ...]:
    """For an `Ingest` to which every robot may say by its own word who taught it."""
    return tuple(Teaching)


def image(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)


def observation(time_ns: int = 100, frame_ns: int = 90) -> Observation:
    return Observation(time_ns, np.zeros(4, np.float32), {"front": Frame(frame_ns, image())}, "reach the goal")


def chunk(first_tick: int, horizon: int = 16, version: int = 1) -> ActionChunk:
    actions = np.arange(horizon, dtype=np.float32)[:, None].repeat(4, 1) / 100 + first_tick
    return ActionChunk(actions, first_tick, 12_500_000, version, 0, 0)


def segment(index: int = 0, steps: int = 4, last: bool = True, of: Episode | None = None) -> Segment:
    n = steps
    return Segment(
        id=f"{(of or episode()).id}/{index}",
        episode=of or episode(),
        index=index,
        first_tick=index * n,
        last=last,
        outcome="success" if last else "",
        closed_ns=99,
        times_ns=np.arange(n, dtype=np.int64),
        state=np.zeros((n, 4), np.float32),
        proposed=np.zeros((n, 4), np.float32),
        executed=np.zeros((n, 4), np.float32),
        actor=np.zeros(n, np.uint8),
        chunk_tick=np.zeros(n, np.int32),
        delay_ticks=np.ones(n, np.int16),
        version=np.ones(n, np.int32),
        reward=np.zeros(n, np.float32),
        terminated=np.zeros(n, bool),
        truncated=np.zeros(n, bool),
        frame_times_ns={"front": np.zeros(n, np.int64)},
        frames={"front": CameraFrames(np.zeros(1, np.int64), (b"jpeg",))},
    )


def states_only(states: np.ndarray) -> NormalizationData:
    """Examples without a chunk."""
    return NormalizationData(np.asarray(states, np.float32), np.zeros((0, 1, 1), np.float32))


def weights(seed: int = 0, size: int = 1000) -> bytes:
    """A weights file of `size` bytes, at least 300, with one tensor."""
    count = (size - 200) // 4
    tensors = {"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
    head = json.dumps(tensors).encode().ljust(size - 8 - 4 * count)
    return (
        len(head).to_bytes(8, "little")
        + head
        + np.random.default_rng(seed).standard_normal(count, np.float32).tobytes()
    )
