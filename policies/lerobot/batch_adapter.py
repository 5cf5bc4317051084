"""Observations and training batches of the fleet as batches by lerobot's names, before its preprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from policies.interface.policy import Batch
from policies.lerobot.partitions.partition import Tensors
from wire.errors import InvalidDataError
from wire.types import Observation, RobotSpec

STATE = "observation.state"
ACTION = "action"
PAD = "action_is_pad"


@dataclass(frozen=True)
class BatchAdapter:
    """Makes lerobot batches for one robot and one policy."""

    spec: RobotSpec
    horizon: int
    """H, actions of a window"""
    past: int
    """n_obs_steps - 1: steps before that the policy sees as well"""
    pictures: dict[str, str]
    """{feature: camera}"""
    sizes: dict[str, tuple[int, int]]
    """{feature: (height, width)} of those that are resized"""
    device: torch.device

    def seen(self, observation: Observation) -> Tensors:
        """Pictures float32[1, 3, h, w] in [0, 1], `observation.state` [1, ds] and the instruction."""
        images = {name: observation.images[camera].image[None] for name, camera in self.pictures.items()}
        return {name: self._picture(name, image) for name, image in images.items()} | self.felt(observation)

    def felt(self, observation: Observation) -> Tensors:
        """`observation.state` float32[1, ds] and the instruction."""
        return {STATE: self.tensor(observation.state)[None].float(), "task": [observation.task]}

    def training(self, batch: Batch) -> Tensors:
        """A batch for lerobot's `forward`.

        `batch` is one of `cloud_learner.buffer.loading.windows`, flat or with k steps behind each image: pictures are
        then repeated k times. `observation.state` [B, ds] and pictures [B, 3, h, w], with n_obs_steps > 1
        [B, n_obs_steps, ...], oldest first: from `past_state` and `past_images`, copies of the newest without them.
        `action` [B, H, da], `action_is_pad` bool[B, H]; masked actions are filled with the nearest one that is kept, as
        lerobot pads episodes. Raises `InvalidDataError` that names what does not fit.
        """
        h, ds, da = self.horizon, self.spec.state_dim, self.spec.action_dim
        state = self._array(batch, "state")
        lead = tuple(state.shape[:-1])
        b, k = lead[0], (lead[1] if len(lead) == 2 else 1)
        if len(lead) not in (1, 2):
            raise InvalidDataError(
                f"training batch: state has shape {list(state.shape)}, expected [b, {ds}] or [b, k, {ds}]."
            )
        _require(state, "state", (*lead, ds))
        actions, mask = self._array(batch, "actions"), self._array(batch, "mask")
        _require(actions, "actions", (*lead, h, da))
        _require(mask, "mask", (*lead, h))
        kept = mask.reshape(b * k, h).bool()
        if not kept.any():
            raise InvalidDataError("training batch: its mask keeps no action, so there is nothing to imitate.")
        words = batch.get("instructions", [])
        if len(words) != b:
            raise InvalidDataError(f"training batch: {len(words)} instructions for {b} images.")
        made: Tensors = {
            STATE: self._with_past(batch, state, lead, k),
            ACTION: _filled(actions.reshape(b * k, h, da).float(), kept),
            PAD: ~kept,
            "task": [text for text in words for _ in range(k)],
        }
        for name, camera in self.pictures.items():
            picture = self._pictures(batch, name, camera, b)
            made[name] = picture.repeat_interleave(k, 0) if k > 1 else picture
        return made

    def tensor(self, array: Any) -> torch.Tensor:
        """On the policy's device."""
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            array = array.copy()  # torch warns about memory it must not write, such as a received message
        return torch.as_tensor(array, device=self.device)

    def _with_past(self, batch: Batch, state: torch.Tensor, lead: tuple[int, ...], k: int) -> torch.Tensor:
        """float32[B, ds], with history [B, n_obs_steps, ds]"""
        newest = state.reshape(-1, state.shape[-1]).float()
        if not self.past:
            return newest
        if "past_state" not in batch:
            return newest[:, None].expand(-1, self.past + 1, -1)
        earlier = self._array(batch, "past_state")
        _require(earlier, "past_state", (*lead, self.past, state.shape[-1]))
        return torch.cat([earlier.reshape(-1, self.past, state.shape[-1]).float(), newest[:, None]], 1)

    def _pictures(self, batch: Batch, name: str, camera: str, b: int) -> torch.Tensor:
        """float32[b, 3, h, w], with history [b, n_obs_steps, 3, h, w]"""
        images = batch.get("images", {})
        if camera not in images:
            raise InvalidDataError(f"training batch: no images of camera '{camera}'; it has {sorted(images)}.")
        size = next((c.height, c.width, 3) for c in self.spec.cameras if c.name == camera)
        _require(images[camera], f"image of '{camera}'", (b, *size))
        newest = self._picture(name, images[camera])
        if not self.past:
            return newest
        before = batch.get("past_images", {}).get(camera)
        if before is None:
            return newest[:, None].expand(-1, self.past + 1, -1, -1, -1)
        _require(before, f"past image of '{camera}'", (b, self.past, *size))
        earlier = self._picture(name, before.reshape(b * self.past, *size))
        return torch.cat([earlier.unflatten(0, (b, self.past)), newest[:, None]], 1)

    def _picture(self, name: str, images: Any) -> torch.Tensor:
        """uint8[b, h, w, 3] to float32[b, 3, h, w] in [0, 1], of the size the policy wants."""
        # as contiguous as lerobot's own pictures are: a convolution's last bits depend on it
        picture = self.tensor(images).permute(0, 3, 1, 2).contiguous().float() / 255
        if name not in self.sizes:
            return picture
        wanted = self.sizes[name]
        if wanted[0] <= picture.shape[-2] and wanted[1] <= picture.shape[-1]:
            return nn.functional.interpolate(picture, wanted, mode="area")
        return nn.functional.interpolate(picture, wanted, mode="bilinear", align_corners=False, antialias=True)

    def _array(self, batch: Batch, name: str) -> torch.Tensor:
        if name not in batch:
            raise InvalidDataError(f"training batch: it lacks '{name}'; it has {sorted(batch)}.")
        return self.tensor(batch[name])


def _filled(actions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """[B, H, da] with each action that is not kept replaced by the last kept one before it, or the first after it."""
    order = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    before = torch.where(kept, order, -1).cummax(1).values
    first = kept.int().argmax(1, keepdim=True)
    chosen = torch.where(before >= 0, before, first)[..., None].expand_as(actions)
    filled = actions.gather(1, chosen)
    return torch.where(kept.any(1)[:, None, None], filled, torch.zeros_like(filled))


def _require(array: Any, name: str, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != shape:
        raise InvalidDataError(f"training batch: {name} has shape {list(array.shape)}, expected {list(shape)}.")
