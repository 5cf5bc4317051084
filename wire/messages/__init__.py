"""Everything two processes may say to each other, one frozen type each.

`gateway`: between robots, trainers and the gateway; `fleet`: calls about robots, jobs and leases; `joining`: of a robot
that has no key there yet; `local`: between the processes of one robot computer.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, eq=False, tag=True):
    """Base of every message: its name travels with it. The codec accepts what is derived from it in this package."""
