"""The sampler's benchmark: that it runs and its goals hold, and that its peer is what it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks import sampling
from benchmarks.common import table


def test_a_quick_run_holds_its_goals(tmp_path: Path) -> None:
    assert table.run("sampling", sampling.measure, ["--quick", "--json", str(tmp_path / "r.json")]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert {row["who"] for row in found["rows"]} == {"ours, echo 1", "ours, echo 8", "first in, first out"}
    assert all(goal["holds"] for goal in found["goals"])
    at = {(row["who"], row["cache ratio"], row["epochs of draws"]): row for row in found["rows"]}
    ours, theirs = at["ours, echo 1", 0.1, 0.5], at["first in, first out", 0.1, 0.5]
    assert ours["total variation"] < theirs["total variation"]
    # each segment about once an epoch, and what is held at first a part more
    assert at["ours, echo 1", 0.1, 3.0]["loads"] < 3.3


def test_all_episodes_of_the_made_index_are_alike() -> None:
    index = sampling.made_index(sampling.QUICK)
    assert len(np.unique(index.episode)) == sampling.QUICK.tasks * sampling.QUICK.episodes
    assert index.last.sum() == len(index.episodes)
