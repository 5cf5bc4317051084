"""How a command is made of the options of a process, and what every command does first."""

from __future__ import annotations

import dataclasses
import inspect
import signal
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
import typer

from fleet.config.overrides import Overrides, default, taken
from fleet.config.process_options import EdgeOptions
from robot_edge.runtime.log_format import configure_logging

Options = TypeVar("Options")
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]


def command(
    app: typer.Typer, kind: type[Options], name: str | None = None, hidden: bool = False, log: bool = True
) -> Callable[[Callable[[Options], int | None]], Callable[[Options], int | None]]:
    """Add a command to `app` that parses a `kind` (a dataclass) and calls the decorated function with it.

    Its help is the function's, and its name, unless there is a `name`; what it returns is the exit status. A field for
    overrides stands for those it takes. `log`: whether the process says on its terminal what it does.
    """

    def add(work: Callable[[Options], int | None]) -> Callable[[Options], int | None]:
        def parsed(**given: Any) -> None:
            if log:
                robot = given["name"] if issubclass(kind, EdgeOptions) else ""
                configure_logging(given.get("part") or name or work.__name__, robot)
            if status := work(_made(kind, given)):
                raise typer.Exit(status)

        parsed.__name__, parsed.__doc__, parsed.__annotations__ = work.__name__, work.__doc__, {}
        parsed.__signature__ = inspect.Signature(list(_parameters(kind)))  # type: ignore[attr-defined]
        app.command(name=name, hidden=hidden)(parsed)
        return work

    return add


def _parameters(kind: type, only: tuple[str, ...] = ()) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for one in dataclasses.fields(kind):
        if names := taken(hints[one.name]):
            yield from _parameters(Overrides, names)
        elif not only or one.name in only:
            value = default(one)
            value = inspect.Parameter.empty if value is dataclasses.MISSING else value
            yield inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hints[one.name])


def _made(kind: type[Options], given: dict[str, Any]) -> Options:
    values = dict(given)
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if names := taken(hint):
            values[name] = Overrides(**{each: values.pop(each) for each in names})
    return kind(**values)


def echo_json(value: object) -> None:
    """For programs."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


def take_interrupts() -> None:
    """Have both signals raise `KeyboardInterrupt`: a shell lets what it starts in the background ignore Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
