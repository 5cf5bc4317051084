"""The control loop: read → decide → limit → write → record, once per control period.

It never waits for the network, a disk or a model: chunks, jobs and people's commands come through queues that are
looked at between two ticks, and what happened leaves the same way.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from hal.interfaces.robot import Feedback, HoldingRobot, Teleoperator, is_real
from robot_edge.chunking.scheduler import ChunkSchedulerSelector, MakeScheduler, PlannedAction
from robot_edge.control.command_inbox import CommandInbox
from robot_edge.control.commanded_robot import CommandedRobot
from robot_edge.control.config import LoopConfig
from robot_edge.control.episodes.runner import EpisodeRunner
from robot_edge.control.episodes.tracker import EpisodeTracker, StepRecorder
from robot_edge.control.guarded_robot import GuardedRobot
from robot_edge.control.mode import NO_HOLD, Hold, HoldReason, Mode
from robot_edge.control.operator_override import OperatorOverride
from robot_edge.control.rate import Rate
from robot_edge.control.status import edge_status
from robot_edge.control.takeover import ScriptedTakeover
from wire.clock import Clock
from wire.errors import ConfigError
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
        self.config = config = replace(config, episodes=config.episodes.settled(is_real(robot)))
        self.status: EdgeStatus | None = None
        """published last"""
        self.chunks = ChunkSchedulerSelector(make_scheduler)
        self.rate = Rate(robot.spec.period_ns, clock)
        self.override = OperatorOverride(robot.spec, clock, config, self._notify)
        self.inbox = CommandInbox(name, self.override)
        self.tracker = EpisodeTracker(name, session_id, robot.spec, StepRecorder(uplink), config, self._notify)
        self.driver = GuardedRobot(
            name, robot, config.driver, config.observation_limits, clock, self._notify, config.safety
        )
        self.commanded = CommandedRobot(name, robot.spec, self.driver, self.chunks, config.safety)
        self.episodes = EpisodeRunner(
            self.tracker,
            self.inbox,
            self.override,
            self.commanded,
            self.driver,
            self.chunks,
            self.rate,
            clock,
            config,
            notify=self._notify,
            publish_status=self._publish_status,
            on_begun=self._on_episode_begun,
        )
        self._scripted = ScriptedTakeover(operator, config.gate, self._notify)
        self._clock = clock
        self._uplink = uplink
        self._inference = inference
        self._tick = self._next_status = 0
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
        status_due = self._tick >= self._next_status
        if self.episodes.ensure_running(self._tick, status_due) and (observation := self._observe()) is not None:
            planned = self._next_action(observation)
            scripted = self._scripted_action(observation, planned)
            if self.tracker.hands_back(driven=self.override.in_control or scripted is not None):
                self.episodes.finish(observation)
            else:
                self._act(observation, planned, scripted)
        self._publish_status()

    def close(self) -> None:
        """End the running episode and stop the robot."""
        self.episodes.close()
        self.driver.close()

    @property
    def mode(self) -> Mode:
        """Who moves the robot."""
        return self.commanded.mode

    @property
    def hold(self) -> Hold:
        """Why the robot holds."""
        return self.commanded.hold

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
            self.episodes.end()

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

    def _on_episode_begun(self, episode: Episode) -> None:
        self._missing_action = Hold(HoldReason.no_action, self._missing_action.detail)
        self._scripted.reset()
        self.chunks.scheduler.reset(self._tick)
        self._interrupted = False
        if self.config.needs_policy:
            # What inference thought about the last scene is not true of this one.
            self._inference.send(EpisodeStarted(episode))

    # --- read -----------------------------------------------------------------------------------------------------

    def _observe(self) -> Observation | None:
        """As `CommandedRobot.observe`; without an observation a robot that may not move ends its episode."""
        observation = self.commanded.observe()
        if observation is None and (
            not self.driver.stop_state.free or self.inbox.stopping or not self.driver.connected
        ):
            self.episodes.end()
        return observation

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
        if planned is None:
            return self._scripted.action(observation, None)
        action, chunk = planned
        return self._scripted.action(observation, action, chunk.outlook)

    def _decide_control(self, planned: PlannedAction | None, scripted: np.ndarray | None) -> None:
        self.commanded.decide(
            recorder_ok=self.tracker.recorder.healthy,
            storage_ok=self.inbox.storage_ok,
            fault=self.driver.observation_fault or (self.driver.fault if self.driver.refused_commands else NO_HOLD),
            human=self.override.in_control,
            human_linked=self.override.linked,
            human_command_fresh=self.override.action(self.commanded.executed) is not None,
            script=scripted is not None,
            version=self.inbox.version,
            trained=not self.chunks.refused,
            # What is left of a chunk is executed first, unless the robot is no longer where it was made for.
            missing_action=self._missing_action if planned is None or self._interrupted else NO_HOLD,
        )

    def _select(self, planned: PlannedAction | None, scripted: np.ndarray | None) -> np.ndarray | None:
        """float32[da]: what whoever is in control proposes, None for a hold."""
        match self.mode:
            case Mode.policy:
                return planned[0] if planned is not None else None
            case Mode.script:
                return scripted
            case Mode.human:
                return self.override.action(self.commanded.executed)
        return None

    # --- write, record, report ------------------------------------------------------------------------------------

    def _act(self, observation: Observation, planned: PlannedAction | None, scripted: np.ndarray | None) -> None:
        self._decide_control(planned, scripted)
        proposed = self._select(planned, scripted)
        action = self.commanded.checked(proposed)
        blended = self.override.blend(self.mode, action, self.commanded.executed, self.commanded.waited)
        feedback = self.commanded.apply(blended, self.rate.next_ns)
        self._record(observation, proposed, feedback, planned)

    def _record(
        self, observation: Observation, proposed: np.ndarray | None, feedback: Feedback, planned: PlannedAction | None
    ) -> None:
        if not self.driver.connected:
            self.episodes.end()
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
            self.episodes.end()

    def _publish_status(self, now: bool = False) -> None:
        if not now and self._tick < self._next_status:
            return
        self._next_status = self._tick + self.config.status_every_ticks
        seen = self.commanded.seen
        state = seen.state if seen is not None else np.zeros(self.robot.spec.state_dim, np.float32)
        self.status = edge_status(
            self.name,
            self._clock.now_ns(),
            self._tick,
            state,
            (self.mode, self.hold),
            self.inbox,
            self.tracker,
            self.episodes.review.outcome,
            self.config.episodes,
            self.driver,
            self.rate,
            self._scripted.takeovers,
            self.override.in_control,
        )
        self._uplink.send(self.status)
