"""From one episode to the next: the robot comes to rest, the scene is reset, a person has their say.

episode runs ── last step ──► what it led to is read ──► at rest ─────────────────────────► reset ──► episode runs
                                                           └─ nobody but a person can reset ─┘
                                                              it: hold, or follow who drives,
                                                              until they say it is ready
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from robot_edge.chunking.scheduler import ChunkSchedulerSelector
from robot_edge.control.command_inbox import CommandInbox
from robot_edge.control.commanded_robot import CommandedRobot
from robot_edge.control.config import LoopConfig
from robot_edge.control.episodes.review import EpisodeReview
from robot_edge.control.episodes.tracker import EpisodeTracker
from robot_edge.control.guarded_robot import GuardedRobot
from robot_edge.control.mode import NO_HOLD, HoldReason, Mode
from robot_edge.control.operator_override import OperatorOverride
from robot_edge.control.rate import Rate
from wire.clock import Clock
from wire.types import VERDICTS, Episode, EpisodeOutcome, Observation, OperatorCommandKind

_NEXT_NS = 1_000_000_000
"""whoever says `next` sooner after an episode has ended may have meant that one"""


_NOBODY_ACTS = (HoldReason.no_job, HoldReason.no_version, HoldReason.other_version, HoldReason.untrained)
"""no episode can begin, whatever the scene is like"""


class EpisodeRunner:
    """Begins and ends the episodes of one robot, and hears what people say of them."""

    def __init__(
        self,
        tracker: EpisodeTracker,
        inbox: CommandInbox,
        override: OperatorOverride,
        commanded: CommandedRobot,
        driver: GuardedRobot,
        chunks: ChunkSchedulerSelector,
        rate: Rate,
        clock: Clock,
        config: LoopConfig,
        *,
        notify: Callable[[str, str], None],
        publish_status: Callable[[bool], None],
        on_begun: Callable[[Episode], None],
    ) -> None:
        """`config.episodes` is settled. `publish_status(now)`: what goes on, `now` or when it is due; `on_begun`: the
        scene is a new one.
        """
        self.review = EpisodeReview(tracker.recorder, inbox)
        self._tracker, self._inbox, self._override = tracker, inbox, override
        self._commanded, self._driver, self._chunks = commanded, driver, chunks
        self._rate, self._clock, self._config, self._rules = rate, clock, config, config.episodes
        self._notify, self._publish_status, self._on_begun = notify, publish_status, on_begun
        self._scene_ready = not self._rules.reset_by_person
        self._waited_ticks = 0
        """how long the person has had for the scene"""

    def ensure_running(self, tick: int, status_due: bool) -> bool:
        """Whether an episode runs. Begins the next one with a robot that is connected and at rest."""
        if self._tracker.outcome:
            self.finish(self._driver.observe())
            self._obey()
            return False
        self.review.check()
        scene_ready = self._obey()
        if not self._tracker.running:
            self._inbox.adopt_job()
        if not self._ensure_connected():
            self._forget_scene()
            return False
        if self._tracker.running:
            return True
        if self._driver.stopped:
            # Whoever stopped it may have stepped in.
            self._forget_scene()
        if not self._scene_ready:
            self._await_scene(scene_ready, status_due)
            return False
        return self._commanded.come_to_rest() and self._start(tick, status_due)

    def end(self, terminal: Observation | None = None, *, discarded: bool = False) -> None:
        """The running episode, if there is one, is over: broken off, unless its last step is recorded; `discarded`: a
        person throws it away.
        """
        if (episode := self._tracker.episode) is None:
            return
        stays_open = bool(self._rules.reset_by_person) and not discarded and episode.id != self._inbox.lost_episode
        outcome = self._tracker.end(self._clock.now_ns(), terminal, awaits_verdict=stays_open, discarded=discarded)
        self._inbox.count_episode(episode, outcome)
        self._forget_scene()
        if stays_open:
            self.review.open(episode, outcome)

    def finish(self, observation: Observation | None) -> None:
        """The tick after an episode's last action: record what it led to, as was observed, then slow down."""
        commanded, driver = self._commanded, self._driver
        commanded.seen = observation or commanded.seen
        self.end(None if driver.observation_fault else observation)
        if driver.connected:
            commanded.decide(resetting=True)
            commanded.come_to_rest()
        else:
            commanded.hold_for(driver.fault)

    def close(self) -> None:
        """End the running episode; nobody will say more of it."""
        self.end()
        self.review.close()

    # --- what people say ------------------------------------------------------------------------------------------

    def _obey(self) -> bool:
        """Do what was said of episodes since the last tick; whether it was said that the scene is ready."""
        commands, scene_ready = self._inbox.pop_episode_commands(), False
        waited = self._waited_ticks * self._rate.period_ns >= _NEXT_NS
        for kind in commands:
            if kind == OperatorCommandKind.next:
                kind = OperatorCommandKind.scene_ready if waited else OperatorCommandKind.end
            if kind in (OperatorCommandKind.discard, OperatorCommandKind.rerecord):
                self._discard(again=kind == OperatorCommandKind.rerecord)
            elif kind == OperatorCommandKind.scene_ready:
                scene_ready = True
            elif kind in (OperatorCommandKind.recover, OperatorCommandKind.correct):
                self._say_part(kind)
            elif self._tracker.running:
                self._tracker.end_with(EpisodeOutcome(kind) if kind in VERDICTS else None)
            elif kind in VERDICTS and self.review.episode is not None:
                self.review.judge(EpisodeOutcome(kind))
            elif kind in VERDICTS:
                self._judges_nothing(kind)
        return scene_ready

    def _discard(self, again: bool) -> None:
        episode = self._tracker.episode or self.review.episode
        if episode is None:
            self._judges_nothing(OperatorCommandKind.rerecord if again else OperatorCommandKind.discard)
            return
        if self._tracker.running:
            self.end(discarded=True)
        else:
            self.review.judge(EpisodeOutcome.discarded)
            self.review.close()
        if again:
            self._inbox.repeat_episode(episode)

    def _say_part(self, kind: OperatorCommandKind) -> None:
        if not (self._tracker.running and self._override.in_control):
            self._notify("refused", f"'{kind}': nobody drives it in an episode. Take over first.")
        elif not self._tracker.intervention.say(kind):
            self._notify("refused", f"'{kind}': a correction has begun. It can be said after the policy has acted.")
        else:
            self._publish_status(True)

    def _judges_nothing(self, kind: str) -> None:
        self._notify("refused", f"'{kind}': no episode runs, and none waits for a word.")

    def _forget_scene(self) -> None:
        """It is not what it was when somebody said that it is ready."""
        self._scene_ready, self._waited_ticks = not self._rules.reset_by_person, 0

    # --- between two episodes -------------------------------------------------------------------------------------

    def _ensure_connected(self) -> bool:
        """Whether the robot can be used; else name the hold. Connecting may take its time."""
        driver, commanded = self._driver, self._commanded
        was_connected = driver.connected
        if not was_connected:
            # Connecting may take its time, in which this is the last word.
            commanded.hold_for(driver.fault)
            self._publish_status(False)
        connected = driver.ensure_connected()
        if not connected:
            commanded.hold_for(driver.fault)
            self.end()
        if not connected or not was_connected:
            commanded.seen = None
            self._rate.restart()
        return connected

    def _conditions(self) -> dict[str, Any]:
        """What must be there before an episode can begin, but for the robot and its scene."""
        inbox, needs_policy = self._inbox, self._config.needs_policy
        if inbox.version and self._chunks.select(inbox.trained) and self._chunks.refused:
            self._notify("refused", self._chunks.refused)
        return {
            "resting": inbox.resting,
            "recorder_ok": self._tracker.recorder.healthy,
            "storage_ok": inbox.storage_ok,
            # Without a policy the scripted operator does everything, or the person who has taken over.
            "script": not needs_policy or self._override.in_control,
            "version": inbox.version,
            "version_fits": not inbox.wants_other_version,
            "trained": not self._chunks.refused,
            "scene_open": not self._scene_ready,
        }

    def _await_scene(self, said_ready: bool, status_due: bool) -> None:
        """A tick in which a person resets the scene: the robot holds, or follows whoever drives it."""
        commanded, override, driver = self._commanded, self._override, self._driver
        conditions = self._conditions()
        commanded.decide(**conditions)
        if commanded.hold.reason is not HoldReason.scene:
            if commanded.hold.reason in _NOBODY_ACTS and (said_ready or self.review.judged):
                # It may be this episode that the first version, or the next job, waits for.
                self.review.close()
            if commanded.come_to_rest():
                commanded.decide(**conditions)
                driver.look_at_rest(status_due=status_due, scene=commanded.seen is not None)
            return
        self._waited_ticks += 1
        waited_s = self._waited_ticks * self._rate.period_ns / 1e9
        if said_ready or 0 < self._rules.reset_s <= waited_s:
            self._scene_ready = True
        if commanded.seen is None:
            # It was not reset since it was connected: nobody knows yet where it is.
            driver.look_at_rest(status_due=status_due, scene=False)
        elif commanded.observe() is not None:
            commanded.decide(
                **conditions,
                fault=driver.observation_fault or (driver.fault if driver.refused_commands else NO_HOLD),
                human=override.in_control,
                human_linked=override.linked,
                human_command_fresh=override.action(commanded.executed) is not None,
            )
            action = override.action(commanded.executed) if commanded.mode is Mode.human else None
            action = commanded.checked(action)
            blended = override.blend(commanded.mode, action, commanded.executed, commanded.waited)
            commanded.apply(blended, self._rate.next_ns)

    def _start(self, tick: int, status_due: bool) -> bool:
        """Begin the job's next episode if nothing forbids it; else name the hold."""
        inbox, commanded, driver = self._inbox, self._commanded, self._driver
        commanded.decide(**self._conditions())
        if commanded.hold:
            self._forget_scene()
            driver.look_at_rest(status_due=status_due, scene=commanded.seen is not None)
            return False
        commanded.decide(resetting=True)
        self._publish_status(driver.rest_motion is None)
        task, seed = inbox.next_episode()
        done = driver.reset(task, seed, move=not self._override.in_control)
        if done is None and driver.rest_motion is not None:
            return False
        commanded.seen = None
        self._rate.restart()
        if not done:
            if done is not None:
                self._forget_scene()
            commanded.hold_for(driver.fault)
            if done is not None and driver.connected:
                # It is not the robot but the task: another one may go.
                inbox.on_episode_begun()
            return False
        inbox.on_episode_begun()
        self.review.close()
        self._override.new_scene()
        source = "evaluation" if inbox.evaluating else ""
        self._waited_ticks = 0
        self._on_begun(self._tracker.start(task, seed, tick, self._clock.now_ns(), source))
        return True
