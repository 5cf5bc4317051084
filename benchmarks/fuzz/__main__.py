"""A million messages that are wrong, from keys that were stolen and from none: who falls over, grows or changes?

    python -m benchmarks.fuzz [--quick] [--messages N] [--json FILE] [--write]

A valid message of every type is made wrong in one of the ways of `mutations.Mutation`, field by field, by a seed. Most
go to the real gateway, think server, uplink, page and stop line in one process; some go over real sockets, with CURVE.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.table import Goal, Result, end_in_order, require, run
from benchmarks.fuzz.drill import Outcome, attack
from benchmarks.fuzz.mutations import Mutation
from benchmarks.fuzz.targets import TARGETS, Target

MESSAGES_SENT, QUICK_MESSAGES = 1_000_000, 10_000
_BY_SOCKETS = {"gateway by sockets": 0.05, "operator page by sockets": 0.002}
"""share of all messages"""
_GROWTH_MIB = 32.0
_SEED = 15
_LEAST = 200
_FAILED = "failed"
"""what a handler did not expect is counted as"""


def measure(quick: bool, messages: int | None) -> Result:
    require("fastapi", "websockets", "cv2", "simplejpeg", extra="learner,web")
    from benchmarks.fuzz.sockets import SocketGatewayTarget, SocketPageTarget

    end_in_order()
    count = messages or (QUICK_MESSAGES if quick else MESSAGES_SENT)
    outcomes: dict[str, Outcome] = {}
    for name, (make, share) in TARGETS.items():
        outcomes[name] = attack(make, round(share * count), _SEED, count_all=True)
    by_sockets: tuple[Callable[[Path], Target], ...] = (SocketGatewayTarget, SocketPageTarget)
    for (name, share), make in zip(_BY_SOCKETS.items(), by_sockets, strict=True):
        outcomes[name] = attack(make, max(_LEAST, round(share * count)), _SEED)
    rows = [_row(name, outcome) for name, outcome in outcomes.items()]
    sent = sum((outcome.sent for outcome in outcomes.values()), Counter[Mutation]())
    crashes = [f"{name}: {outcome.crash}" for name, outcome in outcomes.items() if outcome.crash]
    changes = [f"{name}: {outcome.changed}" for name, outcome in outcomes.items() if outcome.changed]
    grown_mib = max(outcome.grown_mib for outcome in outcomes.values())
    failed = sum(outcome.refused[_FAILED] for outcome in outcomes.values())
    uncounted = sum(outcome.uncounted for outcome in outcomes.values())
    return Result(
        "Messages that are wrong",
        rows,
        [
            Goal("messages", sent.total(), f"at least {count:,}", sent.total() >= count),
            Goal("crashes", len(crashes), "0", not crashes),
            Goal("messages that a handler did not expect", failed, "0", not failed),
            Goal("targets whose state changed", len(changes), "0", not changes),
            Goal("undecodable messages not counted by their reason", uncounted, "0", not uncounted),
            Goal(
                "largest growth of memory (MiB)",
                grown_mib,
                f"under {_GROWTH_MIB:g}",
                grown_mib < _GROWTH_MIB,
            ),
        ],
        [
            "State: lease, stops, driver, spec and episodes of the robot that is attacked, and the fleet's versions "
            "and jobs; the versions of the think server; the spool of the uplink; the stop of the stop line. What a "
            "key may do to its own robot is no change of state.",
            "Memory: resident, after the first fifth of the messages and at the end.",
            *crashes,
            *changes,
        ],
        {"Refused, by reason": [_reasons(name, outcome) for name, outcome in outcomes.items()], "Sent": _sent(sent)},
    )


def _row(name: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "target": name,
        "messages": outcome.sent.total(),
        "refused": outcome.refused.total(),
        "not expected": outcome.refused[_FAILED],
        "crashed": "yes" if outcome.crash else "no",
        "state changed": "yes" if outcome.changed else "no",
        "memory (MiB)": outcome.grown_mib,
        "messages/s": outcome.sent.total() / outcome.took_s if outcome.took_s else None,
    }


def _reasons(name: str, outcome: Outcome) -> dict[str, Any]:
    words = ", ".join(f"{reason} {count:,}" for reason, count in sorted(outcome.refused.items()) if count)
    return {"target": name, "reasons": words}


def _sent(sent: Counter[Mutation]) -> list[dict[str, Any]]:
    return [{"what is wrong": str(kind), "messages": count} for kind, count in sent.most_common()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--messages", type=int, metavar="N")
    options, others = parser.parse_known_args()
    sys.exit(run("fuzz", lambda quick: measure(quick, options.messages), others))
