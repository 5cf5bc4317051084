"""A gateway, a site's relay and its robots, by one clock: what goes between them passes the real codec."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zmq

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.gateway.server import Gateway
from cloud_learner.gateway.storage.ingest import Ingest
from cloud_learner.gateway.storage.weight_store import WeightStore
from cloud_learner.operator.view import FleetView
from hal.resource.admitted_robots import AdmittedRobots
from robot_edge.relay.server import SiteRelay
from robot_edge.relay.upload_spool import UploadSpool
from robot_edge.uplink.relay_link import RelayLink
from robot_edge.uplink.server import Uplink
from tests import samples
from tests.wire.weights.files import floats, version_of
from wire.clock import ManualClock
from wire.identity.sealing import Sealer, SealOpener
from wire.messages import Message
from wire.messages.gateway import Hello, Publish, WeightBytes
from wire.messages.local import EpisodeEnded, EpisodeStarted, FrameRecorded, StepRecorded
from wire.transport.keys import KeyRecord, Teaching, now
from wire.transport.memory_channel import MemoryServer, memory_pair
from wire.types import Actor, Frame, Role
from wire.weights.manifest import Signer

SECOND = 1_000_000_000
TICK_S = 0.05
RELAY = "relay"
RELAY_TEXT = "the relay at tcp://site:5763"
FRAME_STEPS = 4


class KeyedServer(MemoryServer):
    """Knows keys, as a port does."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, KeyRecord] = {}

    def key_record(self, name: str) -> KeyRecord | None:
        return self.records.get(name)


class Robot:
    """Its uplink; control says what `record` has in store for it."""

    def __init__(self, site: Site, name: str, by_relay: bool = True) -> None:
        self.site, self.name = site, name
        public, secret = zmq.curve_keypair()
        site.gateway_port.records[name] = KeyRecord(name, Role.edge, public.decode(), now(), tuple(Teaching))
        self.sealer = Sealer(secret, site.public)
        self.gateway = site.gateway_port.connect(name, "edge")
        self.by_relay = by_relay
        self.script: deque[Message] = deque()
        self.episodes = 0
        self.start()

    def start(self) -> None:
        """An uplink, perhaps after another one was killed with all that it had in memory."""
        self.control, control = memory_pair()
        link = None
        if self.by_relay:
            channel = self.site.relay_port.connect(self.name, "edge")
            link = RelayLink(self.name, channel, self.sealer, self.site.clock, RELAY_TEXT)
        place = self.site.root / self.name
        self.uplink = Uplink(self.name, place, self.gateway, control, memory_pair()[0], self.site.clock, 10, relay=link)
        self.uplink.spool._db.execute("PRAGMA synchronous=OFF")
        self.control.send(Hello(self.name, "edge", "c", 1, 77, samples.spec(), ("reach",)))

    def record(self, steps: int = 20, human: range = range(0)) -> str:
        """An episode whose steps `human` a person acts in; its id. It is said a step a tick."""
        self.episodes += 1
        episode = samples.episode(self.name, self.episodes)
        self.script.append(EpisodeStarted(episode))
        for tick in range(steps):
            actor = Actor.human if tick in human else Actor.policy
            if tick % FRAME_STEPS == 0:
                picture = samples.image(1000 * self.episodes + tick)
                self.script.append(FrameRecorded(episode.id, "front", Frame(10 * tick + 1, picture)))
            step = samples.step(tick, actor, frame_ns=10 * (tick - tick % FRAME_STEPS) + 1)
            self.script.append(StepRecorded(episode.id, step))
        self.script.append(EpisodeEnded(episode.id, "success", 10**9))
        return episode.id

    def poll(self) -> None:
        for _ in range(2):
            if self.script:
                self.control.send(self.script.popleft())
        self.uplink.poll()


class Site:
    """`pass_time` plays it."""

    def __init__(self, root: Path, hold: Sequence[str] = (), room_bytes: int = 0) -> None:
        self.root, self.clock = root, ManualClock(1000 * SECOND)
        self.hold, self.room_bytes = hold, room_bytes
        self.public, self._secret = zmq.curve_keypair()
        self.gateway_port, self.relay_port = KeyedServer(), MemoryServer()
        self.line = self.gateway_port.connect(RELAY, "relay")
        self.robots: list[Robot] = []
        self.start_gateway()
        self.start_relay()

    def start_gateway(self) -> None:
        self.ledger, self.store = BufferLocation(self.root / "cloud").open_writer()
        ingest = Ingest(self.ledger, self.store, self.clock, samples.all_teach)
        ingest.open()
        self.view = FleetView(self.clock)
        self.gateway = Gateway(
            self.gateway_port,
            self.ledger,
            ingest,
            WeightStore.open(self.root / "cloud" / "weights", self.ledger, signer=Signer(b"x" * 32)),
            self.view,
            AdmittedRobots.of_one(samples.spec(), ("reach",)),
            self.clock,
            seals=SealOpener(self._secret, self.gateway_port.key_record),
        )

    def start_relay(self) -> None:
        """A relay, perhaps after another one was killed with all that it had in memory."""
        self.spool = UploadSpool(self.root / "relay" / "uploads.sqlite", self.room_bytes, self.hold)
        self.spool._db.execute("PRAGMA synchronous=OFF")
        self.relay = SiteRelay(RELAY, self.relay_port, self.line, self.clock, spool=self.spool)

    def robot(self, name: str, by_relay: bool = True) -> Robot:
        self.robots.append(Robot(self, name, by_relay))
        return self.robots[-1]

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(round(TICK_S * SECOND))
            for robot in self.robots:
                robot.poll()
            self.relay.poll()
            self.gateway.poll()

    def publish(self, number: int, count: int) -> None:
        """A version of so many values."""
        data = floats(w=np.random.default_rng(number).standard_normal(count, np.float32))
        trainer = self.gateway_port.connect("trainer")
        trainer.send(Hello("trainer", "trainer", "c", 1))
        trainer.send(Publish(version_of(number, data)))
        for at in range(0, len(data), 1_000_000):
            trainer.send(WeightBytes(number, at, data[at : at + 1_000_000]))
        self.gateway.poll()

    def until_all_have(self, number: int, most_s: float) -> float:
        """Until this version is with all robots; how long it took."""
        began_ns = self.clock.now_ns()
        while any((ready := robot.uplink.weights.ready) is None or ready[0].number != number for robot in self.robots):
            self.pass_time(TICK_S)
            assert self.clock.now_ns() - began_ns <= most_s * SECOND
        return (self.clock.now_ns() - began_ns) / SECOND

    def cut_uplink(self) -> None:
        """Nothing comes to the gateway, or from it."""
        self.gateway_port.cut = {RELAY, *(robot.name for robot in self.robots)}

    def mend_uplink(self) -> None:
        self.gateway_port.cut = set()

    def cut_relay(self) -> None:
        """Robots do not reach it."""
        self.relay_port.cut = {robot.name for robot in self.robots}

    def stored(self, robot: Robot) -> dict[str, list[int]]:
        """Indexes of the segments that are stored, by episode."""
        return {
            row.id: [segment.index for segment in self.ledger.segments_of(row.id)]
            for row in self.ledger.episodes()
            if row.robot == robot.name
        }

    def pictures(self, episode: str) -> list[bytes]:
        """Of an episode, as they are stored; b'' where one is held back."""
        rows = [place.row for place in self.ledger.segments_of(episode)]
        found = self.store.read(rows).segments
        return [picture for row in rows for picture in found[row].frames["front"].encoded]

    def close(self) -> None:
        self.relay.close()
        self.gateway.close()
        self.ledger.close()
        for robot in self.robots:
            robot.uplink.close()


def steps_of(site: Site, episode: str) -> np.ndarray:
    """int64[T] times of all steps of an episode that are stored."""
    rows = [place.row for place in site.ledger.segments_of(episode)]
    found = site.store.read(rows).segments
    return np.concatenate([found[row].times_ns for row in rows])
