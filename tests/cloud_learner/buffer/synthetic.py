"""Episodes nobody ever drove: valid segments of random steps and JPEG frames, for tests and measurements."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from wire.messages.gateway import CameraFrames, Segment
from wire.types import CameraSpec, Dimension, Episode, RobotSpec

_START_NS = 10**12
CLOSING_NS = 1_000_000
"""from a segment's last step until it was closed"""


def fake_spec(cameras: int = 1, state_dim: int = 4, size: int = 64) -> RobotSpec:
    """A robot of 80 Hz with `cameras` square cameras of 20 Hz and 4 action dimensions."""
    return RobotSpec(
        embodiment="fake",
        state=tuple(Dimension(f"s{i}", "m", -1.0, 1.0) for i in range(state_dim)),
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
    ticks = np.arange(steps, dtype=np.int64)
    times = _START_NS + ticks * spec.period_ns
    seen, frames = {}, {}
    for c, camera in enumerate(spec.cameras):
        period = round(spec.control_hz / camera.rate_hz)
        seen[camera.name] = (_START_NS - 1000 + (ticks // period) * period * spec.period_ns - c).astype(np.int64)
        frames[camera.name] = {
            int(time): fake_jpeg(camera.height, camera.width, rng) for time in np.unique(seen[camera.name])
        }
    state = rng.normal(size=(steps, spec.state_dim)).astype(np.float32)
    proposed, executed = rng.uniform(-1, 1, (2, steps, spec.action_dim)).astype(np.float32)
    episode = Episode(episode_id, robot, spec.hash, task, seed, source, _START_NS)
    found = []
    for index, first in enumerate(range(0, steps, segment_steps)):
        here = slice(first, min(first + segment_steps, steps))
        last = finished and here.stop == steps
        brought = {}
        for camera in spec.cameras:
            # a frame comes with the first segment whose steps saw it
            old = set(seen[camera.name][:first].tolist())
            fresh = [time for time in np.unique(seen[camera.name][here]).tolist() if time not in old]
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
                chunk_tick=(ticks[here] // 8 * 8).astype(np.int32),
                delay_ticks=np.full(count, 2, np.int16),
                version=np.full(count, 1, np.int32),
                reward=rng.random(count).astype(np.float32),
                terminated=(ticks[here] == steps - 1) & last,
                truncated=np.zeros(count, bool),
                frame_times_ns={camera: times_seen[here] for camera, times_seen in seen.items()},
                frames=brought,
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
    return all(_same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, CameraFrames) and isinstance(b, CameraFrames):
        return _same(a.times_ns, b.times_ns) and a.encoded == b.encoded
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b
