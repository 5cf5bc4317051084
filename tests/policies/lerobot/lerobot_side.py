"""What lerobot's own loop does with an observation, to compare with."""

from __future__ import annotations

import torch

PICTURE, STATE = "observation.images.front", "observation.state"


def as_lerobot(observation) -> dict:
    """What lerobot's own loop hands to a preprocessor."""
    image = torch.from_numpy(observation.images["front"].image).permute(2, 0, 1).float() / 255
    return {PICTURE: image, STATE: torch.from_numpy(observation.state), "task": observation.task}
