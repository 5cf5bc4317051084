"""How much robots may send ahead, so that what waits to be stored stays within what the gateway keeps in memory."""

from __future__ import annotations

from wire.messages.gateway import FIRST_CREDIT_BYTES

QUEUE_BYTES = 96 * 1024 * 1024
"""segments that wait to be stored, at most; what comes above it has to come again"""
ONE_PEER_BYTES = QUEUE_BYTES // 3
"""of them those of one robot: it cannot take the room of all others"""
ONE_AT_A_TIME = 1
"""bytes of credit: less than any segment, and one may be larger"""


def credit_bytes(queued: int, recorders: int, fault: bool) -> int:
    """Bytes that each of `recorders` may have under way without an answer, while `queued` bytes wait.

    What is left of half the queue is shared: the other half is for what is under way already. While storage takes
    nothing, each sends one segment at a time, by which its return is noticed.
    """
    if fault:
        return ONE_AT_A_TIME
    share = (QUEUE_BYTES // 2 - queued) // max(1, recorders)
    return max(ONE_AT_A_TIME, min(FIRST_CREDIT_BYTES, share))
