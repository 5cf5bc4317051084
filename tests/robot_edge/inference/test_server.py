"""Inference: newest request, latents that are never mixed, weights swapped whole or not at all, without a gap."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.paced_slow_path import PacedSlowPath
from robot_edge.inference.server import Inference, SlowConfig
from robot_edge.inference.slow_path import InlineSlowPath, SlowPath
from tests.robot_edge.inference.thinking import Scripted, seen, version
from wire.clock import ManualClock
from wire.errors import ConfigError
from wire.messages.gateway import EdgeEvent, Hello, VersionActivated
from wire.messages.local import ChunkReply, ChunkRequest, EpisodeStarted, LoadWeights
from wire.transport.memory_channel import memory_pair
from wire.types import Episode, Observation, Prefix

MS = 1_000_000
EPISODE = EpisodeStarted(Episode("e", "robot-0", "h", "reach", 0, "online", 0))


class Bench:
    """Inference between two lines in memory, on a clock that stands still."""

    def __init__(
        self,
        think_every_s: float = 0.0,
        *,
        standby: bool = False,
        latency_s: float | None = None,
        config: SlowConfig | None = None,
        local: Scripted | None = None,
    ) -> None:
        self.control, control = memory_pair()
        self.uplink, uplink = memory_pair()
        self.clock = ManualClock(7)
        self.policy, self.standby = Scripted(), Scripted() if standby else None
        self.files = {"good": b"good", "bad": b"bad"}
        self._held = tempfile.TemporaryDirectory()
        slow: SlowPath | None = None
        if latency_s is not None:
            slow = PacedSlowPath(InlineSlowPath(self.policy), self.clock, 1000.0, latency_s)
        self.inference = Inference(
            "robot-0",
            self.policy,
            control,
            uplink,
            self.clock,
            standby=self.standby,
            slow=slow,
            config=config or SlowConfig(think_every_s, max(2.0, 3 * think_every_s)),
            local=local,
        )

    def path(self, name: str) -> str:
        """A file with what `files` has under this name; the name itself when it has nothing."""
        if name not in self.files:
            return name
        file = Path(self._held.name) / name
        file.write_bytes(self.files[name])
        return str(file)

    def load(self, number: int, path: str = "good") -> None:
        self.uplink.send(LoadWeights(version(number, self.files.get(path, b"")), self.path(path)))
        self.inference.poll()
        self.settle()

    def settle(self) -> None:
        """Weights are loaded in a thread when there is a standby: let it finish."""
        deadline = time.monotonic() + 60
        while (loading := self.inference._swap._loading) is not None and time.monotonic() < deadline:
            loading[1].exception(5.0)
            self.inference.poll()

    def applied(self) -> list[int]:
        found = []
        while (message := self.uplink.recv()) is not None:
            if isinstance(message, VersionActivated):
                found.append(message.number)
        return found

    def ask(self, *ticks: int, frame_ns: int = 90, task: str = "reach", observation: Observation | None = None) -> list:
        for tick in ticks:
            made = observation or seen(frame_ns, task)
            self.control.send(ChunkRequest(tick, made, tick, made.state))
        self.inference.poll()
        found = []
        while (message := self.control.recv()) is not None:
            assert isinstance(message, ChunkReply)
            found.append(message)
        return found


# --- requests and thoughts -------------------------------------------------------------------------------------------


def test_without_weights_there_is_no_chunk_but_a_reason() -> None:
    (reply,) = Bench().ask(1)
    assert reply.chunk is None
    assert "no policy version" in reply.error
    assert reply.tick == 1


def test_only_the_newest_request_is_answered() -> None:
    bench = Bench()
    bench.load(1)
    (reply,) = bench.ask(1, 2, 3)
    assert reply.chunk is not None
    assert (reply.tick, reply.chunk.first_tick) == (3, 3)


def test_the_fast_path_gets_the_state_and_time_of_the_first_tick() -> None:
    bench = Bench()
    bench.load(1)
    coming = np.full(4, 0.5, np.float32)
    prefix = Prefix(np.zeros((2, 4), np.float32), 2)
    bench.control.send(ChunkRequest(10, seen(90), 14, coming, prefix, True))
    bench.inference.poll()
    ((observation, latent, tick, given_prefix),) = bench.policy.acted
    assert (observation.time_ns, tick) == (100 + 4 * 12_500_000, 14)
    assert (observation.state == coming).all()
    assert given_prefix is not None
    assert given_prefix.committed == 2
    reply = bench.control.recv()
    assert isinstance(reply, ChunkReply)
    assert np.array_equal(reply.latent, latent.data)  # type: ignore[arg-type]
    assert reply.corrector is not None
    assert reply.corrector.version == 1


def test_latent_and_corrector_only_when_asked_for() -> None:
    bench = Bench()
    bench.load(1)
    (reply,) = bench.ask(1)
    assert (reply.latent, reply.corrector) == (None, None)


def test_it_thinks_once_per_frame_and_again_after_a_swap() -> None:
    bench = Bench()
    bench.load(1)
    bench.ask(1)
    bench.ask(2)
    bench.ask(3, frame_ns=95)
    assert bench.policy.thoughts == [90, 95]
    bench.load(2)
    (reply,) = bench.ask(4, frame_ns=95)
    assert bench.policy.thoughts == [90, 95, 95]
    assert reply.chunk.version == 2


def test_the_slow_path_keeps_its_own_pace() -> None:
    bench = Bench(think_every_s=20e-9)
    bench.load(1)
    for tick, frame in enumerate((10, 20, 30, 31, 60)):
        bench.ask(tick, frame_ns=frame)
    assert bench.policy.thoughts == [10, 31, 60]


def test_another_instruction_is_thought_about_at_once() -> None:
    bench = Bench(think_every_s=1.0)
    bench.load(1)
    bench.ask(1)
    bench.ask(2, task="push")
    bench.ask(3, task="push")
    assert len(bench.policy.thoughts) == 2


def test_a_clock_that_jumps_back_does_not_stop_the_thinking() -> None:
    bench = Bench()
    bench.load(1)
    bench.control.send(EPISODE)
    bench.ask(1, frame_ns=5000)
    (reply,) = bench.ask(2, frame_ns=40)
    assert reply.chunk is not None
    assert bench.policy.thoughts == [5000, 40]


def test_a_policy_that_fails_gives_a_reason() -> None:
    bench = Bench()
    bench.load(1)
    bench.policy.fail = "act"
    (reply,) = bench.ask(1)
    assert (reply.chunk, reply.error, reply.tick) == (None, "it cannot", 1)
    bench.policy.fail = "think"
    (reply,) = bench.ask(2, frame_ns=99)
    assert reply.error == "it cannot think"


# --- weights, with one policy object ---------------------------------------------------------------------------------


def test_what_was_applied_is_told_and_bad_weights_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.inference.hello()
    assert isinstance(bench.uplink.recv(), Hello)
    bench.load(1)
    applied = bench.uplink.recv()
    assert isinstance(applied, VersionActivated)
    assert (applied.number, applied.applied_ns, applied.trained.trained_max_delay) == (1, 7, 8)
    bench.load(2, "bad")
    refused = bench.uplink.recv()
    assert isinstance(refused, EdgeEvent) and refused.kind == "refused" and "version 2" in refused.detail
    assert bench.uplink.recv() is None
    assert bench.policy.version == 1
    assert "stays on version 1" in caplog.text


def test_what_does_not_fit_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.load(1)
    # whoever asks every few seconds whether it was taken sends it again
    for _ in range(3):
        bench.load(2, "bad")
    assert caplog.text.count("stays on version 1") == 1
    bench.load(2, "good")
    assert bench.policy.version == 2
    bench.load(3, "gone")
    bench.load(3)
    assert bench.policy.version == 3, "a file that could not be read may be there the next time"


def test_what_runs_already_is_not_loaded_again_but_told() -> None:
    bench = Bench()
    bench.load(1)
    bench.ask(1)
    (Path(bench._held.name) / "good").unlink()
    bench.uplink.send(LoadWeights(version(1), "gone"))
    bench.inference.poll()
    assert bench.applied() == [1, 1]
    (reply,) = bench.ask(2)
    assert reply.chunk is not None
    assert bench.policy.thoughts == [90]


def test_a_missing_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.load(1, str(tmp_path / "gone"))
    assert bench.policy.version == 0
    assert "has no version now" in caplog.text
    (reply,) = bench.ask(1)
    assert reply.chunk is None and "gone" in reply.error


# --- weights, with a second policy object ----------------------------------------------------------------------------


def test_the_old_version_acts_until_the_new_one_has_its_first_latent() -> None:
    bench = Bench(standby=True, latency_s=0.1)
    bench.load(1)
    assert bench.applied() == [1]
    made = []
    for tick in range(80):
        if tick == 30:
            bench.load(2)
        (reply,) = bench.ask(tick, frame_ns=(1 + tick) * 10 * MS)
        made.append(reply.chunk.version if reply.chunk else 0)
        if reply.chunk and reply.chunk.version == 2 and 2 not in made[:-1]:
            assert bench.applied() == [2]
        bench.clock.advance(10 * MS)
    # Before the very first latent there is nothing; after it there is no gap, and nothing is told too early.
    assert made == [0] * 10 + [1] * 30 + [2] * 40


def test_loading_does_not_stop_the_fast_path() -> None:
    bench = Bench(standby=True)
    assert bench.standby is not None
    bench.standby._load_s = bench.policy._load_s = 1.0
    bench.load(1)
    bench.uplink.send(LoadWeights(version(2), bench.path("good")))
    answers: list[int] = []
    while 2 not in answers:
        (reply,) = bench.ask(len(answers), frame_ns=len(answers))
        answers.append(reply.chunk.version)
        time.sleep(0.005)
    assert answers.count(1) > 10
    assert answers[-1] == 2


def test_bad_weights_in_the_standby_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(standby=True)
    bench.load(1)
    bench.load(2, "bad")
    (reply,) = bench.ask(1)
    assert reply.chunk.version == 1
    assert bench.applied() == [1]
    assert "stays on version 1" in caplog.text
    bench.load(3)
    (reply,) = bench.ask(2)
    assert reply.chunk.version == 3


def test_a_roll_back_is_a_version_like_any_other() -> None:
    bench = Bench(standby=True, latency_s=0.0)
    for number in (1, 5, 1):
        bench.clock.advance(10 * MS)
        bench.load(number)
        bench.ask(number)
        (reply,) = bench.ask(number, frame_ns=91)
        assert reply.chunk.version == number
    assert bench.applied() == [1, 5, 1]


def test_a_robot_that_asks_for_nothing_switches_at_once() -> None:
    bench = Bench(standby=True, latency_s=0.1)
    bench.load(1)
    bench.load(2)
    assert bench.applied() == [1, 2]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("ask", "ask", "ask", "load", "episode", "task", "back", "wait")), st.integers(0, 300)
        ),
        max_size=60,
    ),
    st.sampled_from((None, 0.0, 0.03, 0.2)),
    st.sampled_from(("hold", "local")),
    st.booleans(),
)
def test_versions_are_never_mixed(
    events: list[tuple[str, int]], latency_s: float | None, fallback: str, standby: bool
) -> None:
    """`Scripted.act` refuses a latent of other weights with MIXED; chunks must also be of a version that was told."""
    config = SlowConfig(max_age_s=0.15, fallback=fallback)
    bench = Bench(standby=standby, latency_s=latency_s, config=config)
    number, at_ns, task = 0, 1000 * MS, "reach"
    told: list[int] = []
    for tick, (what, amount) in enumerate(events):
        bench.clock.advance(amount * MS // 10)
        at_ns += amount * MS // 10
        if what == "load":
            number += 1
            bench.files[f"v{number}"] = bytes([number])
            bench.load(number, f"v{number}")
        elif what == "episode":
            bench.control.send(EPISODE)
        elif what == "task":
            task = f"task {amount % 3}"
        elif what == "back":
            at_ns -= amount * MS
        elif what == "ask":
            (reply,) = bench.ask(tick, frame_ns=at_ns, task=task)
            told += bench.applied()
            assert "MIXED" not in reply.error
            if reply.chunk is not None:
                assert reply.chunk.version == told[-1]
            elif fallback == "local" and told:
                assert not reply.error
    bench.inference.close()


# --- a slow path that is slow or silent ------------------------------------------------------------------------------


def test_thoughts_about_the_last_episode_are_void() -> None:
    bench = Bench(latency_s=0.05)
    bench.load(1)
    bench.ask(1, frame_ns=10 * MS)
    bench.clock.advance(60 * MS)
    assert bench.ask(2, frame_ns=60 * MS)[0].chunk is not None
    bench.control.send(EPISODE)
    # One thought of the old scene is under way: it must not come through either.
    for at in (70, 80, 120, 125):
        (reply,) = bench.ask(at, frame_ns=at * MS)
        latent_ns = bench.policy.acted[-1][1].observed_ns + 50
        assert reply.chunk is None or latent_ns >= 70 * MS
        bench.clock.advance(10 * MS)
    bench.clock.advance(50 * MS)
    (reply,) = bench.ask(130, frame_ns=130 * MS)
    assert reply.chunk is not None


class Mute(InlineSlowPath):
    """A slow path that can be silenced."""

    immediate = False
    silent = False

    @property
    def problem(self) -> str:  # type: ignore[override]
        return "the link is down" if self.silent else ""

    def request(self, observation: Observation, versions: tuple[int, ...]) -> None:
        if not self.silent:
            super().request(observation, versions)


def muted(fallback: str, local: Scripted | None = None) -> tuple[Bench, Mute]:
    bench = Bench(config=SlowConfig(max_age_s=0.5, fallback=fallback), local=local)
    slow = Mute(bench.policy)
    bench.inference._slow = slow
    bench.load(1)
    assert bench.ask(1, frame_ns=0)[0].chunk is not None
    slow.silent = True
    assert bench.ask(2, frame_ns=500 * MS)[0].chunk is not None, "an old latent serves up to its age"
    bench.applied()
    return bench, slow


def events(bench: Bench) -> list[tuple[str, str]]:
    found = []
    while (message := bench.uplink.recv()) is not None:
        if isinstance(message, EdgeEvent):
            found.append((message.kind, message.detail))
    return found


def test_a_silent_slow_path_brings_hold_with_the_reason_and_recovers() -> None:
    bench, slow = muted("hold")
    for tick in (3, 4):
        (reply,) = bench.ask(tick, frame_ns=510 * MS)
        assert (reply.chunk, reply.tick) == (None, tick)
        assert reply.error == "the slow path is silent for 0.51 s: the link is down."
    slow.silent = False
    assert bench.ask(5, frame_ns=520 * MS)[0].chunk is not None
    assert events(bench) == [
        ("slow_path_silent", "the slow path is silent for 0.51 s: the link is down. Fallback: hold."),
        ("recovered", "the slow path is back."),
    ]


def test_a_silent_slow_path_is_replaced_by_thinking_here() -> None:
    bench, slow = muted("local")
    before = len(bench.policy.thoughts)
    for tick in (3, 4):
        assert bench.ask(tick, frame_ns=600 * MS)[0].chunk.version == 1
    assert bench.policy.thoughts[before:] == [600 * MS], "once per frame"
    slow.silent = False
    assert bench.ask(5, frame_ns=700 * MS)[0].chunk is not None
    assert [kind for kind, _ in events(bench)] == ["slow_path_silent", "recovered"]


def test_a_small_policy_stands_in() -> None:
    small = Scripted()
    small.load(b"small", 900)
    bench, slow = muted("local", small)
    assert bench.ask(3, frame_ns=600 * MS)[0].chunk.version == 900
    slow.silent = False
    assert bench.ask(4, frame_ns=610 * MS)[0].chunk.version == 1
    assert small.thoughts == [600 * MS]


def test_frames_that_do_not_change_do_not_age_a_thought() -> None:
    """A slow camera is not a silent slow path; a frozen one is the health checks' matter."""
    bench, _ = muted("hold")
    (reply,) = bench.ask(3, observation=seen(400 * MS, time_ns=5000 * MS))
    assert reply.chunk is not None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"fallback": "holt"}, "no fallback 'holt'"), ({"every_s": 3.0}, "max_age_s must be larger")],
)
def test_settings_that_cannot_work(wrong: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SlowConfig(**wrong)
