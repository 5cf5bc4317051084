"""Send a target what is wrong, and look at what became of it."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fuzz.mutations import MESSAGES, Mutation, Mutator
from benchmarks.fuzz.targets import Target
from wire.codec import decode
from wire.errors import MessageTooLargeError, ProtocolError
from wire.messages import Message

_AT_ONCE = 50
_WARM_UP = 0.2
"""share of the messages after which memory is looked at first: caches and histories are full then"""
TAGS = sorted(kind.__name__ for kind in Message.__subclasses__())


@dataclass
class Outcome:
    """What one target made of it."""

    sent: Counter[Mutation] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    undecodable: Counter[str] = field(default_factory=Counter)
    """by the reason that decoding gives, of messages of the wire"""
    grown_mib: float = 0.0
    changed: str = ""
    """what changed that may not, '' for nothing"""
    crash: str = ""
    took_s: float = 0.0

    @property
    def uncounted(self) -> int:
        """Messages that cannot be decoded and were not counted as such."""
        return sum(abs(count - self.refused[reason]) for reason, count in self.undecodable.items())


def attack(make: Callable[[Path], Target], count: int, seed: int, *, count_all: bool = False) -> Outcome:
    """`count` messages; the same ones for the same seed. `count_all`: all of them arrive."""
    level = logging.getLogger().manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
            target = make(Path(place))
            try:
                return _attack(target, count, seed, count_all)
            finally:
                target.close()
    finally:
        logging.disable(level)


def _attack(target: Target, count: int, seed: int, count_all: bool) -> Outcome:
    outcome, mutator, draw = Outcome(), Mutator(seed, target.form), random.Random(seed)
    valid, before, counted = target.valid(), target.fingerprint(), Counter(target.refused())
    resident_mib, begun_s = 0.0, time.perf_counter()
    for number in range(count):
        if number == int(_WARM_UP * count):
            target.settle()
            resident_mib = _resident_mib()
        who, data = draw.choice(valid)
        kind, data = mutator.mutate(data, TAGS)
        outcome.sent[kind] += 1
        if count_all and target.form is MESSAGES and (reason := _undecodable(data)):
            outcome.undecodable[reason] += 1
        try:
            target.send(who, data, draw)
            if number % _AT_ONCE == 0:
                target.settle()
        except Exception as error:  # noqa: BLE001 - which one it is, is what is asked here
            outcome.crash = f"message {number}, {kind.name} by {who}: {type(error).__name__}: {error}"[:400]
            return outcome
    for _ in range(20):
        target.settle()
    outcome.took_s = time.perf_counter() - begun_s
    outcome.grown_mib = _resident_mib() - resident_mib
    outcome.refused = target.refused() - counted
    after = target.fingerprint()
    outcome.changed = "; ".join(
        f"{name}: {before[name]} became {after[name]}" for name in before if before[name] != after[name]
    )
    return outcome


def _undecodable(data: bytes) -> str:
    try:
        decode(data)
    except (ProtocolError, MessageTooLargeError) as error:
        return error.reason
    return ""


def _resident_mib() -> float:
    gc.collect()
    # What the allocator keeps for later is no growth.
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
