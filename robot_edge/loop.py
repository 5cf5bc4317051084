"""The control loop: read → decide → limit → write → record, once per control period.

It never waits for the network, a disk or a model: chunks, jobs and people's wishes come through queues that are looked
at between two ticks, and what happened leaves the same way.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from hal.limits import hold_action, limit_action, rest_action
from hal.robot import Feedback, Robot, Teleoperator
from hal.safety import Safety, SafetyLimits
from robot_edge.episodes import Episodes, Tick
from robot_edge.gate import Takeover
from robot_edge.health import Health, HealthConfig
from robot_edge.human import Human
from robot_edge.orders import Orders
from robot_edge.planner import MakeSchedule, Planner
from robot_edge.rate import Rate
from robot_edge.recorder import Recorder
from robot_edge.schedule.base import Chosen
from robot_edge.state import Hold, Known, Mode, decide
from wire.channel import Channel
from wire.clock import Clock
from wire.errors import ConfigError, InvalidData, RobotError, RobotGone
from wire.messages import ChunkReply, EdgeEvent, EdgeStatus, EpisodeStarted
from wire.types import Frame, Observation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Limits of an episode, of freshness and of motion."""

    max_ticks: int = 200
    """ticks an episode may last; those in a person's hands do not count"""
    tail_ticks: int = 5
    """ticks recorded after success"""
    write_after_s: float = 0.0
    """from the beginning of a tick to its command: an answer of inference that is quicker counts in the tick it was
    asked in. Well below the control period"""
    refusals: int = 40
    """commands in a row that a driver may refuse before control gives up"""
    status_every_ticks: int = 16
    source: str = "online"
    needs_policy: bool = True
    """whether a policy version must be there before an episode starts and before the operator steps in"""
    health: HealthConfig = field(default_factory=HealthConfig)
    safety: SafetyLimits = field(default_factory=SafetyLimits)


class ControlLoop:
    """One robot's loop. `uplink` and `inference` are lines to the two other processes of its computer."""

    def __init__(
        self,
        name: str,
        boot: str,
        robot: Robot,
        uplink: Channel,
        inference: Channel,
        schedule: MakeSchedule,
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
        self.planner = Planner(schedule)
        self.rate = Rate(robot.spec.period_ns, clock)
        self.human = Human(robot.spec, clock)
        self.orders = Orders(name, self.human)
        self.log = Episodes(
            name, boot, robot.spec, Recorder(uplink), config.source, config.max_ticks, config.tail_ticks
        )
        self.mode, self.reason, self.detail = Mode.hold, Hold.no_job, ""
        self._clock = clock
        self._uplink = uplink
        self._inference = inference
        self._operator = operator
        self._gate = gate
        self._safety = Safety(robot.spec, config.safety)
        self._health = Health(robot.spec, config.health)
        self._seen: Observation | None = None
        self._executed = np.zeros(robot.spec.action_dim, np.float32)
        self._tick = self._next_status = 0
        self._takeovers = self._refusals = 0
        self._lack, self._trouble = Hold.no_action, ""

    def tick(self) -> None:
        """One control period."""
        self.rate.wait()
        self._tick += 1
        self._listen()
        if not self.log.running and (self._comes_to_rest() or not self._start_episode()):
            self._report()
            return
        observation, reason = self._read()
        if observation is None:
            # Nothing valid was seen of this scene yet: nobody knows what would hold the robot, which was just reset.
            self.mode, self.reason = decide(Known(estop=self.orders.estop, unfit=reason))
            if self.orders.estop or self.orders.stopping:
                self.log.end("aborted", self._clock.now_ns())
            self._report()
            return
        chosen = self._plan(observation, fit=reason is Hold.none)
        scripted = self._script(observation, chosen)
        self.mode, self.reason = decide(self._known(reason, scripted, chosen))
        if self.reason in (Hold.no_action, Hold.slow_path_lost):
            self.reason, self.detail = self._lack, self._trouble
        proposed = self._proposed(scripted, chosen, observation)
        feedback = self._write(self._limited(proposed, observation))
        self.planner.schedule.executed(self._tick, feedback.executed)
        self._record(observation, proposed, feedback, chosen)
        self._report()

    def close(self) -> None:
        """End the running episode and stop the robot."""
        self.log.end("aborted", self._clock.now_ns())
        self.robot.close()

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
        if self.orders.new_recorder:
            self.orders.new_recorder = False
            if self.log.running:
                log.warning("robot '%s': the recorder is a new one; the running episode ends.", self.name)
                self.log.end("aborted", self._clock.now_ns())
        if self.log.running and self.config.needs_policy and self.planner.outdated(self.orders.trained):
            log.warning("robot '%s': the weights were trained in another way; the running episode ends.", self.name)
            self.log.end("aborted", self._clock.now_ns())

    def _hear_reply(self, reply: ChunkReply) -> None:
        self._lack = Hold.slow_path_lost if reply.silent else Hold.no_action
        if reply.chunk is not None and not np.isfinite(reply.chunk.actions).all():
            reply, self._lack = ChunkReply(None, "an action is not finite.", reply.tick), Hold.bad_action
        if reply.error != self._trouble and reply.error:
            log.warning("robot '%s': inference: %s", self.name, reply.error)
        self._trouble = reply.error
        self.planner.schedule.offer(reply, self._tick)

    def _read(self) -> tuple[Observation | None, Hold]:
        """(the newest valid observation of this scene, why the robot must not move on it)"""
        try:
            observation = self.robot.read()
            verdict = self._health.check(observation, self._clock.now_ns())
        except RobotGone:
            raise
        except (InvalidData, RobotError) as error:
            observation, verdict = None, self._health.failed(str(error))
        for event in verdict.events:
            self._tell(event.kind, event.detail)
        self.detail = verdict.detail
        if observation is not None and verdict.valid:
            if self._seen is None:
                # A scene was reset: what the robot executed before says nothing about where it is now.
                self._executed = rest_action(self.robot.spec, observation.state)
                self._safety.reset()
            self._seen = observation
        return self._seen, verdict.reason

    def _tell(self, kind: str, detail: str) -> None:
        log.warning("robot '%s': %s: %s", self.name, kind, detail)
        self._uplink.send(EdgeEvent(self.name, self._clock.now_ns(), kind, detail))

    # --- decide -------------------------------------------------------------------------------------------------

    def _plan(self, observation: Observation, fit: bool) -> Chosen | None:
        """Ask inference when it is time; the policy's action for this tick and its chunk, if it has one."""
        schedule = self.planner.schedule
        if self.config.needs_policy and fit:
            request = schedule.ask(self._tick, _without_preview(observation))
            if request is not None and not self._inference.send(request):
                schedule.offer(ChunkReply(None, tick=self._tick), self._tick)
        if self.config.write_after_s:
            self._clock.sleep_until(self.rate.due_ns + int(self.config.write_after_s * 1e9))
            self._listen()
        return schedule.action(self._tick, observation)

    def _script(self, observation: Observation, chosen: Chosen | None) -> np.ndarray | None:
        """The scripted operator's action if it is in control."""
        ready = self.orders.version > 0 or not self.config.needs_policy
        if self._operator is None or self._gate is None or self.human.in_control or not ready:
            return None
        expert = self._operator.propose(observation)
        if expert is None:
            return None
        was_active = self._gate.active
        active = self._gate.update(chosen[0] if chosen else None, expert, self._operator.progress())
        self._takeovers += active and not was_active
        return expert if active else None

    def _known(self, reason: Hold, scripted: np.ndarray | None, chosen: Chosen | None) -> Known:
        return Known(
            estop=self.orders.estop,
            recorder_ok=self.log.recorder.healthy,
            storage_ok=self.orders.storage_ok,
            unfit=reason,
            safe=not self._refusals,
            human=self.human.in_control,
            human_linked=self.human.linked,
            human_command_fresh=self.human.command(self._executed) is not None,
            script=scripted is not None,
            version=self.orders.version,
            trained=not self.planner.refused,
            # what is left of a chunk is executed first
            slow_path_ok=chosen is not None or self._lack is not Hold.slow_path_lost,
            action_ready=chosen is not None,
        )

    def _proposed(self, scripted: np.ndarray | None, chosen: Chosen | None, observation: Observation) -> np.ndarray:
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
        except InvalidData as error:
            log.warning("robot '%s': %s", self.name, error)
            self.mode, self.reason = Mode.hold, Hold.bad_action
            return self._safety.brake(self._executed, observation.state)

    # --- write ----------------------------------------------------------------------------------------------------

    def _write(self, action: np.ndarray) -> Feedback:
        """Command the robot and note what it did. A driver that refuses is given a while, during which it is held.

        Raises `RobotError` of a driver that goes on refusing, and at once when it is gone.
        """
        try:
            feedback = self.robot.write(action)
            limit_action(self.robot.spec, feedback.executed)
        except RobotGone:
            raise
        except (InvalidData, RobotError) as error:
            self._refusals += 1
            if self._refusals == 1:
                self._tell("hold", f"the robot does not take a command: {error}")
            if self._refusals > self.config.refusals:
                raise RobotError(f"robot '{self.name}' took none of {self._refusals} commands: {error}") from error
            self.mode, self.reason = Mode.hold, Hold.safety
            return Feedback(hold_action(self.robot.spec, self._executed))
        if self._refusals:
            self._refusals = 0
            self._tell("recovered", "the robot takes commands again.")
        self._safety.note(feedback.executed, self._executed)
        self._executed = feedback.executed
        return feedback

    def _comes_to_rest(self) -> bool:
        """Between two episodes: slow the robot down within its limits; whether it still moves."""
        if self._seen is None or self._safety.still:
            return False
        self._write(self._safety.brake(self._executed, self._seen.state))
        self.mode, self.reason = (Mode.estop, Hold.estop) if self.orders.estop else (Mode.reset, Hold.none)
        return True

    # --- record and report --------------------------------------------------------------------------------------

    def _record(
        self, observation: Observation, proposed: np.ndarray, feedback: Feedback, chosen: Chosen | None
    ) -> None:
        tick = Tick(
            tick=self._tick,
            mode=self.mode,
            reason=self.reason,
            observation=observation,
            proposed=proposed,
            executed=feedback.executed,
            chunk=chosen[1] if chosen else None,
            delay_ticks=self.planner.schedule.delay_ticks,
            version=self.orders.version,
            reward=feedback.reward,
            success=feedback.success,
        )
        outcome = self.log.step(tick, own=not self.human.in_control, ending=self.orders.estop or self.orders.stopping)
        if outcome:
            self.log.end(outcome, self._clock.now_ns())

    def _start_episode(self) -> bool:
        """Begin the job's next episode if nothing forbids it; else name the hold."""
        if self.orders.version and self.planner.follow(self.orders.trained) and self.planner.refused:
            self._tell("refused", self.planner.refused)
        for forbidden, mode, reason in (
            (self.orders.estop, Mode.estop, Hold.estop),
            (self.orders.job is None, Mode.hold, Hold.no_job),
            (self.config.needs_policy and self.orders.version == 0, Mode.hold, Hold.no_version),
            (self.config.needs_policy and self.planner.refused, Mode.hold, Hold.untrained),
            (not self.orders.storage_ok, Mode.hold, Hold.storage),
            (not self.log.recorder.healthy, Mode.hold, Hold.no_recorder),
        ):
            if forbidden:
                self.mode, self.reason = mode, reason
                return False
        assert self.orders.job is not None
        task, seed = self.orders.next_episode()
        self.mode, self.reason = Mode.reset, Hold.none
        self._report(now=True)
        self.robot.reset(task, seed)
        if self._gate is not None:
            self._gate.reset()
        self._seen, self._lack = None, Hold.no_action
        self._health.reset()
        self.planner.schedule.reset(self._tick)
        episode = self.log.start(task, seed, self._tick, self._clock.now_ns())
        if self.config.needs_policy:
            # What inference thought about the last scene is not true of this one.
            self._inference.send(EpisodeStarted(episode))
        self.rate.restart()
        return True

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
                interventions=self._takeovers + self.orders.interventions,
                steps_recorded=0,
                spooled=0,
            )
        )


def _without_preview(observation: Observation) -> Observation:
    """The observation as the policy needs it: the picture for people stays behind."""
    if all(frame.preview is None for frame in observation.images.values()):
        return observation
    images = {name: Frame(frame.time_ns, frame.image) for name, frame in observation.images.items()}
    return Observation(observation.time_ns, observation.state, images, observation.task)
