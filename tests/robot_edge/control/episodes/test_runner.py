"""A person resets the scene, ends episodes and says how they ended: what is stored is what they meant."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.drivers.fake import FAKE_LIMITS, FAKE_TASKS
from hal.safety.limited_robot import LimitedRobot
from robot_edge.chunking.factory import make_scheduler
from robot_edge.control.config import EpisodeRules, LoopConfig
from robot_edge.control.loop import ControlLoop
from robot_edge.control.mode import HoldReason, Mode
from robot_edge.uplink.episode_recorder import EpisodeRecorder
from robot_edge.uplink.spool_index import is_kept
from tests.robot_edge.control.test_loop import Bench
from wire.errors import ConfigError, RobotError
from wire.messages.gateway import ACTORS, EdgeEvent, EdgeStatus, Job, Segment, VersionActivated
from wire.messages.local import EpisodeEnded, EpisodeJudged, EpisodeStarted, FrameRecorded, StepRecorded
from wire.task_thread import TaskQueue
from wire.transport.memory_channel import memory_pair
from wire.types import EPISODE_COMMANDS, EpisodeOutcome

PERSON = EpisodeRules(reset_by_person=True)
SEED = 500
HZ = 80


class KeptSegments:
    """A spool that keeps what it is given."""

    is_full = False

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def put(self, segment: Segment, ending: Segment | None = None) -> None:
        self.segments.append(segment)

    def ending(self) -> None:
        return None


class Attended(Bench):
    """A robot whose scene a person resets, and the recorder that its control talks to."""

    def __init__(self, rules: EpisodeRules = PERSON, max_ticks: int = 10**6, version: int = 3) -> None:
        super().__init__(max_ticks=max_ticks, episodes=rules, status_every_ticks=1)
        self.job = Job("j", FAKE_TASKS[:2], SEED)
        self.spool = KeptSegments()
        self.recorder = EpisodeRecorder("robot-0", self.spool, TaskQueue("spool"), memory_pair()[0], self.clock, 20)  # type: ignore[arg-type]
        self.answer = np.array([0.3, 0.1, 0.0, 0.2], np.float32)
        self.stop_number, self.version = 0, version
        self.events: list[EdgeEvent] = []
        self.introduce()

    def introduce(self) -> None:
        self.uplink.send(self.job)
        if self.version:
            self.uplink.send(VersionActivated("robot-0", self.version, 0))
        self.tick(2)

    def tick(self, count: int = 1) -> Attended:
        for _ in range(count):
            before, running = self.robot._state.copy(), self.loop.tracker.running
            super().tick()
            if not running and not self.loop.tracker.running and self.loop.mode is not Mode.human:
                # the gripper follows its effort for a while
                np.testing.assert_array_equal(self.robot._state[:3], before[:3], "it moved between two episodes")
            for message in self.said:
                match message:
                    case FrameRecorded():
                        self.recorder.frame(message)
                    case EpisodeStarted() | StepRecorded() | EpisodeEnded() | EpisodeJudged():
                        self.recorder.handle_message(message)
                    case EdgeStatus():
                        self.status = message
                    case EdgeEvent():
                        self.events.append(message)
            self.said.clear()
        return self

    def say(self, kind: str, ticks: int = 4, action: tuple[float, ...] = (), **more: object) -> Attended:
        self.uplink.send(self.person(kind, *action, **more))
        return self.tick(ticks)

    def restart_control(self) -> None:
        """It is killed, and its successor knows nothing."""
        self.uplink, uplink = memory_pair()
        self.inference, inference = memory_pair()
        old = self.loop
        self.loop = ControlLoop(
            "robot-0",
            f"{old.tracker._stem}x",
            old.robot,
            uplink,
            inference,
            lambda trained: make_scheduler(self.chunking, self.robot.spec, trained),
            self.clock,
            old.config,
        )
        self.loop.driver.poll_stop()
        self.introduce()

    def stored(self) -> list[tuple[int, str]]:
        """(seed, outcome) of what has ended."""
        return [(s.episode.seed, s.outcome) for s in self.spool.segments if s.last]

    def waits(self) -> bool:
        return self.loop.hold.reason is HoldReason.scene


# --- waiting for the scene ------------------------------------------------------------------------------------------


def test_a_robot_waits_for_the_scene_before_each_episode_and_says_so() -> None:
    bench = Attended().tick(50)
    assert bench.waits() and not bench.loop.tracker.running
    assert (bench.status.reason, bench.status.by_person) == (HoldReason.scene.value, True)
    bench.say("scene_ready")
    assert bench.loop.tracker.running
    bench.say("end", 40)
    assert bench.waits() and not bench.loop.tracker.running
    assert (bench.status.open_outcome, bench.stored()) == ("unjudged", [])
    bench.say("scene_ready")
    assert bench.loop.tracker.running and bench.stored() == [(SEED, "unjudged")]
    assert (bench.status.open_outcome, bench.loop.inbox.finished) == ("", 1)


def test_what_the_policy_did_alone_is_not_kept_against_all_odds_and_what_a_person_did_is() -> None:
    bench = Attended().say("scene_ready").tick(60).say("success", 10)
    assert {ACTORS[actor] for segment in bench.spool.segments for actor in segment.actor} >= {"hold", "policy"}
    bench.say("scene_ready").say("take_over").say("command", 3, action=(0.5, 0.0, 0.0, 0.0)).say("success", 10)
    bench.say("scene_ready")
    episodes = {segment.episode.id: False for segment in bench.spool.segments}
    for segment in bench.spool.segments:
        episodes[segment.episode.id] |= is_kept(segment)
    assert list(episodes.values())[:2] == [False, True]


def test_simulators_wait_for_nobody_and_real_robots_do() -> None:
    bench = Bench(max_ticks=10).ready().tick(30)
    assert bench.outcomes()[:2] == ["failure", "failure"]
    assert EpisodeRules().settled(real=True) == EpisodeRules(True, True)
    assert EpisodeRules().settled(real=False) == EpisodeRules(False, False)
    assert EpisodeRules(reset_by_person=False).settled(real=True) == EpisodeRules(False, True), (
        "nobody guesses a failure"
    )
    assert EpisodeRules(judged_by_person=True).settled(real=False) == EpisodeRules(False, True)
    robot = LimitedRobot(bench.robot, FAKE_LIMITS)
    robot.real = True  # type: ignore[attr-defined]
    loop = ControlLoop(
        "r", "s", robot, *(memory_pair()[0] for _ in "ui"), lambda trained: None, bench.clock, LoopConfig()
    )  # type: ignore[misc, arg-type]
    assert loop.config.episodes.reset_by_person


def test_with_a_time_limit_the_next_episode_begins_by_itself() -> None:
    bench = Attended(replace(PERSON, reset_s=0.5)).tick(int(0.5 * HZ) - 5)
    assert bench.waits()
    bench.tick(8)
    assert bench.loop.tracker.running
    bench.say("success", 20)
    assert bench.waits() and bench.stored() == []
    bench.tick(30)
    assert bench.loop.tracker.running and bench.stored() == [(SEED, "success")]


def test_the_time_for_the_scene_begins_anew_after_a_stop() -> None:
    bench = Attended(replace(PERSON, reset_s=0.5)).tick(30)
    bench.say("estop", stop="a")
    bench.tick(60)
    assert not bench.loop.tracker.running
    bench.say("release_estop", stop="a").say("start", 30)
    assert bench.waits(), "whoever stopped it may stand beside it"
    bench.tick(15)
    assert bench.loop.tracker.running


def test_a_word_of_the_scene_counts_only_while_it_is_waited_for() -> None:
    bench = Attended().say("scene_ready").say("scene_ready").say("end")
    assert not bench.loop.tracker.running, "it was said during the episode"
    bench.say("estop", stop="a").say("scene_ready").say("release_estop", stop="a").say("start", 10)
    assert bench.waits(), "it was said to a robot that was stopped"


def test_next_ends_an_episode_and_begins_one_but_not_both_by_mistake() -> None:
    bench = Attended().tick(HZ).say("next")
    assert bench.loop.tracker.running
    bench.say("next").say("next")
    assert bench.waits(), "the second one came too soon to mean the next episode"
    bench.tick(HZ).say("next")
    assert bench.loop.tracker.running and bench.stored() == [(SEED, "unjudged")]


def test_an_arm_may_be_driven_while_the_scene_is_reset_and_none_of_it_is_recorded() -> None:
    bench = Attended().say("scene_ready").say("end", 10).say("take_over")
    before = bench.robot._state.copy()
    bench.say("command", 3, action=(0.5, 0.0, 0.0, 0.0))
    assert bench.loop.mode is Mode.human
    assert bench.robot._state[0] > before[0]
    steps = sum(segment.steps for segment in bench.spool.segments)
    bench.say("scene_ready", 8)
    bench.say("command", 3, action=(0.5, 0.0, 0.0, 0.0)).say("end").say("scene_ready")
    (first, second) = [s for s in bench.spool.segments if s.last]
    assert first.steps > 0 and steps == 0
    assert second.first_tick == 0 and "human" in {("policy", "human", "script", "hold")[a] for a in second.actor}


@pytest.mark.parametrize("made_ns", [0, -1_100_000_000, 1_000_000_000])
def test_a_word_that_a_stalled_link_kept_moves_nothing_and_judges_nothing(made_ns: int) -> None:
    bench = Attended().tick(80)
    bench.say("scene_ready", 20, captured_ns=bench.clock.now_ns() + made_ns if made_ns else 0)
    assert not bench.loop.tracker.running
    bench.say("scene_ready", 20)
    bench.say("failure", 20, captured_ns=bench.clock.now_ns() + made_ns if made_ns else 0)
    assert bench.loop.tracker.running


# --- verdicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", ["success", "failure"])
@pytest.mark.parametrize("afterwards", [False, True])
def test_a_verdict_ends_an_episode_or_comes_after_its_end(verdict: str, afterwards: bool) -> None:
    bench = Attended().say("scene_ready", 20)
    if afterwards:
        bench.say("end")
    bench.say(verdict).say("scene_ready")
    assert bench.stored() == [(SEED, verdict)]
    (last,) = [s for s in bench.spool.segments if s.last]
    done = verdict == "success" or not afterwards
    assert (last.terminated[-1], last.truncated[-1]) == (done, not done)
    assert not (last.terminated[:-1] | last.truncated[:-1]).any()
    assert last.terminal is not None


def test_the_last_word_counts() -> None:
    bench = Attended().say("scene_ready").say("success").say("failure").say("success").say("discard")
    assert bench.stored() == [(SEED, "discarded")], "nothing can be said of what was thrown away"
    bench.say("success").say("scene_ready").say("failure").say("success").say("scene_ready")
    assert bench.stored()[1:] == [(SEED + 1, "success")]
    assert bench.loop.inbox.finished == 1


@pytest.mark.parametrize("source", ["", "evaluation"])
def test_an_episode_that_nobody_judged_is_no_failure_and_is_truncated(source: str) -> None:
    bench = Attended(max_ticks=20)
    if source:
        bench.uplink.send(Job("canary", FAKE_TASKS[:2], SEED, kind="evaluation", episodes=3))
    bench.tick(2).say("scene_ready", 40).say("scene_ready")
    assert bench.stored() == [(SEED, "unjudged")]
    (last,) = [s for s in bench.spool.segments if s.last]
    assert (last.steps, last.terminated[-1], last.truncated[-1]) == (20, False, True)
    assert bench.loop.inbox.finished == (0 if source else 1), "it measures nothing"


def test_an_episode_has_a_time_limit_in_seconds_whoever_drives() -> None:
    bench = Attended(replace(PERSON, max_s=0.5)).say("take_over").say("scene_ready", HZ).say("scene_ready")
    (last,) = [s for s in bench.spool.segments if s.last]
    assert last.first_tick + last.steps == 0.5 * HZ


def test_rerecord_brings_task_and_seed_again_and_discard_does_not() -> None:
    bench = Attended().say("scene_ready").say("rerecord").say("scene_ready").say("end").say("rerecord")
    bench.say("rerecord")  # there is nothing left to throw away
    bench.say("scene_ready").say("discard").say("scene_ready").say("success").say("scene_ready")
    assert bench.stored() == [(SEED, "discarded")] * 3 + [(SEED + 1, "success")]
    assert {s.episode.task for s in bench.spool.segments if s.last and s.episode.seed == SEED} == {FAKE_TASKS[0]}


def test_until_the_next_episode_begins_the_last_one_may_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Attended().say("scene_ready", 20).say("end")

    def blocked(task: str, seed: int) -> None:
        raise RobotError("blocked")

    with monkeypatch.context() as patch:
        patch.setattr(bench.loop.robot, "reset", blocked)
        bench.say("scene_ready", 40)
        assert bench.stored() == [] and not bench.loop.tracker.running
        bench.say("success")
    bench.tick(200)
    assert bench.waits(), "the scene may be another one by now"
    bench.say("scene_ready")
    assert bench.stored() == [(SEED, "success")]


@pytest.mark.parametrize("word", ["success", "discard", "rerecord"])
def test_a_word_that_judges_nothing_is_answered(word: str) -> None:
    bench = Attended()
    bench.say(word)
    assert any(word in event.detail for event in bench.events if event.kind == "refused")


@pytest.mark.parametrize("word", ["success", "scene_ready"])
def test_a_demonstration_is_there_once_something_was_said_of_it_though_nothing_can_act_yet(word: str) -> None:
    """It is what the first version waits for."""
    bench = Attended(version=0).say("take_over").say("scene_ready", 20).say("end", 20).say("hand_back", 20)
    assert (bench.loop.hold.reason, bench.stored()) == (HoldReason.no_version, [])
    bench.say(word)
    assert bench.stored() == [(SEED, "success" if word == "success" else "unjudged")]


def test_the_last_episode_of_a_job_is_there_once_it_has_a_verdict() -> None:
    bench = Attended()
    bench.uplink.send(Job("two", FAKE_TASKS[:1], 900, episodes=1))
    bench.tick(2).say("scene_ready").say("end", 20)
    assert (bench.loop.hold.reason, bench.stored(), bench.status.open_outcome) == (HoldReason.no_job, [], "unjudged")
    bench.say("success")
    assert (bench.stored(), bench.status.open_outcome) == ([(900, "success")], "")


@pytest.mark.parametrize("said", ["", "success"])
def test_what_was_said_outlives_control(said: str) -> None:
    bench = Attended().say("scene_ready").say("end")
    if said:
        bench.say(said)
    bench.restart_control()
    assert bench.waits(), "nobody knows how the scene stands"
    bench.say("scene_ready")
    assert bench.stored() == [(SEED, said or "unjudged")]


def test_closing_control_closes_the_episode() -> None:
    bench = Attended().say("scene_ready").say("end").say("failure")
    bench.loop.close()
    bench.introduce()
    assert bench.stored() == [(SEED, "failure")]


@pytest.mark.parametrize("name", ["reset_s", "max_s"])
def test_times_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"EpisodeRules: {name} is -1"):
        EpisodeRules(**{name: -1})


# --- anything in any order ------------------------------------------------------------------------------------------


class Expected:
    """What a person would say is stored, written down a second time."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, str]] = []
        self.running = False
        self.open = ""
        self.seed = SEED
        """of the newest episode"""
        self.next_seed = SEED
        self.stops: set[str] = set()
        self.ready = False
        self.since_restart = 0

    def happen(self, what: str) -> None:
        getattr(self, what, lambda: None)()

    def close(self, outcome: str = "") -> None:
        if self.running or self.open:
            self.ended.append((self.seed, outcome or self.open))
        self.running, self.open = False, ""

    def judge(self, outcome: str) -> None:
        if self.running or self.open:
            self.running, self.open = False, outcome

    def success(self) -> None:
        self.judge("success")

    def failure(self) -> None:
        self.judge("failure")

    def end(self) -> None:
        if self.running:
            self.judge("unjudged")

    def discard(self) -> None:
        self.close("discarded")

    def rerecord(self) -> None:
        if self.running or self.open:
            self.next_seed = self.seed
        self.discard()

    def scene_ready(self) -> None:
        if not (self.running or self.stops or self.ready):
            self.close()
            self.running, self.seed = True, self.next_seed
            self.next_seed += 1

    def estop(self) -> None:
        self.stops.add("s")
        self.ready = False
        if self.running:
            self.judge("aborted")

    def start(self) -> None:
        self.stops.clear()
        self.ready = False

    def kill(self) -> None:
        self.close("" if self.open else "aborted")
        self.next_seed, self.since_restart = SEED, len(self.ended)

    @property
    def finished(self) -> int:
        outcomes = [outcome for _, outcome in self.ended[self.since_restart :]] + [self.open]
        return sum(outcome in ("success", "failure", "unjudged") for outcome in outcomes)


EVENTS = (
    *sorted(EPISODE_COMMANDS - {"next"}),
    "scene_ready",
    "take_over",
    "command",
    "hand_back",
    "drop_link",
    "estop",
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_whatever_happens_what_is_stored_is_what_was_meant(events: list[str]) -> None:
    bench, expected = Attended(), Expected()
    for event in ["scene_ready", *events]:
        match event:
            case "kill":
                # its uplink ends what nobody goes on with once the next control process begins an episode
                bench.recorder.break_off()
                bench.restart_control()
            case "estop":
                bench.say("estop", stop="s")
            case "start":
                bench.say("release_estop", stop="s").say("start")
            case "command":
                bench.say("command", 2, action=(-0.4, 0.2, 0.0, 0.0))
            case _:
                bench.say(event, 6)
        expected.happen(event)
        assert (bench.loop.tracker.running, bench.stored()) == (expected.running, expected.ended), event
        assert (bench.loop.episodes.review.outcome, bench.loop.inbox.finished) == (expected.open, expected.finished)
        assert expected.running or bench.loop.mode not in (Mode.policy, Mode.script)
    assert set(expected.open.split()) <= set(EpisodeOutcome)
