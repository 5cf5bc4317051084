"""A loop's knowledge as plain values and back; a file cannot make anything else."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.scheduler import AlignedScheduler, RequestTracker
from robot_edge.control.mode import Mode
from robot_edge.control.observation_checks import _SAMPLE
from robot_edge.flight_recorder.events import SAMPLE, CallEncoder, array_reader, refer, stand_in
from robot_edge.flight_recorder.snapshot import capture, restore
from tests.robot_edge.flight_recorder.bench import Bench
from tests.samples import chunk, spec
from wire.errors import CorruptDataError


class Thing:
    def __init__(self) -> None:
        self.data: Any = None


def moved(value: Any, into: Thing | None = None) -> tuple[Any, list[str]]:
    """`value` through bytes into another object, and what was left out."""
    source = Thing()
    source.data = value
    tree, left_out = capture(source)
    packer = CallEncoder()
    encoded = packer.encode(tree)
    read = array_reader([np.array(array) for array in packer.large])
    target = into or Thing()
    restore(target, msgspec.msgpack.decode(encoded), lambda node: read(np.ndarray, node))
    return target.data, left_out


def test_what_was_assigned_from_outside_is_noted_and_what_was_deleted_is_not() -> None:
    thing = Thing()
    thing.extra = 1  # type: ignore[attr-defined]
    assert capture(thing)[0][3] == {"data": None, "extra": 1}
    del thing.data
    assert capture(thing)[0][3] == {"extra": 1}


def test_a_snapshot_leaves_objects_as_quick_as_they_were() -> None:
    """Their attributes lie beside them until somebody asks for a dictionary, and then in it for good."""
    thing = Thing()
    thing.data = 5
    capture(thing)
    assert set(map(type, gc.get_referents(thing))) == {type, int}


@pytest.mark.parametrize(
    "value",
    [
        None,
        2**70,
        float("inf"),
        b"bytes",
        (1, "a", [2.5, {3, 4}]),
        {("a", 1): {"b": None}},
        Mode.human,
        deque([1, 2], maxlen=5),
        frozenset({1}),
        spec(),
    ],
)
def test_plain_values_come_back(value: Any) -> None:
    back, left_out = moved(value)
    assert (back, type(back), left_out) == (value, type(value), [])
    assert not isinstance(value, deque) or back.maxlen == value.maxlen


def test_arrays_and_numbers_of_numpy_come_back_with_what_they_share() -> None:
    array = np.arange(5, dtype=np.float32)
    (one, two, number, large), _ = moved([array, array, np.float32(0.1), np.zeros(5000)])
    assert one is two
    np.testing.assert_array_equal(one, array)
    assert isinstance(number, np.float32) and number == np.float32(0.1)
    assert large.shape == (5000,)


def test_objects_of_this_project_are_made_and_filled() -> None:
    scheduler = AlignedScheduler(RequestTracker(spec(), ChunkingConfig()))
    back, _ = moved([scheduler, chunk(4)])
    assert type(back[0]) is AlignedScheduler
    assert back[0].__dict__.keys() == scheduler.__dict__.keys()
    assert back[1].first_tick == 4
    np.testing.assert_array_equal(back[1].actions, chunk(4).actions)


def test_what_keeps_itself_out_of_sight_is_named() -> None:
    into = Thing()
    into.data = {"lock": "what the new one has"}
    back, left_out = moved({"lock": threading.Lock(), "n": 1}, into)
    assert back == {"lock": "what the new one has", "n": 1}
    assert left_out == [".data['lock'] (lock)"]


THEIRS = ["os:system", "builtins:object", "subprocess:Popen", "robot_edge.nowhere:X", "wire:x"]
# what modules of ours have imported: an object of such a class may act when it is thrown away
THEIRS += [
    "robot_edge.flight_recorder.file:Path",
    "wire.episode_file:struct.Struct",
    "robot_edge.flight_recorder.snapshot:np.ndarray",
]


@pytest.mark.parametrize("name", THEIRS)
def test_a_file_cannot_make_what_is_not_ours(name: str) -> None:
    assert os.system
    for node in (["o", 0, name, {}], ["e", name, 1], ["s", 0, [], name, None]):
        with pytest.raises(CorruptDataError, match="not a class of this project"):
            restore(Thing(), ["o", 9, f"{Thing.__module__}:Thing", {"data": node}], np.asarray)


def test_a_real_loop_is_carried_whole(tmp_path: Path) -> None:
    bench = Bench(tmp_path, operated=True).ready().fly(20).land()
    tree, left_out = capture(bench.loop)
    assert left_out == []
    assert len(str(tree)) > 1000


def test_a_stand_in_is_equal_exactly_when_the_image_was() -> None:
    assert SAMPLE == _SAMPLE, "robot_edge.control.observation_checks looks at other pixels than stand-ins keep apart"
    rng = np.random.default_rng(0)
    first = rng.integers(0, 255, (70, 50, 3), np.uint8)
    between, sampled = first.copy(), first.copy()
    between[1, 1, 0] ^= 1
    sampled[SAMPLE, SAMPLE, 0] ^= 1
    a, b, c, d = (stand_in(refer(image)) for image in (first, between, sampled, first.copy()))
    assert a.shape == first.shape and a.dtype == np.uint8
    np.testing.assert_array_equal(a, d)
    assert not np.array_equal(a, b) and not np.array_equal(a, c) and not np.array_equal(b, c)
    part = np.s_[::SAMPLE, ::SAMPLE]
    assert np.array_equal(a[part], b[part]) and not np.array_equal(a[part], c[part])
    # and a sample that was noted on its own is the sample of the stand-in
    np.testing.assert_array_equal(stand_in(refer(first[part].copy())), a[part])
