"""Between one robot's own numbers and the columns of a shared network."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from policies.common.batches import to_tensor
from policies.common.embodiments import EmbodimentTable
from policies.flow.shared.config import SharedConfig
from policies.flow.shared.network import SharedFlowNetwork


class RobotColumns:
    """Of the robot in row `row` of the table. Shapes: ds and da its own dimensions, S and A columns."""

    def __init__(self, table: EmbodimentTable, row: int, config: SharedConfig, device: torch.device) -> None:
        placed = table.rows[row]
        self.spec = spec = placed.spec
        self.row = torch.tensor(row, device=device)
        """int64[]"""
        there = {camera.name for camera in spec.cameras}
        self.slots = tuple(config.cameras)
        self.cameras = [camera.name for camera in config.cameras if camera.name in there]
        """those of the robot that the network looks through"""
        self.state = torch.tensor(placed.state, dtype=torch.long, device=device)
        self.action = torch.tensor(placed.action, dtype=torch.long, device=device)
        self.state_dims = torch.zeros(config.state_dim, dtype=torch.bool, device=device)
        self.action_dims = torch.zeros(config.action_dim, dtype=torch.bool, device=device)
        self.state_dims[self.state], self.action_dims[self.action] = True, True
        low, high = spec.action_low(), spec.action_high()
        self._middle, self._half = (to_tensor(x / 2, device) for x in (high + low, high - low))

    def states(self, state: torch.Tensor, network: SharedFlowNetwork) -> torch.Tensor:
        """[..., ds] -> [..., S], normalised by the robot's statistics, 0 in columns that are not its."""
        mean, std = network.mean[self.row][self.state], network.std[self.row][self.state]
        return _spread((state - mean) / std, self.state, self.state_dims)

    def actions(self, actions: torch.Tensor) -> torch.Tensor:
        """[..., da] -> [..., A], normalised to [-1, 1], 0 in columns that are not its."""
        return _spread((actions - self._middle) / self._half, self.action, self.action_dims)

    def own_actions(self, actions: torch.Tensor) -> torch.Tensor:
        """[..., A] -> [..., da] in the robot's units."""
        return actions[..., self.action] * self._half + self._middle

    def pictures(self, images: dict[str, torch.Tensor], count: int) -> list[torch.Tensor]:
        """uint8[b, h, w, 3] by camera -> the same by slot, in its size; of no rows where the robot has no such
        camera."""
        device = self.row.device
        nothing = torch.zeros(count, 0, 0, 3, dtype=torch.uint8, device=device)
        return [
            _resized(images[slot.name], slot.height, slot.width) if slot.name in images else nothing
            for slot in self.slots
        ]


def _spread(values: torch.Tensor, columns: torch.Tensor, dims: torch.Tensor) -> torch.Tensor:
    found = values.new_zeros(*values.shape[:-1], len(dims))
    found[..., columns] = values
    return found


def _resized(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    if images.shape[1:3] == (height, width):
        return images
    pixels = F.interpolate(images.permute(0, 3, 1, 2).float(), (height, width), mode="bilinear", antialias=True)
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
