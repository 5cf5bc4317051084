"""What models say of episodes, as step labels of all their segments, with the number of the model that says it.

Two step labels are written in one transaction: `success_KIND`, the chance, and `success_KIND_model`, the number of the
model. So batches, and whoever else reads the one, can have the other. Numbers grow: the newest model's word counts,
what an older one said is told apart by its number and never written over what a newer one said.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import sqlalchemy as sa

from cloud_learner.buffer.ledger import notes
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.rewards.agreement import by_thresholds
from cloud_learner.rewards.calibration import Thresholds
from wire.errors import ConfigError, InvalidDataError, StorageError

MOST_MODELS = 2**24
"""numbers that a float32 holds"""


class LabelModel(msgspec.Struct, frozen=True):
    """A model that writes labels."""

    number: int
    sha256: str
    success_at: float | None
    failure_at: float | None
    about: str
    """for people: what it is made of"""
    wall_ns: int
    """nanoseconds since 1970, when it was adopted"""

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(self.success_at, self.failure_at)

    def verdicts(self, scores: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """float32[n] what it says by float32[n] scores, nan where the model of int[n] `numbers` is another one."""
        return by_thresholds(np.where(numbers == self.number, scores, np.nan), self.success_at, self.failure_at)


class ModelScore(NamedTuple):
    """What is said of a segment's episode."""

    score: float
    number: int
    """of the model"""


class ModelLabels:
    """The labels of one kind of models."""

    def __init__(self, ledger: Ledger, kind: str) -> None:
        self.kind = kind
        self.names = f"success_{kind}", f"success_{kind}_model"
        """of the step labels: the chance, and the model's number"""
        self._ledger, self._key = ledger, f"label_models {kind}"

    def models(self) -> tuple[LabelModel, ...]:
        """All that were adopted, the newest last. Raises `StorageError`."""
        with self._ledger.reading() as connection:
            return self._models(connection)

    def newest(self) -> LabelModel | None:
        """The one whose word counts."""
        return next(reversed(self.models()), None)

    def adopt(self, sha256: str, thresholds: Thresholds, about: str, as_newest: bool = False) -> LabelModel:
        """Make a model the one whose word counts; the newest one keeps its number, and may get other thresholds.

        Raises `ConfigError` for an older one, unless `as_newest`: then it gets a new number, and what was labelled is
        labelled again.
        """
        with self._ledger.writing() as connection:
            models = self._models(connection)
            number = len(models) + 1
            if models and models[-1].sha256 == sha256:
                models, number = models[:-1], len(models)
            elif not as_newest and (older := [one for one in models if one.sha256 == sha256]):
                raise ConfigError(
                    f"{self.kind} {sha256[:12]} is model {older[-1].number}, and model {models[-1].number} has come "
                    "after it: labels of an old model are not written. Choose the newer one, or say --as-newest to "
                    "have this one count again."
                )
            if number >= MOST_MODELS:
                raise ConfigError(f"{self.kind}: there have been {MOST_MODELS} models.")
            made = LabelModel(number, sha256, thresholds.success_at, thresholds.failure_at, about, time.time_ns())
            notes.write_meta(connection, self._key, msgspec.json.encode((*models, made)).decode())
        return made

    def put(self, model: LabelModel, scores: Mapping[int, float], steps: Mapping[int, int]) -> int:
        """Label the segments of these ledger rows, of so many steps each; how many were not labelled by it before.

        Those that are gone are left out. Raises `InvalidDataError`, with nothing written, for a score that is no
        chance, and when another model has become the newest meanwhile.
        """
        if wrong := [row for row, score in scores.items() if not 0 <= score <= 1]:
            raise InvalidDataError(
                f"{self.kind} model {model.number} scores ledger row {wrong[0]} with {scores[wrong[0]]}, which is no "
                "chance from 0 to 1. Nothing of it is written: train it again."
            )
        with self._ledger.writing() as connection:
            models = self._models(connection)
            if not models or models[-1].number != model.number:
                raise InvalidDataError(
                    f"{self.kind}: model {models[-1].number if models else 'none'} counts now, not {model.number}: "
                    "labels of an old model are not written. Start again with the newest."
                )
            said = notes.step_labels(connection, list(scores), self.names[1:])
            fresh = [row for row in scores if row not in said or int(said[row][self.names[1]][0]) < model.number]
            gone: set[int] = set()
            for name, values in zip(self.names, (scores, dict.fromkeys(scores, model.number)), strict=True):
                labels = {row: np.full(steps[row], values[row], np.float32) for row in fresh if steps[row]}
                gone |= set(notes.put_step_labels(connection, name, labels, skip_gone=True))
        return len(fresh) - len(gone)

    def read(self, rows: Sequence[int]) -> dict[int, ModelScore]:
        """What is said of the segments of these ledger rows, by whatever model; absent where nothing is."""
        name, number = self.names
        found = self._ledger.step_labels(rows, self.names)
        return {
            row: ModelScore(float(said[name][0]), int(said[number][0]))
            for row, said in found.items()
            if name in said and number in said
        }

    def labelled_since(self, revision: int) -> tuple[tuple[int, ...], int]:
        """As `Ledger.labelled_since`."""
        return self._ledger.labelled_since(revision, self.names)

    def _models(self, connection: sa.Connection) -> tuple[LabelModel, ...]:
        text = notes.read_meta(connection, self._key)
        try:
            return msgspec.json.decode(text, type=tuple[LabelModel, ...]) if text else ()
        except msgspec.DecodeError as error:
            raise StorageError(f"the ledger's note of {self.kind} models cannot be read: {error}.") from error
