"""A model judges what is there and what comes: once, whatever is killed, and the newest model's word counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.store.store import SegmentStore
from cloud_learner.rewards import relabelling
from cloud_learner.rewards.model_labels import LabelModel, ModelLabels
from cloud_learner.rewards.relabelling import Relabelling
from tests.cloud_learner.buffer.synthetic import fake_spec
from tests.cloud_learner.rewards.told import HALF, SPEC, TASKS, ToldModel, append, episode, opened, rows_of
from wire.errors import InvalidDataError, SpecMismatchError, StorageError

NAMES = ("e1", "e2", "e3")
SCORES = {"e1": 0.25, "e2": 0.5, "e3": 0.75, "e4": 1.0}


def job(
    ledger: Ledger, store: SegmentStore, scores: Mapping[str, float] = SCORES, sha256: str = "ab"
) -> tuple[Relabelling, ToldModel, LabelModel]:
    model = ToldModel(scores, sha256)
    adopted = ModelLabels(ledger, "classifier").adopt(sha256, HALF, "told")
    return Relabelling(ledger, store, SPEC, list(TASKS), "classifier", model, adopted), model, adopted


def said(ledger: Ledger, name: str) -> set[tuple[float, int]]:
    rows = rows_of(ledger, name)
    found = ModelLabels(ledger, "classifier").read(rows)
    return {tuple(found[row]) if row in found else () for row in rows}  # type: ignore[misc]


def test_all_that_ended_is_labelled_once_and_what_comes_later_too(tmp_path: Path) -> None:
    with opened(tmp_path, *(episode(name, "unjudged") for name in NAMES)) as (ledger, store):
        parts = episode("e4", "success")
        append(store, parts[:-1])
        work, model, _ = job(ledger, store)
        assert work.poll() == 0
        assert [said(ledger, name) for name in NAMES] == [{(0.25, 1)}, {(0.5, 1)}, {(0.75, 1)}]
        assert said(ledger, "e4") == {()}
        assert {end.state.shape for end in model.seen} == {(5, SPEC.state_dim)}
        append(store, parts[-1:])
        assert work.poll() == work.poll() == 0
        assert said(ledger, "e4") == {(1.0, 1)}
        assert [end.episode for end in model.seen] == ["e1", "e2", "e3", "e4"]
        assert work.labelled == 4


def test_a_job_that_was_killed_goes_on_with_the_rest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(relabelling, "EPISODES_AT_ONCE", 1)
    with opened(tmp_path, *(episode(name, "unjudged") for name in NAMES)) as (ledger, store):
        work, model, _ = job(ledger, store)
        assert work.poll() == 2
        put = ModelLabels.put

        def fail(self, *given):
            put(self, *given)
            raise StorageError("the answer was lost")

        monkeypatch.setattr(ModelLabels, "put", fail)
        with pytest.raises(StorageError):
            work.poll()
        monkeypatch.undo()
        monkeypatch.setattr(relabelling, "EPISODES_AT_ONCE", 1)
        again, model, _ = job(ledger, store)
        assert again.poll() == 0
        assert [end.episode for end in model.seen] == ["e3"]
        assert [said(ledger, name) for name in NAMES] == [{(0.25, 1)}, {(0.5, 1)}, {(0.75, 1)}]


def test_two_jobs_at_once_write_nothing_twice(tmp_path: Path) -> None:
    with opened(tmp_path, *(episode(name, "unjudged") for name in NAMES)) as (ledger, store):
        one, other = job(ledger, store)[0], job(ledger, store, dict.fromkeys(SCORES, 0.0))[0]
        one.poll()
        revision = ledger.labelled_since(0, ("success_classifier",))[1]
        other._index.extend(ledger.index(0, SPEC.data_hash))
        other._known = len(other._index)
        other.poll()
        assert ledger.labelled_since(revision, ("success_classifier",)) == ((), revision)
        assert (one.labelled, other.labelled) == (3, 0)


def test_a_newer_model_labels_all_again_and_the_old_one_stops(tmp_path: Path) -> None:
    with opened(tmp_path, *(episode(name, "unjudged") for name in NAMES[:2])) as (ledger, store):
        old = job(ledger, store)[0]
        old.poll()
        new, model, adopted = job(ledger, store, dict.fromkeys(SCORES, 1.0), "cd")
        assert adopted.number == 2
        new.poll()
        assert len(model.seen) == 2
        assert [said(ledger, name) for name in NAMES[:2]] == [{(1.0, 2)}, {(1.0, 2)}]
        append(store, episode("e3", "unjudged"))
        with pytest.raises(InvalidDataError, match="model 2 counts now, not 1"):
            old.poll()
        assert said(ledger, "e3") == {()}


def test_scores_that_are_none_stop_it_with_nothing_written(tmp_path: Path) -> None:
    with opened(tmp_path, *(episode(name, "unjudged") for name in NAMES[:2])) as (ledger, store):
        work = job(ledger, store, {"e1": 0.5, "e2": np.nan})[0]
        with pytest.raises(InvalidDataError, match="classifier model 1 scores 1 of 2 episodes with nan"):
            work.poll()
        assert said(ledger, "e1") == said(ledger, "e2") == {()}


def test_another_robots_model_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    other = fake_spec(1)
    with opened(tmp_path, episode("e1", "unjudged", spec=other), spec=other) as (ledger, store):
        adopted = ModelLabels(ledger, "classifier").adopt("ab", HALF, "told")
        with pytest.raises(SpecMismatchError):
            Relabelling(ledger, store, other, list(TASKS), "classifier", ToldModel(SCORES), adopted)


def test_what_cannot_be_read_is_left_out_and_counted(tmp_path: Path) -> None:
    with opened(tmp_path, *(episode(name, "unjudged") for name in NAMES)) as (ledger, store):
        work, model, _ = job(ledger, store)
        found = store.read

        def damaged(rows):
            read = found(rows)
            hit = rows_of(ledger, "e2")[-1]
            return type(read)({r: s for r, s in read.segments.items() if r != hit}, {hit: "torn"}, read.elsewhere)

        store.read = damaged  # type: ignore[method-assign]
        assert work.poll() == work.poll() == 0
        assert work.left_out == {"damaged": 1}
        assert [end.episode for end in model.seen] == ["e1", "e3"]
