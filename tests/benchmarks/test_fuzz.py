"""Whatever is sent to them, by whomever: they stand, serve those who are right, and count what they refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks.fuzz.__main__ import measure
from benchmarks.fuzz.drill import TAGS, attack
from benchmarks.fuzz.mutations import MESSAGES, Mutation, Mutator
from benchmarks.fuzz.samples import samples
from benchmarks.fuzz.sockets import SocketGatewayTarget, SocketPageTarget
from benchmarks.fuzz.targets import TARGETS, Target
from wire.codec import decode, encode

COUNT = 2500


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_is_sent_ends_or_changes_it(name: str) -> None:
    make, _ = TARGETS[name]
    outcome = attack(make, COUNT, seed=3, count_all=True)
    assert (outcome.crash, outcome.changed, outcome.uncounted) == ("", "", 0)
    assert outcome.refused["failed"] == 0
    assert outcome.refused.total() > COUNT / 4
    assert set(outcome.sent) == set(Mutation)


@pytest.mark.parametrize("make", [SocketGatewayTarget, SocketPageTarget])
def test_nor_by_real_sockets(make: Callable[[Path], Target]) -> None:
    outcome = attack(make, 400, seed=3)
    assert (outcome.crash, outcome.changed) == ("", "")
    assert outcome.refused["failed"] == 0
    assert outcome.refused.total() > 50


def test_the_same_seed_says_the_same_and_every_type_is_tried() -> None:
    valid = [encode(message) for message in samples("robot-0", "edge", "robot-0")]
    assert sorted(type(decode(data)).__name__ for data in valid) == TAGS

    def made(seed: int) -> list[tuple[Mutation, bytes]]:
        mutator = Mutator(seed)
        return [mutator.mutate(data, TAGS) for data in valid * 5]

    assert made(1) == made(1) != made(2)


class _Broken:
    """A target without any of the care that the others take."""

    form = MESSAGES

    def __init__(self, root: Path) -> None:
        self.heard: list[bytes] = []

    def valid(self) -> list[tuple[str, bytes]]:
        return [("a", encode(message)) for message in samples("robot-0", "edge", "robot-0")]

    def send(self, who: str, data: bytes, draw: object) -> None:
        self.heard.append(data)
        if len(self.heard) > 200:
            msgspec.msgpack.decode(data[1:])

    def settle(self) -> None:
        """Nothing waits."""

    def fingerprint(self) -> dict[str, object]:
        return {"heard": len(self.heard)}

    def refused(self) -> Counter[str]:
        return Counter()

    def close(self) -> None:
        """Nothing is open."""


def test_a_target_that_does_not_take_care_is_found_out() -> None:
    outcome = attack(_Broken, 200, seed=1, count_all=True)  # type: ignore[arg-type]
    assert outcome.changed == "heard: 0 became 200"
    assert outcome.uncounted > 50
    assert "Error" in attack(_Broken, 1000, seed=1).crash  # type: ignore[arg-type]


def test_the_table() -> None:
    result = measure(True, 1000)
    assert [goal.name for goal in result.goals if not goal.holds] == []
    assert {row["target"] for row in result.rows} >= set(TARGETS)
