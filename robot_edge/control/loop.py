"""The control loop: read → decide → limit → write → record, once per control period.

It never waits for the network, a disk or a model: chunks, jobs and people's wishes come through queues that are looked
at between two ticks, and what happened leaves the same way.
"""

from __future__ import annotations

import logging

import numpy as np

from hal.interfaces.robot import Feedback, Robot, Teleoperator
from hal.safety.bounds import hold_action, rest_action
from hal.safety.limiter import SafetyLimiter
from robot_edge.chunking.request_tracker import PlannedAction
from robot_edge.chunking.scheduler import ChunkSchedulerSelector, MakeScheduler
from robot_edge.control.command_inbox import CommandInbox
from robot_edge.control.config import LoopConfig
from robot_edge.control.episode_tracker import ControlStep, EpisodeTracker
from robot_edge.control.guarded_robot import GuardedRobot
from robot_edge.control.mode import ControlConditions, HoldReason, Mode, decide
from robot_edge.control.observation_monitor import ObservationMonitor
from robot_edge.control.operator_override import OperatorOverride
from robot_edge.control.rate import Rate
from robot_edge.control.scripted_takeover import ScriptedTakeover
from robot_edge.control.step_recorder import StepRecorder
from robot_edge.control.takeover_gate import Takeover
from robot_edge.runtime.shared_frames import without_previews
from wire.clock import Clock
from wire.errors import ConfigError, InvalidDataError, RobotDisconnectedError, RobotError
from wire.messages.all import ChunkReply, EdgeEvent, EdgeStatus, EpisodeStarted
from wire.transport.channel import Channel
from wire.types import Observation

log = logging.getLogger(__name__)


class ControlLoop:
    """One robot's loop. `uplink` and `inference` are lines to the two other processes of its computer."""

    def __init__(
        self,
        name: str,
        boot: str,
        robot: Robot,
        uplink: Channel,
        inference: Channel,
        make_scheduler: MakeScheduler,
        clock: Clock,
        config: LoopConfig,
        operator: Teleoperator | None = None,
        gate: Takeover | None = None,
    ) -> None:
        """`boot` names this start of the process, so that episode ids never repeat.

        Raises `ConfigError` for limits that do not fit the robot.
        """
        if not 0 <= config.write_after_s < robot.spec.period_ns / 1e9:
            raise ConfigError(
                f"robot '{name}': commands {config.write_after_s:g} s after the beginning of a tick do not fit into a "
                f"control period of {robot.spec.period_ns / 1e9:g} s; choose a smaller write_after_s."
            )
        self.name = name
        self.robot = robot
        self.config = config
        self.chunks = ChunkSchedulerSelector(make_scheduler)
        self.rate = Rate(robot.spec.period_ns, clock)
        self.human = OperatorOverride(robot.spec, clock)
        self.orders = CommandInbox(name, self.human)
        self.log = EpisodeTracker(
            name, boot, robot.spec, StepRecorder(uplink), config.source, config.max_ticks, config.tail_ticks, self._tell
        )
        self.mode, self.reason, self.detail = Mode.hold, HoldReason.no_job, ""
        self._clock = clock
        self._uplink = uplink
        self._inference = inference
        self._operator = ScriptedTakeover(operator, gate, self._tell)
        self._safety = SafetyLimiter(robot.spec, config.safety)
        self._health = ObservationMonitor(robot.spec, config.health)
        self.driver = GuardedRobot(name, robot, config.driver, clock, self._tell_of_driver)
        self._seen: Observation | None = None
        self._executed = np.zeros(robot.spec.action_dim, np.float32)
        self._tick = self._next_status = 0
        self._lack, self._trouble = HoldReason.no_action, ""
        self._unfit = ""

    def tick(self) -> None:
        """One control period."""
        self.rate.wait()
        self._tick += 1
        self._listen()
        if not self.log.running:
            self.orders.between_episodes()
        if not self._ready() or (not self.log.running and (self._comes_to_rest() or not self._start_episode())):
            self._report()
            return
        observation, reason = self._read()
        if observation is None or not self.driver.connected:
            # Nothing valid was seen of this scene yet: nobody knows what would hold the robot, which was just reset.
            self.mode, self.reason = decide(ControlConditions(estop=self.orders.estop, unfit=reason))
            if self.orders.estop or self.orders.stopping or not self.driver.connected:
                self._end("aborted")
            self._report()
            return
        chosen = self._plan(observation, fit=reason is HoldReason.none)
        scripted = self._script(observation, chosen)
        self.mode, self.reason = decide(self._known(reason, scripted, chosen))
        if self.reason in (HoldReason.no_action, HoldReason.slow_path_lost):
            self.reason, self.detail = self._lack, self._trouble
        proposed = self._proposed(scripted, chosen, observation)
        feedback = self._write(self._limited(proposed, observation), self.rate.next_ns)
        if self.driver.connected:
            self.chunks.scheduler.on_executed(self._tick, feedback.executed)
            self._record(observation, proposed, feedback, chosen)
        else:
            self._end("aborted")
        self._report()

    def close(self) -> None:
        """End the running episode and stop the robot."""
        self._end("aborted")
        self.driver.close()

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self.orders.stopping

    @property
    def episodes(self) -> int:
        """How many have ended."""
        return self.log.ended

    # --- read ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while (message := self._inference.recv()) is not None:
            if isinstance(message, ChunkReply):
                self._hear_reply(message)
            else:
                self.orders.hear(message)
        while (message := self._uplink.recv()) is not None:
            self.orders.hear(message)
        self.driver.request_previews(self.orders.previews)
        if self.orders.new_recorder:
            self.orders.new_recorder = False
            if self.log.running:
                log.warning("robot '%s': the recorder is a new one; the running episode ends.", self.name)
                self._end("aborted")
        if self.log.running and self.config.needs_policy and self.chunks.is_outdated(self.orders.trained):
            log.warning("robot '%s': the weights were trained in another way; the running episode ends.", self.name)
            self._end("aborted")
        if self.log.running and self.orders.other_version:
            log.warning("robot '%s': another version acts than the job asks for; the running episode ends.", self.name)
            self._end("aborted")

    def _hear_reply(self, reply: ChunkReply) -> None:
        self._lack = HoldReason.slow_path_lost if reply.silent else HoldReason.no_action
        if reply.chunk is not None and not np.isfinite(reply.chunk.actions).all():
            reply, self._lack = ChunkReply(None, "an action is not finite.", reply.tick), HoldReason.bad_action
        if reply.error != self._trouble and reply.error:
            log.warning("robot '%s': inference: %s", self.name, reply.error)
        self._trouble = reply.error
        self.chunks.scheduler.submit(reply, self._tick)

    def _ready(self) -> bool:
        """Whether the robot can be used; else name the hold. Connecting may take its time."""
        connected = self.driver.connected
        if not connected:
            # Connecting may take its time, in which this is the last word.
            self.mode, self.reason = decide(ControlConditions(estop=self.orders.estop, unfit=self.driver.reason))
            self._report()
        ready = self.driver.ready()
        if not ready:
            self.mode, self.reason = decide(ControlConditions(estop=self.orders.estop, unfit=self.driver.reason))
            self._end("aborted")
        if not ready or not connected:
            self._seen = None
            self.rate.restart()
        return ready

    def _read(self) -> tuple[Observation | None, HoldReason]:
        """(the newest valid observation of this scene, why the robot must not move on it)"""
        try:
            observation = self.driver.read()
            verdict = self._health.check(observation, self._clock.now_ns())
        except (InvalidDataError, RobotError) as error:
            observation, verdict = None, self._health.failed(str(error))
            self.driver.unread(str(error), gone=isinstance(error, RobotDisconnectedError))
        else:
            if verdict.valid:
                self.driver.well()
            else:
                self.driver.unread(verdict.detail)
        for event in verdict.events:
            self._tell(event.kind, event.detail)
        self.detail = self._unfit = verdict.detail
        if observation is not None and verdict.valid:
            if self._seen is None:
                # A scene was reset: what the robot executed before says nothing about where it is now.
                self._executed = rest_action(self.robot.spec, observation.state)
                self._safety.reset()
            self._seen = observation
        return self._seen, verdict.reason

    def _tell_of_driver(self, kind: str, detail: str) -> None:
        # While a hold of the health checks lasts, people know already, and will hear of its end.
        if not self._health.wrong:
            self._tell(kind, detail)

    def _tell(self, kind: str, detail: str) -> None:
        log.warning("robot '%s': %s: %s", self.name, kind, detail)
        self._uplink.send(EdgeEvent(self.name, self._clock.now_ns(), kind, detail))

    # --- decide -------------------------------------------------------------------------------------------------

    def _plan(self, observation: Observation, fit: bool) -> PlannedAction | None:
        """Ask inference when it is time; the policy's action for this tick and its chunk, if it has one."""
        scheduler = self.chunks.scheduler
        if self.config.needs_policy and fit:
            request = scheduler.request_chunk(self._tick, without_previews(observation))
            if request is not None and not self._inference.send(request):
                scheduler.submit(ChunkReply(None, tick=self._tick), self._tick)
        if self.config.write_after_s:
            self._clock.sleep_until(self.rate.due_ns + int(self.config.write_after_s * 1e9))
            self._listen()
        return scheduler.next_action(self._tick, observation)

    def _script(self, observation: Observation, chosen: PlannedAction | None) -> np.ndarray | None:
        """The scripted operator's action if it is in control."""
        ready = self.orders.version > 0 or not self.config.needs_policy
        if self.human.in_control or self.orders.measures or not ready:
            return None
        return self._operator.action(observation, chosen[0] if chosen else None)

    def _known(self, reason: HoldReason, scripted: np.ndarray | None, chosen: PlannedAction | None) -> ControlConditions:
        return ControlConditions(
            estop=self.orders.estop,
            recorder_ok=self.log.recorder.healthy,
            storage_ok=self.orders.storage_ok,
            unfit=reason,
            safe=not self.driver.refused,
            human=self.human.in_control,
            human_linked=self.human.linked,
            human_command_fresh=self.human.command(self._executed) is not None,
            script=scripted is not None,
            version=self.orders.version,
            trained=not self.chunks.refused,
            # what is left of a chunk is executed first
            slow_path_ok=chosen is not None or self._lack is not HoldReason.slow_path_lost,
            action_ready=chosen is not None,
        )

    def _proposed(self, scripted: np.ndarray | None, chosen: PlannedAction | None, observation: Observation) -> np.ndarray:
        if self.mode is Mode.human:
            command = self.human.command(self._executed)
            if command is not None:
                return command
        if self.mode is Mode.script and scripted is not None:
            return scripted
        if self.mode is Mode.policy and chosen is not None:
            return chosen[0]
        return self._safety.brake(self._executed, observation.state)

    def _limited(self, proposed: np.ndarray, observation: Observation) -> np.ndarray:
        try:
            return self._safety.limit(proposed, self._executed, observation.state)
        except InvalidDataError as error:
            log.warning("robot '%s': %s", self.name, error)
            self.mode, self.reason = Mode.hold, HoldReason.bad_action
            return self._safety.brake(self._executed, observation.state)

    # --- write ----------------------------------------------------------------------------------------------------

    def _write(self, action: np.ndarray, next_read_ns: int = 0) -> Feedback:
        """Command the robot and note what it did. A driver that refuses is given a while, during which it is held."""
        feedback = self.driver.write(action, next_read_ns)
        if feedback is None:
            if self.mode not in (Mode.estop, Mode.hold):
                self.mode, self.reason = Mode.hold, self.driver.reason
            return Feedback(hold_action(self.robot.spec, self._executed))
        self._safety.note(feedback.executed, self._executed)
        self._executed = feedback.executed
        return feedback

    def _comes_to_rest(self) -> bool:
        """Between two episodes: slow the robot down within its limits; whether it still moves."""
        if self._seen is None or self._safety.still:
            return False
        self._write(self._safety.brake(self._executed, self._seen.state))
        self.mode, self.reason = (Mode.estop, HoldReason.estop) if self.orders.estop else (Mode.reset, HoldReason.none)
        return True

    # --- record and report --------------------------------------------------------------------------------------

    def _record(
        self, observation: Observation, proposed: np.ndarray, feedback: Feedback, chosen: PlannedAction | None
    ) -> None:
        tick = ControlStep(
            tick=self._tick,
            mode=self.mode,
            reason=self.reason,
            observation=observation,
            proposed=proposed,
            executed=feedback.executed,
            chunk=chosen[1] if chosen else None,
            delay_ticks=self.chunks.scheduler.delay_ticks,
            version=self.orders.version,
            reward=feedback.reward,
            success=feedback.success,
        )
        outcome = self.log.step(tick, own=not self.human.in_control, ending=self.orders.estop or self.orders.stopping)
        if outcome:
            self._end(outcome)

    def _end(self, outcome: str) -> None:
        """The running episode, if there is one, is over."""
        if self.log.running:
            self.log.end(outcome, self._clock.now_ns())
            self.orders.ended(outcome)

    def _start_episode(self) -> bool:
        """Begin the job's next episode if nothing forbids it; else name the hold."""
        if self.orders.version and self.chunks.select(self.orders.trained) and self.chunks.refused:
            self._tell("refused", self.chunks.refused)
        needed = self.config.needs_policy
        for forbidden, mode, reason in (
            (self.orders.estop, Mode.estop, HoldReason.estop),
            (self.orders.resting, Mode.hold, HoldReason.no_job),
            (needed and self.orders.version == 0, Mode.hold, HoldReason.no_version),
            (needed and self.orders.other_version, Mode.hold, HoldReason.other_version),
            (needed and self.chunks.refused, Mode.hold, HoldReason.untrained),
            (not self.orders.storage_ok, Mode.hold, HoldReason.storage),
            (not self.log.recorder.healthy, Mode.hold, HoldReason.no_recorder),
        ):
            if forbidden:
                self.mode, self.reason = mode, reason
                self._look_after()
                return False
        task, seed = self.orders.next_episode()
        self.mode, self.reason = Mode.reset, HoldReason.none
        self._report(now=True)
        self._seen, self._lack = None, HoldReason.no_action
        done = self.driver.reset(task, seed)
        self.rate.restart()
        if not done:
            self.mode, self.reason = decide(ControlConditions(unfit=self.driver.reason))
            if self.driver.connected:
                # It is not the robot but the task: another one may go.
                self.orders.begun()
            return False
        self.orders.begun()
        self._operator.reset()
        self._health.reset()
        self.chunks.scheduler.reset(self._tick)
        source = "evaluation" if self.orders.measures else ""
        episode = self.log.start(task, seed, self._tick, self._clock.now_ns(), source)
        if self.config.needs_policy:
            # What inference thought about the last scene is not true of this one.
            self._inference.send(EpisodeStarted(episode))
        return True

    def _look_after(self) -> None:
        """At rest, now and then: whether the robot can still be read."""
        if self._tick < self._next_status:
            return
        self.detail = self._unfit = self.driver.look(scene=self._seen is not None)

    def _report(self, now: bool = False) -> None:
        if not now and self._tick < self._next_status:
            return
        self._next_status = self._tick + self.config.status_every_ticks
        episode = self.log.episode
        self._uplink.send(
            EdgeStatus(
                robot=self.name,
                time_ns=self._clock.now_ns(),
                mode=self.mode.value,
                reason=self.reason.value,
                task=episode.task if episode else "",
                episode=episode.id if episode else "",
                tick=self._tick - self.log.first_tick,
                state=self._seen.state if self._seen else np.zeros(self.robot.spec.state_dim, np.float32),
                version=self.orders.version,
                ticks=self.rate.ticks,
                missed_ticks=self.rate.missed,
                late_p99_s=self.rate.late_s(0.99),
                starved_ticks=self.log.starved,
                episodes=self.log.ended,
                interventions=self._operator.takeovers + self.orders.interventions,
                steps_recorded=0,
                spooled=0,
                job=self.orders.job.id if self.orders.job is not None else "",
                job_episodes=self.orders.finished,
                trouble=self.driver.trouble or self._unfit,
            )
        )
