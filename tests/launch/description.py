"""Carries out a launch file against the stand-ins and tells what it would start."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "launch"
STANDINS = Path(__file__).parent / "standins"
SHARE = "share:vla_fleet/launch/"
_OURS = ("launch", "launch_ros")


@dataclass
class Started:
    """One node or process that would be started."""

    kind: str
    """Node, LifecycleNode or ExecuteProcess"""
    what: tuple[str, ...]
    """package and executable of a node, command line of a process"""
    name: str = ""
    namespace: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    respawn: bool = False
    stop_s: float = 5.0
    after: str = ""
    """name of the process whose end it waits for"""


@dataclass
class Described:
    """What a launch file comes to with certain arguments."""

    declared: dict[str, tuple[str, str]] = field(default_factory=dict)
    """argument of the file itself: default and description"""
    started: list[Started] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def named(self, name: str) -> list[Started]:
        return [one for one in self.started if one.name == name]


@contextlib.contextmanager
def standins() -> Iterator[None]:
    """`launch` and `launch_ros` are the stand-ins meanwhile."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] in _OURS}
    for name in kept:
        del sys.modules[name]
    sys.path.insert(0, str(STANDINS))
    try:
        yield
    finally:
        sys.path.remove(str(STANDINS))
        for name in [name for name in sys.modules if name.split(".")[0] in _OURS]:
            del sys.modules[name]
        sys.modules.update(kept)


def describe(file: str, **arguments: str) -> Described:
    """What `ros2 launch vla_fleet FILE name:=value ...` would do."""
    with standins():
        from launch import LaunchContext

        context = LaunchContext()
        context.launch_configurations.update(arguments)
        described = Described()
        _Visit(context, described, own=True).file(FILES / file)
        unknown = set(arguments) - set(described.declared)
        assert not unknown, f"{file} has no argument {unknown}"
        return described


class _Visit:
    def __init__(self, context: Any, into: Described, own: bool, after: str = "") -> None:
        from launch.substitutions import perform

        self.context, self.into, self.own, self.after = context, into, own, after
        self.text = lambda value: perform(context, value)

    def file(self, path: Path) -> None:
        scope: dict[str, Any] = {"__file__": str(path), "__name__": path.stem}
        exec(compile(path.read_text(), path, "exec"), scope)
        self.all(scope["generate_launch_description"]().entities)

    def all(self, entities: Any) -> None:
        for entity in entities or ():
            getattr(self, f"_{type(entity).__name__}")(entity)

    def _DeclareLaunchArgument(self, it: Any) -> None:
        if it.default_value is not None:
            self.context.launch_configurations.setdefault(it.name, self.text(it.default_value))
        assert it.name in self.context.launch_configurations, f"argument {it.name} has no value"
        if self.own:
            self.into.declared[it.name] = (it.default_value, it.description)

    def _OpaqueFunction(self, it: Any) -> None:
        self.all(it.function(self.context))

    def _SetEnvironmentVariable(self, it: Any) -> None:
        self.into.environment[self.text(it.name)] = self.text(it.value)

    def _GroupAction(self, it: Any) -> None:
        before = dict(self.context.launch_configurations)
        self.all(it.actions)
        if it.scoped:
            self.context.launch_configurations.clear()
            self.context.launch_configurations.update(before)

    def _IncludeLaunchDescription(self, it: Any) -> None:
        path = self.text(it.source.path)
        assert path.startswith(SHARE), path
        self.context.launch_configurations.update({name: self.text(value) for name, value in it.arguments.items()})
        included = Described()
        inner = _Visit(self.context, included, own=True)
        inner.file(FILES / path.removeprefix(SHARE))
        unknown = set(it.arguments) - set(included.declared)
        assert not unknown, f"{path} has no argument {unknown}"
        self.into.started += included.started
        self.into.environment.update(included.environment)

    def _RegisterEventHandler(self, it: Any) -> None:
        handler = it.event_handler
        assert type(handler).__name__ == "OnProcessExit"
        _Visit(self.context, self.into, self.own, after=self.text(handler.target_action.name)).all(handler.on_exit)

    def _ExecuteProcess(self, it: Any) -> None:
        command = tuple(self.text(part) for part in it.cmd)
        assert all(isinstance(part, str) for part in command), command
        started = Started("ExecuteProcess", command, self.text(it.name))
        self._add(started, it)

    def _Node(self, it: Any) -> None:
        parameters: dict[str, Any] = {}
        for given in it.parameters:
            parameters.update({name: self._value(value) for name, value in given.items()})
        started = Started(
            type(it).__name__,
            (self.text(it.package), self.text(it.executable)),
            self.text(it.name),
            self.text(it.namespace),
            parameters,
            tuple(self.text(part) for part in it.arguments),
        )
        self._add(started, it)

    _LifecycleNode = _Node

    def _add(self, started: Started, it: Any) -> None:
        respawn = it.respawn if isinstance(it.respawn, bool) else self.text(it.respawn) == "true"
        started.respawn, started.stop_s, started.after = respawn, float(self.text(it.sigterm_timeout)), self.after
        self.into.started.append(started)

    def _value(self, value: Any) -> Any:
        """As `launch_ros` evaluates a parameter with a type."""
        if type(value).__name__ != "ParameterValue":
            return value
        text = self.text(value.value)
        if value.value_type is bool:
            assert text in ("true", "false"), text
            return text == "true"
        return value.value_type(text)
