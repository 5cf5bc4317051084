"""Observations and training batches of the fleet as batches by lerobot's names, before its preprocessor.

And what a policy with n_obs_steps > 1 remembers on the robot: states and latents of the ticks before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from policies.common.batches import hold_masked, read_steps, require_shape, to_tensor
from policies.interface.policy import Batch
from policies.lerobot.partitions.partition import ACTION, PAD, STATE, Tensors
from wire.types import Observation, RobotSpec

_LONGEST_GAP_NS = 1_000_000_000
"""between two observations of one motion; after a longer one the memory begins anew"""
_KEPT = 64
"""moments that are remembered"""


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

    def observation_batch(self, observation: Observation) -> Tensors:
        """Pictures float32[1, 3, h, w] in [0, 1], `observation.state` [1, ds] and the instruction."""
        images = {name: observation.images[camera].image[None] for name, camera in self.pictures.items()}
        return {name: self._picture(name, image) for name, image in images.items()} | self.state_batch(observation)

    def state_batch(self, observation: Observation) -> Tensors:
        """`observation.state` float32[1, ds] and the instruction."""
        return {STATE: to_tensor(observation.state, self.device)[None].float(), "task": [observation.task]}

    def training_batch(self, batch: Batch) -> Tensors:
        """A batch for lerobot's `forward`.

        `batch` is one of `cloud_learner.buffer.loading.windows`, flat or with k steps behind each image: pictures are
        then repeated k times. `observation.state` [B, ds] and pictures [B, 3, h, w], with n_obs_steps > 1
        [B, n_obs_steps, ...], oldest first: from `past_state` and `past_images`, copies of the newest without them.
        `action` [B, H, da], `action_is_pad` bool[B, H]; masked actions are filled with the nearest one that is kept, as
        lerobot pads episodes. Raises `InvalidDataError` that names what does not fit.
        """
        h, ds, da = self.horizon, self.spec.state_dim, self.spec.action_dim
        shapes: dict[str, tuple[int, ...]] = {"state": (ds,), "actions": (h, da), "mask": (h,)}
        if self.past and "past_state" in batch:
            shapes["past_state"] = (self.past, ds)
        read = read_steps(batch, self.spec, shapes, self.pictures.values(), self.device)
        b, k = read.arrays["state"].shape[:2]
        steps = {name: array.flatten(0, 1) for name, array in read.arrays.items()}
        kept, before = steps["mask"], steps.get("past_state")
        made: Tensors = {
            STATE: self._with_past(steps["state"].float(), None if before is None else before.float()),
            ACTION: hold_masked(steps["actions"].float(), kept),
            PAD: ~kept,
            "task": [text for text in read.instructions for _ in range(k)],
        }
        for name, camera in self.pictures.items():
            newest, earlier = read.images[camera], batch.get("past_images", {}).get(camera) if self.past else None
            if earlier is not None:
                shape = (b, self.past, *newest.shape[1:])
                earlier = require_shape(to_tensor(earlier, self.device), f"past image of '{camera}'", shape)
                earlier = self._picture(name, earlier.flatten(0, 1)).unflatten(0, (b, self.past))
            picture = self._with_past(self._picture(name, newest), earlier)
            made[name] = picture.repeat_interleave(k, 0) if k > 1 else picture
        return made

    def _with_past(self, newest: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
        """[B, ...], with history [B, n_obs_steps, ...]; without an `earlier` [B, past, ...] copies of the newest."""
        if not self.past:
            return newest
        if earlier is None:
            return newest[:, None].expand(-1, self.past + 1, *newest.shape[1:])
        return torch.cat([earlier, newest[:, None]], 1)

    def _picture(self, name: str, images: Any) -> torch.Tensor:
        """uint8[b, h, w, 3] to float32[b, 3, h, w] in [0, 1], of the size the policy wants."""
        # as contiguous as lerobot's own pictures are: a convolution's last bits depend on it
        picture = to_tensor(images, self.device).permute(0, 3, 1, 2).contiguous().float() / 255
        if name not in self.sizes:
            return picture
        wanted = self.sizes[name]
        if wanted[0] <= picture.shape[-2] and wanted[1] <= picture.shape[-1]:
            return nn.functional.interpolate(picture, wanted, mode="area")
        return nn.functional.interpolate(picture, wanted, mode="bilinear", align_corners=False, antialias=True)


class ObservationHistory:
    """Vectors by time, asked for at regular ticks before the newest.

    A robot asks for chunks at its own pace, so the ticks that lerobot was trained on were mostly not seen. Numbers are
    interpolated between the two moments around a tick, features taken from the nearer one. Before the first moment
    there is only that. The memory begins anew when time goes back or a second is missing, or with another instruction.
    """

    def __init__(self, steps: int, period_ns: int) -> None:
        self._steps, self._period_ns = steps, period_ns
        self._seen: deque[tuple[int, list[torch.Tensor]]] = deque(maxlen=_KEPT)
        self._task = ""

    def clear(self) -> None:
        """Forget all, because what was remembered was made by other weights."""
        self._seen.clear()

    def add(self, time_ns: int, task: str, values: list[torch.Tensor]) -> None:
        """`values` [1, ...] of the moment `time_ns`, instead of any of the same moment."""
        if self._seen:
            gap = time_ns - self._seen[-1][0]
            if gap == 0 and task == self._task:
                self._seen.pop()
            elif not 0 < gap <= _LONGEST_GAP_NS or task != self._task:
                self._seen.clear()
        self._task = task
        self._seen.append((time_ns, values))

    def nearest(self) -> list[torch.Tensor]:
        """Each value as [1, steps, ...], oldest first: at every tick that of the nearest moment."""
        chosen = []
        for wanted in self._ticks():
            chosen.append(min(reversed(self._seen), key=lambda moment: abs(moment[0] - wanted))[1])
        return [torch.stack(values, 1) for values in zip(*chosen, strict=True)]

    def interpolated(self) -> list[torch.Tensor]:
        """Each value as [1, steps, ...], oldest first, linear in time between the moments."""
        times = np.array([time for time, _ in self._seen], np.int64)
        chosen = []
        for wanted in self._ticks():
            after = int(np.searchsorted(times, wanted))
            before = max(after - 1, 0)
            if after == before or times[after] == wanted:
                chosen.append(self._seen[after][1])
                continue
            share = float((wanted - times[before]) / (times[after] - times[before]))
            pairs = zip(self._seen[before][1], self._seen[after][1], strict=True)
            chosen.append([torch.lerp(a, b, share) for a, b in pairs])
        return [torch.stack(values, 1) for values in zip(*chosen, strict=True)]

    def _ticks(self) -> list[int]:
        newest = self._seen[-1][0]
        return [newest - ago * self._period_ns for ago in range(self._steps - 1, -1, -1)]
