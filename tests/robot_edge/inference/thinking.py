"""A policy that remembers what it was asked, for tests of whatever thinks and acts."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np

from tests import samples
from wire.errors import HalfLoadedError, PolicyError, WeightsError
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities, PolicyVersion, Prefix, ResidualPolicy


class Scripted:
    """Its latent holds the weights' first byte, the oldest frame's time and the frame's first pixel."""

    spec, horizon = samples.spec(), 4

    def __init__(self, think_s: float = 0.0, load_s: float = 0.0) -> None:
        self.version = 0
        self.weights = b""
        self.thoughts: list[int] = []
        self.acted: list[tuple[Observation, Latent, int, Prefix | None]] = []
        self.fail = ""
        self._think_s = think_s
        self._load_s = load_s

    @property
    def trained(self) -> PolicyCapabilities:
        return PolicyCapabilities(trained_max_delay=8)

    @property
    def corrector(self) -> ResidualPolicy | None:
        ones = np.ones(4, np.float32)
        return ResidualPolicy((), (), ones, ones, self.version)

    def think(self, observation: Observation) -> Latent:
        if self.fail == "think":
            raise PolicyError("it cannot think")
        time.sleep(self._think_s)
        frame = observation.images["front"]
        self.thoughts.append(frame.time_ns)
        data = np.array([self.weights[0], frame.time_ns, frame.image[0, 0, 0]], np.float32)
        # Policies stamp with the oldest frame they used: here one much older than the newest.
        return Latent(data, frame.time_ns - 50, self.version)

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        if self.fail == "act":
            raise PolicyError("it cannot")
        if latent.version != self.version or latent.data[0] != self.weights[0]:
            raise PolicyError(f"MIXED: latent of {latent.version} to {self.version}")
        self.acted.append((observation, latent, tick, prefix))
        return ActionChunk(np.zeros((4, 4), np.float32), tick, 1, self.version, 0, latent.observed_ns)

    def load(self, weights: bytes, version: int) -> None:
        time.sleep(self._load_s)
        if weights == b"bad":
            raise WeightsError("no weights")
        if weights == b"half":
            self.weights, self.version = b"HALF", 0
            raise HalfLoadedError("only a part of them was loaded")
        if weights == b"odd":
            self.weights = b"ODD"
            raise RuntimeError("who knows")
        self.weights, self.version = weights, version


def version(number: int, weights: bytes | Path = b"good") -> PolicyVersion:
    """`weights`, or the file that has them, as they arrived."""
    data = weights if isinstance(weights, bytes) else weights.read_bytes() if weights.exists() else b""
    return PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), 0, 0, 0, 0)


def seen(frame_ns: int, task: str = "reach", time_ns: int | None = None) -> Observation:
    """An observation whose newest frame is of `frame_ns`."""
    made = samples.observation(frame_ns + 10 if time_ns is None else time_ns, frame_ns)
    return Observation(made.time_ns, made.state, made.images, task)
