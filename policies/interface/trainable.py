"""Which tensors of a network learn: all, a chosen part, or low-rank adapters alone.

What is frozen is the *base*: it is on every machine already, read from the same directory or drawn under the same seed
(`initial_seed`), and only its hash travels (`policies.common.weights`).
torch is imported when a function runs, so that a configuration can be read without it.
"""

from __future__ import annotations

import difflib
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import msgspec

from wire.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

TRAINED = "_trained_names"
"""attribute of a prepared module: frozenset of names; a deepcopy has it too, whatever its `requires_grad` says"""


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Low-rank adapters: W x + (alpha / rank) B A x, with A and B trained (Hu et al. 2021, arXiv 2106.09685, eq. 3)."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    """patterns (fnmatch) of the names of Linear modules; empty: the policy's own default"""
    dropout: float = 0.0
    """on what goes into A, in training only"""

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0 or not 0 <= self.dropout < 1:
            raise ConfigError(
                f"lora: rank {self.rank} must be at least 1, alpha {self.alpha} positive and dropout {self.dropout} "
                "in [0, 1)."
            )


class FinetuneConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of a network is trained. Patterns are those of `fnmatch`, on the names of `named_parameters`."""

    train: tuple[str, ...] = ("*",)
    """`*` is everything but what the network's own constructor froze; any other pattern also thaws what it names"""
    freeze: tuple[str, ...] = ()
    """of those, not these"""
    lora: Lora | None = None
    """adapters; all else is then frozen but what `train` names by a pattern other than `*`"""


def initial_seed(training: FinetuneConfig, seed: int) -> int:
    """What a network that begins with random weights draws them under: `seed`, or 0 if `training` freezes any of them.

    Every process has a seed of its own, while a base that does not travel must be the same everywhere. What a
    constructor freezes by itself, such as a backbone read from a directory, must not depend on the seed anyway.
    """
    everything = "*" in training.train and not training.freeze and training.lora is None
    return seed if everything else 0


def apply_finetuning(
    module: nn.Module, training: FinetuneConfig, lora_targets: tuple[str, ...] = (), seed: int = 0
) -> None:
    """Freeze what `training` does not name and put its adapters in, in place.

    `lora_targets`: patterns used when `training.lora` names none; none at all means every Linear. Adapters change
    nothing before the first gradient step, as B begins with zeros; A is drawn under `seed`, and no global random
    stream moves. Names of parameters under an adapter get `.base_layer` before their last part, adapters are named
    `<linear>.lora_A.default.weight` and `<linear>.lora_B.default.weight`.

    Raises `ConfigError` for a pattern that matches nothing, for a module that has adapters already, when nothing is
    left to train, and without the library `peft` when adapters are asked for.
    """
    parameters = dict(module.named_parameters())
    explicit = tuple(pattern for pattern in training.train if pattern != "*")
    chosen = {name: parameters[name] for name in _matching(explicit, list(parameters), "train")}
    if "*" in training.train and training.lora is None:
        chosen |= {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if training.lora is not None:
        known = {id(parameter) for parameter in parameters.values()}
        _inject(module, training.lora, training.lora.targets or lora_targets or ("*",), seed)
        chosen |= {name: p for name, p in module.named_parameters() if id(p) not in known}
    frozen = _matching(training.freeze, [*parameters, *(name for name in chosen if name not in parameters)], "freeze")
    trained = {id(parameter) for name, parameter in chosen.items() if name not in frozen}
    if not trained:
        raise ConfigError(
            f"training: train={list(training.train)} and freeze={list(training.freeze)} leave nothing to train of "
            f"{len(parameters)} parameters, such as '{next(iter(parameters), '')}'."
        )
    names = set()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(id(parameter) in trained)
        if parameter.requires_grad:
            names.add(name)
    whole = len(names) == sum(1 for _ in module.parameters())
    setattr(module, TRAINED, None if whole else frozenset(names))


def _matching(patterns: tuple[str, ...], names: list[str], what: str) -> set[str]:
    """Names that any of `patterns` matches; each must match one."""
    found: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise ConfigError(f"training: {what} '{pattern}' matches none of {len(names)} names{_near(pattern, names)}")
        found.update(hits)
    return found


def _near(pattern: str, names: list[str]) -> str:
    """How to go on: names like `pattern`, or the first there are."""
    bare = pattern.strip("*.")
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    like = difflib.get_close_matches(bare, names, 3, 0.4)
    like += [f"*{part}*" for part in difflib.get_close_matches(bare.rpartition(".")[2], parts, 2, 0.6)]
    listed = ", ".join(f"'{name}'" for name in like or names[:5])
    return f"; near ones: {listed}." if like else f"; there are: {listed}, ..." if names else "; there are none."


def _inject(module: nn.Module, lora: Lora, patterns: tuple[str, ...], seed: int) -> None:
    """Replace the Linear modules that `patterns` match by themselves with adapters beside."""
    import torch
    from torch import nn

    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise ConfigError(
            f"training: adapters need the library peft ({error}); install it with `pip install 'vla-fleet[vlm]'`."
        ) from error
    if any(isinstance(part, BaseTunerLayer) for part in module.modules()):
        raise ConfigError("training: this network has adapters already; merge them into it before adding others.")
    linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    wanted = _matching(patterns, linears, "lora target")
    # An outer module of its own: peft reads and writes attributes of the outermost one, such as `config`.
    shell = nn.Module()
    shell.add_module("inner", module)
    full = "|".join(re.escape(f"inner.{name}" if name else "inner") for name in sorted(wanted))
    alpha: Any = lora.alpha  # annotated as int, but only ever divided by the rank
    config = LoraConfig(r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=full)
    with torch.random.fork_rng(devices=[]):
        # Adapters are drawn on the CPU and then moved; `torch.manual_seed` would also seed every GPU.
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(config, shell)
