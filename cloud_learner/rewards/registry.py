"""Finds models that judge episodes by their kind: `classifier`, `lerobot`; other packages add theirs.

A kind is a function, `open(path: Path) -> SuccessModel`, by an entry point in the group `vla_fleet.rewards`. Nothing is
imported before it is asked for. Two models of one kind count as one where they must agree (`agreement`).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from wire.errors import ConfigError, FleetError, suggest

if TYPE_CHECKING:
    from cloud_learner.rewards.interface import SuccessModel

GROUP = "vla_fleet.rewards"
CLASSIFIER = "classifier"
_BUILT_IN = (
    EntryPoint(CLASSIFIER, "cloud_learner.rewards.classifier:open_classifier", GROUP),
    EntryPoint("lerobot", "cloud_learner.rewards.lerobot_classifier:open_classifier", GROUP),
)


def known() -> dict[str, EntryPoint]:
    """Kinds of models by name."""
    return {one.name: one for one in (*entry_points(group=GROUP), *_BUILT_IN)}


def require_kind(kind: str) -> None:
    """Raise `ConfigError` for a kind that there is not, or whose name no label can have."""
    if kind not in (kinds := known()):
        raise ConfigError(
            f"there is no reward model '{kind}': there are {', '.join(sorted(kinds))}.{suggest(kind, kinds)}"
        )
    if not (kind.isascii() and kind.isidentifier()):
        raise ConfigError(f"reward model '{kind}': its name is part of a label's, so it is made of letters and digits.")


def open_model(kind: str, path: Path) -> SuccessModel:
    """The model of that kind in `path`. Raises `ConfigError`, and `WeightsError` for one that cannot be read."""
    require_kind(kind)
    try:
        made = known()[kind].load()
    except ImportError as error:
        raise ConfigError(f"reward model '{kind}' cannot be imported: {error}.") from error
    try:
        return made(path)
    except FleetError:
        raise
    except Exception as error:  # another package's may raise anything
        raise ConfigError(f"reward model '{kind}' in {path}: {type(error).__name__}: {error}.") from error
