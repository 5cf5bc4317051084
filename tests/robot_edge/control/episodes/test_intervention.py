"""An intervention has a recovery and a correction, in that order, and the episode may end with it."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robot_edge.control.config import EpisodeRules, GateConfig
from robot_edge.control.episodes.intervention import Intervention
from tests.robot_edge.control.episodes.test_runner import PERSON, SEED, Attended
from tests.robot_edge.control.test_episode_end import ends, segments
from tests.robot_edge.control.test_loop import Bench
from wire.errors import ConfigError
from wire.messages.gateway import ACTORS, EdgeEvent, EdgeStatus
from wire.messages.local import EpisodeStarted
from wire.types import EPISODE_COMMANDS, Actor, OperatorCommandKind, Step

RECOVER, CORRECT = OperatorCommandKind.recover, OperatorCommandKind.correct
END = EpisodeRules(after_correction="end")


def driven(bench: Bench, *words: str, ticks: int = 6) -> Bench:
    """The person says each word and drives for a while after it."""
    for word in words:
        bench.uplink.send(bench.person(word))
        if word == "hand_back":
            continue
        for number in range(ticks):
            bench.uplink.send(bench.person("command", 0.1 + 0.01 * number, 0.0, 0.0, 0.0))
            bench.tick()
    return bench


def parts(steps: list[Step]) -> list[tuple[str, bool]]:
    """(who, whether it is a recovery) of each stretch in which neither changes, holds left out."""
    acted = [(step.actor.value, step.recovery) for step in steps if step.actor is not Actor.hold]
    return [kind for kind, _ in groupby(acted)]


# --- the end after a hand back --------------------------------------------------------------------------------------


def test_the_episode_ends_with_the_last_step_before_the_hand_back() -> None:
    bench = driven(Bench(max_ticks=10_000, episodes=END).ready().tick(10), "take_over", "hand_back").tick(5)
    (ended,) = ends(bench)
    assert (ended.outcome, bench.loop.inbox.finished) == ("unjudged", 1)
    first, second = (m.episode for m in bench.said if isinstance(m, EpisodeStarted))
    assert (first.seed, second.seed) == (SEED * 1000, SEED * 1000 + 1)
    last = segments(bench.said)[-1]
    assert (ACTORS[last.actor[-1]], last.outcome, last.terminated[-1], last.truncated[-1]) == (
        "human",
        "unjudged",
        False,
        True,
    )
    assert ended.terminal is not None and ended.terminal.time_ns > last.times_ns[-1]
    assert ended.terminal.state[0] > last.state[-1][0], "what the person did last led to it"


def test_by_default_the_policy_goes_on() -> None:
    bench = driven(Bench(max_ticks=10_000).ready().tick(10), "take_over", "hand_back").tick(10)
    assert bench.outcomes() == []
    assert parts(bench.steps()) == [("policy", False), ("human", False), ("policy", False)]


def test_a_script_that_hands_back_ends_it_as_well() -> None:
    bench = Bench(operated=True, max_ticks=10_000, episodes=END, gate=GateConfig(min_ticks=5, stall_ticks=20)).ready()
    bench.answer = np.zeros(4, np.float32)
    bench.tick(60)
    assert bench.outcomes()[0] == "unjudged"
    before = bench.said.index(ends(bench)[0])
    first = [m.step for m in bench.said[:before] if hasattr(m, "step")]
    assert parts(first) == [("policy", False), ("script", False)]


@pytest.mark.parametrize("verdict", ["success", "failure", "end"])
def test_what_was_said_before_the_hand_back_holds(verdict: str) -> None:
    bench = driven(Bench(max_ticks=10_000, episodes=END).ready().tick(10), "take_over")
    bench.uplink.send(bench.person(verdict))
    driven(bench, "hand_back").tick(4)
    assert bench.outcomes() == [{"end": "unjudged"}.get(verdict, verdict)]
    assert segments(bench.said)[-1].terminated[-1] == (verdict == "success")
    assert parts(bench.steps())[:2] == [("policy", False), ("human", False)]


def test_a_success_that_the_simulator_has_seen_is_one() -> None:
    bench = Bench(max_ticks=10_000, tail_ticks=1000, episodes=END).ready().tick(10)
    bench.uplink.send(bench.person("take_over"))
    while not bench.loop.tracker._success_ticks:
        way = np.clip((bench.robot.goal - bench.robot._state[:3]) / 0.01, -1, 1)
        bench.uplink.send(bench.person("command", *way, 0.0))
        bench.tick()
    driven(bench, "hand_back").tick(2)
    assert bench.outcomes() == ["success"]


def test_where_a_person_judges_their_word_is_awaited() -> None:
    bench = Attended(replace(PERSON, after_correction="end")).say("scene_ready", 10)
    bench.say("take_over").say("command", 3, action=(0.5, 0.0, 0.0, 0.0)).say("hand_back", 4)
    assert (bench.loop.tracker.running, bench.loop.episodes.review.outcome, bench.stored()) == (False, "unjudged", [])
    assert bench.waits()
    bench.say("success").say("scene_ready", 4)
    assert bench.stored() == [(SEED, "success")]


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="after_correction is 'stop'"):
        EpisodeRules(after_correction="stop")  # type: ignore[arg-type]


# --- the mark -------------------------------------------------------------------------------------------------------


def test_who_says_so_recovers_until_they_correct() -> None:
    bench = Bench(max_ticks=10_000, status_every_ticks=1000).ready().tick(10)
    bench.uplink.send(bench.person("take_over"))
    driven(bench, "recover", "correct", "hand_back").tick(40)
    assert parts(bench.steps()) == [("policy", False), ("human", True), ("human", False), ("policy", False)]
    said = [m.part for m in bench.said if isinstance(m, EdgeStatus) and m.part]
    assert said == ["recovery", "correction"], "people see at once what their word came to"
    marked = [isinstance(segment.recovery, np.ndarray) for segment in segments(bench.said)]
    assert any(marked) and not all(marked), "segments without a mark are what they were"


def test_with_recovery_first_one_word_is_enough_and_others_say_nothing() -> None:
    first = Bench(max_ticks=10_000, episodes=EpisodeRules(recovery_first=True)).ready().tick(10)
    driven(first, "take_over", "correct", "hand_back").tick(10)
    assert parts(first.steps())[1:3] == [("human", True), ("human", False)]
    driven(first, "take_over")
    assert parts(first.steps())[-1] == ("human", True), "the next one begins so again"
    plain = driven(Bench(max_ticks=10_000).ready().tick(10), "take_over", "correct", "hand_back").tick(10)
    assert parts(plain.steps()) == [("policy", False), ("human", False), ("policy", False)]


def test_a_word_that_does_not_fit_is_answered_and_changes_nothing() -> None:
    bench = Bench(max_ticks=10_000).ready().tick(10)
    driven(bench, "recover", "take_over", "recover")
    refused = [m.detail for m in bench.said if isinstance(m, EdgeEvent) and m.detail.startswith("'recover'")]
    assert [words.split(": ")[1].split(".")[0] for words in refused] == [
        "nobody drives it in an episode",
        "a correction has begun",
    ]
    assert not any(step.recovery for step in bench.steps())


def test_what_one_person_said_is_not_for_the_next() -> None:
    bench = Bench(max_ticks=10_000).ready().tick(10)
    bench.uplink.send(bench.person("take_over"))
    bench.answer = None
    driven(bench, "recover", "hand_back").tick(30)
    driven(bench, "take_over")
    assert parts(bench.steps())[-2:] == [("human", True), ("human", False)]


def test_a_scene_that_somebody_drives_from_the_start_begins_without_a_recovery() -> None:
    bench = Bench(max_ticks=10_000).ready().tick(10)
    bench.uplink.send(bench.person("take_over"))
    driven(bench, "recover")
    bench.uplink.send(bench.person("end"))
    driven(bench, "take_over", ticks=12)
    number = max(i for i, m in enumerate(bench.said) if isinstance(m, EpisodeStarted))
    assert parts([m.step for m in bench.said[number:] if hasattr(m, "step")]) == [("human", False)]


ACTORS_AND_WORDS = [*Actor, RECOVER, CORRECT]


@given(st.lists(st.sampled_from(ACTORS_AND_WORDS), max_size=60), st.booleans())
def test_no_order_of_words_and_steps_brings_a_recovery_after_a_correction(events: list, first: bool) -> None:
    intervention, before = Intervention(first), ""
    for event in events:
        if isinstance(event, OperatorCommandKind):
            heard = intervention.say(event)
            assert heard or (event == RECOVER and before == "correction")
            continue
        recovers = intervention.step(event, by_person=event is not Actor.policy)
        assert not recovers or event is Actor.human
        if event is Actor.policy:
            before = ""
        elif event is not Actor.hold:
            assert not (recovers and before == "correction")
            before = "recovery" if recovers else "correction"


EVENTS = (
    "take_over",
    "command",
    "recover",
    "correct",
    "hand_back",
    "drop_link",
    "success",
    "end",
    "scene_ready",
    "wait",
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from((*EVENTS, "command", "command", "estop", "start")), max_size=40),
    st.sampled_from(("continue", "end")),
    st.booleans(),
    st.booleans(),
)
def test_whatever_people_do_what_is_stored_has_both_parts_in_order(
    events: list[str], after: str, first: bool, attended: bool
) -> None:
    rules = EpisodeRules(reset_by_person=attended, after_correction=after, recovery_first=first)  # type: ignore[arg-type]
    bench = Attended(rules)
    for event in ["scene_ready", "wait", "take_over", *events]:
        match event:
            case "estop":
                bench.say("estop", stop="s")
            case "start":
                bench.say("release_estop", stop="s").say("start")
            case "command":
                bench.say("command", 3, action=(-0.4, 0.2, 0.0, 0.0))
            case "wait":
                bench.tick(6)
            case _:
                bench.say(event, 3)
    bench.loop.close()
    bench.tick(1)
    by_episode = groupby(bench.spool.segments, key=lambda segment: segment.episode.id)
    for _, stored in by_episode:
        before = ""
        helped = False
        for segment in stored:
            marks = segment.recovery if isinstance(segment.recovery, np.ndarray) else np.zeros(segment.steps, bool)
            for index, recovers in zip(segment.actor.tolist(), marks.tolist(), strict=True):
                actor = ACTORS[index]
                assert not recovers or actor == "human", "only people recover"
                if actor == "policy":
                    assert not (helped and after == "end"), "the policy goes on after a hand back"
                    before = ""
                elif actor != "hold":
                    helped = True
                    assert not (recovers and before == "correction")
                    before = "recovery" if recovers else "correction"
    assert {RECOVER, CORRECT} <= EPISODE_COMMANDS
