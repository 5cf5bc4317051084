"""How many robots one gateway serves: what it takes in, how long that takes, and what people's commands wait meanwhile.

    python -m benchmarks.wire [--quick] [--json FILE] [--write]

A gateway runs as `vla-fleet gateway` starts it. Robots are simulated (`robots`), with a key and two encrypted
connections each; what they send is encoded beforehand, and they stand behind the gateway for the processor. Two more
robots are driven by people meanwhile, one at the page, one with a device, 20 commands a second each; every command is
timed until it is at the robot. First the robots send as fast as they are acknowledged, against a plain ROUTER (`raw`)
that gets the same from the same senders, with and without a disk; then each sends what a robot records, a segment a
second.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.cpu import Others
from benchmarks.common.table import Goal, Result, end_in_order, require, run
from benchmarks.wire.fleet import GatewayServer, LoadProcesses, RawServer, ended, make_fleet_keys
from benchmarks.wire.people import COMMAND_S, PAGE, TELEOPERATOR, DeviceDriver, PageDriver, people
from benchmarks.wire.robots import Phase, PhaseResult
from benchmarks.wire.samples import SEGMENT_S, STEPS, robot_names, segments_of

ROBOTS, QUICK_ROBOTS = (1, 8, 32, 128, 512), (1, 8)
COMPARED = (1, 8, 32, 128)
GOAL_SHARE, GOAL_MS = 0.7, 20.0
DRIVEN = ("robot-page", "robot-tele")
_PROCESSES = 2
_KEEPS_UP = 0.97
"""share of what is recorded that a gateway has stored which keeps up"""


class RawPhase(NamedTuple):
    """What a plain ROUTER got."""

    load: PhaseResult
    cores: float

    @property
    def mb_s(self) -> float:
        return self.load.bytes / self.load.seconds / 1e6


class MeasuredPhase(NamedTuple):
    """What a phase came to."""

    load: PhaseResult
    """of all robots together"""
    cores: float
    """that the gateway kept busy"""
    memory_mb: float
    lost: int
    """times that people lost the robots they drove"""

    @property
    def segments_s(self) -> float:
        return self.load.segments / self.load.seconds

    @property
    def mb_s(self) -> float:
        return self.load.bytes / self.load.seconds / 1e6


def measure(quick: bool) -> Result:
    require("fastapi", "websockets", "cv2", "torch", extra="learner,web")
    end_in_order()
    # Both people are threads of this process: neither must wait long for what the other one reads.
    sys.setswitchinterval(0.0005)
    counts = QUICK_ROBOTS if quick else ROBOTS
    seconds, warm_s = (3.0, 1.0) if quick else (10.0, 3.0)
    others = Others()
    with tempfile.TemporaryDirectory(prefix="wire-") as name:
        bench = WireBench(Path(name), max(counts))
        fast, paced = [], []
        for count in counts:
            raw = bench.raw(count, Phase(seconds / 2, warm_s / 2), disk=False)
            disk = bench.raw(count, Phase(seconds / 2, warm_s / 2), disk=True)
            fast.append((count, raw, disk, bench.gateway(count, Phase(seconds, warm_s))))
            paced.append((count, SEGMENT_S, bench.gateway(count, Phase(seconds, warm_s, SEGMENT_S))))
        knee = max(measured.segments_s for _, _, _, measured in fast)
        # All of them, each at so much less than its rate that together they stay below it.
        period_s = max(counts) / (0.8 * knee)
        paced.append((max(counts), period_s, bench.gateway(max(counts), Phase(seconds, warm_s, period_s))))
    return _result(fast, paced, knee * SEGMENT_S, others)


class WireBench:
    """Servers and robots in a directory."""

    def __init__(self, place: Path, most: int) -> None:
        self._place, self._keys, self._number = place, place / "keys", 0
        self._names = robot_names(most)
        make_fleet_keys(self._keys, [*self._names, *DRIVEN])

    def raw(self, count: int, phase: Phase, *, disk: bool) -> RawPhase:
        """What a plain ROUTER gets."""
        with self._directory() as place, ended(server := RawServer(place, self._keys, disk=disk)):
            load = LoadProcesses(
                place, server.endpoint, self._keys, self._names[:count], processes=_PROCESSES, raw=True
            )
            with ended(load):
                load.begin(phase)
                time.sleep(phase.warm_s)
                before_s, begun_s = server.processor_s(), time.monotonic()
                found = _sum(load.results())
                cores = (server.processor_s() - before_s) / (time.monotonic() - begun_s)
                return RawPhase(found, cores)

    def gateway(self, count: int, phase: Phase) -> MeasuredPhase:
        """What a gateway gets, while people drive two more robots that record a segment a second each."""
        sys.stderr.write(f"{count} robots, {phase}\n")
        with self._directory() as place, ended(server := GatewayServer(place, self._keys)):
            driven = LoadProcesses(place, server.endpoint, self._keys, list(DRIVEN), processes=1, raw=False, nice=0)
            with ended(driven):
                load = LoadProcesses(
                    place, server.endpoint, self._keys, self._names[:count], processes=_PROCESSES, raw=False
                )
                page = PageDriver(DRIVEN[0], server.page)
                device = DeviceDriver(DRIVEN[1], server.endpoint, self._keys)
                with ended(load), people(page, device):
                    driven.begin(Phase(phase.seconds, phase.warm_s, SEGMENT_S))
                    load.begin(phase)
                    time.sleep(phase.warm_s)
                    before_s, begun_s = server.processor_s(), time.monotonic()
                    found = _sum([*load.results(), *driven.results()])
                    took_s = time.monotonic() - begun_s
                    cores = (server.processor_s() - before_s) / took_s
                    lost = page.taken_over + device.taken_over - 2
                    measured = MeasuredPhase(found, cores, server.memory_bytes() / 1e6, lost)
                    sys.stderr.write(f"  {measured.mb_s:.1f} MB/s, {cores:.2f} cores, {_commands(measured)}\n")
                    return measured

    @contextlib.contextmanager
    def _directory(self) -> Iterator[Path]:
        self._number += 1
        with tempfile.TemporaryDirectory(dir=self._place, prefix=f"{self._number}-") as name:
            yield Path(name)


def _sum(results: Sequence[PhaseResult]) -> PhaseResult:
    whole = PhaseResult(max(one.seconds for one in results))
    for one in results:
        for field in ("segments", "bytes", "resent", "nacked", "refused", "waiting"):
            setattr(whole, field, getattr(whole, field) + getattr(one, field))
        whole.latencies_ms = whole.latencies_ms + one.latencies_ms
        for who, some in one.commands_ms.items():
            whole.commands_ms[who] = whole.commands_ms.get(who, []) + some
    return whole


def _result(
    fast: Sequence[tuple[int, RawPhase, RawPhase, MeasuredPhase]],
    paced: Sequence[tuple[int, float, MeasuredPhase]],
    knee: float,
    others: Others,
) -> Result:
    rows, shares, waits = [], [], []
    for count, raw, disk, measured in fast:
        share = measured.mb_s / min(raw.mb_s, disk.mb_s)
        row = {
            "robots": count,
            "MB/s": measured.mb_s,
            "steps/s": measured.segments_s * STEPS,
            "raw ZeroMQ, MB/s": raw.mb_s,
            "raw ZeroMQ to disk, MB/s": disk.mb_s,
            "share of the lesser": share,
            "gateway, cores": measured.cores,
            "MB per core and s": measured.mb_s / measured.cores,
            "raw to disk": disk.mb_s / disk.cores,
            "gateway, MB": measured.memory_mb,
            "sent again": measured.load.resent,
            **_commands(measured),
        }
        rows.append(row)
        if count in COMPARED:
            shares.append(share)
            waits += [value for name, value in row.items() if name.endswith("p99 (ms)")]
    steady = [_paced_row(*one) for one in paced]
    waits += [
        value
        for row, (count, _, _) in zip(steady, paced, strict=True)
        if count in COMPARED
        for name, value in row.items()
        if name.startswith(("page", "device")) and name.endswith("p99 (ms)")
    ]
    worst, least = max(waits), min(shares)
    size = np.mean([len(segment.data) for segment in segments_of(robot_names(1)[0], 8 * "0", 0)])
    return Result(
        "One gateway and many robots: what it takes in, and what people wait meanwhile",
        rows,
        [
            Goal("ingest over raw ZeroMQ with the disk, least", least, f">= {GOAL_SHARE:g}", least >= GOAL_SHARE),
            Goal("p99 of people's commands, worst (ms)", worst, f"under {GOAL_MS:g}", worst < GOAL_MS),
        ],
        [
            f"The first table: as fast as segments are acknowledged. A segment is {STEPS} steps, {size / 1e3:.0f} kB, "
            f"{SEGMENT_S:g} s of a robot. At most the gateway takes what {knee:.0f} robots record: the knee.",
            "Robots, gateway and all else share this computer: raw ZeroMQ pays for the same senders.",
            f"Commands: {1 / COMMAND_S:g} a second by each of two people, from their sending until the robot has them.",
            others.note(),
        ],
        {"A segment a second of each robot; last: slower, so that it is 0.8 of the knee": steady},
    )


def _paced_row(count: int, period_s: float, measured: MeasuredPhase) -> dict[str, Any]:
    load = measured.load
    offered = count / period_s + len(DRIVEN) / SEGMENT_S
    p50, p99 = np.percentile(load.latencies_ms, [50, 99]) if load.latencies_ms else (np.nan, np.nan)
    return {
        "robots": count,
        "segments recorded/s": offered,
        "stored/s": measured.segments_s,
        "keeps up": "yes" if measured.segments_s >= _KEEPS_UP * offered else "no",
        "stored after p50 (ms)": float(p50),
        "stored after p99 (ms)": float(p99),
        "wait at the end": load.waiting,
        "sent again": load.resent,
        "gateway, cores": measured.cores,
        **_commands(measured),
    }


def _commands(measured: MeasuredPhase) -> dict[str, float]:
    found: dict[str, float] = {}
    for label, who in (("page", PAGE), ("device", TELEOPERATOR)):
        some = measured.load.commands_ms.get(who, [])
        p50, p99 = np.percentile(some, [50, 99]) if some else (np.nan, np.nan)
        found[f"{label} p50 (ms)"], found[f"{label} p99 (ms)"] = float(p50), float(p99)
    return found | {"robots lost by people": measured.lost}


if __name__ == "__main__":
    sys.exit(run("wire", measure))
