from cloud_learner.operator.view_models import UNAIDED_EPISODES, UnaidedSuccess


def test_nothing_is_said_before_the_first_episode():
    unaided = UnaidedSuccess()
    unaided.add(1, "aborted", helped=False)
    assert unaided.summary() is None


def test_help_is_no_success_and_the_newest_count():
    unaided = UnaidedSuccess()
    for version, outcome, helped in ((1, "success", False), (2, "success", True), (3, "failure", False)):
        unaided.add(version, outcome, helped=helped)
    unaided.add(4, "success", helped=False)
    assert unaided.summary() == {"success": 0.5, "episodes": 4, "versions": [1, 4]}
    for _ in range(UNAIDED_EPISODES):
        unaided.add(9, "success", helped=False)
    assert unaided.summary() == {"success": 1.0, "episodes": UNAIDED_EPISODES, "versions": [9, 9]}


def test_an_episode_that_ended_as_somebody_handed_back_counts_against_the_policy():
    unaided = UnaidedSuccess()
    unaided.add(1, "success", helped=False)
    unaided.add(1, "unjudged", helped=True)
    unaided.add(1, "unjudged", helped=False)
    unaided.add(1, "aborted", helped=True)
    assert unaided.summary() == {"success": 0.5, "episodes": 2, "versions": [1, 1]}
