"""`vla-fleet train --population`: members that are measured, copied, killed and taken up again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from cloud_learner.training.checkpoints import checkpoint
from fleet.cli.offline.population import (
    MemberCopy,
    MemberNote,
    Population,
    PopulationRecord,
    best_of,
    noted,
    population_table,
)
from fleet.cli.offline.progress import read_progress
from fleet.cli.offline.train import TrainOptions, _Training
from fleet.config.data_directory import DataDirectory
from fleet.config.overrides import Overrides
from fleet.launch.run_record import newest_record
from tests.command_line import vla_fleet

SET = ("training.batch=4", "validation=0.25")
SLOW, FAST = {"training.learning_rate": "1e-07"}, {"training.learning_rate": "0.003"}
TUNE = "training.learning_rate=1e-7,3e-3"


def population(fleet: Path, out: Path, steps: int = 6, every: int = 2) -> Population:
    """As another process gets it."""
    options = TrainOptions(recipe="fake", data=fleet, out=out, overrides=Overrides(set_=list(SET)))
    training = _Training(options, DataDirectory(fleet), DataDirectory(out), steps)
    return Population(DataDirectory(out), steps, every, training.train_member, training.open_held_out_loss)


def tensors(out: Path, member: int) -> dict[str, torch.Tensor]:
    found = checkpoint.load_newest(DataDirectory(out).member(member).training)
    return found.state.tensors if found is not None else {}


@pytest.mark.slow
def test_a_member_trains_to_its_next_measurement_in_any_process(fleet: Path, tmp_path: Path) -> None:
    (first, _, done), two = population(fleet, tmp_path).step(0, FAST), population(fleet, tmp_path)
    assert (first, done) == (2, False)
    assert [two.step(0, FAST)[0::2], two.step(0, SLOW)[0::2]] == [(4, False), (6, True)]
    note, member = two.note(0), DataDirectory(tmp_path).member(0)
    assert note.settings == SLOW and note.gradient_steps == 6 and not note.failure
    assert len(list(member.runs.iterdir())) == 2, "one for each settings"
    assert newest_record(member).settings["training.learning_rate"] == 1e-7
    assert two.open_held_out().of(member.trained.read_bytes()) == note.held_out_loss


@pytest.mark.slow
def test_a_copy_is_the_other_with_settings_of_its_own_and_is_taken_once(fleet: Path, tmp_path: Path) -> None:
    out, ours = tmp_path / "out", population(fleet, tmp_path / "out")
    for member, settings in enumerate((FAST, SLOW)):
        ours.step(member, settings)
    assert tensors(out, 0).keys() == tensors(out, 1).keys()
    ours.save(0, tmp_path / "copy")
    near = {"training.learning_rate": "0.0025"}
    ours.load(0, near, tmp_path / "copy")
    assert ours.note(0).copies == [], "its own is no news"
    ours.load(1, near, tmp_path / "copy")
    assert all(torch.equal(one, tensors(out, 1)[name]) for name, one in tensors(out, 0).items())
    assert ours.note(1).copies == [MemberCopy(0, 2)] and ours.note(1).held_out_loss == ours.note(0).held_out_loss
    ours.step(1, near)
    further = tensors(out, 1)
    # Tune offers it again when the member's process has died
    ours.load(1, near, tmp_path / "copy")
    assert ours.note(1).gradient_steps == 4
    assert all(torch.equal(one, tensors(out, 1)[name]) for name, one in further.items())
    ours.load(1, FAST, tmp_path / "copy")
    assert ours.note(1).gradient_steps == 2 and ours.note(1).copies == [MemberCopy(0, 2)] * 2
    assert ours.step(1, FAST)[0] == 4


@pytest.mark.slow
def test_a_member_that_diverges_is_the_worst_and_may_go_on_as_a_copy(fleet: Path, tmp_path: Path) -> None:
    ours, wild = population(fleet, tmp_path / "out"), {"training.learning_rate": "1e+30"}
    assert ours.step(0, wild) == (2, float("inf"), False)
    assert ours.note(0).held_out_loss is None and "was not applied" in ours.note(0).failure
    ours.step(1, FAST)
    ours.save(1, tmp_path / "copy")
    ours.load(0, FAST, tmp_path / "copy")
    assert ours.step(0, FAST)[1] < 10 and not ours.note(0).failure


def test_the_best_is_the_one_with_the_lowest_loss_at_the_end_and_stands_first() -> None:
    notes = [
        MemberNote(member=0, settings=FAST, gradient_steps=6, held_out_loss=0.5),
        MemberNote(member=1, settings=SLOW, gradient_steps=6, held_out_loss=0.25, copies=[MemberCopy(0, 2)]),
        MemberNote(member=2, settings=SLOW, gradient_steps=4, held_out_loss=0.1),
        MemberNote(member=3, settings=SLOW, gradient_steps=6, failure="it diverged."),
    ]
    assert best_of(notes, 6).member == 1 and best_of(notes[3:], 6) is None
    table = population_table(PopulationRecord(notes, 1), 6)
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["2", "1", "0", "3"] and columns[3] == ["1e-07", "1e-07", "0.003", "1e-07"]
    assert columns[4] == ["", "0 at 2", "", ""] and columns[5] == ["not at the end", "", "", "it diverged."]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--population", "1"), "members is 1; it must be 2 or more"),
        (("--population", "2"), "a population needs something to tune"),
        (("--tune", TUNE), "--tune needs --population N, of 2 or more"),
        (("--population", "2", "--tune", "training.learning_rat=1,2"), "Did you mean 'training.learning_rate'?"),
        (("--population", "2", "--tune", TUNE, "--ranks", "2"), "leave --ranks out, or --population"),
        (("--population", "2", "--tune", TUNE, "--recipe", "shapes"), "for robots of several shapes"),
        (("--population", "2", "--tune", TUNE, "--set", "validation=1e-9"), "hold out more"),
    ],
)
def test_what_it_cannot_do_is_said_before_it_begins(
    words: tuple[str, ...], said: str, fleet: Path, tmp_path: Path
) -> None:
    given = ("--recipe", "fake", "--data", str(fleet), "--out", str(tmp_path / "out"), "--steps", "3")
    done = vla_fleet("train", *given, *words)
    assert done.returncode == 1 and said in done.stderr, done.stderr


# --- with Ray ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def words(fleet: Path, tmp_path: Path) -> tuple[str, ...]:
    pytest.importorskip("ray")
    given = [word for one in (*SET, "population.every=4") for word in ("--set", one)]
    where = ("--recipe", "fake", "--data", str(fleet), "--out", str(tmp_path / "out"))
    return ("train", *where, *given, "--population", "2", "--tune", TUNE)


def kill(pid: int) -> bool:
    """Whether it was there; 0 is no process."""
    try:
        os.kill(pid or 2**30, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def record(out: Path) -> PopulationRecord:
    return msgspec.json.decode((out / "population.json").read_bytes(), type=PopulationRecord)


@pytest.mark.slow
def test_killed_members_and_a_killed_command_go_on_and_the_best_ones_weights_come_out(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    out, said = tmp_path / "out", tmp_path / "said"
    ours, numbers = population(tmp_path, out), range(2)
    with said.open("w") as file:
        command = [sys.executable, "-m", "fleet.cli", *words, "--steps", "1000000"]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ)

    def wait_until(what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 200
        while not what():
            assert process.poll() is None and time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)

    def stand() -> list[MemberNote]:
        return [ours.note(number) or MemberNote(member=number) for number in numbers]

    try:
        wait_until(lambda: any(one.copies for one in stand()))
        copy = next(one.member for one in stand() if one.copies)
        held = noted(DataDirectory(out).member(copy))
        # the process that was there before the copy may be the last that noted anything
        wait_until(lambda: kill(read_progress(held).pid))
        killed, reached = read_progress(held).pid, stand()[copy].gradient_steps
        wait_until(lambda: read_progress(held).pid != killed and stand()[copy].gradient_steps > reached)
    finally:
        process.kill()
        process.wait()
    before = stand()
    steps = max(one.gradient_steps for one in before) + 4
    done = vla_fleet(*words, "--steps", str(steps))
    assert done.returncode == 0, done.stderr
    found = record(out)
    best = found.members[found.best]
    assert [one.gradient_steps for one in found.members] == [steps] * 2
    assert best.held_out_loss == min(one.held_out_loss for one in found.members)
    assert (out / "trained.safetensors").read_bytes() == DataDirectory(out).member(found.best).trained.read_bytes()
    assert (
        f"of member {found.best}, after {steps} gradient steps, held-out loss {best.held_out_loss:.4g}" in done.stdout
    )
    assert "training.learning_rate" in done.stdout and "copy of" in done.stdout
    for earlier, later in zip(before, found.members, strict=True):
        assert later.copies[: len(earlier.copies)] == earlier.copies, "it goes on where it was"
    assert newest_record(DataDirectory(out)).settings["population.members"] == 2
    again = vla_fleet(*words, "--steps", str(steps))
    assert again.returncode == 0 and record(out) == found, "there is nothing left to do"
