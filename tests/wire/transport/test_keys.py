"""Key files: what they say, what old ones say, and what is not made again."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from wire.errors import ConfigError
from wire.transport.keys import (
    check_teaching,
    default_role,
    load_pair,
    load_public,
    make_keys,
    public_path,
    read_record,
    records,
    revoke,
)
from wire.types import Role


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("robot-0", "edge"),
        ("trainer", "trainer"),
        ("trainer-2", "trainer"),
        ("evaluator-minute-5", "evaluator"),
        ("teleoperator_anna", "teleoperator"),
        ("console2", "console"),
        ("gateway", "gateway"),
        ("trainers", "edge"),
        ("inference", "edge"),
        ("7", "edge"),
        ("my-trainer", "edge"),
    ],
)
def test_a_name_has_a_usual_role(tmp_path: Path, name: str, role: str) -> None:
    assert default_role(name) == role
    make_keys(tmp_path, [name])
    record = read_record(public_path(tmp_path, name))
    assert (record.name, record.role) == (name, role)
    assert load_pair(tmp_path, name).role == role
    assert load_pair(tmp_path, name).public == load_public(tmp_path, name) == record.public.encode()


def test_a_role_may_be_said(tmp_path: Path) -> None:
    make_keys(tmp_path, ["console-arm"], Role.edge)
    assert read_record(public_path(tmp_path, "console-arm")).role == "edge"
    assert load_pair(tmp_path, "console-arm").role == "edge"


def test_what_a_robot_may_teach_is_in_its_record(tmp_path: Path) -> None:
    make_keys(tmp_path, ["robot-0", "demonstrator"])
    make_keys(tmp_path, ["robot-1"], teaches=check_teaching(["demonstrations", "script", "script"]))

    def may_teach(name: str) -> set[str]:
        return set(read_record(public_path(tmp_path, name)).may_teach)

    assert (may_teach("robot-0"), may_teach("robot-1")) == (set(), {"script", "demonstrations"})
    assert may_teach("demonstrator") == {"script", "demonstrations"}
    # Its pair stays; nothing is taken back unasked.
    before = load_pair(tmp_path, "robot-1")
    make_keys(tmp_path, ["robot-1"])
    assert may_teach("robot-1") == {"script", "demonstrations"}
    make_keys(tmp_path, ["robot-1"], teaches=check_teaching(["none"]))
    assert may_teach("robot-1") == set() and load_pair(tmp_path, "robot-1") == before
    with pytest.raises(ConfigError, match=r"--teaches 'scripts': .* Did you mean 'script'"):
        check_teaching(["scripts"])


def test_a_directory_of_bare_keys_goes_on_working(tmp_path: Path) -> None:
    """As they were made before records: the key alone, and a pair without a role."""
    (tmp_path / "public").mkdir()
    for name in ("robot-0", "evaluator-2"):
        public, secret = zmq.curve_keypair()
        public_path(tmp_path, name).write_bytes(public + b"\n")
        (tmp_path / f"{name}.key_secret").write_bytes(public + b"\n" + secret + b"\n")
    make_keys(tmp_path, ["robot-0"])
    assert [(one.name, one.role) for one in records(tmp_path)] == [("evaluator-2", "evaluator"), ("robot-0", "edge")]
    assert load_pair(tmp_path, "robot-0").public == load_public(tmp_path, "robot-0")
    assert load_pair(tmp_path, "evaluator-2").role == "evaluator"


def test_no_new_pair_is_made_when_the_secret_was_moved_away(tmp_path: Path) -> None:
    make_keys(tmp_path, ["robot-0"])
    before = load_public(tmp_path, "robot-0")
    (tmp_path / "robot-0.key_secret").unlink()
    assert make_keys(tmp_path, ["robot-0", "robot-1"]) == ["robot-0"]
    assert load_public(tmp_path, "robot-0") == before and not (tmp_path / "robot-0.key_secret").exists()
    with pytest.raises(ConfigError, match=r"the secret was moved away.*keys revoke robot-0"):
        load_pair(tmp_path, "robot-0")


def test_a_public_key_that_was_taken_out_does_not_come_back_by_itself(tmp_path: Path) -> None:
    make_keys(tmp_path, ["robot-0"])
    before = (tmp_path / "robot-0.key_secret").read_bytes()
    public_path(tmp_path, "robot-0").unlink()
    with pytest.raises(ConfigError, match=r"has no public key at .*put that file back, or remove the secret"):
        make_keys(tmp_path, ["robot-0"])
    assert (tmp_path / "robot-0.key_secret").read_bytes() == before


def test_a_name_may_be_revoked_and_given_again(tmp_path: Path) -> None:
    gone = []
    for _ in range(2):
        make_keys(tmp_path, ["robot-0"])
        gone.append(revoke(tmp_path, "robot-0").public)
        assert not (tmp_path / "robot-0.key_secret").exists() and not public_path(tmp_path, "robot-0").exists()
    assert {one.public for one in records(tmp_path, "revoked")} == set(gone) and len(set(gone)) == 2
    with pytest.raises(ConfigError, match="no key of 'robot-0' is filed"):
        revoke(tmp_path, "robot-0")
    with pytest.raises(ConfigError, match="Did you mean 'robot-1'"):
        make_keys(tmp_path, ["robot-1"])
        revoke(tmp_path, "robot1")


@pytest.mark.parametrize("content", [b"x" * 39, b'{"name": "a"}', b'{"name":"a","role":"king","public":"","made":""}'])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, content: bytes) -> None:
    make_keys(tmp_path, [])
    public_path(tmp_path, "a").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.key is not the record"):
        load_public(tmp_path, "a")
