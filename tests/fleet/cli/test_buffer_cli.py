"""`vla-fleet buffer` on a real buffer, as a person types it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cloud_learner.buffer.ledger.rows import HeldBy
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import seal
from fleet.cli.__main__ import app
from fleet.cli.offline import progress
from fleet.cli.stored import exchange
from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.errors import ConfigError, CorruptDataError, InvalidDataError
from wire.identity.sealing import without_pictures
from wire.types import PolicyVersion

# large enough for several chunks of a shard
SPEC = fake_spec(1, size=128)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three finished episodes in a shard, one in the journal, one policy version trained on the first."""
    root = tmp_path / "data"
    ledger, store = BufferLocation(root).open_writer()
    ledger.see_robot("r1", SPEC, "clock", 1)
    for number, (source, actor) in enumerate((("demonstration", 2), ("online", 0), ("online", 1))):
        episode = fake_episode(SPEC, f"e{number}", source=source, actor=[actor] * 100, steps=100, seed=number)
        assert None not in store.append_all([(segment, 5) for segment in episode], 6)
    assert seal(store, 7, force=True).shards == 1
    for segment in fake_episode(SPEC, "e3", actor=[0] * 40, steps=40, seed=3, finished=False):
        store.append_all([(segment, time.monotonic_ns())], time.monotonic_ns())
    numbers = [ledger.episode(f"e{n}").number for n in range(2)]  # type: ignore[union-attr]
    ledger.commit_version(PolicyVersion(1, "ab", 2, 0, 10, 5, 2), "1.safetensors", numbers[:1])
    ledger.commit_version(PolicyVersion(2, "cd", 2, 1, 20, 5, 4), "2.safetensors", numbers[1:])
    store.close()
    ledger.close()
    return root


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["buffer", *map(str, arguments)])
    if isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def test_stats_say_what_is_there(data: Path) -> None:
    text = run("stats", "--data", data)
    assert "4 episodes, 340 steps of 1 robots" in text
    assert "2 policy versions, the newest is 2." in text
    found = json.loads(run("stats", "--data", data, "--json"))
    assert (found["segments"], found["shards"], found["journal_segments"]) == (7, 1, 1)
    assert {(s["source"], s["outcome"]): s["episodes"] for s in found["shares"]} == {
        ("demonstration", "success"): 1,
        ("online", "success"): 2,
        ("online", ""): 1,
    }
    assert found["bytes_per_step"] > 0


def test_ask_wants_the_pictures_that_relays_hold_back(data: Path) -> None:
    ledger, store = BufferLocation(data).open_writer()
    for name, actor in (("h1", 1), ("h2", 0)):
        for segment in fake_episode(SPEC, name, actor=[actor] * 40, steps=40):
            store.append_all([(without_pictures(segment), 5)], 6, held={segment.id: HeldBy("relay")})
    assert "0 segments now. Of 2 they are not here" in run("ask", "--data", data, "--dry-run")
    assert ledger.wanted_pictures("relay", 9) == ()
    assert "the pictures of 1 segments now" in run("ask", "--data", data, "--human")
    assert ledger.wanted_pictures("relay", 9) == ("h1/0",)
    assert "1 segments now. Of 2 they are not here: of 2 they are asked for" in run("ask", "h1", "h2", "--data", data)
    assert ledger.wanted_pictures("relay", 9) == ("h1/0", "h2/0")
    with pytest.raises(ConfigError, match="buffer ask h1"):
        run("export-episode", "h1", data / "h1.episode", "--data", data)
    store.close()
    ledger.close()


def test_verify_names_damage_and_repair_lets_the_rest_serve_on(data: Path) -> None:
    assert "all whole" in run("verify", "--data", data)
    (victim,) = (data / "store").glob("*/records/c/0")
    bytes_ = bytearray(victim.read_bytes())
    bytes_[len(bytes_) // 3] ^= 255
    victim.write_bytes(bytes_)
    text = run("verify", "--data", data, status=1)
    assert "DAMAGED" in text
    assert "records/c/0" in text
    run("verify", "--data", data, "--repair", status=1)
    assert "all whole" in run("verify", "--data", data)
    ledger, store = BufferLocation(data).open_reader()
    rows = [row.row for row in ledger.segments_after(0) if not row.damaged]
    assert 1 < len(rows) < 7
    assert len(store.read(rows).segments) == len(rows)
    ledger.close()


def test_prune_keeps_what_people_did_and_compact_gives_room_back(data: Path) -> None:
    assert "1 episodes" in run("prune", "--data", data, "--max-size", "0", "--dry-run")
    assert "would be forgotten" in run("prune", "--data", data, "--max-size", "0", "--dry-run")
    assert "1 episodes" in run("prune", "--data", data, "--max-size", "0")
    found = json.loads(run("stats", "--data", data, "--json"))
    assert found["pruned_episodes"] == 1
    run("prune", "--data", data, "--max-size", "0", "--no-keep-human", "--no-keep-demonstrations")
    run("compact", "--data", data)
    found = json.loads(run("stats", "--data", data, "--json"))
    # the unfinished episode came just now: it may still be running
    assert (found["episodes"], found["shards"]) == (1, 0)
    assert "all whole" in run("verify", "--data", data)


def test_long_work_says_how_far_it_is(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_S", 0.0)
    assert "1 of 1 shards, " in run("verify", "--data", data)
    run("prune", "--data", data, "--max-size", "0", "--no-keep-human", "--no-keep-demonstrations")
    ledger, store = BufferLocation(data).open_writer()
    for number in range(2):
        for segment in fake_episode(SPEC, f"small{number}", actor=[2] * 40, steps=40, seed=number):
            store.append_all([(segment, 5)], 6)
        seal(store, 7, force=True)
    store.close()
    ledger.close()
    assert "2 of 2 shards, " in run("compact", "--data", data)


def test_prune_has_bounds_by_task_and_source_and_a_floor(data: Path) -> None:
    def would(*arguments: str) -> str:
        return run("prune", "--data", data, "--dry-run", "--max-size", "0", *arguments).split()[0]

    everything = ("--no-keep-human", "--no-keep-demonstrations")
    assert would() == "1" and would(*everything) == "3"
    assert would(*everything, "--source", "online") == "2"
    assert would(*everything, "--source", "evaluation") == "0"
    assert would(*everything, "--min-episodes", "3") == "1"
    # what people did fills it alone, and the rest goes: that is said
    assert "warning: episodes in which people acted fill" in run("prune", "--data", data, "--max-size", "1k")


def test_lineage_goes_both_ways(data: Path) -> None:
    assert run("lineage", "--data", data, "--version", "2").split() == ["e0", "e1"]
    assert run("lineage", "--data", data, "--episode", "e0").split() == ["1", "2"]
    assert run("lineage", "--data", data, "--episode", "e1").split() == ["2"]
    with pytest.raises(ConfigError, match="no episode 'x'"):
        run("lineage", "--data", data, "--episode", "x")
    with pytest.raises(ConfigError, match="either --version NUMBER or --episode ID"):
        run("lineage", "--data", data)


def test_people_say_how_an_episode_went(data: Path) -> None:
    assert run("label", "e1", "success=1", "quality=0.8", "--data", data).strip() == "e1: quality=0.8, success=1"
    assert run("label", "e1", "success=0", "--author", "anna", "--data", data).strip() == "e1: quality=0.8, success=0"
    with DataDirectory(data).open_buffer() as (ledger, _store):
        assert ledger.labels("e1") == {"success": 0.0, "quality": 0.8}
    with pytest.raises(InvalidDataError, match="'e7' is not in the ledger"):
        run("label", "e7", "success=1", "--data", data)


def test_snapshots_are_taken_listed_and_said_to_lose_what_is_pruned(data: Path) -> None:
    assert run("snapshots", "--data", data) == ""
    assert run("snapshot", "first", "--data", data).startswith("first: 7 segments, 340 steps, up to ledger row 7.")
    assert "7 of 7 segments are there" in run("snapshots", "--data", data)
    (taken,) = json.loads(run("snapshots", "--data", data, "--json"))
    assert (taken["name"], taken["row"], taken["there"]) == ("first", 7, 7)
    for arguments in (("--dry-run",), ()):
        text = run("prune", "--data", data, "--max-size", "0", *arguments)
        assert "warning: " in text and "what goes is missing from snapshots 'first'" in text
    assert "5 of 7 segments are there" in run("snapshots", "--data", data)
    assert "missing from" not in run("prune", "--data", data, "--max-size", "0"), "nothing more goes"


def test_tail_shows_the_newest_segments(data: Path) -> None:
    lines = run("tail", "--data", data, "-n", "2", "--no-follow").splitlines()
    assert len(lines) == 2
    assert "e3/0" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prune"], "nothing to forget by"),
        (["prune", "--max-size", "lots"], "--max-size 'lots': give a number"),
        (["prune", "--max-age", "-3d"], "is negative"),
        (["export-lerobot", "out", "--spec", "nope"], "--spec must name one robot spec"),
        (["import-lerobot", "nowhere"], "there is no LeRobot dataset at nowhere"),
        (["import-lerobot", "nowhere", "--scale", "a"], "write NAME=VALUE"),
        (["import-lerobot", "nowhere", "--scale", "a=b"], "--scale a=b: give a number"),
        (["label", "e1", "success"], "label 'success': write NAME=VALUE"),
        (["label", "e1", "success=yes"], "success=yes: give a number"),
        (["export-lerobot", "out", "--held-out", "--validation", "0"], "validation 0.0: give a share"),
        (["export-lerobot", "out", "--held-out"], "no fleet has worked there.*Give --validation SHARE"),
        (["export-lerobot", "out", "--held-out", "--recipe", "fake"], "recipe 'fake' holds nothing out"),
    ],
)
def test_wrong_options_say_what_to_do(data: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(arguments[0], *arguments[1:], "--data", data)


def holding_out(seed: int) -> Recipe:
    return replace(fake(seed), validation=0.25)


def test_an_export_splits_as_the_trainer_does_unless_it_is_told_otherwise(data: Path) -> None:
    mine = f"{__name__}:holding_out"
    for held_out in (True, False):
        assert exchange._held_out_share(data, mine, None, None, held_out) == 0.25
    assert exchange._held_out_share(data, mine, None, 0.5, True) == 0.5
    assert exchange._held_out_share(data, mine, None, None, None) == 0.0, "all of it"
    DataDirectory(data).prepare(RunIdentity(mine, 0, SPEC.hash)).close()
    assert exchange._held_out_share(data, "", None, None, True) == 0.25


def test_lag_says_how_far_behind_rollouts_arrived(data: Path) -> None:
    ledger, store = BufferLocation(data).open_writer()
    # acted by version 1 while the fleet had 2
    (late,) = fake_episode(SPEC, "late", actor=[0] * 30 + [1] * 30, steps=60, seed=9)
    store.append_all([(late, 5)], 6)
    store.close()
    ledger.close()
    found = json.loads(run("lag", "--data", data, "--max-lag", 0, "--json"))
    assert [(one["robot"], one["rollout_steps"], one["largest"], one["stale_steps"]) for one in found] == [
        ("r1", 170, 1, 30),
        ("", 170, 1, 30),
    ]
    text = run("lag", "--data", data, "--max-lag", 0)
    assert "above 0" in text and "17.6%" in text and "all " in text
    assert "above" not in run("lag", "--data", data)
    assert "lag   1" in run("tail", "-n", 1, "-F", "--data", data)


def test_no_rollout_has_no_lag(tmp_path: Path) -> None:
    ledger, store = BufferLocation(tmp_path).open_writer()
    store.close()
    ledger.close()
    assert "no rollout is stored" in run("lag", "--data", tmp_path)


def test_no_buffer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no data directory"):
        run("stats", "--data", tmp_path / "none")


def test_where_the_buffer_is_can_be_said_once(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    directory = DataDirectory(tmp_path / "fleet")
    directory.keep_buffer_at("", f"file://{tmp_path}/shards")
    assert directory.buffer.store_location == f"file://{tmp_path}/shards"
    assert directory.buffer.ledger_location == str(tmp_path / "fleet" / "ledger.sqlite")
    ledger, store = directory.buffer.open_writer()
    store.close()
    ledger.close()
    directory.keep_buffer_at("", "")
    directory.keep_buffer_at("", f"file://{tmp_path}/shards")
    with pytest.raises(ConfigError, match="choose a fresh --data"):
        directory.keep_buffer_at("", "s3://elsewhere/else")


def test_what_is_kept_of_an_object_store_is_a_setting_of_the_machine(tmp_path: Path) -> None:
    directory, note = DataDirectory(tmp_path), tmp_path / "buffer.json"
    assert directory.buffer.cache_bytes == 10_000_000_000
    note.write_text('{"cache_bytes": 5000}')
    directory.keep_buffer_at("", "s3://bucket/fleet")
    assert directory.buffer == BufferLocation(tmp_path, store="s3://bucket/fleet", cache_bytes=5000)
    known = {"ledger": "", "store": "s3://bucket/fleet", "cache_bytes": 5000, "gateway": ""}
    assert json.loads(note.read_text()) == known
    for bad in ('{"cache_bytes": -1}', '{"cache_bytes": "10G"}'):
        note.write_text(bad)
        with pytest.raises(CorruptDataError, match=r"buffer\.json.*cache_bytes, a whole number"):
            _ = directory.buffer
