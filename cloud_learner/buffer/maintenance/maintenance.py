"""Keeping the buffer whole and in bounds: checking it, forgetting episodes, giving their room back.

Everything here may be killed at any point: a segment lies where the ledger says, and what the ledger does not refer to
is removed afterwards, or at the next start of a writer.
"""

from __future__ import annotations

from cloud_learner.buffer.maintenance.compact import Compacted, compact, drop_dead
from cloud_learner.buffer.maintenance.prune import Pruned, Retention, prune
from cloud_learner.buffer.maintenance.verify import VerifyFinding, verify

__all__ = ["Compacted", "Pruned", "Retention", "VerifyFinding", "compact", "drop_dead", "prune", "verify"]
