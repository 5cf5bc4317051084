"""`vla-fleet versions` against a gateway: what there is, what a person changes, and why not."""

from __future__ import annotations

import json

import pytest

from tests.fleet.cli.test_fleet_cli import House, house, run, run_until  # noqa: F401
from wire.errors import ConfigError, RejectedError


def test_versions_are_listed_frozen_and_pinned(house: House) -> None:  # noqa: F811
    shown = run_until(house, "promoted, runs", "versions", "list")
    assert "1 versions" in shown.output
    (one,) = json.loads(run(house, "versions", "list", "--json").output)
    assert (one["version"]["number"], one["state"], one["current"], one["here"]) == (1, "promoted", True, True)
    assert json.loads(run(house, "versions", "show", "1").output)["version"]["number"] == 1

    assert "frozen" in run(house, "versions", "freeze").output
    assert "1 versions, frozen" in run(house, "versions", "list").output
    assert "versions come" in run(house, "versions", "freeze", "--off").output

    assert run(house, "versions", "pin", "1", "--robot", "robot-0").exit_code == 0


@pytest.mark.parametrize("words", [["pin", "1", "--robot", "robot-0"], ["shadow", "1", "--robot", "robot-0"]])
def test_a_version_whose_weights_are_gone_is_named(house: House, words: list[str]) -> None:  # noqa: F811
    house.kill_gateway()
    (house.root / "weights" / "1.safetensors").unlink()
    house.start_gateway()
    found = run(house, "versions", *words)
    assert isinstance(found.exception, RejectedError)
    assert "its weights are gone" in str(found.exception)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["show", "7"], ConfigError, "version 7 is not among the newest"),
        (["promote", "7"], RejectedError, "there is no policy version 7"),
        (["rollback"], RejectedError, "no earlier promoted version"),
        (["pin", "0"], RejectedError, "the fleet: no version is pinned"),
        (["shadow", "0"], RejectedError, "no version is a shadow"),
        (["shadow", "7"], RejectedError, "there is no policy version 7"),
        (["shadow", "1", "--robot", "robot-0", "--robot", "robot-1"], RejectedError, "robots act by it"),
        (["pin", "1", "--robot", "robot-9"], RejectedError, "there is no robot 'robot-9'"),
    ],
)
def test_what_cannot_be_done_names_the_way_out(
    house: House,  # noqa: F811
    words: list[str],
    error: type[Exception],
    says: str,
) -> None:
    found = run(house, "versions", *words)
    assert found.exit_code == 1
    assert isinstance(found.exception, error)
    assert says in str(found.exception)
