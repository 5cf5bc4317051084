"""What a dataset is asked for, what it says about itself, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cloud_learner.buffer.sampling.target import SamplingDistribution
from wire.errors import ConfigError

_NOT_NEGATIVE = (("max_offset", 0), ("history", 0), ("workers", 0), ("prefetch", 0), ("n_step", 0), ("traces", 0))
_FREE = (
    "fresh_bytes",
    "max_echo",
    "workers",
    "prefetch",
    "lead",
    "target",
    "samples_per_insert",
    "rank",
    "world",
    "traces",
)
"""settings that plans may go on with when they are others; of `until_row` a sampler's state says what was there"""


class DatasetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer wants, and what it may cost."""

    tasks: Mapping[str, str]
    """instruction by task name; other tasks are left out"""
    target: SamplingDistribution
    batch: int
    horizon: int = 16
    """H: length of `actions`"""
    ticks_ahead: tuple[int, ...] = ()
    """growing; see `ahead` in `windows`"""
    ticks_per_frame: int = 1
    """k: windows behind each image; above 1 batches are grouped"""
    max_offset: int = 0
    """D: state and actions come from up to so many ticks later than the images; see `windows`"""
    offset_share: float = 1.0
    """share of the windows that are postponed; the others begin with what the image shows"""
    rolled: tuple[bool, ...] = ()
    """by state dimension: whether a robot can foretell it; the others are as old as the images. Empty: all"""
    history: int = 0
    """n: bring `past_state` and `past_images`, of so many ticks before"""
    n_step: int = 0
    """bring the observation so many ticks later, and what was rewarded until then, for learning values"""
    gamma: float = 0.99
    """discount of a tick, with `n_step`"""
    labels: tuple[str, ...] = ()
    """names of `Ledger.put_step_labels` to bring"""
    traces: int = 0
    """bring the `traces` of chunks with so many points, each from its chunk's first step on; 0: none"""
    later: bool = False
    """bring `later_index` and `later_state`, for a network that corrects single actions"""
    seed: int = 0
    cache_bytes: int = 2 * 1024**3
    """for decoded frames and steps"""
    fresh_bytes: int = 64 * 1024**2
    """for encoded segments that the gateway sent, on top of the cache"""
    echo: float = 1.0
    """how often a step is drawn on average while it is in memory, where not all fit"""
    max_echo: float = 8.0
    """echo is raised up to this while loading is what the trainer waits for"""
    samples_per_insert: float = 0.0
    """at most so many steps drawn for each recorded one (`ReplayDataset.ahead_of_data`); 0: any number"""
    validation: float = 0.0
    """share of the episodes that are held out, by `segment_index.on_side`: the same ones for everybody and for good"""
    held_out: bool = False
    """draw from those, and from nothing else"""
    until_row: int = 0
    """draw from nothing that was committed after this ledger row, such as that of a snapshot; 0: from all"""
    rank: int = 0
    world: int = 1
    """so many ranks share each batch, and this one brings its rows of it: what is drawn is the same for any number"""
    workers: int = 0
    """loading threads; 0 loads in the thread that gathers"""
    prefetch: int = 2
    """batches gathered before they are asked for; 0 gathers when asked, without a thread"""
    lead: int = 8
    """batches planned before they are asked for, more than `prefetch`: time to load in, and until new data shows up"""

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("horizon", 1), ("ticks_per_frame", 1), *_NOT_NEGATIVE):
            if getattr(self, name) < least:
                raise ConfigError(f"dataset: {name} is {getattr(self, name)}; at least {least} is needed.")
        if not 0 <= self.rank < self.world or self.batch % self.world:
            raise ConfigError(
                f"dataset: rank {self.rank} of {self.world}, counted from 0, has no even share of a batch of "
                f"{self.batch}; give another batch."
            )
        if not 0 <= self.offset_share <= 1:
            raise ConfigError(f"dataset: offset_share {self.offset_share} must be from 0 to 1.")
        if self.lead <= self.prefetch:
            raise ConfigError(f"dataset: lead {self.lead} must be more than prefetch {self.prefetch}.")
        if self.n_step and self.ticks_per_frame > 1:
            raise ConfigError(
                "dataset: n_step goes with ticks_per_frame 1, for each sample has an observation after it: set "
                "training.ticks_per_frame=1."
            )
        if self.traces and self.ticks_per_frame > 1:
            raise ConfigError(
                "dataset: traces go with ticks_per_frame 1, for a chunk has one step at which it begins: set "
                "training.ticks_per_frame=1."
            )
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"dataset: gamma {self.gamma} must be above 0 and at most 1.")
        if any(a >= b for a, b in zip((0, *self.ticks_ahead), self.ticks_ahead, strict=False)):
            raise ConfigError(f"dataset: ticks_ahead {self.ticks_ahead} must be positive and grow.")
        if self.held_out and not self.validation:
            raise ConfigError("dataset: held_out needs the share of episodes that is held out (validation).")
        if self.samples_per_insert < 0 or not 0 <= self.validation < 1:
            raise ConfigError(
                f"dataset: samples_per_insert {self.samples_per_insert} must not be negative, validation "
                f"{self.validation} from 0 to below 1."
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"dataset: seed {self.seed} must be in [0, 2**63).")

    def own_rows(self, batch: int) -> slice:
        """Of a batch of so many."""
        count = batch // self.world
        return slice(self.rank * count, (self.rank + 1) * count)

    @property
    def lookahead(self) -> int:
        """How many steps after the one that saw its frames a window may need."""
        return self.max_offset + max((self.horizon - 1, self.n_step, *self.ticks_ahead))

    def settings(self) -> dict[str, object]:
        """JSON-able: what a plan depends on; plans of other settings mean other steps."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in (*_FREE, "until_row")}
        return msgspec.json.decode(msgspec.json.encode({**values, "tasks": list(self.tasks)}))


class LoadCounts(msgspec.Struct, kw_only=True):
    """What was loaded, and what could not be."""

    loaded: int = 0
    """segments brought into memory, again and again"""
    damaged: int = 0
    """segments that could not be read and were left out"""
    unreadable_frames: int = 0
    replaced: int = 0
    """draws that could not be read and were replaced by others of their batch"""


class DatasetStats(LoadCounts, kw_only=True):
    """What a dataset did and holds."""

    batches: int
    segments: int
    """in memory"""
    bytes: int
    """memory that was written and not given back"""
    newest_row: int
    """ledger row of the newest segment looked at"""
    echo: float
    """draws of a step now, on average, while it is in memory, where not all fit"""
    from_gateway: int
    """segments that had not to be read, neighbours included"""
    rollout_steps: int
    """that there are: what the policy did by itself"""
    stale_steps: int
    """of those: arrived later than the target's `staleness` allows; 0 without one"""


class PendingBatch(msgspec.Struct, frozen=True):
    """A batch that was planned and not delivered."""

    number: int
    watermark: int
    newest_version: int
    draws: bytes
    """`loader.DRAW`[b]"""


class DatasetState(msgspec.Struct, frozen=True):
    """What a dataset needs to go on after a stop."""

    settings: dict[str, Any]
    sampler: dict[str, Any]
    watermark: int
    pending: tuple[PendingBatch, ...]
    batches: int
    sampled: int
    recorded: int
    drawn: tuple[int, ...]
    counted_from: tuple[int, int]
    """(sampled, recorded) when `ReplayDataset.count_from_now` was called last"""
