"""Trains a success classifier on the judged episodes of a buffer, finds its thresholds, and measures it.

Episodes are divided by their ids, for good: three fifths are learned from, one fifth chooses the thresholds, and the
last one measures. What is held out of a policy's training (`validation`) is held out here, too, up to two fifths.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.sampling.segment_index import SegmentIndex, on_side
from cloud_learner.buffer.store.store import SegmentStore
from cloud_learner.rewards.calibration import SuccessMeasurement, Thresholds, choose_thresholds, measure
from cloud_learner.rewards.classifier import ClassifierHeader, SuccessClassifier, SuccessNetwork, as_tensors
from cloud_learner.rewards.config import LABEL, OUTCOME, RewardConfig
from cloud_learner.rewards.episode_ends import ended_episodes, read_ends
from cloud_learner.rewards.interface import EpisodeEnd, SuccessModel
from cloud_learner.rewards.verdicts import VerdictReader
from wire.errors import ConfigError, InvalidDataError
from wire.types import RobotSpec

HELD_OUT, MEASURED = 0.4, 0.2
"""shares of the episodes: held out of learning, and of those the ones that measure"""
_READ_AT_ONCE = 64
_PEOPLE = RewardConfig(sources=(LABEL, OUTCOME))
"""what is learned is never what a model said"""


@dataclass(frozen=True)
class ClassifierConfig:
    """Raises `ConfigError`."""

    steps: int = 8
    """last steps of an episode that are looked at"""
    width: int = 64
    updates: int = 600
    batch: int = 64
    """steps"""
    learning_rate: float = 1e-3
    precision: float = 0.9
    """of what it calls a success, and of what it calls a failure"""
    confidence: float = 0.9
    """with which that is shown"""
    least_each: int = 8
    """episodes of each outcome to learn from"""
    most: int = 4000
    """judged episodes that are read, the newest"""

    def __post_init__(self) -> None:
        for name in ("steps", "width", "updates", "batch", "least_each", "most", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"success classifier: {name} is {getattr(self, name)}; it must be positive.")


class JudgedEnds(msgspec.Struct, frozen=True, eq=False):
    """Ends of episodes of which people or the record say how they ended."""

    ends: Sequence[EpisodeEnd]
    succeeded: np.ndarray
    """bool[n]"""
    left_out: Mapping[str, int] = {}
    """judged episodes that could not be read, by reason"""

    def part(self, choose: Callable[[str], bool]) -> JudgedEnds:
        """Those whose id is chosen."""
        here = [number for number, end in enumerate(self.ends) if choose(end.episode)]
        return JudgedEnds([self.ends[number] for number in here], self.succeeded[here])

    @property
    def counts(self) -> tuple[int, int]:
        """(failures, successes)"""
        return int((~self.succeeded).sum()), int(self.succeeded.sum())


def read_judged(
    ledger: Ledger, store: SegmentStore, spec: RobotSpec, tasks: Sequence[str], steps: int, most: int = 4000
) -> JudgedEnds:
    """The newest `most` judged episodes of robots with `spec` in these tasks. Raises `StorageError`."""
    index = SegmentIndex(tuple(tasks))
    index.extend(ledger.index(0, spec.data_hash))
    reader = VerdictReader(ledger, index, _PEOPLE)
    reader.refresh()
    ended = ended_episodes(index)
    judged = ended[reader.verdicts[ended] >= 0][-most:].tolist()
    found: dict[int, EpisodeEnd] = {}
    left_out: Counter[str] = Counter()
    for begin in range(0, len(judged), _READ_AT_ONCE):
        ends, some = read_ends(index, judged[begin : begin + _READ_AT_ONCE], store.read, spec, steps)
        found |= ends
        left_out += some
    return JudgedEnds(list(found.values()), reader.verdicts[np.array(list(found), np.int64)] == 1, dict(left_out))


def train_classifier(
    judged: JudgedEnds,
    spec: RobotSpec,
    tasks: Sequence[str],
    config: ClassifierConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda updates, loss: None,
) -> SuccessClassifier:
    """With its thresholds and what it is worth. The same seed and episodes give the same bytes.

    Raises `InvalidDataError` where there are too few of an outcome to learn from. Where there are too few to show the
    wanted precision, it is made all the same, without that threshold, and its `thresholds.notes` say so.
    """
    learned = judged.part(lambda name: on_side(name, HELD_OUT, False))
    measuring = judged.part(lambda name: on_side(name, MEASURED, True))
    choosing = judged.part(lambda name: on_side(name, HELD_OUT, True) and on_side(name, MEASURED, False))
    failures, successes = learned.counts
    if min(failures, successes) < config.least_each:
        raise InvalidDataError(
            f"success classifier: of {len(judged.ends)} judged episodes {len(learned.ends)} are there to learn from; "
            f"{failures} of these failed, {successes} succeeded; {config.least_each} of each are the least. Judge more "
            "on the page or with `vla-fleet buffer label EPISODE success=0`."
        )
    network = _fit(learned, spec, tasks, config, seed, progress)
    nothing = measure(np.zeros(0), np.zeros(0, bool), Thresholds())
    header = ClassifierHeader(spec, tuple(tasks), config.steps, config.width, Thresholds(), nothing, learned.counts)
    made = SuccessClassifier(network, header)
    thresholds = choose_thresholds(made.score(choosing.ends), choosing.succeeded, config.precision, config.confidence)
    measured = measure(made.score(measuring.ends), measuring.succeeded, thresholds)
    header = msgspec.structs.replace(header, thresholds=thresholds, measured=measured)
    return SuccessClassifier.load(SuccessClassifier(network, header).save(), "the trained classifier")


def measure_model(
    model: SuccessModel, judged: JudgedEnds, precision: float, confidence: float
) -> tuple[Thresholds, SuccessMeasurement]:
    """Of a model that was trained elsewhere: half of the episodes choose its thresholds, the others measure it."""
    measuring = judged.part(lambda name: on_side(name, 0.5, True))
    choosing = judged.part(lambda name: on_side(name, 0.5, False))
    scores = [model.score(part.ends) if part.ends else np.zeros(0) for part in (choosing, measuring)]
    thresholds = choose_thresholds(scores[0], choosing.succeeded, precision, confidence)
    return thresholds, measure(scores[1], measuring.succeeded, thresholds)


def _fit(
    learned: JudgedEnds,
    spec: RobotSpec,
    tasks: Sequence[str],
    config: ClassifierConfig,
    seed: int,
    progress: Callable[[int, float], None],
) -> SuccessNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        network = SuccessNetwork(spec, len(tasks), config.width)
        state, images, task = as_tensors(learned.ends, tasks, network.cameras)
        truth = np.repeat(learned.succeeded, [len(end.state) for end in learned.ends])
        network.mean.copy_(state.mean(0))
        network.deviation.copy_(state.std(0).clamp_min(1e-3))
        optimizer = torch.optim.AdamW(network.parameters(), config.learning_rate, weight_decay=0.01)
        rng = np.random.default_rng(seed)
        of_each = np.flatnonzero(~truth), np.flatnonzero(truth)
        target = torch.from_numpy(truth).float()
        for update in range(config.updates):
            # as many of each: how often episodes fail is not what they look like
            chosen = np.concatenate([rng.choice(some, config.batch // 2 + 1) for some in of_each])
            shown = [_shifted(image[chosen], rng) for image in images]
            logits = network(state[chosen], shown, task[chosen])
            loss = F.binary_cross_entropy_with_logits(logits, target[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress(update + 1, loss.item())
        # a chance again: by how often episodes succeed (King and Zeng 2001, prior correction)
        failures, successes = learned.counts
        output = network.head[-1]
        assert isinstance(output, torch.nn.Linear)
        output.bias.data += math.log(successes / failures)
        return network


def _shifted(images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """By up to 4 % of their size, what leaves on one side comes in on the other."""
    most = max(1, images.shape[1] // 25)
    return images.roll(rng.integers(-most, most + 1, 2).tolist(), (1, 2))
