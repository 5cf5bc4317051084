"""What decides the flow policy's network, and the slow path that the token policy has as well."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from policies.common.runtime import Runtime
from policies.interface.policy import Batch
from policies.interface.registry import require_ranges
from policies.interface.trainable import FinetuneConfig
from wire.errors import ConfigError, suggest
from wire.types import PolicyCapabilities, RobotSpec

Positive: TypeAlias = Annotated[int, Meta(ge=1)]
NotNegative: TypeAlias = Annotated[int, Meta(ge=0)]


class CameraEncoderConfig(msgspec.Struct, frozen=True):
    """The camera an encoder looks through."""

    name: str
    height: int
    width: int


def camera_encoders(spec: RobotSpec, names: tuple[str, ...] | None, what: str) -> tuple[CameraEncoderConfig, ...]:
    """Encoders of the named cameras of a robot, None: of all. Raises `ConfigError` for one that is not there."""
    there = {camera.name: camera for camera in spec.cameras}
    names = tuple(there) if names is None else names
    if missing := [name for name in names if name not in there]:
        raise ConfigError(
            f"{what}: robot '{spec.embodiment}' has no camera {missing}; it has {list(there)}."
            f"{suggest(missing[0], there)}"
        )
    return tuple(CameraEncoderConfig(name, there[name].height, there[name].width) for name in names)


class Conv(msgspec.Struct, frozen=True):
    """One convolution, padded so that the stride alone shrinks the image."""

    channels: int
    kernel: int
    stride: int


class Transformer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A flow-matching transformer as the fast path: one token per action."""

    width: Positive = 96
    layers: Positive = 3
    heads: Positive = 4
    ratio: Positive = 4
    """hidden units of each block's feed-forward part, in widths"""


class AttentionPoolerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How what the slow path sees becomes latent tokens: learned queries pool it by attention."""

    queries: Positive = 8
    """n, latent tokens"""
    width: Positive = 64
    """numbers of each: the latent has queries * width"""
    inner: Positive = 64
    """width of the tokens that are pooled"""
    heads: Positive = 4
    layers: NotNegative = 0
    """self-attention layers over the pictures' cells and the words before they are pooled; not for a backbone, which
    has its own"""


class Vlm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pretrained vision-language backbone as the slow path; `policies.flow.networks.backbone.describe` reads it off a
    directory. Where that lies is said where the policy is made, since it differs from machine to machine."""

    fingerprint: str
    """sha256 of what is in the directory beside the weights"""
    layers: Positive
    """of its text model, counted from the words; the others are left out"""
    words: Positive = 48
    """tokens of an instruction; longer ones are cut"""
    train: bool = False
    """whether its weights learn, and then travel, too"""


class NetworkOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `--policy-config` can say of every policy with such a network."""

    horizon: int = 16
    """H, actions per chunk"""
    cameras: tuple[str, ...] | None = None
    """names of those that are looked through; None: all of the robot's"""
    max_offset: int = 0
    """ticks: the largest delay that training simulates"""
    online_statistics: bool = False
    """the state's statistics go on learning"""
    runtime: Runtime = Runtime()
    training: FinetuneConfig = FinetuneConfig()


class SlowPathConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every network with a slow path from images and words to a latent has. It travels with the weights."""

    state_dim: int
    action_dim: int
    horizon: Positive = 16
    """H"""
    cameras: tuple[CameraEncoderConfig, ...] = ()
    """empty: the slow path reads only the instruction"""
    stem: tuple[Conv, ...] = (Conv(32, 5, 2), Conv(48, 3, 2), Conv(48, 3, 1))
    """convolutions of each camera's encoder"""
    points: int = 32
    """feature points per camera; each gives an x and a y to the latent"""
    vocabulary: Annotated[int, Meta(ge=2)] = 256
    """word ids, with the padding id"""
    words: Positive = 16
    """L, words read of an instruction"""
    word_width: int = 32
    max_offset: NotNegative = 0
    """ticks: the largest delay that training simulates; above 0 the fast path reads the age of what the slow one saw"""
    online_statistics: bool = False
    """the state's statistics go on learning while the network trains"""

    def require_robot(self, spec: RobotSpec) -> None:
        """Raise `ConfigError` if this cannot be the network of the robot `spec`, or of any."""
        for name, mine, theirs in (
            ("state_dim", self.state_dim, spec.state_dim),
            ("action_dim", self.action_dim, spec.action_dim),
        ):
            if mine != theirs:
                raise ConfigError(f"flow policy: {name} {mine}, but robot '{spec.embodiment}' has {theirs}.")
        there = {camera.name: (camera.height, camera.width) for camera in spec.cameras}
        for camera in self.cameras:
            if there.get(camera.name) != (camera.height, camera.width):
                raise ConfigError(
                    f"flow policy: camera '{camera.name}' at {camera.height}x{camera.width}, but robot "
                    f"'{spec.embodiment}' has {there or 'no camera'}."
                )
        self.require()

    def require(self) -> None:
        """Raise `ConfigError` for values that cannot work, whatever the robot."""
        require_ranges(self, "flow policy")

    def batch_shapes(self, batch: Batch) -> dict[str, tuple[int, ...]]:
        """The arrays that are read of a training batch, by name, and their shapes behind the axes b and k."""
        h = self.horizon
        shapes = {"state": (self.state_dim,), "actions": (h, self.action_dim), "mask": (h,)}
        return shapes | ({"frame_age": ()} if self.max_offset else {})

    @property
    def trained(self) -> PolicyCapabilities:
        """What weights of this network are trained for."""
        return PolicyCapabilities(self.max_offset, self.max_offset > 0)


class FlowConfig(SlowPathConfig, frozen=True, kw_only=True):
    """Everything that decides the flow network's shape and how it is sampled."""

    width: int = 256
    """hidden units of the fast path"""
    layers: Positive = 3
    """hidden layers of the fast path"""
    frequencies: int = 8
    """sines and cosines of the flow time"""
    ahead: tuple[int, ...] = ()
    """ticks at which an auxiliary head predicts the state, while it trains; see `FlowNetwork.loss`"""
    ahead_weight: float = 0.3
    """its share in the loss"""
    predict: Literal["velocity", "action"] = "velocity"
    """what the fast path's output means; see `FlowNetwork.loss`"""
    euler_steps: Positive = 5
    """integration steps from noise to actions"""
    ego_motion: bool = False
    """the latent brings the state the robot was in when the pictures were looked at, so that the fast path knows how it
    has moved since; needs `max_offset`, and no transformer"""
    prefix: bool = False
    """train with actions that are already committed; see `FlowNetwork.loss`"""
    prefix_swap: Annotated[float, Meta(ge=0, le=1)] = 0.3
    """share of the committed prefixes that are taken from another sample: without them the network learns to go on as
    the prefix did, whatever the state says. On a toy with a goal seen badly, 4 of 12 actions committed: mean error 0.47
    with it, 0.55 without, 0.43 without any prefix; the jump behind a prefix that was right 0.09, 0.02 and 0.65"""
    residual: bool = False
    """train a small network that corrects single actions on the robot; see `policies.flow.networks.residual`"""
    residual_width: Positive = 64
    """its hidden units"""
    transformer: Transformer | None = None
    """None: the fast path is the small network that `width` and `layers` describe"""
    pooler: AttentionPoolerConfig | None = None
    """None: the latent is feature points and the mean of the words; `transformer` and `vlm` need latent tokens"""
    vlm: Vlm | None = None
    """None: the slow path is convolutions, learned from nothing"""
    advantage: bool = False
    """the fast path is told whether what it imitates was good; see `FlowNetwork.loss`"""
    editor: Positive | None = None
    """hidden units of a small network that edits each chunk as a critic taught it; see `policies.flow.networks.editor`.
    None: there is none"""
    editor_noise: Annotated[float, Meta(ge=0)] = 0.0
    """of what it says while a robot explores, before it is bounded: the standard deviation"""
    outlook: Positive | None = None
    """hidden units of the networks that foretell whether the policy will succeed; see `policies.flow.networks.outlook`.
    None: there are none"""
    explore: Literal["sde", "noise"] | None = None
    """which steps from noise to actions are random, so that chunks have a probability and can be learned from by policy
    gradients; see `policies.flow.networks.exploration`. None: none is"""
    explore_noise: Annotated[float, Meta(gt=0)] = 0.5
    """a of `sde`: how random that step is"""
    guidance: Annotated[float, Meta(ge=0)] = 1.0
    """how far sampling goes from "not known whether good" to "good", and beyond it above 1; needs `advantage`"""

    def require(self) -> None:
        """Raise `ConfigError` for values that cannot work, whatever the robot."""
        super().require()
        if self.cameras and not self.stem and self.vlm is None:
            raise ConfigError("flow policy: a policy with cameras needs at least one convolution in `stem`.")
        if self.ego_motion and (self.max_offset < 1 or self.transformer):
            raise ConfigError(
                "flow policy: ego_motion needs max_offset 1 or more, else nothing moves, and the small fast path: "
                "`transformer` must be None."
            )
        if self.prefix and (self.max_offset < 1 or self.horizon < 2):
            raise ConfigError(
                f"flow policy: prefix needs max_offset 1 or more and horizon 2 or more, not {self.max_offset} and "
                f"{self.horizon}: up to max_offset actions are committed and at least one must be left."
            )
        if self.explore and self.guidance != 1:
            raise ConfigError(
                f"flow policy: explore goes without guidance, and this is {self.guidance}: nobody knows how probable "
                "the chunks are that it gives."
            )
        if self.guidance != 1 and not self.advantage:
            raise ConfigError(f"flow policy: guidance {self.guidance} needs `advantage`; 1 is none.")
        if (self.transformer or self.vlm) and not self.pooler:
            raise ConfigError("flow policy: `transformer` and `vlm` need `pooler`, which makes the latent tokens.")
        fast, pooler = self.transformer, self.pooler
        if fast and fast.width % fast.heads:
            raise ConfigError(f"flow policy: a transformer's heads divide its width: {fast}.")
        if pooler and pooler.inner % pooler.heads:
            raise ConfigError(f"flow policy: a pooler's heads divide `inner`: {pooler}.")
        if self.vlm and not self.cameras:
            raise ConfigError(
                "flow policy: a vision-language backbone needs at least one camera; without `cameras` use no `vlm`."
            )

    def batch_shapes(self, batch: Batch) -> dict[str, tuple[int, ...]]:
        """See `SlowPathConfig`; some are read if they are there."""
        shapes = super().batch_shapes(batch)
        if self.ego_motion:
            shapes["seen_state"] = (self.state_dim,)
        if self.ahead:
            shapes["ahead"] = (len(self.ahead), self.state_dim)
        if self.residual and "later_state" in batch:
            shapes |= {"later_state": (self.state_dim,), "later_index": ()}
        if self.advantage and "advantage" in batch:
            shapes["advantage"] = ()
        return shapes

    @property
    def trained(self) -> PolicyCapabilities:
        """What weights of this network are trained for."""
        return PolicyCapabilities(self.max_offset, self.max_offset > 0, self.prefix, self.residual)
