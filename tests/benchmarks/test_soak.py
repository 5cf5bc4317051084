"""What a soak says of a fleet, by numbers made by hand; the fleet itself is in tests/e2e/test_soak.py."""

from __future__ import annotations

import math
import subprocess
import sys
from subprocess import PIPE

import pytest

from benchmarks.soak.delays import Delay, delays_of, median_s, recovery_s, silence_s
from benchmarks.soak.faults import LASTING, REST_S, FaultKind, plan_faults
from benchmarks.soak.memory import MemoryLog
from benchmarks.soak.robot import SpoolNote
from wire.errors import ConfigError

S = 1_000_000_000
ROBOTS = tuple(f"robot-{n}" for n in range(8))


def series(*pairs: tuple[float, float]) -> list[Delay]:
    """(recorded, delay) in seconds."""
    return [Delay(round(at * S), round((at + late) * S)) for at, late in pairs]


USUAL_S = 0.1


@pytest.mark.parametrize(
    ("delays", "seconds"),
    [
        (series(*((t, 0.1) for t in range(12, 30, 2))), 0.0),
        # a single late one is no return to the fault
        (series((12, 0.1), (14, 3.0), (18, 0.1), (20, 0.1)), 0.0),
        # what waited comes at once, as soon as the fault is over
        (series((2, 10.0), (4, 8.0), (6, 6.0), (8, 4.0), (12, 0.1), (14, 0.1), (16, 0.1)), 2.1),
        # it never comes back before the next fault
        (series(*((t, 9.0) for t in range(2, 30, 2))), math.inf),
        ([Delay(t * S, 0) for t in range(12, 30, 2)], math.inf),
        # a robot that records nothing is not late
        ([], 0.0),
    ],
)
def test_when_delays_are_usual_again(delays: list[Delay], seconds: float) -> None:
    assert recovery_s(delays, USUAL_S, 10 * S, 30 * S) == pytest.approx(seconds)


def test_delays_of_notes() -> None:
    notes = [SpoolNote("a", 2 * S, 40, S), SpoolNote("b", 4 * S, 40, 3 * S), SpoolNote("a", 5 * S)]
    found = delays_of(notes)
    assert [one.seconds for one in found] == [4.0, math.inf]
    assert median_s({"robot-0": found}, 0, 2 * S) == 4.0
    assert silence_s(found, 2 * S) == 1.0 and silence_s(found, 4 * S) == math.inf


def test_a_plan_has_everything_once_and_time_to_come_back() -> None:
    plan = plan_faults(600.0, 3, ROBOTS, tuple(FaultKind))
    assert plan == plan_faults(600.0, 3, ROBOTS, tuple(FaultKind)) != plan_faults(600.0, 4, ROBOTS, tuple(FaultKind))
    assert sorted(fault.kind for fault in plan) == sorted(FaultKind)
    assert {fault.kind: fault.seconds for fault in plan if fault.seconds} == LASTING
    ends = [fault.start_s + fault.seconds for fault in plan]
    begins = [fault.start_s for fault in plan[1:]] + [600.0]
    assert all(begin - end >= REST_S for begin, end in zip(begins, ends, strict=True))
    short = plan_faults(200.0, 3, ROBOTS, tuple(FaultKind))
    assert short[-1].start_s + short[-1].seconds + REST_S == pytest.approx(200.0)
    with pytest.raises(ConfigError, match="12 faults need more than 100 s"):
        plan_faults(100.0, 3, ROBOTS, tuple(FaultKind))


GROWS = "kept = []\nfor line in iter(input, 'end'):\n    kept.append(b'x' * 2**23)\n    print('grown', flush=True)"


def test_growth_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("benchmarks.soak.memory.time.monotonic", lambda: now_s[0])
    memory = MemoryLog()
    with subprocess.Popen([sys.executable, "-c", GROWS], stdin=PIPE, stdout=PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        for second in range(0, 100, 5):
            now_s[0] = second
            if second == 0 or second > 60:
                print("grow", file=process.stdin)
                process.stdout.readline()
            memory.look({"test": [process.pid], "gone": [2**30]})
        print("end", file=process.stdin)
    (found,) = memory.growth(60.0)
    assert found.kind == "test" and found.mib > 16
    assert memory.growth(90.0) == []
