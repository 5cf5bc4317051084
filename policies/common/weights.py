"""Named tensors to safetensors bytes and back, with what a robot must know before it trusts them.

A file holds the tensors and one metadata entry, the JSON of `Header`. It is never a pickle.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from policies.common.embodiments import EmbodimentTable
from policies.common.int8 import Int8Linear
from policies.interface.trainable import TRAINED
from wire.errors import ConfigError, WeightsError
from wire.types import RobotSpec
from wire.untrusted import read_safetensors_header

FORMAT = 1
_KEY = "vla_fleet"
_HASHED = "_base_sha256"
"""attribute of a module: (which tensors, their hash)"""
_EXPORT = "Export the policy with `save()`, which writes safetensors."
_SAME = (
    "start with the same --policy and --policy-config, its `training` options included, on every machine (only "
    "`runtime` may differ)"
)


class Header(msgspec.Struct, frozen=True):
    """What stands beside the tensors."""

    network: str
    """the kind of policy, for example `flow`"""
    config: dict[str, Any]
    """the network's own configuration"""
    spec: RobotSpec
    """the robot the weights were trained for"""
    spec_hash: str
    format: int = FORMAT
    base: str = ""
    """hash of what is not in the file and must be there already (`base_sha256`)"""
    embodiments: EmbodimentTable | msgspec.UnsetType = msgspec.UNSET
    """of a network that several shapes of robots share: `spec` is then the first of them, and `spec_hash` is ''"""


def pack(tensors: Mapping[str, torch.Tensor], header: Header) -> bytes:
    """A safetensors file. The same tensors and header always give the same bytes."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    return safetensors.torch.save(plain, metadata={_KEY: msgspec.json.encode(header).decode()})


def pack_module(module: nn.Module, header: Header) -> bytes:
    """A file of what training changes in `module` (`trainable_state_dict`), and the hash of the rest."""
    return pack(trainable_state_dict(module), msgspec.structs.replace(header, base=base_sha256(module)))


def read_header(data: bytes, what: str = "weights") -> Header:
    """The header alone. Raises `WeightsError` for anything that is not a weights file of this format."""
    length = int.from_bytes(data[:8], "little")
    fits = len(data) >= 8 and length <= len(data) - 8
    # the length of a safetensors header may begin with the same byte as a pickle; what follows it is always JSON
    if (data[:2] == b"PK" or data[:1] == b"\x80") and not (fits and data[8:9] == b"{"):
        raise WeightsError(f"{what}: this is a pickle or a torch archive, which may run code when read. {_EXPORT}")
    if not fits:
        raise WeightsError(f"{what}: {len(data)} bytes that are no safetensors file, or a torn one. {_EXPORT}")
    try:
        text = read_safetensors_header(io.BytesIO(data), len(data), what).metadata[_KEY]
    except WeightsError as error:
        raise WeightsError(f"{error} {_EXPORT}") from error
    except KeyError as error:
        raise WeightsError(f"{what}: a safetensors file without '{_KEY}' metadata. {_EXPORT}") from error
    try:
        header = msgspec.json.decode(text, type=Header)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise WeightsError(f"{what}: the '{_KEY}' metadata cannot be read: {error}. {_EXPORT}") from error
    if header.format != FORMAT:
        raise WeightsError(
            f"{what}: format {header.format}, this program reads {FORMAT}; install the same vla-fleet on both sides."
        )
    expected, said = header.spec_hash, "the header says"
    if isinstance(table := header.embodiments, EmbodimentTable):
        table.require(what)
        expected = table.rows[0].spec.hash if table.rows else header.spec.hash
        said = "the first robot of its table has"
    if header.spec.hash != expected:
        raise WeightsError(
            f"{what}: the robot spec inside has hash {header.spec.hash}, {said} {expected}; the file was changed after "
            "it was saved."
        )
    return header


def unpack(data: bytes, what: str = "weights") -> tuple[Header, dict[str, torch.Tensor]]:
    """Header and tensors. Raises `WeightsError` for bytes that are no weights, and for tensors with NaN."""
    header = read_header(data, what)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise WeightsError(f"{what}: the tensors cannot be read: {error}. Fetch or export them again.") from error
    bad = [n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if bad:
        raise WeightsError(f"{what}: not finite in {list_names(bad)}; training diverged, use an earlier version.")
    return header, tensors


def unpack_own(data: bytes, own: Header, what: str) -> tuple[Header, dict[str, torch.Tensor]]:
    """Header and tensors of a file that a policy with the header `own` can load.

    Raises `SpecMismatchError` for another robot's, `WeightsError` for another network's, naming the first field that
    differs, and as `unpack` does.
    """
    header, tensors = unpack(data, what)
    header.spec.require(own.spec, what)
    require_network(header, own, what)
    return header, tensors


def require_network(header: Header, own: Header, what: str) -> None:
    """Raise `WeightsError` for a file of another network than `own`, naming the first field that differs."""
    if header.network != own.network:
        raise WeightsError(
            f"{what}: made by a '{header.network}' network, this policy is '{own.network}'. Start it with "
            "the same --policy as the trainer."
        )
    for field in own.config | header.config:
        if own.config.get(field) != header.config.get(field):
            raise WeightsError(
                f"{what}: made by a network with {field} {header.config.get(field)}, this policy has "
                f"{own.config.get(field)}. Train and run with the same network configuration."
            )


def load_into(module: nn.Module, tensors: Mapping[str, torch.Tensor], what: str = "weights") -> None:
    """Copy `tensors` into what training changes of the module; nothing is copied unless everything fits.

    Raises `WeightsError` that names the tensors that are missing, not expected, or of another shape or type.
    """
    own = trainable_state_dict(module)
    _require_tensors(own, tensors, what)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def load_published(
    module: nn.Module, header: Header, tensors: Mapping[str, torch.Tensor], what: str = "weights"
) -> None:
    """`load_into` of a file that `pack_module` wrote; the module's base stays.

    Raises `WeightsError` if that is not the one the file was trained on, and as `load_into` does.
    """
    base = base_sha256(module)
    if header.base != base:
        raise WeightsError(f"{what}: {_other_base(header.base, base)}")
    load_into(module, tensors, what)


def refresh(network: nn.Module, module: nn.Module) -> None:
    """Give `network` the present values of `module`, of which `policies.common.runtime.acting` made it, in place.

    What is frozen stays. What was compiled for it, CUDA graphs included, stays valid. Nothing to do when both are the
    same object.
    """
    with torch.no_grad():
        for _, target, source in carried_parts(network, module):
            if isinstance(target, Int8Linear):
                target.quantize(source)
            else:
                target.copy_(source)


def carried_parts(network: nn.Module, module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(name, what acts, what it is made of) of all that `refresh` brings up to date: an `Int8Linear` and its Linear, or
    two tensors; nothing when both are the same object."""
    if network is module:
        return
    # what is frozen is there since `acting`, and may be billions of numbers
    carried = {id(tensor) for tensor in trainable_state_dict(module).values()}
    for name, source in module.named_modules():
        target = network.get_submodule(name)
        if isinstance(target, Int8Linear):
            assert isinstance(source, torch.nn.Linear)
            if any(id(parameter) in carried for parameter in source.parameters()):
                yield name, target, source
            continue
        for tensors in ("_parameters", "_buffers"):
            for key, value in getattr(source, tensors).items():
                if value is not None and (tensors == "_buffers" or id(value) in carried):
                    yield f"{name}.{key}", getattr(target, tensors)[key], value


def share_frozen(module: nn.Module, of: nn.Module) -> None:
    """Let `module` compute with the frozen parameters of another one of its kind: so they are in memory once."""
    theirs = dict(of.named_parameters())
    for name, parameter in module.named_parameters():
        other = theirs.get(name)
        if other is None or other.requires_grad or parameter.requires_grad:
            continue
        if other.shape == parameter.shape and other.dtype == parameter.dtype:
            parameter.data = other.data


def trainable_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors a weights file carries, by their names in `state_dict`: all that training changes.

    Those are the trained parameters and every persistent buffer (statistics); all tensors when nothing is frozen or
    the module was never prepared. A tensor with two names is listed under the first. They are the module's own, not
    copies, and share its memory.
    """
    tensors, trained = _tensors(module), getattr(module, TRAINED, None)
    if trained is None:
        return tensors
    parameters = {name for name, _ in module.named_parameters()}
    return {name: tensor for name, tensor in tensors.items() if name in trained or name not in parameters}


def base_sha256(module: nn.Module) -> str:
    """64 hexadecimal digits over all that the network computes with and `trainable_state_dict` lacks; "" for nothing.

    That is names, types, shapes and values of the frozen tensors, and the factor alpha / rank of every adapter, which
    is in no tensor. About a second per gigabyte, so it is remembered on the module until one of these tensors is
    another one or was written to. A copy that shares them (see `cloud_learner.training.learner`) has it as well.
    """
    ours = trainable_state_dict(module)
    base = {name: tensor for name, tensor in sorted(_tensors(module).items()) if name not in ours}
    factors = _factors(module)
    if not base and not factors:
        return ""
    written = None
    if not any(tensor.is_inference() for tensor in base.values()):  # those do not count their writes
        written = factors, tuple((name, tensor.data_ptr(), tensor._version) for name, tensor in base.items())
        remembered: tuple[Any, str] | None = getattr(module, _HASHED, None)
        if remembered is not None and remembered[0] == written:
            return remembered[1]
    digest = hashlib.sha256()
    for name, tensor in base.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    for name, factor in factors:
        digest.update(f"{name} times {factor!r}\n".encode())
    value = digest.hexdigest()
    if written is not None:
        setattr(module, _HASHED, (written, value))
    return value


def _factors(module: nn.Module) -> tuple[tuple[str, float], ...]:
    """What each adapter's output is multiplied by, sorted by name."""
    found = []
    for name, part in module.named_modules():
        if hasattr(part, "lora_A"):  # others have a `scaling` as well, such as attention
            found += [(f"{name}.{adapter}", float(factor)) for adapter, factor in part.scaling.items()]
    return tuple(sorted(found))


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of `state_dict` once, as the module holds it."""
    seen: set[int] = set()
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _other_base(theirs: str, mine: str) -> str:
    if not theirs:
        return (
            f"it has every tensor, while this policy keeps a frozen base of sha256 {mine[:12]} and takes only what is "
            f"trained on top; {_SAME}."
        )
    if not mine:
        return (
            f"it has only what was trained on top of a frozen base of sha256 {theirs[:12]}, while nothing is frozen "
            f"in this policy; {_SAME}."
        )
    return (
        f"it was trained on top of a frozen base of sha256 {theirs[:12]}, this policy's is {mine[:12]}: other frozen "
        f"weights, or adapters with another alpha / rank; {_SAME}, and with the same files where --policy or `vlm` "
        "names a directory."
    )


def _require_tensors(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], what: str) -> None:
    problems = []
    if missing := sorted(own.keys() - tensors.keys()):
        problems.append(f"missing {list_names(missing)}")
    if unexpected := sorted(tensors.keys() - own.keys()):
        problems.append(f"not expected {list_names(unexpected)}")
    for name in sorted(own.keys() & tensors.keys()):
        mine, theirs = own[name], tensors[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            problems.append(f"'{name}' is {theirs.dtype}{list(theirs.shape)} instead of {mine.dtype}{list(mine.shape)}")
    if problems:
        raise WeightsError(
            f"{what}: {'; '.join(problems[:6])}. Use weights made by the network this policy was configured with: "
            f"{_SAME}."
        )


def list_names(names: list[str]) -> str:
    """The first five, in quotes, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"'{name}'" for name in names[:5]) + more
