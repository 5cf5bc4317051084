"""A real gateway process with robots, an evaluator and the trainer's publisher around it, over ZeroMQ."""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch import nn

from benchmarks.rollout.drill_robot import DrillEvaluator, DrillPeer, DrillRobot
from benchmarks.rollout.training import TrainedPolicy
from cloud_learner.training.config import PublisherConfig
from cloud_learner.training.publishing.publisher import VersionPublisher
from cloud_learner.training.publishing.uploader import WeightUploader
from fleet.cli.client import FleetClient
from fleet.config.data_directory import DataDirectory
from wire.clock import clock_name
from wire.messages import Message
from wire.messages.fleet import VersionAction, VersionStatus
from wire.messages.gateway import Hello, HelloAck, Published, Rejection
from wire.transport.keys import GATEWAY, make_keys
from wire.transport.zmq_channel import wait_any
from wire.types import PolicyVersion, Role

ROBOTS = 10
_START_S, _END_S = 60.0, 20.0


class DrillTrainer(DrillPeer):
    """Publishes by the real publisher, with the action check, or by none at all."""

    def __init__(self, address: str, keys: Path, directory: Path, trained: TrainedPolicy) -> None:
        super().__init__(address, keys, Hello("trainer", Role.trainer, clock_name(), 0, os.getpid()))
        self._save = trained.policy.save
        self.publisher = VersionPublisher(self._save, directory, PublisherConfig(), trained.check)
        self.newest, self._parent_sha256 = 0, ""
        self.parent = 0
        """the version that it published last by the publisher"""
        self.answer = ""
        """of the gateway, to what was uploaded last"""
        self._upload: WeightUploader | None = None

    def prepare(self, module: nn.Module) -> str:
        """Have the publisher make a version, and upload it; why it did not, ''."""
        about = PolicyVersion(0, "", 0, self.parent, 1, 1, 1, self.clock.now_ns())
        self.publisher.submit(copy.deepcopy(module), about, frozenset(), self._parent_sha256)
        prepared = self.publisher.poll()
        if prepared is None:
            return self.publisher.counts.refusal
        version = msgspec.structs.replace(prepared.version, number=self.newest + 1)
        data = prepared.file.data if prepared.delta is None else prepared.delta
        base = version.parent if prepared.delta is not None else 0
        self.parent, self._parent_sha256 = version.number, version.sha256
        self.publisher.on_published(prepared)
        self.send(version, data, base)
        return ""

    def upload(self, data: bytes) -> None:
        """As a trainer that looks at nothing."""
        facts = self.newest + 1, hashlib.sha256(data).hexdigest(), len(data), self.parent, 1, 1, 1
        self.send(PolicyVersion(*facts, self.clock.now_ns()), data, 0)

    def send(self, version: PolicyVersion, data: bytes | bytearray | memoryview, base: int) -> None:
        self.answer = ""
        self._upload = WeightUploader(version, data, frozenset(), self.channel, self.clock, base)

    def on_message(self, message: Message) -> None:
        match message:
            case HelloAck() if self._upload is not None:
                self._upload.on_heartbeat_answered(message.echo_ns)
            case Published(number=number):
                self.newest, self._upload, self.answer = max(self.newest, number), None, "taken"
            case Rejection(reason=reason):
                self._upload, self.answer = None, reason

    def poll(self) -> None:
        super().poll()
        if self._upload is not None and self.session.accepted:
            self._upload.poll()


class DrillFleet:
    """A context manager; nothing of it goes on by itself but the gateway: `run` is to be called."""

    def __init__(self, place: Path, trained: TrainedPolicy, canary: float, gate_success: float = 0.0) -> None:
        """Only stores. `place`: an empty directory; with `gate_success` there is an evaluator."""
        self.place, self.data, self._trained = place, DataDirectory(place / "data"), trained
        self._words = ["--canary", f"{canary:g}", "--gate-success", f"{gate_success:g}"]
        self._evaluates = gate_success > 0
        self.chances: dict[int, float] = {}
        """of success by version"""
        self.acted: dict[int, set[str]] = {}
        """by version, robots that ever acted by it"""
        self.most_at_once: dict[int, int] = {}
        self.last_s: dict[int, float] = {}
        """by version, when a robot was last seen to act by it"""

    def __enter__(self) -> DrillFleet:
        names = [f"arm-{number}" for number in range(ROBOTS)]
        make_keys(self.data.keys, [GATEWAY, "trainer", "evaluator", "console", *names])
        command = [sys.executable, "-m", "fleet.cli", "gateway", "--recipe", self._trained.recipe.name]
        command += ["--data", str(self.data.root), "--port", "0", "--web-port", "0", *self._words]
        with (self.place / "gateway.log").open("wb") as output:
            self._gateway = subprocess.Popen(command, stdout=output, stderr=output)
        note = self.data.root / "gateway.address"
        deadline_s = time.monotonic() + _START_S
        while not note.exists():
            if self._gateway.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the gateway did not start: {(self.place / 'gateway.log').read_text()[-1000:]}")
            time.sleep(0.05)
        address, keys, recipe = self.data.gateway, self.data.keys, self._trained.recipe
        self.robots = [
            DrillRobot(address, keys, name, recipe.spec, recipe.tasks, self.place / name, self._chance)
            for name in names
        ]
        self.trainer = DrillTrainer(address, keys, self.place / "published", self._trained)
        self.evaluator = DrillEvaluator(address, keys, recipe.tasks, self._chance) if self._evaluates else None
        self._peers: list[DrillPeer] = [*self.robots, self.trainer, *([self.evaluator] if self.evaluator else [])]
        self.wait("all are let in", lambda: all(peer.session.accepted for peer in self._peers))
        return self

    def __exit__(self, *error: object) -> None:
        for peer in self._peers:
            peer.close()
        self.trainer.publisher.close()
        self._gateway.terminate()
        try:
            self._gateway.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._gateway.kill()
            self._gateway.wait()

    def poll(self) -> None:
        """Everybody does what is due."""
        wait_any([peer.channel for peer in self._peers], 0.005)
        now: dict[int, int] = {}
        for peer in self._peers:
            peer.poll()
        for robot in self.robots:
            self.acted.setdefault(robot.version, set()).add(robot.name)
            now[robot.version] = now.get(robot.version, 0) + 1
        self.last_s |= dict.fromkeys(now, time.monotonic())
        for number, count in now.items():
            self.most_at_once[number] = max(count, self.most_at_once.get(number, 0))

    def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.poll()

    def wait(self, what: str, done: Callable[[], object], most_s: float = 60.0) -> float:
        """Until `done`; how long that took. Raises `TimeoutError`."""
        began_s = time.monotonic()
        while not done():
            self.poll()
            if time.monotonic() - began_s > most_s:
                raise TimeoutError(f"{what}: not within {most_s:g} s.")
        return time.monotonic() - began_s

    def publish(self, module: nn.Module, chance: float) -> str:
        """By the trainer's publisher; why it is not there, ''."""
        self.chances[self.trainer.newest + 1] = chance
        if refusal := self.trainer.prepare(module):
            return refusal
        return self._answered()

    def upload(self, data: bytes, chance: float) -> str:
        """Without any check before the gateway's; why it is not there, ''."""
        self.chances[self.trainer.newest + 1] = chance
        self.trainer.upload(data)
        return self._answered()

    def episodes(self, number: int) -> int:
        """That robots ran by this version."""
        return sum(robot.episodes.get(number, 0) for robot in self.robots)

    def all_act_by(self, *numbers: int) -> bool:
        return all(robot.version in numbers for robot in self.robots)

    def versions(self, action: VersionAction = VersionAction.list, number: int = 0) -> dict[int, VersionStatus]:
        """What a person sees of them, once `action` is done."""
        with FleetClient(self.data.gateway, self.data.keys) as client:
            return {one.version.number: one for one in client.versions(action, number)}

    def _answered(self) -> str:
        self.wait("the gateway's answer", lambda: self.trainer.answer)
        return "" if self.trainer.answer == "taken" else self.trainer.answer

    def _chance(self, number: int) -> float:
        return self.chances[number]
