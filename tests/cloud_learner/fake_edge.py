"""A robot as the gateway knows it: takes jobs between two episodes, reports, sends episodes, obeys people."""

from __future__ import annotations

from hal.safety.stop_latch import StopLatch
from robot_edge.uplink.segments import SegmentBuilder
from tests import samples
from wire.clock import Clock, clock_name
from wire.messages import Message
from wire.messages.gateway import (
    Ack,
    EdgeStatus,
    Hello,
    HelloAck,
    Job,
    OperatorCommand,
    ReintroduceRequest,
    Rejection,
    Segment,
    VersionActivated,
    VersionAvailable,
)
from wire.transport.channel import Channel
from wire.types import Actor, Episode, RobotSpec

SPEC = samples.spec(camera=False)


class FakeEdge:
    """`poll` takes in what came; `episode` runs one. Nothing is forgotten before it is acknowledged."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        clock: Clock,
        *,
        pid: int = 7,
        site: str = "",
        tasks: tuple[str, ...] = (),
        spec: RobotSpec = SPEC,
    ) -> None:
        """`spec`: that it says it has; its episodes are of `SPEC`."""
        self.name = name
        self.channel = channel
        self.clock = clock
        self.pid = pid
        self.site = site
        self.tasks = tasks
        self.spec = spec
        self.welcomed = False
        self.refused = ""
        self.coming: Job | None = None
        self.job: Job | None = None
        self.received: list[Message] = []
        self.version = 0
        self.latch = StopLatch()
        self._mode, self.reason, self.fault = "policy", "", ""
        self.begun: dict[str, int] = {}
        self.finished: dict[str, int] = {}
        self.spool: dict[str, Segment] = {}
        self.number = 0
        self.done: list[tuple[str, str, int]] = []
        """(job, task, seed) of every finished episode"""

    def hello(self) -> None:
        now_ns = self.clock.now_ns()
        self.channel.send(
            Hello(
                self.name,
                "edge",
                clock_name(),
                now_ns,
                self.pid,
                self.spec,
                self.tasks or ("reach", "push"),
                self.site,
            )
        )

    def poll(self) -> None:
        while (message := self.channel.recv()) is not None:
            self.received.append(message)
            match message:
                case HelloAck():
                    if not self.welcomed:
                        for segment in self.spool.values():
                            self.channel.send(segment)
                    self.welcomed, self.refused = True, ""
                case ReintroduceRequest():
                    self.welcomed = False
                    self.hello()
                case Rejection(reason=reason):
                    self.refused = reason
                case Job():
                    self.coming = message
                case VersionAvailable(version=version):
                    self.version = version.number
                    self.channel.send(VersionActivated(self.name, version.number, self.clock.now_ns()))
                case Ack(segments=segments):
                    for segment in segments:
                        self.spool.pop(segment, None)
                case OperatorCommand():
                    self._obey(message)
                case _:
                    pass

    @property
    def mode(self) -> str:
        """Who moves it."""
        return "estop" if self.latch.state.stops else "hold" if self.latch.state.ready else self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = mode

    def _obey(self, command: OperatorCommand) -> None:
        match command.kind:
            case "estop":
                self.latch.stop(command.stop, command.operator)
            case "release_estop":
                self.latch.release(command.stop)
            case "start":
                self.latch.start()
        if not self.latch.state.free or command.kind == "start":
            return
        modes = {"take_over": "human", "hand_back": "policy", "drop_link": "hold"}
        self.mode = modes.get(command.kind, self._mode)
        self.reason = "the operator's link is lost" if command.kind == "drop_link" else ""

    def between(self) -> None:
        """No episode runs: the job that was heard last holds from now on."""
        if self.coming is not None:
            self.job, self.coming = self.coming, None

    def status(self, episode: str = "") -> None:
        job = self.job.id if self.job else ""
        self.channel.send(
            EdgeStatus(
                robot=self.name,
                time_ns=self.clock.now_ns(),
                mode=self.mode,
                reason=self.reason,
                task="",
                episode=episode,
                tick=0,
                state=samples.step(0).state,
                version=self.version,
                ticks=1,
                missed_ticks=0,
                late_p99_s=0.0,
                starved_ticks=0,
                episodes=self.number,
                interventions=0,
                steps_recorded=0,
                spooled=len(self.spool),
                job=job,
                job_episodes=self.finished.get(job, 0),
                stop=self.latch.state,
                fault=self.fault,
            )
        )

    def episode(self, outcome: str = "success", *, human: bool = False, version: int = 3) -> Segment | None:
        """Run one episode of the job and send it, if there is one to run and the right version acts."""
        self.between()
        job = self.job
        if job is None or not job.tasks or 0 < job.episodes <= self.finished.get(job.id, 0):
            return None
        if job.version and job.version != self.version:
            return None
        count = self.begun.get(job.id, 0)
        task, seed = job.tasks[count % len(job.tasks)], job.first_seed + count
        self.begun[job.id] = count + 1
        source = "evaluation" if job.kind == "evaluation" else "online"
        self.number += 1
        name = f"{self.name}-{self.pid}-{self.number:06d}"
        builder = SegmentBuilder(Episode(name, self.name, SPEC.hash, task, seed, source, 1_000), 100)
        for tick in range(3):
            builder.step(samples.step(tick, Actor.human if human else Actor.policy, version=version))
        segment = builder.end(outcome, self.clock.now_ns())
        assert segment is not None
        if outcome != "aborted":
            self.finished[job.id] = self.finished.get(job.id, 0) + 1
            self.done.append((job.id, task, seed))
        self.spool[segment.id] = segment
        self.channel.send(segment)
        return segment
