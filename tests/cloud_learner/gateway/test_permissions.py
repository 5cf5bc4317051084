"""Which role may send which message: every cell of the table, from outside. What is expected is written down here."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_learner.gateway.stop_server import StopServer
from robot_edge.relay.server import SiteRelay
from robot_edge.uplink.segments import SegmentBuilder
from tests import samples
from tests.cloud_learner.dispatch.hall import SPEC, Hall
from wire import codec
from wire.clock import ManualClock
from wire.identity.refusals import RefusalReason
from wire.messages import Message
from wire.messages.gateway import Hello, HelloAck, Rejection, Segment
from wire.transport.memory_channel import MemoryClient, MemoryServer, memory_pair
from wire.types import Episode, Role

ROLES = (
    *("edge", "demonstrator", "trainer", "evaluator", "thinker", "relay", "console", "teleoperator"),
    *("gateway", "inference", ""),
)

# x: may be sent; in the order of ROLES
TO_GATEWAY = """
Hello             x x x x x x x x . . .
Heartbeat         x x x x x x x x . . .
Segment           x x . . . . . . . . .
SealedSegment     . . . . . x . . . . .
PicturesGone      . . . . . x . . . . .
FetchPictures     . . x . . . . . . . .
EdgeStatus        x x . . . . . . . . .
Preview           x x . . . . . . . . .
EdgeEvent         x x . . . . . . . . .
VersionActivated  x x . . . . . . . . .
ShadowReport      x . . . . . . . . . .
FetchWeights      x . . x x x . . . . .
FetchDeltas       x . . x x . . . . . .
Publish           . . x . . . . . . . .
WeightBytes       . . x . . . . . . . .
TrainerStatus     . . x . . . . . . . .
Evaluate          . . . x . . . . . . .
Evaluation        . . . x . . . . . . .
ChangeVersions    . . . . . . x . . . .
ListFleet         . . . . . . x x . . .
SubmitJob         . . . . . . x x . . .
CancelJob         . . . . . . x x . . .
AcquireLease      . . . . . . x x . . .
RenewLease        . . . . . . x x . . .
ReleaseLease      . . . . . . x x . . .
OperatorCommand   . . . . . . . x . . .
"""
TO_STOPS = """
Heartbeat         x . . . . . x x . . .
StopShown         x . . . . . . . . . .
OperatorCommand   . . . . . . x x . . .
"""
TO_RELAY = """
Hello             x x . . . . . . . . .
Heartbeat         x x . . . . . . . . .
SealedSegment     x x . . . . . . . . .
FetchWeights      x . . x x . . . . . .
"""
KINDS = sorted((kind for kind in typing.get_args(codec.AnyMessage)), key=lambda kind: kind.__name__)


def expected(grid: str) -> dict[str, dict[str, bool]]:
    rows = [line.split() for line in grid.strip().splitlines()]
    return {kind: {role: mark == "x" for role, mark in zip(ROLES, marks, strict=True)} for kind, *marks in rows}


def least(kind: object) -> object:
    """Something of this type, as little as can be."""
    if isinstance(kind, types.UnionType):
        return None if types.NoneType in typing.get_args(kind) else least(typing.get_args(kind)[0])
    origin = typing.get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        if origin.__name__ == "RobotSpec":
            return SPEC
        if origin.__name__ == "Segment":
            return whole_episode()
        hints = typing.get_type_hints(origin)
        wanted = [one for one in msgspec.structs.fields(origin) if one.required]
        return origin(**{one.name: least(hints[one.name]) for one in wanted})
    if origin is tuple:
        return tuple(least(part) for part in typing.get_args(kind) if part is not ...)
    if origin is np.ndarray:
        return np.zeros(2, np.float32)
    if isinstance(origin, type) and issubclass(origin, StrEnum):
        return next(iter(origin))
    return {str: "x", bytes: b"", dict: {}, bool: False, int: 1, float: 1.0}[origin]  # type: ignore[index]


def whole_episode() -> Segment:
    """Of "peer", and valid."""
    builder = SegmentBuilder(Episode("peer-1", "peer", SPEC.hash, "reach", 0, "online", 1_000), 100)
    builder.step(samples.step(0))
    segment = builder.end("success", 2_000)
    assert segment is not None
    return segment


def sent(kind: type[Message], role: str) -> Message:
    """A message of this kind, as a peer would send it that is introduced as "peer"."""
    if kind is Hello:
        spec = SPEC if role in (Role.edge, Role.demonstrator) else None
        return Hello("peer", role, "c", 1, 7, spec, ("reach", "push"))
    message = least(kind)
    assert isinstance(message, Message)
    if "robot" in kind.__struct_fields__:
        return msgspec.structs.replace(message, robot="peer")
    return message


class Ports:
    """A gateway with both ports, and one peer that is connected to both under a role."""

    def __init__(self, root: Path, role: str) -> None:
        self.apart = MemoryServer()
        self.hall = Hall(root, stops=self._stops)
        # "" would be the name's own.
        self.peers = self.hall.server.connect("peer", role or "?"), self.apart.connect("peer", role or "?")
        self.peers[0].send(sent(Hello, role))
        self.hall.gateway.poll()
        self.heard(self.peers[0])

    def _stops(self, clock: ManualClock) -> StopServer:
        return StopServer(self.apart, clock, 5762)

    def heard(self, peer: MemoryClient) -> list[Message]:
        return list(iter(peer.recv, None))

    def refused(self, port: int, message: Message) -> bool:
        """Send it and have it handled; whether it was refused for the role of the key."""
        refused = (self.hall.gateway.refused, self.hall.stops.refused)[port]  # type: ignore[union-attr]
        before = refused[RefusalReason.wrong_role]
        self.peers[port].send(message)
        if port:
            self.hall.stops.poll()  # type: ignore[union-attr]
        else:
            self.hall.gateway.poll()
        return refused[RefusalReason.wrong_role] > before


@pytest.fixture
def made() -> Iterator[list[Ports]]:
    ports: list[Ports] = []
    yield ports
    for one in ports:
        assert one.hall.stops is not None
        one.hall.stops.close()
        one.hall.ledger.close()


@pytest.mark.parametrize("role", ROLES)
def test_every_message_of_every_role_to_the_gateway(tmp_path: Path, role: str, made: list[Ports]) -> None:
    made.append(ports := Ports(tmp_path, role))
    table = expected(TO_GATEWAY)
    assert set(table) <= {kind.__name__ for kind in KINDS}
    for kind in KINDS:
        may = table.get(kind.__name__, {}).get(role, False)
        assert ports.refused(0, sent(kind, role)) == (not may), f"{kind.__name__} of {role!r}"
        answer = ports.heard(ports.peers[0])
        assert may or not answer, f"{kind.__name__} of {role!r}"
    ledger = ports.hall.ledger
    assert (ledger.episode("peer-1") is None) == (role not in ("edge", "demonstrator"))
    assert ledger.newest_version() is None


@pytest.mark.parametrize("role", ROLES)
def test_every_message_of_every_role_to_the_way_of_stops(tmp_path: Path, role: str, made: list[Ports]) -> None:
    made.append(ports := Ports(tmp_path, role))
    table = expected(TO_STOPS)
    for kind in KINDS:
        message = sent(kind, role)
        if kind.__name__ == "OperatorCommand":
            message = msgspec.structs.replace(message, kind="estop")
        may = table.get(kind.__name__, {}).get(role, False)
        assert ports.refused(1, message) == (not may), f"{kind.__name__} of {role!r}"
        answer = ports.heard(ports.peers[1])
        assert may or not answer, f"{kind.__name__} of {role!r}"
    assert (ports.hall.stops.pop_given() != []) == (role in ("console", "teleoperator"))  # type: ignore[union-attr]


@pytest.mark.parametrize("role", ROLES)
def test_every_message_of_every_role_to_a_relay(role: str) -> None:
    server, (_, gateway) = MemoryServer(), memory_pair()
    relay, table = SiteRelay("relay", server, gateway, ManualClock(10**9)), expected(TO_RELAY)
    peer = server.connect("peer", role or "?")
    for kind in KINDS:
        before, may = relay.refused["role"], table.get(kind.__name__, {}).get(role, False)
        peer.send(sent(kind, role))
        relay.poll()
        assert (relay.refused["role"] > before) == (not may), f"{kind.__name__} of {role!r}"
        assert may or [type(answer) for answer in iter(peer.recv, None)] == [Rejection]
        list(iter(peer.recv, None))
    relay.close()


@pytest.mark.parametrize("claimed", [*ROLES, "edg", "EDGE", "edge " * 12])
@pytest.mark.parametrize("role", ["edge", "trainer", "console"])
def test_a_key_is_taken_for_what_it_was_made_for(tmp_path: Path, role: str, claimed: str, made: list[Ports]) -> None:
    """A stolen key says that it is something else."""
    made.append(ports := Ports(tmp_path, role))
    thief = ports.hall.server.connect("peer@2")
    thief.send(Hello("peer", claimed, "c", 1, 8, SPEC, ("reach", "push")))
    ports.hall.gateway.poll()
    answer = ports.heard(thief)
    if claimed == role:
        assert ports.hall.gateway.refused[RefusalReason.wrong_role] == 0
        return
    assert [type(message) for message in answer] == [Rejection]
    assert f"was made for role {role}" in answer[0].reason and len(answer[0].reason) < 400  # type: ignore[attr-defined]
    assert ports.hall.gateway.refused == {RefusalReason.wrong_role: 1}
    # Nothing is taken of it, and who was there first is still known.
    thief.send(whole_episode())
    ports.hall.gateway.poll()
    assert ports.hall.ledger.episode("peer-1") is None
    ports.peers[0].send(sent(next(kind for kind in KINDS if kind.__name__ == "Heartbeat"), role))
    ports.hall.gateway.poll()
    assert [type(message) for message in ports.heard(ports.peers[0])] == [HelloAck]
