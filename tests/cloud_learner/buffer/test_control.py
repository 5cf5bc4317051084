"""Who was in control, from the actors of steps alone."""

import msgspec
import numpy as np

from cloud_learner.buffer.control import (
    NOBODY,
    RECOVERY,
    actor_index,
    arrival_lag,
    by_human,
    find_runs,
    is_recovery,
    is_takeover,
    largest_lag,
    marked_actor,
    rollout_steps,
    summarise_control,
)
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec

POLICY, HUMAN, SCRIPT, HOLD = range(4)


def count_interventions(segments):
    """Of an episode, from what is kept of its segments in order."""
    total, before = 0, NOBODY
    for segment in segments:
        total += segment.takeovers + is_takeover(before, segment.entry)
        before = segment.exit if segment.exit != NOBODY else before
    return total


def test_interventions_are_changes_from_the_policy_to_a_person():
    def count(*segments):
        found = [summarise_control(np.array(actors, np.uint8)) for actors in segments]
        return count_interventions(found)

    assert count([POLICY] * 5) == 0
    assert count([HUMAN] * 5) == 0
    assert count([POLICY, HUMAN, HUMAN, POLICY, SCRIPT]) == 2
    assert count([POLICY, HUMAN, SCRIPT, HUMAN]) == 1
    # a hold belongs to nobody
    assert count([POLICY, HOLD, HUMAN, HOLD, HUMAN]) == 1
    # the seam between segments counts, also across one that held all the time
    assert count([POLICY], [HUMAN]) == 1
    assert count([POLICY, HUMAN], [HUMAN, POLICY]) == 1
    assert count([POLICY], [HOLD, HOLD], [SCRIPT]) == 1
    assert count([HOLD], [HUMAN]) == 0


def test_interventions_do_not_depend_on_where_segments_are_cut():
    rng = np.random.default_rng(1)
    for _ in range(200):
        actors = rng.integers(0, 4, rng.integers(1, 40)).astype(np.uint8)
        cuts = np.sort(rng.integers(0, len(actors) + 1, rng.integers(0, 5)))
        parts = [summarise_control(part) for part in np.split(actors, cuts)]
        whole = summarise_control(actors)
        assert count_interventions(parts) == whole.takeovers
        assert sum(part.human_steps for part in parts) == whole.human_steps


def test_runs_say_the_same_as_the_steps():
    rng = np.random.default_rng(7)
    for length in (0, 1, 2, 50, 400):
        actor = rng.integers(0, 2, length).astype(np.uint8)
        version = np.cumsum(rng.random(length) < 0.1).astype(np.int32)
        runs = find_runs(actor, version)
        assert (runs.dtype, runs.shape[1]) == (np.int32, 4)
        first, count, who, which = runs.T
        assert first.tolist() == (np.cumsum(count) - count).tolist()
        assert np.array_equal(np.repeat(who, count), actor)
        assert np.array_equal(np.repeat(which, count), version)
        # no two neighbours are one
        assert ((who[1:] != who[:-1]) | (which[1:] != which[:-1])).all()


def test_a_recovery_is_a_humans_step_and_splits_its_run():
    plain = fake_episode(fake_spec(0), "e", steps=6, actor=[POLICY, HUMAN, HUMAN, HUMAN, HOLD, POLICY])[0]
    assert marked_actor(plain) is plain.actor, "old segments lack the field"
    marks = np.array([False, True, True, False, False, False])
    marked = marked_actor(msgspec.structs.replace(plain, recovery=marks))
    assert (marked.dtype, is_recovery(marked).tolist()) == (np.uint8, marks.tolist())
    assert actor_index(marked).tolist() == plain.actor.tolist()
    assert by_human(marked).tolist() == by_human(plain.actor).tolist() == [False, True, True, True, False, False]
    assert rollout_steps(marked, False).tolist() == rollout_steps(plain.actor, False).tolist()
    runs = find_runs(marked, plain.version)
    assert runs[:, 1:3].tolist() == [[1, POLICY], [2, HUMAN | RECOVERY], [1, HUMAN], [1, HOLD], [1, POLICY]]


def test_the_lag_of_a_segment_is_that_of_what_the_policy_did_by_itself():
    actor = np.array([POLICY, POLICY, HUMAN, HOLD, SCRIPT], np.uint8)
    version = np.array([5, 4, 0, 0, 0], np.int32)
    assert arrival_lag(version, 7).tolist() == [2, 3, 7, 7, 7]
    assert arrival_lag(version, 4).tolist() == [0, 0, 4, 4, 4]
    assert largest_lag(actor, version, False, 7) == 3
    assert largest_lag(actor, version, True, 7) == 0
    assert largest_lag(actor[2:], version[2:], False, 7) == 0
