"""Real sockets on loopback: authentication, reconnection, refusals that name the robot."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tests import samples
from wire.clock import ManualClock
from wire.codec import PROTOCOL_VERSION, encode
from wire.errors import ConfigError, RejectedError
from wire.messages import Message
from wire.messages.gateway import Ack, Heartbeat, Hello, HelloAck, Rejection
from wire.transport.keys import Teaching, check_name, load_pair, load_public, make_keys
from wire.transport.session import GatewaySession
from wire.transport.zmq_channel import ZmqClient, ZmqServer, wait_any


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["gateway", "robot-0", "robot-1"])
    return tmp_path / "keys"


@pytest.fixture
def server(keys: Path) -> Iterator[ZmqServer]:
    channel = ZmqServer("tcp://127.0.0.1:*", keys)
    yield channel
    channel.close()


@pytest.fixture
def connect(keys: Path, server: ZmqServer) -> Iterator[Callable[..., ZmqClient]]:
    made: list[ZmqClient] = []

    def make(name: str, directory: Path = keys) -> ZmqClient:
        made.append(ZmqClient(server.endpoint, name, directory))
        return made[-1]

    yield make
    for channel in made:
        channel.close()


def other_keys(keys: Path, *names: str, **files: str) -> Path:
    """A directory with new keys of `names`, and the file that each keyword argument names from `keys`."""
    directory = keys.with_name("other")
    make_keys(directory, list(names))
    for name, source in files.items():
        kept = "public/gateway.key" if name == "gateway" else f"{name.replace('_', '-')}.key_secret"
        shutil.copy(keys / source, directory / kept)
    return directory


def exchange(
    server: ZmqServer, client: ZmqClient, message: Message, seconds: float = 60.0
) -> tuple[str, Message] | None:
    """Send until the server has it."""
    deadline = time.monotonic() + seconds
    sent = False
    while time.monotonic() < deadline:
        sent = sent or client.send(message)
        wait_any([server, client], 0.02)
        if (received := server.recv()) is not None:
            return received
        client._watch()
    return None


def answer(client: ZmqClient, server: ZmqServer, seconds: float = 60.0) -> Message | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        server.recv()
        wait_any([client], 0.02)
        if (message := client.recv()) is not None:
            return message
    return None


def nothing_comes(server: ZmqServer, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        wait_any([server], 0.02)
        if server.recv() is not None:
            return False
    return True


def test_both_ways(server: ZmqServer, connect: Callable[..., ZmqClient]) -> None:
    client = connect("robot-0")
    received = exchange(server, client, samples.segment())
    assert received is not None
    assert received[0] == "robot-0"
    assert server.send("robot-0", Ack(("a/0",)))
    reply = answer(client, server)
    assert isinstance(reply, Ack)
    assert reply.segments == ("a/0",)
    assert not server.send("nobody", Ack(()))


def test_an_unknown_key_is_refused_by_name_and_disturbs_nobody(
    keys: Path, server: ZmqServer, connect: Callable[..., ZmqClient], caplog: pytest.LogCaptureFixture
) -> None:
    good = connect("robot-0")
    assert exchange(server, good, Heartbeat(1)) is not None
    stranger = connect("robot-9", other_keys(keys, "robot-9", gateway="public/gateway.key"))
    assert exchange(server, stranger, Hello("robot-9", "edge", "c", 1), 1.0) is None
    refusal = answer(stranger, server)
    assert isinstance(refusal, Rejection)
    assert "'robot-9' is refused" in refusal.reason
    assert [name for name, _ in server.rejections()] == ["robot-9"]
    assert "refused 'robot-9' from 127.0.0.1" in caplog.text
    # what a stranger says afterwards is not even read
    stranger.send(samples.segment())
    assert nothing_comes(server, 0.2)
    received = exchange(server, good, Heartbeat(2))
    assert received is not None
    assert received[0] == "robot-0"


def test_a_key_speaks_only_for_its_own_name(keys: Path, server: ZmqServer, connect: Callable[..., ZmqClient]) -> None:
    stolen = other_keys(keys, gateway="public/gateway.key", robot_1="robot-0.key_secret")
    imposter = connect("robot-1", stolen)
    received = exchange(server, imposter, Heartbeat(1))
    assert received is not None
    assert received[0] == "robot-0"


def test_another_gateways_key_gets_no_line(keys: Path, server: ZmqServer, connect: Callable[..., ZmqClient]) -> None:
    client = connect("robot-0", other_keys(keys, "gateway", robot_0="robot-0.key_secret"))
    assert exchange(server, client, Heartbeat(1), 1.0) is None
    assert "its gateway has another key" in client.refusal


def test_a_peer_without_a_key_is_refused(server: ZmqServer) -> None:
    context = zmq.Context()
    bare = context.socket(zmq.DEALER)
    bare.setsockopt(zmq.LINGER, 0)
    bare.connect(server.endpoint)
    bare.send(b"hello")
    try:
        assert nothing_comes(server, 1.0)
        refused = server.rejections()
    finally:
        bare.close()
        context.term()
    assert [name for name, _ in refused] == ["unknown"]


def test_a_peer_that_comes_back_is_found_under_its_name(server: ZmqServer, connect: Callable[..., ZmqClient]) -> None:
    assert exchange(server, connect("robot-0"), Heartbeat(1)) is not None
    second = connect("robot-0")
    assert exchange(server, second, Heartbeat(2)) is not None
    assert server.send("robot-0", HelloAck("c", 1, 2))
    assert isinstance(answer(second, server), HelloAck)


def test_garbage_from_a_known_peer_is_dropped_with_its_name(
    keys: Path, server: ZmqServer, connect: Callable[..., ZmqClient], caplog: pytest.LogCaptureFixture
) -> None:
    client = connect("robot-0")
    assert exchange(server, client, Heartbeat(1)) is not None
    client.socket.send(bytes([PROTOCOL_VERSION]) + b"garbage")
    assert isinstance(answer(client, server), Rejection)
    assert "dropped a message of 'robot-0'" in caplog.text
    assert exchange(server, client, Heartbeat(2)) is not None


def of_version(message: Message, difference: int) -> bytes:
    """As a vla-fleet of another protocol version sends it."""
    return bytes([PROTOCOL_VERSION + difference]) + encode(message)[1:]


@pytest.mark.parametrize(
    ("difference", "where"), [(-1, "older than this side's 6: upgrade vla-fleet there"), (1, "here")]
)
def test_a_robot_of_another_version_is_named_to_the_operator_and_told_which_side_to_upgrade(
    server: ZmqServer, connect: Callable[..., ZmqClient], difference: int, where: str
) -> None:
    client = connect("robot-0")
    assert exchange(server, client, Heartbeat(1)) is not None
    for _ in range(3):
        client.socket.send(of_version(Hello("robot-0", "edge", "c", 1), difference))
        # what it gets is of this side's version, which says all that it can understand
        assert isinstance(answer(client, server), Rejection)
    assert server.refused == {"version": 3}
    ((name, why),) = server.rejections()
    assert name == "robot-0" and why.startswith("from 127.0.0.1: the other side speaks protocol") and where in why
    assert exchange(server, client, Heartbeat(2)) is not None


def test_a_gateway_of_another_version_is_told_of_at_the_robot(
    server: ZmqServer, connect: Callable[..., ZmqClient]
) -> None:
    client, clock = connect("robot-0"), ManualClock(10**9)
    session = GatewaySession(client, Hello("robot-0", "edge", "c", 0), clock)
    assert exchange(server, client, Heartbeat(1)) is not None
    server.socket.send_multipart([server._connections["robot-0"], of_version(HelloAck("c", 1, 2), 1)])
    deadline = time.monotonic() + 60
    while not client.refusal and time.monotonic() < deadline:
        wait_any([client], 0.02)
        client.recv()
    assert "newer than this side's 6: upgrade vla-fleet here" in client.refusal
    session.raise_if_rejected()
    clock.advance(60 * 10**9)
    with pytest.raises(RejectedError, match="upgrade vla-fleet here"):
        session.raise_if_rejected()


def test_a_port_in_use_says_which_option_to_change(keys: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on .*--port"):
            ZmqServer(f"tcp://127.0.0.1:{taken.getsockname()[1]}", keys)


def test_missing_keys_say_how_to_make_them(keys: Path) -> None:
    with pytest.raises(ConfigError, match="vla-fleet keys robot-7"):
        load_pair(keys, "robot-7")
    with pytest.raises(ConfigError, match="copy it from the gateway"):
        load_public(keys, "robot-7")
    assert (keys / "robot-0.key_secret").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["", "../etc", "a/b", ".hidden", "x" * 65, "two words"])
def test_names_that_are_no_names(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a name"):
        check_name(name)


def test_what_a_key_may_teach_changes_while_its_robot_is_connected(keys: Path, server: ZmqServer, connect) -> None:
    client = connect("robot-0")
    assert server.may_teach("robot-0") == frozenset()
    assert exchange(server, client, Heartbeat(1)) is not None
    assert server.may_teach("robot-0") == frozenset()
    make_keys(keys, ["robot-0"], teaches=[Teaching.script])
    deadline = time.monotonic() + 60
    while server.may_teach("robot-0") != {"script"} and time.monotonic() < deadline:
        # Nothing has to come for it; what came before is judged by it, too.
        wait_any([server, client], 0.02)
        server.recv()
    assert server.may_teach("robot-0") == {"script"} and server.may_teach("robot-1") == frozenset()
    record = server.key_record("robot-1")
    assert record is not None and record.role == "edge", "whether it has spoken or not"
    assert server.key_record("robot-99") is None
    # Its connection was cut, and what was on the way with it; it comes back by itself.
    assert any(exchange(server, client, Heartbeat(2), 2.0) is not None for _ in range(30))
    assert server.may_teach("robot-0@2") == {"script"}
