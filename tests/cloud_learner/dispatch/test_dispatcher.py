"""The scheduler in the gateway: robots come and go, jobs are handed out and counted once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from hal.scheduler.records import job_of
from tests.cloud_learner.dispatch.hall import TASKS, Hall, canary, page
from wire.errors import DiskFullError
from wire.messages.fleet import AcquireLease, CancelJob, Preempted, RenewLease, Requirement, SubmitJob
from wire.messages.gateway import Hello, Job, VersionAvailable


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    made = Hall(tmp_path)
    yield made
    made.ledger.close()


# --- robots and the standing job --------------------------------------------------------------------------------------


def test_a_robot_works_on_the_standing_job_by_a_lease_that_its_reports_renew(hall: Hall) -> None:
    edge = hall.edge("robot-0", site="lab")
    assert edge.job is not None and job_of(edge.job.id) == "main" and set(edge.job.tasks) == set(TASKS)
    hall.pass_time(60.0)
    state = hall.robots(hall.peer())["robot-0"]
    assert (state.health, state.job, state.capabilities.site) == ("ready", "main", "lab")
    assert state.lease is not None
    assert (state.lease.holder, state.lease.purpose, state.lease.number) == ("main", "rollout", edge.job.lease)
    assert hall.jobs(hall.peer())["main"].robots == ("robot-0",)


def test_a_lost_robots_lease_returns_and_so_does_the_robot(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(2.0)
    hall.edges.clear()
    hall.pass_time(6.0)
    assert hall.robots(hall.peer())["robot-0"].health == "lost"
    hall.pass_time(12.0)
    assert hall.lease("robot-0") is None
    assert hall.jobs(hall.peer())["main"].phase == "waiting"
    hall.edges.append(edge)
    hall.pass_time(30.0)
    assert hall.lease("robot-0") == ("main", "rollout")
    assert edge.job is not None and job_of(edge.job.id) == "main"


def test_what_was_practised_is_still_counted_by_the_next_gateway(hall: Hall) -> None:
    hall.edge("robot-0")
    hall.pass_time(5.0, work=True)
    main = hall.jobs(hall.peer())["main"]
    assert 0 < main.successes <= main.episodes
    hall = hall.killed()
    again = hall.jobs(hall.peer())["main"]
    assert (again.episodes, again.successes) == (main.episodes, main.successes)
    hall.pass_time(3.0, work=True)
    assert hall.jobs(hall.peer())["main"].episodes > main.episodes
    hall.ledger.close()


def test_an_unwell_robot_is_told_to_rest_and_gets_work_again(hall: Hall) -> None:
    edge, other = hall.edge("robot-0"), hall.edge("robot-1")
    edge.fault = "the driver does not answer"
    hall.pass_time(30.0)
    assert edge.job is not None and edge.job.tasks == ()
    state = hall.robots(hall.peer())["robot-0"]
    assert (state.health, state.reason, state.lease) == ("draining", "the driver does not answer", None)
    card = next(c for c in hall.view.snapshot()["robots"] if c["name"] == "robot-0")
    assert (card["health"], card["health_reason"]) == ("draining", "the driver does not answer")
    edge.fault = ""
    hall.pass_time(20.0)
    assert edge.job.tasks and other.job is not None and other.job.tasks
    assert hall.lease("robot-0") == ("main", "rollout")


def test_seeds_stay_apart_and_go_on_after_a_restart_of_the_gateway(hall: Hall) -> None:
    first, second = hall.edge("robot-0"), hall.edge("robot-1")
    hall.pass_time(5.0, work=True)
    assert len(first.done) == 5
    hall = hall.killed()
    # the second one comes back first
    for edge in (second, first):
        edge.pid += 1
        edge.welcomed = False
        edge.hello()
    hall.pass_time(5.0, work=True)
    for edge, lane in ((first, 500_000), (second, 505_000)):
        seeds = [seed for _, _, seed in edge.done]
        assert sorted(seeds) == list(range(lane, lane + 10))
    hall.ledger.close()


def test_a_robot_that_can_do_none_of_the_tasks_is_refused_with_the_nearest(hall: Hall) -> None:
    edge = hall.edge("robot-0", tasks=("reech",))
    assert "tasks: robot 'robot-0' can do reech" in edge.refused
    assert "Did you mean 'reach'?" in edge.refused


def test_a_job_that_was_not_heard_is_told_again(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    told = edge.job
    edge.job = None
    hall.clock.advance(4_000_000_000)
    edge.status(episode="another")
    hall.gateway.poll()
    edge.poll()
    assert edge.coming is not None and told is not None and edge.coming.id == told.id


# --- two robots of one name -------------------------------------------------------------------------------------------


def test_a_second_robot_of_one_name_is_refused_and_the_first_works_on(hall: Hall) -> None:
    first = hall.edge("robot-0")
    hall.pass_time(1.0, work=True)
    heard = len(first.received)
    second = hall.edge("robot-0@2", pid=8, site="kitchen")
    assert second.refused.startswith("name: there is a robot 'robot-0' already")
    assert "process 7" in second.refused and "(kitchen), process 8" in second.refused
    assert second.job is None and not second.welcomed
    hall.edges.remove(second)
    hall.pass_time(2.0, work=True)
    assert [type(m).__name__ for m in first.received[heard:] if isinstance(m, Job | Hello)] == []
    assert len(first.done) == 3 and hall.lease("robot-0") == ("main", "rollout")
    refusals = [e for e in hall.view.snapshot()["events"] if e["kind"] == "refused"]
    second.hello()
    hall.gateway.poll()
    assert [e for e in hall.view.snapshot()["events"] if e["kind"] == "refused"] == refusals


def test_the_second_one_is_let_in_when_the_first_is_gone(hall: Hall) -> None:
    first = hall.edge("robot-0")
    hall.pass_time(1.0)
    hall.edges.remove(first)
    second = hall.edge("robot-0@2", pid=8)
    assert second.refused
    for _ in range(4):
        hall.clock.advance(1_000_000_000)
        second.hello()
        hall.gateway.poll()
        second.poll()
    assert second.welcomed and second.coming is not None and job_of(second.coming.id) == "main"


def test_the_same_robot_comes_back_by_another_line_at_once(hall: Hall) -> None:
    first = hall.edge("robot-0")
    hall.pass_time(1.0)
    hall.edges.remove(first)
    again = hall.edge("robot-0@2", pid=7)
    assert again.welcomed and again.job is not None and first.job is not None
    assert again.job.id == first.job.id


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_a_canary_pins_its_version_examines_held_out_seeds_once_and_becomes_a_measurement(hall: Hall) -> None:
    edge, other = hall.edge("robot-0"), hall.edge("robot-1")
    for number in (1, 2, 3):
        hall.publish(number)
    hall.pass_time(1.0)
    console = hall.peer()
    request = canary(2, requirement=Requirement(robots=("robot-0",)))
    assert hall.ask(console, SubmitJob(5, request)).refused == ""
    hall.pass_time(1.0)
    assert edge.job is not None and other.job is not None
    assert (edge.job.kind, edge.job.version, edge.version) == ("evaluation", 2, 2)
    assert (other.job.kind, other.version) == ("rollout", 3)
    hall.publish(4)
    hall.pass_time(0.4)
    assert (edge.version, other.version) == (2, 4)
    hall.pass_time(20.0, work=True)
    state = hall.jobs(console)["canary"]
    assert (state.phase, state.episodes, state.successes) == ("done", 6, 6)
    examined = [(task, seed) for job, task, seed in edge.done if job_of(job) == "canary"]
    assert Counter(examined) == {(task, 1_000_000 + n): 1 for task in TASKS for n in range(3)}
    # afterwards it follows the newest version and practises again
    assert edge.version == 4 and job_of(edge.job.id) == "main" and edge.job.kind == "rollout"
    (row,) = hall.ledger.evaluations()
    assert (row.label, row.number, row.episodes, row.success) == ("canary", 2, 3, {"push": 1.0, "reach": 1.0})
    assert hall.view.snapshot()["measured"]["canary"]["mean"] == 1.0
    assert hall.view.snapshot()["curve"] == []


def test_what_a_person_did_is_no_measurement(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.publish(1)
    console = hall.peer()
    hall.ask(console, SubmitJob(1, canary(episodes=2, tasks=("reach",))))
    hall.pass_time(1.0)
    edge.episode(human=True)
    hall.pass_time(1.0)
    assert hall.jobs(console)["canary"].episodes == 0
    hall.pass_time(60.0, work=True)
    assert hall.jobs(console)["canary"].phase == "done"
    assert hall.ledger.evaluations()[0].success == {"reach": 1.0}


def test_requests_that_cannot_be_met_are_refused_with_the_field(hall: Hall) -> None:
    hall.edge("robot-0")
    console = hall.peer()
    for request, words in (
        (canary(), "version: there is none yet"),
        (canary(tasks=("reech",)), "tasks: this fleet does not know 'reech'. Did you mean 'reach'?"),
        (canary(kind="evaluate"), "kind"),
        (canary(kind="rollout", version=3), "version: only an evaluation"),
    ):
        assert words in hall.ask(console, SubmitJob(1, request)).refused
    hall.publish(1)
    assert "version: there is no policy version 7" in hall.ask(console, SubmitJob(1, canary(7))).refused
    assert "episodes" in hall.ask(console, SubmitJob(1, canary(1, episodes=0))).refused
    assert "no job 'canary'" in hall.ask(console, CancelJob(1, "canary")).refused
    assert "it ends with the gateway" in hall.ask(console, CancelJob(1, "main")).refused
    assert list(hall.jobs(console)) == ["main"]


def test_a_job_waits_with_the_reason_and_submitting_it_again_changes_nothing(hall: Hall) -> None:
    hall.edge("robot-0", site="lab")
    hall.publish(1)
    console = hall.peer()
    request = canary(1, requirement=Requirement(site="kitchen"))
    hall.ask(console, SubmitJob(1, request))
    hall.ask(console, SubmitJob(2, msgspec.structs.replace(request, episodes=99)))
    state = hall.jobs(console)["canary"]
    assert (state.phase, state.request.episodes) == ("waiting", 3)
    assert "site: 'robot-0' stands at 'lab', not at 'kitchen'" in state.note
    assert hall.ask(console, CancelJob(3, "canary")).jobs[0].phase == "cancelled"


def test_an_episode_counts_once_however_often_it_comes(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.publish(1)
    console = hall.peer()
    hall.ask(console, SubmitJob(1, canary(episodes=5, tasks=("reach",))))
    hall.pass_time(1.0)
    segment = edge.episode()
    assert segment is not None
    for _ in range(3):
        edge.channel.send(segment)
    hall.pass_time(1.0)
    assert hall.jobs(console)["canary"].episodes == 1
    hall = hall.killed()
    edge.channel.send(segment)
    hall.pass_time(1.0)
    edge.channel.send(segment)
    hall.pass_time(1.0)
    assert hall.jobs(hall.peer())["canary"].episodes == 1
    hall.ledger.close()


def test_a_full_disk_stops_neither_robots_nor_the_count(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = hall.edge("robot-0")
    hall.publish(1)
    console = hall.peer()
    hall.ask(console, SubmitJob(1, canary(episodes=2, tasks=("reach",))))
    hall.pass_time(1.0)

    full = True
    for name in ("count_for_job", "end_job", "add_evaluation", "keep_leases"):

        def note(*arguments: object, real: Callable[..., object] = getattr(hall.ledger, name)) -> object:
            if full:
                raise DiskFullError("no space left")
            return real(*arguments)

        monkeypatch.setattr(hall.ledger, name, note)
    hall.pass_time(10.0, work=True)
    assert hall.ledger.evaluations() == ()
    assert "no space left" in hall.ask(console, AcquireLease(2, "robot-0", "maintenance", 0, 5.0)).refused
    assert edge.done
    full = False
    hall.pass_time(1.0)
    assert [row.label for row in hall.ledger.evaluations()] == ["canary"]
    assert hall.ledger.jobs()[0].phase == "done"


# --- killed in the middle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_kills_lose_no_job_count_nothing_twice_and_give_no_number_twice(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    hall = Hall(tmp_path)
    edges = [hall.edge(f"robot-{n}") for n in range(2)]
    hall.publish(1)
    hall.publish(2)
    client = hall.peer()
    for name, version in (("one", 1), ("two", 2)):
        request = canary(version, episodes=3, id=name, robots=2, first_seed=2_000_000)
        assert not hall.ask(client, SubmitJob(1, request)).refused
    numbers: list[int] = []
    for _ in range(25):
        hall.pass_time(draw.uniform(0.2, 2.0), work=True)
        event = draw.random()
        if event < 0.25:
            hall = hall.killed()
        elif event < 0.35:
            edge = draw.choice(edges)
            edge.pid += 10
            edge.job = edge.coming = None
            edge.welcomed = False
            edge.hello()
        elif event < 0.5:
            lease = hall.ask(hall.peer(), AcquireLease(1, draw.choice(edges).name, "check", 0, 1.0)).lease
            if lease is not None:
                numbers.append(lease.number)
    hall.pass_time(80.0, work=True)
    states = hall.jobs(hall.peer())
    for name, version in (("one", 1), ("two", 2)):
        assert (states[name].phase, states[name].episodes) == ("done", 6), states[name]
        counted = hall.ledger.episodes_of_job(name)
        assert Counter((row.task, row.seed) for row in counted) == {
            (task, 2_000_000 + n): 1 for task in TASKS for n in range(3)
        }
        assert [row.number for row in hall.ledger.evaluations()].count(version) == 1
    assert numbers == sorted(set(numbers))
    assert all(hall.lease(edge.name) == ("main", "rollout") for edge in edges)
    hall.ledger.close()


def test_leases_outlive_the_gateway_under_their_own_numbers(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    console = hall.peer()
    lease = hall.ask(console, AcquireLease(1, "robot-0", "maintenance", 0, 10.0)).lease
    assert lease is not None
    hall.pass_time(1.0)
    assert edge.job is not None and edge.job.tasks == ()
    hall = hall.killed()
    hall.pass_time(3.0)
    assert edge.job.tasks == () and hall.lease("robot-0") == ("console", "maintenance")
    console = hall.peer()
    renewed = hall.ask(console, RenewLease(2, "robot-0", lease.number)).lease
    assert renewed is not None and renewed.number == lease.number
    hall.pass_time(12.0)  # no heartbeat any more
    assert [m.lease.number for m in hall.received(console) if isinstance(m, Preempted)] == [lease.number]
    assert hall.lease("robot-0") == ("main", "rollout") and edge.job.tasks
    assert edge.job.lease > lease.number
    hall.ledger.close()


# --- evaluations and people -------------------------------------------------------------------------------------------


def test_an_examination_goes_on_elsewhere_when_somebody_takes_the_robot(hall: Hall) -> None:
    first, second = hall.edge("robot-0"), hall.edge("robot-1")
    hall.publish(1)
    console = hall.peer()
    hall.ask(console, SubmitJob(1, canary(episodes=4, tasks=("reach",))))
    hall.pass_time(2.0, work=True)
    examined = next(e for e in (first, second) if e.job and e.job.kind == "evaluation")
    me = hall.desk.join()
    page(hall, me, "take_over", examined.name)
    hall.pass_time(30.0, work=True)
    assert hall.jobs(console)["canary"].phase == "done"
    assert hall.lease(examined.name) == (f"web-{me}", "operator")
    counted = hall.ledger.episodes_of_job("canary")
    assert Counter(row.seed for row in counted) == {1_000_000 + n: 1 for n in range(4)}
    assert len({row.robot for row in counted}) == 2


def test_a_version_that_is_announced_late_reaches_everybody_but_the_examined(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.publish(1)
    hall.pass_time(1.0)
    hall.ask(hall.peer(), SubmitJob(1, canary(1, episodes=50, tasks=("reach",))))
    hall.pass_time(1.0)
    hall.publish(2)
    hall = hall.killed()
    hall.pass_time(2.0)
    announced = [m.version.number for m in edge.received if isinstance(m, VersionAvailable)]
    assert edge.job is not None and edge.job.version == 1 and edge.version == 1, announced
    hall.ledger.close()
