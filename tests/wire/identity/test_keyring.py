"""The key directory as it stands: what was filed and revoked is noticed, and nothing is read that did not change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wire.identity.keyring import LOOK_S, Keyring
from wire.transport.keys import load_public, make_keys, public_path, revoke


class Watch:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path, ["gateway", "robot-0", "trainer"])
    return tmp_path


def public(keys: Path, name: str) -> str:
    return load_public(keys, name).decode()


def test_who_is_asked_for_is_not_looked_up_on_the_disk(keys: Path) -> None:
    watch = Watch()
    ring = Keyring(keys, watch)
    record = ring.record(public(keys, "robot-0"))
    assert record is not None and (record.name, record.role) == ("robot-0", "edge")
    reads = ring.reads
    for number in range(5000):
        assert ring.record(f"{number:040}") is None
        ring.refresh()
    watch.now_s += 60
    ring.refresh()
    assert ring.reads == reads == 3 and ring.pop_ended() == {}


def test_a_new_key_counts_at_the_next_look_and_is_the_only_one_read(keys: Path) -> None:
    watch = Watch()
    ring = Keyring(keys, watch)
    make_keys(keys, ["robot-1"])
    ring.refresh()
    assert ring.record(public(keys, "robot-1")) is None
    watch.now_s += LOOK_S
    ring.refresh()
    assert ring.record(public(keys, "robot-1")) is not None
    assert ring.reads == 4 and ring.pop_ended() == {}


def test_what_is_revoked_is_said_once_within_half_a_second(keys: Path) -> None:
    assert LOOK_S <= 0.5
    watch, key = Watch(), public(keys, "robot-0")
    ring = Keyring(keys, watch)
    revoke(keys, "robot-0")
    watch.now_s += LOOK_S
    ring.refresh()
    assert [record.name for record in ring.pop_ended().values()] == ["robot-0"]
    assert ring.record(key) is None
    known = ring.revoked(key)
    assert known is not None and known.name == "robot-0"
    watch.now_s += LOOK_S
    ring.refresh()
    assert ring.pop_ended() == {}
    # The file put back by hand does not undo it; a new pair of the same name is another key.
    public_path(keys, "robot-0").write_text(key)
    watch.now_s += LOOK_S
    ring.refresh()
    assert ring.record(key) is None
    public_path(keys, "robot-0").unlink()
    make_keys(keys, ["robot-0"])
    assert public(keys, "robot-0") != key
    ring.refresh(now=True)
    assert ring.record(public(keys, "robot-0")) is not None


def test_a_file_that_vanishes_while_all_are_looked_at_says_nothing_of_the_others(keys: Path) -> None:
    for name in "ab":
        (keys / "public" / f"{name}.key").symlink_to(keys / "nowhere")
    ring = Keyring(keys)
    assert ring.record(public(keys, "robot-0")) is not None
    assert ring.record(public(keys, "trainer")) is not None
    for number in range(20):
        (keys / "public" / f"{number}.key").symlink_to(keys / "nowhere")
        ring.refresh(now=True)
    assert ring.pop_ended() == {}


def test_a_file_that_is_taken_away_or_written_over_does_not_count_any_more(keys: Path) -> None:
    ring, old, trainer = Keyring(keys), public(keys, "robot-0"), public(keys, "trainer")
    make_keys(keys.with_name("other"), ["robot-0"])
    path = public_path(keys, "robot-0")
    with path.open("r+b") as file:
        file.write(public_path(keys.with_name("other"), "robot-0").read_bytes())
    os.utime(path, ns=(1, 1))
    public_path(keys, "trainer").unlink()
    ring.refresh(now=True)
    assert set(ring.pop_ended()) == {old, trainer}
    assert ring.record(public(keys, "robot-0")) is not None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 40, b'{"name": "x"', b"short"])
def test_a_file_that_is_no_record_lets_nobody_in_and_is_named(
    keys: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    public_path(keys, "bad").write_bytes(content)
    ring = Keyring(keys)
    assert ring.record(public(keys, "robot-0")) is not None
    assert "bad.key" in caplog.text


def test_a_record_under_another_name_lets_nobody_in(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = public(keys, "robot-0")
    public_path(keys, "robot-0").rename(public_path(keys, "trainer"))
    assert Keyring(keys).record(key) is None
    assert "it is the record of 'robot-0'" in caplog.text
