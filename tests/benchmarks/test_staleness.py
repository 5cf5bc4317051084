"""The benchmark of late weights: what is held back, what it makes of runs, and a very small one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.staleness import runs
from benchmarks.staleness.__main__ import report
from benchmarks.staleness.lagging_line import LaggingLine
from benchmarks.staleness.runs import CORRECTED, PLAIN, StalenessSize
from fleet.config.recipe import Recipe
from tests.extras import needs
from wire.messages.local import LoadWeights
from wire.transport.memory_channel import memory_pair
from wire.types import PolicyVersion

SIZE = StalenessSize("push", (1, 128), (0, 1), 300, 2, 0.25, 5)


def load(home: Path, number: int) -> LoadWeights:
    path = home / f"of-uplink-{number}"
    path.write_bytes(bytes([number]))
    return LoadWeights(PolicyVersion(number, "", 1, number - 1, 0, 0, 0), str(path))


def test_a_version_comes_when_one_so_much_newer_is_there_and_all_else_at_once(tmp_path: Path) -> None:
    near, far = memory_pair()
    line, came = LaggingLine(far, 3, tmp_path / "held"), []
    for number in range(1, 12):
        if number != 6:
            message = load(tmp_path, number)
            near.send(message)
            near.send(message)  # asked for again
        found = line.recv()
        assert found is None or isinstance(found, LoadWeights)
        if found is not None:
            assert Path(found.path).read_bytes() == bytes([found.version.number])
            Path(tmp_path / f"of-uplink-{number}").unlink(missing_ok=True)
        came.append(found.version.number if found else 0)
    assert came == [1, 0, 0, 0, 2, 0, 4, 5, 0, 7, 8]
    assert len(list((tmp_path / "held").iterdir())) <= 4 + 3


def reports(ends: dict[tuple[int, str], float]) -> list[bool]:
    found = {
        (lag, arm, seed): {"start": 0.3, "end": end, "behind": 1.0 * lag, "versions": 400}
        for (lag, arm), end in ends.items()
        for seed in SIZE.seeds
    }
    return [goal.holds for goal in report(SIZE, found).goals]


def test_the_largest_lag_may_cost_little_and_the_corrections_must_bring_something() -> None:
    plain = {(1, PLAIN): 0.9, (128, PLAIN): 0.4}
    assert reports({(1, CORRECTED): 0.9, (128, CORRECTED): 0.86, **plain}) == [True, True]
    assert reports({(1, CORRECTED): 0.9, (128, CORRECTED): 0.8, **plain}) == [False, True]
    assert reports({(1, CORRECTED): 0.4, (128, CORRECTED): 0.4, **plain}) == [True, False]


@pytest.mark.slow
@needs("metaworld")
@pytest.mark.parametrize("arm", [CORRECTED, PLAIN])
def test_a_very_small_run_is_kept(arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, make = replace(SIZE, steps=240, episodes=1, publish_every_s=0.05), runs.make_recipe

    def short(task: str, algorithm: str) -> Recipe:
        recipe = make(task, algorithm)
        return replace(recipe, training=replace(recipe.training, pretrain_steps=5), demonstrations=1)

    monkeypatch.setattr(runs, "make_recipe", short)
    found = runs.measure(size, tmp_path, 3, arm, 0)
    assert found["versions"] > 4 and 0 <= found["end"] <= 1
    assert runs.measure(size, tmp_path, 3, arm, 0) == found
