"""Jobs, what counts for them and leases in the ledger, on SQLite and PostgreSQL."""

import msgspec
import pytest
import sqlalchemy as sa

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import Journaled
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.errors import StorageError
from wire.messages.fleet import JobRequest, Requirement
from wire.types import Lease

SPEC = fake_spec()
REQUEST = JobRequest("canary", "evaluation", ("a", "b"), 2, 5, Requirement(site="lab"), version=3, submitter="console")


@pytest.fixture
def ledger(ledger_place):
    ledger = Ledger.open(ledger_place)
    ledger.see_robot("r1", SPEC, "clock", 5)
    yield ledger
    ledger.close()


def store(ledger, episode, outcome="success", source="evaluation", task="a"):
    (segment,) = fake_episode(SPEC, episode, steps=4, segment_steps=5000)
    of = msgspec.structs.replace(segment.episode, source=source, task=task, robot="r1")
    segment = msgspec.structs.replace(segment, episode=of, outcome=outcome, last=True)
    ledger.commit_segments([(segment, Journaled(1, 0, 100, "0" * 64), 10)], 11)


def lease(robot, number, holder="console"):
    return Lease(robot, holder, "maintenance", 50, 10**12, number, 60 * 10**9)


def test_a_job_is_entered_once_and_ends_once(ledger):
    assert ledger.add_job(REQUEST, 100)
    assert not ledger.add_job(msgspec.structs.replace(REQUEST, episodes=99), 200)
    assert ledger.add_job(JobRequest("other", "rollout", ("a",)), 300)
    first, second = ledger.jobs()
    assert (first.request, first.phase, first.submitted_wall_ns) == (REQUEST, "waiting", 100)
    assert second.number > first.number
    assert ledger.end_job("canary", "done", 400)
    assert not ledger.end_job("canary", "cancelled", 500)
    assert not ledger.end_job("unknown", "cancelled", 500)
    assert [(row.id, row.phase, row.ended_wall_ns) for row in ledger.jobs()] == [
        ("canary", "done", 400),
        ("other", "waiting", 0),
    ]


def test_open_jobs_are_all_told_and_of_the_others_the_newest(ledger):
    for number in range(6):
        ledger.add_job(JobRequest(f"job-{number}", "rollout", ("a",)), number)
    for number in (0, 1, 3, 4):
        ledger.end_job(f"job-{number}", "cancelled", 10)
    assert [row.id for row in ledger.jobs(ended=2)] == ["job-2", "job-3", "job-4", "job-5"]


def test_an_episode_counts_once_and_for_one_job(ledger):
    for name in ("canary", "other"):
        ledger.add_job(msgspec.structs.replace(REQUEST, id=name), 1)
    assert not ledger.count_for_job("canary", "e1", 2)  # not stored yet
    store(ledger, "e1")
    store(ledger, "e2", "failure", task="b")
    assert ledger.count_for_job("canary", "e1", 2)
    assert not ledger.count_for_job("canary", "e1", 3)
    assert not ledger.count_for_job("other", "e1", 3)
    assert ledger.count_for_job("canary", "e2", 4)
    assert [(row.id, row.task, row.outcome) for row in ledger.episodes_of_job("canary")] == [
        ("e1", "a", "success"),
        ("e2", "b", "failure"),
    ]
    assert ledger.episodes_of_job("other") == ()


def test_tasks_are_counted_by_source_without_the_aborted(ledger):
    for number, (outcome, task) in enumerate(
        [("success", "a"), ("failure", "a"), ("aborted", "a"), ("failure", "b"), ("success", "b"), ("success", "b")]
    ):
        store(ledger, f"e{number}", outcome, "online", task)
    store(ledger, "examined", "success", "evaluation", "a")
    assert ledger.task_counts("online") == {"a": (2, 1), "b": (3, 2)}
    assert ledger.task_counts("demonstration") == {}


def test_leases_are_kept(ledger):
    assert ledger.kept_leases() == ()
    ledger.keep_leases({"r1": lease("r1", 4), "r2": lease("r2", 7)}, 1)
    ledger.keep_leases({"r2": None, "r1": lease("r1", 5)}, 2)
    assert ledger.kept_leases() == (lease("r1", 5),)
    ledger.keep_leases({"r1": None}, 3)
    assert ledger.kept_leases() == ()


def test_a_ledger_of_before_gets_the_new_tables_when_it_is_opened_to_write(ledger_place):
    ledger = Ledger.open(ledger_place)
    ledger.see_robot("r1", SPEC, "clock", 5)
    with ledger.writing() as connection:
        for table in ("job_episodes", "jobs", "leases"):
            connection.execute(sa.text(f"DROP TABLE {table}"))
    ledger.close()
    reader = Ledger.open(ledger_place, read_only=True)
    with pytest.raises(StorageError):
        reader.jobs()
    reader.close()
    ledger = Ledger.open(ledger_place)
    assert ledger.jobs() == ()
    assert ledger.add_job(REQUEST, 1)
    assert ledger.robot("r1") is not None
    ledger.close()
