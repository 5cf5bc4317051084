"""By whose word a recipe's algorithms know what an episode was."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cloud_learner.rewards.agreement import INDEPENDENT
from cloud_learner.rewards.registry import known, require_kind
from wire.errors import ConfigError

OUTCOME, LABEL, SIMULATOR = "outcome", "label", "simulator"
FIRM = (OUTCOME, LABEL, SIMULATOR)
"""sources that are no models"""


@dataclass(frozen=True)
class RewardConfig:
    """Raises `ConfigError`."""

    sources: tuple[str, ...] = (OUTCOME,)
    """`outcome`: how the episode ended, as a person or the simulator said then; `label`: what somebody said since, with
    `vla-fleet buffer label EPISODE success=1`, which goes before all else; `simulator`: by the rewards it gave; and
    kinds of models (`vla-fleet rewards`). Of outcome and simulator, the one named first where it knows"""
    doubt: bool = False
    """an episode whose record a model contradicts counts as unjudged until a person labels it"""
    success_return: float | None = None
    """with `simulator`: an episode whose rewards sum up to so much has succeeded"""

    def __post_init__(self) -> None:
        if not self.sources or len(set(self.sources)) != len(self.sources):
            raise ConfigError(f"rewards: sources {list(self.sources)} must be one or more, each once.")
        for kind in self.models:
            if kind not in known():
                words = ", ".join((*FIRM, *sorted(known())))
                raise ConfigError(f"rewards: there is no source '{kind}'. There are {words}.")
            require_kind(kind)
        if self.success_return is not None and not math.isfinite(self.success_return):
            raise ConfigError(f"rewards: success_return is {self.success_return}; give a finite number.")

    def require_whole(self) -> None:
        """Raise `ConfigError` for fields that do not go together: they are set one by one."""
        if 0 < len(self.models) < INDEPENDENT and not self.doubt:
            raise ConfigError(
                f"rewards: '{self.models[0]}' is the only model among the sources, and no single model's word counts: "
                "add one of another kind, or set rewards.doubt=true, by which it can take an episode out."
            )
        if self.doubt and not self.models:
            raise ConfigError("rewards: doubt is what models do, and there is none among the sources.")
        if (SIMULATOR in self.sources) != (self.success_return is not None):
            raise ConfigError("rewards: the source 'simulator' and success_return go together: set both, or neither.")

    @property
    def models(self) -> tuple[str, ...]:
        """Kinds of the models among the sources."""
        return tuple(one for one in self.sources if one not in FIRM)

    @property
    def is_record(self) -> bool:
        """Whether an episode is what its record says, and nothing else is read."""
        return self.sources == (OUTCOME,)
