"""Every error this project raises on purpose.

    FleetError
    ├── ConfigError            an option, recipe or task that does not exist or cannot work
    ├── WireError
    │   ├── ProtocolError      bytes that are not a message of this protocol
    │   │   ├── ProtocolVersionError   a message of another version of it
    │   │   └── SealError      a segment that is not its robot's, as far as its seal says
    │   ├── MessageTooLargeError   a message above the size cap of its type
    │   └── RejectedError      the other side said no, with its reason
    ├── SpecMismatchError      data or a policy made for another robot
    ├── InvalidDataError       a value that must not be stored or executed (NaN, wrong shape, time going back)
    │   └── NotFiniteError     a gradient step that was not applied
    ├── StorageError
    │   ├── DiskFullError      no room left; what was being written was taken back
    │   ├── NotWritableError   a directory or file that may not be written
    │   ├── NothingStoredError nobody has begun to store anything there
    │   ├── FormatError        what another version of this project wrote
    │   └── CorruptDataError   bytes on disk that do not match their checksum
    ├── RobotError
    │   ├── RenderError        a simulated camera that cannot draw
    │   ├── CameraLostError    a camera beside the robot gives no picture; the robot itself is well
    │   └── RobotDisconnectedError  the process that has the driver ended; a new one knows nothing of the running scene
    └── PolicyError
        └── WeightsError       weights that do not match their hash or their network
            └── HalfLoadedError    they were loaded in part: the policy is neither the old nor the new version

Each message names the thing, the place and the way out.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator


class FleetError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(FleetError):
    """An option, recipe or task that does not exist or cannot work."""


class WireError(FleetError):
    """Something wrong between two processes."""


class ProtocolError(WireError):
    """Bytes that are not a message of this protocol."""

    reason = "malformed"
    """what it is counted as"""


class ProtocolVersionError(ProtocolError):
    """A message of a vla-fleet that speaks another protocol."""

    reason = "version"


class SealError(ProtocolError):
    """A segment that its robot did not seal."""

    reason = "wrong_seal"


class MessageTooLargeError(WireError):
    """A message above the size cap."""

    reason = "too_large"


class RejectedError(WireError):
    """The other side said no."""


class NumberTakenError(RejectedError):
    """Another trainer's version has this number: whoever offers one with it may do so again with the next one."""


class SpecMismatchError(FleetError):
    """Data or a policy made for another robot."""


class InvalidDataError(FleetError):
    """A value that must not be stored or executed."""


class NotFiniteError(InvalidDataError):
    """A gradient step whose loss or gradient is not finite; it was not applied."""


class StorageError(FleetError):
    """Something wrong with what is on disk."""


class DiskFullError(StorageError):
    """No room left on the device."""


class NotWritableError(StorageError):
    """A directory or file that may not be written."""


class NothingStoredError(StorageError):
    """Nobody has begun to store anything there."""


class FormatError(StorageError):
    """What is stored was written by another version of this project."""


class CorruptDataError(StorageError):
    """Bytes on disk that do not match their checksum."""


class RobotError(FleetError):
    """A robot or its driver failed."""


class RenderError(RobotError):
    """A simulated camera cannot draw."""


class CameraLostError(RobotError):
    """A camera beside the robot gives no picture; the robot itself is well and keeps its connection."""


class RobotDisconnectedError(RobotError):
    """The process that has the driver is gone, and with it the scene."""


class RobotStoppedError(RobotError):
    """A robot that somebody stopped does not do that."""


class RobotMovingError(RobotError):
    """A robot that moves does not do that: it has to be held first."""


class PolicyError(FleetError):
    """A policy cannot be built or run."""


class WeightsError(PolicyError):
    """Weights that do not match their hash or their network."""


class HalfLoadedError(WeightsError):
    """Weights that were loaded in part: the policy is neither the old nor the new version, and must not act."""


def suggest(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the known word closest to `word`, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def storage_error(error: OSError, what: str, where: object) -> StorageError:
    """The `StorageError` that says what `error` means for `what` at `where`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"{what}: no space left for {where}. Free some room or choose another --data directory.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NotWritableError(f"{what}: {where} may not be written. Fix its permissions or choose another --data.")
    return StorageError(f"{what}: {where}: {error.strerror or error}.")


@contextlib.contextmanager
def storage_errors(what: str, where: object) -> Iterator[None]:
    """Raises the `StorageError` of what is raised inside when that is an `OSError`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, what, where) from error
