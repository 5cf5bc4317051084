"""Recording, training and measuring, as `vla-fleet` does it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.common.keeping import kept
from benchmarks.embodiments import lab_fetch
from fleet.config.data_directory import DataDirectory
from fleet.config.recipe import Recipe, share_policy
from fleet.config.recipes import get_recipe
from fleet.config.weights_source import parse_source
from fleet.evaluation.demonstrations import demonstrate
from fleet.evaluation.held_out import MeasuredEpisode, PolicyUnderTest, plan_episodes
from fleet.evaluation.held_out import measure as measure_held_out
from fleet.launch import factories
from fleet.launch.learning import open_offline_trainer
from wire.clock import ManualClock
from wire.transport.memory_channel import MemoryServer

JOB = f"{lab_fetch.__name__}:{lab_fetch.shapes.__name__}"
FIRST, SECOND, THIRD = lab_fetch.MEMBERS
PAIR = (FIRST, SECOND)


Outcomes = dict[str, list[list[MeasuredEpisode]]]
"""of a run, by member and number of updates"""


@dataclass(frozen=True, slots=True)
class EmbodimentsSize:
    """How much of everything."""

    demonstrations: Mapping[str, int] = field(default_factory=lambda: {FIRST: 20, SECOND: 100})
    """episodes of each of the two"""
    updates: int = 3000
    own: tuple[int, ...] = (5, 10, 20, 30, 40, 60)
    """episodes of the third one"""
    own_updates: tuple[int, ...] = (300, 800, 1600)
    """of the third one, after each of which it is measured: few demonstrations are soon learned by heart"""
    batch: int = 64
    episodes: int = 80
    """held-out ones of each of the two, its tasks together"""
    own_episodes: int = 40
    """of the third one"""
    seeds: tuple[int, ...] = (0, 1, 2)


FULL = EmbodimentsSize()
QUICK = EmbodimentsSize({FIRST: 4, SECOND: 6}, 150, (2, 4), (30, 60), 32, 4, 4, (0,))


@dataclass(frozen=True, slots=True)
class EmbodimentsRun:
    """One training run, and whom it is measured on."""

    seed: int
    name: str
    members: tuple[str, ...]
    updates: tuple[int, ...]
    """in all, those of `after` included, after each of which it is measured"""
    own: int = 0
    """demonstrations that the third one has, where it is a member"""
    after: str = ""
    """the run that it goes on from"""
    measured: tuple[str, ...] = ()


def first_runs(size: EmbodimentsSize, seed: int) -> list[EmbodimentsRun]:
    """The longest first."""
    together = EmbodimentsRun(seed, "together", PAIR, (size.updates,), measured=PAIR)
    alone = [EmbodimentsRun(seed, f"alone {name}", (name,), (size.updates,), measured=(name,)) for name in PAIR]
    scratch = [
        EmbodimentsRun(seed, f"from scratch {own}", (THIRD,), size.own_updates, own, measured=(THIRD,))
        for own in size.own
    ]
    return [together, *alone, *scratch]


def later_runs(size: EmbodimentsSize, seed: int) -> list[EmbodimentsRun]:
    """Those that go on from the first ones."""
    members, updates = (*PAIR, THIRD), tuple(size.updates + own for own in size.own_updates)
    return [
        EmbodimentsRun(
            seed, f"joined {own}", members, updates, own, "together", members if own == max(size.own) else (THIRD,)
        )
        for own in size.own
    ]


def begin_process() -> None:
    """Of a worker."""
    import torch

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)


def record(size: EmbodimentsSize, seed: int, root: Path) -> None:
    """Demonstrations of all three; a snapshot for each number that the third one has."""
    place, done = root / f"data-{seed}", root / f"recorded-{seed}"
    if done.exists():
        return
    shutil.rmtree(place, ignore_errors=True)
    data = DataDirectory(place)
    for name, episodes in size.demonstrations.items():
        _show(data, name, episodes, 10_000 * seed)
    before = 0
    for own in size.own:
        _show(data, THIRD, own - before, 10_000 * seed + before, _snapshot(own))
        before = own
    done.touch()


def train_and_measure(size: EmbodimentsSize, wanted: EmbodimentsRun, root: Path) -> Outcomes:
    """`root` keeps it."""
    path = root / f"{wanted.name}-{wanted.seed}.json"
    found = kept(path, lambda: msgspec.to_builtins(_train_and_measure(size, wanted, root)))
    return msgspec.convert(found, Outcomes)


def _train_and_measure(size: EmbodimentsSize, wanted: EmbodimentsRun, root: Path) -> Outcomes:
    data, place = DataDirectory(root / f"data-{wanted.seed}"), root / f"{wanted.name}-{wanted.seed}"
    shutil.rmtree(place, ignore_errors=True)
    if wanted.after:
        shutil.copytree(root / f"{wanted.after}-{wanted.seed}", place)
    weights, snapshot = place / "trained.safetensors", _snapshot(wanted.own) if wanted.own else ""
    recipe, found = make_job(size, wanted.members), Outcomes({name: [] for name in wanted.measured})
    for updates in wanted.updates:
        with open_offline_trainer(recipe, data, DataDirectory(place), wanted.seed, updates, snapshot) as trainer:
            while not trainer.finished:
                trainer.step()
            trainer.save()
            weights.write_bytes(trainer.weights())
        for name in wanted.measured:
            found[name].append(_measured(size, name, weights))
    return found


def make_job(size: EmbodimentsSize, members: tuple[str, ...]) -> Recipe:
    """The recipe with some of its members."""
    whole = get_recipe(JOB)
    chosen = {name: whole.members[name] for name in members}
    training = replace(whole.training, batch=size.batch)
    return replace(share_policy(JOB, chosen, training=training), checkpoint_every_s=1e9)


def _show(data: DataDirectory, member: str, episodes: int, first_seed: int, snapshot: str = "") -> None:
    recipe, server = get_recipe(f"{JOB}@{member}"), MemoryServer()
    gateway, _, ledger, _ = factories.make_gateway(recipe, data, server, ManualClock())
    name = f"demonstrator-{member}-{first_seed}"
    demonstrate(recipe, name, data.edge(name), server.connect(name), episodes, first_seed, gateway.poll)
    gateway.poll()
    if snapshot:
        ledger.take_snapshot(snapshot)
    ledger.close()


def _snapshot(own: int) -> str:
    return f"own-{own}"


def _measured(size: EmbodimentsSize, member: str, weights: Path) -> list[MeasuredEpisode]:
    under_test = PolicyUnderTest(parse_source(str(weights)), f"{JOB}@{member}")
    recipe = under_test.make_recipe()
    episodes = size.own_episodes if member == THIRD else size.episodes
    return list(measure_held_out(under_test, plan_episodes(recipe, max(1, episodes // len(recipe.tasks)))))
