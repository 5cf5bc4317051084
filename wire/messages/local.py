"""What the processes of one robot computer say to each other, and a robot to the one that thinks for it."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from wire.messages import LARGE_BYTES, Message
from wire.messages.gateway import OperatorCommand, RecordedChunk, TerminalObservation
from wire.messages.recording import FlowTrace
from wire.types import ActionChunk, Episode, Frame, Latent, Observation, PolicyVersion, Prefix, ResidualPolicy, Step


class ChunkRequest(Message, frozen=True, eq=False):
    """Control asks inference for a chunk."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    tick: int
    """control tick at which `observation` was made; the answer names it"""
    observation: Observation
    """as it was seen"""
    first_tick: int
    """tick that the chunk's first action is for, `tick` or later"""
    state: np.ndarray
    """float32[ds]: the state the robot will be in at `first_tick`, the one seen when that is `tick`"""
    prefix: Prefix | None = None
    residual: bool = False
    """also answer with the latent and the corrector"""
    moved_ticks: int = -1
    """for so many ticks before `tick` the robot has moved without standing still; -1: not known"""


class ChunkReply(Message, frozen=True, eq=False):
    """Inference answers; `error` is '' or why there is no chunk."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    chunk: ActionChunk | None
    error: str = ""
    tick: int = -1
    """`ChunkRequest.tick`"""
    latent: np.ndarray | None = None
    """what the chunk was made from, when it was asked for"""
    corrector: ResidualPolicy | None = None
    silent: bool = False
    """there is no chunk because the slow path does not answer"""


class ThinkRequest(Message, frozen=True, eq=False):
    """Asks for the latent of an observation, in another process or on another machine."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    number: int
    """the answer names it"""
    versions: tuple[int, ...]
    """policy versions that are of use, the most wanted first; the first that is there is asked to think"""
    observation: Observation
    jpeg: dict[str, bytes] = msgspec.field(default_factory=dict)
    """by camera: the image as JPEG where `observation` has an empty one in its place"""
    can_wait: bool = False
    """nobody acts by the answer: all others come first"""


class ThinkReply(Message, frozen=True, eq=False):
    """The latent, or why there is none."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    number: int
    """`ThinkRequest.number`"""
    latent: Latent | None
    versions: tuple[int, ...]
    """policy versions that the answering side has"""
    error: str = ""


class SampleRequest(Message, frozen=True, eq=False):
    """The shadow process tells inference that it is ready to make another chunk again, for comparison."""


class ChunkSample(Message, frozen=True, eq=False):
    """A chunk that acts, and all that it was made from."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    observation: Observation
    """that was thought about"""
    request: ChunkRequest
    """its observation has no images: making a chunk looks at none"""
    chunk: ActionChunk


class SharedFrameEnvelope(Message, frozen=True, eq=False):
    """A request whose images lie in shared memory, where `wire.transport.frame_ring.FrameRing` finds them by number."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    message: ChunkRequest | ThinkRequest | ChunkSample
    """its observation has no images"""
    frames: dict[str, int]
    """by camera"""


class LoadWeights(Message, frozen=True, eq=False):
    """The uplink tells inference that verified weights lie at `path`."""

    version: PolicyVersion
    path: str


class LoadShadow(Message, frozen=True, eq=False):
    """The uplink tells the shadow process what to compute: a version whose weights lie at `path`, None for none."""

    version: PolicyVersion | None
    path: str = ""
    inference_pid: int = 0
    """of the process that acts, which shows how much memory a policy takes; 0: not known"""


class SwapReverted(Message, frozen=True, eq=False):
    """Inference tells the uplink that it does not act by this version, and goes on by the one before: its file is to be
    checked, and loaded again, when it is announced again."""

    version: PolicyVersion
    damaged: bool
    """its file is not what arrived; else it was loaded in part"""


class RequestPreviews(Message, frozen=True, eq=False):
    """The uplink tells control whether anybody looks at the robot's larger pictures."""

    wanted: bool


class OperatorState(Message, frozen=True, eq=False):
    """The uplink tells a control process that was started again who drives, and which messages it has passed on."""

    taken_over: OperatorCommand | None
    """the takeover that stands"""
    linked: bool
    """whoever it is has not vanished since"""
    seen: tuple[int, int]
    """newest lease of the gateway and newest sequence number of that lease"""
    seen_beside: tuple[int, int]
    """the same of operators beside the robot"""


class EpisodeStarted(Message, frozen=True, eq=False):
    episode: Episode


class StepRecorded(Message, frozen=True, eq=False):
    max_bytes: ClassVar[int] = LARGE_BYTES
    episode_id: str
    step: Step
    chunk: RecordedChunk | None = None
    """the policy's action came from it, as the first of it"""
    outcome: str = ""
    """how the episode ended with it; '' while it goes on, or was broken off"""
    trace: FlowTrace | None = None
    """of `chunk`, if its policy explores"""


class FrameRecorded(Message, frozen=True, eq=False):
    """A frame for the record (`image`) or for people (`preview`); sent once."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    episode_id: str
    camera: str
    frame: Frame


class EpisodeEnded(Message, frozen=True, eq=False):
    episode_id: str
    outcome: str
    ended_ns: int
    terminal: TerminalObservation | None = None
    awaits_verdict: bool = False
    """it stays open: a person may say otherwise until an `EpisodeJudged` that is final, or the next episode"""


class EpisodeJudged(Message, frozen=True, eq=False):
    """How an episode ended that was left open, as far as is known now."""

    episode_id: str
    outcome: str
    final: bool


class EpisodeLost(Message, frozen=True, eq=False):
    """The uplink tells control that it has not all steps of this episode, which is aborted where those end that it has.

    An earlier uplink had the others and died, or nothing came for long.
    """

    episode_id: str
