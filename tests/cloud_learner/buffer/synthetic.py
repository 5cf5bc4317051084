"""Episodes nobody ever drove: valid segments of random steps and JPEG frames, for tests and measurements."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from wire import codec
from wire.messages.gateway import ACTORS, CameraFrames, RecordedChunk, Segment, TerminalObservation
from wire.types import Actor, CameraSpec, Dimension, Episode, RobotSpec

_START_NS = 10**12
_HORIZON, _EXECUTED = 16, 8
"""actions of a chunk, and how many of them are executed"""
CLOSING_NS = 1_000_000
"""from a segment's last step until it was closed"""


def fake_spec(cameras: int = 1, state_dim: int = 4, size: int = 64) -> RobotSpec:
    """A robot of 80 Hz with `cameras` square cameras of 20 Hz and 4 action dimensions."""
    return RobotSpec(
        embodiment="fake",
        # drawn from a normal distribution
        state=tuple(Dimension(f"s{i}", "m", -5.0, 5.0) for i in range(state_dim)),
        action=tuple(Dimension(f"a{i}", "m", -1.0, 1.0) for i in range(4)),
        cameras=tuple(CameraSpec(f"camera{i}", size, size, 20.0) for i in range(cameras)),
        control_hz=80.0,
    )


def fake_episode(
    spec: RobotSpec,
    episode_id: str,
    *,
    robot: str = "r1",
    task: str = "drawer-open",
    source: str = "online",
    steps: int = 200,
    segment_steps: int = 80,
    actor: Sequence[int] | None = None,
    seed: int = 0,
    finished: bool = True,
) -> tuple[Segment, ...]:
    """The segments of one episode. `actor`: `steps` indices into `ACTORS`; random runs of all four when None."""
    rng = np.random.default_rng(seed)
    if actor is None:
        changes = np.cumsum(rng.random(steps) < 0.08)
        actor = rng.integers(0, 4, steps + 1)[changes].tolist()
    # one more than there are steps: the terminal observation
    ticks = np.arange(steps + 1, dtype=np.int64)
    times = _START_NS + ticks * spec.period_ns
    seen, frames = {}, {}
    for c, camera in enumerate(spec.cameras):
        period = round(spec.control_hz / camera.rate_hz)
        seen[camera.name] = (_START_NS - 1000 + (ticks // period) * period * spec.period_ns - c).astype(np.int64)
        frames[camera.name] = {
            int(time): fake_jpeg(camera.height, camera.width, rng) for time in np.unique(seen[camera.name])
        }
    state = rng.normal(size=(steps + 1, spec.state_dim)).astype(np.float32)
    proposed, executed = rng.uniform(-1, 1, (2, steps, spec.action_dim)).astype(np.float32)
    chunk_tick = (ticks // _EXECUTED * _EXECUTED).astype(np.int32)
    acts_first: dict[int, int] = {}
    for tick in np.flatnonzero(np.array(actor[:steps]) == ACTORS.index(Actor.policy)).tolist():
        acts_first.setdefault(int(chunk_tick[tick]), tick)
    made = rng.uniform(-1, 1, (len(acts_first), _HORIZON, spec.action_dim)).astype(np.float32)
    chunks = {
        tick: RecordedChunk(first, 1, actions, int(times[first]), first + 1, -1.0)
        for (first, tick), actions in zip(acts_first.items(), made, strict=True)
    }
    episode = Episode(episode_id, robot, spec.hash, task, seed, source, _START_NS)
    found = []
    for index, first in enumerate(range(0, steps, segment_steps)):
        here = slice(first, min(first + segment_steps, steps))
        last = finished and here.stop == steps
        observed = slice(first, here.stop + last)
        brought = {}
        for camera in spec.cameras:
            # a frame comes with the first segment whose steps saw it
            old = set(seen[camera.name][:first].tolist())
            fresh = [time for time in np.unique(seen[camera.name][observed]).tolist() if time not in old]
            encoded = tuple(frames[camera.name][time] for time in fresh)
            brought[camera.name] = CameraFrames(np.array(fresh, np.int64), encoded)
        count = here.stop - first
        found.append(
            Segment(
                id=f"{episode_id}/{index}",
                episode=episode,
                index=index,
                first_tick=first,
                last=last,
                outcome="success" if last else "",
                closed_ns=int(times[here.stop - 1]) + CLOSING_NS,
                times_ns=times[here],
                state=state[here],
                proposed=proposed[here],
                executed=executed[here],
                actor=np.array(actor[here], np.uint8),
                chunk_tick=chunk_tick[here],
                delay_ticks=np.full(count, 2, np.int16),
                version=np.full(count, 1, np.int32),
                reward=rng.random(count).astype(np.float32),
                terminated=(ticks[here] == steps - 1) & last,
                truncated=np.zeros(count, bool),
                frame_times_ns={camera: times_seen[here] for camera, times_seen in seen.items()},
                frames=brought,
                terminal=TerminalObservation(
                    int(times[steps]), state[steps], {camera: int(times[steps]) for camera, times in seen.items()}
                )
                if last
                else None,
                chunks=tuple(chunks[tick] for tick in range(first, here.stop) if tick in chunks),
            )
        )
    return tuple(found)


def fake_jpeg(height: int, width: int, rng: np.random.Generator) -> bytes:
    """A smooth random RGB picture as JPEG: about as many bytes as a camera's."""
    coarse = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    image = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    return cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))[1].tobytes()


def same_segment(a: Segment, b: Segment) -> bool:
    """Whether two segments agree to the last bit."""
    return codec.encode(a) == codec.encode(b)
