"""A batch of each recipe as a trainer would draw it: in numbers, and as a contact sheet of its pictures."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np

from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.lerobot.selection import UNFINISHED
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.loading.mixture import DatasetMixture
from cloud_learner.buffer.loading.windows import Batch
from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import Overrides
from fleet.config.recipes import get_recipe
from fleet.launch.builders import limit_threads
from fleet.launch.learning import dataset_config, open_replay
from fleet.tools.policy_commands import recipe_of
from wire.errors import ConfigError, storage_errors
from wire.messages.gateway import ACTORS

_CACHE_BYTES = 2**30
"""enough for one batch; a trainer's memory would be filled for nothing"""
_BATCHES = 10
"""drawn of a mixture"""
_TILE, _STRIP, _LINE, _MOST = 160, 30, 8, 32
"""pixels of a picture's width and of a caption's height, samples side by side and in all"""


class DrawnBatch(msgspec.Struct, frozen=True, eq=False):
    """A batch and where it is from."""

    batch: Batch
    recipe: str
    share: float
    """of the batches that are of this recipe, as long as the same ones have data"""
    turns: int
    """batches drawn of it"""
    tasks: tuple[str, ...]
    """by the number that `batch` has of them"""
    segments: int
    """that there are to draw from"""
    steps: int
    """at which a window may begin"""


class ArraySummary(msgspec.Struct, frozen=True):
    """What one key of a batch holds; None where no number is."""

    shape: tuple[int, ...]
    dtype: str
    min: float | None
    mean: float | None
    max: float | None


class BatchSummary(msgspec.Struct, frozen=True):
    """Shares are of its windows, unless they say otherwise."""

    recipe: str
    share: float
    """of all batches"""
    turns: int
    segments: int
    steps: int
    windows: int
    actors: dict[str, float]
    """who acted first in the window"""
    tasks: dict[str, float]
    outcomes: dict[str, float]
    online: float
    kept: float
    """of the actions: those that `mask` keeps"""
    padded: float
    """of the actions: those of which no step is there"""
    terminated: float
    """the episode ends within the window by itself"""
    truncated: float
    """or is cut short there"""
    arrays: dict[str, ArraySummary]


def draw_batches(
    root: Path,
    shares: Mapping[str, float],
    *,
    snapshot: str = "",
    validation: float | None = None,
    held_out: bool = False,
    n_step: int = 0,
    seed: int = 0,
) -> tuple[list[DrawnBatch], dict[str, str]]:
    """What a trainer draws that starts now on the buffer below `root`, with at most 1 GiB of memory for each recipe.

    `shares` of the batches by recipe; '' is the fleet's own, and the policy that was chosen for it. A batch of each
    that has data, of one recipe the first; and by name why others have none, whose share goes to these. `snapshot`:
    draw from nothing later; `validation`: None takes the recipe's; the others as in `DatasetConfig`, where `n_step` is
    not 0 with one window behind each image. Only reads. Raises `ConfigError`, `StorageError`, and `InvalidDataError`
    for an unknown snapshot or when there is nothing to draw.
    """
    if "" in shares and DataDirectory(root).identity() is None:
        raise ConfigError(f"--data {root}: no fleet has worked there that says how to draw. Give --recipe NAME.")
    limit_threads()
    with contextlib.ExitStack() as held:
        ledger, store = held.enter_context(DataDirectory(root).open_buffer())
        changes: dict[str, Any] = {"n_step": n_step, "ticks_per_frame": 1} if n_step else {}
        changes |= {"until_row": ledger.snapshot_row(snapshot) if snapshot else 0}
        changes |= {} if validation is None else {"validation": validation}
        changes |= {"held_out": held_out, "workers": 0, "prefetch": 0, "lead": 1}
        datasets: dict[str, ReplayDataset] = {}
        for name in shares:
            recipe, overrides = (get_recipe(name), Overrides()) if name else recipe_of(root)
            recipe = overrides.applied(recipe)
            config = dataset_config(recipe, recipe.make_policy(recipe.spec, seed), seed)
            config = msgspec.structs.replace(config, cache_bytes=min(config.cache_bytes, _CACHE_BYTES), **changes)
            datasets[recipe.name] = held.enter_context(open_replay(recipe, ledger, store, config))
        mixture = DatasetMixture(datasets, dict(zip(datasets, shares.values(), strict=True)))
        mixture.refresh()
        batches: dict[str, Batch] = {}
        turns: Counter[str] = Counter()
        for _ in range(_BATCHES if len(datasets) > 1 else 1):
            name, batch = mixture.next()
            batches[name] = batch
            turns[name] += 1
        drawn, missing = [], {}
        for (name, dataset), share in zip(datasets.items(), mixture.shares.values(), strict=True):
            if not share:
                missing[name] = dataset.sampler.why_nothing()
                continue
            # a small share may have had no turn yet
            batch = batches[name] if name in batches else dataset.next()
            tasks, segments = tuple(dataset.config.tasks), int((~dataset.universe.gone).sum())
            drawn.append(DrawnBatch(batch, name, share, turns[name], tasks, segments, dataset.eligible_steps))
        return drawn, missing


def summarize(drawn: DrawnBatch) -> BatchSummary:
    """What the batch holds."""
    batch = drawn.batch
    actor, mask = np.asarray(batch["actor"]), np.asarray(batch["mask"])
    return BatchSummary(
        recipe=drawn.recipe,
        share=drawn.share,
        turns=drawn.turns,
        segments=drawn.segments,
        steps=drawn.steps,
        windows=actor.size,
        actors=_shares(actor, ACTORS),
        tasks=_shares(np.asarray(batch["task"]), drawn.tasks),
        outcomes=_shares(np.asarray(batch["outcome"]), (*OUTCOMES, UNFINISHED)),
        online=float(np.mean(np.asarray(batch["online"]))),
        kept=float(mask.mean()),
        padded=float(np.mean(np.asarray(batch["action_is_pad"]))),
        terminated=float(np.asarray(batch["terminated"]).any(-1).mean()),
        truncated=float(np.asarray(batch["truncated"]).any(-1).mean()),
        arrays=dict(_arrays(batch)),
    )


def render(summary: BatchSummary) -> str:
    """The summary as lines for people."""
    lag = summary.arrays["lag"]
    lines = [f"{summary.share:.1%} of the batches, {summary.turns} of {_BATCHES} drawn:"] if summary.share < 1 else []
    lines += [
        f"{summary.windows} windows as recipe '{summary.recipe}' trains on them, from {summary.steps:,} steps of "
        f"{summary.segments:,} segments.",
        f"actors: {_listed(summary.actors)}; online {summary.online:.0%}",
        f"tasks: {_listed(summary.tasks)}",
        f"outcomes: {_listed(summary.outcomes)}",
        f"lag: {lag.mean:g} versions on average, at most {lag.max:g}",
        f"actions: the mask keeps {summary.kept:.0%}, {summary.padded:.0%} are padding",
        f"ends: {summary.terminated:.0%} of the windows terminate, {summary.truncated:.0%} are truncated",
        "",
        f"{'key':24} {'type and shape':32} {'min':>12} {'mean':>12} {'max':>12}",
    ]
    for name, array in summary.arrays.items():
        kind = f"{array.dtype}[{', '.join(map(str, array.shape))}]"
        values = ("-" if value is None else f"{value:.6g}" for value in (array.min, array.mean, array.max))
        lines.append(f"{name:24} {kind:32} " + " ".join(f"{value:>12}" for value in values))
    return "\n".join(lines)


def contact_sheet(drawn: DrawnBatch) -> np.ndarray:
    """uint8[h, w, 3] BGR: the first pictures, a row for each camera, with task, actor and tick below.

    Raises `ConfigError` for a robot without cameras.
    """
    images: Mapping[str, np.ndarray] = drawn.batch["images"]  # type: ignore[assignment]
    if not images:
        raise ConfigError(f"the robot of recipe '{drawn.recipe}' has no camera: leave --pictures out.")
    task, actor, tick = (_first(drawn.batch[name]) for name in ("task", "actor", "tick"))
    count = min(_MOST, len(task))
    lines = []
    for first in range(0, count, _LINE):
        here = range(first, min(first + _LINE, count))
        rows = [np.hstack([_tile(pictures[i]) for i in here]) for pictures in images.values()]
        said = [(drawn.tasks[task[i]], f"{ACTORS[actor[i]]} {tick[i]}") for i in here]
        line = np.vstack([*rows, np.hstack([_caption(words) for words in said])])
        lines.append(np.pad(line, ((0, 0), (0, min(count, _LINE) * _TILE - line.shape[1]), (0, 0))))
    return np.vstack(lines)


def write_picture(path: Path, picture: np.ndarray) -> None:
    """Write uint8[h, w, 3] BGR as PNG. Raises `StorageError`."""
    with storage_errors("writing the contact sheet", path):
        path.write_bytes(cv2.imencode(".png", picture)[1].tobytes())


def _arrays(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, ArraySummary]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _arrays(value, f"{prefix}{name}/")
        elif isinstance(value, np.ndarray):
            known = value[~np.isnan(value)] if value.dtype.kind == "f" else value
            found = (known.min(), known.mean(dtype=np.float64), known.max()) if known.size else (None,) * 3
            numbers = (None if number is None else float(number) for number in found)
            yield prefix + name, ArraySummary(value.shape, str(value.dtype), *numbers)


def _shares(numbers: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """By name the share of `numbers`, indices into `names`; those that occur."""
    found, counts = np.unique(numbers, return_counts=True)
    return {names[number]: count / numbers.size for number, count in zip(found.tolist(), counts.tolist(), strict=True)}


def _listed(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda one: -one[1]))


def _first(values: object) -> list[int]:
    """Of each sample, or of the first window behind each image."""
    array = np.asarray(values)
    return array.reshape(len(array), -1)[:, 0].tolist()


def _tile(picture: np.ndarray) -> np.ndarray:
    height = max(1, round(picture.shape[0] * _TILE / picture.shape[1]))
    return cv2.cvtColor(cv2.resize(picture, (_TILE, height), interpolation=cv2.INTER_AREA), cv2.COLOR_RGB2BGR)


def _caption(words: Sequence[str]) -> np.ndarray:
    strip: np.ndarray = np.zeros((_STRIP, _TILE, 3), np.uint8)
    for number, text in enumerate(words):
        at = (2, 11 + 14 * number)
        cv2.putText(strip, text, at, cv2.FONT_HERSHEY_SIMPLEX, 0.4, (255, 255, 255), 1, cv2.LINE_AA)
    return strip
