"""Whatever comes, in whatever order: what always holds of a rollout."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_learner.rollout.config import RolloutConfig
from cloud_learner.rollout.controller import RolloutController
from cloud_learner.rollout.records import DecisionKind, RolloutState, VersionState
from wire.errors import RejectedError

ROBOTS = tuple(f"arm{number}" for number in range(7))
NUMBERS = st.integers(1, 9)
CHANCES = st.lists(st.sampled_from((0.0, 0.7, 0.85, 0.9, 1.0)), min_size=30, max_size=30)
"""of success, by version"""
SEEDS = st.integers(0, 1000)
VERSION, EPISODES = st.tuples(st.just("version")), st.tuples(st.just("episodes"), st.integers(1, 40), CHANCES, SEEDS)
COMMAND = st.one_of(
    st.tuples(st.just("refused")),
    st.tuples(st.just("again"), NUMBERS),
    st.tuples(st.just("promote"), NUMBERS),
    st.tuples(st.just("rollback"), st.integers(0, 9)),
    st.tuples(st.just("pin"), st.sampled_from(("", *ROBOTS)), st.integers(0, 9)),
    st.tuples(st.just("freeze"), st.booleans()),
    st.tuples(st.just("gone"), NUMBERS),
    st.tuples(st.just("robots"), st.sets(st.sampled_from(ROBOTS))),
    st.tuples(st.just("evaluator"), st.booleans()),
    st.tuples(st.just("measured"), st.integers(1, 8), CHANCES, SEEDS),
)
EVENTS = st.lists(st.one_of(*[VERSION] * 4, *[EPISODES] * 8, COMMAND), min_size=3, max_size=30)
CONFIGS = st.builds(
    RolloutConfig,
    canary=st.sampled_from((0.0, 0.1, 0.2, 0.5, 1.0)),
    gate_success=st.sampled_from((0.0, 0.2)),
    control=st.sampled_from((0.0, 0.1, 0.3)),
    max_episodes=st.sampled_from((10, 40)),
    alpha=st.sampled_from((0.05, 0.5)),
)


def happen(controller: RolloutController, event: tuple[Any, ...], at: int) -> None:
    """A command that is refused changes nothing."""
    kind, *what = event
    before = controller.state()
    newest = max(before.versions, default=0)
    try:
        match kind:
            case "version":
                controller.on_version(newest + 1, newest, at)
            case "again":
                controller.on_version(what[0], what[0] - 1, at)
            case "refused":
                controller.on_refused(newest + 1, newest, "NaN", at)
            case "promote":
                controller.promote(what[0], at)
            case "rollback":
                controller.rollback(at, to=what[0])
            case "pin":
                controller.pin(what[0], what[1], at)
            case "freeze":
                controller.freeze(what[0], at)
            case "gone":
                # retention deletes nothing that is needed
                controller.on_weights_gone({what[0]} - controller.needed, at)
            case "robots":
                controller.set_robots(dict.fromkeys(what[0], ""), at)
            case "evaluator":
                controller.set_evaluator(what[0], at)
            case "measured":
                measure(controller, what[0], what[1], what[2], at)
            case "episodes":
                episodes(controller, what[0], what[1], what[2], at)
    except RejectedError:
        assert controller.state() == before


def episodes(controller: RolloutController, rounds: int, success: list[float], seed: int, at: int) -> None:
    dice = random.Random(seed)
    for turn in range(rounds):
        for robot in ROBOTS:
            version = controller.version_for(robot)
            if version:
                won = dice.random() < success[version % len(success)]
                now_ns = 1000 * at + turn
                began_ns = now_ns - dice.randint(0, 5)
                controller.on_episode(robot, {version}, f"task{turn % 2}", won, 0.0, False, began_ns, now_ns)
        check(controller)


def measure(controller: RolloutController, count: int, success: list[float], seed: int, at: int) -> None:
    dice = random.Random(seed)
    for _ in range(count):
        for request in controller.wanted_measurements[:1]:
            won = [dice.random() < success[request.number % len(success)] for _ in range(request.episodes)]
            assert controller.on_measured(request, {"task0": won}, at)


def check(controller: RolloutController) -> None:
    """What holds at any time."""
    for request in controller.wanted_measurements:
        assert request.number in controller.needed
        assert all(one.has_weights for one in controller.versions() if one.number == request.number)
    versions = {one.number: one for one in controller.versions()}
    share = controller.config.canary
    canaries = [number for number, one in versions.items() if one.state is VersionState.canary]
    assert canaries == ([controller.canary] if controller.canary else [])
    assert not controller.current or versions[controller.current].state is VersionState.promoted
    assert not controller.reference or versions[controller.reference].state is VersionState.promoted
    pins, robots = controller.pins, controller.state().shapes
    trying = 0
    for robot in (*ROBOTS, "unknown"):
        version = controller.version_for(robot)
        pinned = pins.get(robot) or pins.get("")
        if pinned:
            assert version == pinned
            continue
        if not version:
            assert controller.current == 0
            continue
        assert versions[version].has_weights
        assert versions[version].state in (VersionState.promoted, VersionState.canary)
        trying += versions[version].state is VersionState.canary
    assert trying <= max(share * len(robots) + 1e-9, 1)
    assert trying < len(robots) or len(robots) <= 1


@given(CONFIGS, EVENTS)
@settings(max_examples=60, deadline=None)
def test_what_always_holds(config: RolloutConfig, events: list[tuple[Any, ...]]) -> None:
    controller = RolloutController(config)
    controller.set_robots(dict.fromkeys(ROBOTS, ""), 0)
    for at, event in enumerate(events):
        happen(controller, event, at)
        check(controller)


@given(CONFIGS, EVENTS, EVENTS)
@settings(max_examples=60, deadline=None)
def test_a_restart_changes_nothing(
    config: RolloutConfig, before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]
) -> None:
    controller = RolloutController(config)
    controller.set_robots(dict.fromkeys(ROBOTS, ""), 0)
    for at, event in enumerate(before):
        happen(controller, event, at)
    kept = msgspec.msgpack.encode(controller.state())
    again = RolloutController(config, msgspec.msgpack.decode(kept, type=RolloutState))
    # who is there is told again
    again.set_evaluator(next((what[0] for kind, *what in reversed(before) if kind == "evaluator"), False), len(before))
    for at, event in enumerate(after, start=len(before)):
        happen(controller, event, at)
        happen(again, event, at)
    assert again.state() == controller.state()
    assert [again.version_for(robot) for robot in ROBOTS] == [controller.version_for(robot) for robot in ROBOTS]


@given(CONFIGS, EVENTS, EVENTS)
@settings(max_examples=60, deadline=None)
def test_while_frozen_nothing_goes_on_by_itself(
    config: RolloutConfig, before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]
) -> None:
    controller = RolloutController(config)
    controller.set_robots(dict.fromkeys(ROBOTS, ""), 0)
    for at, event in enumerate(before):
        happen(controller, event, at)
    controller.freeze(True, len(before))
    controller.pop_decisions()
    for at, event in enumerate(after, start=len(before)):
        if event[0] not in ("freeze", "promote", "rollback"):
            happen(controller, event, at)
    forward = [one for one in controller.pop_decisions() if one.kind in (DecisionKind.canary, DecisionKind.promoted)]
    assert forward == []
