"""Training windows out of the steps in memory: pure functions on flat arrays, no Python loop over samples.

A batch is a dict of:

| name | shape | what |
|---|---|---|
| `images` | {camera: uint8[b, h, w, 3]} | the newest frame that the step saw, RGB |
| `instructions` | list of b str | the task as a person would say it |
| `task` | int64[b] | index into `DatasetConfig.tasks` |
| `outcome` | int8[b] | how the episode ended, index into `check.OUTCOMES`, -1 while it goes on |
| `online` | bool[b] | whether it comes from the running fleet, not from a demonstration |
| `episode` | int64[b] | the episode's number in the ledger |
| `tick` | int64[b] | of the step in its episode, delta later than the frames' step |
| `state` | float32[b, ds] | before the first action: rolled dimensions delta later, the others as seen |
| `actions` | float32[b, H, da] | executed from this step on, 0 where masked |
| `mask` | float32[b, H] | 1 while steps follow each other that may be continued over, 0 from the first that may not |
| `valid` | float32[b, H] | 1 while the episode goes on, whoever acted |
| `reward` | float32[b, H] | 0 where masked |
| `return_to_go` | float32[b] | sum of the rewards from this step to the end, nan while the episode is unfinished |
| `ahead` | float32[b, W, ds] | the state W given numbers of ticks later, or the last one before the mask ends |
| `version` | int32[b] | policy version that acted or was ready to act |
| `actor` | uint8[b] | who acted, index into `wire.messages.gateway.ACTORS` |
| `delay` | int16[b] | measured inference delay in ticks, -1 when none |
| `seen_state` | float32[b, ds] | with an offset: as it was at the step drawn, when the frames were seen |
| `frame_age` | float32[b] | ticks between the oldest of the frames seen and the first action; delta without cameras |
| `later_index` | int64[b] | on request: i, any of the actions that `mask` keeps, 0 if there is none |
| `later_state` | float32[b, ds] | on request: the whole state before action i |
| `past_state` | float32[b, n, ds] | on request: `state` 1 to n ticks before the first action, the oldest first |
| `past_images` | {camera: uint8[b, n, h, w, 3]} | on request: what was seen 1 to n ticks before `images`, likewise |

A grouped batch has k steps behind each image as a second axis, [b, k, ...] for all from `tick` on but `past_images` and
`seen_state`: each drawn from the eligible steps of the segment that saw the same frames.

The past reaches back over the segments of an episode, whoever acted. Before the oldest step that is known it is that
step again, and a frame that never came is the one after it.

An inference takes time, and its actions begin when the robot is elsewhere already. With `max_offset` D > 0, all from
`tick` on therefore belongs to a step up to D after the one the frames were seen at, each sample with its own delay
(VLASH, arXiv 2512.01031; k of them behind one image are its shared observation): drawn evenly from the delays at which
a window may begin and before which nothing ends that may not be continued over. What a robot cannot foretell (`rolled`
is False) it knows only as of the frames' step: these dimensions of `state` come from there, and those of `past_state`
are never newer. `ahead`, a target and not an input, and `later_state`, which a robot reads when it is there, are whole
later states.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.step_cache import StepCache
from wire.errors import ConfigError

Batch = dict[str, object]
_ALIGNED = 64


class Draws(msgspec.Struct, frozen=True, eq=False):
    """b steps to begin at, and what the index knows of each."""

    segment: np.ndarray
    """int64[b] ledger row"""
    offset: np.ndarray
    """int64[b] step within its segment"""
    first_tick: np.ndarray
    """int64[b] of the segment"""
    task: np.ndarray
    """int64[b]"""
    online: np.ndarray
    """bool[b]"""
    outcome: np.ndarray
    """int8[b]"""
    episode: np.ndarray
    """int64[b]"""
    return_after: np.ndarray
    """float64[b] rewards of all later segments of the episode, nan while it is unfinished"""

    @classmethod
    def unpack(cls, packed: Mapping[str, str]) -> Draws:
        """What `pack` made."""
        arrays = {name: np.frombuffer(base64.b64decode(packed[name]), dtype).copy() for name, dtype in _DRAWS.items()}
        return cls(**arrays)

    def pack(self) -> dict[str, str]:
        """JSON-able."""
        return {
            name: base64.b64encode(getattr(self, name).astype(dtype).tobytes()).decode()
            for name, dtype in _DRAWS.items()
        }

    def take(self, which: np.ndarray) -> Draws:
        """The draws of int64[n] positions."""
        return Draws(*(getattr(self, name)[which] for name in self.__struct_fields__))


_DRAWS = {
    "segment": "<i8",
    "offset": "<i8",
    "first_tick": "<i8",
    "task": "<i8",
    "online": "|b1",
    "outcome": "|i1",
    "episode": "<i8",
    "return_after": "<f8",
}


class Shape(msgspec.Struct, frozen=True):
    """What windows look like."""

    horizon: int
    ticks_ahead: tuple[int, ...] = ()
    """growing"""
    ticks_per_frame: int = 1
    max_offset: int = 0
    """D: a window begins up to so many steps after the one its frames were seen at"""
    offset_share: float = 1.0
    """share of the windows that do; the others begin at that step"""
    rolled: tuple[bool, ...] = ()
    """by state dimension: whether it is known at the later step; empty: all are"""
    later: bool = False
    """whether there is `later_index` and `later_state`"""
    history: int = 0
    """n: whether there is `past_state` and `past_images`, of so many ticks"""

    @property
    def lookahead(self) -> int:
        """How many steps after the one that saw its frames a window may need."""
        return self.max_offset + max((self.horizon - 1, *self.ticks_ahead))


class BatchSlot:
    """Memory of one batch, used again for later ones: arrays by name, page-locked on request."""

    def __init__(self, pin: bool = False) -> None:
        """Raises `ConfigError` for page-locked memory where there is none."""
        self._pin = pin
        if pin:
            _pinned(1)
        self._arrays: dict[str, np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
        """[*shape] of `dtype`, whatever was in it; the same memory as long as name, shape and type are the same."""
        found = self._arrays.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            memory = _pinned(size) if self._pin else np.empty(size + _ALIGNED, np.uint8)
            # copying into memory that is not aligned takes up to twice as long
            begin = -memory.ctypes.data % _ALIGNED
            found = self._arrays[name] = memory[begin : begin + size].view(dtype).reshape(shape)
        return found


def settle(pool: StepCache, draws: Draws) -> tuple[np.ndarray, np.ndarray] | None:
    """(positions int64[b], rows int64[b]): the draws to use and where in `pool` they begin.

    A draw at which no window can begin, because its segment or frame could not be read, is replaced by the next one
    that can, the first after the last. None when there is none.
    """
    first = pool.first_rows(draws.segment)
    rows = first + draws.offset
    able = (first >= 0) & (pool.columns["mates"][np.where(first >= 0, rows, 0)] > 0) if len(pool) else first >= 0
    positions: np.ndarray = np.arange(len(rows))
    if not able.all():
        good = np.flatnonzero(able)
        if not len(good):
            return None
        positions = good[np.searchsorted(good, positions) % len(good)]
    return positions, rows[positions]


def spread(pool: StepCache, rows: np.ndarray, offsets: np.ndarray, ticks: int, rng: np.random.Generator) -> np.ndarray:
    """int64[b, ticks] steps, each one of the eligible ones that saw the same frames as int64[b] `rows`."""
    first = rows - offsets
    mates = pool.columns["mates"][rows]
    number = pool.columns["group"][rows][:, None] + rng.integers(0, mates[:, None], size=(len(rows), ticks))
    return first[:, None] + pool.columns["eligible_offset"][first[:, None] + number]


def postpone(
    pool: StepCache,
    start: np.ndarray,
    online: np.ndarray,
    may_begin: Sequence[Sequence[bool]],
    most: int,
    rng: np.random.Generator,
    share: float = 1.0,
) -> np.ndarray:
    """int64[b(, k)]: how many steps later than int64[b(, k)] `start` each window begins, 0 to `most`.

    Evenly among those there are. Were one that there is not replaced by the last that is, half of the windows would be
    of the ends of episodes as soon as `most` is about as long as they are.
    `online`: bool[b]. `may_begin`: `Layout.starts`. `share` of the windows are postponed at all.
    """
    reach = np.arange(most + 1)
    at = np.minimum(start[..., None] + reach, len(pool.columns["actor"]) - 1)
    source = (~online).astype(np.intp).reshape(-1, *(1,) * (at.ndim - 1))
    able = (reach < pool.columns["run"][start][..., None]) & np.array(may_begin)[source, pool.columns["actor"][at]]
    rank = (rng.random(start.shape) * able.sum(-1)).astype(np.int64)
    if share < 1:
        rank[rng.random(start.shape) >= share] = 0
    return np.argmax(able.cumsum(-1) > rank[..., None], -1)


def gather(
    pool: StepCache,
    frames: Sequence[np.ndarray],
    layout: Layout,
    draws: Draws,
    rows: np.ndarray,
    shape: Shape,
    instructions: Sequence[str],
    slot: BatchSlot,
    rng: np.random.Generator,
) -> Batch:
    """The batch of windows that begin at the int64[b] `rows` of `pool`; its arrays lie in `slot`."""
    columns = pool.columns
    batch: Batch = {"images": {}, "instructions": [instructions[number] for number in draws.task.tolist()]}
    for c, camera in enumerate(layout.cameras):
        number = layout.shape_of[c]
        image = slot.array(camera, (len(rows), *layout.shapes[number]), np.uint8)
        # "clip" only because numpy would fill a second buffer to check the indices first
        np.take(frames[number], columns["frame"][rows, c], 0, out=image, mode="clip")
        batch["images"][camera] = image  # type: ignore[index]
    for name in ("task", "outcome", "online", "episode"):
        batch[name] = _put(slot, name, getattr(draws, name))
    seen, offset, return_after = rows, draws.offset, draws.return_after
    tick = draws.first_tick + offset
    if shape.ticks_per_frame > 1:
        seen = spread(pool, rows, offset, shape.ticks_per_frame, rng)
        return_after = return_after[:, None]
        tick = tick[:, None] + (seen - rows[:, None])
    start, age, to_go = seen, columns["frame_age"][seen], columns["later_reward"][seen]
    if shape.max_offset:
        delta = postpone(pool, seen, draws.online, layout.starts, shape.max_offset, rng, shape.offset_share)
        start, tick, age = seen + delta, tick + delta, age + delta
        # the step may lie behind its segment's end, where no sum is known
        to_go = to_go - _rewards(columns["reward"], seen, delta, shape.max_offset)
    batch["tick"] = _put(slot, "tick", tick)
    run, left = columns["run"][start], columns["left"][start]
    steps = np.arange(shape.horizon)
    mask = slot.array("mask", (*start.shape, shape.horizon), np.float32)
    valid = slot.array("valid", mask.shape, np.float32)
    np.less(steps, run[..., None], out=mask, casting="unsafe")
    np.less(steps, left[..., None], out=valid, casting="unsafe")
    at = start[..., None] + np.minimum(steps, left[..., None] - 1)
    for name, column in (("actions", "executed"), ("reward", "reward")):
        source = columns[column]
        values = slot.array(name, (*at.shape, *source.shape[1:]), source.dtype)
        np.take(source, at, 0, out=values, mode="clip")
        values *= mask[..., None] if values.ndim > mask.ndim else mask
        batch[name] = values
    batch["mask"], batch["valid"] = mask, valid
    ahead = slot.array("ahead", (*start.shape, len(shape.ticks_ahead), layout.state_dim), np.float32)
    if shape.ticks_ahead:
        reach = np.minimum(np.array(shape.ticks_ahead), np.maximum(run[..., None] - 1, 0))
        np.take(columns["state"], start[..., None] + reach, 0, out=ahead, mode="clip")
    batch["ahead"] = ahead
    for name in ("state", "version", "actor", "delay"):
        source = columns[name]
        values = slot.array(name, (*start.shape, *source.shape[1:]), source.dtype)
        batch[name] = np.take(source, start, 0, out=values, mode="clip")
    if shape.max_offset and not all(shape.rolled):
        known = ~np.array(shape.rolled)
        batch["state"][..., known] = columns["state"][seen][..., known]  # type: ignore[index]
    if shape.max_offset:
        values = slot.array("seen_state", (len(rows), layout.state_dim), np.float32)
        batch["seen_state"] = np.take(columns["state"], rows, 0, out=values, mode="clip")
    batch["frame_age"] = _put(slot, "frame_age", age.astype(np.float32))
    total = slot.array("return_to_go", start.shape, np.float32)
    np.add(to_go, return_after, out=total, casting="same_kind")
    batch["return_to_go"] = total
    if shape.later:
        index = rng.integers(0, np.clip(run, 1, shape.horizon))
        batch["later_index"] = _put(slot, "later_index", index)
        states = slot.array("later_state", (*start.shape, layout.state_dim), np.float32)
        batch["later_state"] = np.take(columns["state"], start + index, 0, out=states, mode="clip")
    if shape.history:
        _tell_past(batch, pool, frames, layout, rows, seen, start, shape, slot)
    return batch


def _tell_past(
    batch: Batch,
    pool: StepCache,
    frames: Sequence[np.ndarray],
    layout: Layout,
    rows: np.ndarray,
    seen: np.ndarray,
    start: np.ndarray,
    shape: Shape,
    slot: BatchSlot,
) -> None:
    """Add `past_state` and `past_images` to `batch`; arguments as in `gather`."""
    columns, back = pool.columns, np.arange(-shape.history, 0)
    at = start[..., None] + back
    states = slot.array("past_state", (*at.shape, layout.state_dim), np.float32)
    np.take(columns["state"], at, 0, out=states, mode="clip")
    if shape.max_offset and not all(shape.rolled):
        known = ~np.array(shape.rolled)
        states[..., known] = columns["state"][np.minimum(at, seen[..., None])][..., known]
    images = {}
    for c, camera in enumerate(layout.cameras):
        numbers = columns["frame"][rows[:, None] + np.arange(-shape.history, 1), c]
        for i in reversed(range(shape.history)):
            numbers[:, i] = np.where(numbers[:, i] < 0, numbers[:, i + 1], numbers[:, i])
        number = layout.shape_of[c]
        images[camera] = slot.array(
            f"past_images/{camera}", (len(rows), shape.history, *layout.shapes[number]), np.uint8
        )
        np.take(frames[number], numbers[:, :-1], 0, out=images[camera], mode="clip")
    batch["past_state"], batch["past_images"] = states, images


def _rewards(reward: np.ndarray, first: np.ndarray, count: np.ndarray, most: int) -> np.ndarray:
    """float64[b(, k)]: sum of the rewards of `count` steps from `first` on, at most `most`."""
    steps = np.arange(most)
    values = np.take(reward, first[..., None] + steps, mode="clip")
    return np.where(steps < count[..., None], values, 0.0).sum(-1, dtype=np.float64)


def _put(slot: BatchSlot, name: str, values: np.ndarray) -> np.ndarray:
    found = slot.array(name, values.shape, values.dtype)
    found[...] = values
    return found


def _pinned(size: int) -> np.ndarray:
    # torch only where it is asked for: a reader without a GPU runs without it
    import torch

    try:
        return torch.empty(size + _ALIGNED, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:
        raise ConfigError(f"page-locked memory of {size} bytes: {error}. Use pin=False without a GPU.") from error
