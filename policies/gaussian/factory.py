"""`gaussian:state` and `gaussian:pixels` for `policies.interface.registry`. Imports no torch before one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from policies.flow.config import NetworkOptions
from policies.flow.factory import network
from policies.gaussian.config import GaussianConfig
from policies.interface.registry import PolicyDefaults, read_options
from wire.errors import ConfigError, suggest
from wire.types import RobotSpec

if TYPE_CHECKING:
    from policies.gaussian.policy import GaussianPolicy

SIZES = ("state", "pixels")


class GaussianOptions(NetworkOptions, frozen=True):
    """What `--policy-config` can say of a Gaussian policy; see `GaussianConfig`."""

    width: int = 256
    layers: int = 3


def absolute(size: str) -> str:
    """A size means the same everywhere, whatever lies in the working directory."""
    return size


def make(size: str, config: dict[str, Any], spec: RobotSpec, seed: int) -> GaussianPolicy:
    """The policy of this size. Raises `ConfigError` for what it cannot be."""
    from policies.gaussian.policy import GaussianPolicy

    options, found = _read(size, config, spec)
    return GaussianPolicy(spec, found, seed, options.runtime, options.training)


def defaults(size: str, config: dict[str, Any], spec: RobotSpec) -> PolicyDefaults:
    """What it needs of its job. Raises `ConfigError` as `make` does, without making it."""
    return PolicyDefaults(horizon=_read(size, config, spec)[1].horizon)


def _read(size: str, config: dict[str, Any], spec: RobotSpec) -> tuple[GaussianOptions, GaussianConfig]:
    """What is configured, and the network that it makes: what it sees by is as of `flow:SIZE`."""
    options = read_options(config, GaussianOptions, "gaussian policy: its configuration does not fit")
    if size not in SIZES:
        raise ConfigError(
            f"gaussian policy: no size '{size}'.{suggest(size, SIZES)} Say gaussian:SIZE, with one of "
            f"{', '.join(SIZES)}."
        )
    given = {name: getattr(options, name) for name in ("horizon", "max_offset", "online_statistics", "width", "layers")}
    like = network(size, spec, options.cameras, **given)
    shared = set(GaussianConfig.__struct_fields__) & set(type(like).__struct_fields__)
    found = GaussianConfig(**{name: getattr(like, name) for name in shared})
    found.require()
    return options, found
