"""Finds policies by name: `flow:small`, `gaussian:state`, `lerobot:DIRECTORY`, `tokens:fast`; packages add theirs.

A kind is a module with two functions, loaded when it is first asked for:

    make(name_or_path: str, config: dict, spec: RobotSpec, seed: int) -> LearnedPolicy
    defaults(name_or_path: str, config: dict, spec: RobotSpec) -> PolicyDefaults

and, if it likes, `absolute(name_or_path: str) -> str` for one that must mean the same in every working directory, and
`PATHS`, the names of configured values that are paths: those that are there become absolute. `defaults` runs in
processes that never load torch: it reads files, not networks, and raises `ConfigError` for whatever these show to be
unusable. A package adds a kind by an entry point in the group `vla_fleet.policies` that names its module.
"""

from __future__ import annotations

import re
import sys
from importlib import util
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import msgspec
from msgspec import inspect

from wire.errors import ConfigError, FleetError, PolicyError, SpecMismatchError, suggest
from wire.types import RobotSpec
from wire.untrusted import parse_json

if TYPE_CHECKING:
    from policies.interface.policy import LearnedPolicy

T = TypeVar("T", bound=msgspec.Struct)

POLICIES = "vla_fleet.policies"
_PATH, _UNKNOWN = re.compile(r"at `\$\.([\w.]+)`$"), re.compile(r"unknown field `([^`]*)`")

_BUILT_IN = (
    EntryPoint("flow", "policies.flow.factory", POLICIES),
    EntryPoint("gaussian", "policies.gaussian.factory", POLICIES),
    EntryPoint("lerobot", "policies.lerobot.factory", POLICIES),
    EntryPoint("shared", "policies.flow.shared.factory", POLICIES),
    EntryPoint("tokens", "policies.tokens.factory", POLICIES),
)

_EXTRAS = {
    "lerobot": "lerobot",
    "num2words": "lerobot",
    "peft": "vlm",
    "safetensors": "learner",
    "scipy": "vlm",
    "tokenizers": "vlm",
    "torch": "learner",
    "transformers": "vlm",
}
"""which of our extras brings a library"""
_LATER = {"tokens": ("scipy", "tokenizers")}
"""by kind, libraries that are loaded only when it learns: too late to hear that they are missing"""


class PolicyDefaults(msgspec.Struct, frozen=True):
    """What a kind of policy needs of the job it is put into. None: as the recipe says."""

    horizon: int | None = None
    """H, actions per chunk, where it is known without making the policy"""
    batch: int | None = None
    """images per gradient step"""
    ticks_per_frame: int | None = None
    """steps drawn behind each image"""
    learning_rate: float | None = None
    weight_decay: float | None = None
    gradient_clip: float | None = None
    """largest norm of the whole gradient"""
    ema_decay: float | None = None
    """cap of the weight average's decay"""
    shift_px: int | None = None
    """augmentation: images are shifted by up to so many pixels"""
    pretrain_steps: int | None = None
    """gradient steps before the first version of a policy that begins with random weights"""
    demonstrations: int | None = None
    """per task, before anything is learned; 0 for weights that act already"""
    publish_every_s: float | None = None
    """time between two published versions"""
    think_every_s: float | None = None
    """time between the frames of two thoughts"""


class PolicyChoice(msgspec.Struct, frozen=True):
    """Which policy: `KIND:NAME` and what is configured of it."""

    kind: str
    name_or_path: str = ""
    """a preset, a directory or a hub name, as the kind understands it"""
    config: dict[str, Any] = {}
    """fields of the kind's configuration; what is left out has its default"""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name_or_path}" if self.name_or_path else self.kind


class Factory(Protocol):
    """The module of one kind."""

    def make(self, name_or_path: str, config: dict[str, Any], spec: RobotSpec, seed: int) -> LearnedPolicy: ...

    def defaults(self, name_or_path: str, config: dict[str, Any], spec: RobotSpec) -> PolicyDefaults: ...


def parse_policy(text: str, config_json: str = "") -> PolicyChoice:
    """The choice that `KIND:NAME` and a JSON object of its configuration make, its path absolute.

    Raises `ConfigError` for an unknown kind, with the nearest, and for what is no JSON object; `PolicyError` naming the
    entry point of a kind that cannot be loaded.
    """
    kind, _, name_or_path = text.strip().partition(":")
    config = read_object(config_json, f"the configuration of policy '{text}'") if config_json else {}
    factory = _factory(kind)
    for name in getattr(factory, "PATHS", ()):
        if isinstance(path := config.get(name), str):
            config[name] = _absolute(path)
    return PolicyChoice(kind, getattr(factory, "absolute", _absolute)(name_or_path), config)


def make_policy(choice: PolicyChoice, spec: RobotSpec, seed: int) -> LearnedPolicy:
    """A fresh policy for the robot `spec`; imports torch.

    Raises `ConfigError` for a name or a configuration that cannot be used and for a library that is not installed, with
    the extra that brings it, `SpecMismatchError` or `ConfigError` when it does not fit the robot.
    """
    factory = _factory(choice.kind)
    for library in _LATER.get(choice.kind, ()):
        if util.find_spec(library) is None:
            raise _missing(choice, library)
    try:
        policy = factory.make(choice.name_or_path, dict(choice.config), spec, seed)
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXTRAS or (library in sys.modules and sys.modules[library] is not None):
            raise
        raise _missing(choice, library) from error
    if policy.spec.hash != spec.hash:
        raise SpecMismatchError(f"policy '{choice}' was made for another robot than '{spec.embodiment}'.")
    return policy


def _missing(choice: PolicyChoice, library: str) -> ConfigError:
    # lerobot's policies want transformers of the release that lerobot asks for.
    extra = "lerobot" if choice.kind == "lerobot" and library == "transformers" else _EXTRAS[library]
    return ConfigError(
        f"policy '{choice}' needs the library {library}, which is not installed here; install it with "
        f"`pip install 'vla-fleet[{extra}]'`."
    )


def defaults(choice: PolicyChoice, spec: RobotSpec) -> PolicyDefaults:
    """What the policy needs of its job. Loads no network; raises `ConfigError` as far as files tell."""
    return _factory(choice.kind).defaults(choice.name_or_path, dict(choice.config), spec)


def same_network(one: PolicyChoice | None, other: PolicyChoice | None) -> bool:
    """Whether weights of `one` can be those of `other`: on what and how fast it runs does not matter."""
    return _network(one) == _network(other)


def _network(choice: PolicyChoice | None) -> PolicyChoice | None:
    if choice is None:
        return None
    return msgspec.structs.replace(choice, config={k: v for k, v in choice.config.items() if k != "runtime"})


def read_object(text: str, what: str) -> dict[str, Any]:
    """A JSON object. Raises `ConfigError` that begins with `what`."""
    found = parse_json(text, what)
    if not isinstance(found, dict):
        raise ConfigError(f"{what} must be an object of its fields, not a {type(found).__name__}.")
    return found


def read_options(config: dict[str, Any], kind: type[T], what: str) -> T:
    """`config` as the struct `kind`. Raises `ConfigError` that begins with `what` and names the place and what is known
    there: the fields of a struct, the words of a choice."""
    try:
        return msgspec.convert(config, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what}: {error}.{_known(str(error), kind)}") from error


def require_ranges(config: msgspec.Struct, what: str) -> None:
    """Raise `ConfigError` that begins with `what` and names the first value outside of its type's `msgspec.Meta`."""
    try:
        msgspec.convert(msgspec.to_builtins(config), type(config))
    except msgspec.ValidationError as error:
        path, value = _PATH.search(str(error)), config
        for name in path[1].split(".") if path else ():
            value = getattr(value, name)
        raise ConfigError(f"{what}: {path[1] if path else 'configured'} {value}: {error}.") from error


def _known(error: str, kind: type[msgspec.Struct]) -> str:
    path, unknown = _PATH.search(error), _UNKNOWN.search(error)
    found: inspect.Type | None = inspect.type_info(kind)
    for name in path[1].split(".") if path else ():
        struct = _struct(found)
        found = next((field.type for field in struct.fields if field.encode_name == name), None) if struct else None
    if unknown and (struct := _struct(found)):
        names = [field.encode_name for field in struct.fields]
        return f"{suggest(unknown[1], names)} It has {', '.join(names)}."
    words = [str(value) for one in _members(found) if isinstance(one, inspect.LiteralType) for value in one.values]
    return f" Known: {', '.join(words)}." if words else ""


def _struct(found: inspect.Type | None) -> inspect.StructType | None:
    return next((one for one in _members(found) if isinstance(one, inspect.StructType)), None)


def _members(found: inspect.Type | None) -> tuple[inspect.Type, ...]:
    """The types that are possible there."""
    if found is None:
        return ()
    return found.types if isinstance(found, inspect.UnionType) else (found,)


def _absolute(name_or_path: str) -> str:
    """The absolute path of a file or directory that is there; anything else may be a name and stays."""
    path = Path(name_or_path).expanduser()
    return str(path.resolve()) if name_or_path and path.exists() else name_or_path


def _found() -> dict[str, EntryPoint]:
    # Ours come last: a package may add kinds, but not take the place of one that is built in.
    return {point.name: point for point in (*entry_points(group=POLICIES), *_BUILT_IN)}


def _factory(kind: str) -> Factory:
    found = _found()
    if kind not in found:
        known = ", ".join(sorted(found))
        raise ConfigError(
            f"no kind of policy '{kind}'.{suggest(kind, found)} Known: {known}; say KIND:NAME, such as flow:small or "
            f"lerobot:DIRECTORY. A package adds one by an entry point in the group '{POLICIES}'."
        )
    point = found[kind]
    owner = point.dist.name if point.dist else "vla-fleet"
    what = f"entry point '{point.name} = {point.value}' of package '{owner}' (group '{POLICIES}')"
    try:
        factory = point.load()
    except FleetError:
        raise
    except Exception as error:  # whatever a third party's module does when it is imported
        raise PolicyError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}. Repair or uninstall '{owner}'; the others are "
            "not affected."
        ) from error
    lacking = [name for name in ("make", "defaults") if not callable(getattr(factory, name, None))]
    if lacking:
        raise PolicyError(
            f"{what} has no {' and no '.join(lacking)}; see policies/interface/registry.py for what it must have."
        )
    return cast(Factory, factory)
