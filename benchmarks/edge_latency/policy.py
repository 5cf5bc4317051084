"""The tiny SmolVLA behind this project's own `LeRobotPolicy`, for `benchmarks.edge_latency`.

Nothing is added but the marks (`vla.mark`): what the picture showed of the lamp travels behind the latent.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from benchmarks.edge_latency.arm import LAMP_PX, LIT, MARKS, arm_spec
from benchmarks.edge_latency.vla import offline
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities, Prefix, ResidualPolicy

_SIGN_BYTES = 1
"""behind the latent's own bytes: 1 for a lit lamp, else 0"""


class EdgeVla:
    """Keeps the `Policy` protocol."""

    def __init__(self, place: Path) -> None:
        """`place`: where `vla.build` wrote."""
        offline()
        from policies.lerobot.factory import make

        self.spec = arm_spec()
        self.policy = make(str(place / "policy"), {}, self.spec, 0)
        self.horizon = self.policy.horizon
        self.version = 0

    @property
    def trained(self) -> PolicyCapabilities:
        return self.policy.trained

    @property
    def corrector(self) -> ResidualPolicy | None:
        return None

    def load(self, weights: bytes, version: int) -> None:
        """Raises as `LeRobotPolicy.load` does."""
        self.policy.load(weights, version)
        self.version = version

    def think(self, observation: Observation) -> Latent:
        """The policy's latent and, behind it, whether the lamp is on."""
        latent = self.policy.think(observation)
        lamp = observation.images[LIT].image[:LAMP_PX, :LAMP_PX]
        return msgspec.structs.replace(latent, data=np.append(latent.data, np.uint8(lamp.mean() > 127.5)))

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        """float32[H, 8] on the state of now and the newest latent."""
        own = msgspec.structs.replace(latent, data=latent.data[:-_SIGN_BYTES])
        chunk = self.policy.act(observation, own, tick, prefix)
        chunk.actions[:, -len(MARKS) :] = 1.0 if observation.state[-1] > 0 else -1.0, 1.0 if latent.data[-1] else -1.0
        return chunk
