"""Draws training windows from flat arrays of steps. Pure functions and one index; no Python loop over samples.

A batch is a dict of:

| name | shape | what |
|---|---|---|
| `images` | {camera: uint8[b, h, w, 3]} | the newest frame that the step saw, RGB |
| `instructions` | list of b str | the task as a person would say it |
| `task` | int64[b] | index into `Replay.tasks` |
| `state` | float32[b, ds] | before the first action |
| `actions` | float32[b, H, da] | executed from this step on, 0 where masked |
| `mask` | float32[b, H] | 1 while the steps follow each other and all may be imitated, 0 from the first that does not |
| `ahead` | float32[b, W, ds] | the state W given numbers of ticks later, or the last one before control was let go |
| `version` | int32[b] | policy version that acted or was ready to act |
| `actor` | uint8[b] | who acted, index into `wire.messages.ACTORS` |
| `frame_age` | float32[b] | ticks between the oldest of the frames seen and the step, 0 without cameras |

A grouped batch has the k steps behind each image as a second axis: [b, k, ...] for all from `state` on.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from wire.errors import InvalidData


class Steps(msgspec.Struct, frozen=True, eq=False):
    """Views of the flat arrays of N steps that windows are drawn from."""

    state: np.ndarray
    """float32[N, ds]"""
    executed: np.ndarray
    """float32[N, da]"""
    following: np.ndarray
    """int64[N]: index of the next tick of the same episode, -1 when there is none"""
    imitable: np.ndarray
    """bool[N]"""
    task: np.ndarray
    """int64[N]"""
    actor: np.ndarray
    """uint8[N]"""
    version: np.ndarray
    """int32[N]"""
    frame_age: np.ndarray
    """float32[N], ticks"""
    frame: np.ndarray
    """int64[N, cameras]: index of the frame seen, -1 when it is not there"""


class Index(msgspec.Struct, frozen=True, eq=False):
    """Where windows may start, by task: built when the data changed, used for many batches."""

    tasks: np.ndarray
    """int64[K]: tasks that have at least one start"""
    starts: tuple[np.ndarray, ...]
    """K times int64[n]: steps of one task, those that saw the same frames side by side"""
    groups: tuple[np.ndarray, ...]
    """K times int64[g + 1]: where in `starts` each run of steps with the same frames begins and ends"""

    @property
    def count(self) -> int:
        return sum(len(starts) for starts in self.starts)


def build_index(steps: Steps) -> Index:
    """Starts are imitable steps whose frames are all there."""
    able = np.flatnonzero(steps.imitable & (steps.frame >= 0).all(1))
    tasks = np.unique(steps.task[able])
    starts, groups = [], []
    for task in tasks:
        mine = able[steps.task[able] == task]
        frames = steps.frame[mine]
        if frames.shape[1]:
            order = np.lexsort(frames.T[::-1])
            mine, frames = mine[order], frames[order]
            first = np.flatnonzero((frames[1:] != frames[:-1]).any(1)) + 1
        else:
            first = np.arange(1, len(mine))
        starts.append(mine)
        groups.append(np.concatenate([[0], first, [len(mine)]]).astype(np.int64))
    return Index(tasks, tuple(starts), tuple(groups))


class Recent(msgspec.Struct, frozen=True):
    """Prefers what came last: a part of every batch is drawn from the newest of each task."""

    share: float = 0.0
    """part of a batch, 0 to 1"""
    newest: int = 300
    """how many frames (without a camera: steps) of a task count as recent"""


EVENLY = Recent()
"""no preference"""


def draw(index: Index, count: int, rng: np.random.Generator, recent: Recent = EVENLY) -> np.ndarray:
    """int64[count] steps with replacement, an equal share of each task (within one).

    Any step of a task is as likely as another, but for the part of the batch that is `recent`.
    """
    share = _shares(index, count, rng)
    chosen = np.empty(count, np.int64)
    for number, starts in enumerate(index.starts):
        here = share == number
        chosen[here] = starts[_positions(len(starts), int(here.sum()), rng, recent)]
    return chosen


def draw_grouped(
    index: Index, frames: int, ticks: int, rng: np.random.Generator, recent: Recent = EVENLY
) -> np.ndarray:
    """int64[frames, ticks]: frames with replacement, an equal share of each task; then steps that saw each of them."""
    share = _shares(index, frames, rng)
    chosen = np.empty((frames, ticks), np.int64)
    for number, (starts, groups) in enumerate(zip(index.starts, index.groups, strict=True)):
        here = share == number
        group = _positions(len(groups) - 1, int(here.sum()), rng, recent)
        first, end = groups[group][:, None], groups[group + 1][:, None]
        chosen[here] = starts[rng.integers(first, end, size=(len(group), ticks))]
    return chosen


def _positions(length: int, count: int, rng: np.random.Generator, recent: Recent) -> np.ndarray:
    """int64[count] in [0, length); higher positions came later."""
    anywhere = rng.integers(length, size=count)
    if not recent.share:
        return anywhere
    newest = rng.integers(max(0, length - recent.newest), length, size=count)
    return np.where(rng.random(count) < recent.share, newest, anywhere)


def _shares(index: Index, count: int, rng: np.random.Generator) -> np.ndarray:
    tasks = len(index.tasks)
    if not tasks:
        raise InvalidData("there is no step to imitate yet: record a demonstration or take a robot over.")
    # whole rounds over all tasks, then some of them at random
    return rng.permutation(tasks)[np.arange(count) % tasks]


def windows(steps: Steps, starts: np.ndarray, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """(actions float32[..., H, da], mask float32[..., H]) of the windows that begin at the int64[...] `starts`."""
    at = np.empty((horizon, *starts.shape), np.int64)
    alive = np.empty((horizon, *starts.shape), bool)
    at[0], alive[0] = starts, steps.imitable[starts]
    for h in range(1, horizon):
        following = steps.following[at[h - 1]]
        # an index of -1 reads some row, which `alive` then masks
        alive[h] = alive[h - 1] & (following >= 0) & steps.imitable[following]
        at[h] = np.where(alive[h], following, at[h - 1])
    mask = np.moveaxis(alive, 0, -1).astype(np.float32)
    return steps.executed[np.moveaxis(at, 0, -1)] * mask[..., None], mask


def ahead(steps: Steps, starts: np.ndarray, ticks: tuple[int, ...]) -> np.ndarray:
    """float32[..., W, ds]: the state `ticks` (growing) after each start, or the last one that may still be imitated."""
    at, found, done = starts, [], 0
    for tick in ticks:
        for _ in range(tick - done):
            following = steps.following[at]
            goes_on = (following >= 0) & steps.imitable[following]
            at = np.where(goes_on, following, at)
        done = tick
        found.append(steps.state[at])
    return np.stack(found, -2) if found else np.zeros((*starts.shape, 0, steps.state.shape[1]), np.float32)


def gather(
    steps: Steps,
    chosen: np.ndarray,
    horizon: int,
    ticks_ahead: tuple[int, ...],
    pixels: Mapping[str, np.ndarray],
    instructions: tuple[str, ...],
) -> dict[str, object]:
    """The batch of `chosen`, int64[b] or int64[b, k] with the same frames along k; `pixels` by camera in order."""
    actions, mask = windows(steps, chosen, horizon)
    one = chosen if chosen.ndim == 1 else chosen[:, 0]
    task = steps.task[one]
    frame = steps.frame[one]
    return {
        "images": {camera: images[frame[:, c]] for c, (camera, images) in enumerate(pixels.items())},
        "instructions": [instructions[number] for number in task],
        "task": task,
        "state": steps.state[chosen],
        "actions": actions,
        "mask": mask,
        "ahead": ahead(steps, chosen, ticks_ahead),
        "version": steps.version[chosen],
        "actor": steps.actor[chosen],
        "frame_age": steps.frame_age[chosen],
    }
