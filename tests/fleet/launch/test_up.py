"""`vla-fleet up` over a backend that does as it is told: robots come, go and fail, and the job goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.config.overrides import Overrides
from fleet.config.process_options import UpOptions
from fleet.launch.backend import ProcessSpec, ProcessState
from fleet.launch.process_specs import ProcessSpecs
from fleet.launch.up import Up
from wire.errors import ConfigError, FleetError
from wire.transport.keys import load_pair


class FakeBackend:
    def __init__(self) -> None:
        self.parts: dict[str, ProcessState] = {}
        self.there: dict[str, str] = {}
        self.started: list[ProcessSpec] = []
        self.stopped: list[str] = []
        self.says: list[str] = []

    def robots(self) -> Mapping[str, str]:
        return self.there

    def start(self, part: ProcessSpec) -> None:
        self.started.append(part)
        self.parts[part.name] = ProcessState(running=True, starts=1)

    def poll(self) -> list[str]:
        said, self.says = self.says, []
        return said

    def stop(self, names: list[str], grace_s: float) -> None:
        self.stopped += names


class FakeScreen:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def _options(tmp_path: Path) -> UpOptions:
    return UpOptions(
        recipe="fake",
        robots="",
        minutes=None,
        data=tmp_path,
        seed=0,
        headless=True,
        report=None,
        port=0,
        web_port=0,
        web_host="127.0.0.1",
        operator=True,
    )


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Up:
    made = Up(_options(tmp_path))
    made.backend, made.dashboard = FakeBackend(), FakeScreen()  # type: ignore[assignment]
    made.parts = ProcessSpecs("fake", "tcp://127.0.0.1:5760", 0, operator=True, overrides=Overrides())
    monkeypatch.setattr(made, "_refresh", lambda: True)
    return made


def test_robots_are_put_to_work_when_they_join_and_once(up: Up) -> None:
    up.backend.there = {"arm-1": "lab"}
    up._start_new_edges()
    up.backend.there = {"arm-1": "lab", "arm-2": ""}
    up._start_new_edges()
    assert [part.name for part in up.backend.started] == ["arm-1", "arm-2"]
    assert all(part.role == "edge" and part.give_up_after == 0 for part in up.backend.started)
    assert load_pair(up.data.keys, "arm-2"), "its key was made"

    up.backend.there = {"arm-2": ""}
    up._start_new_edges()
    up.backend.there = {"arm-1": "shed", "arm-2": ""}
    up._start_new_edges()
    assert len(up.backend.started) == 2, "its edge waits for it"
    assert up.dashboard.said == [
        "arm-1 is there, on lab",
        "arm-1 is lost: its node has gone. It works again when the node is back.",
        "arm-1 is there, on shed",
    ]


def test_a_robot_that_fails_is_named_and_the_job_goes_on(up: Up) -> None:
    up.backend.there = {"arm-1": ""}
    up._start_new_edges()
    up.backend.parts["arm-1"] = ProcessState(failed="arm-1 ended", fault="arm-1 ended")
    up.backend.says = ["arm-1 ended with exit status 1: no usable secret key"]
    up._wait(0.0)
    assert up.dashboard.said == ["arm-1 ended with exit status 1: no usable secret key"]


def test_a_trainer_that_fails_ends_the_job(up: Up) -> None:
    up.backend.start(up.parts.make_trainer())
    up.backend.parts["trainer"] = ProcessState(failed="trainer ended with exit status 1: no torch")
    with pytest.raises(FleetError, match="no torch"):
        up._wait(0.0)


def test_robots_wait_for_the_think_server_and_follow_it(up: Up) -> None:
    up.options = replace(up.options, think_server=True)
    up.backend.there = {"arm-1": ""}
    up.backend.start(up.parts.make_thinker())
    up._start_new_edges()
    assert [part.name for part in up.backend.started] == ["thinker"], "nobody knows yet where to think"
    for address in ("tcp://10.0.0.1:1", "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"):
        up.backend.parts["thinker"] = ProcessState(running=True, starts=1, address=address)
        up._start_new_edges()
    first, moved = up.backend.started[1:]
    assert first.argv[first.argv.index("--think") + 1] == "tcp://10.0.0.1:1"
    assert moved.argv[moved.argv.index("--think") + 1] == "tcp://10.0.0.2:1"
    assert up.backend.stopped == ["arm-1"]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"backend": "slurm"}, "--backend slurm: there are local and ray"),
        ({"ray_address": "auto"}, "--ray-address auto needs --backend ray"),
        (
            {"backend": "ray", "ray_address": "auto", "robots": "2"},
            "--robots 2 with --ray-address auto: the cluster's nodes say which robots there are",
        ),
        ({"measure_at": (4.0,)}, "--measure-at needs --report FILE"),
        ({"measure_at": (4.0,), "report": Path("r.json"), "minutes": 3.0}, "--measure-at 4: the run must take"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, changed: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Up(replace(_options(tmp_path), **changed))


def test_the_version_of_a_minute_is_measured_at_the_end_beside_the_first_and_the_newest(up: Up, monkeypatch) -> None:
    up.options = replace(up.options, report=Path("report.json"), minutes=10.0, measure_at=(2.0, 4.0))
    for minutes, newest in ((1.9, 7), (2.0, 8), (2.1, 9), (3.9, 14), (4.1, 15), (10.0, 30)):
        up._newest_version = newest
        up._note_versions(minutes)
    monkeypatch.setattr(up, "snapshot", lambda: {"version": {"number": 30}})
    monkeypatch.setattr(up, "_ended", lambda name: True)
    up._measure()
    words = [(part.name, part.argv[part.argv.index("--version") + 1]) for part in up.backend.started]
    assert words == [
        ("evaluator-before", "1"),
        ("evaluator-after", "30"),
        ("evaluator-minute-2", "8"),
        ("evaluator-minute-4", "15"),
    ]


def test_a_version_that_is_gone_is_passed_over_and_the_others_are_measured(up: Up, monkeypatch) -> None:
    monkeypatch.setattr(up, "snapshot", lambda: {"version": {"number": 30}})
    start = up.backend.start

    def fail(part: ProcessSpec) -> None:
        start(part)
        gone = part.name == "evaluator-before"
        why = "evaluator-before ended with exit status 1: version 1 cannot be measured: its weights are gone"
        up.backend.parts[part.name] = ProcessState(running=False, starts=1, failed=why if gone else "")
        up.backend.says += [why] * gone

    monkeypatch.setattr(up.backend, "start", fail)
    up._measure()
    assert "its weights are gone" in up.dashboard.said[-1]


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Up:
    made = Up(replace(_options(tmp_path), recipe="shapes", robots="metaworld:2,fetch:1"))
    made.backend, made.dashboard = FakeBackend(), FakeScreen()  # type: ignore[assignment]
    made.parts = ProcessSpecs("shapes", "tcp://127.0.0.1:5760", 0, operator=True, overrides=Overrides())
    monkeypatch.setattr(made, "_refresh", lambda: True)
    return made


def _recipes(up: Up) -> dict[str, str]:
    return {part.name: part.argv[part.argv.index("--recipe") + 1] for part in up.backend.started}


def test_each_robot_of_several_shapes_is_started_with_the_recipe_of_its_member(shapes: Up) -> None:
    shapes.backend.there = dict.fromkeys(shapes._names, "")
    shapes._start_new_edges()
    assert _recipes(shapes) == {
        "fetch-0": "shapes@fetch",
        "metaworld-0": "shapes@metaworld",
        "metaworld-1": "shapes@metaworld",
    }
    assert all(part.role == "edge" for part in shapes.backend.started)
    # of another machine, by Ray
    shapes.backend.there |= {"arm-0": "lab", "reach-0": "lab"}
    shapes._start_new_edges()
    shapes._start_new_edges()
    assert shapes.backend.started[-1].name == "reach-0" and len(shapes.backend.started) == 4
    assert [text for text in shapes.dashboard.said if "arm-0" in text] == [
        "robot 'arm-0': recipe 'shapes' is for robots of several shapes, and nothing says which this one is of. Call "
        "it metaworld-N or fetch-N or reach-N."
    ]


def test_members_with_robots_are_demonstrated_with_for_what_is_missing(shapes: Up, monkeypatch) -> None:
    there = {"demonstrator-metaworld": 13, "demonstrator-fetch": 10}
    monkeypatch.setattr(shapes, "_demonstrations", there.__getitem__)
    monkeypatch.setattr(shapes, "_ended", lambda name: True)
    shapes._demonstrate()
    (part,) = shapes.backend.started
    assert _recipes(shapes) == {"demonstrator-metaworld": "shapes@metaworld"} and part.role == "demonstrator"
    assert part.argv[part.argv.index("--episodes") + 1] == "7"
    shapes.backend.start(shapes.parts.make_evaluator())
    shapes.backend.start(shapes.parts.make_trainer())
    assert _recipes(shapes)["evaluator"] == _recipes(shapes)["trainer"] == "shapes"


def test_robots_of_several_shapes_do_not_think_in_one_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a think server is of one: shapes@metaworld, shapes@fetch"):
        Up(replace(_options(tmp_path), recipe="shapes", think_server=True))
