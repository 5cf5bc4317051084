"""The robot of `benchmarks.update_kills`: what acts on it says by which weights it does, in a file of its own.

Before it answers, the policy's network is saved and looked at, and asked for a chunk of a moment that never changes:
whether these are one version's, whole, is then found out with that version's file, by another process.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from policies.conformance.data import example_observation
from policies.flow.policy import FlowPolicy
from policies.interface.policy import Batch, LearnedPolicy
from wire.types import RobotSpec

PLACE, ROBOT = "UPDATE_KILLS_PLACE", "UPDATE_KILLS_ROBOT"
"""environment variables: the directory of the notes, and whose they are"""
RECIPE = "benchmarks.update_kills.robot:recipe"
_GRADIENT_STEP_S = 0.1


class ActingNote(msgspec.Struct, frozen=True):
    """By what a robot acts from then on."""

    time_ns: int
    version: int
    sha256: str
    """of what acts, saved as a weights file"""
    chunk: list[float]
    """what it does in a moment that never changes"""


def recipe(seed: int = 0) -> Recipe:
    """The fake job: a version each second, by a trainer that leaves the cores to others."""
    job = fake(seed)

    def make_policy(spec: RobotSpec, seed: int) -> LearnedPolicy:
        policy = job.make_policy(spec, seed)
        _rest_before(policy)
        if ROBOT in os.environ:
            _note_what_acts(policy, notes_of(Path(os.environ[PLACE]), os.environ[ROBOT]))
        return policy

    training = replace(job.training, pretrain_steps=10, publish_every_s=1.0)
    return replace(job, make_policy=make_policy, training=training, demonstrations=2)


def notes_of(place: Path, robot: str) -> Path:
    return place / f"{robot}.acts"


def read_notes(data: bytes) -> Iterator[ActingNote]:
    """In the order in which they were written; a line that is cut off is none."""
    for line in data.splitlines():
        try:
            yield msgspec.json.decode(line, type=ActingNote)
        except msgspec.DecodeError:
            continue


def probe(policy: LearnedPolicy) -> list[float]:
    """What `policy` does in a moment that never changes, with noise that never changes."""
    observation = example_observation(policy.spec)
    latent = policy.think(observation)
    return cast(FlowPolicy, policy).act(observation, latent, 3, seed=1).actions.ravel().tolist()


def _rest_before(policy: LearnedPolicy) -> None:
    loss = policy.loss

    def rested(batch: Batch) -> torch.Tensor:
        time.sleep(_GRADIENT_STEP_S)
        return loss(batch)

    policy.loss = rested  # type: ignore[method-assign]


def _note_what_acts(policy: LearnedPolicy, path: Path) -> None:
    act = policy.act
    last: list[tuple[int, str, list[float]]] = []

    def noted(*seen: Any, **named: Any) -> Any:
        policy.act = act  # type: ignore[method-assign]
        found = policy.version, hashlib.sha256(policy.save()).hexdigest(), probe(policy)
        policy.act = noted  # type: ignore[method-assign]
        if last[:] != [found]:
            last[:] = [found]
            note = ActingNote(time.monotonic_ns(), *found)
            with path.open("ab") as file:
                file.write(b"\n" + msgspec.json.encode(note) + b"\n")
        return act(*seen, **named)

    policy.act = noted  # type: ignore[method-assign]
