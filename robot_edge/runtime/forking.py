"""Starts processes that are there at once: forks of one that has imported what they need, and is nothing else yet.

Importing takes a process seconds of processor time and hundreds of megabytes; a fork takes milliseconds and shares the
memory. What is forked must have one thread and neither a ZeroMQ nor a GL nor a CUDA context: libraries that have begun
to work do not survive it. Where that cannot be had, `start_program` starts a new program, as a shell would.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from hal.driver_host.priority import set_niceness
from robot_edge.runtime.lifecycle import watch

log = logging.getLogger(__name__)

_IMPORTING = {
    # A thread pool does not survive a fork.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""the environment libraries are imported in, where it does not say otherwise"""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_FIRST_FREE = 3


class Forked:
    """A process that was forked, as its starter sees it: like `subprocess.Popen`."""

    def __init__(self, pid: int, command: list[str]) -> None:
        self.pid = pid
        self._command = command
        self._status: int | None = None

    def poll(self) -> int | None:
        """None while it runs, then its exit status, or minus the signal that ended it."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """The same at its end. Raises `subprocess.TimeoutExpired` when that does not come within `timeout` seconds."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        pause_s = 0.001
        while (status := self.poll()) is None:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
            time.sleep(pause_s)
            pause_s = min(0.05, 2 * pause_s)
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Until it is waited for, its id is nobody else's.
        if self.poll() is None:
            os.kill(self.pid, number)


Process = subprocess.Popen[bytes] | Forked
Start = Callable[[list[str], Mapping[str, str], int, int], Process]
"""(command, environment, file descriptor of its standard output and error, niceness): starts a process that leads a
session of its own, for Ctrl-C goes to its starter alone, which ends it in order"""


def start_program(command: list[str], environment: Mapping[str, str], output: int, niceness: int) -> Process:
    """A `Start`: a new program. Raises `OSError` when there is none."""
    started = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
    )
    if niceness != os.getpriority(os.PRIO_PROCESS, 0):
        set_niceness(started.pid, niceness)
    return started


def start_fork(command: list[str], environment: Mapping[str, str], output: int, niceness: int) -> Process:
    """A `Start`: a fork of this process if that is safe and spares the command something, else a new program."""
    if not can_fork(command):
        return start_program(command, environment, output, niceness)
    # The children watch this process by it, whatever happens to process ids.
    parent = os.pidfd_open(os.getpid())
    try:
        return Forked(fork(command, environment, output, niceness, parent), command)
    finally:
        os.close(parent)


# --- what is shared ---------------------------------------------------------------------------------------------------


class _Shared:
    """What this process imported for its forks."""

    ready = False
    """whether it did"""
    descriptors: frozenset[int] = frozenset()
    """files that libraries opened when they were imported"""
    environment: dict[str, str] = {}  # noqa: RUF012 - of the process, not of an instance
    """variables that they set"""
    threads = 1
    """of the system that may run here when it forks"""


@contextlib.contextmanager
def preloading() -> Iterator[Callable[[str], None]]:
    """Import modules for forks of this process: gives a function that takes `module`, or `module:function` to call.

    Modules that are not installed are left out: whoever needs them says so itself.
    """
    given = {name: value for name, value in _IMPORTING.items() if name not in os.environ}
    os.environ.update(given)
    before, variables = _descriptors(), dict(os.environ)
    gc.disable()
    try:
        yield _load
    finally:
        gc.enable()
        # A collection writes into every object: what is never collected stays shared.
        gc.freeze()
        _Shared.descriptors |= _descriptors() - before
        _Shared.environment |= {k: v for k, v in os.environ.items() if variables.get(k) != v}
        _Shared.ready = True
        for name in given:
            os.environ.pop(name, None)


def preload(modules: Iterable[str]) -> None:
    """Import `modules` as `preloading` does, unless this process is a fork of one that has done so."""
    if _Shared.ready or not forks_here():
        return
    if threading.active_count() == 1:
        # A pool that numpy's OpenBLAS has begun by now ends by itself before a fork.
        _Shared.threads = _threads()
    with preloading() as load:
        for module in modules:
            load(module)


def forks_here() -> bool:
    """Whether this system can fork processes that are watched safely: Linux can, macOS cannot."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def can_fork(command: list[str]) -> bool:
    """Whether this process can be forked for `command`: `python -m MODULE ...` with a MODULE that is loaded."""
    if not _Shared.ready or command[:2] != [sys.executable, "-m"]:
        return False
    if not hasattr(_module(command[2]), "main"):
        return False
    if threading.active_count() > 1 or _threads() > _Shared.threads:
        log.warning("%d threads run here, so %s starts as a new program.", _threads(), " ".join(command[2:5]))
        return False
    return True


def _module(name: str) -> ModuleType | None:
    """What `python -m name` runs, if it is loaded."""
    return sys.modules.get(f"{name}.__main__", sys.modules.get(name))


def has_gpu() -> bool:
    """Whether programs of this machine may use a GPU: to ask a library would begin to use it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _load(name: str) -> None:
    module, _, function = name.partition(":")
    try:
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
    except Exception as error:  # noqa: BLE001 - it fails again, and is told, where it is needed
        log.info("%s is not shared (%s: %s).", name, type(error).__name__, error)


def _descriptors() -> frozenset[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            # Not the one that was open to list them.
            os.fstat(int(name))
            found.append(int(name))
    return frozenset(found)


# --- the fork ---------------------------------------------------------------------------------------------------------


def fork(
    command: list[str],
    environment: Mapping[str, str],
    output: int,
    niceness: int,
    parent: int,
    begun: Callable[[int], None] = lambda pid: None,
) -> int:
    """Fork this process for a command that it `can_fork`; the child's process id.

    `parent`: descriptor (pidfd) of the process whose end the child does not survive. `begun` is told the child's
    process id before the child does anything; a child nobody was told of ends with this process. Raises `OSError`.
    """
    waits, goes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal must find either the parent's handlers in the parent or none in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            os.close(goes)
            if not os.read(waits, 1):
                os._exit(1)
            _become(command, environment, output, niceness, parent, mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with os.fdopen(goes, "wb"), os.fdopen(waits):
        begun(pid)
        os.write(goes, b"1")
    return pid


def _become(
    command: list[str],
    environment: Mapping[str, str],
    output: int,
    niceness: int,
    parent: int,
    mask: set[int | signal.Signals],
) -> NoReturn:
    """In the child: be the command, as if it had been started by itself."""
    status = 1
    try:
        os.setsid()
        _forget_signals(mask)
        _arrange_files(output, parent)
        os.environ.clear()
        os.environ.update({**_Shared.environment, **environment})
        watch(parent)
        rename(command)
        logging.root.handlers.clear()
        if (numpy := sys.modules.get("numpy")) is not None:
            # Python's own generator and what asks the system do this by themselves; torch begins with the same anyway.
            numpy.random.seed()
        if niceness != os.getpriority(os.PRIO_PROCESS, 0):
            set_niceness(os.getpid(), niceness)
        module = _module(command[2])
        assert module is not None
        # Processes that multiprocessing spawns look there for what to import.
        sys.modules["__main__"] = module
        sys.argv = [str(module.__file__), *command[3:]]
        status = _run(module.main)
    except BaseException as error:  # noqa: BLE001 - whatever it is must not go on as the parent
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _run(main: Callable[[], object]) -> int:
    """The exit status Python would end with after `main`, with what it does before its end."""
    try:
        main()
        status = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            status = error.code or 0
        else:
            sys.stderr.write(f"{error.code}\n")
            status = 1
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status & 0xFF


def _forget_signals(mask: set[int | signal.Signals]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _arrange_files(output: int, parent: int) -> None:
    """Standard input from nowhere, standard output and error to `output`, all else closed but what libraries opened.

    A file of the parent that stayed open would keep its lock after the parent's end.
    """
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nowhere, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    keep = {parent} | _Shared.descriptors
    for descriptor in _descriptors():
        if descriptor >= _FIRST_FREE and descriptor not in keep:
            os.close(descriptor)


def rename(command: list[str]) -> None:
    """Have `ps` and /proc show `command`, as far as there is room: the bytes of this process's own command line.

    There is always room, as the name of the program, for the word that says what part it is.
    """
    words = [word for word in command[3:] if word != "edge-part"]
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(words[0] if words else command[-1])
    argv = b"\0".join(os.fsencode(word) for word in command) + b"\0"
    try:
        libc = ctypes.CDLL(None)
        location = ctypes.c_void_p.in_dll(libc, "program_invocation_name").value
        shown = Path("/proc/self/cmdline").read_bytes()
    except (OSError, ValueError) as error:
        log.debug("the command line of this process stays that of its parent: %s", error)
        return
    if location is not None and ctypes.string_at(location, len(shown)) == shown:
        ctypes.memmove(location, argv[: len(shown) - 1].ljust(len(shown), b"\0"), len(shown))
