"""Where the parts of a fleet run: as children of this process, or across the nodes of a Ray cluster."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from robot_edge.runtime.forking import Start, start_program
from robot_edge.runtime.supervisor import Child, Supervisor
from wire.errors import ConfigError
from wire.types import Role

EVERYWHERE = ("0.0.0.0", "::", "*")
_SAY_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of a fleet: a `vla-fleet` command that is kept running somewhere."""

    name: str
    role: Role
    """what it needs of its place"""
    argv: tuple[str, ...]
    """the command after `vla-fleet`, without --data and --keys: each place has its own"""
    nice: int = 0
    """added to the niceness of whoever starts it"""
    restart: bool = True
    """start it again when it ends by itself"""
    give_up_after: int = 5
    """deaths in a row after which it is left dead; 0: never"""


class ProcessState(msgspec.Struct, frozen=True):
    """How a part is."""

    running: bool = False
    starts: int = 0
    """how often its process was started"""
    failed: str = ""
    """given up, and why"""
    fault: str = ""
    """why it does not run, or why it had to be started again just now"""
    address: str = ""
    """where others reach it, tcp://HOST:PORT: a think server's"""
    steps_recorded: int | None = None
    """a stopped robot's: steps its spool ever took in; None: not known"""


class Backend(Protocol):
    """Keeps parts running. Call `poll` a few times a second."""

    @property
    def parts(self) -> Mapping[str, ProcessState]:
        """Every part that was ever started, by name."""
        ...

    def robots(self) -> Mapping[str, str]:
        """The robots there are now, by name: the host name each is on, '' for this machine."""
        ...

    def start(self, part: ProcessSpec) -> None:
        """Start `part`, as soon as there is a place for it; one of its name must not be running."""
        ...

    def poll(self) -> list[str]:
        """Start dead parts again. What there is to say about parts and robots, each in a sentence and once."""
        ...

    def stop(self, names: list[str], grace_s: float) -> None:
        """Ask `names` to end, all at once, and kill those still there after `grace_s`; unknown names are no error."""
        ...


def command(part: ProcessSpec, data: Path, keys: Path | None = None) -> list[str]:
    """What starts `part` on this machine. Only the gateway takes no `--keys`: its keys are its data's."""
    keyed = ["--keys", str(keys)] if keys is not None and part.role != Role.gateway else []
    return [sys.executable, "-m", "fleet.cli", *part.argv, "--data", str(data), *keyed]


def free_port(port: int, host: str, option: str = "--port") -> int:
    """`port` if it is free, any free one for 0. Raises `ConfigError` that names the option to change."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host in EVERYWHERE else host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used: {error.strerror}. Stop the program that uses it or choose "
                f"another with {option} (0 takes a free one)."
            ) from error
        return probe.getsockname()[1]


class LocalBackend:
    """All parts are processes of this machine."""

    def __init__(
        self,
        data: Path,
        logs: Path,
        robots: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        start: Callable[[Role], Start] = lambda role: start_program,
    ) -> None:
        """`robots`: names of the simulated robots of this machine; `environment`: added for every part; `host`: address
        on which a think server listens; `start`: how a part of a role is started."""
        self._data = data
        self._logs = logs
        self._robots = dict.fromkeys(robots, "")
        self._environment = dict(environment or {})
        self._host = host
        self._start = start
        self._addresses: dict[str, str] = {}
        self._supervisor = Supervisor([])
        self._news = News()

    @property
    def parts(self) -> Mapping[str, ProcessState]:
        return {name: self._state(child) for name, child in self._supervisor.children.items()}

    def robots(self) -> Mapping[str, str]:
        return self._robots

    def start(self, part: ProcessSpec, keys: Path | None = None) -> None:
        if part.role == Role.thinker:
            port = free_port(0, self._host)
            self._addresses[part.name] = f"tcp://{self._host}:{port}"
            part = replace(part, argv=(*part.argv, "--host", self._host, "--port", str(port)))
        self._supervisor.children[part.name] = Child(
            part.name,
            command(part, self._data, keys),
            self._logs / f"{part.name}.log",
            environment=self._environment,
            nice=part.nice,
            restart=part.restart,
            give_up_after=part.give_up_after,
            start=self._start(part.role),
        )
        self._supervisor.start(part.name)

    def poll(self) -> list[str]:
        said = []
        for name in self._supervisor.poll():
            fault = self._state(self._supervisor.children[name]).fault
            # One without fault ran once, to its end.
            if fault and self._news.is_new(name, fault):
                said.append(fault)
        return said

    def stop(self, names: list[str], grace_s: float) -> None:
        self._supervisor.stop([name for name in names if name in self._supervisor.children], grace_s)

    def _state(self, child: Child) -> ProcessState:
        return ProcessState(
            running=child.running,
            starts=child.starts,
            failed=child.failed,
            fault=child.failed or child.fault,
            address=self._addresses.get(child.name, ""),
        )


class News:
    """Tells what was said already, so that a part that dies every few seconds is not reported every time."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, float]] = {}

    def is_new(self, about: str, text: str) -> bool:
        """Whether `text` is another one than the last about the same, or that is a minute ago."""
        before, at_s = self._said.get(about, ("", 0.0))
        now_s = time.monotonic()
        if text == before and now_s - at_s < _SAY_AGAIN_S:
            return False
        self._said[about] = (text, now_s)
        return True
