"""What a feed is asked for, and what it says about itself."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cloud_learner.buffer.sampling.target import SamplingDistribution
from wire.errors import ConfigError

_NOT_NEGATIVE = (("max_offset", 0), ("history", 0), ("workers", 0), ("prefetch", 0))


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
    later: bool = False
    """bring `later_index` and `later_state`, for a network that corrects single actions"""
    seed: int = 0
    cache_bytes: int = 2 * 1024**3
    """for decoded frames and steps"""
    fresh_bytes: int = 64 * 1024**2
    """for encoded segments that the gateway sent, on top of the cache"""
    echo: float = 8.0
    """how often a step is drawn on average while it is in memory, where not all fit"""
    rank: int = 0
    world: int = 1
    """ranks share the episodes: each gets those with number % world == rank"""
    workers: int = 0
    """loading processes; 0 loads in the thread that gathers"""
    prefetch: int = 2
    """batches gathered before they are asked for; 0 gathers when asked, without a thread"""
    lead: int = 8
    """batches planned before they are asked for, more than `prefetch`: time to load in, and until new data shows up"""
    pin: bool = False
    """page-locked batches, for copies to a GPU beside other work; needs torch and a GPU"""

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("horizon", 1), ("ticks_per_frame", 1), *_NOT_NEGATIVE):
            if getattr(self, name) < least:
                raise ConfigError(f"feed: {name} is {getattr(self, name)}; at least {least} is needed.")
        if not 0 <= self.offset_share <= 1:
            raise ConfigError(f"feed: offset_share {self.offset_share} must be from 0 to 1.")
        if self.lead <= self.prefetch:
            raise ConfigError(f"feed: lead {self.lead} must be more than prefetch {self.prefetch}.")
        if any(a >= b for a, b in zip((0, *self.ticks_ahead), self.ticks_ahead, strict=False)):
            raise ConfigError(f"feed: ticks_ahead {self.ticks_ahead} must be positive and grow.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"feed: seed {self.seed} must be in [0, 2**63).")


class FeedStats(msgspec.Struct, frozen=True):
    """What a feed did and holds."""

    batches: int
    segments: int
    """in memory"""
    bytes: int
    """memory that was written and not given back"""
    newest_row: int
    """ledger row of the newest segment looked at"""
    loaded: int
    """segments brought into memory, again and again"""
    from_gateway: int
    """segments that had not to be read, neighbours included"""
    damaged: int
    """segments that could not be read"""
    unreadable_frames: int
    replaced: int
    """draws that could not be read and were replaced by others of their batch"""
    restarts: int
    """loading processes that ended and were replaced"""
