"""What the flow policy reads of a training batch, checked.

Shapes: b images, k steps behind each image, ds state, H actions of da numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from policies.flow.config import FlowConfig, SlowPathConfig
from policies.interface.policy import Batch
from wire.errors import InvalidDataError
from wire.types import RobotSpec


class FlowSample(NamedTuple):
    """A training batch as tensors."""

    images: list[torch.Tensor]
    """uint8[b, h, w, 3] of each camera"""
    instructions: list[str]
    """b"""
    state: torch.Tensor
    """[b, k, ds]"""
    actions: torch.Tensor
    """[b, k, H, da]"""
    mask: torch.Tensor
    """bool[b, k, H]: actions that are kept"""
    ahead: torch.Tensor | None
    """[b, k, W, ds], states W ticks later"""
    age: torch.Tensor | None
    """[b, k, 1] ticks; None: 0"""
    later: tuple[torch.Tensor, torch.Tensor] | None
    """state [b, k, ds] some ticks into the window, and int64[b, k], how many"""
    advantage: torch.Tensor | None
    """int64[b, k]: 0 not known, 1 bad, 2 good"""
    seen_state: torch.Tensor | None
    """[b, ds] when the image was seen; None: that of the first step behind it"""


def read_batch(
    batch: Batch, config: SlowPathConfig, spec: RobotSpec, tensor: Callable[[Any], torch.Tensor]
) -> FlowSample:
    """The parts of `batch` that a network of `config` learns from, with the k axis; see `FlowPolicy.loss`.

    Raises `InvalidDataError` that names what does not fit.
    """
    require_spec(batch, spec)
    h, ds = config.horizon, spec.state_dim
    shapes, ego_motion = config.batch_shapes(batch), isinstance(config, FlowConfig) and config.ego_motion
    seen = ("seen_state",) if ego_motion else ()
    if missing := [name for name in (*shapes, *seen) if name not in batch]:
        raise InvalidDataError(f"training batch: it lacks {missing}; it has {sorted(batch)}.")
    flat = batch["state"].ndim == 2
    b, k = len(batch["state"]), 1 if flat else batch["state"].shape[1]
    tensors = {}
    for name, shape in shapes.items():
        found = tensor(batch[name])
        if flat:
            found = found[:, None]
        elif name in ("frame_age", "advantage") and tuple(found.shape) == (b,):
            found = found[:, None].expand(b, k)
        if tuple(found.shape) != (b, k, *shape):
            raise InvalidDataError(f"training batch: {name} has shape {list(found.shape)}, expected {[b, k, *shape]}.")
        tensors[name] = found
    seen_state = tensor(batch["seen_state"]) if ego_motion else None
    if seen_state is not None and tuple(seen_state.shape) != (b, ds):
        raise InvalidDataError(
            f"training batch: seen_state has shape {list(seen_state.shape)}, expected {[b, ds]}: one of each image."
        )
    images = []
    for camera in config.cameras:
        image, expected = _image(batch, camera.name), (b, camera.height, camera.width, 3)
        if tuple(image.shape) != expected:
            raise InvalidDataError(
                f"training batch: image of '{camera.name}' has shape {list(image.shape)}, expected {list(expected)}."
            )
        images.append(image)
    if len(batch["instructions"]) != b:
        raise InvalidDataError(f"training batch: {len(batch['instructions'])} instructions for {b} images.")
    kept = tensors["mask"].bool()
    if not kept.any():
        raise InvalidDataError("training batch: its mask keeps no action, so there is nothing to imitate.")
    age, later, advantage = tensors.get("frame_age"), None, None
    if "later_state" in tensors:
        later = tensors["later_state"], _whole(tensors, "later_index", h)
    if "advantage" in tensors:
        advantage = _whole(tensors, "advantage", 3)
    return FlowSample(
        [tensor(image) for image in images],
        batch["instructions"],
        tensors["state"],
        tensors["actions"],
        kept,
        tensors.get("ahead"),
        None if age is None else age.float()[..., None],
        later,
        advantage,
        seen_state,
    )


def require_spec(batch: Batch, spec: RobotSpec) -> None:
    """Raise `InvalidDataError` if a batch that says what robot it is from was recorded with another one."""
    if "spec_hash" not in batch:
        return
    given = batch["spec_hash"]
    hashes = {given} if isinstance(given, str) else {str(one) for one in given}
    if others := sorted(hashes - {spec.hash}):
        raise InvalidDataError(
            f"training batch: spec_hash {', '.join(others[:3])}, but this policy is for robot '{spec.embodiment}' with "
            f"{spec.hash}; train it on what was recorded with that robot."
        )


def _whole(tensors: dict[str, torch.Tensor], name: str, count: int) -> torch.Tensor:
    """int64: whole numbers from 0 to count - 1."""
    index = tensors[name].long()
    if not bool(((index >= 0) & (index < count)).all()):
        raise InvalidDataError(f"training batch: {name} must be in 0..{count - 1}.")
    return index


def _image(batch: Batch, camera: str) -> Any:
    images = batch.get("images", {})
    if camera not in images:
        raise InvalidDataError(f"training batch: no images of camera '{camera}'; it has {sorted(images)}.")
    return images[camera]
