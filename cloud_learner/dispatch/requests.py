"""What requests for jobs and leases may say: names that can be kept and shown, and work that can be done."""

from __future__ import annotations

import re
from collections.abc import Callable

from hal.resource.lease import ESTOP, Priority
from hal.scheduler.episodes import HELD_OUT_SEEDS, held_out_seeds
from wire.errors import ConfigError, RejectedError, suggest
from wire.messages.fleet import JobKind, JobRequest
from wire.transport.channel import PEER_SUFFIX
from wire.types import Lease

LONGEST_NAME = 100
"""characters of a name in a request"""
MOST_NAMES = 256
"""in one list of a request"""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = ("console", "teleoperator", "web-", "dropped", "operator")
_TAKEN = ("gateway", "estop", "rest")
MIN_TTL_S = 0.2
MAX_TTL_S = 24 * 3600.0
MAX_NAME_LENGTH = 64
"""characters of a robot's name, as `wire.transport.keys` has it"""
MAINTENANCE = 50
"""priority of a lease that says nothing else: above all jobs, below those who drive"""
_USUAL_PRIORITIES = {"teleoperation": Priority.operator, "operator": Priority.operator}


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
    if request.kind not in tuple(JobKind):
        raise ConfigError(
            f"{where}: kind: there is no '{request.kind}'.{suggest(request.kind, JobKind)} Known: {', '.join(JobKind)}."
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
    if request.kind == JobKind.evaluation:
        if not request.episodes:
            raise ConfigError(f"{where}: episodes: an evaluation needs a number of episodes for each task.")
        held_out_seeds(request.first_seed, request.episodes)
    elif request.first_seed:
        raise ConfigError(
            f"{where}: first_seed: only an evaluation chooses its seeds, {HELD_OUT_SEEDS.start} or later; "
            "others go on in each robot's training seeds. Leave it 0."
        )


def lease_priority(purpose: str, priority: int) -> int:
    """What a lease for `purpose` is given; 0 asks for the usual. Raises `RejectedError`, naming the field."""
    if not purpose or len(purpose) > 60 or not purpose.isprintable():
        raise RejectedError("purpose: say in up to 60 characters what the robot is needed for.")
    if purpose == ESTOP:
        raise RejectedError(
            "purpose: 'estop' is the emergency stop's own. Stop the robot at the page, or say another word."
        )
    found = priority or int(_USUAL_PRIORITIES.get(purpose, MAINTENANCE))
    if not 0 < found < Priority.estop:
        raise RejectedError(
            f"priority: {found} is not possible; give 1 to {Priority.estop - 1}, or 0 for the usual one."
        )
    return found


def lease_ttl_ns(ttl_s: float) -> int:
    """A time to live as a client asks for it. Raises `RejectedError`, naming the field."""
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise RejectedError(f"ttl_s: {ttl_s:g} s is not possible; give {MIN_TTL_S:g} to {MAX_TTL_S:g} s.")
    return round(ttl_s * 1e9)


def same_key(holder: str, peer: str) -> bool:
    """Whether two connections have one key: a client whose connection was cut comes back by another one."""
    return holder.partition(PEER_SUFFIX)[0] == peer.partition(PEER_SUFFIX)[0]


def check_robot(robot: str) -> None:
    """Raise `RejectedError` for what is too long to be a robot's name: it is not repeated in full."""
    if len(robot) > MAX_NAME_LENGTH:
        raise RejectedError(
            f"robot: '{robot[:MAX_NAME_LENGTH]}' and so on cannot be a name: it has more than {MAX_NAME_LENGTH} "
            "characters."
        )


def check_release(lease: Lease, peer: str, number: int, is_job: Callable[[str], bool]) -> None:
    """Raise `RejectedError` for a lease that `peer` may not end: one of somebody else, unless `number` is 0."""
    robot, holder = lease.robot, lease.holder
    if lease.purpose == ESTOP:
        raise RejectedError(f"robot '{robot}' is stopped by '{holder}'. Release the stop at the page or at the robot.")
    if number == 0 and is_job(holder):
        raise RejectedError(
            f"robot '{robot}' works on job '{holder}'. Cancel the job, or take a lease of the robot, which outranks it."
        )
    if number != 0 and not same_key(holder, peer):
        raise RejectedError(f"robot '{robot}' is held by '{holder}' ({lease.purpose}). Only its holder gives it back.")
