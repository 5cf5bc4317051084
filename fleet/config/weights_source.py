"""Where weights come from, as people say it: `eval`, `compare` and `--from` take the same words.

untrained           the policy's first weights
FILE.safetensors    a weights file
DATA[:VERSION]      of a fleet's data directory: a version's number, newest or current (what robots run);
                    of what `vla-fleet train` wrote, or of either: trained
DIR                 a lerobot checkpoint
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from wire.errors import ConfigError, CorruptDataError, storage_errors

if TYPE_CHECKING:
    from fleet.config.data_directory import DataDirectory, RunIdentity

_WORDS = ("newest", "current", "trained")
_CHECKPOINT = "config.json"
"""what every lerobot checkpoint has"""


class SourceKind(StrEnum):
    """What is there."""

    untrained = "untrained"
    file = "file"
    version = "version"
    """of a data directory"""
    checkpoint = "checkpoint"
    """of lerobot: a policy of its own"""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A weights file and what it is called."""

    data: bytes
    version: int
    """its number; 0 for what was never published"""
    sha256: str


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where weights come from; nothing is read before `read`."""

    kind: SourceKind
    path: Path = Path()
    """absolute; file or directory"""
    version: str = ""
    """of a data directory: a number, or one of newest, current, trained; '': newest, else trained"""

    def __str__(self) -> str:
        if self.kind == SourceKind.untrained:
            return self.kind
        return f"{self.path}:{self.version}" if self.version else str(self.path)

    @property
    def home(self) -> DataDirectory | None:
        """The data directory that says what made the weights, if there is one."""
        from fleet.config.data_directory import DataDirectory

        if self.kind not in (SourceKind.file, SourceKind.version):
            return None
        return DataDirectory(self.path.parent if self.kind == SourceKind.file else self.path)

    def identity(self) -> RunIdentity | None:
        """Recipe and policy that the weights belong to, as far as their directory tells. Raises `StorageError`."""
        return self.home.identity() if self.home is not None else None

    def read(self) -> LoadedWeights | None:
        """The weights; None for a policy's first ones.

        Raises `ConfigError` for a version that is not there, `StorageError` or `CorruptDataError` for what cannot be
        read.
        """
        if self.home is None:
            return None
        if self.kind == SourceKind.file:
            return _read_file(self.path)
        if self.version == "trained" or (not self.version and not _has_versions(self.home)):
            return _read_trained(self.home)
        wanted: int | None = None
        if self.version not in ("", "newest"):
            wanted = _current(self.home) if self.version == "current" else int(self.version)
        number, data = read_version(self.home.root, wanted)
        return LoadedWeights(data, number, hashlib.sha256(data).hexdigest())


def parse_source(text: str, what: str = "weights") -> WeightsSource:
    """What `text` names. Raises `ConfigError` that begins with `what` and `text`."""
    if text == SourceKind.untrained:
        return WeightsSource(SourceKind.untrained)
    path, version = Path(text).expanduser(), ""
    if not path.exists() and ":" in text:
        before, _, version = text.rpartition(":")
        path = Path(before).expanduser()
        if version not in _WORDS and not (version.isdecimal() and int(version)):
            raise ConfigError(
                f"{what} {text}: a version is a number from 1 on, {', '.join(_WORDS[:-1])} or {_WORDS[-1]}."
            )
    path = path.resolve()
    if path.is_file():
        if version:
            raise ConfigError(
                f"{what} {text}: {path} is a file, which has no versions: leave version {version} out, or say the data "
                "directory of the fleet that published it."
            )
        return WeightsSource(SourceKind.file, path)
    if not path.is_dir():
        raise ConfigError(
            f"{what} {text}: there is no {path}. Say a weights file, DATA or DATA:VERSION, the directory of a lerobot "
            "checkpoint, or untrained."
        )
    if (path / _CHECKPOINT).is_file() and not version:
        return WeightsSource(SourceKind.checkpoint, path)
    return WeightsSource(SourceKind.version, path, version)


def read_version(root: Path, version: int | None) -> tuple[int, bytes]:
    """Number and weights of a version of the fleet below `root`, None for the newest.

    Raises `ConfigError` for one that is not there, and whose file went with other old ones; `StorageError`,
    `CorruptDataError`.
    """
    from fleet.config.data_directory import DataDirectory

    data = DataDirectory(root)
    with data.open_buffer() as (ledger, _store):
        newest = ledger.newest_version()
        if newest is None:
            raise ConfigError(f"--data {root}: nothing was published there yet.")
        most = newest.version.number
        number = most if version is None else version
        row = ledger.version(number) if 1 <= number <= most else None
        if row is None:
            raise ConfigError(
                f"there is no version {number} in {root}, which has 1 to {most}. Say one of these, or newest."
            )
    path = data.weights / row.path
    with storage_errors(f"reading version {number}", path):
        try:
            weights = path.read_bytes()
        except FileNotFoundError as error:
            raise ConfigError(
                f"version {number} of {root} is not kept any more: {path} is gone. Take newest, or one whose file is "
                f"in {data.weights}."
            ) from error
    if hashlib.sha256(weights).hexdigest() != row.version.sha256:
        raise CorruptDataError(f"{path} is not what was published as version {number}. Take another version.")
    return number, weights


def _read_file(path: Path) -> LoadedWeights:
    with storage_errors("reading weights", path):
        data = path.read_bytes()
    return LoadedWeights(data, 0, hashlib.sha256(data).hexdigest())


def _read_trained(data: DataDirectory) -> LoadedWeights:
    if not data.trained.exists():
        raise ConfigError(
            f"{data.root} has no weights: no fleet has published a version there, and `vla-fleet train` has not ended."
        )
    return _read_file(data.trained)


def _has_versions(data: DataDirectory) -> bool:
    if not data.buffer.exists():
        return False
    with data.open_buffer() as (ledger, _store):
        return ledger.newest_version() is not None


def _current(data: DataDirectory) -> int:
    """What robots run that are neither pinned nor chosen for a trial."""
    from cloud_learner.rollout.records import decode_state

    with data.open_buffer() as (ledger, store):
        # which gateway's robots: that of the journal here
        kept = ledger.kept_rollout() if store.journal_is_here() else ""
    number = decode_state(kept).current
    if not number:
        raise ConfigError(f"{data.root}: no version is current there. Say a number, or newest.")
    return number
