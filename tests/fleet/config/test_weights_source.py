"""Where weights come from: the words, and what is read by them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.overrides import Overrides
from fleet.config.recipes import fake
from fleet.config.weights_source import SourceKind, WeightsSource, parse_source, read_version
from wire.errors import ConfigError


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of the fake recipe, the first of which is current."""
    root, recipe = tmp_path_factory.mktemp("fleet"), fake()
    with DataDirectory(root).prepare(RunIdentity("fake", 0, recipe.spec.data_hash)):
        rehearsal = InProcessFleet(root, recipe, robots=0)
        while (newest := rehearsal.ledger.newest_version()) is None or newest.version.number < 2:
            rehearsal.turn(40, 1.0)
        kept = msgspec.json.decode(rehearsal.ledger.kept_rollout())
        kept["history"] = [1]
        rehearsal.ledger.keep_rollout(msgspec.json.encode(kept).decode())
        rehearsal.close()
    return root


def test_each_word_names_its_weights(fleet: Path) -> None:
    found = {word: parse_source(f"{fleet}:{word}").read() for word in ("1", "2", "newest", "current")}
    assert [one.version for one in found.values()] == [1, 2, 2, 1]
    assert found["newest"] == parse_source(str(fleet)).read() == found["2"]
    assert found["current"].data == read_version(fleet, 1)[1]
    assert found["current"].sha256 == hashlib.sha256(found["current"].data).hexdigest()
    assert parse_source("untrained").read() is None


def test_what_was_trained_is_taken_where_nothing_was_published(fleet: Path, tmp_path: Path) -> None:
    (tmp_path / "trained.safetensors").write_bytes(b"weights")
    for text in (tmp_path, f"{tmp_path}:trained", tmp_path / "trained.safetensors"):
        weights = parse_source(str(text)).read()
        assert (weights.data, weights.version) == (b"weights", 0)
    with pytest.raises(ConfigError, match="has no weights"):
        parse_source(f"{fleet}:trained").read()


def test_a_source_knows_what_it_belongs_to(fleet: Path) -> None:
    assert parse_source(str(fleet)).identity().recipe == "fake"
    path = fleet / "trained.safetensors"
    path.write_bytes(b"weights")
    assert parse_source(str(path)).identity().recipe == "fake"
    path.unlink()
    assert parse_source("untrained").identity() is None


def test_it_means_the_same_everywhere(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fleet.parent)
    source = parse_source(f"{fleet.name}:2")
    assert source == WeightsSource(SourceKind.version, fleet, "2")
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{fleet}:latest", "a version is a number from 1 on, newest, current or trained"),
        ("{fleet}:99", "there is no version 99 in {fleet}, which has 1 to 2"),
        ("{fleet}:9223372036854775808", "there is no version 9223372036854775808"),
        ("{fleet}:0", "a version is a number from 1 on, newest, current or trained"),
        ("{fleet}:00", "a version is a number from 1 on"),
        ("{fleet}:", "a version is a number from 1 on"),
        ("{fleet}/lock:3", "{fleet}/lock is a file, which has no versions: leave version 3 out"),
        ("/nowhere", "there is no /nowhere"),
        ("/nowhere:3", "there is no /nowhere"),
    ],
)
def test_what_is_not_there_is_said(text: str, said: str, fleet: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_source(text.format(fleet=fleet)).read()
    assert said.format(fleet=fleet) in str(refused.value)


def test_a_version_whose_file_went_is_named_with_the_way_out(fleet: Path) -> None:
    weights = DataDirectory(fleet).weights
    (path,) = weights.glob("1-*.safetensors")
    path.rename(fleet / "elsewhere")
    try:
        with pytest.raises(ConfigError) as refused:
            parse_source(f"{fleet}:1").read()
        assert str(refused.value) == (
            f"version 1 of {fleet} is not kept any more: {path} is gone. "
            f"Take newest, or one whose file is in {weights}."
        )
    finally:
        (fleet / "elsewhere").rename(path)


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_below_1_is_no_version(number: int, fleet: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no version {number} in {fleet}"):
        read_version(fleet, number)
    assert read_version(fleet, None) == read_version(fleet, 2)


def test_training_may_begin_with_any_of_them(fleet: Path, tmp_path: Path) -> None:
    recipe = Overrides(from_=str(fleet)).applied(fake())
    assert recipe.start.read().version == 2 and recipe.demonstrations == 0
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Overrides(from_=str(tmp_path))
    assert (checkpoint.policy, checkpoint.from_) == (f"lerobot:{tmp_path}", "")
    with pytest.raises(ConfigError, match="leave --policy flow:small out"):
        Overrides(from_=str(tmp_path), policy="flow:small")
    with pytest.raises(ConfigError, match="leave it out"):
        Overrides(from_="untrained")
