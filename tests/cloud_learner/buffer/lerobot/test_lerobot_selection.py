"""Which episodes are exported: what a snapshot held, and one side of a split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cloud_learner.buffer.lerobot.exporter import export
from cloud_learner.buffer.lerobot.selection import Selection, select
from cloud_learner.buffer.sampling.segment_index import on_side
from tests.cloud_learner.buffer.lerobot.lerobot_samples import SPEC, Buffer, buffer, taken
from tests.cloud_learner.buffer.synthetic import fake_episode
from tests.extras import needs
from wire.errors import ConfigError

__all__ = ["buffer"]


def selected(buffer: Buffer, **options) -> dict[str, str]:
    """Outcome by id."""
    return {row.id: row.outcome for row in select(buffer.ledger, SPEC, Selection(outcomes=(), **options))}


def test_what_a_snapshot_held(buffer: Buffer) -> None:
    buffer.add(fake_episode(SPEC, "before", steps=20))
    running = fake_episode(SPEC, "running", steps=20, segment_steps=10)
    buffer.add(running[:1])
    row = buffer.ledger.take_snapshot("then").row
    buffer.add(running[1:])
    buffer.add(fake_episode(SPEC, "after", steps=20))
    assert selected(buffer) == {"before": "success", "running": "success", "after": "success"}
    assert selected(buffer, until_row=row) == {"before": "success", "running": ""}
    with pytest.raises(ConfigError, match=f"no episode matches .*until_row: {row - 1}.*there are 1 "):
        select(buffer.ledger, SPEC, Selection(outcomes=("failure",), until_row=row - 1))


@pytest.mark.slow
@needs("lerobot")
def test_an_episode_that_went_on_after_a_snapshot_is_cut_there(buffer: Buffer, tmp_path: Path) -> None:
    running = fake_episode(SPEC, "running", steps=20, segment_steps=10)
    buffer.add(running[:1])
    row = buffer.ledger.take_snapshot("then").row
    buffer.add(running[1:])
    selection = Selection(outcomes=("unfinished",), until_row=row)
    done = export(buffer.ledger, buffer.store, SPEC, tmp_path / "out", selection=selection, video=False)
    assert (done.episodes, done.rows, done.left_out) == (1, 10, ())
    (segment,) = taken(tmp_path / "out")
    assert np.array_equal(segment.executed, running[0].executed)
    assert not segment.terminated.any() and not segment.truncated.any()


def test_one_side_of_a_split_by_the_same_rule_as_a_trainer(buffer: Buffer) -> None:
    names = [f"e{number}" for number in range(30)]
    for name in names:
        buffer.add(fake_episode(SPEC, name, steps=2))
    held_out = selected(buffer, validation=0.3, held_out=True)
    assert list(held_out) == [name for name in names if on_side(name, 0.3, True)]
    assert set(held_out) | set(selected(buffer, validation=0.3)) == set(names)
    assert 3 <= len(held_out) <= 16 and not held_out.keys() & selected(buffer, validation=0.3).keys()
    for options in ({"held_out": True}, {"validation": 1.0}):
        with pytest.raises(ConfigError, match=r"validation .*: give a share"):
            selected(buffer, **options)
