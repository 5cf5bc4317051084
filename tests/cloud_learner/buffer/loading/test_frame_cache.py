from __future__ import annotations

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from cloud_learner.buffer.loading.frame_cache import FrameCache, attach
from wire.errors import ConfigError

SMALL, LARGE = (4, 8, 3), (64, 64, 3)
SMALL_BYTES, LARGE_BYTES = 96, 12288


def resident_pages(array) -> int:
    """Bytes of the process's memory behind the mapping that `array` lies in."""
    address, found, inside = array.ctypes.data, 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= address < end
            elif inside and first in ("Rss:",):
                found += int(line.split()[1]) * 1024
    return found


def test_frames_are_handed_out_once_and_taken_back():
    arena = FrameCache([SMALL, LARGE], 10 * LARGE_BYTES)
    rng = np.random.default_rng(0)
    held, value = [], 0
    for _ in range(300):
        if held and rng.random() < 0.5:
            rows, marks, extra = held.pop(int(rng.integers(len(held))))
            for shape, (numbers, mark) in enumerate(zip(rows, marks, strict=True)):
                assert (arena.frames(shape)[numbers] == mark).all()
            arena.release(rows, extra)
        else:
            counts, extra = [int(rng.integers(0, 20)), int(rng.integers(0, 3))], int(rng.integers(0, 500))
            before = arena.used_bytes
            rows = arena.reserve(counts, extra)
            asked = counts[0] * SMALL_BYTES + counts[1] * LARGE_BYTES + extra
            if rows is None:
                assert before + asked > arena.cap_bytes
                assert arena.used_bytes == before
                continue
            assert [len(numbers) for numbers in rows] == counts
            assert arena.used_bytes == before + asked
            marks = []
            for shape, numbers in enumerate(rows):
                value = (value + 1) % 256
                arena.frames(shape)[numbers] = value
                marks.append(value)
            held.append((rows, marks, extra))
        assert arena.used_bytes <= arena.bytes
        assert arena.bytes <= arena.cap_bytes + LARGE_BYTES
        taken = [{int(n) for rows, _, _ in held for n in rows[shape]} for shape in range(2)]
        assert [len(t) for t in taken] == [sum(len(rows[shape]) for rows, _, _ in held) for shape in range(2)]


def test_only_what_was_written_costs_memory_and_trimmed_pages_go_back():
    arena = FrameCache([LARGE, (64, 32, 3)], 1000 * LARGE_BYTES)
    frames = arena.frames(0)
    assert resident_pages(frames) == 0
    rows = arena.reserve([800, 0])
    frames[rows[0]] = 7
    assert arena.frame_bytes == 800 * LARGE_BYTES
    assert resident_pages(frames) == 800 * LARGE_BYTES
    arena.release((rows[0][200:], np.zeros(0, np.int32)))
    # there is no room for the other shape unless the pages of this one go back
    others = arena.reserve([0, 1200])
    arena.frames(1)[others[1]] = 9
    assert arena.bytes <= 1000 * LARGE_BYTES
    assert resident_pages(frames) == 200 * LARGE_BYTES
    assert (frames[rows[0][:200]] == 7).all()
    again = arena.reserve([100, 0])
    frames[again[0]] = 5
    assert (frames[rows[0][:200]] == 7).all()
    assert arena.reserve([200, 0]) is None


def test_small_frames_share_pages_with_used_ones_and_stay_whole():
    arena = FrameCache([SMALL, LARGE], 20 * LARGE_BYTES)
    rows = arena.reserve([2000, 0])[0]
    frames = arena.frames(0)
    frames[rows] = np.arange(2000)[:, None, None, None] % 251
    gone = np.ones(2000, bool)
    gone[::97] = False
    gone[500:900] = False
    arena.release((rows[gone], np.zeros(0, np.int32)))
    assert arena.reserve([0, 15]) is not None
    kept = rows[~gone]
    assert (frames[kept] == (np.flatnonzero(~gone) % 251)[:, None, None, None]).all()
    assert resident_pages(frames) < 2000 * SMALL_BYTES + mmap.PAGESIZE


def test_another_process_writes_into_the_same_frames():
    arena = FrameCache([SMALL], 10 * SMALL_BYTES)
    (mapping,) = arena.mappings()
    code = (
        "import sys\nfrom cloud_learner.buffer.loading.frame_cache import SharedFrames, attach\n"
        f"attach(SharedFrames(int(sys.argv[1]), {mapping.rows}, {mapping.shape}))[3] = 42\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(mapping.descriptor)], pass_fds=[mapping.descriptor], check=False
    )
    assert done.returncode == 0
    assert (arena.frames(0)[3] == 42).all()
    assert not arena.frames(0)[2].any()
    assert np.shares_memory(arena.frames(0), arena.frames(0))
    assert (attach(mapping)[3] == 42).all()


def test_an_arena_gives_its_descriptors_back():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        arena = FrameCache([SMALL, LARGE], 10 * LARGE_BYTES)
        arena.close()
        arena.close()
    del arena
    assert len(os.listdir("/proc/self/fd")) <= before


def test_where_memory_has_no_descriptor_it_serves_one_process(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    arena = FrameCache([SMALL], 10 * SMALL_BYTES)
    (rows,) = arena.reserve([4])
    arena.frames(0)[rows] = 1
    with pytest.raises(ConfigError, match="workers=0"):
        arena.mappings()


def test_an_arena_without_cameras_or_room():
    arena = FrameCache([], 1000)
    assert arena.reserve((), 900) == ()
    assert arena.reserve((), 200) is None
    with pytest.raises(ConfigError, match="100 bytes"):
        FrameCache([LARGE], 100)
