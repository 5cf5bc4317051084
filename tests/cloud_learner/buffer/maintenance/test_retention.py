"""Which episodes are forgotten: the rule alone, without a buffer."""

from __future__ import annotations

import msgspec
import pytest

from cloud_learner.buffer.ledger.rows import KeptEpisode
from cloud_learner.buffer.maintenance.retention import Bound, Retention
from wire.errors import ConfigError

DAY = 24 * 3600 * 10**9
NOW = 100 * DAY


def episode(name: str, days: float = 50, **facts: object) -> KeptEpisode:
    """100 bytes that came so many days ago, of the policy on task `push`."""
    usual = {"task": "push", "source": "online", "outcome": "success", "human_steps": 0, "segments": 1, "bytes": 100}
    return KeptEpisode(name, **{**usual, **facts}, wall_ns=int(NOW - days * DAY))  # type: ignore[arg-type]


def gone(retention: Retention, *episodes: KeptEpisode) -> str:
    return " ".join(one.id for one in retention.choose(episodes, NOW))


def test_nothing_is_forgotten_unasked() -> None:
    assert not Retention().bounded
    assert gone(Retention(), episode("a"), episode("b", 9999)) == ""


def test_below_all_sizes_nothing_can_go_unless_age_or_outcome_says_so() -> None:
    sizes = Retention(
        max_bytes=1000, by_task={"push": Bound(max_bytes=500)}, by_source={"online": Bound(max_bytes=700)}
    )
    assert [sizes.may_forget(size) for size in (0, 499, 500, 1000)] == [False, False, True, True]
    assert Retention(max_age_s=1).may_forget(0) and Retention(drop_outcomes=("failure",)).may_forget(0)
    assert Retention(by_source={"online": Bound(max_age_s=1)}).may_forget(0)


def test_human_data_goes_last_and_only_when_it_may() -> None:
    some = (
        episode("demo", source="demonstration"),
        episode("helped", human_steps=3),
        episode("p1"),
        episode("p2"),
    )
    # the oldest of the policy's first
    assert gone(Retention(max_bytes=300), *some) == "p1"
    assert gone(Retention(max_bytes=0), *some) == "p1 p2"
    assert gone(Retention(max_bytes=100, keep_human=False), *some) == "p1 p2 helped"
    assert gone(Retention(max_bytes=100, keep_human=False, keep_demonstrations=False), *some) == "p1 p2 demo"
    assert gone(Retention(max_bytes=0, keep_human=False, keep_demonstrations=False), *some) == "p1 p2 demo helped"


def test_human_data_that_fills_the_budget_alone_is_said() -> None:
    some = (episode("helped", human_steps=3, bytes=10**9), episode("p"))
    assert Retention(max_bytes=2e9).warning(some) == Retention().warning(some) == ""
    kept = Retention(max_bytes=5e8).warning(some)
    assert "fill the 500 MB of the buffer alone: nothing else stays there. Raise max_bytes, or let" in kept
    assert "the oldest of them go there. Raise max_bytes." in Retention(
        max_bytes=1, keep_human=False, keep_demonstrations=False
    ).warning(some)


def test_human_data_that_fills_the_budget_of_a_task_or_a_source_is_said() -> None:
    some = (episode("helped", human_steps=3, bytes=10**9), episode("p"), episode("other", task="lift", bytes=10**9))
    full = Bound(max_bytes=5e8)
    assert "fill the 500 MB of task 'push' alone" in Retention(by_task={"push": full, "lift": full}).warning(some)
    assert "fill the 500 MB of source 'online' alone" in Retention(by_source={"online": full}).warning(some)
    both = Retention(max_bytes=1e9, by_task={"push": full}).warning(some)
    assert "fill the 500 MB of task 'push' and the 1000 MB of the buffer alone" in both
    assert Retention(by_task={"lift": full}, by_source={"evaluation": full}).warning(some) == ""


def test_people_are_not_named_where_they_push_nothing_out() -> None:
    assert Retention(max_bytes=0).warning([episode("p")]) == Retention(max_bytes=0).warning([]) == ""
    demos = Retention(by_source={"demonstration": Bound(max_bytes=1)}, keep_human=False, keep_demonstrations=False)
    assert demos.warning([episode("d", source="demonstration")]) == ""


def test_some_of_each_task_stay() -> None:
    some = [episode(f"a{n}", task="a") for n in range(4)] + [episode(f"b{n}", task="b") for n in range(2)]
    assert gone(Retention(max_bytes=0, min_episodes_per_task=2), *some) == "a0 a1"
    assert gone(Retention(max_age_s=1, min_episodes_per_task=3), *some) == "a0"
    assert gone(Retention(drop_outcomes=("success",), min_episodes_per_task=1), *some) == "a0 a1 a2 b0"


def test_a_task_and_a_source_have_bounds_of_their_own() -> None:
    some = (
        episode("a1", task="a"),
        episode("b1", task="b"),
        episode("a2", task="a"),
        episode("e1", task="b", source="evaluation"),
        episode("a3", 1, task="a"),
        episode("e2", 1, source="evaluation"),
    )
    assert gone(Retention(by_task={"a": Bound(max_bytes=250)}), *some) == "a1"
    assert gone(Retention(by_source={"evaluation": Bound(max_age_s=2 * 86400)}), *some) == "e1"
    # what one bound took counts for the next
    both = Retention(max_bytes=300, by_task={"a": Bound(max_bytes=100)}, by_source={"evaluation": Bound(max_age_s=0)})
    assert gone(both, *some) == "e1 e2 a1 a2"


def test_outcomes_and_an_episode_that_runs() -> None:
    some = (
        episode("good"),
        episode("bad", outcome="failure"),
        episode("runs", 0.01, outcome=""),
        episode("left", 1, outcome=""),
        # the wall clock was set back by a day
        episode("runs on", -1, outcome=""),
    )
    assert gone(Retention(drop_outcomes=("failure",)), *some) == "bad"
    assert gone(Retention(max_bytes=0, keep_outcomes=("success",)), *some) == "bad left"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_bytes": -1}, "max_bytes -1 is negative"),
        ({"by_source": {"onlin": {}}}, "'onlin' is none of .* Did you mean 'online'"),
        ({"drop_outcomes": ["fail"]}, "'fail' is none of success, failure, aborted"),
    ],
)
def test_what_cannot_be_is_named(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        msgspec.convert(given, Retention)
