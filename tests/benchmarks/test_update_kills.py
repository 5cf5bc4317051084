"""The drill of kills: that it would see a mixture of two versions, and a version that is not what it says."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from benchmarks.update_kills.__main__ import _mixtures  # noqa: E402
from benchmarks.update_kills.robot import ActingNote, probe, recipe  # noqa: E402
from policies.interface.policy import LearnedPolicy  # noqa: E402


def note(policy: LearnedPolicy, version: int, sha256: str = "") -> ActingNote:
    return ActingNote(0, version, sha256 or hashlib.sha256(policy.save()).hexdigest(), probe(policy))


def test_a_mixture_and_what_does_something_else_than_its_file_are_seen(tmp_path: Path) -> None:
    job = recipe()
    first, second = (job.make_policy(job.spec, seed) for seed in (1, 2))
    for number, policy in ((1, first), (2, second)):
        (tmp_path / f"{number}-x.safetensors").write_bytes(policy.save())
        policy.load(policy.save(), number)
    whole = [note(first, 1), note(second, 2)]
    mixed = job.make_policy(job.spec, 1)
    theirs = dict(second.module.named_parameters())
    with torch.no_grad():
        for name, parameter in list(mixed.module.named_parameters())[::2]:
            parameter.copy_(theirs[name])
    mixed.load(mixed.save(), 1)
    claimed = hashlib.sha256(first.save()).hexdigest()
    bad = [note(mixed, 1), note(mixed, 1, claimed), note(first, 2)]
    fleet = SimpleNamespace(robots=("robot-0",), data=SimpleNamespace(weights=tmp_path))
    for notes, expected in ((whole, (2, 0)), (whole + bad, (5, 3))):
        fleet.acts = lambda robot, notes=notes: notes
        assert _mixtures(fleet) == expected  # type: ignore[arg-type]
