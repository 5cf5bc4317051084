"""The control loop: read → decide → limit → write → record, once per control period.

It never waits for the network, a disk or a model: chunks, jobs and people's commands come through queues that are
looked at between two ticks, and what happened leaves the same way.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from hal.interfaces.robot import Feedback, HoldingRobot, Teleoperator
from hal.safety.limiter import hold_action, limit_action
from hal.safety.rest import rest_action
from robot_edge.chunking.scheduler import ChunkSchedulerSelector, MakeScheduler, PlannedAction
from robot_edge.control.command_inbox import CommandInbox
from robot_edge.control.config import LoopConfig
from robot_edge.control.episode_tracker import EpisodeTracker, StepRecorder
from robot_edge.control.guarded_robot import GuardedRobot
from robot_edge.control.mode import NO_HOLD, ControlConditions, Hold, HoldReason, Mode, decide
from robot_edge.control.operator_override import OperatorOverride
from robot_edge.control.rate import Rate
from robot_edge.control.status import edge_status
from robot_edge.control.takeover import ScriptedTakeover
from wire.clock import Clock
from wire.errors import ConfigError, InvalidDataError
from wire.messages.gateway import EdgeEvent, EdgeStatus
from wire.messages.local import ChunkReply, EpisodeStarted
from wire.transport.channel import Channel
from wire.transport.frame_ring import without_previews
from wire.types import Episode, Observation

log = logging.getLogger(__name__)


class ControlLoop:
    """One robot's loop. `uplink` and `inference` are channels to the two other processes of its computer."""

    def __init__(
        self,
        name: str,
        session_id: str,
        robot: HoldingRobot,
        uplink: Channel,
        inference: Channel,
        make_scheduler: MakeScheduler,
        clock: Clock,
        config: LoopConfig,
        operator: Teleoperator | None = None,
    ) -> None:
        """`session_id` names this start of the process, so that episode ids never repeat.

        Raises `ConfigError` for a `write_after_s` that does not fit the robot.
        """
        if not 0 <= config.write_after_s < robot.spec.period_ns / 1e9:
            raise ConfigError(
                f"robot '{name}': commands {config.write_after_s:g} s after the beginning of a tick do not fit into a "
                f"control period of {robot.spec.period_ns / 1e9:g} s; choose a smaller write_after_s."
            )
        self.name = name
        self.robot = robot
        self.config = config
        self.mode = Mode.hold
        self.hold = Hold(HoldReason.no_job)
        """why the robot holds"""
        self.status: EdgeStatus | None = None
        """published last"""
        self.chunks = ChunkSchedulerSelector(make_scheduler)
        self.rate = Rate(robot.spec.period_ns, clock)
        self.override = OperatorOverride(robot.spec, clock)
        self.inbox = CommandInbox(name, self.override)
        self.tracker = EpisodeTracker(name, session_id, robot.spec, StepRecorder(uplink), config, self._notify)
        self.driver = GuardedRobot(name, robot, config.driver, config.observation_limits, clock, self._notify)
        self._scripted = ScriptedTakeover(operator, config.gate, self._notify)
        self._clock = clock
        self._uplink = uplink
        self._inference = inference
        self._tick = self._next_status = 0
        self._seen: Observation | None = None
        """the newest valid observation of this scene"""
        self._executed = np.zeros(robot.spec.action_dim, np.float32)
        self._still = True
        """what the robot did with its last command, as it said, and whether it stands"""
        self._missing_action = Hold(HoldReason.no_action)
        """why inference brings no action, by its newest reply"""
        self._interrupted = False
        """somebody or something else has the robot, and what is planned is for where it would be without"""

    def tick(self) -> None:
        """One control period."""
        self.rate.wait()
        self._tick += 1 + self.rate.skipped
        if self.rate.skipped:
            self.chunks.scheduler.void()
        self._handle_messages()
        if self._ensure_episode() and (observation := self._observe()) is not None:
            planned = self._next_action(observation)
            scripted = self._scripted_action(observation, planned)
            self._decide_control(planned, scripted)
            proposed = self._select(planned, scripted)
            feedback = self._apply(self._checked(proposed), self.rate.next_ns)
            self._record(observation, proposed, feedback, planned)
        self._publish_status()

    def close(self) -> None:
        """End the running episode and stop the robot."""
        self._end()
        self.driver.close()

    # --- messages -------------------------------------------------------------------------------------------------

    def _handle_messages(self) -> None:
        inbox = self.inbox
        while (message := self._inference.recv()) is not None:
            if isinstance(message, ChunkReply):
                self._handle_reply(message)
            else:
                inbox.handle_message(message)
        while (message := self._uplink.recv()) is not None:
            inbox.handle_message(message)
        self.driver.give_orders(inbox.stop_orders)
        self.driver.request_previews(inbox.previews_wanted)
        if self.tracker.episode and not self.tracker.outcome and (why := self._void_because(self.tracker.episode)):
            log.warning("robot '%s': %s; the running episode ends.", self.name, why)
            self._end()

    def _handle_reply(self, reply: ChunkReply) -> None:
        reason = HoldReason.slow_path_lost if reply.silent else HoldReason.no_action
        if reply.chunk is not None and not np.isfinite(reply.chunk.actions).all():
            reply, reason = ChunkReply(None, "an action is not finite.", reply.tick), HoldReason.bad_action
        if reply.error and reply.error != self._missing_action.detail:
            log.warning("robot '%s': inference: %s", self.name, reply.error)
        self._missing_action = Hold(reason, reply.error)
        self.chunks.scheduler.submit(reply, self._tick)

    def _void_because(self, episode: Episode) -> str:
        """Why the running episode cannot go on, '' when it can."""
        if self.inbox.lost_episode == episode.id:
            return "the recorder lost some of it"
        if self.config.needs_policy and self.chunks.is_outdated(self.inbox.trained):
            return "the weights were trained in another way"
        return "another version acts than the job asks for" if self.inbox.wants_other_version else ""

    def _notify(self, kind: str, detail: str) -> None:
        log.warning("robot '%s': %s: %s", self.name, kind, detail)
        self._uplink.send(EdgeEvent(self.name, self._clock.now_ns(), kind, detail))

    # --- episodes -------------------------------------------------------------------------------------------------

    def _ensure_episode(self) -> bool:
        """Whether an episode runs. Begins the next one with a robot that is connected and at rest."""
        if self.tracker.outcome:
            self._finish_episode()
            return False
        if not self.tracker.running:
            self.inbox.adopt_job()
        return self._ensure_connected() and (self.tracker.running or (self._at_rest() and self._start_episode()))

    def _ensure_connected(self) -> bool:
        """Whether the robot can be used; else name the hold. Connecting may take its time."""
        was_connected = self.driver.connected
        if not was_connected:
            # Connecting may take its time, in which this is the last word.
            self._hold_for(self.driver.fault)
            self._publish_status()
        connected = self.driver.ensure_connected()
        if not connected:
            self._hold_for(self.driver.fault)
            self._end()
        if not connected or not was_connected:
            self._seen = None
            self.rate.restart()
        return connected

    def _at_rest(self) -> bool:
        """Between two episodes: slow the robot down within its limits; whether it stands still."""
        if self._seen is not None and not self._still:
            self._apply(None)
            self._decide(resetting=True)
            return False
        return True

    def _start_episode(self) -> bool:
        """Begin the job's next episode if nothing forbids it; else name the hold."""
        inbox, needs_policy = self.inbox, self.config.needs_policy
        if inbox.version and self.chunks.select(inbox.trained) and self.chunks.refused:
            self._notify("refused", self.chunks.refused)
        self._decide(
            resting=inbox.resting,
            recorder_ok=self.tracker.recorder.healthy,
            storage_ok=inbox.storage_ok,
            # Without a policy the scripted operator does everything.
            script=not needs_policy,
            version=inbox.version,
            version_fits=not inbox.wants_other_version,
            trained=not self.chunks.refused,
        )
        if self.hold:
            self.driver.look_at_rest(status_due=self._tick >= self._next_status, scene=self._seen is not None)
            return False
        self._decide(resetting=True)
        self._publish_status(now=self.driver.rest_motion is None)
        task, seed = inbox.next_episode()
        if (
            done := self.driver.reset(task, seed, move=not self.override.in_control)
        ) is None and self.driver.rest_motion is not None:
            return False
        self._seen, self._missing_action = None, Hold(HoldReason.no_action, self._missing_action.detail)
        self.rate.restart()
        if not done:
            self._hold_for(self.driver.fault)
            if done is not None and self.driver.connected:
                # It is not the robot but the task: another one may go.
                inbox.on_episode_begun()
            return False
        inbox.on_episode_begun()
        self.override.new_scene()
        self._scripted.reset()
        self.chunks.scheduler.reset(self._tick)
        self._interrupted = False
        source = "evaluation" if inbox.evaluating else ""
        episode = self.tracker.start(task, seed, self._tick, self._clock.now_ns(), source)
        if needs_policy:
            # What inference thought about the last scene is not true of this one.
            self._inference.send(EpisodeStarted(episode))
        return True

    def _finish_episode(self) -> None:
        """The tick after an episode's last action: record what it led to, then slow down."""
        observation = self.driver.observe()
        self._seen = observation or self._seen
        self._end(None if self.driver.observation_fault else observation)
        if self.driver.connected:
            self._decide(resetting=True)
            self._at_rest()
        else:
            self._hold_for(self.driver.fault)

    def _end(self, terminal: Observation | None = None) -> None:
        """The running episode, if there is one, is over: broken off, unless its last step is recorded."""
        if (episode := self.tracker.episode) is not None:
            self.inbox.on_episode_ended(episode.id, self.tracker.end(self._clock.now_ns(), terminal))

    # --- read -----------------------------------------------------------------------------------------------------

    def _observe(self) -> Observation | None:
        """The newest valid observation of this scene. None, with the hold named, without one or without the robot."""
        observation = self.driver.observe()
        if observation is not None:
            if self._seen is None:
                # A scene was reset: what the robot executed before says nothing about where it is now.
                self._executed = rest_action(self.robot.spec, observation.state, self.config.safety)
                self._still = True
            self._seen = observation
        if self._seen is not None and self.driver.connected:
            return self._seen
        # Nobody knows what would hold a robot that was just reset.
        self._hold_for(self.driver.observation_fault)
        if not self.driver.stop_state.free or self.inbox.stopping or not self.driver.connected:
            self._end()
        return None

    # --- decide ---------------------------------------------------------------------------------------------------

    def _next_action(self, observation: Observation) -> PlannedAction | None:
        """Request a chunk when it is time; the policy's action for this tick and its chunk, if it has one."""
        scheduler = self.chunks.scheduler
        if self.config.needs_policy and not self.driver.observation_fault:
            request = scheduler.request_chunk(self._tick, without_previews(observation))
            if request is not None and not self._inference.send(request):
                scheduler.submit(ChunkReply(None, tick=self._tick), self._tick)
        if self.config.write_after_s:
            self._clock.sleep_until(self.rate.due_ns + int(self.config.write_after_s * 1e9))
            self._handle_messages()
        return scheduler.next_action(self._tick, observation)

    def _scripted_action(self, observation: Observation, planned: PlannedAction | None) -> np.ndarray | None:
        """float32[da]: the scripted operator's action if it is in control."""
        ready = self.inbox.version > 0 or not self.config.needs_policy
        if self.override.in_control or self.inbox.evaluating or not ready:
            return None
        return self._scripted.action(observation, planned[0] if planned else None)

    def _decide_control(self, planned: PlannedAction | None, scripted: np.ndarray | None) -> None:
        self._decide(
            recorder_ok=self.tracker.recorder.healthy,
            storage_ok=self.inbox.storage_ok,
            fault=self.driver.observation_fault or (self.driver.fault if self.driver.refused_commands else NO_HOLD),
            human=self.override.in_control,
            human_linked=self.override.linked,
            human_command_fresh=self.override.action(self._executed) is not None,
            script=scripted is not None,
            version=self.inbox.version,
            trained=not self.chunks.refused,
            # What is left of a chunk is executed first, unless the robot is no longer where it was made for.
            missing_action=self._missing_action if planned is None or self._interrupted else NO_HOLD,
        )

    def _decide(self, **known: Any) -> None:
        """Who is in control, from what is `known` of `ControlConditions` and from who stops the robot."""
        self.mode, self.hold = decide(ControlConditions(**self.driver.stop_conditions, **known))

    def _select(self, planned: PlannedAction | None, scripted: np.ndarray | None) -> np.ndarray | None:
        """float32[da]: what whoever is in control proposes, None for a hold."""
        match self.mode:
            case Mode.policy:
                return planned[0] if planned is not None else None
            case Mode.script:
                return scripted
            case Mode.human:
                return self.override.action(self._executed)
        return None

    def _checked(self, proposed: np.ndarray | None) -> np.ndarray | None:
        """`proposed` within its bounds; None, with the hold named, for what is no action."""
        if proposed is None:
            return None
        try:
            return limit_action(self.robot.spec, proposed)
        except InvalidDataError as error:
            log.warning("robot '%s': %s", self.name, error)
            self._hold_for(Hold(HoldReason.bad_action, str(error)))
            return None

    def _hold_for(self, fault: Hold) -> None:
        """The robot cannot be used, or what was decided cannot be done."""
        self._decide(fault=fault)

    # --- write, record, report ------------------------------------------------------------------------------------

    def _apply(self, action: np.ndarray | None, next_read_ns: int = 0) -> Feedback:
        """Command the robot, None to hold, and note what it did. A driver that refuses is given a while, during which
        it is held.
        """
        feedback = self.driver.write(action, next_read_ns)
        if feedback is None:
            if self.mode not in (Mode.estop, Mode.hold):
                self._hold_for(self.driver.fault)
            return Feedback(hold_action(self.robot.spec, self._executed))
        if feedback.held_ticks:
            # Its host held it meanwhile: it is not where the plan has it.
            self.chunks.scheduler.void()
        self._executed, self._still = feedback.executed, feedback.still
        return feedback

    def _record(
        self, observation: Observation, proposed: np.ndarray | None, feedback: Feedback, planned: PlannedAction | None
    ) -> None:
        if not self.driver.connected:
            self._end()
            return
        scheduler = self.chunks.scheduler
        waits = self.mode is Mode.hold and self.hold == self._missing_action
        scheduler.on_executed(self._tick, feedback.executed, waits)
        if self._interrupted and waits:
            # Nobody else has the robot any more: from the next tick on the policy plans anew, from where it is.
            scheduler.void()
            planned = None
        self._interrupted = not waits and self.mode is not Mode.policy
        if not self.tracker.running:
            # It ended while the command waited for `write_after_s`.
            return
        goes_on = self.tracker.step(
            self._tick,
            self.mode,
            self.hold.reason,
            observation,
            feedback.executed if proposed is None else proposed,
            feedback,
            planned[1] if planned else None,
            scheduler.made,
            delay_ticks=scheduler.delay_ticks,
            version=self.inbox.version,
            own=not self.override.in_control,
            ending=self.driver.stopped or self.driver.stop_state.ready or self.inbox.stopping,
        )
        if not goes_on:
            self._end()

    def _publish_status(self, now: bool = False) -> None:
        if not now and self._tick < self._next_status:
            return
        self._next_status = self._tick + self.config.status_every_ticks
        state = self._seen.state if self._seen is not None else np.zeros(self.robot.spec.state_dim, np.float32)
        self.status = edge_status(
            self.name,
            self._clock.now_ns(),
            self._tick,
            state,
            (self.mode, self.hold),
            self.inbox,
            self.tracker,
            self.driver,
            self.rate,
            self._scripted.takeovers,
        )
        self._uplink.send(self.status)
