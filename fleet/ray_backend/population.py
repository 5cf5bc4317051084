"""Population-based training by Ray Tune: members that train beside each other or in turns, the worst as copies of the
best.

Who is copied when, and how settings change, is Tune's `PopulationBasedTraining`. What a member does, and what it is
between two measurements, is a directory of ours: Tune's own state is not needed to go on after a kill.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fleet.ray_backend.cluster import connected
from wire.errors import ConfigError, FleetError, storage_errors

if TYPE_CHECKING:
    from fleet.cli.offline.tuned_settings import TunedSetting

RESTARTS = 3
"""of a member whose process died or raised; the others go on without it then"""
_KEPT = 3
"""copies of a member's checkpoint that Tune keeps for others: they may come for it later"""
_MEMBER, _STEPS, _LOSS = "member", "gradient_steps", "held_out_loss"
Settings = dict[str, str]
"""by their path, as --set takes them"""


class MemberWork(Protocol):
    """What members do; it is pickled. Calls for one member come one after the other, from any process."""

    def step(self, member: int, settings: Settings) -> tuple[int, float, bool]:
        """Train until it is measured next: (gradient steps that are behind it, loss, whether it is done)."""
        ...

    def save(self, member: int, directory: Path) -> None:
        """Put what others need to go on as a copy of it into an empty directory."""
        ...

    def load(self, member: int, settings: Settings, directory: Path) -> None:
        """Go on from there, if that was another member's."""
        ...


def tune_population(
    work: MemberWork,
    members: Mapping[int, Settings | None],
    tuned: Mapping[str, TunedSetting],
    every: int,
    directory: Path,
    *,
    seed: int,
    stopped: Callable[[], bool],
    address: str = "",
    gpus: bool = False,
) -> None:
    """Until each of `members` is done or has failed for good, or `stopped`.

    members: by number, with what they begin with; None: what is drawn by `seed`
    every: gradient steps between two measurements
    directory: for what Ray keeps of the run, and its log
    address, gpus: as `fleet.ray_backend.ranks.train_on_ranks` has them

    Raises `ConfigError` and `WireError` as `connected` does, `ConfigError` for a cluster in which no member finds room,
    and `FleetError` with what Tune said.
    """
    with storage_errors("clearing what Ray kept of the run before", directory):
        shutil.rmtree(directory / "tune", ignore_errors=True)
    # asked for by `stopped`; members stay where they are, for their paths are those of this process
    os.environ |= {"TUNE_DISABLE_SIGINT_HANDLER": "1", "RAY_CHDIR_TO_TRIAL_DIR": "0"}
    with connected(address, (), directory / "ray.log"):
        import ray
        from ray import tune
        from ray.tune.schedulers import PopulationBasedTraining

        from fleet.cli.offline.tuned_settings import TunedRange

        needed = {"CPU": 1, "GPU": 1} if gpus else {"CPU": 1}
        offered = ray.cluster_resources()
        if short := [name for name in needed if offered.get(name, 0) < 1]:
            raise ConfigError(f"the Ray cluster has no {short[0]} for a member: add a node that has, or start it so.")
        for name in ("ray.tune", "ray.train"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        domains = {path: _domain(one) for path, one in tuned.items()}
        drawn = _drawn(domains, max(members) + 1, seed)
        points = [
            {_MEMBER: number, **(drawn[number] if given is None else _numbers(given, tuned))}
            for number, given in members.items()
        ]

        def within(config: dict[str, Any]) -> dict[str, Any]:
            """Tune's changes of numbers know no bounds."""
            ranges = {path: one for path, one in tuned.items() if isinstance(one, TunedRange)}
            config["point"] |= {path: one.within(config["point"][path]) for path, one in ranges.items()}
            return config

        scheduler = PopulationBasedTraining(
            time_attr=_STEPS,
            metric=_LOSS,
            mode="min",
            perturbation_interval=every,
            hyperparam_mutations={"point": domains},
            custom_explore_fn=within,
            log_config=False,
        )
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(_trainable(), work=work), needed),
            param_space={"point": tune.grid_search(points)},
            tune_config=tune.TuneConfig(
                scheduler=scheduler,
                reuse_actors=True,
                trial_name_creator=_name,
                trial_dirname_creator=_name,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(directory),
                stop=_stopper(stopped),
                failure_config=tune.FailureConfig(max_failures=RESTARTS),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=_KEPT, checkpoint_at_end=False),
                verbose=0,
            ),
        )
        with _seeded(seed):
            try:
                tuner.fit()
            except Exception as error:
                said = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
                raise FleetError(f"tuning a population of {len(members)} ended: {said}") from error


def _name(trial: Any) -> str:
    return str(trial.config["point"][_MEMBER])


def _trainable() -> Any:
    from ray import tune

    class MemberTrainable(tune.Trainable):
        """A member, as Tune sees it."""

        def setup(self, config: dict[str, Any], *, work: MemberWork) -> None:
            self._work = work

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            """Of whichever member: all that it is lies in its directory."""
            return True

        def step(self) -> dict[str, Any]:
            steps, loss, done = self._work.step(self._member, self._settings)
            return {_STEPS: steps, _LOSS: loss, "done": done}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            self._work.save(self._member, Path(checkpoint_dir))

        def load_checkpoint(self, checkpoint: str) -> None:
            self._work.load(self._member, self._settings, Path(checkpoint))

        @property
        def _member(self) -> int:
            """Not of its settings: those may be another's."""
            return int(self.trial_name)

        @property
        def _settings(self) -> Settings:
            point = self.config["point"]
            return {path: str(value) for path, value in point.items() if path != _MEMBER}

    return MemberTrainable


def _stopper(stopped: Callable[[], bool]) -> Any:
    from ray import tune
    from ray.tune.stopper import NoopStopper

    class WhenAsked(tune.Stopper):
        """Asked at every turn of Tune's loop."""

        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return stopped()

        def __reduce__(self) -> Any:
            # what Tune writes down for a restart of its own needs none
            return NoopStopper, ()

    return WhenAsked()


def _domain(one: TunedSetting) -> Any:
    from ray import tune

    from fleet.cli.offline.tuned_settings import TunedChoice

    if isinstance(one, TunedChoice):
        return list(one.values)
    if one.whole:
        low, high = int(one.low), int(one.high) + 1
        return tune.lograndint(low, high) if one.logarithmic else tune.randint(low, high)
    return tune.loguniform(one.low, one.high) if one.logarithmic else tune.uniform(one.low, one.high)


def _drawn(domains: Mapping[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.RandomState(seed)

    def draw(domain: Any) -> Any:
        return domain[rng.randint(len(domain))] if isinstance(domain, list) else domain.sample(random_state=rng)

    return [{path: draw(domain) for path, domain in domains.items()} for _ in range(count)]


def _numbers(settings: Settings, tuned: Mapping[str, TunedSetting]) -> dict[str, Any]:
    from fleet.cli.offline.tuned_settings import TunedRange

    kinds = {path: (int if one.whole else float) for path, one in tuned.items() if isinstance(one, TunedRange)}
    return {path: kinds[path](text) if path in kinds else text for path, text in settings.items()}


@contextlib.contextmanager
def _seeded(seed: int) -> Any:
    """Tune draws of the process's own random numbers."""
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
