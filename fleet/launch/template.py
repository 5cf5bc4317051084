"""One process that has imported what the parts of a fleet share, and is forked for each of them.

`vla-fleet up` starts it and asks it over a socket for processes; it forks, waits for them and tells how they ended. It
does nothing else, for a process that works cannot be forked (`robot_edge.runtime.forking`). It may die: parts go on,
those started meanwhile are new programs, and another template takes its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from robot_edge.runtime.forking import (
    Forked,
    Process,
    Start,
    can_fork,
    fork,
    forks_here,
    preloading,
    rename,
    start_program,
)
from robot_edge.runtime.lifecycle import PARENT
from robot_edge.runtime.log_files import rotate_log
from robot_edge.runtime.log_format import configure_logging
from wire.errors import storage_errors

if TYPE_CHECKING:
    # It imports numpy, whose threads would keep the template from forking.
    from wire.types import Role

log = logging.getLogger(__name__)

_LARGEST = 1 << 20
_ROOM = 4000
"""characters of the template's own command line, in which its forks show theirs"""
_TIMEOUT_S = 90.0
"""after which a template that has not begun what it was asked for is ended"""
_UNABLE = 3
"""exit status of a template that cannot be forked"""
_LOST = 255
"""exit status of a part that ended while no template was there to see how"""


class _Request(msgspec.Struct, frozen=True):
    number: int
    command: list[str]
    environment: dict[str, str]
    niceness: int
    needs: tuple[str, ...]


class _Started(msgspec.Struct, frozen=True, tag=True):
    number: int
    pid: int


class _Ended(msgspec.Struct, frozen=True, tag=True):
    number: int
    status: int


class _Ready(msgspec.Struct, frozen=True, tag=True):
    """Everything is imported."""


# --- the side that asks -----------------------------------------------------------------------------------------------


class Template:
    """A template process, kept while this context lasts; `starter` gives what starts parts."""

    def __init__(self, needs: Mapping[Role, tuple[str, ...]], log_file: Path) -> None:
        """Only stores. `needs`: modules by role (`process_specs.modules_by_role`)."""
        self._needs = needs
        self._log_file = log_file
        self._link: _TemplateLink | None = None

    def __enter__(self) -> Template:
        if forks_here():
            self._link = self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._link is not None:
            self._link.close()

    @property
    def pid(self) -> int:
        """The template's process id, 0 where there is none."""
        return self._link.process.pid if self._link is not None and self._link.alive else 0

    def starter(self, role: Role) -> Start:
        """How parts of that role are started: forked, or as new programs while or where that is not possible."""
        needs = self._needs.get(role)
        if self._link is None or needs is None:
            return start_program

        def start(command: list[str], environment: Mapping[str, str], output: int, niceness: int) -> Process:
            assert self._link is not None
            self._link.read()
            if not self._link.alive and self._link.close() != _UNABLE:
                log.warning("the template of the parts has gone; another one is made ready.")
                self._link = self._open(first=False)
            if self._link.usable:
                with contextlib.suppress(OSError):
                    return _ForkedPart(self._link, command, dict(environment), output, niceness, needs)
            return start_program(command, environment, output, niceness)

        return start

    def _open(self, first: bool = True) -> _TemplateLink:
        names = list(dict.fromkeys(name for needs in self._needs.values() for name in needs))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with storage_errors("starting the parts' template", self._log_file):
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            rotate_log(self._log_file)
            output = self._log_file.open("ab")
        with theirs, output:
            process = subprocess.Popen(
                [sys.executable, "-m", "fleet.launch.template", str(theirs.fileno()), *names, "." * _ROOM],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={**os.environ, PARENT: str(os.getpid())},
                start_new_session=True,
            )
        return _TemplateLink(ours, process, usable=first)


class _TemplateLink:
    """To one template process, and the parts that are its children."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes], usable: bool) -> None:
        self.process = process
        self.alive = True
        self.usable = usable
        """whether to wait for it is no slower than to start a new program"""
        connection.setblocking(False)
        self._connection = connection
        self.parts: list[_ForkedPart] = []
        """by the number of their request"""
        self._decode = msgspec.msgpack.Decoder(_Started | _Ended | _Ready).decode

    def submit(self, part: _ForkedPart, request: _Request, output: int) -> None:
        """Raises `OSError` when that is not possible now."""
        socket.send_fds(self._connection, [msgspec.msgpack.encode(request)], [output])
        self.parts.append(part)

    def read(self) -> None:
        """Take what the template has said since."""
        while self.alive:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._connection, _LARGEST, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It ended with something of ours unread. What it had said before is still there, and comes now.
                continue
            except OSError:
                data, descriptors = b"", []
            if not data:
                self.alive = self.usable = False
                return
            match self._decode(data):
                case _Started(number, pid):
                    self.parts[number].started(pid, descriptors[0])
                case _Ended(number, status):
                    self.parts[number].ended(status)
                case _Ready():
                    self.usable = True

    def close(self) -> int:
        """End the template, whose parts go on; its exit status."""
        self.alive = self.usable = False
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.process.kill()
        return self.process.wait()


class _ForkedPart(Forked):
    """A process that a template forks; its pid is 0 while it is about to be made."""

    def __init__(
        self,
        link: _TemplateLink,
        command: list[str],
        environment: dict[str, str],
        output: int,
        niceness: int,
        needs: tuple[str, ...],
    ) -> None:
        super().__init__(0, command)
        self._link = link
        self._request = _Request(len(link.parts), command, environment, niceness, needs)
        self._descriptor = -1
        self._program: Process | None = None
        self._deadline_s = time.monotonic() + _TIMEOUT_S
        link.submit(self, self._request, output)
        self._output = os.dup(output)

    def started(self, pid: int, descriptor: int) -> None:
        os.close(self._output)
        self._descriptor = descriptor
        if self._status is not None:
            # It was ended before it began.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        self.pid = pid

    def ended(self, status: int) -> None:
        if self._status is None:
            self._status = status
        os.close(self._descriptor)
        self._descriptor = -1

    def poll(self) -> int | None:
        if self._program is not None:
            return self._program.poll()
        self._link.read()
        if self._status is not None:
            return self._status
        if self.pid == 0:
            self._start_as_program()
        elif not self._link.alive and select.select([self._descriptor], [], [], 0)[0]:
            self.ended(_LOST)
        return self._status

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is not None:
            return
        if self._program is not None:
            os.kill(self._program.pid, number)
        elif self.pid == 0:
            self._status = -number
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def _start_as_program(self) -> None:
        """Be a new program if the template does not come round to it."""
        if self._link.alive and time.monotonic() > self._deadline_s:
            log.error("the template of the parts hangs and is ended.")
            self._link.process.kill()
            self._deadline_s = float("inf")
        if not self._link.alive:
            request = self._request
            self._program = start_program(request.command, request.environment, self._output, request.niceness)
            self.pid = self._program.pid
            os.close(self._output)


# --- the template -----------------------------------------------------------------------------------------------------


class _Server:
    """In the template process: forks what is asked for, imports what nobody has waited for yet, says what ended."""

    def __init__(self, connection: socket.socket, parent: int, modules: list[str]) -> None:
        self._connection = connection
        self._parent = parent
        self._missing = modules
        self._waiting: list[tuple[_Request, int]] = []
        self._children: dict[int, tuple[int, int]] = {}
        """(process id, number) by descriptor"""
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._decode = msgspec.msgpack.Decoder(_Request).decode

    def run(self) -> None:
        """Until whoever asks has gone."""
        while True:
            busy = self._missing or self._waiting
            for descriptor, _ in self._poll.poll(0 if busy else None):
                if descriptor in self._children:
                    self._reap(descriptor)
                elif not self._receive():
                    return
            if self._waiting:
                request, output = self._waiting.pop(0)
                self._import([name for name in self._missing if name in request.needs])
                self._fork(request, output)
            elif self._missing:
                self._import(self._missing[:1])

    def _receive(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._connection, _LARGEST, 1)
        if data:
            self._waiting.append((self._decode(data), descriptors[0]))
        return bool(data)

    def _import(self, names: list[str]) -> None:
        if not names:
            return
        with preloading() as load:
            for name in names:
                load(name)
        self._missing = [name for name in self._missing if name not in names]
        if not self._missing:
            self._send(_Ready())

    def _fork(self, request: _Request, output: int) -> None:
        if not can_fork(request.command):
            log.error("'%s' cannot be forked here: parts start as new programs.", " ".join(request.command[1:4]))
            sys.exit(_UNABLE)

        def begun(pid: int) -> None:
            descriptor = os.pidfd_open(pid)
            self._children[descriptor] = pid, request.number
            self._poll.register(descriptor, select.POLLIN)
            self._send(_Started(request.number, pid), descriptor)

        fork(request.command, request.environment, output, request.niceness, self._parent, begun)
        os.close(output)

    def _reap(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        pid, number = self._children.pop(descriptor)
        _, status = os.waitpid(pid, 0)
        self._send(_Ended(number, os.waitstatus_to_exitcode(status)))

    def _send(self, message: _Started | _Ended | _Ready, *descriptors: int) -> None:
        # Nobody may be there any more; the next look at the connection tells.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._connection, [msgspec.msgpack.encode(message)], list(descriptors))


def main() -> None:
    """`python -m fleet.launch.template DESCRIPTOR MODULE ... ROOM`: serve the socket until its other end closes."""
    configure_logging("template")
    descriptor, *modules, _ = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    parent = os.pidfd_open(os.getppid())
    if str(os.getppid()) != os.environ.get(PARENT):
        return
    rename(["vla-fleet", "template"])
    _Server(connection, parent, modules).run()


if __name__ == "__main__":
    main()
