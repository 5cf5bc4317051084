"""What a request for a job may say: names that can be kept, shown and told from people's, and work that can be done."""

from __future__ import annotations

import re

from hal.resource import Priority
from hal.scheduler import HELD_OUT_SEEDS, KINDS
from hal.scheduler.seeds import held_out_seeds
from wire.errors import ConfigError, suggest
from wire.messages.fleet import JobRequest

LONGEST_NAME = 100
"""characters of a name in a request"""
MOST_NAMES = 256
"""in one list of a request"""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = ("console", "teleoperator", "web-", "dropped", "operator")
_TAKEN = ("gateway", "estop", "rest")


def check_names(request: JobRequest) -> None:
    """Raises `ConfigError` that names the field for a name that cannot be a job's, is too long, or for too many."""
    need = request.requirement
    fields: dict[str, str | tuple[str, ...]] = {"id": request.id, "submitter": request.submitter}
    fields |= {"kind": request.kind, "tasks": request.tasks}
    fields |= {f"requirement.{name}": getattr(need, name) for name in need.__struct_fields__}
    for field, value in fields.items():
        names = (value,) if isinstance(value, str) else value
        if len(names) > MOST_NAMES:
            raise ConfigError(f"{field}: {len(names)} names; give up to {MOST_NAMES}.")
        if longest := max((name for name in names if len(name) > LONGEST_NAME), key=len, default=""):
            raise ConfigError(
                f"{field}: '{longest[:64]}' and so on has {len(longest)} characters; give up to {LONGEST_NAME}."
            )
    if not _ID.fullmatch(request.id):
        raise ConfigError(
            f"id: '{request.id[:64]}' is no name for a job. Give up to 64 letters, digits, '-', '_' or '.', the first "
            "one a letter or a digit."
        )
    if request.id in _TAKEN or request.id.startswith(_RESERVED):
        # A lease shows its holder by name: a job must not look like a person or a program.
        raise ConfigError(
            f"id: '{request.id}' is kept for those who are no job: {', '.join(_TAKEN)}, and whatever begins with "
            f"{', '.join(_RESERVED)}. Choose another name."
        )


def check_request(request: JobRequest) -> None:
    """Raises `ConfigError` that names the field for a job that cannot work."""
    where = f"job '{request.id}'"
    if request.kind not in KINDS:
        raise ConfigError(
            f"{where}: kind: there is no '{request.kind}'.{suggest(request.kind, KINDS)} Known: {', '.join(KINDS)}."
        )
    if not request.tasks or not all(request.tasks):
        raise ConfigError(f"{where}: tasks: name at least one.")
    for name in ("robots", "episodes", "priority", "version", "first_seed"):
        if getattr(request, name) < 0:
            raise ConfigError(f"{where}: {name} is {getattr(request, name)}; give 0 or more.")
    if request.priority >= Priority.operator:
        raise ConfigError(
            f"{where}: priority is {request.priority}; {int(Priority.operator)} and above are people's. Give less."
        )
    if request.kind == "evaluation":
        if not request.episodes:
            raise ConfigError(f"{where}: episodes: an evaluation needs a number of episodes for each task.")
        held_out_seeds(request.first_seed, request.episodes)
    elif request.first_seed:
        raise ConfigError(
            f"{where}: first_seed: only an evaluation chooses its seeds, {HELD_OUT_SEEDS.start} or later; "
            "others go on in each robot's training seeds. Leave it 0."
        )
