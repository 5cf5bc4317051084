"""A checkpoint's weights into the network that its configuration builds: all of them, finite, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.lerobot.checkpoint_path import ADAPTER_WEIGHTS, CONFIG, WEIGHTS, one_line
from wire.errors import WeightsError

if TYPE_CHECKING:
    import torch
    from lerobot.policies.pretrained import PreTrainedPolicy

_OLD_NORMALISATION = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")


def load_weights(policy: PreTrainedPolicy, file: Path) -> None:
    """Copy the weights of `file` into `policy`; every tensor must find its place and have no NaN.

    Raises `WeightsError` that names the file and what it lacks or has too much.
    """
    from lerobot.policies.pretrained import PreTrainedPolicy as Plain
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    try:
        if type(policy).from_pretrained.__func__ is not Plain.from_pretrained.__func__:
            missing, unexpected = _by_its_own_loader(policy, file)
        else:
            missing, unexpected = load_model(policy, file, strict=False)
    except (SafetensorError, RuntimeError, OSError) as error:
        raise WeightsError(
            f"{file}: not the weights of this '{policy.name}' policy: {one_line(error)}. Copy it and {CONFIG} from one "
            "checkpoint, and change no size by `override`."
        ) from error
    unexpected = [name for name in unexpected if not name.startswith(_OLD_NORMALISATION)]
    if missing or unexpected:
        both = [f"{what} {_some(list(names))}" for what, names in (("lacks", missing), ("has", unexpected)) if names]
        raise WeightsError(
            f"{file}: not the weights of the '{policy.name}' policy in {CONFIG} beside it: it {' and '.join(both)}. "
            "Copy both files from one checkpoint."
        )
    _require_finite(policy, file)


def with_adapters(policy: PreTrainedPolicy, path: Path) -> PreTrainedPolicy:
    """`policy` with the adapters of the checkpoint at `path` added to what they adapt."""
    from peft import PeftModel

    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    try:
        merged: PreTrainedPolicy = PeftModel.from_pretrained(policy, str(path)).merge_and_unload()
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        raise WeightsError(
            f"{path}: its adapters do not fit the checkpoint that they name: {one_line(error)}"
        ) from error
    for name, parameter in merged.named_parameters():
        parameter.requires_grad_(name in trained)  # adapters had frozen what they adapt
    _require_finite(merged, path / ADAPTER_WEIGHTS)
    return merged


def _by_its_own_loader(policy: PreTrainedPolicy, file: Path) -> tuple[list[str], list[str]]:
    """What the type's own `from_pretrained` leaves out of `policy`, and what of `file` it has no place for.

    Such a loader renames tensors of older files, and tells of failures by a print alone. It wants to build a network;
    it is handed the one that is there, which listens to what it is given.
    """
    kind: Any = type(policy)
    heard: list[tuple[list[str], list[str]]] = []
    failures: list[Exception] = []

    def listen(state: dict[str, torch.Tensor], strict: bool = True, assign: bool = False) -> Any:
        try:
            found = kind.load_state_dict(policy, state, strict=False, assign=assign)
        except Exception as error:
            failures.append(error)
            raise
        heard.append((list(found.missing_keys), list(found.unexpected_keys)))
        return found

    listener: Any = policy
    handed = type(kind.__name__, (kind,), {"__new__": lambda cls, *given, **named: policy})
    listener.load_state_dict = listen
    try:
        loaded = kind.from_pretrained.__func__(handed, str(file.parent), config=policy.config)
    finally:
        del listener.load_state_dict
    if failures:
        raise RuntimeError(one_line(failures[0]))
    if loaded is not policy or not heard:
        raise RuntimeError(f"lerobot's own loader of '{policy.name}' did not take {WEIGHTS}; see what it printed")
    missing, unexpected = heard[-1]
    own = policy.state_dict()
    given = {own[name].data_ptr() for name in own.keys() - set(missing)}
    # a tensor under two names is stored under one of them
    return [name for name in missing if own[name].data_ptr() not in given], unexpected


def _require_finite(policy: PreTrainedPolicy, file: Path) -> None:
    parameters = {name for name, _ in policy.named_parameters()}
    for name, tensor in policy.state_dict().items():
        # a buffer may be a mask, which has infinities
        bad = ~tensor.isfinite() if name in parameters else tensor.isnan()
        if count := int(bad.sum()):
            raise WeightsError(
                f"{file}: {count} of {tensor.numel()} numbers of '{name}' are not finite. The training it came from "
                "broke down: use an earlier checkpoint."
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"'{name}'" for name in sorted(names)[:5]) + more
