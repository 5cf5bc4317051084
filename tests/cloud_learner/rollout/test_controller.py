"""What becomes of versions that are better, worse, frozen, pinned, promoted and rolled back by people."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from cloud_learner.rollout.config import RolloutConfig
from cloud_learner.rollout.controller import RolloutController
from cloud_learner.rollout.records import MOST_VERSIONS, DecisionKind, VersionState
from wire.errors import ConfigError, InvalidDataError, RejectedError

ROBOTS = [f"arm{number}" for number in range(10)]
S = 1_000_000_000


def make(robots: list[str] = ROBOTS, **settings: object) -> RolloutController:
    controller = RolloutController(RolloutConfig(**{"canary": 0.2, **settings}))  # type: ignore[arg-type]
    controller.set_robots(dict.fromkeys(robots, ""), 0)
    controller.on_version(1, 0, 0)
    return controller


def state_of(controller: RolloutController, number: int) -> VersionState:
    return next(one.state for one in controller.versions() if one.number == number)


def episodes(
    controller: RolloutController, rounds: int, success: dict[int, float], seed: int = 0, robots: list[str] = ROBOTS
) -> None:
    """Of all robots, by the versions they are given."""
    dice = random.Random(seed)
    for at in range(rounds):
        for robot in robots:
            version = controller.version_for(robot)
            won = dice.random() < success.get(version, 0.8)
            controller.on_episode(robot, {version}, f"task{at % 3}", won, 0.0, False, at * 30 * S, (at + 1) * 30 * S)


def kinds(controller: RolloutController) -> list[tuple[DecisionKind, int]]:
    return [(one.kind, one.version) for one in controller.pop_decisions()]


def test_without_a_share_each_version_is_promoted_at_once() -> None:
    controller = make(canary=0.0)
    controller.on_version(2, 1, S)
    assert controller.current == controller.reference == 2
    assert {controller.version_for(robot) for robot in (*ROBOTS, "new")} == {2}
    assert kinds(controller) == [(DecisionKind.promoted, 1), (DecisionKind.promoted, 2)]


def test_each_shape_tries_a_version_that_some_of_it_can_be_compared_with() -> None:
    controller = make([])
    shapes = {"fetch-0": "fetch", "saw-0": "saw", "saw-1": "saw", "saw-2": "saw", "push-0": "push", "push-1": "push"}
    controller.set_robots(shapes, 0)
    controller.on_version(2, 1, 0)
    tries = [shapes[robot] for robot in shapes if controller.version_for(robot) == 2]
    assert sorted(tries) == ["push", "saw"], "one of each, and none is left alone with the version that it has"
    again = RolloutController(controller.config, controller.state())
    assert [again.version_for(robot) for robot in shapes] == [controller.version_for(robot) for robot in shapes]


def test_where_each_robot_is_the_only_one_of_its_shape_all_are_compared_with_what_they_did_before() -> None:
    controller, shapes = make([]), {"fetch-0": "fetch", "saw-0": "saw"}
    controller.set_robots(shapes, 0)
    controller.on_version(2, 1, 0)
    assert controller.canary == 0, "nothing is there to compare it with"
    episodes(controller, 40, {}, robots=list(shapes))
    assert {controller.version_for(robot) for robot in shapes} == {2}
    episodes(controller, 40, {2: 0.0}, seed=1, robots=list(shapes))
    assert state_of(controller, 2) is VersionState.rolled_back


def test_no_version_no_robot() -> None:
    controller = RolloutController(RolloutConfig(canary=0.2))
    assert controller.version_for("arm0") == 0
    with pytest.raises(RejectedError, match="None was published yet"):
        controller.promote(1, 0)


def test_a_version_as_good_is_tried_on_some_and_promoted_to_all() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    assert controller.canary == 2
    assert sum(controller.version_for(robot) == 2 for robot in ROBOTS) == 2
    episodes(controller, 60, {})
    assert (controller.current, controller.reference) == (2, 1)
    assert sum(controller.version_for(robot) == 1 for robot in ROBOTS) == 1, "one keeps the reference"
    promoted = [one for one in controller.pop_decisions() if one.kind is DecisionKind.promoted][-1]
    assert "episodes succeeded" in promoted.reason
    assert " s: " in promoted.reason


def test_a_version_that_does_nothing_is_rolled_back_within_a_few_episodes() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    episodes(controller, 12, {2: 0.0})
    assert state_of(controller, 2) is VersionState.rolled_back
    assert {controller.version_for(robot) for robot in ROBOTS} == {1}
    said = controller.pop_decisions()[-1]
    assert said.kind is DecisionKind.rolled_back
    assert said.reason.startswith("worse in success after ")
    assert "0 of " in said.reason


@pytest.mark.parametrize(("human", "stopped"), ((0.9, False), (0.0, True)))
def test_people_who_step_in_and_stops_count(human: float, stopped: bool) -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    for at in range(20):
        for robot in ROBOTS:
            bad = controller.version_for(robot) == 2
            versions = {controller.version_for(robot)}
            controller.on_episode(robot, versions, "reach", True, human * bad, stopped and bad, at, at)
    assert state_of(controller, 2) is VersionState.rolled_back


def test_newer_versions_wait_and_the_newest_is_tried_next() -> None:
    controller = make()
    for number in (2, 3, 4):
        controller.on_version(number, number - 1, 0)
    controller.on_refused(5, 4, "NaN in 3 tensors.", 0)
    assert [state_of(controller, number) for number in (2, 3, 4, 5)] == [
        VersionState.canary,
        VersionState.candidate,
        VersionState.candidate,
        VersionState.refused,
    ]
    episodes(controller, 12, {2: 0.0})
    assert controller.canary == 4
    episodes(controller, 12, {4: 0.0}, seed=1)
    assert controller.canary == 0
    assert state_of(controller, 3) is VersionState.candidate, "it was passed over"


@pytest.mark.parametrize(("chance", "state"), ((0.9, VersionState.promoted), (0.0, VersionState.rolled_back)))
def test_one_robot_compares_with_what_it_did_before(chance: float, state: VersionState) -> None:
    controller = make(["arm"])
    controller.on_version(2, 1, 0)
    episodes(controller, 40, {}, robots=["arm"])
    assert controller.version_for("arm") == 1, "there is too little to compare it with yet"
    episodes(controller, 24, {}, seed=1, robots=["arm"])
    assert controller.version_for("arm") == 2
    episodes(controller, 60, {2: chance}, seed=2, robots=["arm"])
    assert controller.version_for("arm") == (2 if chance else 1)
    assert state_of(controller, 2) is state


def test_at_the_bound_nothing_is_promoted_that_looks_worse() -> None:
    for chance, state in ((1.0, VersionState.promoted), (0.9, VersionState.rolled_back)):
        controller = make(max_episodes=20, margin=0.05)
        controller.on_version(2, 1, 0)
        dice = random.Random(4)
        for at in range(14):
            for robot in ROBOTS:
                version = controller.version_for(robot)
                won = version == 1 or dice.random() < chance
                controller.on_episode(robot, {version}, "reach", won, 0.0, False, at, at)
        assert state_of(controller, 2) is state


def test_without_anything_to_compare_a_person_promotes_or_nobody() -> None:
    controller = make(max_episodes=10)
    controller.on_version(2, 1, 0)
    canary = next(robot for robot in ROBOTS if controller.version_for(robot) == 2)
    for at in range(10):
        controller.on_episode(canary, {2}, "a task that no other robot has", True, 0.0, False, at, at)
    assert (controller.current, controller.canary) == (1, 0)
    assert controller.pop_decisions()[-1].reason.startswith("a person must promote it: 10 of 10 episodes judged")


def judged(controller: RolloutController, rounds: int, asked: Callable[[int, int], bool | None]) -> None:
    """`asked(version, place)`: what somebody said of an episode, the same each round."""
    for at in range(rounds):
        acting = [controller.version_for(robot) for robot in ROBOTS]
        for place, (robot, version) in enumerate(zip(ROBOTS, acting, strict=True)):
            controller.on_episode(robot, {version}, "reach", asked(version, place + at), 0.0, False, at * S, at * S)


def test_what_nobody_judged_waits_for_a_person_and_newer_ones_are_tried() -> None:
    controller = make(max_episodes=40)
    controller.on_version(2, 1, 0)
    controller.on_version(3, 2, 0)
    judged(controller, 20, lambda version, _: None if version == 2 else True)
    assert (controller.current, controller.canary) == (1, 3), "what comes after it is tried"
    assert state_of(controller, 2) is VersionState.candidate
    record = next(one for one in controller.versions() if one.number == 2)
    assert record.reason.startswith("a person must promote it: 0 of 40 episodes judged, of version 1 ")
    assert (DecisionKind.withdrawn, 2) in kinds(controller)
    controller.promote(2, 0)
    assert controller.current == 2


def test_a_few_judged_episodes_do_not_promote_at_the_bound() -> None:
    controller = make(max_episodes=100)
    controller.on_version(2, 1, 0)
    judged(controller, 49, lambda version, place: True if version == 1 or place % 25 == 0 else None)
    assert controller.canary == 2
    judged(controller, 1, lambda version, _: True)
    assert (controller.current, state_of(controller, 2)) == (1, VersionState.candidate)


def test_a_canary_whose_failures_go_unjudged_is_not_promoted() -> None:
    """Half of its episodes fail and are left without a word; all that is said of it is good."""
    controller = make()
    controller.on_version(2, 1, 0)
    judged(controller, 130, lambda version, place: True if version == 1 or place % 2 == 0 else None)
    assert (controller.current, state_of(controller, 2)) == (1, VersionState.candidate)
    reason = next(one for one in controller.versions() if one.number == 2).reason
    assert "a person must promote it: 100 of 200 episodes judged" in reason


def test_unjudged_episodes_of_both_sides_hold_nothing_up() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    dice = random.Random(0)
    judged(controller, 100, lambda _, __: dice.choice((True, None)))
    assert controller.current == 2


def test_an_episode_of_two_versions_counts_for_none() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    controller.on_episode("arm0", {1, 2}, "reach", True, 0.0, False, 0, 0)
    controller.on_episode("arm0", (), "reach", True, 0.0, False, 0, 0)
    controller.on_episode("arm0", {77}, "reach", True, 0.0, False, 0, 0)
    assert sum(one.tally.episodes for one in controller.versions()) == 0
    with pytest.raises(InvalidDataError, match="'arm0': a human share of nan"):
        controller.on_episode("arm0", {1}, "reach", True, float("nan"), False, 0, 0)


def test_successes_that_end_sooner_are_not_compared_sooner() -> None:
    robots = [f"arm{number}" for number in range(200)]
    controller = make(robots)

    def ended(won: bool, began_s: int) -> None:
        at_s = began_s + (20 if won else 40)
        for place, robot in enumerate(robots):
            if (place % 4 < 2) == won:
                controller.on_episode(robot, {acting[robot]}, "reach", won, 0.0, False, began_s * S, at_s * S)

    acting = {robot: controller.version_for(robot) for robot in robots}
    for began_s in (0, 40):
        ended(True, began_s)
        ended(False, began_s)
    controller.on_version(2, 1, 80 * S)
    acting = {robot: controller.version_for(robot) for robot in robots}
    assert list(acting.values()).count(2) == 40
    ended(True, 80)
    assert controller.canary == 2, "all canaries that ended have succeeded, the others are not done"
    trial = controller.state().trial
    assert trial is not None
    assert trial.new.episodes == 0
    ended(False, 80)
    assert trial != controller.state().trial


def test_one_endless_episode_does_not_hold_up_what_is_decided() -> None:
    controller = make()
    episodes(controller, 5, {})
    controller.on_episode("arm0", {1}, "reach", True, 0.0, False, -10_000 * S, 150 * S)
    controller.on_version(2, 1, 0)
    episodes(controller, 20, {2: 0.0})
    assert state_of(controller, 2) is VersionState.rolled_back


def test_many_small_losses_end_at_the_reference() -> None:
    controller = make()
    success = {number: 0.9 - 0.04 * (number - 1) for number in range(1, 16)}
    worst = 0.9
    for number in range(2, 16):
        controller.on_version(number, number - 1, number)
        episodes(controller, 60, success, seed=number)
        worst = min(worst, success[controller.current])
    assert controller.current == 1
    assert worst > 0.6
    backs = [one for one in controller.pop_decisions() if "versions since" in one.reason]
    assert backs
    assert state_of(controller, backs[0].version) is VersionState.rolled_back


def test_the_reference_follows_what_is_better() -> None:
    controller = make()
    episodes(controller, 10, {1: 0.3})
    controller.on_version(2, 1, 0)
    episodes(controller, 100, {1: 0.3, 2: 0.95})
    assert controller.reference == controller.current == 2
    assert {controller.version_for(robot) for robot in ROBOTS} == {2}


def test_while_frozen_nothing_is_promoted_and_what_is_worse_still_goes() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    controller.freeze(True, 0)
    controller.on_version(3, 2, 0)
    episodes(controller, 60, {})
    assert (controller.current, controller.canary) == (1, 2)
    controller.freeze(False, 0)
    assert (controller.current, controller.canary) == (2, 3)
    controller.freeze(True, 0)
    episodes(controller, 30, {3: 0.0})
    assert (controller.current, controller.canary) == (2, 0)
    assert state_of(controller, 3) is VersionState.rolled_back


def test_a_frozen_fleet_does_not_take_even_the_first_version() -> None:
    controller = RolloutController(RolloutConfig())
    controller.freeze(True, 0)
    controller.on_version(1, 0, 0)
    assert controller.current == 0
    controller.promote(1, 0)
    assert controller.current == 1


def test_pins_go_before_all_else() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    controller.pin("arm3", 2, 0)
    controller.rollback(0)
    assert state_of(controller, 2) is VersionState.rolled_back
    assert controller.version_for("arm3") == 2
    controller.pin("", 2, 0)
    assert {controller.version_for(robot) for robot in (*ROBOTS, "new")} == {2}
    assert {1, 2} <= controller.needed
    controller.pin("", 0, 0)
    controller.pin("arm3", 0, 0)
    assert {controller.version_for(robot) for robot in ROBOTS} == {1}


def test_pinned_robots_are_compared_with_nothing() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    for robot in ROBOTS:
        controller.pin(robot, 2, 0)
    episodes(controller, 60, {2: 0.0})
    assert controller.canary == 2
    assert controller.versions()[1].tally.episodes == 600


def test_people_promote_and_roll_back() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    controller.on_version(3, 2, 0)
    controller.promote(3, 0, who="anna")
    assert (controller.current, controller.canary) == (3, 0)
    assert controller.pop_decisions()[-1].reason == "promoted by anna."
    controller.rollback(0)
    assert (controller.current, state_of(controller, 3)) == (1, VersionState.rolled_back)
    controller.freeze(False, 0)
    for number in (4, 5):
        controller.on_version(number, number - 1, 0)
        controller.promote(number, 0)
    controller.on_version(6, 5, 0)
    controller.rollback(0)
    assert (controller.current, state_of(controller, 6)) == (5, VersionState.rolled_back)
    controller.rollback(0, to=1)
    assert [state_of(controller, number) for number in (1, 4, 5)] == ["promoted", "rolled_back", "rolled_back"]


@pytest.mark.parametrize("on_trial", (True, False))
def test_after_a_rollback_by_a_person_what_waits_goes_on_waiting(on_trial: bool) -> None:
    controller = make([] if not on_trial else ROBOTS)
    controller.on_version(2, 1, 0)
    if not on_trial:
        # no robot could try it
        controller.promote(2, 0)
    controller.on_version(3, 2, 0)
    assert controller.canary == (2 if on_trial else 0)
    controller.rollback(0)
    assert (controller.current, controller.canary, controller.frozen) == (1, 0, True)
    controller.set_robots(dict.fromkeys(ROBOTS, ""), 0)
    assert (controller.canary, state_of(controller, 3)) == (0, VersionState.candidate)
    controller.freeze(False, 0)
    assert controller.canary == 3


def test_a_canary_older_than_what_a_person_promotes_waits_again() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    controller.on_version(3, 2, 0)
    controller.promote(3, 0)
    assert state_of(controller, 2) is VersionState.candidate
    controller.promote(2, 0)
    assert controller.current == 2


def test_a_no_names_the_version_and_the_way_out() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    controller.rollback(0)
    controller.on_refused(3, 2, "NaN in 3 tensors", 0)
    for ask, said in (
        (
            lambda: controller.promote(9, 0),
            "version 9: there is no such version. Known are 1 to 3; `vla-fleet versions list` shows them.",
        ),
        (lambda: controller.promote(1, 0), "version 1: it is current already"),
        (lambda: controller.promote(3, 0), r"version 3: the gate refused it \(NaN in 3 tensors\). Choose another"),
        (lambda: controller.pin("arm0", 3, 0), "version 3: the gate refused it"),
        (lambda: controller.pin("arm0", 0, 0), "robot 'arm0': no version is pinned"),
        (lambda: controller.pin("", 0, 0), "the fleet: no version is pinned"),
        (lambda: controller.rollback(0), "version 1: there is no earlier promoted version"),
        (lambda: controller.rollback(0, to=1), "version 1: it is current already, and no canary"),
        (lambda: controller.rollback(0, to=2), "version 2: it was rolled back itself"),
    ):
        with pytest.raises(RejectedError, match=said):
            ask()
    controller.on_version(4, 1, 0)
    controller.promote(4, 0)
    controller.on_version(5, 4, 0)
    with pytest.raises(RejectedError, match="version 1: it was promoted before version 4"):
        controller.promote(1, 0)
    with pytest.raises(RejectedError, match="version 5: it was never promoted"):
        controller.rollback(0, to=5)
    controller.on_weights_gone([1], 0)
    with pytest.raises(RejectedError, match="version 1: its weights are gone"):
        controller.pin("arm0", 1, 0)


def test_weights_that_are_gone_are_not_handed_out() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    controller.promote(2, 0)
    controller.on_version(3, 2, 0)
    controller.pin("arm0", 2, 0)
    controller.on_weights_gone([2, 3], 0)
    assert {controller.version_for(robot) for robot in ROBOTS} == {1}
    assert controller.pins == {}
    assert controller.canary == 0


def test_settings_that_cannot_work_are_refused() -> None:
    for settings in (
        {"canary": -0.1},
        {"canary": 1.5},
        {"control": 1.0},
        {"margin": 0.0},
        {"alpha": 0.0},
        {"beta": 0.7},
        {"max_episodes": 1},
        {"keep": 0},
    ):
        with pytest.raises(ConfigError, match=f"rollout: {next(iter(settings))} is "):
            RolloutConfig(**settings)  # type: ignore[arg-type]


def test_trials_that_are_switched_off_end_at_the_next_start() -> None:
    controller = make()
    controller.on_version(2, 1, 0)
    episodes(controller, 3, {2: 1.0})
    again = RolloutController(RolloutConfig(), controller.state())
    assert {again.version_for(robot) for robot in ROBOTS} == {1}
    again.on_version(2, 1, 0)
    assert again.current == 2


def test_memory_is_bounded() -> None:
    controller = make()
    for number in range(2, 3 * MOST_VERSIONS):
        if number % 2:
            controller.on_version(number, number - 1, number)
            controller.promote(number, number)
        else:
            controller.on_refused(number, number - 1, "no", number)
        controller.on_episode("arm0", {controller.current}, f"task{number}" * 50, True, 0.1, False, number, number)
    state = controller.state()
    assert len(state.versions) == MOST_VERSIONS
    assert {state.current, state.reference} <= set(state.versions)
    assert len(msgspec.msgpack.encode(state)) < 1_000_000
    controller.rollback(0)


def test_a_canary_whose_robots_end_nothing_is_left_to_a_person_and_newer_ones_are_tried() -> None:
    """They hold, as by actions that are not finite; refuse it; or somebody has stopped them."""
    controller = make()
    controller.on_version(2, 1, 0)
    controller.on_version(3, 2, 0)
    (canaries,) = ({robot for robot in ROBOTS if controller.version_for(robot) == 2},)
    others = [robot for robot in ROBOTS if robot not in canaries]
    episodes(controller, 6, {}, robots=others)
    assert controller.canary == 2
    episodes(controller, 6, {}, seed=1, robots=others)
    assert (controller.current, controller.canary) == (1, 3)
    record = next(one for one in controller.versions() if one.number == 2)
    assert record.state is VersionState.candidate
    assert record.reason.startswith("a person must promote it: arm") and " ended no episode by it " in record.reason
    assert controller.left_to_people == [2]


def one_robot_on_trial() -> tuple[RolloutController, int]:
    """Its episodes take 30 s; and the time."""
    controller = make(["arm"])
    episodes(controller, 64, {}, robots=["arm"])
    controller.on_version(2, 1, 64 * 30 * S)
    assert controller.version_for("arm") == 2
    return controller, 64 * 30 * S


def works(controller: RolloutController, now_ns: int, seconds: int) -> int:
    """Five reports a second; when it is over."""
    for _ in range(5 * seconds):
        now_ns += S // 5
        controller.on_work("arm", now_ns)
    return now_ns


def test_a_single_robot_that_ends_nothing_for_long_goes_back() -> None:
    controller, now_ns = one_robot_on_trial()
    now_ns = works(controller, now_ns, 590)
    assert controller.version_for("arm") == 2
    works(controller, now_ns, 11)
    assert (controller.version_for("arm"), state_of(controller, 2)) == (1, VersionState.candidate)
    reason = controller.pop_decisions()[-1].reason
    assert reason.startswith("a person must promote it: arm ended no episode by it") and "600 s of work" in reason
    assert controller.left_to_people == [2]


def test_a_single_robot_that_is_off_frozen_or_does_something_else_keeps_its_trial() -> None:
    controller, now_ns = one_robot_on_trial()
    now_ns = works(controller, now_ns, 590) + 10_000 * S
    controller.on_work("arm", now_ns)
    assert controller.canary == 2, "it was off"
    controller.freeze(True, now_ns)
    now_ns = works(controller, now_ns, 1000)
    controller.freeze(False, now_ns)
    assert controller.canary == 2
    controller.on_other_work("arm")
    now_ns = works(controller, now_ns, 590)
    assert controller.canary == 2
    controller.on_episode("arm", {2}, "task0", True, 0.0, False, now_ns, now_ns + 30 * S)
    controller.on_episode("arm", {2}, "task0", True, 0.0, False, now_ns + 100 * S, now_ns + 130 * S)
    works(controller, now_ns + 130 * S, 1000)
    assert controller.canary == 2


def test_a_robot_that_joins_during_the_trial_of_a_single_one_does_not_end_it() -> None:
    controller, now_ns = one_robot_on_trial()
    controller.set_robots({"arm": "", "arm2": ""}, now_ns)
    other = "arm" if controller.version_for("arm") == 1 else "arm2"
    controller.on_episode(other, {1}, "task0", True, 0.0, False, now_ns, now_ns + 200 * S)
    assert controller.canary == 2


def test_only_the_newest_of_those_that_are_left_to_people_keep_their_files() -> None:
    controller = make(max_episodes=10)
    for number in range(2, 7):
        controller.on_version(number, number - 1, 0)
        judged(controller, 6, lambda version, _: None if version > 1 else True)
    assert {state_of(controller, number) for number in range(2, 7)} == {VersionState.candidate}
    assert controller.left_to_people == [5, 6]
