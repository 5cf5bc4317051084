"""What is said about robots as resources: jobs, leases and the state of the fleet.

A client of the gateway (a command line, a teleoperator, a Ray cluster) sends a call and gets exactly one `Response`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from wire.messages import LARGE_BYTES, Message
from wire.types import Lease, PolicyVersion, RobotSpec


class Capabilities(msgspec.Struct, frozen=True):
    """What a robot is and can do: what a job may ask for."""

    embodiment: str
    spec_hash: str
    state_dim: int
    action_dim: int
    meanings: tuple[str, ...]
    """of its action dimensions, each once, sorted: absolute, delta, velocity"""
    control_hz: float
    cameras: tuple[str, ...] = ()
    site: str = ""
    """where it stands, '' when nobody said"""
    tasks: tuple[str, ...] = ()
    """task names it can do; none: whatever it is asked"""


class JobKind(StrEnum):
    """What robots do for a job."""

    rollout = "rollout"
    """the policy works and learns"""
    evaluation = "evaluation"
    """a policy version on held-out seeds"""
    teleoperation = "teleoperation"
    """a person drives"""


class JobPhase(StrEnum):
    """How far a job is."""

    waiting = "waiting"
    running = "running"
    done = "done"
    cancelled = "cancelled"


class Requirement(msgspec.Struct, frozen=True):
    """What a job needs of a robot. '', 0 and () ask for nothing."""

    embodiment: str = ""
    spec_hash: str = ""
    meanings: tuple[str, ...] = ()
    """only these"""
    cameras: tuple[str, ...] = ()
    """at least these"""
    site: str = ""
    tasks: tuple[str, ...] = ()
    """at least one of these"""
    robots: tuple[str, ...] = ()
    """one of these, by name"""


class JobRequest(msgspec.Struct, frozen=True):
    """Work for robots."""

    id: str
    """a name of the submitter's choice; submitting it again changes nothing"""
    kind: str
    """a `JobKind`"""
    tasks: tuple[str, ...]
    robots: int = 0
    """on so many robots at once; 0: on all there are"""
    episodes: int = 0
    """done after so many, over all its robots; 0: until it is cancelled. An evaluation: of each task"""
    requirement: Requirement = Requirement()
    priority: int = 0
    """0: the usual one of its kind"""
    version: int = 0
    """evaluation: of this policy version; 0: the newest"""
    first_seed: int = 0
    """evaluation: of its first episode; 0: where the held-out seeds begin"""
    submitter: str = ""


class JobState(msgspec.Struct, frozen=True):
    """A job and how far it is."""

    request: JobRequest
    phase: str
    """a `JobPhase`"""
    robots: tuple[str, ...] = ()
    """that work on it now"""
    episodes: int = 0
    """finished"""
    successes: int = 0
    unjudged: int = 0
    """of the finished ones: neither successes nor failures"""
    note: str = ""
    """why it waits, '' while it runs"""


class RobotState(msgspec.Struct, frozen=True):
    """A robot as the fleet sees it now."""

    name: str
    capabilities: Capabilities
    health: str
    """starting, ready, degraded, draining, lost or stopped"""
    reason: str = ""
    """why it is not ready"""
    load: float = 0.0
    """share of its time, over the last minute, in which it worked"""
    lease: Lease | None = None
    job: str = ""


class VersionAction(StrEnum):
    """What a person wants with policy versions."""

    list = "list"
    promote = "promote"
    """all robots run it"""
    rollback = "rollback"
    """go back to it, 0: undo the newest step; nothing newer acts by itself until `thaw`"""
    pin = "pin"
    """a robot, or all, run it whatever comes; 0: no more"""
    shadow = "shadow"
    """some robots compute it beside what acts, and it never acts by that; 0: no more"""
    freeze = "freeze"
    """nothing is tried or promoted by itself"""
    thaw = "thaw"


class ShadowStatus(msgspec.Struct, frozen=True):
    """What came of a version that robots compute without acting by it. Differences of its actions from those that
    acted, for the same observations: shares of the range of each action dimension in the robot's spec."""

    robots: tuple[str, ...] = ()
    """that are to compute it now"""
    chunks: int = 0
    """that were compared, on all robots together"""
    mean: float = 0.0
    p95: float = 0.0
    """over all numbers of all chunks; at most an eighth above it"""
    most: float = 0.0
    largest: dict[str, float] = msgspec.field(default_factory=dict)
    """the largest of each dimension, by name"""
    faults: int = 0
    """chunks that it failed to make"""
    problems: dict[str, str] = msgspec.field(default_factory=dict)
    """by robot: why it does not compute it, or what failed last"""


class VersionStatus(msgspec.Struct, frozen=True):
    """A policy version and how far it is."""

    version: PolicyVersion
    state: str
    """candidate, canary, promoted, rolled_back or refused"""
    current: bool = False
    """what robots run that try nothing"""
    reference: bool = False
    """the promoted one with the best record"""
    robots: tuple[str, ...] = ()
    """that run it now"""
    pinned: tuple[str, ...] = ()
    """robots that are pinned to it; `all`: the fleet"""
    episodes: int = 0
    """in which it alone acted, and that ended with a verdict"""
    successes: int = 0
    unjudged: int = 0
    """episodes of which nobody said whether they succeeded"""
    note: str = ""
    """why it is in this state"""
    frozen: bool = False
    """whether versions are frozen; of all the same"""
    here: bool = True
    """whether its file is here"""
    delta_bytes: int = 0
    """of its delta, 0 when it has none here"""
    shadow: ShadowStatus | None = None
    """None for a version that no robot ever computed without acting by it"""


# --- calls -----------------------------------------------------------------------------------------------------------


class ListFleet(Message, frozen=True, eq=False):
    """Ask for all robots and jobs."""

    call: int


class SubmitJob(Message, frozen=True, eq=False):
    call: int
    request: JobRequest


class CancelJob(Message, frozen=True, eq=False):
    call: int
    job: str


class AcquireLease(Message, frozen=True, eq=False):
    """Ask for a robot for oneself; a lease of lower priority ends for it."""

    call: int
    robot: str
    purpose: str
    priority: int
    ttl_s: float


class RenewLease(Message, frozen=True, eq=False):
    """The holder lives: the lease runs on for its time to live."""

    call: int
    robot: str
    number: int


class ReleaseLease(Message, frozen=True, eq=False):
    """Give a robot back. `number` 0: whoever holds it, for a person who knows what that means."""

    call: int
    robot: str
    number: int


class ChangeVersions(Message, frozen=True, eq=False):
    """Have something done with policy versions; answered with all of them."""

    call: int
    action: str = VersionAction.list
    """a `VersionAction`"""
    number: int = 0
    robot: str = ""
    """to pin; "" for all"""
    robots: tuple[str, ...] = ()
    """that are to compute a shadow; none: a few"""


class Response(Message, frozen=True, eq=False):
    """To every call: what it asked for, or why not."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    call: int
    refused: str = ""
    lease: Lease | None = None
    robots: tuple[RobotState, ...] = ()
    jobs: tuple[JobState, ...] = ()
    versions: tuple[VersionStatus, ...] = ()
    specs: dict[str, RobotSpec] = msgspec.field(default_factory=dict)
    """with `ListFleet`: by spec hash"""


class Preempted(Message, frozen=True, eq=False):
    """To the holder of a lease that has ended before its time."""

    lease: Lease
    reason: str
