"""What a robot can do, and whether that is what a job asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wire.messages.fleet import Capabilities, Requirement
from wire.types import RobotSpec


def capabilities_of(spec: RobotSpec, tasks: Sequence[str] = (), site: str = "") -> Capabilities:
    """What a robot of this `spec` offers. `tasks` it can do (none: whatever it is asked), `site` where it stands."""
    return Capabilities(
        embodiment=spec.embodiment,
        spec_hash=spec.hash,
        state_dim=spec.state_dim,
        action_dim=spec.action_dim,
        meanings=tuple(sorted({str(dimension.meaning) for dimension in spec.action})),
        control_hz=spec.control_hz,
        cameras=tuple(camera.name for camera in spec.cameras),
        site=site,
        tasks=tuple(tasks),
    )


def missing_requirements(need: Requirement, name: str, have: Capabilities) -> str:
    """What the robot `name`, which offers `have`, lacks for `need`, with the field named; '' when it fits."""
    if need.robots and name not in need.robots:
        return f"robots: '{name}' is not one of {_list(need.robots)}"
    if need.embodiment and need.embodiment != have.embodiment:
        return f"embodiment: '{name}' is of '{have.embodiment}', not of '{need.embodiment}'"
    if need.spec_hash and need.spec_hash != have.spec_hash:
        return f"spec_hash: '{name}' has robot spec {have.spec_hash}, not {need.spec_hash}"
    if need.meanings and (other := [meaning for meaning in have.meanings if meaning not in need.meanings]):
        return f"meanings: '{name}' has actions that are {_list(other)}, not only {_list(need.meanings)}"
    if missing := [camera for camera in need.cameras if camera not in have.cameras]:
        return f"cameras: '{name}' has no {_list(missing)} (it has {_list(have.cameras) or 'none'})"
    if need.site and need.site != have.site:
        return f"site: '{name}' stands at '{have.site}', not at '{need.site}'"
    if need.tasks and not satisfies(need.tasks, have):
        return f"tasks: '{name}' can do {_list(have.tasks)}, none of {_list(need.tasks)}"
    return ""


def satisfies(tasks: Sequence[str], capabilities: Capabilities) -> tuple[str, ...]:
    """Those of `tasks` that the robot can do, in their order."""
    return tuple(task for task in tasks if not capabilities.tasks or task in capabilities.tasks)


def _list(words: Iterable[str]) -> str:
    return ", ".join(f"'{word}'" for word in words)
