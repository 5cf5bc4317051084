"""A population of trainings (`vla-fleet train --population`): what a member is, and what became of all.

A member is a training like any other, in a directory of its own, OUT/population/N, to the next measurement and no
further: its note says to which gradient step that was, how well it did and by which settings it goes on. So it may be
killed, copied and taken up in any process.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
from rich.console import Console

from fleet.cli.fleet import table_of
from fleet.cli.offline.progress import beside, read_progress, show_progress
from fleet.config.data_directory import DataDirectory, read_note, write_note
from wire.errors import ConfigError, FleetError, InvalidDataError

if TYPE_CHECKING:
    from rich.table import Table

    from cloud_learner.training.offline.held_out_loss import HeldOutLoss
    from fleet.cli.offline.tuned_settings import TunedSetting

_NOTE, _CHECKPOINT = "member.json", "checkpoint"
_LOOK_S = 0.5
_SHOWN_COPIES = 3
_WIDTH = 160
"""columns of a table that goes to no terminal, too"""


class MemberCopy(msgspec.Struct, frozen=True):
    """That it became a copy of another."""

    of: int
    gradient_steps: int
    """that both had behind them"""


class MemberNote(msgspec.Struct, frozen=True, kw_only=True):
    """Where one of a population stands."""

    member: int
    settings: dict[str, str] = {}
    """what it has by itself, by the path of each setting"""
    gradient_steps: int = 0
    """at which it was measured last"""
    held_out_loss: float | None = None
    """then; None: it was not measured, or diverged"""
    failure: str = ""
    """why it has none"""
    copies: list[MemberCopy] = []
    """from the first to the last"""
    copied_checkpoint: str = ""
    """the newest of what it was given by another"""


class PopulationRecord(msgspec.Struct, frozen=True):
    """What became of all: OUT/population.json."""

    members: list[MemberNote]
    best: int | None


class TrainMember(Protocol):
    """Of a population's training, what is the same for each."""

    def __call__(self, run: DataDirectory, steps: int, settings: list[str]) -> None:
        """Train in `run` to that many gradient steps, from its newest checkpoint on, and write its weights.

        Raises `InvalidDataError` where it diverges, and as `vla-fleet train` does."""
        ...


@dataclass(frozen=True)
class Population:
    """What a process needs to know to take any of its members further: `fleet.ray_backend.population.MemberWork`."""

    run: DataDirectory
    steps: int
    """gradient steps in all"""
    every: int
    """between two measurements"""
    train: TrainMember
    open_held_out: Callable[[], HeldOutLoss]

    def note(self, member: int) -> MemberNote | None:
        """None for one that has not begun. Raises `StorageError`."""
        remedy = f"Move {self.run.member(member).root} away: the member then begins anew."
        return read_note(self.run.member(member).root / _NOTE, MemberNote, "reading where a member stands", remedy)

    def step(self, member: int, settings: dict[str, str]) -> tuple[int, float, bool]:
        """As `MemberWork`; the loss is infinite for one that diverges, so that it goes on as a copy of another."""
        run, note = self.run.member(member), self.note(member) or MemberNote(member=member)
        due = min(self.steps, (note.gradient_steps // self.every + 1) * self.every)
        note = msgspec.structs.replace(note, settings=settings, failure="")
        self._keep(note)
        loss, failure = math.inf, ""
        try:
            self.train(run, due, [f"{path}={text}" for path, text in settings.items()])
            loss = self._held_out.of(run.trained.read_bytes())
            if not math.isfinite(loss):
                loss, failure = math.inf, f"its loss on held-out episodes was not finite after {due} gradient steps."
        except InvalidDataError as error:
            failure = str(error)
        except FleetError as error:
            self._keep(msgspec.structs.replace(note, failure=str(error)))
            raise
        measured = None if failure else loss
        self._keep(msgspec.structs.replace(note, gradient_steps=due, held_out_loss=measured, failure=failure))
        return due, loss, due >= self.steps

    def save(self, member: int, directory: Path) -> None:
        """As `MemberWork`."""
        from cloud_learner.training.checkpoints.checkpoint import copy_newest

        copy_newest(self.run.member(member).training, directory / _CHECKPOINT)
        write_note(directory / _NOTE, self.note(member) or MemberNote(member=member), "copying a member")

    def load(self, member: int, settings: dict[str, str], directory: Path) -> None:
        """As `MemberWork`. Its own checkpoint is no news to it, nor is one that it was given before."""
        from cloud_learner.training.checkpoints.checkpoint import copy_newest

        mine = self.note(member) or MemberNote(member=member)
        given = read_note(directory / _NOTE, MemberNote, "reading a copy of a member", "Start the training again.")
        names = sorted(path.name for path in (directory / _CHECKPOINT).glob("*-*"))
        if given is None or not names or given.member == member:
            return
        if names[-1] == mine.copied_checkpoint and settings == mine.settings:
            return
        copy_newest(directory / _CHECKPOINT, self.run.member(member).training)
        copy = MemberCopy(given.member, given.gradient_steps)
        self._keep(
            msgspec.structs.replace(
                mine,
                settings=settings,
                gradient_steps=given.gradient_steps,
                held_out_loss=given.held_out_loss,
                copies=[*mine.copies, copy],
                copied_checkpoint=names[-1],
            )
        )

    @cached_property
    def _held_out(self) -> HeldOutLoss:
        return self.open_held_out()

    def _keep(self, note: MemberNote) -> None:
        write_note(self.run.member(note.member).root / _NOTE, note, "noting where a member stands")


def train_population(
    population: Population,
    members: int,
    tuned: Mapping[str, TunedSetting],
    seed: int,
    stopped: Callable[[], bool],
    address: str = "",
) -> str:
    """Take all to the end, those of an interrupted start from where they were, and give the best one's weights out;
    what became of it, for people.

    Raises `ConfigError` for members that differ by something else than `tuned`, as `tune_population` does, and
    `FleetError` when none came to the end.
    """
    import torch

    from cloud_learner.buffer.files import write_durably
    from fleet.ray_backend.population import tune_population

    run, steps = population.run, population.steps
    begun = standing(population, members)
    for one in begun:
        if one.settings and one.settings.keys() != tuned.keys():
            raise ConfigError(
                f"the population in {run.population} is tuned by {', '.join(one.settings)}, not by {', '.join(tuned)}: "
                "name the same, or choose another --out."
            )
    going = {one.member: one.settings or None for one in begun if one.gradient_steps < steps}
    if going:
        # whether anything is held out shows before an hour has passed
        population.open_held_out()
        with show_population(population, members):
            tune_population(
                population,
                going,
                tuned,
                population.every,
                run.population,
                seed=seed,
                stopped=stopped,
                address=address,
                gpus=torch.cuda.is_available(),
            )
    notes = standing(population, members)
    best = best_of(notes, steps)
    record = PopulationRecord(notes, None if best is None else best.member)
    write_note(run.root / "population.json", record, "noting what became of a population")
    Console(width=_WIDTH).print(population_table(record, steps))
    left = sum(one.gradient_steps < steps for one in notes)
    if stopped() and left:
        return f"stopped with {left} of {members} members under way: the same command goes on."
    if best is None:
        failures = {f"member {one.member}: {one.failure}" for one in notes if one.failure}
        raise FleetError(
            f"none of {members} members came to gradient step {steps} with a loss. {' '.join(sorted(failures))} Choose "
            f"other values with --tune, and another --out; what Ray said is in {run.population / 'ray.log'}."
        )
    write_durably(run.trained, run.member(best.member).trained.read_bytes(), "writing the weights")
    return (
        f"{run.trained}: of member {best.member}, after {steps} gradient steps, held-out loss {best.held_out_loss:.4g}."
    )


def noted(run: DataDirectory) -> Path:
    """Where a member says how far it is."""
    return run.root / "progress.json"


@contextlib.contextmanager
def show_population(population: Population, members: int) -> Iterator[None]:
    """How far all are, by a thread until the block ends."""

    def follow(ended: threading.Event) -> None:
        # what a start before had done is no speed of this one
        begun = sum(_reached(population, one) for one in range(members))
        with show_progress(members * population.steps, "steps", begun) as progress:
            while not ended.wait(_LOOK_S):
                best = best_of(standing(population, members))
                text = "" if best is None else f"best held-out loss {best.held_out_loss:.4g} (member {best.member})"
                progress.update(sum(_reached(population, one) for one in range(members)), text)

    population.run.population.mkdir(parents=True, exist_ok=True)
    with beside(follow):
        yield


def _reached(population: Population, member: int) -> int:
    note = population.note(member)
    return max(0 if note is None else note.gradient_steps, read_progress(noted(population.run.member(member))).done)


def standing(population: Population, members: int) -> list[MemberNote]:
    """Of each. Raises `StorageError`."""
    return [population.note(number) or MemberNote(member=number) for number in range(members)]


def best_of(notes: list[MemberNote], steps: int = 0) -> MemberNote | None:
    """The one with the lowest held-out loss, of those that were measured after `steps` gradient steps or more."""
    measured = [one for one in notes if one.held_out_loss is not None and one.gradient_steps >= steps]
    return min(measured, key=lambda one: one.held_out_loss or 0.0, default=None)


def population_table(record: PopulationRecord, steps: int) -> Table:
    """For people, of what should have taken `steps` gradient steps: the best first."""
    paths = list(dict.fromkeys(path for one in record.members for path in one.settings))
    table = table_of("", "member", "loss", "steps", *paths, "copy of", "", right=("member", "loss", "steps", *paths))
    table.box = None
    for one in sorted(record.members, key=lambda one: math.inf if one.held_out_loss is None else one.held_out_loss):
        loss = "–" if one.held_out_loss is None else f"{one.held_out_loss:.4g}"
        copied = ", ".join(f"{copy.of} at {copy.gradient_steps}" for copy in one.copies[-_SHOWN_COPIES:])
        copied = f"…, {copied}" if len(one.copies) > _SHOWN_COPIES else copied
        values = [_short(one.settings.get(path, "")) for path in paths]
        failure = one.failure or ("" if one.gradient_steps >= steps else "not at the end")
        table.add_row(str(one.member), loss, str(one.gradient_steps), *values, copied, failure)
    return table


def _short(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text
