"""How far a trainer is and what it did: for its status, and for whoever watches its process."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cloud_learner.buffer.loading.config import DatasetStats
from wire.messages.gateway import TrainerStatus


class TrainerPhase(StrEnum):
    """How far the trainer is."""

    waiting = "waiting"
    """for demonstrations; also reported of a pretrained policy that waits for its first corrections"""
    pretraining = "pretraining"
    """on demonstrations; nothing is published yet"""
    online = "online"
    """on what robots bring; versions are published"""
    rate_limited = "rate limited"
    """online, and for a while as many steps were drawn as the recipe allows for what was recorded; only reported"""
    finished = "finished"
    """`max_steps` are done; only reported, it goes on to publish"""


class VersionFault(StrEnum):
    """Why a version is not let out."""

    not_finite = "not finite"
    cannot_act = "cannot act"
    """the policy that robots run does not take it, or gives no actions"""
    moved = "actions moved"
    saturated = "actions saturated"
    constant = "actions constant"


@dataclass(frozen=True, slots=True)
class VersionRefusal:
    """A version that is not let out."""

    fault: VersionFault
    detail: str
    """for people"""


@dataclass(frozen=True, slots=True)
class VersionMeasures:
    """What is known of a version before it goes out. Changes are root mean squares in ranges of the dimensions."""

    sent_bytes: int = 0
    changed_share: float | None = None
    """of its values, by a delta; None: it goes whole"""
    action_change: float | None = None
    """from its parent's actions; None: they were not compared"""
    quantization_change: float | None = None
    """of actions, by quantisation alone; None: not measured this time"""
    unquantized: bool = False
    """it goes whole and exact, for that was too much"""
    seconds: float = 0.0
    """it took to make"""


@dataclass(slots=True)
class PublishCounts:
    """Of versions since the trainer began."""

    made: int = 0
    whole: int = 0
    """of those, versions that went whole"""
    unquantized: int = 0
    """of these, versions whose actions quantisation would have changed too much"""
    sent_bytes: int = 0
    seconds: float = 0.0
    """spent on making them"""
    refused: dict[VersionFault, int] = field(default_factory=dict)
    """versions that were not let out"""
    refusal: str = ""
    """why the newest one was not, '' when it was"""
    newest: VersionMeasures = VersionMeasures()
    action_change: float | None = None
    """`VersionMeasures` that were measured last"""
    quantization_change: float | None = None


@dataclass(slots=True)
class TrainerCounts:
    """What a trainer did since it began, and how it is."""

    status: TrainerStatus | None = None
    """the newest one"""
    dataset: DatasetStats | None = None
    """as it was then"""
    metrics: dict[str, float] = field(default_factory=dict)
    """what the algorithm said of its newest update"""
    shares: dict[str, float] = field(default_factory=dict)
    """of what was drawn before the newest status: by task, and of online data"""
    draws: int = 0
    """steps that were drawn for batches"""
    batch_wait_s: float = 0.0
    """waited for batches"""
    gradient_step_s: float = 0.0
    """spent on gradient steps"""
    returns: int = 0
    """to a checkpoint, from a loss that had risen or steps that were refused"""
    published: int = 0
    """versions"""
    publish_s: float = 0.0
    """from the copy of their weights until the gateway had them"""
    saved_ns: int = 0
    """when the newest checkpoint was written, 0 for none of this process"""
    version: int = 0
    """the newest one that it published, also before it was started again"""
    publishing: PublishCounts = field(default_factory=PublishCounts)
