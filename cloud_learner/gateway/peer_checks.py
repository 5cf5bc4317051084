"""Whether what a peer says can be kept and shown: names of a length, numbers that a database holds."""

from __future__ import annotations

import math
from collections.abc import Callable

from wire.errors import RejectedError
from wire.messages.gateway import EdgeEvent, Evaluation, Hello, Preview
from wire.types import RobotSpec, Role

_EVENT_CHARS, _KIND_CHARS = 2000, 64
_LATEST_NS = 2**62


def check_hello(hello: Hello) -> None:
    """Raise `RejectedError`, naming the field, for what is too long or too large to be kept."""
    texts = {"name": (hello.name, 64), "role": (hello.role, 64), "clock": (hello.clock, 200), "site": (hello.site, 200)}
    for field, (text, most) in texts.items():
        if len(text) > most:
            raise RejectedError(f"{field}: {text[:40]!r} and so on has {len(text)} characters; {most} are taken.")
    if len(hello.tasks) > 1000 or any(len(task) > 200 for task in hello.tasks):
        raise RejectedError("tasks: up to 1000 are taken, of up to 200 characters each.")
    check_time(hello.sent_ns)
    if not 0 <= hello.pid < _LATEST_NS:
        raise RejectedError(f"pid: {hello.pid} cannot be.")


def location(address: str, pid: int, site: str) -> str:
    """Where a process runs, as a person would look for it."""
    return f"at {address or 'an unknown address'}{f' ({site})' if site else ''}, process {pid}"


def second_of_a_name(name: str, there: str, here: str) -> str:
    """What is said to a second robot of one name."""
    return (
        f"name: there is a robot '{name}' already, {there}; this one is {here}. Give each robot a name and a key "
        "of its own: `vla-fleet keys NAME`, then `vla-fleet edge --name NAME`."
    )


def too_many_clocks(name: str) -> str:
    """What is said to a peer whose clock was another one again and again."""
    return (
        f"clock: '{name}' said hello with more clocks than its computer can have: one is new after each boot. It is "
        "let in again within a minute. If its computer starts over and over, look why."
    )


def spec_mismatch(peer: str, hello: Hello, refusal: Callable[[RobotSpec], str]) -> str:
    """Why the robot of `hello` is none that can work here, with the field; '' when it is one. `refusal`: as
    `AdmittedRobots` has it."""
    if hello.spec is not None:
        return f"spec: robot '{peer}': {why}" if (why := refusal(hello.spec)) else ""
    if hello.role == Role.edge:
        return f"spec: robot '{peer}' did not say what it measures and accepts. Start it with `vla-fleet edge`."
    return ""


def check_time(sent_ns: int) -> int:
    """`sent_ns`, of a peer's clock. Raises `RejectedError` when it cannot be."""
    if not 0 <= sent_ns < _LATEST_NS:
        raise RejectedError(f"sent_ns: {sent_ns} cannot be.")
    return sent_ns


def check_evaluation(evaluation: Evaluation) -> None:
    """Raise `RejectedError`, naming the field, for what cannot be kept or shown."""
    texts = {"label": evaluation.label, **{f"success: task {task[:40]!r}": task for task in evaluation.success}}
    for field, text in texts.items():
        if len(text) > 200:
            raise RejectedError(f"{field}: {len(text)} characters; 200 are taken.")
    if len(evaluation.success) > 1000:
        raise RejectedError(f"success: {len(evaluation.success)} tasks; 1000 are taken.")
    if not math.isfinite(evaluation.duration_s):
        raise RejectedError(f"duration_s: {evaluation.duration_s} is no time.")
    for field in ("number", "episodes", "first_seed", "started_ns"):
        if not 0 <= getattr(evaluation, field) < _LATEST_NS:
            raise RejectedError(f"{field}: {getattr(evaluation, field)} cannot be.")
    if evaluation.outcomes.keys() - evaluation.success.keys():
        raise RejectedError("outcomes: of a task without success.")
    if any(len(won) != evaluation.episodes for won in evaluation.outcomes.values()):
        raise RejectedError(f"outcomes: each task has {evaluation.episodes}, one for each episode.")
    if not all(0 <= share <= 1 for share in evaluation.success.values()):
        raise RejectedError("success: a share is from 0 to 1.")


def check_preview(preview: Preview, spec: RobotSpec | None) -> None:
    """Raise `RejectedError` for a picture of a camera that the robot has not: one of each is kept."""
    if spec is None or all(preview.camera != camera.name for camera in spec.cameras):
        raise RejectedError(f"camera: a picture of {preview.camera[:64]!r}, which is no camera of '{preview.robot}'.")


def event_text(event: EdgeEvent) -> tuple[str, str]:
    """(kind, detail) of an event, as long as they are kept."""
    return event.kind[:_KIND_CHARS], event.detail[:_EVENT_CHARS]
