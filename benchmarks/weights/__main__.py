"""What it costs to bring better weights to robots: bytes, time, and how often one uplink carries the same.

- Sizes: the versions of training runs on recorded demonstrations (the small one with robots, corrections and all), as
  deltas that follow each other, against the whole, its half in bfloat16, and a sparse delta of the bfloat16 state.
- On the way: one robot behind a line of 100 Mbit/s and 30 ms, from the announcement until the file is checked.
- Success: held-out, of the last version of three trainings as it was trained and as robots rebuild it, on the same
  scenes; the interval is Newcombe's for pairs.
- Sixteen robots behind one line of 4 MB/s, each for itself and by a relay.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.table import Goal, Result, require_simulation, run
from benchmarks.common.weights_file import random_weights
from benchmarks.policies.row import available_gib
from benchmarks.weights.network import WeightsNetwork, spawn_training, wait_for
from benchmarks.weights.sizes import load, sizes
from benchmarks.weights.training import TrainingRun
from cloud_learner.training.config import ActionCheckConfig, PublisherConfig
from fleet.config.weights_source import SourceKind, WeightsSource
from fleet.evaluation.held_out import MeasuredEpisode, PolicyUnderTest, plan_episodes
from fleet.evaluation.held_out import measure as measure_scenes
from fleet.evaluation.paired import compare_outcomes
from wire.transport.faults import FaultWindow
from wire.weights.delta import Precision, encode

replace = msgspec.structs.replace
_ROBOTS = 16
_LINE = FaultWindow(bytes_per_s=12.5e6, delay_s=0.015)
_UPLINK = FaultWindow(bytes_per_s=4e6, delay_s=0.01)
_APART = 10_000_000
_WHOLE_MB = 300
"""a larger whole is not sent over the line: its size says how long that takes"""
_LARGE_GIB = 20.0
"""free memory that training 450 million parameters, and comparing its versions, takes"""
_PRETRAINED = {"training": {"train": ["model.*"]}}


def runs(place: Path, quick: bool) -> list[TrainingRun]:
    """What is trained: 0.2, 11 and 450 million parameters."""
    if quick:
        found = [TrainingRun("flow, state", "state", "", 3, 20, first_steps=100, demonstrations=2)]
    else:
        found = [TrainingRun("flow, state", "state", "", 21, 100)]
    if not quick and importlib.util.find_spec("lerobot") is not None:
        base = TrainingRun("", "pixels", "", 0, 0, learning_rate=1e-4, robots=0, demonstrations=1)
        act = {
            "name": "lerobot ACT, small",
            "size": "act-small",
            "versions": 11,
            "steps": 8,
            "batch": 8,
            "first_steps": 30,
        }
        vla = {"name": "lerobot SmolVLA, 450 M trained", "size": "smolvla-450m", "versions": 4, "steps": 3, "batch": 2}
        found.append(replace(base, **act))
        if available_gib() >= _LARGE_GIB:
            found.append(replace(base, **vla, first_steps=6, config=_PRETRAINED))
    placed = []
    for number, one in enumerate(found):
        directory = place / str(number)
        directory.mkdir()
        placed.append(replace(one, place=str(directory)))
    return placed


def measure(quick: bool) -> Result:
    """All of it, one after the other."""
    require_simulation()
    rows: list[dict[str, Any]] = []
    more: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weights-benchmark-") as name:
        place = Path(name)
        equal = {}
        for wanted in runs(place, quick):
            said = json.loads(spawn_training(msgspec.json.encode(wanted).decode()))
            versions = load(Path(wanted.place))
            row = sizes(wanted.name, versions, said["parameters"]) | _changes(said["quantization_changes"])
            rows.append(row | {"load s": statistics.median(said["load_s"]), "learning rate": said["learning_rate"]})
            more.append(_arrival(place, wanted.name, versions))
            if wanted.robots:
                equal = _success(place, wanted, 1 if quick else 3, 5 if quick else 50)
        broadcast = _broadcast(place, 1_000_000 if quick else 20_000_000)
    goals = [_at_least(f"{row['policy']}: average update, in wholes: 1 /", row["1 /, on average"], 20) for row in rows]
    goals.append(_at_least("16 robots by a relay, times as fast", broadcast["times as fast"], 8))
    goals.append(_at_least("held-out success, rebuilt minus trained", equal["difference"], -0.05))
    notes = [
        "Sparse delta: 4 bytes of place and 2 of value for each value of the bfloat16 state that changes.",
        f"1 / and megabytes: medians over the updates; on average: with each {PublisherConfig().anchor_every}th whole. "
        "Load: into the policy, with the look at what lies there then.",
        "Left for the next: root mean square of what rounding left, over that of the update; it does not add up, for "
        "the next delta starts from what robots have.",
        "The runs begin from random weights: `state` after its pretraining, the two of lerobot after a few steps, so "
        "that their updates are those of a network that still learns much.",
        f"450 million parameters are trained where {_LARGE_GIB:.0f} GiB are free; here {available_gib():.0f} were.",
        "Actions changed: by quantisation alone, on recorded observations, a root mean square in ranges of the "
        "dimensions. A trainer lets a version above max_quantization_change go whole and exact.",
        "On the way: a whole above 300 MB is not sent; its time is its size over the line's rate.",
    ]
    titles = {"On the way to one robot": more, "Success": [equal], "Sixteen robots behind one line": [broadcast]}
    return Result("Weights on their way", rows, goals, notes, titles)


def _changes(found: list[float]) -> dict[str, float]:
    bound = ActionCheckConfig().max_quantization_change
    return {
        "actions changed, median (% of their range)": 100 * statistics.median(found),
        "most (%)": 100 * max(found),
        f"updates above {100 * bound:g} %": sum(not change <= bound for change in found),
    }


def _at_least(name: str, value: float, least: float) -> Goal:
    return Goal(name, value, f"at least {least:g}", value >= least)


def _arrival(place: Path, policy: str, versions: list[np.ndarray]) -> dict[str, Any]:
    """One update over a line, whole and as a delta."""
    root = Path(tempfile.mkdtemp(dir=place))
    first, second, third = (np.array(versions[k]) for k in (0, 1, 2))
    whole_s = len(second) / _LINE.bytes_per_s
    with WeightsNetwork(root, ["robot-0"]) as network:
        network.publish(first, delta=False)
        robot = network.robots(["robot-0"], network.server.endpoint)
        wait_for(robot, 1, 600)
        robot[0].close()
        line = f"tcp://127.0.0.1:{network.proxy(_LINE).port}"
        robot = network.robots(["robot-0"], line)
        wait_for(robot, 1, 600)
        began_s = time.monotonic()
        number, _ = network.publish(second, delta=True)
        published_s = time.monotonic() - began_s
        before = robot[0].client.fetched_bytes
        delta_s = wait_for(robot, number, 600)
        fetched = robot[0].client.fetched_bytes - before
        if len(third) < _WHOLE_MB * 1e6:
            number, _ = network.publish(third, delta=False)
            whole_s = wait_for(robot, number, 600)
    return {
        "policy": policy,
        "encode, upload, rebuild at the gateway s": published_s,
        "bytes fetched": fetched,
        "delta: fetched, rebuilt, checked s": delta_s,
        "whole s": whole_s,
        "times as fast": whole_s / delta_s,
    }


def _success(place: Path, wanted: TrainingRun, seeds: int, episodes: int) -> dict[str, Any]:
    """Of the last version of trainings with `seeds` seeds, each on the same held-out scenes twice."""
    trained: list[MeasuredEpisode] = []
    rebuilt: list[MeasuredEpisode] = []
    for seed in range(seeds):
        directory = place / f"seed-{seed}"
        directory.mkdir()
        spawn_training(msgspec.json.encode(replace(wanted, seed=seed, place=str(directory))).decode())
        versions = load(directory)
        published = np.array(versions[0])
        for number in range(1, len(versions)):
            target = np.array(versions[number])
            encode(published, target, lambda frame: None, Precision.int8)
            published = target
        for outcomes, data in ((trained, versions[-1]), (rebuilt, published)):
            path = directory / "last.safetensors"
            path.write_bytes(data.tobytes())
            under_test = PolicyUnderTest(WeightsSource(SourceKind.file, path), wanted.recipe)
            scenes = plan_episodes(under_test.make_recipe(), episodes)
            # scenes of another training are other scenes
            outcomes += (replace(one, seed=one.seed + seed * _APART) for one in measure_scenes(under_test, scenes))
    found, _ = compare_outcomes(rebuilt, trained)
    return {
        "policy": wanted.name,
        "trainings": seeds,
        "scenes": found.episodes,
        "trained": found.b / found.episodes,
        "rebuilt": found.a / found.episodes,
        "rebuilt alone, trained alone": f"{found.only_a}, {found.only_b}",
        "difference": found.difference,
        "95 % from": found.low,
        "to": found.high,
    }


def _broadcast(place: Path, size: int) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(dir=place))
    names = [f"robot-{number:02d}" for number in range(2 * _ROBOTS)]
    with WeightsNetwork(root, names) as network:
        uplink = f"tcp://127.0.0.1:{network.proxy(_UPLINK).port}"
        number, _ = network.publish(np.frombuffer(random_weights(size, 0), np.uint8), delta=False)
        alone = network.robots(names[:_ROBOTS], uplink)
        alone_s = wait_for(alone, number, 600)
        for robot in alone:
            robot.close()
        relay = network.relay(uplink)
        behind = network.robots(names[_ROBOTS:], uplink, relay.endpoint)
        relay_s = wait_for(behind, number, 600)
        by_gateway = sum(robot.client.refused["relay"] for robot in behind)
    return {
        "version (MB)": size / 1e6,
        "robots": _ROBOTS,
        "line (MB/s)": _UPLINK.bytes_per_s / 1e6,
        "each for itself s": alone_s,
        "by a relay s": relay_s,
        "once over the line s": size / _UPLINK.bytes_per_s,
        "times as fast": alone_s / relay_s,
        "robots that left the relay out": by_gateway,
    }


if __name__ == "__main__":
    sys.exit(run("weights", measure))
