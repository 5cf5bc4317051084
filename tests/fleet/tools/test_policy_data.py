"""`vla-fleet policy` on what a fleet recorded: tokenisers, statistics, versions, and what it says without any."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fleet.cli.__main__ import app
from fleet.config.data_directory import DataDirectory, RunIdentity
from fleet.config.recipes import fake
from fleet.tools.policy_commands import read_version, recipe_of, recorded_examples
from policies.interface.registry import PolicyChoice
from tests.fleet.recorded_fleet import record_fleet
from wire.errors import ConfigError, CorruptDataError, FleetError, InvalidDataError


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_fleet(tmp_path_factory.mktemp("fleet"))


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["policy", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


# So little data is not enough for codebooks that meet an error elsewhere.
@pytest.mark.parametrize(("kind", "goal", "most"), [("fast", "0.02", 0.05), ("residual_vq", "0", 0.2)])
@pytest.mark.slow
def test_a_tokeniser_is_fitted_measured_and_found_again(
    kind: str, goal: str, most: float, fleet: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    words = ["--data", str(fleet), "--json"]
    fitted = json.loads(run("tokenizer", "fit", str(file), "--kind", kind, "--horizon", "8", "--error", goal, *words))
    assert fitted["horizon"] == 8
    assert 0 < fitted["mean_abs"] < most
    assert 0 < fitted["tokens_mean"] <= fitted["tokens_max"] <= 32
    again = json.loads(run("tokenizer", "report", str(file), *words))
    assert again["vocabulary"] == fitted["vocabulary"]
    assert again["chunks"] > 4 * fitted["chunks"], "what was held out is a fifth"
    assert "tokens on average" in run("tokenizer", "report", str(file), "--data", str(fleet))


@pytest.mark.slow
def test_chunks_are_what_the_operator_did(fleet: Path) -> None:
    examples = recorded_examples(fleet, fake(), 8)
    spec = fake().spec
    assert examples.chunks.shape[1:] == (8, spec.action_dim)
    assert (examples.chunks >= spec.action_low()).all() and (examples.chunks <= spec.action_high()).all()
    assert np.abs(examples.chunks[:, 0, :3]).max() == 1.0, "it hurries"
    assert len(examples.states) > 4 * len(examples.chunks)
    with pytest.raises(ConfigError, match="no 500 actions in a row"):
        recorded_examples(fleet, fake(), 500)


def test_a_version_is_what_was_published(fleet: Path) -> None:
    number, newest = read_version(fleet, None)
    assert number >= 2
    assert read_version(fleet, 1)[1] != newest
    policy = fake().make_policy(fake().spec, 0)
    policy.load(newest, number)
    with pytest.raises(ConfigError, match="there is no version 99 in "):
        read_version(fleet, 99)


def test_a_version_that_was_changed_on_disk_is_not_taken(fleet: Path) -> None:
    ledger, store = DataDirectory(fleet).buffer.open_reader()
    row = ledger.version(1)
    store.close()
    ledger.close()
    assert row is not None
    path = DataDirectory(fleet).weights / row.path
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        with pytest.raises(CorruptDataError, match="is not what was published as version 1"):
            read_version(fleet, 1)
    finally:
        path.write_bytes(good)


def test_a_directory_knows_its_policy(fleet: Path, tmp_path: Path) -> None:
    assert recipe_of(fleet)[1].choice() is None
    chosen = PolicyChoice("tokens", "fast", {"horizon": 8})
    for name, identity, words in (
        ("chosen", RunIdentity("fake", 0, "", chosen), "tokens:fast"),
        ("built", RunIdentity("vla", 0, ""), f"lerobot:{tmp_path / 'built' / 'policy'}"),
    ):
        (tmp_path / name).mkdir()
        DataDirectory(tmp_path / name)._identify(identity)
        recipe, overrides = recipe_of(tmp_path / name)
        assert recipe.name == identity.recipe
        assert str(overrides.choice()) == words
    assert recipe_of(tmp_path / "chosen")[1].choice() == chosen


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("tokenizer", "fit", "{out}", "--data", "{fleet}", "--kind", "fats"), ConfigError, "Did you mean 'fast'"),
        (("tokenizer", "fit", "{out}", "--data", "{empty}"), ConfigError, "no fleet has worked there"),
        (("tokenizer", "fit", "{out}/no/file", "--data", "{fleet}"), FleetError, "writing the tokeniser"),
        (("tokenizer", "report", "{out}", "--data", "{fleet}"), FleetError, "reading the tokeniser"),
        (("tokenizer", "report", "{empty}/pickle", "--data", "{fleet}"), InvalidDataError, "pickle"),
        (("export", "{out}", "--data", "{fleet}"), ConfigError, "only lerobot's can be"),
        (("export", "{out}", "--data", "{empty}"), ConfigError, "no fleet has worked there"),
        (("show", "--recipe", "vla"), ConfigError, "--policy lerobot:DATA/policy"),
        (("tiny", "pi9", "{out}", "--recipe", "fake"), ConfigError, "no tiny 'pi9'"),
        (("tiny", "act", "{out}", "--recipe", "fake", "--data", "{empty}"), ConfigError, "has recorded anything"),
    ],
)
def test_what_cannot_be_done_is_said_clearly(
    words: tuple[str, ...], error: type[Exception], says: str, fleet: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "pickle").write_bytes(b"\x80\x04N.")
    given = [word.format(out=tmp_path / "out", fleet=fleet, empty=empty) for word in words]
    with pytest.raises(error, match=says):
        CliRunner().invoke(app, ["policy", *given], catch_exceptions=False)
    assert not (tmp_path / "out").exists()
