"""What must agree before a network of `FlowConfig` is used: with the robot, and with a file of weights."""

from __future__ import annotations

import msgspec

from policies.common.weights import Header
from policies.flow.config import FlowConfig
from wire.errors import ConfigError, WeightsError
from wire.types import PolicyCapabilities, RobotSpec

NETWORK = "flow"
"""`Header.network` of this policy's files"""


def read_config(header: Header, what: str) -> FlowConfig:
    """The network that made a file. Raises `WeightsError` if that is no flow policy or cannot be read."""
    if header.network != NETWORK:
        raise WeightsError(f"{what}: made by a '{header.network}' network, this policy is '{NETWORK}'.")
    try:
        return msgspec.convert(header.config, FlowConfig)
    except msgspec.ValidationError as error:
        raise WeightsError(f"{what}: the network configuration cannot be read: {error}.") from error


def require_same(mine: FlowConfig, trained: PolicyCapabilities, header: Header, what: str) -> None:
    """Raise `WeightsError` naming the first field in which the file's network differs from `mine`, or `trained`."""
    theirs = read_config(header, what)
    for field in FlowConfig.__struct_fields__:
        if getattr(mine, field) != getattr(theirs, field):
            raise WeightsError(
                f"{what}: made by a network with {field} {getattr(theirs, field)}, this policy has "
                f"{getattr(mine, field)}. Train and run with the same network configuration."
            )
    if header.trained != trained:
        raise WeightsError(
            f"{what}: its metadata says {header.trained}, its network configuration {trained}; "
            "the file was changed after it was saved. Export it again with `save()`."
        )


def require_fit(spec: RobotSpec, config: FlowConfig) -> None:
    """Raise `ConfigError` if a network of `config` cannot be that of this robot, or of any."""
    for name, mine, theirs in (
        ("state_dim", config.state_dim, spec.state_dim),
        ("action_dim", config.action_dim, spec.action_dim),
    ):
        if mine != theirs:
            raise ConfigError(f"flow policy: {name} {mine}, but robot '{spec.embodiment}' has {theirs}.")
    cameras = {camera.name: (camera.height, camera.width) for camera in spec.cameras}
    for camera in config.cameras:
        if cameras.get(camera.name) != (camera.height, camera.width):
            raise ConfigError(
                f"flow policy: camera '{camera.name}' at {camera.height}x{camera.width}, but robot '{spec.embodiment}' "
                f"has {cameras or 'no camera'}."
            )
    config.require()
