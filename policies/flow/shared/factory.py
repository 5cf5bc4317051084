"""`shared:SIZE` for `policies.interface.registry`: one network for robots of several shapes.

Its configuration must be the same on every robot, so nothing of it follows from the robot: cameras are said by name.
Nothing here imports torch before a policy is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from policies.common.runtime import Runtime
from policies.flow.config import CameraEncoderConfig, Conv
from policies.flow.shared.config import SharedConfig
from policies.interface.registry import PolicyDefaults, read_options
from policies.interface.trainable import FinetuneConfig
from wire.errors import ConfigError, suggest
from wire.types import RobotSpec

if TYPE_CHECKING:
    from policies.flow.shared.policy import SharedFlowPolicy

_SIZES: dict[str, dict[str, Any]] = {
    "state": {},
    # as `policies.flow.factory.pixels_network`, which says why
    "pixels": {"stem": (Conv(32, 4, 4), Conv(64, 3, 2)), "predict": "action", "ahead": (16, 32, 48), "euler_steps": 4},
}
SIZES = tuple(_SIZES)


class SharedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `--policy-config` can say. What is left out is the size's own."""

    capacity: int | None = None
    """robots of so many shapes"""
    state_dim: int | None = None
    """columns of the state"""
    action_dim: int | None = None
    """columns of the action"""
    cameras: tuple[CameraEncoderConfig, ...] = ()
    """that are looked through, by name, and to which size their pictures are brought; a robot may have some of them"""
    horizon: int | None = None
    """H, actions per chunk"""
    width: int | None = None
    """hidden units of the fast path"""
    layers: int | None = None
    max_offset: int | None = None
    """ticks: the largest delay that training simulates"""
    prefix: bool | None = None
    """train with actions that are already committed"""
    predict: Literal["velocity", "action"] | None = None
    """what the fast path answers"""
    euler_steps: int | None = None
    runtime: Runtime = Runtime()
    training: FinetuneConfig = FinetuneConfig()


def make(size: str, config: dict[str, Any], spec: RobotSpec, seed: int) -> SharedFlowPolicy:
    """The policy of this size. Raises `ConfigError` for what it cannot be."""
    from policies.flow.shared.policy import SharedFlowPolicy

    options = _read(config)
    return SharedFlowPolicy(spec, network(size, options), seed, options.runtime, options.training)


def defaults(size: str, config: dict[str, Any], spec: RobotSpec) -> PolicyDefaults:
    """What the size is trained with. Raises `ConfigError` for what cannot be."""
    found = network(size, _read(config))
    found.require_robot(spec)
    return PolicyDefaults(horizon=found.horizon)


def absolute(size: str) -> str:
    """A size means the same everywhere, whatever lies in the working directory."""
    return size


def network(size: str, options: SharedOptions = SharedOptions()) -> SharedConfig:  # noqa: B008  frozen
    """The network of one size. Raises `ConfigError` for a size that is not there."""
    if size not in _SIZES:
        raise ConfigError(
            f"shared flow policy: no size '{size}'.{suggest(size, SIZES)} Say shared:SIZE, with one of "
            f"{', '.join(SIZES)}."
        )
    if size == "pixels" and not options.cameras:
        raise ConfigError(
            'shared flow policy: size pixels needs its cameras: --policy-config \'{"cameras": [{"name": "front", '
            '"height": 64, "width": 64}]}\', with the names that its robots give them.'
        )
    said = {
        name: getattr(options, name) for name in SharedOptions.__struct_fields__ if name not in ("runtime", "training")
    }
    told = _SIZES[size] | {name: value for name, value in said.items() if value is not None}
    if size == "pixels":
        told["ego_motion"] = told.get("max_offset", 0) > 0
    found = SharedConfig(**told)
    found.require()
    return found


def _read(config: dict[str, Any]) -> SharedOptions:
    return read_options(config, SharedOptions, "shared flow policy: its configuration does not fit")
