"""What `benchmarks.buffer` compares with, each in its own fast way, each giving the same batch.

A batch holds, for b random steps: `images` of both cameras uint8[b, h, w, 3] (LeRobot: float32[b, 3, h, w], as it
hands them out), `state` [b, ds], `actions` [b, H, da] and `mask` [b, H].
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.buffer.data import ACTIONS, CAMERAS, CONTROL_HZ, HORIZON, STATES, TASK, Raw


class Contender(Protocol):
    """Something that gives batches."""

    name: str
    ahead: int
    """how many batches may have been made ready before anybody asks: they are taken before the clock starts"""
    stored_bytes: int
    """on disk"""
    stored_steps: int

    def batch(self) -> Mapping[str, Any]:
        """The next batch."""
        ...

    def close(self) -> None: ...


class Flat:
    """Frames in arrays, each once; steps hold the number of their frame. No history, no durability: the floor."""

    ahead = 0

    def __init__(self, name: str, raw: Raw, frames: tuple[np.ndarray, ...], stored_bytes: int, batch: int) -> None:
        self.name, self.stored_bytes, self.stored_steps = name, stored_bytes, raw.scale.steps
        self._raw, self._frames, self._batch = raw, frames, batch
        self._frame = raw.frame
        self._rng = np.random.default_rng(0)
        self._gather = fastest_gather(frames[0], batch)
        self._out = [np.empty((batch, *array.shape[1:]), array.dtype) for array in frames]

    @classmethod
    def in_memory(cls, raw: Raw, batch: int) -> Flat:
        return cls("array in RAM", raw, raw.frames, 0, batch)

    @classmethod
    def mapped(cls, raw: Raw, batch: int, place: Path) -> Flat:
        """The same arrays as files, mapped."""
        place.mkdir(parents=True)
        frames = []
        for camera, array in zip(CAMERAS, raw.frames, strict=True):
            array.tofile(place / camera)
            # "c": never written, but torch warns of arrays that could not be
            frames.append(np.memmap(place / camera, np.uint8, "c", shape=array.shape))
        stored = folder_bytes(place) + raw.state.nbytes + raw.actions.nbytes
        return cls("np.memmap of frames", raw, tuple(frames), stored, batch)

    def batch(self) -> Mapping[str, Any]:
        raw = self._raw
        starts = self._rng.integers(0, len(raw.state), self._batch)
        windows, mask = raw.windows(starts)
        frame = self._frame[starts]
        return {
            "images": {
                name: self._gather(array, frame, out)
                for name, array, out in zip(CAMERAS, self._frames, self._out, strict=True)
            },
            "state": raw.state[starts],
            "actions": raw.actions[windows],
            "mask": mask,
        }

    def close(self) -> None:
        self._frames = ()


Gather = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""the rows of an array, in a new array or in the third"""


def fastest_gather(array: np.ndarray, batch: int) -> Gather:
    """Of the ways to pick rows of an array, the one that is fastest here."""
    import torch

    def by_torch(frames: np.ndarray, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        torch.index_select(torch.from_numpy(frames), 0, torch.from_numpy(rows), out=torch.from_numpy(out))
        return out

    ways: tuple[Gather, ...] = (
        lambda frames, rows, out: frames[rows],
        lambda frames, rows, out: np.take(frames, rows, 0, out=out, mode="clip"),
        by_torch,
    )
    rng = np.random.default_rng(0)
    out = np.empty((batch, *array.shape[1:]), array.dtype)
    took: list[list[float]] = [[] for _ in ways]
    for _ in range(15):
        for way, times in zip(ways, took, strict=True):
            rows = rng.integers(0, len(array), batch)
            before = time.perf_counter()
            way(array, rows, out)
            times.append(time.perf_counter() - before)
    return ways[int(np.argmin(np.median(took, axis=1)))]


class TorchRL:
    """TensorDictReplayBuffer over LazyMemmapStorage, sampling ahead with threads.

    Its rows are steps: each holds its frames and its chunk of actions, so that a sample is one row and no frame is read
    that was not asked for (SliceSampler would read those of all H steps).
    """

    def __init__(self, raw: Raw, batch: int, place: Path, steps: int, prefetch: int = 4) -> None:
        """`steps`: how many to store, whole episodes from the first on."""
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

        logging.getLogger("torchrl").setLevel(logging.WARNING)
        length = raw.scale.episode_steps
        steps = min(steps, raw.scale.steps) // length * length
        self.name = "torchrl LazyMemmapStorage"
        self.ahead = prefetch
        self.stored_steps = steps
        self._buffer = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(steps, scratch_dir=place, auto_cleanup=False),
            batch_size=batch,
            prefetch=prefetch,
        )
        for first in range(0, steps, length):
            here = np.arange(first, first + length)
            windows, mask = raw.windows(here)
            rows: dict[str, Any] = {
                camera: torch.from_numpy(frames[raw.frame[here]])
                for camera, frames in zip(CAMERAS, raw.frames, strict=True)
            }
            rows["state"] = torch.from_numpy(raw.state[here])
            rows["actions"], rows["mask"] = torch.from_numpy(raw.actions[windows]), torch.from_numpy(mask)
            self._buffer.extend(TensorDict(rows, batch_size=[length]))
        self.stored_bytes = folder_bytes(place)

    def batch(self) -> Mapping[str, Any]:
        found = self._buffer.sample()
        return {
            "images": {camera: found[camera] for camera in CAMERAS},
            **{name: found[name] for name in ("state", "actions", "mask")},
        }

    def close(self) -> None:
        self._buffer.empty()


class LeRobot:
    """LeRobotDataset (version 3, as video) with `delta_timestamps` for the actions, read as its own training script
    reads it: a DataLoader with workers, in random order.

    A dataset has one rate, so a frame stands at every step. As images it is slower: version 0.4.4 then decodes the
    frames of all H steps to read their actions.
    """

    def __init__(self, raw: Raw, batch: int, place: Path, episodes: int, workers: int = 2, prefetch: int = 2) -> None:
        """`episodes`: how many to store."""
        import datasets
        import torch
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["SVT_LOG"] = "1"
        # its tables are copied to a cache before they are read: that goes where the rest goes
        datasets.config.HF_DATASETS_CACHE = place / "cache"
        datasets.disable_progress_bars()
        with quiet():
            _write(raw, place / "data", min(episodes, raw.scale.episodes))
        ahead = {"action": [i / CONTROL_HZ for i in range(HORIZON)]}
        with quiet(), video_libraries(place / "libraries") as backend:
            data = LeRobotDataset("bench/buffer", place / "data", delta_timestamps=ahead, video_backend=backend)
            self._loader = torch.utils.data.DataLoader(
                data,
                batch_size=batch,
                # with replacement: there is no end of an epoch at which workers run dry
                sampler=torch.utils.data.RandomSampler(data, replacement=True, num_samples=10**9),
                num_workers=workers,
                prefetch_factor=prefetch,
                persistent_workers=True,
                # forking a process in which other contenders' threads run may hang
                multiprocessing_context="spawn",
            )
            self._batches = iter(self._loader)
            next(self._batches)
        self.name = f"LeRobotDataset, video by {backend}"
        self.ahead = workers * prefetch
        self.stored_steps = len(data)
        self.stored_bytes = folder_bytes(place / "data")

    def batch(self) -> Mapping[str, Any]:
        found = next(self._batches)
        return {
            "images": {camera: found[f"observation.images.{camera}"] for camera in CAMERAS},
            "state": found["observation.state"],
            "actions": found["action"],
            "mask": ~found["action_is_pad"],
        }

    def close(self) -> None:
        # the iterator's end ends its processes
        del self._batches, self._loader


def _write(raw: Raw, root: Path, episodes: int) -> None:
    import av
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    av.logging.set_libav_level(av.logging.ERROR)
    size = raw.scale.size
    features: dict[str, dict[str, Any]] = {
        "observation.state": {"dtype": "float32", "shape": (STATES,), "names": None},
        "action": {"dtype": "float32", "shape": (ACTIONS,), "names": None},
    }
    for camera in CAMERAS:
        names = ["height", "width", "channels"]
        features[f"observation.images.{camera}"] = {"dtype": "video", "shape": (size, size, 3), "names": names}
    data = LeRobotDataset.create(
        "bench/buffer",
        round(CONTROL_HZ),
        features,
        root=root,
        streaming_encoding=True,
        # a frame for which there is no room would be left out
        encoder_queue_maxsize=raw.scale.episode_steps,
    )
    length = raw.scale.episode_steps
    for episode in range(episodes):
        for step in range(episode * length, (episode + 1) * length):
            frame: dict[str, Any] = {"observation.state": raw.state[step], "action": raw.actions[step], "task": TASK}
            for camera, frames in zip(CAMERAS, raw.frames, strict=True):
                frame[f"observation.images.{camera}"] = frames[step // raw.scale.steps_per_frame]
            data.add_frame(frame)
        data.save_episode()
    data.finalize()


@contextlib.contextmanager
def video_libraries(place: Path) -> Iterator[str]:
    """LeRobot's video decoder: torchcodec, the faster one, if processes that start meanwhile can load it, else pyav.

    Torchcodec looks for FFmpeg's libraries by their plain names. Where the system has none, those that came with PyAV
    are lent to it under such names.
    """
    import av

    place.mkdir(parents=True)
    bundled = Path(av.__file__).parent.parent / "av.libs"
    for path in bundled.glob("lib*-*.so.*"):
        if found := re.fullmatch(r"(lib(?:av|sw)\w+)-[0-9a-f]+(\.so\.\d+)[.\d]*", path.name):
            (place / "".join(found.groups())).symlink_to(path)
    before = os.environ.get("LD_LIBRARY_PATH")
    own = [before] if before else []
    os.environ["LD_LIBRARY_PATH"] = ":".join([*own, str(place), str(bundled)])
    try:
        loads = subprocess.run([sys.executable, "-c", "import torchcodec.decoders"], capture_output=True)
        yield "pyav" if loads.returncode else "torchcodec"
    finally:
        if before is None:
            del os.environ["LD_LIBRARY_PATH"]
        else:
            os.environ["LD_LIBRARY_PATH"] = before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that a library prints at each call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def folder_bytes(place: Path) -> int:
    """Of all files below `place`, as far as they take room."""
    return sum(min(found.st_size, found.st_blocks * 512) for path in place.rglob("*") if (found := path.lstat()))


def versions() -> str:
    """Of the libraries compared with."""
    import importlib.metadata as metadata
    import importlib.util

    names = ("torchrl", "tensordict", "lerobot", "torch")
    # without the extra `peers` the quick run goes without them
    return ", ".join(f"{name} {metadata.version(name)}" for name in names if importlib.util.find_spec(name) is not None)
