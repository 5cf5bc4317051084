"""What a feed keeps to go on after a stop: settings, the planner's state, and what was planned and not delivered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from cloud_learner.buffer.ledger.rows import SegmentColumns
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.decoding.orders import Order
from cloud_learner.buffer.loading.windows import Draws
from cloud_learner.buffer.sampling.plan import SamplingPlan
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from wire.errors import InvalidDataError

_FORMAT = 1
_INDEX_COLUMNS = ("row", "episode", "index", "first_tick", "steps", "frames", "reward_sum", "last", "outcome")


class UndeliveredOrder(msgspec.Struct, frozen=True, eq=False):
    """An order that was not delivered."""

    number: int
    watermark: int
    """newest ledger row that was known when it was made"""
    draws: Draws


class Saved(msgspec.Struct, frozen=True, eq=False):
    """A state as `restore` needs it."""

    planner: dict[str, Any]
    watermark: int
    pending: tuple[UndeliveredOrder, ...]
    batches: int
    drawn: set[int]


def pack(
    config: DatasetConfig,
    planner: Mapping[str, Any],
    watermark: int,
    pending: Iterator[Order],
    batches: int,
    drawn: set[int],
) -> dict[str, Any]:
    """JSON-able; `unpack` reads it."""
    return {
        "format": _FORMAT,
        "settings": _settings(config),
        "planner": dict(planner),
        "watermark": watermark,
        "pending": [
            {"number": order.number, "watermark": order.watermark, "draws": order.draws.pack()} for order in pending
        ],
        "batches": batches,
        "drawn": sorted(drawn),
    }


def unpack(state: Mapping[str, Any], config: DatasetConfig) -> Saved:
    """What `pack` made of a feed with the same config. Raises `InvalidDataError` that says what does not fit."""
    if state.get("format") != _FORMAT:
        raise InvalidDataError(f"feed: a state of format {state.get('format')}, not {_FORMAT}; begin anew without it.")
    ours = _settings(config)
    theirs = state.get("settings", {})
    for name in {**ours, **theirs}:
        if theirs.get(name) != ours.get(name):
            raise InvalidDataError(
                f"feed: the state was taken with {name} {theirs.get(name)}, this feed has {ours.get(name)}."
            )
    try:
        return Saved(
            dict(state["planner"]),
            int(state["watermark"]),
            tuple(UndeliveredOrder(p["number"], p["watermark"], Draws.unpack(p["draws"])) for p in state["pending"]),
            int(state["batches"]),
            set(state["drawn"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidDataError(f"feed: the state cannot be read ({type(error).__name__}: {error}).") from error


def plans(
    pending: Sequence[UndeliveredOrder], universe: SegmentIndex
) -> Iterator[tuple[UndeliveredOrder, SamplingPlan, bool]]:
    """Each one with a plan that holds its segments as long as one of them needs them; False: some are gone."""
    numbers = [universe.find(planned.draws.segment) for planned in pending]
    for position, planned in enumerate(pending):
        before = np.concatenate([np.zeros(0, np.int64), *numbers[:position]])
        after = np.concatenate([np.zeros(0, np.int64), *numbers[position + 1 :]])
        mine = np.unique(numbers[position][numbers[position] >= 0])
        admit, release = np.setdiff1d(mine, before).tolist(), np.setdiff1d(mine, after).tolist()
        plan = SamplingPlan(planned.number, (), tuple((s,) for s in admit), mine, mine, tuple((s,) for s in release))
        yield planned, plan, len(mine) == len(np.unique(planned.draws.segment))


def until(index: SegmentColumns, watermark: int) -> SegmentColumns:
    """The part of an index up to a ledger row."""
    count = int(np.searchsorted(index.row, watermark, "right"))
    runs = int(index.run_offsets[count])
    cut = {name: getattr(index, name)[:count] for name in _INDEX_COLUMNS}
    return msgspec.structs.replace(index, **cut, run_offsets=index.run_offsets[: count + 1], runs=index.runs[:runs])


def _settings(config: DatasetConfig) -> dict[str, Any]:
    """What a plan depends on; plans of other settings mean other steps."""
    settings: dict[str, Any] = {
        "tasks": list(config.tasks),
        "batch": config.batch,
        "shape": [config.horizon, list(config.ticks_ahead), config.ticks_per_frame],
        "seed": config.seed,
        "rank": [config.rank, config.world],
        "cache_bytes": config.cache_bytes,
        "echo": config.echo,
    }
    # only where they are used: states from before there were offsets, or a history, stay good
    if config.max_offset or config.later:
        settings["offsets"] = [config.max_offset, list(config.rolled), config.later]
    if config.history:
        settings["history"] = config.history
    if config.offset_share < 1:
        settings["offset_share"] = config.offset_share
    return settings
