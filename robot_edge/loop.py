"""The control loop: read → decide → limit → write → record, once per control period.

It never waits for the network, a disk or a model: chunks, jobs and people's wishes come through queues that are looked
at between two ticks, and what happened leaves the same way.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass

import numpy as np

from hal.limits import hold_action, limit_action
from hal.robot import Robot, Teleoperator
from policies.base import check_observation
from robot_edge.gate import Takeover
from robot_edge.human import Human
from robot_edge.rate import Rate
from robot_edge.recorder import Recorder
from robot_edge.schedule import ChunkSchedule
from robot_edge.state import Hold, Known, Mode, decide
from wire.channel import Channel
from wire.clock import Clock
from wire.errors import InvalidData, RobotError
from wire.messages import Applied, ChunkReply, ChunkRequest, EdgeStatus, Hello, Job, Message, Nack, Operator, Stop
from wire.types import ActionChunk, Actor, Episode, Observation, Step

log = logging.getLogger(__name__)

_ACTOR = {Mode.policy: Actor.policy, Mode.human: Actor.human, Mode.script: Actor.script}


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Episode and freshness limits."""

    max_ticks: int = 200
    """ticks an episode may last; those in a person's hands do not count"""
    tail_ticks: int = 5
    """ticks recorded after success"""
    camera_stale_s: float = 0.5
    """a frame older than this brings hold"""
    status_every_ticks: int = 16
    source: str = "online"
    needs_policy: bool = True
    """whether a policy version must be there before an episode starts and before the operator steps in"""


class ControlLoop:
    """One robot's loop. `uplink` and `inference` are lines to the two other processes of its computer."""

    def __init__(
        self,
        name: str,
        boot: str,
        robot: Robot,
        uplink: Channel,
        inference: Channel,
        schedule: ChunkSchedule,
        clock: Clock,
        config: LoopConfig,
        operator: Teleoperator | None = None,
        gate: Takeover | None = None,
    ) -> None:
        """`boot` names this start of the process, so that episode ids never repeat."""
        self.name = name
        self.robot = robot
        self.config = config
        self.schedule = schedule
        self.rate = Rate(robot.spec.period_ns, clock)
        self.human = Human(robot.spec, clock)
        self.recorder = Recorder(uplink)
        self.mode, self.reason = Mode.hold, Hold.no_job
        self.stopping = False
        self._clock = clock
        self._uplink = uplink
        self._inference = inference
        self._operator = operator
        self._gate = gate
        self._ids = (f"{name}-{boot}-{n:06d}" for n in itertools.count())
        self._job: Job | None = None
        self._next = 0
        self._version = 0
        self._storage_ok = True
        self._estop = False
        self._tick = 0
        self._episode: Episode | None = None
        self._first_tick = 0
        self._policy_ticks = 0
        self._success_ticks = 0
        self._executed = np.zeros(robot.spec.action_dim, np.float32)
        self.episodes = self._interventions = self._starved = 0
        self._state = np.zeros(robot.spec.state_dim, np.float32)
        self._next_status = 0
        self._acted = False
        self._seen: Observation | None = None
        self._fault = ""

    def tick(self) -> None:
        """One control period."""
        self.rate.wait()
        self._listen()
        self._tick += 1
        if self._episode is None and not self._start_episode():
            self._report()
            return
        observation, fault = self._read()
        scripted, chosen = self._choose(observation)
        self.mode, self.reason = decide(
            Known(
                estop=self._estop,
                recorder_ok=self.recorder.healthy,
                storage_ok=self._storage_ok,
                observation_ok=not fault,
                camera_fresh=self._cameras_fresh(observation),
                human=self.human.in_control,
                human_linked=self.human.linked,
                human_command_fresh=self.human.command(self._executed) is not None,
                script=scripted is not None,
                version=self._version,
                action_ready=chosen is not None,
            )
        )
        proposed = self._proposed(scripted, chosen)
        try:
            action = limit_action(self.robot.spec, proposed)
        except InvalidData as error:
            log.warning("robot '%s': %s", self.name, error)
            self.mode, self.reason = Mode.hold, Hold.bad_action
            action = limit_action(self.robot.spec, hold_action(self.robot.spec, self._executed))
        feedback = self.robot.write(action)
        self._executed = feedback.executed
        self._record(observation, proposed, feedback.reward, feedback.success, chosen)
        self._report()

    def close(self) -> None:
        """End the running episode and stop the robot."""
        if self._episode is not None:
            self._end_episode("aborted")
        self.robot.close()

    # --- listen ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while (message := self._inference.recv()) is not None:
            if isinstance(message, ChunkReply):
                if message.error:
                    log.warning("robot '%s': inference: %s", self.name, message.error)
                self.schedule.offer(message.chunk, self._tick + 1)
            else:
                self._hear(message)
        while (message := self._uplink.recv()) is not None:
            self._hear(message)

    def _hear(self, message: Message) -> None:
        match message:
            case Job():
                if self._job is None or message.id != self._job.id:
                    self._job, self._next = message, 0
            case Applied():
                self._version = message.number
            case Nack():
                self._storage_ok = not message.reason
            case Operator(kind="estop"):
                self._estop = True
            case Operator(kind="release_estop"):
                self._estop = False
            case Operator():
                if self.human.hear(message):
                    self._interventions += 1
            case Hello(role="uplink"):
                if self._episode is not None:
                    log.warning("robot '%s': the recorder is a new one; the running episode ends.", self.name)
                    self._end_episode("aborted")
            case Stop():
                self.stopping = True
            case _:
                log.warning("robot '%s': control does not understand %s.", self.name, type(message).__name__)

    # --- read and decide ------------------------------------------------------------------------------------------

    def _read(self) -> tuple[Observation, str]:
        fault = ""
        try:
            observation = self._seen = self.robot.read()
            check_observation(self.robot.spec, observation)
        except (InvalidData, RobotError) as error:
            if self._seen is None:
                raise
            fault, observation = str(error), self._seen
            if fault != self._fault:
                log.warning("robot '%s' holds: %s", self.name, fault)
        self._fault = fault
        if fault:
            return observation, fault
        self._state = observation.state
        if (
            self.config.needs_policy
            and self.schedule.wants(self._tick)
            and self._inference.send(ChunkRequest(self._tick, _without_preview(observation)))
        ):
            self.schedule.asked(self._tick)
        return observation, ""

    def _choose(self, observation: Observation) -> tuple[np.ndarray | None, tuple[np.ndarray, ActionChunk] | None]:
        """(the scripted operator's action if it is in control, the policy's action and its chunk if it has one)."""
        chosen = self.schedule.action(self._tick)
        ready = self._version > 0 or not self.config.needs_policy
        if self._operator is None or self._gate is None or self.human.in_control or not ready:
            return None, chosen
        expert = self._operator.propose(observation)
        if expert is None:
            return None, chosen
        was_active = self._gate.active
        active = self._gate.update(chosen[0] if chosen else None, expert, self._operator.progress())
        self._interventions += active and not was_active
        return expert if active else None, chosen

    def _cameras_fresh(self, observation: Observation) -> bool:
        limit_ns = int(self.config.camera_stale_s * 1e9)
        return all(observation.time_ns - frame.time_ns <= limit_ns for frame in observation.images.values())

    def _proposed(self, scripted: np.ndarray | None, chosen: tuple[np.ndarray, ActionChunk] | None) -> np.ndarray:
        if self.mode is Mode.human:
            command = self.human.command(self._executed)
            if command is not None:
                return command
        if self.mode is Mode.script and scripted is not None:
            return scripted
        if self.mode is Mode.policy and chosen is not None:
            return chosen[0]
        return hold_action(self.robot.spec, self._executed)

    # --- record and episodes --------------------------------------------------------------------------------------

    def _record(
        self,
        observation: Observation,
        proposed: np.ndarray,
        reward: float,
        success: bool,
        chosen: tuple[np.ndarray, ActionChunk] | None,
    ) -> None:
        self._policy_ticks += not self.human.in_control
        # The first chunk of an episode cannot be there yet; only what runs out afterwards is starvation.
        self._starved += self.reason is Hold.no_action and self._acted
        self._acted = self._acted or chosen is not None
        self._success_ticks += success or self._success_ticks > 0
        if self.reason in (Hold.no_recorder, Hold.bad_observation):
            # Nobody takes notes, so no backlog may grow; or there is nothing valid to note. The robot stands still.
            return
        terminated = self._success_ticks > self.config.tail_ticks
        truncated = not terminated and (self._policy_ticks >= self.config.max_ticks or self._estop or self.stopping)
        self.recorder.step(
            observation,
            Step(
                tick=self._tick - self._first_tick,
                time_ns=observation.time_ns,
                state=observation.state,
                proposed=np.asarray(proposed, np.float32),
                executed=self._executed,
                actor=_ACTOR.get(self.mode, Actor.hold),
                frames={camera: frame.time_ns for camera, frame in observation.images.items()},
                chunk_tick=chosen[1].first_tick - self._first_tick if chosen else -1,
                delay_ticks=self.schedule.delay_ticks if chosen else -1,
                version=chosen[1].version if chosen else self._version,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
            ),
        )
        if terminated:
            self._end_episode("success")
        elif truncated:
            self._end_episode("aborted" if self._estop or self.stopping else "failure")

    def _start_episode(self) -> bool:
        """Begin the job's next episode if nothing forbids it; else name the hold."""
        for forbidden, mode, reason in (
            (self._estop, Mode.estop, Hold.estop),
            (self._job is None, Mode.hold, Hold.no_job),
            (self.config.needs_policy and self._version == 0, Mode.hold, Hold.no_version),
            (not self._storage_ok, Mode.hold, Hold.storage),
            (not self.recorder.healthy, Mode.hold, Hold.no_recorder),
        ):
            if forbidden:
                self.mode, self.reason = mode, reason
                return False
        assert self._job is not None
        task, seed = self._job.tasks[self._next % len(self._job.tasks)], self._job.first_seed + self._next
        self._next += 1
        self.mode, self.reason = Mode.reset, Hold.none
        self._report(now=True)
        self.robot.reset(task, seed)
        if self._gate is not None:
            self._gate.reset()
        self._executed = np.zeros(self.robot.spec.action_dim, np.float32)
        self.schedule.reset(self._tick)
        self._first_tick, self._policy_ticks, self._success_ticks = self._tick, 0, 0
        self._acted = False
        started_ns = self._clock.now_ns()
        self._episode = Episode(
            id=next(self._ids),
            robot=self.name,
            spec_hash=self.robot.spec.hash,
            task=task,
            seed=seed,
            source=self.config.source,
            started_ns=started_ns,
        )
        self.recorder.start(self._episode)
        self.rate.restart()
        return True

    def _end_episode(self, outcome: str) -> None:
        self.recorder.end(outcome, self._clock.now_ns())
        self._episode = None
        self.episodes += 1

    def _report(self, now: bool = False) -> None:
        if not now and self._tick < self._next_status:
            return
        self._next_status = self._tick + self.config.status_every_ticks
        episode = self._episode
        self._uplink.send(
            EdgeStatus(
                robot=self.name,
                time_ns=self._clock.now_ns(),
                mode=self.mode.value,
                reason=self.reason.value,
                task=episode.task if episode else "",
                episode=episode.id if episode else "",
                tick=self._tick - self._first_tick,
                state=self._state,
                version=self._version,
                ticks=self.rate.ticks,
                missed_ticks=self.rate.missed,
                late_p99_s=self.rate.late_s(0.99),
                starved_ticks=self._starved,
                episodes=self.episodes,
                interventions=self._interventions,
                steps_recorded=0,
                spooled=0,
            )
        )


def _without_preview(observation: Observation) -> Observation:
    """The observation as the policy needs it: the picture for people stays behind."""
    if all(frame.preview is None for frame in observation.images.values()):
        return observation
    images = {name: type(frame)(frame.time_ns, frame.image) for name, frame in observation.images.items()}
    return Observation(observation.time_ns, observation.state, images, observation.task)
