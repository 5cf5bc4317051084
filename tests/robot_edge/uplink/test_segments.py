"""Segments made of the steps of an episode."""

from __future__ import annotations

import numpy as np

from robot_edge.uplink.segments import SegmentBuilder
from tests import samples
from wire.messages.gateway import RecordedChunk, Segment


def test_the_ticks_of_a_segment_follow_each_other() -> None:
    """Of a skipped period, or a tick without a valid observation, there is no step."""
    builder = SegmentBuilder(samples.episode(), 4)
    found: list[Segment | None] = []
    ticks = [0, 1, 2, 5, 6, 7, 8, 9, 20]
    for tick in ticks:
        if tick in (0, 6):
            builder.frame("front", 10 * tick + 1, samples.image(tick))
        chunk = RecordedChunk(tick, 1, np.zeros((4, 4), np.float32), 0, 0, 0.0) if tick in (2, 5) else None
        found.append(builder.step(samples.step(tick, frame_ns=1 if tick < 6 else 61), chunk))
    found.append(builder.end("success", 1_000))
    segments = [segment for segment in found if segment is not None]
    assert [(s.first_tick, s.steps, s.last) for s in segments] == [
        (0, 3, False),
        (5, 4, False),
        (9, 1, False),
        (20, 1, True),
    ]
    stored = [(s.first_tick + i, float(s.state[i, 0])) for s in segments for i in range(s.steps)]
    assert stored == [(tick, float(np.float32(tick / 1000))) for tick in ticks]
    assert [s.index for s in segments] == [0, 1, 2, 3]
    # each frame once, with the first segment that saw it; each chunk with the step that began it
    assert [s.frames["front"].times_ns.tolist() for s in segments] == [[1], [61], [], []]
    assert [[chunk.first_tick for chunk in s.chunks] for s in segments] == [[2], [5], [], []]
