"""The tokeniser's benchmark: that its data are what it says, that nothing is measured on what was fitted on."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.tokenizer import __main__ as tokenizer
from benchmarks.tokenizer.__main__ import SEARCHED, VQ, TokenizerTrial, data
from benchmarks.tokenizer.bins import BINS, Bins
from policies.tokens.tokenizer import TokenizerReport, report

SIZE = tokenizer.TokenizerSize((0,), (2, 1), (1, 1), (4, 2), 3.0, 12.0, (0.0,), 3)


def test_the_whole_body_has_25_dimensions_that_move_and_rest_at_their_own_times() -> None:
    assert sum(part.dimensions for part in data.WHOLE_BODY) == 25
    (quiet,), (loud,) = (data.whole_body(1, 30.0, 50, jitter, 3) for jitter in (0.0, 0.002))
    assert quiet.shape == (1500, 25)
    assert np.abs(quiet).max() <= 1
    assert np.std(loud - quiet) == pytest.approx(2 * 0.002, rel=0.02)
    moving = np.abs(np.diff(quiet, axis=0)) > 1e-4
    shares = moving.mean(0)
    assert (shares > 0.05).all()
    assert (shares < 0.98).all()
    left, right = moving[:, :7].any(1), moving[:, 7:14].any(1)
    assert (left & ~right).any()
    assert (right & ~left).any()
    # a gripper may snap; nothing else passes a tenth of its range within a step
    others = [dimension for dimension in range(25) if dimension not in (14, 15)]
    assert np.abs(np.diff(quiet[:, others], axis=0)).max() < 0.2 < np.abs(np.diff(quiet, axis=0)).max()
    # the base comes to rest after each reach
    assert (np.abs(quiet[:, 22:]).max(1) < 1e-6).mean() > 0.1
    assert np.array_equal(quiet, data.whole_body(1, 30.0, 50, 0.0, 3)[0])


def test_servos_of_two_arms_follow_within_their_limits() -> None:
    pytest.importorskip("gym_aloha")
    (path,) = data.aloha(1, 3.0, 0)
    assert path.shape == (150, 14)
    assert np.isfinite(path).all()
    assert np.ptp(path, axis=0).max() > 0.2
    assert (path[:, [6, 13]] > 0.015).all()
    assert (path[:, [6, 13]] < 0.065).all()


def test_the_experts_of_metaworld_act_until_they_are_done() -> None:
    pytest.importorskip("metaworld")
    made = data.metaworld(2, 0)
    assert all(40 < len(actions) <= 400 and actions.shape[1] == 4 for actions in made)
    assert all(np.abs(actions).max() <= 1 for actions in made)


def test_chunks_never_span_two_episodes() -> None:
    episodes = [np.full((7, 1), number, np.float32) for number in range(3)]
    found = data.chunks(episodes, 3, 2)
    assert found.shape == (9, 3, 1)
    assert (np.ptp(found, axis=1) == 0).all()


def test_bins_are_off_by_at_most_half_of_one() -> None:
    chunks = np.random.default_rng(0).uniform(-1, 1, (200, 5, 2)).astype(np.float32)
    bins = Bins.fit(chunks)
    inside = np.clip(chunks, bins.scaling.low, bins.scaling.high)
    found = report(bins, inside)
    assert found.tokens_max == found.tokens_mean == 10
    assert found.largest <= 0.501 / BINS
    assert found.mean_abs == pytest.approx(0.25 / BINS, rel=0.1)


@pytest.mark.slow
def test_a_seed_measures_every_tokeniser_on_other_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    body = tokenizer._body

    def noted(size: tokenizer.TokenizerSize, episodes: int, hz: int, jitter: float, seed: int) -> list[np.ndarray]:
        asked.append((episodes, jitter, seed))
        return body(size, episodes, hz, jitter, seed)

    monkeypatch.setattr(tokenizer, "_body", noted)
    found = tokenizer.one_seed(SIZE, 3, 5, None)
    assert asked == [(4, 0.002, 5), (2, 0.002, 1005)]
    assert next(iter(found)) == "bins"
    assert len(found) == 7
    tokens = {name: one.report.tokens_mean for name, one in found.items()}
    assert tokens["bins"] == 750 > tokens["DCT, no byte pairs"] > tokens["FAST, as published"] > tokens[SEARCHED]
    assert found["DCT, no byte pairs"].report.mean_abs == found["FAST, as published"].report.mean_abs
    assert tokens[VQ] == tokens[tokenizer.DENSE] == SIZE.stages
    assert found[SEARCHED].report.mean_abs < 0.012
    assert {one.report.chunks for one in found.values()} == {24}
    assert list(tokenizer.one_seed(SIZE, 3, 5, 0.0)) == [SEARCHED]


def test_goals_hold_only_if_the_longest_chunk_of_any_seed_is_short_enough() -> None:
    fine = TokenizerTrial(TokenizerReport(10, 40.0, 55.0, 60, 0.009, 0.013, 0.04, 0.2, 0.01), 0.1, 0.1, 30.0, 4096)
    tokens, error = tokenizer._goals(tokenizer.ROBOTS[2], SEARCHED, [fine])
    assert tokens.holds
    assert error.holds
    other = TokenizerTrial(TokenizerReport(10, 40.0, 55.0, 61, 0.0101, 0.013, 0.04, 0.2, 0.01), 0.1, 0.1, 30.0, 4096)
    tokens, error = tokenizer._goals(tokenizer.ROBOTS[2], SEARCHED, [fine, other])
    assert (tokens.value, tokens.holds) == (61, False)
    assert (error.value, error.holds) == (pytest.approx(1.01), False)
    row = tokenizer._row(tokenizer.ROBOTS[2], SEARCHED, [fine, other])
    assert (row["longest"], row["mean abs error, %"]) == (61, "0.95 (0.90 to 1.01)")
