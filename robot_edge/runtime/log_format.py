"""How a process writes its log: lines for people, or one JSON object a line where VLA_FLEET_LOG_FORMAT is `json`.

The variable is inherited by whatever a process starts, so one setting is for a whole fleet.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType

import msgspec

from wire.errors import ConfigError

FORMAT = "VLA_FLEET_LOG_FORMAT"
LEVEL = "VLA_FLEET_LOG"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_JSON = "json"

log = logging.getLogger(__name__)


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a log as JSON."""

    time: str
    """UTC, ISO 8601"""
    level: str
    logger: str
    message: str
    process: str
    """gateway, trainer, control, ...: the command, or the part of a robot"""
    pid: int
    robot: str = ""
    exception: str = ""
    """traceback"""


class JsonFormatter(logging.Formatter):
    """Makes a `LogLine` of a record."""

    def __init__(self, process: str, robot: str) -> None:
        super().__init__()
        self._process, self._robot = process, robot

    def format(self, record: logging.LogRecord) -> str:
        line = LogLine(
            datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            record.levelname,
            record.name,
            record.getMessage(),
            self._process,
            record.process or os.getpid(),
            self._robot,
            self.formatException(record.exc_info) if record.exc_info else "",
        )
        return msgspec.json.encode(line).decode()


def configure_logging(process: str, robot: str = "") -> None:
    """Have this process log to its standard error as the environment says.

    `process`, `robot`: what it is, and whose. What ends the process unforeseen, or one of its threads, is a line of
    JSON as well. Raises `ConfigError` for a format that there is not.
    """
    kind = os.environ.get(FORMAT, "")
    if kind not in ("", "text", _JSON):
        raise ConfigError(f"{FORMAT} is '{kind}': set it to {_JSON}, or leave it out for lines of text.")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_TEXT))
    if kind == _JSON:
        handler.setFormatter(JsonFormatter(process, robot))
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_of_thread
    logging.basicConfig(level=os.environ.get(LEVEL, "INFO"), handlers=[handler])


def report_end(program: str, reason: str) -> None:
    """Say why this process ends: its last line, as text or as JSON."""
    if os.environ.get(FORMAT) == _JSON:
        log.critical("%s: %s", program, reason)
    else:
        sys.stderr.write(f"{program}: {reason}\n")
    sys.stderr.flush()


def message_of(line: str) -> str:
    """What a line of a log says: its message where it is a `LogLine`, else the line."""
    try:
        return msgspec.json.decode(line, type=LogLine).message if line.startswith("{") else line
    except msgspec.MsgspecError:
        return line


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _log_uncaught_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
