"""Everything two processes may say to each other, one frozen type each.

`gateway`, `versions`, `relaying`: between robots, trainers and the gateway; `fleet`: calls about robots, jobs and
leases; `joining`: of a robot that has no key yet; `local`: between the processes of one robot computer.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

SHOWN_BYTES = 64 * 1024
"""of what people see, several times a second"""
SMALL_BYTES = 256 * 1024
LARGE_BYTES = 64 * 1024 * 1024


class Message(msgspec.Struct, frozen=True, eq=False, tag=True):
    """Base of every message: its name travels with it. The codec accepts what is derived from it in this package."""

    max_bytes: ClassVar[int] = SMALL_BYTES
    """the largest that is received: it bounds each text, list and table in it, and so what it can fill"""
