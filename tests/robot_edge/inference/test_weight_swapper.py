"""A swap that does not go through whole: the version before acts on, it is said, and nothing mixed ever acts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robot_edge.inference.test_server import Bench
from tests.robot_edge.inference.thinking import version
from wire.messages.gateway import EdgeEvent, VersionActivated
from wire.messages.local import LoadWeights, SwapReverted

WAYS = pytest.mark.parametrize("standby", [True, False], ids=["beside", "in place"])


def told(bench: Bench) -> tuple[list[SwapReverted], list[str], list[int]]:
    """What the uplink heard: swaps that were taken back, reasons, versions that act."""
    reverted, reasons, acting = [], [], []
    while (message := bench.uplink.recv()) is not None:
        if isinstance(message, SwapReverted):
            reverted.append(message)
        elif isinstance(message, EdgeEvent) and message.kind == "refused":
            reasons.append(message.detail)
        elif isinstance(message, VersionActivated):
            acting.append(message.number)
    return reverted, reasons, acting


def loaded(standby: bool) -> Bench:
    """A robot that acts by version 1, from a file of its own."""
    bench = Bench(standby=standby)
    bench.files["first"] = b"first"
    bench.load(1, "first")
    assert told(bench) == ([], [], [1])
    return bench


def acts_by(bench: Bench, number: int, weights: bytes) -> None:
    """Its chunks are of that version, from those weights: `Scripted.act` refuses a mixture."""
    for tick in range(3):
        (reply,) = bench.ask(tick, frame_ns=tick)
        assert reply.chunk is not None and reply.chunk.version == number, reply.error
    assert bench.inference._swap.active.weights == weights


@WAYS
def test_a_file_that_changes_on_disk_before_it_is_loaded_is_not_loaded(standby: bool) -> None:
    bench = loaded(standby)
    bench.files["second"] = b"second"
    path = Path(bench.path("second"))
    path.write_bytes(b"secund")
    bench.uplink.send(LoadWeights(version(2, b"second"), str(path)))
    bench.inference.poll()
    bench.settle()
    reverted, reasons, acting = told(bench)
    assert [(one.version.number, one.damaged) for one in reverted] == [(2, True)]
    assert "is not what arrived" in reasons[0] and str(path) in reasons[0]
    assert acting == []
    acts_by(bench, 1, b"first")
    # once it was fetched again
    bench.load(2, "second")
    acts_by(bench, 2, b"second")
    bench.inference.close()


@WAYS
@pytest.mark.parametrize("how", ["half", "odd"])
def test_what_was_loaded_in_part_never_acts(standby: bool, how: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = loaded(standby)
    bench.files[how] = how.encode()
    bench.load(2, how)
    reverted, reasons, acting = told(bench)
    assert [(one.version.number, one.damaged) for one in reverted] == [(2, False)]
    assert len(reasons) == 1 and acting == []
    assert "stays on version 1" in caplog.text
    acts_by(bench, 1, b"first")
    bench.load(3, "good")
    acts_by(bench, 3, b"good")
    bench.inference.close()


def test_a_robot_that_cannot_go_back_acts_by_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bench = loaded(standby=False)
    Path(bench.path("first")).write_bytes(b"fyrst")
    del bench.files["first"]
    bench.files["half"] = b"half"
    bench.load(2, "half")
    (reply,) = bench.ask(1)
    assert reply.chunk is None and "only a part" in reply.error
    assert "has no version now" in caplog.text and "version 1 cannot be loaded again" in caplog.text
    bench.load(3, "good")
    acts_by(bench, 3, b"good")


@pytest.mark.parametrize("is_loaded", [True, False])
def test_what_did_not_act_yet_gives_way_to_the_older_version_that_acts(is_loaded: bool) -> None:
    bench = Bench(standby=True, latency_s=0.1)
    for weights in ("first", "second"):
        bench.files[weights] = weights.encode()
    bench.load(1, "first")
    for _ in range(3):
        bench.ask(1, frame_ns=bench.clock.now_ns())
        bench.clock.advance(50_000_000)
    bench.uplink.send(LoadWeights(version(2, b"second"), bench.path("second")))
    bench.inference.poll()
    if is_loaded:
        bench.settle()
        assert bench.inference._swap.waiting is not None, "for its first thought"
    bench.uplink.send(LoadWeights(version(1, b"first"), bench.path("first")))
    bench.inference.poll()
    bench.settle()
    for _ in range(5):
        bench.ask(1, frame_ns=bench.clock.now_ns())
        bench.clock.advance(50_000_000)
    assert set(told(bench)[2]) == {1}
    # and the next one acts as ever, even the same one
    bench.load(2, "second")
    for _ in range(5):
        bench.ask(1, frame_ns=bench.clock.now_ns())
        bench.clock.advance(50_000_000)
    assert told(bench)[2] == [2]
    bench.inference.close()
