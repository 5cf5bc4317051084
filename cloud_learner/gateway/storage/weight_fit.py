"""Whether a version is one for this fleet: its robots would refuse another, and one that has none yet would hold."""

from __future__ import annotations

from collections.abc import Collection

from wire.errors import RejectedError, WeightsError
from wire.weights.check import require_same_tensors
from wire.weights.manifest import Manifest


def require_fit(mine: Manifest, parent: Manifest | None, specs: Collection[str]) -> None:
    """Raise `RejectedError` for a version of another kind, or with other tensors, than its `parent`; for one that needs
    a newer software; and for a robot spec that is none of `specs`, those of the fleet's robots, where there are any."""
    what = f"policy version {mine.version.number}"
    try:
        mine.require_runnable("")
        if parent is not None:
            require_same_tensors(mine.tensors, parent.tensors, what)
    except WeightsError as error:
        raise RejectedError(str(error)) from error
    if parent is not None and mine.network != parent.network:
        raise RejectedError(
            f"{what} is of kind '{mine.network}', and version {parent.version.number} before it of '{parent.network}': "
            "start the trainer with the fleet's --policy."
        )
    if mine.spec_hash and specs and mine.spec_hash not in specs:
        raise RejectedError(
            f"{what} is for robot spec {mine.spec_hash}, and no robot of this fleet has that one: start the trainer "
            "with the fleet's recipe. If the robots have changed, it is taken once one of them is there."
        )
