"""What the simulated robots of `vla-fleet up` are called, and by which recipe each of them works."""

from __future__ import annotations

from collections.abc import Collection

from fleet.config.recipe import Recipe
from wire.errors import ConfigError, suggest

USUAL_ROBOTS, MOST_ROBOTS = 3, 64


def robot_names(recipe: Recipe, wanted: str) -> tuple[str, ...]:
    """Those that `--robots` asks for, '' for the usual ones: `robot-0` and so on, of members `MEMBER-0` and so on.

    Raises `ConfigError` for what cannot be understood.
    """
    counts = _counts(recipe, wanted)
    if sum(counts.values()) > MOST_ROBOTS:
        raise ConfigError(f"--robots {wanted}: {sum(counts.values())} robots; {MOST_ROBOTS} at most run here.")
    return tuple(f"{kind}-{number}" for kind, count in counts.items() for number in range(count))


def member_of_robot(recipe: Recipe, robot: str) -> str:
    """The short name of the member by whose recipe it works, '' in a job of one shape. Raises `ConfigError` for a name
    that says none."""
    if not recipe.members:
        return ""
    member = robot.rpartition("-")[0]
    if member not in recipe.members:
        raise ConfigError(
            f"robot '{robot}': recipe '{recipe.name}' is for robots of several shapes, and nothing says which this one "
            f"is of. Call it {' or '.join(f'{name}-N' for name in recipe.members)}."
        )
    return member


def members_here(recipe: Recipe, robots: Collection[str]) -> dict[str, Recipe]:
    """Recipes by member of those that `robots` are of, of all where there are none; of one shape its own, by ''."""
    if not recipe.members:
        return {"": recipe}
    here = {member_of_robot(recipe, name) for name in robots} or recipe.members.keys()
    return {name: one for name, one in recipe.members.items() if name in here}


def _counts(recipe: Recipe, wanted: str) -> dict[str, int]:
    """How many of each kind, by what their names begin with."""
    if not recipe.members:
        if wanted and not wanted.isdecimal():
            raise ConfigError(f"--robots {wanted}: recipe '{recipe.name}' is for robots of one shape; say how many.")
        usual = 1 if recipe.people_only else USUAL_ROBOTS
        return {"robot": _count(wanted, wanted) if wanted else usual}
    if not wanted or wanted.isdecimal():
        return dict.fromkeys(recipe.members, _count(wanted, wanted or "1"))
    counts: dict[str, int] = {}
    for part in wanted.split(","):
        name, _, count = part.strip().partition(":")
        if name not in recipe.members:
            example = ",".join(f"{one}:1" for one in recipe.members)
            raise ConfigError(
                f"--robots {wanted}: recipe '{recipe.name}' has no member '{name}'.{suggest(name, recipe.members)} Say "
                f"how many of which, such as {example}."
            )
        if name in counts:
            raise ConfigError(f"--robots {wanted}: '{name}' is there twice.")
        counts[name] = _count(wanted, count)
    return counts


def _count(wanted: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--robots {wanted}: '{text}' is no number of robots from 1.")
    return int(text)
