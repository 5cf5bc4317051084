from __future__ import annotations

import pytest

from cloud_learner.dispatch.requests import check_names
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
