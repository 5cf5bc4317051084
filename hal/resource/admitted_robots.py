"""Which robots can work in a fleet's job: those of its one shape, or those of several that share a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from hal.resource.capabilities import capabilities_of, missing_requirements, satisfies
from wire.errors import ConfigError, SpecMismatchError, suggest
from wire.messages.fleet import Capabilities, JobRequest
from wire.messages.gateway import Hello
from wire.types import RobotSpec


@dataclass(frozen=True, slots=True)
class RobotShape:
    """Robots of one spec, and what they work on."""

    spec: RobotSpec
    tasks: tuple[str, ...]
    name: str = ""
    """by which people call it, '' where there is but one"""


class AdmittedRobots:
    """The shapes of robots in a job. Never changes."""

    def __init__(self, shapes: Sequence[RobotShape], refusal: Callable[[RobotSpec], str]) -> None:
        """`refusal`: why no robot of a spec can work in the job, with the way out; '' for those that can."""
        self.shapes = tuple(shapes)
        self.refusal = refusal
        self.tasks = tuple(dict.fromkeys(task for shape in self.shapes for task in shape.tasks))
        """what the fleet practises when nobody asks for anything else"""
        self.most_cameras = max(len(shape.spec.cameras) for shape in self.shapes)
        self._by_hash = {shape.spec.hash: shape for shape in self.shapes}

    @classmethod
    def of_one(cls, spec: RobotSpec, tasks: Sequence[str]) -> AdmittedRobots:
        """Robots of `spec` alone."""

        def refusal(other: RobotSpec) -> str:
            try:
                spec.require(other, "the policy of this fleet")
            except SpecMismatchError as error:
                return str(error)
            return ""

        return cls([RobotShape(spec, tuple(tasks))], refusal)

    def tasks_of(self, spec: RobotSpec) -> tuple[str, ...]:
        """What robots of `spec` work on; none for those that are not let in."""
        shape = self._by_hash.get(spec.hash)
        return shape.tasks if shape is not None else ()

    def capabilities(self, spec: RobotSpec, tasks: Sequence[str], site: str) -> Capabilities:
        """Of a robot that says it can do `tasks`, none: whatever it is asked. It is asked for its own shape's alone."""
        own = self.tasks_of(spec)
        return capabilities_of(spec, tuple(task for task in tasks if task in own) or own, site)

    def task_mismatch(self, name: str, hello: Hello) -> str:
        """Why robot `name`, whose spec is one of these, can do nothing here; '' when it can."""
        own = self.tasks_of(hello.spec) if hello.spec is not None else ()
        if not hello.tasks or set(hello.tasks) & set(own):
            return ""
        whose = "such robots of this fleet work" if len(self.shapes) > 1 else "this fleet works"
        return (
            f"tasks: robot '{name}' can do {', '.join(hello.tasks)}, but {whose} on {', '.join(own)}."
            f"{suggest(hello.tasks[0], own)} Start it with the fleet's recipe."
        )

    def job_tasks(self, request: JobRequest, there: Iterable[tuple[str, Capabilities]]) -> tuple[str, ...]:
        """What a job is about: what it says, else all that the robots it asks for can do.

        `there`: robots that have joined. Raises `ConfigError` that says what fits for a task that nobody can do.
        """
        if unknown := [task for task in request.tasks if task not in self.tasks]:
            raise ConfigError(
                f"tasks: this fleet does not know '{unknown[0]}'.{suggest(unknown[0], self.tasks)} "
                f"It knows {self._who_does_what()}."
            )
        need, joined = request.requirement, dict(there)
        if need.robots and all(name in joined for name in need.robots):
            found = [(name, joined[name]) for name in need.robots]
        else:
            # robots of these names, or of any, may still come
            need = msgspec.structs.replace(need, robots=())
            found = [(shape.name or shape.spec.embodiment, self._offer(shape)) for shape in self.shapes]
        need = msgspec.structs.replace(need, site="", tasks=())
        able = [(name, have) for name, have in found if not missing_requirements(need, name, have)]
        if not able:
            # it waits, and says for what
            return request.tasks or self.tasks
        can = {task for _, have in able for task in satisfies(self.tasks, have)}
        if missing := [task for task in request.tasks if task not in can]:
            asked = ", ".join(f"'{name}' can do {', '.join(have.tasks)}" for name, have in able)
            raise ConfigError(
                f"tasks: no robot that the job asks for can do '{missing[0]}': {asked}. This fleet knows "
                f"{self._who_does_what()}."
            )
        return request.tasks or tuple(task for task in self.tasks if task in can)

    def _offer(self, shape: RobotShape) -> Capabilities:
        return capabilities_of(shape.spec, shape.tasks)

    def _who_does_what(self) -> str:
        if len(self.shapes) == 1:
            return ", ".join(self.tasks)
        return "; ".join(f"{', '.join(shape.tasks)} ({shape.name})" for shape in self.shapes)
