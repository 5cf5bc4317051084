"""The Grafana dashboard shows what there is: its metrics are in the guide's table, its panels do not overlap."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BOARD = json.loads((ROOT / "docs" / "grafana" / "vla-fleet.json").read_text())


def test_every_metric_of_it_is_one_that_is_shown() -> None:
    known = set(re.findall(r"^\| `(vla_fleet_\w+)", (ROOT / "docs" / "operating.md").read_text(), re.MULTILINE))
    asked = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    names = {name for expression in asked for name in re.findall(r"vla_fleet_\w+", expression)}
    assert len(names) > 20
    assert {name for name in names if re.sub(r"_(bucket|sum|count)$", "", name) not in known} == set()


def test_its_panels_do_not_overlap_and_all_ask_the_chosen_source() -> None:
    taken = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
