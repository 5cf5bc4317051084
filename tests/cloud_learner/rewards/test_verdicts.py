"""What a trainer draws by verdicts, and that a model's label changes nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_learner.algorithms.critics.judged import taught_or_judged
from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.buffer.sampling.shares import TaskMix
from cloud_learner.buffer.sampling.target import (
    Moment,
    by_outcome,
    by_verdicts,
    imitation,
    lag_half_life,
    outcome_by_verdict,
    uniform,
)
from cloud_learner.buffer.store.store import SegmentStore
from cloud_learner.rewards import registry
from cloud_learner.rewards.agreement import FAILURE, NOBODY_KNOWS, SUCCESS
from cloud_learner.rewards.config import RewardConfig
from cloud_learner.rewards.model_labels import ModelLabels
from cloud_learner.rewards.verdicts import VerdictReader, open_verdicts
from tests.cloud_learner.rewards.told import CONFIG, HALF, SPEC, append, episode, index_of, label, opened, rows_of
from wire.errors import ConfigError, InvalidDataError

BOTH = RewardConfig(sources=("label", "outcome", "classifier", "lerobot"))
DOUBT = RewardConfig(sources=("label", "outcome", "classifier"), doubt=True)


def verdicts(ledger: Ledger, config: RewardConfig) -> list[float]:
    reader = VerdictReader(ledger, index_of(ledger), config)
    reader.refresh()
    return reader.verdicts.tolist()


def drawn(ledger: Ledger, store: SegmentStore, config: RewardConfig | None, target=None) -> dict[int, set[int]]:
    """Outcomes in batches by the ledger's number of the episode."""
    target = target or uniform()
    asked = msgspec.structs.replace(CONFIG, target=target if config is None else by_verdicts(target))
    found: dict[int, set[int]] = {}
    reads = None if config is None else open_verdicts(config)
    with ReplayDataset(ledger, store, SPEC, asked, verdicts=reads) as dataset:
        dataset.refresh()
        batch = dataset.next()
        for number, outcome in zip(batch["episode"].tolist(), batch["outcome"].tolist(), strict=True):
            found.setdefault(number, set()).add(outcome)
    return found


def test_sources_are_read_in_their_order_and_a_person_goes_before_all(tmp_path: Path) -> None:
    with opened(tmp_path, episode("e1", "success"), episode("e2", "failure"), episode("e3", "unjudged")) as (ledger, _):
        assert verdicts(ledger, BOTH) == [SUCCESS, FAILURE, NOBODY_KNOWS]
        ledger.label_episode("e1", "success", 0, "anna")
        ledger.label_episode("e1", "quality", 0.9, "anna")
        ledger.label_episode("e3", "success", 0, "anna")
        ledger.label_episode("e3", "success", 1, "otto")
        assert verdicts(ledger, BOTH) == [FAILURE, FAILURE, SUCCESS]
        assert verdicts(ledger, RewardConfig(sources=("label",))) == [FAILURE, NOBODY_KNOWS, SUCCESS]


def test_the_simulators_rewards_judge_whole_episodes(tmp_path: Path) -> None:
    rich, poor, unfinished = (episode(name, "unjudged") for name in ("e1", "e2", "e3"))
    poor = [msgspec.structs.replace(one, reward=np.zeros(one.steps, np.float32)) for one in poor]
    with opened(tmp_path, rich, poor, unfinished[:-1]) as (ledger, _):
        config = RewardConfig(sources=("simulator",), success_return=3.0)
        assert verdicts(ledger, config) == [SUCCESS, FAILURE, NOBODY_KNOWS]
        both = RewardConfig(sources=("outcome", "simulator"), success_return=100.0)
        assert verdicts(ledger, both) == [FAILURE, FAILURE, NOBODY_KNOWS]


def test_one_models_label_admits_nothing_and_two_kinds_do(tmp_path: Path) -> None:
    with opened(tmp_path, episode("e1", "unjudged"), episode("e2", "unjudged")) as (ledger, _):
        label(ledger, "classifier", {"e1": 0.99, "e2": 0.01})
        assert verdicts(ledger, BOTH) == [NOBODY_KNOWS, NOBODY_KNOWS]
        assert verdicts(ledger, DOUBT) == [NOBODY_KNOWS, NOBODY_KNOWS]
        label(ledger, "lerobot", {"e1": 0.99, "e2": 0.99})
        assert verdicts(ledger, BOTH) == [SUCCESS, NOBODY_KNOWS]


def test_labels_of_an_old_model_do_not_count(tmp_path: Path) -> None:
    with opened(tmp_path, episode("e1", "unjudged"), episode("e2", "unjudged")) as (ledger, _):
        index = index_of(ledger)
        reader = VerdictReader(ledger, index, BOTH)
        label(ledger, "classifier", {"e1": 0.99, "e2": 0.99})
        label(ledger, "lerobot", {"e1": 0.99, "e2": 0.99})
        assert reader.refresh()
        assert reader.verdicts.tolist() == [SUCCESS, SUCCESS]
        label(ledger, "classifier", {"e1": 0.98}, sha256="cd")
        assert reader.refresh()
        assert reader.verdicts.tolist() == [SUCCESS, NOBODY_KNOWS]
        assert not reader.refresh()


def test_doubt_takes_out_what_a_model_contradicts_until_a_person_speaks(tmp_path: Path, caplog) -> None:
    with opened(tmp_path, episode("e1", "success"), episode("e2", "failure")) as (ledger, _):
        label(ledger, "classifier", {"e1": 0.01, "e2": 0.01})
        assert verdicts(ledger, DOUBT) == [NOBODY_KNOWS, FAILURE]
        assert "1 of 2 episodes" in caplog.text
        assert verdicts(ledger, BOTH) == [SUCCESS, FAILURE]
        ledger.label_episode("e1", "success", 1, "anna")
        assert verdicts(ledger, DOUBT) == [SUCCESS, FAILURE]


def test_a_reader_that_goes_on_says_what_a_new_one_would(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with opened(tmp_path) as (ledger, store):
        index = index_of(ledger)
        reader = VerdictReader(ledger, index, BOTH)
        reader.refresh()
        for number in range(12):
            parts = episode(f"e{number}", str(rng.choice(["success", "failure", "unjudged"])))
            append(store, parts[:-1] if rng.random() < 0.3 else parts)
            named = f"e{rng.integers(number + 1)}"
            match rng.integers(3):
                case 0:
                    ledger.label_episode(named, "success", int(rng.integers(2)), "anna")
                case 1:
                    label(ledger, "classifier", {named: float(rng.random())}, sha256=str(rng.integers(3) + number))
                case 2:
                    label(ledger, "lerobot", {named: float(rng.random())})
            index.extend(ledger.index(index.watermark, SPEC.data_hash))
            reader.refresh()
            fresh = index_of(ledger)
            other = VerdictReader(ledger, fresh, BOTH)
            other.refresh()
            np.testing.assert_array_equal(reader.verdicts, other.verdicts)
            np.testing.assert_array_equal(index.label, fresh.label)


def test_batches_and_weights_follow_verdicts_and_the_default_is_the_record(tmp_path: Path) -> None:
    success, failure = OUTCOMES.index("success"), OUTCOMES.index("failure")
    judged = taught_or_judged(1.0, 1.0, TaskMix())
    with opened(tmp_path, episode("e1", "success"), episode("e2", "failure"), episode("e3", "unjudged")) as both:
        ledger, _ = both
        ledger.label_episode("e2", "success", 1, "anna")
        ledger.label_episode("e3", "success", 0, "anna")
        assert drawn(*both, None, judged) == {1: {success}, 2: {failure}}
        assert drawn(*both, BOTH, judged) == {1: {success}, 2: {success}, 3: {failure}}
        only = RewardConfig(sources=("label",))
        assert drawn(*both, only, judged) == {2: {success}, 3: {failure}}


def test_a_label_that_comes_is_drawn_by_without_a_new_start(tmp_path: Path) -> None:
    judged = by_verdicts(taught_or_judged(1.0, 1.0, TaskMix()))
    with opened(tmp_path, episode("e1", "success"), episode("e2", "unjudged")) as (ledger, store):
        asked = msgspec.structs.replace(CONFIG, target=judged)
        with ReplayDataset(ledger, store, SPEC, asked, verdicts=open_verdicts(BOTH)) as dataset:
            dataset.refresh()
            assert set(dataset.next()["episode"].tolist()) == {1}
            ledger.label_episode("e2", "success", 0, "anna")
            dataset.refresh()
            dataset.next()
            assert set(dataset.next()["episode"].tolist()) == {1, 2}


def test_a_models_label_makes_no_step_a_persons_and_no_episode_a_success_for_anybody_else(tmp_path: Path) -> None:
    """The invariant outside of the verdicts: who imitates, gates, counts, keeps or exports reads none of it."""
    with opened(tmp_path, episode("e1", "unjudged"), episode("e2", "failure")) as (ledger, store):
        before = ledger.episodes(), ledger.shares(), ledger.kept_episodes(), ledger.labels("e1"), ledger.evaluations()
        for kind in ("classifier", "lerobot"):
            label(ledger, kind, {"e1": 1.0, "e2": 1.0})
        after = ledger.episodes(), ledger.shares(), ledger.kept_episodes(), ledger.labels("e1"), ledger.evaluations()
        assert after == before
        index = index_of(ledger)
        VerdictReader(ledger, index, BOTH).refresh()
        runs = index.runs(slice(None), index.watermark)
        for target in (imitation(), by_verdicts(imitation())):
            assert target.weights(runs, Moment(1)).tolist() == [0.0] * len(runs.actor)
        with ReplayDataset(ledger, store, SPEC, CONFIG, verdicts=open_verdicts(BOTH)) as dataset:
            dataset.refresh()
            batch = dataset.next()
        assert batch["online"].all()
        assert set(batch["actor"].tolist()) == {0}


def test_what_was_aborted_or_discarded_or_goes_on_stays_so() -> None:
    outcomes = np.array([OUTCOMES.index(name) for name in ("aborted", "discarded")] + [-1], np.int8)
    for verdict in (SUCCESS, FAILURE, NOBODY_KNOWS, np.nan):
        np.testing.assert_array_equal(outcome_by_verdict(outcomes, np.full(3, verdict, np.float32)), outcomes)


def test_a_factor_by_version_and_outcome_is_brought_up_to_date_whatever_the_verdict(tmp_path: Path) -> None:
    target = by_verdicts(uniform(factors=(by_outcome({"failure": 1.0}, unknown=0.0), lag_half_life(1.0))))
    with opened(tmp_path, episode("e1", "success"), episode("e2", "unjudged")) as (ledger, store):
        ledger.label_episode("e2", "success", 0, "anna")
        asked = msgspec.structs.replace(CONFIG, target=target)
        with ReplayDataset(ledger, store, SPEC, asked, verdicts=open_verdicts(BOTH)) as dataset:
            dataset.refresh()
            before = dataset.sampler._known.weight.copy()
            dataset.sampler.refresh(5)
            after = dataset.sampler._known.weight
        assert before.max() > 0
        assert after.max() == pytest.approx(before.max() / 2**5, rel=1e-3)


def test_a_target_by_verdicts_needs_somebody_who_reads_them(tmp_path: Path) -> None:
    with opened(tmp_path) as (ledger, store), pytest.raises(ConfigError, match="nothing reads them"):
        ReplayDataset(ledger, store, SPEC, CONFIG)


def test_the_labels_name_their_model_and_are_written_once(tmp_path: Path) -> None:
    with opened(tmp_path, episode("e1", "unjudged")) as (ledger, _):
        model = label(ledger, "classifier", {"e1": 0.75})
        rows = rows_of(ledger, "e1")
        labels = ModelLabels(ledger, "classifier")
        steps = {row: place.steps for row, place in ledger.places(rows).items()}
        assert {row: tuple(one) for row, one in labels.read(rows).items()} == dict.fromkeys(rows, (0.75, 1))
        said = ledger.step_labels(rows, labels.names)
        assert said[rows[0]]["success_classifier_model"].tolist() == [1.0] * steps[rows[0]]
        revision = labels.labelled_since(0)[1]
        assert labels.put(model, dict.fromkeys(rows, 0.25), steps) == 0
        assert labels.labelled_since(revision) == ((), revision)
        newer = labels.adopt("cd", HALF, "newer")
        assert newer.number == 2
        with pytest.raises(InvalidDataError, match="labels of an old model are not written"):
            labels.put(model, dict.fromkeys(rows, 0.25), steps)
        assert labels.put(newer, dict.fromkeys(rows, 0.5), steps) == len(rows)
        assert labels.read(rows)[rows[0]].number == 2
        with pytest.raises(ConfigError, match="labels of an old model"):
            labels.adopt("ab", HALF, "old")
        assert labels.adopt("ab", HALF, "old", as_newest=True).number == 3


@pytest.mark.parametrize("score", [np.nan, np.inf, 1.5])
def test_a_score_that_is_none_writes_nothing(tmp_path: Path, score: float) -> None:
    with opened(tmp_path, episode("e1", "unjudged"), episode("e2", "unjudged")) as (ledger, _):
        with pytest.raises(InvalidDataError, match="Nothing of it is written"):
            label(ledger, "classifier", {"e1": 0.5, "e2": score})
        assert ModelLabels(ledger, "classifier").read(rows_of(ledger, "e1")) == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sources": ()}, "one or more"),
        ({"sources": ("outcome", "outcome")}, "each once"),
        ({"sources": ("outcom",)}, "no source 'outcom'"),
        ({"sources": ("outcome", "classifier")}, "no single model's word counts"),
        ({"sources": ("outcome",), "doubt": True}, "none among the sources"),
        ({"sources": ("simulator",)}, "success_return"),
        ({"success_return": 1.0}, "success_return"),
        ({"sources": ("simulator",), "success_return": float("nan")}, "finite"),
    ],
)
def test_sources_that_cannot_work_are_refused(options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RewardConfig(**options).require_whole()


def test_another_packages_model_is_found_by_name(monkeypatch, tmp_path: Path) -> None:
    kinds = registry.known()
    monkeypatch.setattr(registry, "known", lambda: kinds | {"mine": kinds["classifier"]})
    registry.require_kind("mine")
    with pytest.raises(ConfigError, match="no reward model 'clasifier'"):
        registry.require_kind("clasifier")
