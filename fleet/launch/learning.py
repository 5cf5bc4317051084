"""Makes what learns from a recipe and a data directory: with a fleet's gateway, or from what is recorded alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fleet.config.data_directory import DataDirectory
from fleet.config.recipe import Recipe
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError
from wire.transport.channel import Channel

if TYPE_CHECKING:
    from cloud_learner.buffer.ledger.ledger import Ledger
    from cloud_learner.buffer.loading.config import DatasetConfig
    from cloud_learner.buffer.loading.dataset import ReplayDataset
    from cloud_learner.buffer.store.store import SegmentStore
    from cloud_learner.training.embodiment_mix import EmbodimentMix
    from cloud_learner.training.learner import Learner
    from cloud_learner.training.offline.held_out_loss import HeldOutLoss
    from cloud_learner.training.offline.offline_trainer import OfflineTrainer
    from cloud_learner.training.publishing.action_check import ActionCheck
    from cloud_learner.training.publishing.action_checks import VersionCheck
    from cloud_learner.training.ranks.group import RankGroup
    from cloud_learner.training.trainer import Trainer
    from policies.interface.policy import LearnedPolicy, NormalizationData

log = logging.getLogger(__name__)


def dataset_config(recipe: Recipe, policy: LearnedPolicy, seed: int, base: Collection[str] = ()) -> DatasetConfig:
    """What the recipe's trainer asks the buffer for when it trains `policy`. `base`: tasks of base data, by name."""
    from cloud_learner.buffer.loading.config import DatasetConfig

    needs, training = recipe.algorithm.needs(), recipe.training
    mix = msgspec.structs.replace(needs.target.mix, base=frozenset(base), base_share=training.base_share)
    return DatasetConfig(
        tasks={task: task for task in base} | recipe.instructions,
        target=msgspec.structs.replace(needs.target, mix=mix, staleness=recipe.staleness),
        n_step=needs.n_step,
        gamma=needs.gamma,
        labels=needs.labels,
        traces=getattr(policy, "trace_points", 0) if needs.traces else 0,
        batch=training.batch,
        horizon=policy.horizon,
        ticks_ahead=policy.ticks_ahead,
        max_offset=policy.max_offset,
        history=getattr(policy, "history", 0),
        offset_share=training.offset_share,
        rolled=tuple(recipe.motion.rolled.tolist()) if recipe.motion else (False,) * recipe.spec.state_dim,
        later=policy.trained.residual_trained,
        ticks_per_frame=training.ticks_per_frame if recipe.spec.cameras else 1,
        seed=seed,
        cache_bytes=recipe.cache_bytes,
        echo=recipe.echo,
        samples_per_insert=recipe.samples_per_insert or needs.samples_per_insert,
        validation=recipe.validation,
        workers=recipe.cache_workers,
        prefetch=recipe.prefetch,
    )


def open_replay(recipe: Recipe, ledger: Ledger, store: SegmentStore, asked: DatasetConfig) -> ReplayDataset:
    """What is `asked` for of the recipe's robot, episodes being what the recipe's rewards say they were.

    Raises `ConfigError` for rewards that do not go together.
    """
    from cloud_learner.buffer.loading.dataset import ReplayDataset
    from cloud_learner.buffer.sampling.target import by_verdicts
    from cloud_learner.rewards.verdicts import open_verdicts

    recipe.rewards.require_whole()
    if recipe.rewards.is_record:
        return ReplayDataset(ledger, store, recipe.spec, asked)
    asked = msgspec.structs.replace(asked, target=by_verdicts(asked.target))
    return ReplayDataset(ledger, store, recipe.spec, asked, verdicts=open_verdicts(recipe.rewards))


def make_trainer(
    recipe: Recipe,
    name: str,
    data: DataDirectory,
    gateway: Channel,
    seed: int,
    max_steps: int = 0,
    clock: Clock | None = None,
    snapshot: str = "",
) -> Trainer:
    """The trainer on the buffer in `data`, or on what a `snapshot` of it holds; resumes from its newest checkpoint.

    Raises `NothingStoredError` while no gateway has begun a buffer there, `StorageError` when it cannot be read, and
    `InvalidDataError` for an unknown snapshot.
    """
    from cloud_learner.training.checkpoints.run_checkpoints import RunCheckpoints
    from cloud_learner.training.config import TrainerConfig
    from cloud_learner.training.publishing.publisher import VersionPublisher
    from cloud_learner.training.trainer import Trainer

    with contextlib.ExitStack() as undo:
        clock = clock or MonotonicClock()
        parts = _open_learning(undo, recipe, data, seed, snapshot, clock)
        # what is there once and for all, and how much is learned of it, has been chosen by whoever says so
        bounded = parts.pretrained and not (snapshot or max_steps)
        config = TrainerConfig(
            # a snapshot has what it has
            demonstrations=0 if snapshot else recipe.demonstrations * len(recipe.tasks),
            checkpoint_every_s=recipe.checkpoint_every_s,
            max_steps=max_steps,
            pretrained=parts.pretrained,
            by_people=recipe.people_only,
            min_corrected_steps=recipe.min_corrected_steps if bounded else 0,
            max_samples_per_insert=recipe.max_samples_per_insert if bounded else 0.0,
        )
        if missing := _missing_labels(recipe, parts.ledger):
            log.warning("%s yet: until somebody writes them, it learns as of steps that nothing is said of.", missing)
        check = _make_check(recipe, parts, seed)
        publisher = VersionPublisher(parts.policy.save, data.published, recipe.publisher, check)
        trainer = Trainer(
            name,
            parts.learner,
            parts.set_normalization,
            parts.source,
            parts.ledger,
            gateway,
            RunCheckpoints(data.checkpoints, parts.learner, parts.source, parts.ledger, recipe.keep_checkpoints),
            clock,
            config,
            publisher,
        )
        undo.pop_all()
    return trainer


@contextlib.contextmanager
def open_offline_trainer(
    recipe: Recipe,
    data: DataDirectory,
    run: DataDirectory,
    seed: int,
    steps: int,
    snapshot: str = "",
    group: RankGroup | None = None,
) -> Iterator[OfflineTrainer]:
    """Trains on the buffer in `data`, or on what a `snapshot` of it holds, with its checkpoints in `run`.

    `group`: the ranks that do so together, each with its rows of every batch; None: this process alone.

    Raises as `make_trainer` does, and what `OfflineTrainer` raises.
    """
    from cloud_learner.training.checkpoints.run_checkpoints import RunCheckpoints
    from cloud_learner.training.offline.offline_trainer import OfflineConfig, OfflineTrainer

    with contextlib.ExitStack() as held:
        parts = _open_learning(held, recipe, data, seed, snapshot, group=group)
        _require_labels(recipe, parts.ledger)
        config = OfflineConfig(steps, recipe.checkpoint_every_s, parts.pretrained)
        checkpoints = RunCheckpoints(run.training, parts.learner, parts.source, parts.ledger, recipe.keep_checkpoints)
        trainer = OfflineTrainer(
            parts.learner, parts.set_normalization, parts.source, checkpoints, MonotonicClock(), config
        )
        yield trainer
        # not after an error: ranks that are elsewhere in their step would not hear that all is done
        trainer.close()


def _require_labels(recipe: Recipe, ledger: Ledger) -> None:
    """Raise `InvalidDataError` for labels that an algorithm learns from and no step has: what is recorded is all."""
    from cloud_learner.algorithms.registry import known
    from wire.errors import InvalidDataError

    if missing := _missing_labels(recipe, ledger):
        raise InvalidDataError(
            f"{missing}: have them written first (Ledger.put_step_labels), or choose another --algorithm of "
            f"{', '.join(sorted(known()))}."
        )


def _missing_labels(recipe: Recipe, ledger: Ledger) -> str:
    """Which labels an algorithm learns from that no step has; '' if there are none."""
    algorithm, needs = recipe.algorithm, recipe.algorithm.needs()
    names = (*needs.labels, needs.target.label)
    missing = [name for name in names if name and not ledger.labelled_since(0, (name,))[0]]
    if not missing:
        return ""
    said = ", ".join(missing)
    return f"algorithm '{algorithm.name}' learns from the step labels {said}, which no step of the buffer has"


def _warn_of_silent_models(recipe: Recipe, ledger: Ledger) -> None:
    from cloud_learner.rewards.model_labels import ModelLabels

    for kind in recipe.rewards.models:
        if (newest := ModelLabels(ledger, kind).newest()) is None:
            log.warning("rewards: no model '%s' has judged anything yet: `vla-fleet rewards relabel %s`.", kind, kind)
        elif newest.success_at is None and newest.failure_at is None:
            log.warning("rewards: model %d of '%s' says nothing: its precision is not shown.", newest.number, kind)


def open_held_out_loss(recipe: Recipe, data: DataDirectory, seed: int, snapshot: str = "") -> HeldOutLoss:
    """Of the episodes that the recipe's `validation` holds out of the buffer in `data`, or of what a `snapshot` of it
    holds.

    Raises as `make_trainer` does, and `InvalidDataError` where none is held out.
    """
    from cloud_learner.training.offline.held_out_loss import HeldOutLoss, draw_held_out

    with data.open_buffer() as (ledger, store):
        policy = recipe.make_policy(recipe.spec, seed)
        until_row = ledger.snapshot_row(snapshot) if snapshot else 0
        asked = dataset_config(recipe, policy, seed, _base_tasks(recipe, ledger))
        asked = msgspec.structs.replace(asked, held_out=True, until_row=until_row, workers=0, prefetch=0)
        with open_replay(recipe, ledger, store, asked) as dataset:
            return HeldOutLoss(policy, draw_held_out(dataset), seed)


@dataclass(frozen=True, slots=True)
class _Learning:
    """What every trainer has, on an open buffer."""

    ledger: Ledger
    store: SegmentStore
    policy: LearnedPolicy
    pretrained: bool
    source: ReplayDataset | EmbodimentMix
    learner: Learner
    set_normalization: Callable[[NormalizationData], None]


def _open_learning(
    undo: contextlib.ExitStack,
    recipe: Recipe,
    data: DataDirectory,
    seed: int,
    snapshot: str,
    clock: Clock | None = None,
    group: RankGroup | None = None,
) -> _Learning:
    """`clock`: of a fleet's trainer, which waits for demonstrations; None: what is recorded is all there is."""
    from cloud_learner.training.demonstrations import DemonstrationCount
    from cloud_learner.training.embodiment_mix import EmbodimentMix, MixMember
    from cloud_learner.training.learner import Learner
    from cloud_learner.training.ranks.group import ALONE

    group = group or ALONE
    # before the policy is built, which takes a while: who waits for the buffer asks often
    ledger, store = data.buffer.open_reader()
    undo.callback(ledger.close)
    undo.callback(store.close)
    until_row = ledger.snapshot_row(snapshot) if snapshot else 0
    if group.world > 1 and not snapshot:
        # what comes while they start would be known to some of them
        until_row = group.first(ledger.newest_row())
    base = _base_tasks(recipe, ledger)
    _warn_of_silent_models(recipe, ledger)
    policy = recipe.make_policy(recipe.spec, seed)
    pretrained = getattr(policy, "pretrained", False)
    if recipe.start is not None and (weights := recipe.start.read()) is not None:
        policy.load(weights.data, 0)
        pretrained = True

    _require_reference(recipe, pretrained=pretrained)

    def open_dataset(one: Recipe) -> ReplayDataset:
        asked = msgspec.structs.replace(dataset_config(one, policy, seed, base), until_row=until_row)
        cache_bytes = recipe.cache_bytes // max(1, len(recipe.members))
        asked = msgspec.structs.replace(asked, cache_bytes=cache_bytes)
        if group.world > 1:
            # what ranks plan alike must not follow the clock of each
            asked = msgspec.structs.replace(asked, rank=group.rank, world=group.world, max_echo=asked.echo)
        return undo.enter_context(open_replay(one, ledger, store, asked))

    if not recipe.members:
        dataset, learner = open_dataset(recipe), Learner(policy, recipe.algorithm, recipe.training, seed, group)
        return _Learning(ledger, store, policy, pretrained, dataset, learner, policy.set_normalization)
    joining = JoiningRobots(policy, recipe, seed, pretrained=pretrained, at_once=clock is None)
    members = {}
    for name in recipe.members:
        one = recipe.as_member(name)
        dataset, count = open_dataset(one), None
        if clock is not None and not snapshot:
            wanted = one.demonstrations * len(one.tasks)
            count = DemonstrationCount(dataset, ledger, wanted, one.people_only, clock)
        members[name] = MixMember(one.spec, dataset, one.share, count)
    mix = EmbodimentMix(members, max(1, recipe.training.pretrain_steps), joining.mark_ready)
    return _Learning(ledger, store, policy, pretrained, mix, joining.learner, joining.join)


def _require_reference(recipe: Recipe, *, pretrained: bool) -> None:
    """Raise `ConfigError` for weights that are to be drawn back to what is no use, or to what changes its shape."""
    training = recipe.training
    if not training.reference_pull:
        return
    what = f"training.reference_pull is {training.reference_pull:g}, and "
    if recipe.members:
        raise ConfigError(f"{what}recipe '{recipe.name}' is for robots of several shapes, which join it later: set 0.")
    if training.reference_decay == 1 and not pretrained:
        raise ConfigError(
            f"{what}the policy begins with nothing learned: begin --from weights, or set training.reference_decay, "
            "such as 0.999."
        )


def _base_tasks(recipe: Recipe, ledger: Ledger) -> list[str]:
    """Tasks that only base data has; an imported task is called by its instruction. Raises `ConfigError` without any
    where the recipe wants some."""
    if not recipe.training.base_share:
        return []
    if found := [task for task in ledger.demonstrated_tasks() if task not in recipe.instructions]:
        return found
    raise ConfigError(
        f"training.base_share is {recipe.training.base_share}, and the buffer has demonstrations of none but the tasks "
        f"of recipe '{recipe.name}': bring base data there with `vla-fleet buffer import-lerobot`, or set it to 0."
    )


class JoiningRobots:
    """Gives robots of a mix their rows in the policy that they share, and in its average."""

    def __init__(self, policy: LearnedPolicy, recipe: Recipe, seed: int, *, pretrained: bool, at_once: bool) -> None:
        """`at_once`: nobody acts meanwhile, so that whoever joins is ready. Raises `ConfigError` for a policy that is
        for robots of one shape."""
        from cloud_learner.training.learner import Learner
        from policies.interface.capabilities import Joinable, require

        require(policy, Joinable, f"recipe '{recipe.name}', which is for robots of several shapes,")
        assert isinstance(policy, Joinable)
        if not pretrained:
            policy.clear_embodiments()
        self._policy, self._joined, self._at_once, self._pretrained = policy, policy, at_once, pretrained
        self.learner = Learner(policy, recipe.algorithm, recipe.training, seed)

    def join(self, examples: NormalizationData) -> None:
        """The robot of `examples`; one that is there already keeps what it has. Raises `ConfigError` without room."""
        spec = examples.spec
        assert spec is not None
        if self._joined.embodiments.row(spec.hash) is not None:
            return
        # those that are there from the beginning learn before there is a version, unless it acts already
        ready = self._at_once or not (self._pretrained or self.learner.gradient_steps)
        self._joined.add_embodiment(spec, [self.learner.average], ready=ready)
        self._policy.set_normalization(examples)
        # the average follows with the next update, which may be none of this run
        for mine, average in zip(self._policy.module.buffers(), self.learner.average.buffers(), strict=True):
            average.copy_(mine)

    def mark_ready(self, spec_hash: str) -> None:
        """It has learned enough to act."""
        self._joined.mark_ready(spec_hash, [self.learner.average])


def make_action_check(
    recipe: Recipe, learner: Learner, dataset: ReplayDataset, store: SegmentStore, seed: int
) -> ActionCheck | None:
    """A policy of the recipe that acts by versions before robots do; None where the recipe wants none."""
    from cloud_learner.buffer.loading.observations import choose_rows, read_shown_steps
    from cloud_learner.training.publishing.action_check import ActionCheck, HeldSource
    from policies.common.weights import share_frozen

    if not recipe.action_check.observations:
        return None
    policy = recipe.make_policy(recipe.spec, seed)
    share_frozen(policy.module, learner.policy.module)
    source = HeldSource(
        lambda count, draw: choose_rows(dataset.universe, count, draw),
        lambda rows: read_shown_steps(rows, store.read, recipe.spec, dataset.config.tasks),
    )
    return ActionCheck(policy, source, recipe.action_check, learner.random_lock)


def _make_check(recipe: Recipe, parts: _Learning, seed: int) -> VersionCheck | None:
    from cloud_learner.training.embodiment_mix import EmbodimentMix
    from cloud_learner.training.publishing.action_checks import ActionChecks

    if not isinstance(parts.source, EmbodimentMix):
        return make_action_check(recipe, parts.learner, parts.source, parts.store, seed)
    datasets = parts.source.datasets
    found = {
        name: check
        for name in recipe.members
        if (check := make_action_check(recipe.as_member(name), parts.learner, datasets[name], parts.store, seed))
        is not None
    }
    return ActionChecks(found) if found else None
