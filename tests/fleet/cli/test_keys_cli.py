"""`vla-fleet keys` and `edge --join`: what is made, shown and taken back, in the words that people type."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.config.process_options import EdgeOptions
from fleet.launch.robot_builders import joined
from tests.command_line import vla_fleet
from tests.wire.identity.test_joining import Door
from wire.errors import ConfigError
from wire.identity.join_tokens import make_token, read_token
from wire.transport.keys import load_pair, load_public, make_keys, public_path, read_record


def keys(directory: Path, *words: str) -> str:
    done = vla_fleet("keys", *words, "--keys", str(directory))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_alone_make_keys_wherever_the_options_stand(tmp_path: Path) -> None:
    assert "keys of gateway, robot-0, trainer are in" in keys(tmp_path, "robot-0", "trainer")
    done = vla_fleet("keys", "--keys", str(tmp_path), "--role", "console", "anna")
    assert done.returncode == 0
    roles = {name: read_record(public_path(tmp_path, name)).role for name in ("gateway", "robot-0", "trainer", "anna")}
    assert roles == {"gateway": "gateway", "robot-0": "edge", "trainer": "trainer", "anna": "console"}
    # A robot may be called as a command is.
    keys(tmp_path, "make", "list")
    assert load_pair(tmp_path, "list").role == "edge"
    refused = vla_fleet("keys", "x", "--role", "trainor", "--keys", str(tmp_path))
    assert refused.returncode == 1 and "Did you mean 'trainer'" in refused.stderr


def test_a_secret_that_was_moved_away_is_said_and_not_replaced(tmp_path: Path) -> None:
    keys(tmp_path, "robot-0")
    before = load_public(tmp_path, "robot-0")
    (tmp_path / "robot-0.key_secret").unlink()
    said = keys(tmp_path, "robot-0", "robot-1")
    assert "keys of gateway, robot-1 are in" in said and "'robot-0' has a key whose secret is not in" in said
    assert load_public(tmp_path, "robot-0") == before


def test_all_keys_are_listed_and_one_is_revoked(tmp_path: Path) -> None:
    assert "there are no keys" in keys(tmp_path, "list")
    keys(tmp_path, "robot-0", "trainer")
    token = keys(tmp_path, "token", "robot-7", "--minutes", "5").strip()
    assert read_token(token).name == "robot-7"
    public = load_public(tmp_path, "robot-0").decode()
    assert f"the key of 'robot-0' (edge, {public}) is revoked" in keys(tmp_path, "revoke", "robot-0")
    rows = [line.split()[:3] for line in keys(tmp_path, "list").splitlines()]
    assert rows == [
        ["gateway", "gateway", "made"],
        ["trainer", "trainer", "made"],
        ["robot-7", "edge", "may"],
        ["robot-0", "edge", "revoked"],
    ]
    shown = json.loads(keys(tmp_path, "list", "--json"))
    assert [one["name"] for one in shown["keys"]] == ["gateway", "trainer"]
    assert [one["name"] for one in shown["tokens"]] == ["robot-7"] and "digest" not in shown["tokens"][0]
    assert [one["public"] for one in shown["revoked"]] == [public]
    gone = vla_fleet("keys", "revoke", "robot-9", "--keys", str(tmp_path))
    assert gone.returncode == 1 and "no key of 'robot-9' is filed" in gone.stderr


def test_what_a_robot_may_teach_is_said_listed_and_taken_back(tmp_path: Path) -> None:
    keys(tmp_path, "robot-0", "--teaches", "script", "--teaches", "beside")
    keys(tmp_path, "token", "robot-7", "--teaches", "demonstrations")
    rows = {line.split()[0]: line for line in keys(tmp_path, "list").splitlines()}
    assert " beside,script " in rows["robot-0"] and " demonstrations" in rows["robot-7"] and " - " in rows["gateway"]
    keys(tmp_path, "robot-0", "--teaches", "none")
    assert read_record(public_path(tmp_path, "robot-0")).teaches == ()
    refused = vla_fleet("keys", "x", "--teaches", "scripts", "--keys", str(tmp_path))
    assert refused.returncode == 1 and "Did you mean 'script'" in refused.stderr


def test_a_computer_joins_for_a_robot_that_something_else_starts(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["gateway"])
    door = Door(tmp_path / "keys")
    try:
        token = make_token(tmp_path / "keys", "robot-7", 5)
        said = keys(tmp_path / "here", "join", token, "--gateway", door.server.endpoint)
        again = vla_fleet("keys", "join", token, "--gateway", door.server.endpoint, "--keys", str(tmp_path / "there"))
    finally:
        door.close()
    assert "'robot-7' has its key in" in said
    assert load_pair(tmp_path / "here", "robot-7").public == load_public(tmp_path / "keys", "robot-7")
    assert again.returncode == 1 and "does not take the token" in again.stderr


def test_an_edge_takes_its_name_from_the_token(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["gateway"])
    token, here = make_token(tmp_path / "keys", "robot-7", 5), tmp_path / "here"
    # It has joined before.
    make_keys(here, ["robot-7"])
    public_path(here, "gateway").write_bytes(public_path(tmp_path / "keys", "gateway").read_bytes())
    options = EdgeOptions(join=token, keys=here)
    assert joined(options) == replace(options, name="robot-7", join="")
    assert joined(replace(options, name="robot-7")).name == "robot-7"
    assert "--join" not in joined(options).arguments()
    with pytest.raises(ConfigError, match="--name robot-8: the token of --join is for 'robot-7'"):
        joined(replace(options, name="robot-8"))
    with pytest.raises(ConfigError, match="no join token"):
        joined(replace(options, join=token[:-3]))
    assert joined(EdgeOptions(name="robot-8")).name == "robot-8"
