"""The latent buffer: newest of each version, never of another."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from robot_edge.inference.slow_path import LatentBuffer, StampedLatent, seen_ns
from tests import samples
from tests.robot_edge.inference.thinking import seen
from wire.types import Frame, Latent, Observation


def thought(version: int, frame_ns: int, task: str = "reach") -> StampedLatent:
    return StampedLatent(Latent(np.array([version], np.float32), frame_ns - 5, version), frame_ns, seen(frame_ns, task))


def test_the_newest_of_each_version_and_task() -> None:
    buffer = LatentBuffer()
    assert buffer.newest(1, "reach") is None
    for made in (thought(1, 10), thought(1, 20), thought(2, 30)):
        buffer.put(made)
    newest = buffer.newest(1, "reach")
    assert newest is not None
    assert newest.seen_ns == 20
    assert buffer.newest(2, "push") is None
    assert buffer.newest(3, "reach") is None
    buffer.clear()
    assert buffer.newest(2, "reach") is None


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(("a", "b"))), max_size=40), st.integers(1, 9))
def test_whatever_comes_only_the_own_version_goes_out(puts: list[tuple[int, str]], wanted: int) -> None:
    buffer = LatentBuffer()
    for at, (number, task) in enumerate(puts):
        buffer.put(thought(number, at, task))
    found = buffer.newest(wanted, "a")
    assert found is None or (found.latent.version, found.latent.data[0], found.task) == (wanted, wanted, "a")
    if puts and puts[-1] == (wanted, "a"):
        assert found is not None
        assert found.seen_ns == len(puts) - 1


def test_old_versions_are_forgotten() -> None:
    buffer = LatentBuffer()
    for number in range(1, 100):
        buffer.put(thought(number, number))
    assert buffer.newest(99, "reach") is not None
    assert buffer.newest(90, "reach") is None


def test_the_newest_frame_counts() -> None:
    image = samples.image()
    frames = {"a": Frame(5, image), "b": Frame(9, image)}
    assert seen_ns(Observation(11, np.zeros(4, np.float32), frames, "")) == 9
    assert seen_ns(Observation(11, np.zeros(4, np.float32), {}, "")) == 11
