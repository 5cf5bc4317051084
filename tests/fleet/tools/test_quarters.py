"""Quarters of a run, by when episodes ended."""

from cloud_learner.buffer.ledger.rows import EpisodeRow
from fleet.tools.report import quarters


def episode(ended_s: float, outcome: str = "success", human_steps: int = 0, interventions: int = 0) -> EpisodeRow:
    ended_ns = int(ended_s * 1e9)
    return EpisodeRow(
        number=1,
        id="e",
        robot="r",
        spec_hash="h",
        task="a",
        seed=0,
        source="online",
        started_ns=0,
        outcome=outcome,
        steps=100,
        human_steps=human_steps,
        interventions=interventions,
        segments=1,
        bytes=1,
        newest_row=1,
        committed_ns=0,
        wall_ns=ended_ns,
        pruned_ns=0,
    )


def test_help_is_summed_by_quarter():
    found = quarters(
        [
            episode(100, human_steps=60, interventions=3),
            episode(101, "failure"),
            episode(102, "aborted", human_steps=30, interventions=1),
            episode(119),
            episode(135, ""),
            episode(140),
            episode(140, "success", human_steps=10, interventions=1),
        ]
    )
    assert [quarter["episodes"] for quarter in found] == [3, 1, 0, 2]
    assert found[0] == {
        "episodes": 3,
        "steps": 300,
        "interventions_per_episode": 1.3333,
        "human_share": 0.3,
        "unaided_success": 0.0,
    }
    assert found[2]["unaided_success"] is found[2]["human_share"] is None
    assert found[3]["unaided_success"] == 0.5


def test_help_that_nobody_judged_is_no_success_of_the_policy():
    found = quarters([episode(1), episode(1, "unjudged", human_steps=10), episode(1, "unjudged")])
    assert found[0]["unaided_success"] == 0.5


def test_without_an_episode_there_is_no_quarter():
    assert quarters([episode(3, "")]) == []
