"""Which policies are measured where."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.policies.models import CHUNK, THREE_B, TINY, arm, blind, write_checkpoint, write_vlm
from policies.common.runtime import Runtime
from policies.interface.registry import PolicyChoice, make_policy
from wire.types import RobotSpec

if TYPE_CHECKING:
    from policies.interface.policy import LearnedPolicy


class Case(msgspec.Struct, frozen=True):
    """One policy, and what is measured of it."""

    name: str
    kind: str
    """of `policies.interface.registry`"""
    size: str
    """its preset, or for lerobot one of `models.KINDS`"""
    pixels: int = 96
    """of each of two cameras; 0: a robot without any"""
    vlm: str = ""
    """`tiny` or `3b`: a backbone as the slow path"""
    config: dict[str, Any] = {}
    batch: int = 8
    """images of a training step"""
    train_gib: float = 0.0
    """free memory that a training step needs; with less it is not measured"""
    needs: tuple[str, ...] = ()
    """packages that must be installed"""

    @property
    def spec(self) -> RobotSpec:
        return arm(self.pixels) if self.pixels else blind()

    def missing(self) -> str:
        """Why it cannot be measured here, '' if it can."""
        lacking = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{', '.join(lacking)} not installed" if lacking else ""

    def write(self, place: Path) -> str:
        """What its policy is made from, in the directory `place`; returns the place to name to `make`."""
        if self.kind == "lerobot":
            return str(write_checkpoint(self.size, place / "checkpoint", self.spec))
        if self.vlm:
            write_vlm(place / "vlm", {"tiny": TINY, "3b": THREE_B}[self.vlm])
        return self.size

    def make(self, place: Path, written: str, runtime: Runtime) -> LearnedPolicy:
        """The policy. The same seed whatever the runtime."""
        config = {**self.config, "runtime": msgspec.to_builtins(runtime)}
        if self.vlm:
            config |= {"vlm": str(place / "vlm"), "vlm_random": True}
        return make_policy(PolicyChoice(self.kind, written, config), self.spec, 0)


class Variant(msgspec.Struct, frozen=True):
    """Another way to act, compared with plain float32 in the same process."""

    name: str
    runtime: Runtime


_LEROBOT = ("lerobot",)
FLOW_STATE = Case("flow, state", "flow", "state", pixels=0, batch=64)
FLOW_PIXELS = Case("flow, pixels", "flow", "pixels", batch=64)
FLOW_SMALL = Case("flow, small", "flow", "small", batch=64)
FLOW_MEDIUM = Case("flow, medium", "flow", "medium")
TOKENS = Case("tokens, FAST", "tokens", "fast", batch=64)
ACT_SMALL = Case("lerobot ACT, small", "lerobot", "act-small", needs=_LEROBOT)
ACT = Case("lerobot ACT, ResNet18", "lerobot", "act", needs=_LEROBOT)
DIFFUSION = Case("lerobot Diffusion, small", "lerobot", "diffusion-small", needs=_LEROBOT)
SMOLVLA_TINY = Case("lerobot SmolVLA, tiny", "lerobot", "smolvla-tiny", needs=_LEROBOT)
SMOLVLA = Case("lerobot SmolVLA, 450 M", "lerobot", "smolvla-450m", pixels=256, needs=_LEROBOT)
FLOW_LARGE = Case("flow, large", "flow", "large", batch=1, train_gib=8.0)
_VLM = ("transformers",)
TINY_VLM = Case("flow, small + VLM", "flow", "small", vlm="tiny", config={"horizon": CHUNK}, needs=_VLM)
LARGE_3B = Case("flow, large, 3 B backbone", "flow", "large", 384, "3b", {"horizon": CHUNK}, needs=_VLM)

_FLOW_ON_CPU = (FLOW_STATE, FLOW_PIXELS, FLOW_SMALL, TINY_VLM, FLOW_MEDIUM, FLOW_LARGE)
ON_CPU = (*_FLOW_ON_CPU, TOKENS, ACT_SMALL, ACT, DIFFUSION, SMOLVLA_TINY)
ON_CUDA = (FLOW_PIXELS, FLOW_SMALL, FLOW_MEDIUM, ACT, DIFFUSION, SMOLVLA, LARGE_3B)
QUICK = (FLOW_STATE, FLOW_SMALL)

BFLOAT16 = Variant("bfloat16", Runtime(dtype="bfloat16"))
INT8 = Variant("int8", Runtime(int8=True))
BOTH = Variant("bfloat16 and int8", Runtime(dtype="bfloat16", int8=True))
COMPILED = Variant("compiled", Runtime(compile=True))
COMPILED_INT8 = Variant("compiled, int8", Runtime(compile=True, int8=True))
COMPILED_BFLOAT16 = Variant("compiled, bfloat16", Runtime(dtype="bfloat16", compile=True))

VARIANTS_ON_CPU: tuple[tuple[Case, tuple[Variant, ...]], ...] = (
    (FLOW_SMALL, (BFLOAT16, INT8, COMPILED, COMPILED_INT8)),
    (FLOW_MEDIUM, (BFLOAT16, INT8, BOTH)),
    (TOKENS, (BFLOAT16, INT8)),
    (ACT, (BFLOAT16, INT8)),
    (SMOLVLA_TINY, (BFLOAT16, INT8)),
)
VARIANTS_ON_CUDA: tuple[tuple[Case, tuple[Variant, ...]], ...] = tuple(
    (case, (BFLOAT16, COMPILED, COMPILED_BFLOAT16)) for case in (FLOW_SMALL, FLOW_MEDIUM, ACT, SMOLVLA)
)


def on(device: str, runtime: Runtime) -> Runtime:
    """The same runtime on `device`."""
    return msgspec.structs.replace(runtime, device=device)


def prepare(device: str) -> None:
    """One thread on the CPU, as a fleet's processes have, and no look at the network."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch

    if device == "cpu":
        torch.set_num_threads(1)
