"""What `--set PATH=VALUE` may set of a recipe: its fields, and those of the configurations in it, by their path.

    training.learning_rate=1e-4    algorithm.draws=4    evaluator.episodes=10    training.betas=[0.9, 0.95]

A value is read by its field's type: numbers, booleans and words as they are, tuples and tables as JSON, `none` where
that is allowed. Code is no setting: what a recipe has functions for is not in the list. Neither is what has an option
of its own which does more than change a value (the driver, the policy), nor what the robot is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

from fleet.config.recipe import Recipe
from hal.registry import make_robot
from wire.errors import ConfigError, FleetError, suggest

Holder = TypeVar("Holder")
_ELSEWHERE = ("name", "config", "robot", "spec", "tiny", "modules", "make_policy", "start", "members")
_ROBOTS = ("robot_config", "unpaced_config")


@dataclass(frozen=True, slots=True)
class Setting:
    """One field that can be set."""

    path: str
    hint: Any
    """its type, as it is annotated"""
    value: Any
    """what it is now"""

    @property
    def type(self) -> str:
        """For people: `float`, `constant|cosine`, `tuple[float, float]`."""
        return _type_text(self.hint)

    @property
    def text(self) -> str:
        """Its value as `--set` takes it."""
        return value_text(self.value)


def settings_of(recipe: Recipe) -> list[Setting]:
    """All that can be set of `recipe`, in the order of its fields."""
    return [one for name, hint in _hints(recipe) if name not in _ELSEWHERE for one in _below(recipe, name, hint, "")]


def with_settings(recipe: Recipe, given: Sequence[str], option: str = "--set") -> Recipe:
    """`recipe` with each PATH=VALUE that `option` gave, in their order.

    Raises `ConfigError` that names the path: for an unknown one, for a value of another type, and for one that its
    configuration refuses. `SpecMismatchError` for a driver's configuration that makes it another robot.
    """
    for text in given:
        recipe = _with_setting(recipe, text, option)
    # of both, whichever is given first
    if given and (unsaid := set(recipe.tasks) - set(recipe.instructions)):
        raise ConfigError(
            f"{option} tasks={value_text(recipe.tasks)}: task '{min(unsaid)}' has no instruction; there are "
            f"{', '.join(sorted(recipe.instructions))}. Give it one by {option} instructions=..."
        )
    recipe.rewards.require_whole()
    for name in _ROBOTS:
        if any(text.startswith(f"{name}.") for text in given):
            with _refusing(f"{option} {name}"):
                driver = make_robot(recipe.robot, getattr(recipe, name))
            recipe.spec.require(driver.spec, f"robot '{recipe.robot}' as {option} configures it")
    return recipe


def value_text(value: Any) -> str:
    """A value as `--set` takes it."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return str(value)
    return msgspec.json.encode(value).decode()


# --- inside -----------------------------------------------------------------------------------------------------------


def _with_setting(recipe: Recipe, text: str, option: str) -> Recipe:
    path, equals, value = text.partition("=")
    path, what = path.strip(), f"{option} {text}"
    if not (path and equals):
        raise ConfigError(f"{what}: say PATH=VALUE, such as training.learning_rate=1e-4.")
    found = {one.path: one for one in settings_of(recipe)}
    setting = found.get(path)
    if setting is None:
        raise ConfigError(f"{what}: {_unknown(recipe, path, list(found))}")
    return _replaced(recipe, path.split("."), _read(setting, value.strip(), option), what)


def _unknown(recipe: Recipe, path: str, known: list[str]) -> str:
    inside = [one.removeprefix(f"{path}.") for one in known if one.startswith(f"{path}.")]
    if inside:
        return f"it has fields of its own: {', '.join(inside)}. Say {path}.{inside[0]}=VALUE."
    first = path.rpartition(".")[0]
    if first in known:
        return f"'{first}' is {value_text(_value_at(recipe, first))} and has no fields; set it as a whole."
    beside = [one for one in known if first and one.rpartition(".")[0] == first]
    names = f" {first} has {', '.join(one.rpartition('.')[2] for one in beside)}." if beside else ""
    return (
        f"recipe '{recipe.name}' has no setting '{path}'.{suggest(path, beside or known)}{names} "
        f"`vla-fleet recipes {recipe.name}` lists all."
    )


def _value_at(value: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        value = getattr(value, name, None)
    return value


def _replaced(holder: Holder, names: list[str], value: Any, what: str) -> Holder:
    """`holder` with the field at the path `names` replaced; each configuration on the way checks itself again."""
    if len(names) > 1:
        value = _replaced(getattr(holder, names[0]), names[1:], value, what)
    with _refusing(what):
        if isinstance(holder, msgspec.Struct):
            return msgspec.structs.replace(holder, **{names[0]: value})
        return dataclasses.replace(holder, **{names[0]: value})  # type: ignore[type-var]


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Inside, what a configuration refuses becomes a `ConfigError` that begins with `what`."""
    try:
        yield
    except (FleetError, ValueError, TypeError) as error:
        raise ConfigError(f"{what}: {error}") from error


def _read(setting: Setting, text: str, option: str) -> Any:
    options = _options(setting.hint)
    if text.lower() in ("none", "null") and NoneType in options:
        return None
    value: Any = text
    if not any(one is str or _words(one) for one in options):
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError:
            value = text
    try:
        found = msgspec.convert(value, setting.hint, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{option} {setting.path}={text}: {error}. {_described(setting)}") from error
    if isinstance(found, float) and math.isnan(found):
        raise ConfigError(f"{option} {setting.path}={text}: that is no number. {_described(setting)}")
    return found


def _described(setting: Setting) -> str:
    return f"It is {setting.type}, now {setting.text}."


def _below(holder: Any, name: str, hint: Any, path: str) -> Iterator[Setting]:
    """The setting `name` of `holder`, or those inside of it."""
    value, path = getattr(holder, name), f"{path}{name}"
    nested = _hints(value)
    if nested:
        for inner, inner_hint in nested:
            yield from _below(value, inner, inner_hint, f"{path}.")
        if NoneType in _options(hint):
            yield Setting(path, hint, value)
    elif _readable(hint):
        yield Setting(path, hint, value)


def _hints(value: Any) -> list[tuple[str, Any]]:
    """Names and types of the fields of a configuration; none for anything else."""
    if isinstance(value, msgspec.Struct):
        names: Sequence[str] = value.__struct_fields__
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in dataclasses.fields(value) if one.init]
    else:
        return []
    hints = get_type_hints(type(value), include_extras=True)
    return [(name, hints[name]) for name in names if not name.startswith("_")]


def _readable(hint: Any) -> bool:
    """Whether text can become one: neither code nor anything at all."""
    try:
        return _plain(inspect.type_info(hint))
    except TypeError:
        return False


def _plain(found: inspect.Type) -> bool:
    match found:
        case inspect.CustomType() | inspect.AnyType() | inspect.RawType():
            return False
        case inspect.UnionType(types=types):
            return all(_plain(one) for one in types)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item) | inspect.SetType(item_type=item):
            return _plain(item)
        case inspect.FrozenSetType(item_type=item):
            return _plain(item)
        case inspect.TupleType(item_types=items):
            return all(_plain(one) for one in items)
        case inspect.DictType(key_type=key, value_type=value):
            return _plain(key) and _plain(value)
        case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields):
            return all(_plain(one.type) for one in fields)
    return True


def _options(hint: Any) -> tuple[Any, ...]:
    """The types that are possible."""
    while get_origin(hint) is not None and hasattr(hint, "__metadata__"):
        hint = get_args(hint)[0]
    if str(get_origin(hint)) in ("typing.Union", "<class 'types.UnionType'>"):
        return tuple(part for one in get_args(hint) for part in _options(one))
    return (hint,)


def _words(hint: Any) -> list[str]:
    """The words of a choice."""
    if get_origin(hint) is Literal:
        return [str(one) for one in get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [str(one.value) for one in hint]
    return []


def _type_text(hint: Any) -> str:
    return " or ".join(_option_text(one) for one in _options(hint))


def _option_text(hint: Any) -> str:
    if words := _words(hint):
        return "|".join(words)
    if hint is NoneType:
        return "none"
    if hint is bool:
        return "true|false"
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    return re.sub(r"\w+\.(?=\w)", "", str(hint))
