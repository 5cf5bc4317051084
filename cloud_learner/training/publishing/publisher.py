"""Makes of the trainer's weights what is published, beside its thread: the file, its delta, its checks, its hash.

    trainer's thread    Learner.snapshot -> submit ................................ poll -> WeightUploader
    publisher's thread         save -> finite? -> delta from the parent's file -> hash -> actions?

A version *is* what robots rebuild (`wire.weights.delta`): the trainer goes on training its own weights, and what
quantisation left out is in the next delta.

Memory, in sizes of a weights file: one stays, the version published last. While one is made three more are taken at
most: the copy of the weights, on their device, until it is packed, and two of safetensors, which become the file. Then
one and the delta, until that is sent. An `ActionCheck` has a network of its own, and takes up to three more while it
loads.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from torch import nn

from cloud_learner.training.config import PublisherConfig
from cloud_learner.training.publishing.action_checks import VersionCheck
from cloud_learner.training.publishing.published_file import keep_file, read_kept
from cloud_learner.training.status import PublishCounts, VersionFault, VersionMeasures, VersionRefusal
from wire.errors import StorageError, WeightsError
from wire.task_thread import Task, TaskQueue
from wire.types import PolicyVersion
from wire.weights.check import find_not_finite
from wire.weights.delta import DeltaStats, encode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedVersion:
    """A version that may go out."""

    version: PolicyVersion
    """whose number is not known before it goes"""
    trained: frozenset[int]
    """episodes that were first trained on since its parent"""
    file: np.ndarray
    """uint8[size], what robots rebuild"""
    delta: bytearray | None
    """from its parent; None: it goes whole"""
    measures: VersionMeasures


@dataclass(frozen=True, slots=True, eq=False)
class _PublishRequest:
    weights: list[nn.Module]
    """one, and none once it is packed"""
    version: PolicyVersion
    trained: frozenset[int]
    parent_sha256: str
    """'' where the parent is no base"""
    whole: bool


class VersionPublisher:
    """One version at a time: `submit`, then `poll` until it is there. Without `start` it is made by whoever polls.

    Apart from the tasks all methods are for the trainer's thread.
    """

    def __init__(
        self,
        save: Callable[[nn.Module], bytes],
        directory: Path,
        config: PublisherConfig,
        check: VersionCheck | None = None,
    ) -> None:
        """`save` makes a weights file of a snapshot; `directory` is for what a trainer that is started again needs."""
        self.counts = PublishCounts()
        self.busy = False
        """whether a version is being made"""
        self._save, self._directory, self._config, self._check = save, directory, config, check
        self._tasks = TaskQueue("publisher")
        self._prepared: PreparedVersion | None = None
        # of the tasks, which run one after the other
        self._base: tuple[str, np.ndarray] | None = None
        """sha256 and file of the version published last"""
        self._deltas = 0

    def start(self) -> None:
        """Make versions in a thread from now on."""
        self._tasks.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread, after what it is about unless that takes longer."""
        if self._tasks.inline:
            self._tasks.poll()
        if not self._tasks.close(timeout_s):
            log.warning("the version that was being made is given up.")

    def submit(
        self,
        weights: nn.Module,
        version: PolicyVersion,
        trained: frozenset[int],
        parent_sha256: str = "",
        *,
        whole: bool = False,
    ) -> None:
        """Make a version of `weights`, which is the publisher's from now on.

        version: all but its number, sha256 and size
        parent_sha256: of its parent's file, '' where that is not to be had by who takes the version
        """
        if self._check is not None:
            self._check.choose()
        self.busy = True
        wanted = _PublishRequest([weights], version, trained, parent_sha256, whole)
        self._tasks.submit(Task(lambda: self._make(wanted), self._on_made, self._on_failed))

    def poll(self) -> PreparedVersion | None:
        """What was made since the last call. Raises what making it raised."""
        self._tasks.poll()
        prepared, self._prepared = self._prepared, None
        return prepared

    def on_published(self, prepared: PreparedVersion) -> None:
        """The gateway has it: the next delta is from it."""
        self._tasks.submit(Task(lambda: self._rebase(prepared)))

    def on_checkpoint(self, number: int) -> None:
        """A checkpoint goes on from version `number`, the one published last: its file has to be there then."""
        self._tasks.submit(Task(lambda: self._keep(number)))

    # --- in the trainer's thread ----------------------------------------------------------------------------------

    def _on_made(self, made: PreparedVersion | VersionRefusal) -> None:
        self.busy, counts = False, self.counts
        if isinstance(made, VersionRefusal):
            # said once, until there is another reason
            if not counts.refusal.startswith(made.fault):
                log.error("a version is not published, learning goes on: %s.", made.detail)
            counts.refusal = f"{made.fault}: {made.detail}"
            counts.refused[made.fault] = counts.refused.get(made.fault, 0) + 1
            return
        if counts.refusal:
            log.info("versions are published again.")
        self._prepared, counts.refusal, measures = made, "", made.measures
        counts.made += 1
        counts.whole += made.delta is None
        counts.unquantized += measures.unquantized
        counts.sent_bytes += measures.sent_bytes
        counts.seconds += measures.seconds
        counts.newest = measures
        for name in ("action_change", "quantization_change"):
            if (value := getattr(measures, name)) is not None:
                setattr(counts, name, value)

    def _on_failed(self, error: Exception) -> None:
        self.busy = False
        raise error

    # --- tasks ----------------------------------------------------------------------------------------------------

    def _make(self, wanted: _PublishRequest) -> PreparedVersion | VersionRefusal:
        began_s = time.monotonic()
        saved = self._save(wanted.weights.pop())
        file = np.frombuffer(bytearray(saved), np.uint8)
        if bad := find_not_finite(file, "weights"):
            return VersionRefusal(VersionFault.not_finite, f"'{bad}' is not finite")
        delta, stats = bytearray(), DeltaStats()
        base = None if self._goes_whole(wanted) else self._find_base(wanted.version.parent, wanted.parent_sha256)
        if base is None or not self._encode(base, file, delta, stats):
            delta.clear()
        sha256 = hashlib.sha256(file.data).hexdigest()
        check = self._check if self._check is not None and self._can_look(self._check) else None
        parent = self._acted_parent(check, wanted) if check is not None else ""
        quantization, is_coarse = None, False
        if check is not None and delta and self._deltas % check.config.quantization_every == 0:
            quantization = self._quantization_change(check, file, sha256, saved)
            is_coarse = quantization is not None and not quantization <= check.config.max_quantization_change
            if is_coarse:
                log.warning(
                    "the version of gradient step %d goes whole and exact: quantisation alone changes its actions by "
                    "%.3g of their range, more than the max_quantization_change of %g that the recipe's action_check "
                    "allows.",
                    *(wanted.version.gradient_steps, quantization, check.config.max_quantization_change),
                )
                file = np.frombuffer(bytearray(saved), np.uint8)
                sha256 = hashlib.sha256(file.data).hexdigest()
                delta.clear()
        del saved
        self._deltas += bool(delta)
        change = self._compare(check, file, sha256, parent) if check is not None else None
        if isinstance(change, VersionRefusal):
            return change
        smaller = 0 < len(delta) < len(file)
        measures = VersionMeasures(
            sent_bytes=len(delta) if smaller else len(file),
            changed_share=stats.changed / max(1, stats.values) if smaller else None,
            action_change=change,
            quantization_change=quantization,
            unquantized=is_coarse,
            seconds=time.monotonic() - began_s,
        )
        version = msgspec.structs.replace(wanted.version, sha256=sha256, size_bytes=len(file))
        return PreparedVersion(version, wanted.trained, file, delta if smaller else None, measures)

    def _goes_whole(self, wanted: _PublishRequest) -> bool:
        parent, every = wanted.version.parent, self._config.anchor_every
        return wanted.whole or not parent or not wanted.parent_sha256 or (every > 0 and parent % every == 0)

    def _find_base(self, number: int, sha256: str) -> np.ndarray | None:
        """The file of version `number`; None if it is not at hand."""
        if self._base is not None and self._base[0] == sha256:
            return self._base[1]
        try:
            data = read_kept(self._directory, number, sha256)
        except StorageError as error:
            log.warning("%s The next version travels whole.", error)
            return None
        if data is not None:
            self._base = sha256, data
        return data

    def _encode(self, base: np.ndarray, file: np.ndarray, delta: bytearray, stats: DeltaStats) -> bool:
        """Whether `file` became what `delta` makes of `base`; what is finite is changed by nothing else."""
        try:
            encode(base, file, delta.extend, self._config.precision, stats=stats)
        except WeightsError as error:
            log.info("a version travels whole: %s", error)
            return False
        return True

    def _acted_parent(self, check: VersionCheck, wanted: _PublishRequest) -> str:
        """The sha256 of its parent, which acted; '' when it is not at hand or cannot act."""
        parent = wanted.parent_sha256
        if parent and not check.knows(parent):
            base = self._find_base(wanted.version.parent, parent)
            if base is None or isinstance(check.act(base.tobytes(), parent), VersionRefusal):
                return ""
        return parent

    def _quantization_change(self, check: VersionCheck, file: np.ndarray, sha256: str, exact: bytes) -> float | None:
        """What of its actions quantisation alone changes; None when one of the two cannot act."""
        trained, rebuilt = check.act(exact), check.act(file.tobytes(), sha256)
        if isinstance(trained, VersionRefusal) or isinstance(rebuilt, VersionRefusal):
            return None
        return check.change(trained, rebuilt)

    def _compare(
        self, check: VersionCheck, file: np.ndarray, sha256: str, parent: str
    ) -> float | VersionRefusal | None:
        """How far its actions are from its parent's. What has no parent at hand has to act, and no more."""
        actions = check.act(file.tobytes(), sha256)
        if isinstance(actions, VersionRefusal) or not parent:
            return actions if isinstance(actions, VersionRefusal) else None
        change, refusal = check.compare(actions, parent)
        return change if refusal is None else refusal

    def _can_look(self, check: VersionCheck) -> bool:
        try:
            return check.ready
        except StorageError as error:
            log.warning("what a version does is not looked at now: %s", error)
            return False

    def _rebase(self, prepared: PreparedVersion) -> None:
        self._base = prepared.version.sha256, prepared.file

    def _keep(self, number: int) -> None:
        if self._base is None:
            return
        try:
            keep_file(self._directory, number, *self._base)
        except StorageError as error:
            log.warning("after a restart the next version travels whole: %s", error)
