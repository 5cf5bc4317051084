"""What edges, trainers, evaluators and the gateway say to each other, grouped by who speaks."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from wire.messages import LARGE_BYTES, SHOWN_BYTES, Message
from wire.messages.recording import CameraFrames as CameraFrames
from wire.messages.recording import FlowTrace
from wire.messages.recording import RecordedChunk as RecordedChunk
from wire.messages.recording import TerminalObservation as TerminalObservation
from wire.messages.relaying import FetchPictures as FetchPictures
from wire.messages.relaying import PicturesGone as PicturesGone
from wire.messages.relaying import SealedSegment as SealedSegment
from wire.messages.versions import Deltas as Deltas
from wire.messages.versions import FetchDeltas as FetchDeltas
from wire.messages.versions import FetchWeights as FetchWeights
from wire.messages.versions import Publish as Publish
from wire.messages.versions import Published as Published
from wire.messages.versions import ShadowReport as ShadowReport
from wire.messages.versions import ShadowRequest as ShadowRequest
from wire.messages.versions import ThinkVersions as ThinkVersions
from wire.messages.versions import VersionActivated as VersionActivated
from wire.messages.versions import VersionAvailable as VersionAvailable
from wire.messages.versions import WeightBytes as WeightBytes
from wire.stop_state import StopState
from wire.types import Actor, Episode, RobotSpec

# --- anyone to the gateway -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, eq=False):
    """The first message of a connection, repeated until the gateway answers `HelloAck` or `Rejection`."""

    name: str
    role: str
    """a `Role`"""
    clock: str
    sent_ns: int
    pid: int = 0
    spec: RobotSpec | None = None
    tasks: tuple[str, ...] = ()
    site: str = ""
    """where the robot stands"""
    wall_ns: int = 0
    """what the sender takes for the time of day, since 1970; 0: it does not say"""


class Heartbeat(Message, frozen=True, eq=False):
    """Keeps a connection and carries one clock sample: with the answer to the one before, a round trip for the gateway
    as well."""

    sent_ns: int
    echo_ns: int = 0
    """`received_ns` of the newest `HelloAck`, 0: there was none"""
    echoed_ns: int = 0
    """when that came, by the sender's clock"""


# --- an edge to the gateway ------------------------------------------------------------------------------------------


class Segment(Message, frozen=True, eq=False):
    """Steps [first_tick, first_tick + T) of one episode: the unit that is spooled, sent and acknowledged."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    id: str
    """`<episode id>/<index>`; a segment that comes twice is stored once"""
    episode: Episode
    index: int
    first_tick: int
    last: bool
    """whether the episode ends with it"""
    outcome: str
    """'' until the last segment, then an `EpisodeOutcome`"""
    closed_ns: int
    """when its last step had been recorded"""
    times_ns: np.ndarray
    """int64[T]"""
    state: np.ndarray
    """float32[T, ds]"""
    proposed: np.ndarray
    """float32[T, da]"""
    executed: np.ndarray
    """float32[T, da]"""
    actor: np.ndarray
    """uint8[T], index into `ACTORS`"""
    chunk_tick: np.ndarray
    """int32[T]"""
    delay_ticks: np.ndarray
    """int16[T]"""
    version: np.ndarray
    """int32[T]"""
    reward: np.ndarray
    """float32[T]"""
    terminated: np.ndarray
    """bool[T]: the task ended with this step, the episode's last"""
    truncated: np.ndarray
    """bool[T]: the episode was cut off after this step, its last; the task would have gone on"""
    frame_times_ns: dict[str, np.ndarray]
    """int64[T] by camera: the time of the frame each step saw"""
    frames: dict[str, CameraFrames]
    """by camera; a step may refer to a frame that an earlier segment of the episode brought"""
    terminal: TerminalObservation | None = None
    """of the last segment; None when nobody could look any more"""
    chunks: tuple[RecordedChunk, ...] = ()
    """those of which a step of this segment was the first to execute an action"""
    traces: tuple[FlowTrace, ...] | msgspec.UnsetType = msgspec.UNSET
    """of those of `chunks` whose policy explores; not there where none does"""
    recovery: np.ndarray | msgspec.UnsetType = msgspec.UNSET
    """bool[T]: by which steps a person only brought the robot back; not there where it is none, as it never was before
    people could say so"""

    @property
    def steps(self) -> int:
        return len(self.times_ns)


ACTORS = tuple(Actor)
"""`Segment.actor` holds indices into this tuple."""


class EdgeStatus(Message, frozen=True, eq=False):
    """What a robot is doing, several times a second. Counters only grow while the edge's spool lives."""

    max_bytes: ClassVar[int] = SHOWN_BYTES
    robot: str
    time_ns: int
    mode: str
    """estop, hold, reset, policy, script or human"""
    reason: str
    """why it holds, '' when it does not"""
    task: str
    episode: str
    tick: int
    state: np.ndarray
    """float32[ds]"""
    version: int
    """policy version that acts"""
    ticks: int
    missed_ticks: int
    late_p99_s: float
    starved_ticks: int
    episodes: int
    interventions: int
    steps_recorded: int
    """steps ever written to this edge's spool"""
    spooled: int
    """segments that wait for an acknowledgement"""
    control_pid: int = 0
    inference_pid: int = 0
    uplink_pid: int = 0
    job: str = ""
    """id of the job it works on, '' when it has none"""
    job_episodes: int = 0
    """episodes of that job it has finished, aborted ones left out"""
    fault: str = ""
    """what its driver or a health check says is wrong, '' when nothing is"""
    detail: str = ""
    """what a person should know beyond `reason`"""
    stop: StopState = StopState()
    """who stops it"""
    by_person: bool = False
    """a person resets its scene and says how its episodes ended"""
    open_outcome: str = ""
    """how its newest episode ended, while a person may still say otherwise; '' afterwards"""
    steps_dropped: int = 0
    """steps of the policy alone that were dropped for want of room in this edge's spool, of `steps_recorded`"""
    part: str = ""
    """recovery or correction while somebody drives it in an episode, '' otherwise"""


class Preview(Message, frozen=True, eq=False):
    """The newest camera picture for people; never stored, dropped when the connection is slow."""

    max_bytes: ClassVar[int] = 4 * 1024 * 1024
    robot: str
    camera: str
    time_ns: int
    jpeg: bytes


class EdgeEvent(Message, frozen=True, eq=False):
    """Something happened on a robot that a person should hear of, and that is kept."""

    max_bytes: ClassVar[int] = SHOWN_BYTES
    robot: str
    time_ns: int
    kind: str
    """hold, recovered, refused, ..."""
    detail: str


# --- the gateway to an edge ------------------------------------------------------------------------------------------


FIRST_CREDIT_BYTES = 8 * 1024 * 1024
"""what a robot may send before a gateway has said how much it takes"""


class HelloAck(Message, frozen=True, eq=False):
    """The connection stands."""

    clock: str
    received_ns: int
    echo_ns: int
    """`sent_ns` of the message this answers"""
    watched: bool = False
    """somebody looks at the operator page: pictures for people are worth drawing"""
    stop_port: int = 0
    """where stops are heard and sent, on the gateway's host; 0: not apart from everything else"""
    credit_bytes: int = FIRST_CREDIT_BYTES
    """so much of segments may be under way without an answer, until the next message says otherwise; a single segment
    may be larger, 0: none for now"""
    preview_s: float = 1.0
    """between two pictures of a camera for people: the more robots, the longer; one that a person drives sends more"""
    signing_key: bytes = b""
    """Ed25519, of manifests; b'' where nothing is signed"""


class Rejection(Message, frozen=True, eq=False):
    """The connection is refused, or `request` alone; `reason` says why and what to do."""

    reason: str
    request: FetchWeights | None = None
    """of the peer, for weights that cannot be had here; None: the connection"""


class ReintroduceRequest(Message, frozen=True, eq=False):
    """The gateway does not know this peer, for it may just have started: say `Hello` again."""


class Ack(Message, frozen=True, eq=False):
    """These segments are on disk and committed; the edge may forget them."""

    segments: tuple[str, ...]
    quarantined: tuple[str, ...] = ()
    """kept aside because they were not valid; the gateway's log says why"""
    refused: tuple[str, ...] = ()
    """not taken: their robots did not seal them for this gateway. They are kept by nobody but the relay"""
    credit_bytes: int = FIRST_CREDIT_BYTES
    """as in `HelloAck`"""


class Nack(Message, frozen=True, eq=False):
    """Nothing can be stored now; keep the segments and try again later."""

    reason: str


class Job(Message, frozen=True, eq=False):
    """What a robot is to work on until further notice: it goes on when the connection is cut. It changes jobs
    between two episodes."""

    id: str
    tasks: tuple[str, ...]
    """task names; the robot takes them in turn. None: rest"""
    first_seed: int
    """seed of its first episode; training and held-out seeds never meet"""
    kind: str = "rollout"
    """rollout, evaluation or teleoperation"""
    episodes: int = 0
    """rest after so many; 0: until further notice"""
    version: int = 0
    """evaluation: the policy version that must act; 0: the newest"""
    lease: int = 0
    """number of the lease the robot is held by"""


START_FRESH_S = 1.0
"""a start, or a word about an episode, that is older would move a robot, or judge it, at a moment that nobody chose"""
COMMAND_FRESH_S = 0.25
"""a command that is older is a released key or a lost link: the robot holds"""
LAST_SEQUENCE = 2**63 - 1
"""of what ends a lease for good: nothing of that lease comes after it"""


class OperatorCommand(Message, frozen=True, eq=False):
    """What a person at the page, at a device or beside the robot wants of it, and whose hands it is from.

    Whoever drives does so by a lease. The robot takes commands of the lease and operator that have taken it over, each
    once and only while they are fresh (`robot_edge.operators.lease_fence`). Stops need no lease.
    """

    robot: str
    kind: str
    """an `OperatorCommandKind`"""
    action: tuple[float, ...] = ()
    """with `command`: the action to hold until the next command, within the spec's limits, none when nothing is
    pressed; with `speed_limit`: a share"""
    sequence: int = 0
    """grows with every message of a lease; `drop_link`, which only ever stops, needs none"""
    operator: str = "web"
    stop: str = ""
    """with `estop` and `release_estop`: which stop, by an id that nobody gives twice; with `start`: the newest one"""
    captured_ns: int = 0
    """with `command`, `start` and words about episodes: when the person did it, by the clock of whoever receives this,
    never later than it was; 0: nobody knows, which is refused"""
    lease: int = 0
    """number of the lease that it is from; beside the robot: a time, by which whoever took over last has it"""
    beside: bool = False
    """it was given beside the robot; the uplink says so, whatever the sender did"""


class StopShown(Message, frozen=True, eq=False):
    """To the gateway, where stops are heard: what a robot's host answered to an order."""

    stop: StopState


class Stop(Message, frozen=True, eq=False):
    """Finish the running episode's record, drain the spool and exit."""


class SegmentCommitted(Message, frozen=True, eq=False):
    """To trainers: a segment that was just committed as ledger row `row`, so that they need not read it back."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    row: int
    record: bytes
    """the encoded `Segment`, as it is stored"""


# --- the trainer and the evaluator -----------------------------------------------------------------------------------

GATE = "gate"
"""label of what decides whether robots may act by a version"""


class TrainerStatus(Message, frozen=True, eq=False):
    """How learning goes."""

    max_bytes: ClassVar[int] = SHOWN_BYTES
    gradient_steps: int
    loss: float
    steps_per_s: float
    imitated_steps: int
    cached_segments: int
    phase: str
    """waiting, pretraining, online, rate limited or finished"""
    echo: float = 1.0
    """draws of a step, on average, while it is in the trainer's cache; 1 where all fits"""
    refused: int = 0
    """versions that the trainer itself did not let out"""
    refusal: str = ""
    """why the newest one was not, '' when it was"""
    rollout_steps: int = 0
    """of its tasks in the buffer: what the policy did by itself"""
    stale_steps: int = 0
    """of those: arrived with a lag above the bound that the trainer was given; 0 without one"""
    curves: dict[str, float] = msgspec.field(default_factory=dict)
    """what else it draws of the run, by name"""


class Evaluate(Message, frozen=True, eq=False):
    """To an evaluator: measure a version on held-out seeds [first_seed, first_seed + episodes) of each task. From one
    that was started for just that: announce it."""

    number: int
    episodes: int
    first_seed: int
    label: str


class Evaluation(Message, frozen=True, eq=False):
    """Measured success of a version on held-out seeds."""

    number: int
    success: dict[str, float]
    """by task name, 0 to 1"""
    episodes: int
    """per task"""
    first_seed: int
    label: str
    """cadence, before, after or `GATE`"""
    started_ns: int
    duration_s: float
    outcomes: dict[str, tuple[bool, ...]] = msgspec.field(default_factory=dict)
    """by task, whether it succeeded from each seed; {}: nobody asked"""
