from __future__ import annotations

import msgspec
import pytest

from hal.resource.lease import Leases, Priority
from hal.scheduler.records import REST, Decision, SchedulerConfig, job_of
from hal.scheduler.scheduler import Scheduler
from tests.hal.scheduler.fleets import capabilities, scheduler, status
from wire.errors import RejectedError
from wire.messages.fleet import JobRequest, Requirement
from wire.types import Lease

S = 1_000_000_000
MAIN = JobRequest("main", "rollout", ("a", "b"))


def canary(**rest: object) -> JobRequest:
    usual = {"id": "canary", "kind": "evaluation", "tasks": ("a", "b"), "episodes": 3, "robots": 1, "version": 7}
    return JobRequest(**{**usual, **rest})  # type: ignore[arg-type]


class Fleet:
    """A scheduler and robots that do what they are told at once."""

    def __init__(self, *robots: str, **rest: object) -> None:
        self.scheduler, self.leases = scheduler(**rest)
        self.now_ns = 0
        self.told: dict[str, Decision] = {}
        self.decisions: list[Decision] = []
        for robot in robots:
            self.scheduler.join(robot, capabilities(), 0)
            self.scheduler.report(status(robot), 0)

    def submit(self, request: JobRequest) -> None:
        self.scheduler.submit(request, self.now_ns)
        self.turn()

    def turn(self) -> list[Decision]:
        self.decisions = self.scheduler.step(self.now_ns)
        self.told.update((decision.robot, decision) for decision in self.decisions)
        return self.decisions

    def live(self, seconds: float, *silent: str, trouble: str = "") -> None:
        """Time passes; all but `silent` report that they do what they were told."""
        for _ in range(round(seconds * 2)):
            self.now_ns += S // 2
            for state in self.scheduler.robots(self.now_ns):
                if state.name not in silent:
                    job = self.told[state.name].job.id if state.name in self.told else ""
                    wrong = {"mode": "hold", "reason": "x", "fault": "broken"} if state.name == trouble else {}
                    self.scheduler.report(status(state.name, job=job, **wrong), self.now_ns)
            self.turn()

    def work(self, robot: str, episodes: int = 1, success: bool = True) -> list[str]:
        """The robot does so many episodes of what it is told."""
        counted = []
        for _ in range(episodes):
            job = self.told[robot].job
            done = self.begun = getattr(self, "begun", 0) if getattr(self, "on", "") == (robot, job.id) else 0
            self.on = (robot, job.id)
            source = "evaluation" if job.kind == "evaluation" else "online"
            task, seed = job.tasks[done % len(job.tasks)], job.first_seed + done
            self.begun = done + 1
            counted.append(self.scheduler.episode_done(robot, task, success, self.now_ns, seed, source))
            self.turn()
        return counted

    def on_job(self, job: str) -> tuple[str, ...]:
        state = self.scheduler.job(job)
        assert state is not None
        return state.robots


def test_the_main_job_takes_all_robots_each_with_its_own_seeds_and_first_task() -> None:
    fleet = Fleet("r0", "r1", "r2")
    fleet.submit(MAIN)
    jobs = [fleet.told[robot].job for robot in ("r0", "r1", "r2")]
    assert [job.first_seed for job in jobs] == [500_000, 505_000, 510_000]
    assert [job.tasks[0] for job in jobs] == ["a", "b", "a"]
    assert [job.kind for job in jobs] == ["rollout"] * 3
    assert [job_of(job.id) for job in jobs] == ["main"] * 3
    assert [job.lease for job in jobs] == [1, 2, 3]
    assert fleet.turn() == []
    lease = fleet.leases.of("r1")
    assert lease is not None
    assert (lease.holder, lease.purpose, lease.priority, lease.ttl_ns) == ("main", "rollout", 10, 15 * S)


def test_named_robots_keep_their_lanes_whatever_the_order_they_come_in() -> None:
    fleet = Fleet("late", "r1", "r0", robots=("r0", "r1"))
    fleet.submit(MAIN)
    assert {name: told.job.first_seed for name, told in fleet.told.items()} == {
        "r0": 500_000,
        "r1": 505_000,
        "late": 510_000,
    }


def test_a_job_submitted_again_changes_nothing() -> None:
    fleet = Fleet("r0")
    fleet.submit(MAIN)
    again = fleet.scheduler.submit(msgspec.structs.replace(MAIN, tasks=("other",)), 5)
    assert again.request == MAIN
    assert fleet.turn() == []


def test_an_evaluation_preempts_the_main_job_does_its_seeds_and_gives_the_robot_back() -> None:
    fleet = Fleet("r0", "r1")
    fleet.submit(MAIN)
    before = fleet.told["r1"].job
    fleet.submit(canary())
    job = fleet.told["r1"].job
    assert (job.kind, job.version, job.tasks, job.first_seed, job.episodes) == ("evaluation", 7, ("a",), 1_000_000, 3)
    assert fleet.on_job("main") == ("r0",)
    assert fleet.work("r1", 3) == ["canary"] * 3
    job = fleet.told["r1"].job
    assert (job.tasks, job.first_seed, job.episodes) == (("b",), 1_000_000, 3)
    assert job.id != before.id
    assert fleet.work("r1", 3, success=False) == ["canary"] * 3
    state = fleet.scheduler.job("canary")
    assert state is not None
    assert (state.phase, state.episodes, state.successes, state.robots) == ("done", 6, 3, ())
    assert fleet.on_job("main") == ("r0", "r1")
    after = fleet.told["r1"].job
    assert after.id != before.id
    assert after.first_seed in range(before.first_seed, before.first_seed + 3)


def test_finished_means_exactly_so_many_episodes_over_all_robots() -> None:
    fleet = Fleet("r0", "r1", "r2")
    fleet.submit(JobRequest("short", "rollout", ("a",), episodes=7))
    assert sum(fleet.told[robot].job.episodes for robot in fleet.on_job("short")) <= 7
    done = 0
    while (state := fleet.scheduler.job("short")) is not None and state.phase != "done":
        done += len(fleet.work(state.robots[0]))
        assert done <= 7
    assert done == 7
    assert fleet.told["r0"].job.tasks == ()


def test_what_no_robot_can_do_waits_and_says_why() -> None:
    fleet = Fleet("r0")
    fleet.submit(JobRequest("far", "rollout", ("a",), requirement=Requirement(cameras=("wrist",))))
    state = fleet.scheduler.job("far")
    assert state is not None
    assert (state.phase, state.note) == ("waiting", "cameras: 'r0' has no 'wrist' (it has none)")
    fleet.scheduler.join("r1", capabilities(cameras=("wrist",)), fleet.now_ns)
    fleet.turn()
    assert fleet.on_job("far") == ("r1",)
    fleet.submit(JobRequest("named", "rollout", ("a",), requirement=Requirement(robots=("r9",))))
    state = fleet.scheduler.job("named")
    assert state is not None
    assert "robots: 'r0' is not one of 'r9'" in state.note


def test_a_scarce_robot_is_kept_for_what_only_it_can_do() -> None:
    fleet = Fleet()
    for name, cameras in (("a-scarce", ("wrist",)), ("b-plain", ())):
        fleet.scheduler.join(name, capabilities(cameras=cameras), 0)
        fleet.scheduler.report(status(name), 0)
    fleet.scheduler.submit(JobRequest("any", "teleoperation", ("a",), robots=1), 0)
    fleet.scheduler.submit(
        JobRequest("scarce", "teleoperation", ("a",), robots=1, requirement=Requirement(cameras=("wrist",))), 0
    )
    fleet.turn()
    assert (fleet.on_job("any"), fleet.on_job("scarce")) == (("b-plain",), ("a-scarce",))


def test_a_job_moves_to_an_idle_robot_when_its_own_is_needed_elsewhere() -> None:
    fleet = Fleet()
    fleet.scheduler.join("scarce", capabilities(cameras=("wrist",)), 0)
    fleet.submit(JobRequest("any", "teleoperation", ("a",), robots=1))
    assert fleet.on_job("any") == ("scarce",)
    fleet.scheduler.join("plain", capabilities(), 0)
    fleet.turn()
    fleet.submit(JobRequest("needs", "rollout", ("a",), robots=1, requirement=Requirement(cameras=("wrist",))))
    fleet.live(1)
    assert (fleet.on_job("any"), fleet.on_job("needs")) == (("plain",), ("scarce",))


def test_a_silent_robot_keeps_its_job_for_its_lease_then_another_does_the_work() -> None:
    fleet = Fleet("r0")
    fleet.submit(canary(tasks=("a",), episodes=4))
    fleet.work("r0", 1)
    fleet.scheduler.join("r1", capabilities(), fleet.now_ns)
    fleet.live(10, "r0")
    assert fleet.on_job("canary") == ("r0",)
    fleet.live(6, "r0")
    assert fleet.on_job("canary") == ("r1",)
    job = fleet.told["r1"].job
    assert (job.first_seed, job.episodes) == (1_000_001, 3), "what was done is not done again"
    assert fleet.leases.of("r0") is None


def test_a_robot_back_from_a_cut_line_goes_on_as_if_nothing_had_been() -> None:
    fleet = Fleet("r0")
    fleet.submit(MAIN)
    before = fleet.told["r0"].job
    fleet.live(40, "r0")
    assert fleet.on_job("main") == ()
    fleet.live(30)
    after = fleet.told["r0"].job
    assert (after.id, after.first_seed, after.tasks) == (before.id, before.first_seed, before.tasks)
    assert after.lease > before.lease


def test_a_robot_that_started_anew_gets_a_new_job_with_seeds_it_has_not_had() -> None:
    fleet = Fleet("r0")
    fleet.submit(MAIN)
    before = fleet.told["r0"].job
    fleet.work("r0", 5)
    fleet.now_ns += 3 * S
    fleet.scheduler.join("r0", capabilities(), fleet.now_ns, "another process", seeds_spent=9)
    fleet.turn()
    after = fleet.told["r0"].job
    assert after.id != before.id
    assert after.first_seed == 500_010


def test_an_unhealthy_robot_drains_rests_and_returns() -> None:
    fleet = Fleet("r0", "r1")
    fleet.submit(canary(tasks=("a",), episodes=8))
    (sick,) = fleet.on_job("canary")
    (other,) = {"r0", "r1"} - {sick}
    fleet.live(25, trouble=sick)
    assert fleet.on_job("canary") == (other,)
    assert (fleet.told[sick].job.id, fleet.told[sick].job.tasks) == (REST, ())
    assert "draining: broken" in fleet.told[sick].reason
    assert fleet.leases.of(sick) is None
    fleet.submit(MAIN)
    assert fleet.on_job("main") == ()
    fleet.live(9)
    assert fleet.on_job("main") == ()
    fleet.live(3)
    assert fleet.on_job("main") == (sick,)


def test_an_operator_takes_a_robot_at_once_and_it_goes_on_where_it_was() -> None:
    fleet = Fleet("r0")
    fleet.submit(MAIN)
    before = fleet.told["r0"].job
    lease, preempted = fleet.scheduler.acquire("r0", "ann", "correction", Priority.operator, 5 * S, 0, rest=False)
    assert preempted is not None
    assert (preempted.holder, lease.holder) == ("main", "ann")
    assert fleet.turn() == []
    assert fleet.on_job("main") == ()
    with pytest.raises(RejectedError, match="held by 'ann'"):
        fleet.scheduler.acquire("r0", "bob", "correction", Priority.operator, 5 * S, S)
    assert fleet.leases.renew("r0", lease.number, 4 * S).expires_ns == 9 * S
    fleet.scheduler.release("r0", lease.number, 5 * S)
    (decision,) = fleet.scheduler.step(5 * S)
    # Job is compared by identity
    assert msgspec.structs.astuple(decision.job)[:-1] == msgspec.structs.astuple(before)[:-1]
    assert decision.job.lease > lease.number


def test_a_lease_of_somebody_else_rests_the_robot_and_ends_by_itself() -> None:
    fleet = Fleet("r0")
    fleet.submit(MAIN)
    fleet.scheduler.acquire("r0", "console", "maintenance", 40, 5 * S, 0)
    (decision,) = fleet.turn()
    assert (decision.job.tasks, decision.reason) == ((), "held by console")
    fleet.live(4)
    assert fleet.on_job("main") == ()
    fleet.live(2)
    assert fleet.on_job("main") == ("r0",)
    with pytest.raises(RejectedError, match=r"there is no robot 'r9'\. Did you mean 'r0'"):
        fleet.scheduler.acquire("r9", "console", "maintenance", 40, S, 0)


def test_a_lease_from_before_a_restart_keeps_jobs_away() -> None:
    leases = Leases()
    leases.restore(Lease("r0", "console", "maintenance", 40, 5 * S, 17, 5 * S))
    found = Scheduler(leases)
    found.submit(MAIN, 0)
    for robot in ("r0", "r1"):
        found.join(robot, capabilities(), 0)
    decisions = {decision.robot: decision.job for decision in found.step(0)}
    assert decisions["r0"].tasks == ()
    assert decisions["r1"].lease == 18
    found.step(5 * S)
    state = found.job("main")
    assert state is not None
    assert "r0" in state.robots


def test_what_was_done_before_a_restart_is_not_done_again() -> None:
    fleet = Fleet("r0")
    done = [("a", 1_000_000, True), ("a", 1_000_002, False), ("b", 1_000_001, True)]
    fleet.scheduler.submit(canary(), 0, done)
    fleet.turn()
    found = []
    while (state := fleet.scheduler.job("canary")) is not None and state.phase != "done":
        job = fleet.told["r0"].job
        found += [(job.tasks[0], seed) for seed in range(job.first_seed, job.first_seed + job.episodes)]
        fleet.work("r0", job.episodes)
    assert sorted(found) == [("a", 1_000_001), ("b", 1_000_000), ("b", 1_000_002)]
    assert (state.episodes, state.successes) == (6, 5)
    all_done = [(task, seed, True) for task in "ab" for seed in range(1_000_000, 1_000_003)]
    assert fleet.scheduler.submit(canary(id="old"), 0, all_done).phase == "done"


def test_a_job_that_waits_behind_one_without_an_end_gets_a_robot_in_time() -> None:
    fleet = Fleet("r0")
    fleet.submit(MAIN)
    fleet.submit(JobRequest("low", "rollout", ("a",), episodes=2, robots=1, priority=8))
    fleet.live(60)
    assert fleet.on_job("low") == ()
    fleet.live(40)
    assert fleet.on_job("low") == ("r0",)
    fleet.work("r0", 2)
    assert fleet.on_job("main") == ("r0",)


def test_two_jobs_without_an_end_share_the_robots() -> None:
    fleet = Fleet(*(f"r{n}" for n in range(6)))
    fleet.submit(MAIN)
    fleet.submit(JobRequest("second", "rollout", ("a",)))
    fleet.live(10)
    assert (len(fleet.on_job("main")), len(fleet.on_job("second"))) == (3, 3)
    fleet.submit(JobRequest("one", "rollout", ("a",), robots=1))
    fleet.live(10)
    assert [len(fleet.on_job(job)) for job in ("one", "main", "second")] == [1, 3, 2]


def test_cancelling_frees_the_robots() -> None:
    fleet = Fleet("r0")
    fleet.submit(MAIN)
    assert fleet.scheduler.cancel("main", S).phase == "cancelled"
    (decision,) = fleet.turn()
    assert (decision.job.id, decision.reason) == (REST, "job 'main' is cancelled")
    assert fleet.leases.all() == ()
    with pytest.raises(RejectedError, match=r"no job 'mian'\. Did you mean 'main'"):
        fleet.scheduler.cancel("mian", S)


def test_tasks_are_spread_anew_when_a_robot_has_gone_through_them() -> None:
    fleet = Fleet("r0", counts={"a": (50, 25), "b": (50, 25)})
    fleet.submit(MAIN)
    before = fleet.told["r0"].job
    assert sorted(before.tasks) == ["a", "b"]
    fleet.work("r0", 2, success=False)
    seed = before.first_seed + 2
    for _ in range(20):
        job = fleet.told["r0"].job
        for task in job.tasks:
            fleet.scheduler.episode_done("r0", task, task == "a", fleet.now_ns, seed)
            seed += 1
        fleet.turn()
    after = fleet.told["r0"].job
    assert (after.id, after.first_seed) == (before.id, before.first_seed), "nothing restarts"
    assert after.tasks.count("b") > 2 * after.tasks.count("a") > 0


def test_a_robot_that_does_not_take_up_its_job_loses_it() -> None:
    fleet = Fleet("r0", config=SchedulerConfig(take_up_s=30.0))
    fleet.submit(canary())
    for second in range(1, 60):
        fleet.now_ns = second * S
        fleet.scheduler.report(status("r0", job="something old"), fleet.now_ns)
        fleet.turn()
        if fleet.decisions:
            break
    assert second == 45, "30 s of grace and what was left of the lease"


def test_episodes_that_were_never_stored_are_done_again() -> None:
    fleet = Fleet("r0")
    fleet.submit(canary(tasks=("a",)))
    job = fleet.told["r0"].job
    fleet.work("r0", 2)
    fleet.scheduler.report(status("r0", job=job.id, job_episodes=3), fleet.now_ns)
    fleet.live(29)
    assert fleet.told["r0"].job is job
    fleet.live(2)
    again = fleet.told["r0"].job
    assert (again.first_seed, again.episodes) == (1_000_002, 1)


def test_an_aborted_episode_uses_a_seed_and_counts_for_nothing() -> None:
    fleet = Fleet("r0")
    fleet.submit(canary(tasks=("a",)))
    job = fleet.told["r0"].job
    assert fleet.scheduler.episode_done("r0", "a", None, 0, 1_000_000, "evaluation") == ""
    assert fleet.scheduler.episode_done("r0", "a", True, 0, 1_000_001, "evaluation") == "canary"
    assert fleet.scheduler.episode_done("r0", "a", True, 0, 1_000_002, "evaluation") == "canary"
    # the robot does three, so one lies past its part
    assert fleet.scheduler.episode_done("r0", "a", True, 0, 1_000_003, "evaluation") == ""
    fleet.scheduler.report(status("r0", job=job.id, job_episodes=3), 0)
    fleet.turn()
    again = fleet.told["r0"].job
    assert (again.first_seed, again.episodes) == (1_000_000, 1)


def test_an_episode_of_another_job_is_not_taken_for_one_of_this() -> None:
    fleet = Fleet("r0")
    fleet.submit(MAIN)
    fleet.submit(canary())
    assert fleet.scheduler.episode_done("r0", "a", True, 0, 500_000) == "main", "it ended after the robot was needed"
    assert fleet.scheduler.episode_done("r0", "a", True, 0, 5, "demonstration") == ""
    assert fleet.scheduler.episode_done("r0", "a", True, 0, 1_000_000, "evaluation") == "canary"
    assert fleet.scheduler.episode_done("r0", "a", True, 0, 1_000_000, "evaluation") == "", "once"
    assert fleet.scheduler.balancer.episodes["a"] == 1


def test_a_turn_is_short_and_the_next_goes_on() -> None:
    fleet = Fleet(*(f"r{n}" for n in range(25)), config=SchedulerConfig(most_a_step=10))
    fleet.scheduler.submit(MAIN, 0)
    assert len([d for d in fleet.scheduler.step(0) if d.job.tasks]) == 10
    assert len([d for d in fleet.scheduler.step(0) if d.job.tasks]) == 10
    assert len([d for d in fleet.scheduler.step(0) if d.job.tasks]) == 5
    assert fleet.scheduler.step(0) == []


def test_ended_jobs_are_forgotten_after_a_while() -> None:
    fleet = Fleet(config=SchedulerConfig(kept=2))
    for n in range(4):
        fleet.submit(msgspec.structs.replace(MAIN, id=f"job-{n}"))
        fleet.scheduler.cancel(f"job-{n}", n)
    assert [state.request.id for state in fleet.scheduler.states()] == ["job-2", "job-3"]
