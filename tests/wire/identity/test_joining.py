"""A robot joins by a token over real ZeroMQ: once, in time, with a key that it made itself."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from wire import codec
from wire.codec import PROTOCOL_VERSION, decode, encode
from wire.errors import ConfigError, RejectedError, WireError
from wire.identity import join_tokens
from wire.identity.enrolment import join_fleet
from wire.identity.join_tokens import TokenRefusal, make_token, open_tokens, read_token, redeem
from wire.identity.refusals import RefusalReason
from wire.messages import Message
from wire.messages.gateway import Heartbeat
from wire.transport import zmq_channel
from wire.transport.keys import Teaching, load_pair, load_public, make_keys, public_path, read_record, revoke
from wire.transport.zmq_channel import ZmqClient, ZmqServer, wait_any
from wire.types import Role

LONG_S = 60.0
"""a robot that is refused does not wait so long"""


class Door:
    """A gateway's port with a thread that hears whoever comes."""

    def __init__(self, keys: Path, enrols: bool = True) -> None:
        self.keys = keys
        self.server = ZmqServer("tcp://127.0.0.1:*", keys, enrols=enrols)
        self.heard: list[tuple[str, str]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            wait_any([self.server], 0.02)
            while (received := self.server.recv()) is not None:
                self.heard.append((received[0], self.server.role(received[0])))

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self.server.close()

    def hears(self, name: str, keys: Path) -> bool:
        """Whether a message of `name`, with the keys in that directory, arrives under it."""
        client, end = ZmqClient(self.server.endpoint, name, keys), time.monotonic() + 30
        try:
            while (name, "edge") not in self.heard and not client.refusal and time.monotonic() < end:
                client.send(Heartbeat(1))
                wait_any([client], 0.02)
                client.recv()
            return (name, "edge") in self.heard
        finally:
            client.close()


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    make_keys(tmp_path / "keys", ["gateway", "robot-0"])
    made = Door(tmp_path / "keys")
    yield made
    made.close()


def test_a_robot_joins_and_starts_again_without_the_token(door: Door, tmp_path: Path) -> None:
    token, here = make_token(door.keys, "robot-7", 60), tmp_path / "robot"
    assert [one.name for one in open_tokens(door.keys)] == ["robot-7"]
    assert join_fleet(here, token, door.server.endpoint) == "robot-7"
    assert open_tokens(door.keys) == []
    record = read_record(public_path(door.keys, "robot-7"))
    assert (record.name, record.role) == ("robot-7", "edge")
    assert record.public.encode() == load_pair(here, "robot-7").public
    assert load_public(here, "gateway") == load_public(door.keys, "gateway")
    assert (here / "robot-7.key_secret").stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in here.iterdir()) == ["public", "robot-7.key_secret"]
    assert not (door.keys / "robot-7.key_secret").exists(), "the secret stays where it was made"
    assert door.hears("robot-7", here)
    # As a service that is started with the same words every time.
    before = (here / "robot-7.key_secret").read_bytes()
    assert join_fleet(here, token, "tcp://127.0.0.1:1") == "robot-7"
    assert (here / "robot-7.key_secret").read_bytes() == before


def refused(door: Door, token: str, here: Path) -> list[tuple[str, str]]:
    with pytest.raises(RejectedError, match="was used, has expired or was never made there"):
        join_fleet(here, token, door.server.endpoint, LONG_S)
    assert not list(here.glob("*.key_secret"))
    return door.server.rejections()


def test_a_token_is_good_once(door: Door, tmp_path: Path) -> None:
    token = make_token(door.keys, "robot-7", 60)
    join_fleet(tmp_path / "robot", token, door.server.endpoint)
    key = load_public(door.keys, "robot-7")
    news = refused(door, token, tmp_path / "thief")
    assert {name for name, _ in news} == {"robot-7"} and "was used already, by another key" in news[0][1]
    assert "from 127.0.0.1" in news[0][1]
    assert load_public(door.keys, "robot-7") == key
    assert door.server.refusals.counts[RefusalReason.used_token] >= 1
    # Nor once more after its key was taken back.
    revoke(door.keys, "robot-7")
    refused(door, token, tmp_path / "thief")
    assert not public_path(door.keys, "robot-7").exists()


def test_a_token_that_has_expired(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = make_token(door.keys, "robot-7", 60)
    late = join_tokens.now() + datetime.timedelta(days=365)
    monkeypatch.setattr(join_tokens, "now", lambda: late)
    news = refused(door, token, tmp_path / "robot")
    assert "has expired at" in news[0][1] and news[0][0] == "robot-7"
    assert set(door.server.refusals.counts) == {RefusalReason.expired_token}


def test_a_token_that_this_gateway_never_made(door: Door, tmp_path: Path) -> None:
    token = make_token(door.keys, "robot-7", 60)
    for file in (door.keys / "tokens").iterdir():
        file.unlink()
    news = refused(door, token, tmp_path / "robot")
    assert news[0] == ("unknown", "from 127.0.0.1: it brought a join token that this gateway did not make.")


def test_a_port_where_nobody_joins(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["gateway"])
    door = Door(tmp_path / "keys", enrols=False)
    try:
        refused(door, make_token(door.keys, "robot-7", 60), tmp_path / "robot")
    finally:
        door.close()
    assert not public_path(door.keys, "robot-7").exists()


def test_another_gateway_is_not_joined_by_mistake(door: Door, tmp_path: Path) -> None:
    token = make_token(door.keys, "robot-7", 60)
    other = tmp_path / "other"
    make_keys(other, ["gateway"])
    with pytest.raises(ConfigError, match="is the key of another gateway than the token's"):
        join_fleet(other, token, door.server.endpoint)
    # And one that answers at the address, but has not the token's key, hears nothing of its secret.
    impostor = Door(other)
    try:
        with pytest.raises(WireError, match="another key"):
            join_fleet(tmp_path / "robot", token, impostor.server.endpoint, LONG_S)
    finally:
        impostor.close()
    assert impostor.heard == [] and open_tokens(door.keys) != []


def test_a_robot_of_another_version_does_not_take_its_token_for_a_bad_one(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway reads the token's secret as little as the robot reads its answer; both say which side to upgrade."""
    token = make_token(door.keys, "robot-7", 60)
    with monkeypatch.context() as other:
        other.setattr(ZmqClient, "send", lambda self, message: _send_of_version(self, message, PROTOCOL_VERSION - 1))
        other.setattr(zmq_channel, "decode", _decode_of_version(PROTOCOL_VERSION - 1))
        with pytest.raises(WireError, match="newer than this side's 5: upgrade vla-fleet here"):
            join_fleet(tmp_path / "robot", token, door.server.endpoint, LONG_S)
    (news,) = door.server.rejections()
    assert news[0] == "unknown" and "older than this side's 6: upgrade vla-fleet there" in news[1]
    # The token is as good as before.
    assert join_fleet(tmp_path / "robot", token, door.server.endpoint) == "robot-7"


def _send_of_version(client: ZmqClient, message: Message, version: int) -> bool:
    try:
        client.socket.send(bytes([version]) + encode(message)[1:], zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _decode_of_version(version: int) -> Callable[[bytes], Message]:
    def read(data: bytes) -> Message:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "PROTOCOL_VERSION", version)
            return decode(data)

    return read


def test_nobody_there(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["gateway"])
    token = make_token(tmp_path / "keys", "robot-7", 60)
    with pytest.raises(WireError, match="no gateway of this token answers"):
        join_fleet(tmp_path / "robot", token, "tcp://127.0.0.1:9", 0.5)
    # What it made for itself is used when it tries again.
    assert [path.name for path in (tmp_path / "robot").iterdir()] == ["robot-7.key_joining"]


@pytest.mark.parametrize("cut", [0, 1, 5, -1, -10])
def test_half_a_token_is_told_from_a_whole_one(tmp_path: Path, cut: int) -> None:
    make_keys(tmp_path, ["gateway"])
    token = make_token(tmp_path, "robot-7", 60)
    assert read_token(f" {token}\n").name == "robot-7"
    with pytest.raises(ConfigError, match="no join token, or not all of it"):
        read_token(token[:cut] if cut else "robot-7")


def test_a_token_says_what_the_robot_may_teach(tmp_path: Path) -> None:
    token = make_token(tmp_path, "robot-7", 60, teaches=(Teaching.beside,))
    found = redeem(tmp_path, read_token(token).secret, "a" * 40)
    assert not isinstance(found, TokenRefusal) and found.may_teach == {"beside"}
    assert read_record(public_path(tmp_path, "robot-7")).teaches == ("beside",)


# --- what the gateway does with a secret, without a network -----------------------------------------------------------


def test_an_answer_that_was_lost_may_be_asked_for_again(tmp_path: Path) -> None:
    make_keys(tmp_path, ["gateway"])
    secret = read_token(make_token(tmp_path, "robot-7", 60)).secret
    key, other = "a" * 40, "b" * 40
    first = redeem(tmp_path, secret, key)
    # As after a crash between the note that it was used and the filing.
    public_path(tmp_path, "robot-7").unlink()
    next((tmp_path / "tokens").glob("*.filed")).unlink()
    again = redeem(tmp_path, secret, key)
    assert not isinstance(first, TokenRefusal) and not isinstance(again, TokenRefusal)
    assert (again.name, again.role, again.public) == ("robot-7", Role.edge, key)
    found = redeem(tmp_path, secret, other)
    assert isinstance(found, TokenRefusal) and found.reason == RefusalReason.used_token


def test_a_key_that_was_taken_away_is_not_filed_again_by_its_token(tmp_path: Path) -> None:
    make_keys(tmp_path, ["gateway"])
    secret, key = read_token(make_token(tmp_path, "robot-7", 60)).secret, "a" * 40
    redeem(tmp_path, secret, key)
    public_path(tmp_path, "robot-7").unlink()
    found = redeem(tmp_path, secret, key)
    assert isinstance(found, TokenRefusal) and "was taken away since" in found.text
    assert not public_path(tmp_path, "robot-7").exists()


@pytest.mark.parametrize("content", [b"", b'{"name": "robot-8"', b"\xff\x00"])
def test_a_file_that_is_no_token_or_no_key_hinders_nobody(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(tmp_path, ["gateway"])
    secret = read_token(make_token(tmp_path, "robot-7", 60)).secret
    (tmp_path / "tokens" / "half.json").write_bytes(content)
    assert [token.name for token in open_tokens(tmp_path)] == ["robot-7"]
    assert "nobody joins by" in caplog.text
    public_path(tmp_path, "robot-7").write_bytes(content)
    found = redeem(tmp_path, secret, "a" * 40)
    assert isinstance(found, TokenRefusal) and found.reason == RefusalReason.wrong_name


def test_a_name_that_got_a_key_in_the_meantime_keeps_it(tmp_path: Path) -> None:
    make_keys(tmp_path, ["gateway"])
    secret = read_token(make_token(tmp_path, "robot-7", 60)).secret
    make_keys(tmp_path, ["robot-7"])
    found = redeem(tmp_path, secret, "a" * 40)
    assert isinstance(found, TokenRefusal) and "has got a key in the meantime" in found.text
    with pytest.raises(ConfigError, match="'robot-7' has a key already"):
        make_token(tmp_path, "robot-7", 60)


def test_the_gateway_keeps_no_secret_of_a_token(tmp_path: Path) -> None:
    make_keys(tmp_path, ["gateway"])
    token = make_token(tmp_path, "robot-7", 60)
    kept = b"".join(path.read_bytes() for path in (tmp_path / "tokens").iterdir())
    secret = read_token(token).secret
    assert secret not in kept and secret.hex().encode() not in kept and token.encode() not in kept
