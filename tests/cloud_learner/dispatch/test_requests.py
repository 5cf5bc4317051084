from __future__ import annotations

import pytest

from cloud_learner.dispatch.requests import check_names, check_request
from wire.errors import ConfigError
from wire.messages.fleet import JobRequest


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (JobRequest("", "rollout", ("a",)), "id: '' is no name"),
        (JobRequest("a/b", "rollout", ("a",)), "id: 'a/b' is no name"),
        (JobRequest("web-1", "rollout", ("a",)), "id: 'web-1' is kept for those who are no job"),
        (JobRequest("j", "rollout", ("a" * 101,)), "tasks: 'aaa"),
        (JobRequest("j", "rollout", ("a",) * 257), "tasks: 257 names; give up to 256"),
    ],
)
def test_names_that_a_job_cannot_have_are_refused_with_the_field_named(request_: JobRequest, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_names(request_)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (JobRequest("j", "rolout", ("a",)), "job 'j': kind: there is no 'rolout'. Did you mean 'rollout'"),
        (JobRequest("j", "rollout", ()), "job 'j': tasks: name at least one"),
        (JobRequest("j", "rollout", ("a",), robots=-1), "job 'j': robots is -1"),
        (JobRequest("j", "rollout", ("a",), priority=80), "job 'j': priority is 80"),
        (JobRequest("j", "rollout", ("a",), first_seed=500_000), "job 'j': first_seed: only an evaluation"),
        (JobRequest("j", "evaluation", ("a",)), "job 'j': episodes: an evaluation needs"),
        (JobRequest("j", "evaluation", ("a",), episodes=3, first_seed=999_999), "first_seed: seeds 999999 to 1000001"),
    ],
)
def test_a_job_that_cannot_work_is_refused_with_the_field_named(request_: JobRequest, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_request(request_)
    assert said in str(caught.value)
