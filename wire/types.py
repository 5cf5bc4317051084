"""The nouns of the fleet: one frozen, slotted type each.

Shapes use these letters: H actions of a chunk, T steps of a segment, ds state and da action dimensions,
h and w image height and width, F frames of a camera in a segment.
"""

from __future__ import annotations

import hashlib
import math
from enum import StrEnum

import msgspec
import numpy as np

from wire.errors import ConfigError, SpecMismatchError
from wire.messages.recording import FlowTrace
from wire.spec_checks import check_names, check_number, check_rate, check_text
from wire.untrusted import MAX_PICTURE_PIXELS

MAX_PIXELS = 16_384


class CommandType(StrEnum):
    """What a number of a state or action dimension means to the robot."""

    absolute = "absolute"
    """a target or measured value, as it is"""
    delta = "delta"
    """a change applied once per control tick"""
    velocity = "velocity"
    """a rate that goes on until the next command"""


class Actor(StrEnum):
    """Who chose the action of a step."""

    policy = "policy"
    human = "human"
    script = "script"
    hold = "hold"


class Mode(StrEnum):
    """Who moves a robot now."""

    estop = "estop"
    hold = "hold"
    reset = "reset"
    human = "human"
    script = "script"
    policy = "policy"


class EpisodeSource(StrEnum):
    """What an episode was recorded for."""

    online = "online"
    """the fleet's practice"""
    demonstration = "demonstration"
    evaluation = "evaluation"


class EpisodeOutcome(StrEnum):
    """How an episode ended."""

    success = "success"
    failure = "failure"
    aborted = "aborted"
    """broken off: it says nothing about the policy"""
    unjudged = "unjudged"
    """it ended, and nobody who could tell has said how: neither a success nor a failure"""
    discarded = "discarded"
    """a person threw it away: nobody learns from it"""


class Role(StrEnum):
    """What a process is to those it connects to: the record of its key says it."""

    gateway = "gateway"
    edge = "edge"  # a robot
    inference = "inference"
    thinker = "thinker"  # encodes observations for robots on other machines
    relay = "relay"  # passes weights on to the robots of a site
    trainer = "trainer"
    evaluator = "evaluator"
    demonstrator = "demonstrator"
    console = "console"
    teleoperator = "teleoperator"


CALLERS = (Role.console, Role.teleoperator)  # of the gateway


class OperatorCommandKind(StrEnum):
    """What a person wants of a robot."""

    take_over = "take_over"
    hand_back = "hand_back"
    command = "command"  # act so until the next command
    estop = "estop"
    release_estop = "release_estop"  # the stop that the command names
    start = "start"
    drop_link = "drop_link"  # whoever drove it vanished: hold
    speed_limit = "speed_limit"  # its one number: share of the velocity limits; only from beside the robot
    success = "success"  # the episode ends, or has ended, as that
    failure = "failure"
    end = "end"  # the episode ends without a verdict
    discard = "discard"  # throw the running episode, or the one that has just ended, away
    rerecord = "rerecord"  # the same, and its task and seed come again
    scene_ready = "scene_ready"  # the scene is reset: the next episode may begin
    next = "next"  # `end` while an episode runs, `scene_ready` once the robot has waited a while
    recover = "recover"  # whoever drives brings the robot back first
    correct = "correct"  # from here on they show what it should have done


VERDICTS = frozenset((OperatorCommandKind.success, OperatorCommandKind.failure))
EPISODE_COMMANDS = VERDICTS | {
    OperatorCommandKind(word) for word in ["end", "discard", "rerecord", "scene_ready", "next", "recover", "correct"]
}
"""what a person says of episodes, scenes and their own part; each is heard once, and does nothing that does not fit"""


class Dimension(msgspec.Struct, frozen=True):
    """One state or action dimension."""

    name: str
    unit: str
    low: float
    high: float
    meaning: CommandType = CommandType.absolute


class CameraSpec(msgspec.Struct, frozen=True):
    """One camera as the policy sees it: uint8[height, width, 3], RGB."""

    name: str
    height: int
    width: int
    rate_hz: float


class RobotSpec(msgspec.Struct, frozen=True, cache_hash=True):
    """What a robot measures and accepts. Two robots with equal specs share one data stream."""

    embodiment: str
    state: tuple[Dimension, ...]
    action: tuple[Dimension, ...]
    cameras: tuple[CameraSpec, ...]
    control_hz: float

    def __post_init__(self) -> None:
        """Raises `ConfigError` naming the field that cannot be."""
        check_text("robot spec: embodiment", self.embodiment)
        what = f"robot spec '{self.embodiment}'"
        for kind, dimensions in (("state", self.state), ("action", self.action)):
            check_names(what, kind, [dimension.name for dimension in dimensions])
            for dimension in dimensions:
                one = f"{what}: {kind} '{dimension.name}'"
                for side in ("low", "high"):
                    check_number(f"{one}: {side}", getattr(dimension, side))
                if not dimension.low < dimension.high:
                    raise ConfigError(f"{one} has low {dimension.low} not below high {dimension.high}.")
                for side in ("low", "high"):
                    if not math.isfinite(limit := getattr(dimension, side)):
                        raise ConfigError(f"{one} has {side} {limit}; give a finite limit.")
                if not isinstance(dimension.unit, str) or not dimension.unit.strip():
                    raise ConfigError(f"{one} has no unit; '1' stands for none.")
        if not self.action:
            raise ConfigError(f"{what}: action is empty; name at least one dimension that can be commanded.")
        check_names(what, "camera", [camera.name for camera in self.cameras])
        for camera in self.cameras:
            one = f"{what}: camera '{camera.name}'"
            for side in ("height", "width"):
                pixels = getattr(camera, side)
                if not isinstance(pixels, int) or not 1 <= pixels <= MAX_PIXELS:
                    raise ConfigError(f"{one} has {side} {pixels}; give 1 to {MAX_PIXELS} pixels.")
            if camera.height * camera.width > MAX_PICTURE_PIXELS:
                raise ConfigError(
                    f"{one} has {camera.height}x{camera.width} pixels; a picture has at most {MAX_PICTURE_PIXELS}."
                )
            check_rate(f"{one}: rate_hz", camera.rate_hz)
        check_rate(f"{what}: control_hz", self.control_hz)

    @property
    def hash(self) -> str:
        """16 hexadecimal digits that name the data stream."""
        # A whole number given as an int is the same number after it came over the wire as a float.
        same = msgspec.convert(msgspec.to_builtins(self), RobotSpec)
        return hashlib.sha256(msgspec.json.encode(same)).hexdigest()[:16]

    @property
    def data_hash(self) -> str:
        """As `hash`, of all but the limits: recordings of specs that have the same are learned from together."""
        spec = msgspec.to_builtins(msgspec.convert(msgspec.to_builtins(self), RobotSpec))
        spec |= {side: [d | {"low": 0, "high": 0} for d in spec[side]] for side in ("state", "action")}
        return hashlib.sha256(msgspec.json.encode(spec)).hexdigest()[:16]

    @property
    def state_dim(self) -> int:
        return len(self.state)

    @property
    def action_dim(self) -> int:
        return len(self.action)

    @property
    def period_ns(self) -> int:
        return round(1e9 / self.control_hz)

    def action_low(self) -> np.ndarray:
        """float32[da]"""
        return np.array([d.low for d in self.action], np.float32)

    def action_high(self) -> np.ndarray:
        """float32[da]"""
        return np.array([d.high for d in self.action], np.float32)

    def require(self, other: RobotSpec, what: str) -> None:
        """Raise `SpecMismatchError` that names the first difference if `other` is another spec."""
        if self.hash == other.hash:
            return
        for field in self.__struct_fields__:
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                if isinstance(mine, tuple):
                    names = [[dimension.name for dimension in side] for side in (mine, theirs)]
                    if names[0] == names[1]:
                        mine, theirs = next(pair for pair in zip(mine, theirs, strict=True) if pair[0] != pair[1])
                    else:
                        mine, theirs = names
                raise SpecMismatchError(
                    f"{what}: made for robot spec {self.hash} ('{self.embodiment}'), but got {other.hash} "
                    f"('{other.embodiment}'); '{field}' differs: {mine} against {theirs}. "
                    "Use weights and data of this robot, or start a fresh --data directory."
                )


class Frame(msgspec.Struct, frozen=True, eq=False):
    """One camera image, captured once."""

    time_ns: int
    image: np.ndarray
    """uint8[h, w, 3], RGB"""
    preview: np.ndarray | None = None
    """uint8[H, W, 3], RGB: a larger view of the same moment for people, never for the policy"""


class Observation(msgspec.Struct, frozen=True, eq=False):
    """What a robot sees and feels at one moment."""

    time_ns: int
    state: np.ndarray
    """float32[ds]"""
    images: dict[str, Frame]
    """by camera name; each frame has its own, earlier time"""
    task: str
    """the instruction, as a person would say it"""


class Latent(msgspec.Struct, frozen=True, eq=False):
    """What the slow pathway left for the fast one."""

    data: np.ndarray
    """float32[...]; its shape belongs to the policy"""
    observed_ns: int
    """when what it saw was captured"""
    version: int


class ActionChunk(msgspec.Struct, frozen=True, eq=False):
    """H actions in a row, made from one observation."""

    actions: np.ndarray
    """float32[H, da]"""
    first_tick: int
    """the control tick that `actions[0]` is meant for"""
    step_ns: int
    version: int
    observed_ns: int
    latent_observed_ns: int
    seed: int = 0
    """of the noise it began with: the same weights, observation, latent, prefix and seed make it again; 0: unknown"""
    log_prob: float = math.nan
    """of `trace`, given where it began; nan, as of what follows: the policy does not say"""
    outlook: float = math.nan
    """how likely the policy succeeds from here by itself"""
    trace: FlowTrace | None = None
    """of a policy that explores"""


class Prefix(msgspec.Struct, frozen=True, eq=False):
    """What is already decided of a chunk before it is made."""

    actions: np.ndarray
    """float32[n, da], n <= H: for the first n ticks of the chunk"""
    committed: int
    """the first so many will have been executed before the chunk can arrive; the rest is only leaned on"""
    guided: bool = False
    """steer a policy that was not trained with prefixes towards it (real-time chunking, arXiv 2506.07339); otherwise
    the policy reads the committed actions as input, as it was trained to (arXiv 2512.05964)"""


class ResidualPolicy(msgspec.Struct, frozen=True, eq=False):
    """A small network that corrects single actions; `policies.common.residual_policy` runs it without torch."""

    weights: tuple[np.ndarray, ...]
    """float32[out, in] of each layer"""
    biases: tuple[np.ndarray, ...]
    """float32[out] of each layer"""
    mean: np.ndarray
    """float32[ds] of the state"""
    std: np.ndarray
    """float32[ds]"""
    version: int


class PolicyCapabilities(msgspec.Struct, frozen=True):
    """What a checkpoint was trained for."""

    trained_max_delay: int = 0
    """largest age of what the slow path saw, in ticks, that training simulated"""
    state_aligned: bool = False
    """whether `act` may be given the state rolled forward to the chunk's first tick"""
    prefix_trained: bool = False
    """whether training conditioned on actions already committed"""
    residual_trained: bool = False
    """whether it brings a `ResidualPolicy`"""


class Step(msgspec.Struct, frozen=True, eq=False):
    """One control tick as it happened."""

    tick: int
    """0 at the start of the episode"""
    time_ns: int
    state: np.ndarray
    """float32[ds], before the action"""
    proposed: np.ndarray
    """float32[da]; what the one in control asked for"""
    executed: np.ndarray
    """float32[da]; what the robot did, after limits"""
    actor: Actor
    frames: dict[str, int]
    """time_ns of the newest frame seen, by camera name"""
    chunk_tick: int
    """first tick of the chunk the policy's action came from, -1 when none"""
    delay_ticks: int
    """measured: ticks from the chunk's observation until it could be used, -1 when none"""
    version: int
    """policy version that acted or was ready to act, 0 when none"""
    reward: float
    terminated: bool = False
    truncated: bool = False
    recovery: bool = False
    """a person brings it back to where the policy has been before, to correct it from there"""


class Episode(msgspec.Struct, frozen=True):
    """An ordered run of steps of one robot on one task."""

    id: str
    robot: str
    spec_hash: str
    task: str
    seed: int
    source: str  # an `EpisodeSource`
    started_ns: int


class PolicyVersion(msgspec.Struct, frozen=True):
    """One published set of weights."""

    number: int
    """grows by one; 0 means none"""
    sha256: str
    size_bytes: int
    parent: int
    gradient_steps: int
    human_steps: int
    """imitated steps in the buffer when it was made"""
    newest_segment: int
    """ledger row of the newest segment that could have trained it"""
    created_ns: int = 0


class Lease(msgspec.Struct, frozen=True):
    """Who holds a robot, for what, until when."""

    robot: str
    holder: str
    purpose: str
    priority: int
    expires_ns: int
    number: int = 0
    """grows with every lease of the fleet: what holds an older one of the same robot is out of date"""
    ttl_ns: int = 0
    """a heartbeat moves the end so far into the future"""
    stops: dict[str, str] = {}  # of an emergency stop, as it is kept: who gave those not shown yet, by id
