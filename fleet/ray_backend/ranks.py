"""Training on several ranks by Ray Train: a process each, and all of them anew when one dies.

Ray Train places the ranks and makes their process group; what they share and how they go on is ours
(`cloud_learner.training.ranks`): they resume from the newest checkpoint of the run's own directory, which every node
must see.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fleet.ray_backend.cluster import Cluster, connected
from wire.errors import ConfigError, FleetError

if TYPE_CHECKING:
    from cloud_learner.training.ranks.group import RankGroup

RESTARTS = 3
"""of all ranks from the same checkpoint, each because one died or failed"""
_STARTS = 10
"""tries, of a minute each, to find room for all ranks again, such as when a node is lost"""
_ROOM_S = 30.0
"""that others have to leave processors which they hold when a training begins"""
_LOOK_S = 0.2


class RankedWork(Protocol):
    """What ranks do. It is pickled."""

    def run_rank(self, group: RankGroup) -> None:
        """In a process of each rank, from the newest checkpoint on, until all is done or a stop is requested."""
        ...

    def reached(self) -> int:
        """Gradient steps of the newest checkpoint, 0 when there is none."""
        ...

    def say(self, text: str) -> None:
        """Tell people, from whatever process of this machine."""
        ...

    def request_stop(self) -> None:
        """Have the ranks save and end."""
        ...


class RestartPolicy:
    """Whether all ranks start again when some have ended."""

    def __init__(self, reached: Callable[[], int]) -> None:
        """As `RankedWork.reached`."""
        self._reached, self._from, self._count = reached, -1, 0

    def decide(self, failures: Mapping[int, Exception]) -> str:
        """What to say when they start again; `failures` by rank.

        Raises `FleetError` when they must not: what a rank raised on purpose, for one process would have ended by it
        too, or that it was once too often without a new checkpoint in between.
        """
        died = sorted(rank for rank, error in failures.items() if _is_death(error))
        if not died:
            for error in failures.values():
                if isinstance(error, FleetError):
                    raise error
        what = f"{_ranks(died)} died" if died else _failed(failures)
        step = self._reached()
        self._count = self._count + 1 if step == self._from else 1
        self._from = step
        if self._count > RESTARTS:
            kept = f"that of gradient step {step} stays, and the same command goes on from it" if step else "none yet"
            raise FleetError(
                f"{what}, and the {RESTARTS} times before that no new checkpoint was reached either ({kept}). The logs "
                "of Ray say why, by default those in /tmp/ray/session_latest/logs; a rank that is killed again and "
                "again has mostly no memory left: train with fewer --ranks or a smaller batch (--set training.batch=N)."
            )
        where = f"go on from gradient step {step}" if step else "begin again: there is no checkpoint yet"
        return f"{what}; all ranks {where} (restart {self._count} of {RESTARTS})."


def train_on_ranks(
    work: RankedWork,
    ranks: int,
    directory: Path,
    address: str = "",
    gpus: bool = False,
    stops: Callable[[], int] = lambda: 0,
) -> None:
    """Run `work` on each of `ranks` processes until all are done, all of them anew when one dies.

    directory: for what Ray keeps of the run, and its log
    address: of the Ray cluster, auto or HOST:PORT; '': one of this machine alone, for as long as this takes
    gpus: one for each rank, which then talk by NCCL; otherwise gloo
    stops: how often people have asked for the end: once, and the ranks save; twice, and they are not waited for

    Raises `ConfigError` where there is no room for so many and `WireError` as `connected` does, what `RestartPolicy`
    raises, and `FleetError` when it was ended or Ray ends it.
    """
    # the older implementation of Ray Train says less of what failed
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    with connected(address, (), directory / "ray.log") as cluster:
        _require_room(cluster, ranks, gpus, bool(address))
        # a cluster that was there before ends the ranks of a command that is gone by itself
        trainer, failed = _trainer(work, ranks, directory, gpus, 0 if address else os.getpid()), []

        def fit() -> None:
            try:
                trainer.fit()
            except Exception as error:  # noqa: BLE001 - raised below, in the main thread
                failed.append(error)

        # not in the main thread, where Ray would end the ranks by Ctrl-C before they have saved
        thread = threading.Thread(target=fit, name="ray-train", daemon=True)
        thread.start()
        requested = False
        while thread.is_alive():
            thread.join(_LOOK_S)
            if stops() and not requested:
                requested = True
                work.request_stop()
                work.say("the ranks save and end; once more (Ctrl-C), and they are not waited for.")
            if stops() > 1:
                raise FleetError(
                    f"ended before the ranks had saved: the checkpoint of gradient step {work.reached()} stays, and "
                    "the same command goes on from it."
                )
    for error in failed:
        # what a callback raised is wrapped once
        raised = getattr(error, "controller_failure", error)
        if isinstance(raised, FleetError):
            raise raised
        raise FleetError(
            f"training on {ranks} ranks ended: {_last_line(error)}. The same command goes on from gradient step "
            f"{work.reached()}."
        ) from error


def _trainer(work: RankedWork, ranks: int, directory: Path, gpus: bool, command: int) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.torch import TorchConfig, TorchTrainer

    logging.getLogger("ray.train").setLevel(logging.ERROR)
    policy = RestartPolicy(work.reached)

    class Restarts(UserCallback):
        """In the process that controls the ranks, on this machine."""

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            work.say(policy.decide(worker_exceptions))

    return TorchTrainer(
        _rank,
        train_loop_config={"work": work, "device": "cuda" if gpus else "cpu", "command": command},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=gpus),
        run_config=RunConfig(
            name="ranks",
            storage_path=str(directory / "ray"),
            callbacks=[Restarts()],
            # it is the policy that counts
            failure_config=FailureConfig(max_failures=-1, controller_failure_limit=_STARTS),
        ),
    )


def _rank(given: dict[str, Any]) -> None:
    """In a process of Ray's, whose process group is there."""
    from cloud_learner.training.ranks.group import ProcessRanks

    if given["command"]:
        _end_with(given["command"])
    given["work"].run_rank(ProcessRanks(given["device"]))


def _end_with(command: int) -> None:
    """End this process at once when process `command` has ended.

    A Ray of its own takes up to a minute to end when that is killed, in which ranks would write beside those of the
    next command.
    """
    try:
        ended = select.poll()
        ended.register(os.pidfd_open(command), select.POLLIN)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        ended.poll()
        os._exit(1)

    threading.Thread(target=wait, name="command", daemon=True).start()


def _require_room(cluster: Cluster, ranks: int, gpus: bool, shared: bool) -> None:
    """Raises `ConfigError` where Ray would wait for ever."""
    resource, kind = ("GPU", "graphics cards") if gpus else ("CPU", "processors")
    offered = {node.id: (node.host, int(node.resources.get(resource, 0))) for node in cluster.nodes().values()}
    total = sum(count for _, count in offered.values())
    if total < ranks:
        each = ", ".join(f"{host} {count}" for host, count in offered.values())
        more = ", or add nodes with `vla-fleet ray-node`" if shared else ""
        raise ConfigError(
            f"{ranks} ranks need {ranks} {kind}, and Ray has {total} ({each}): "
            f"{f'say --ranks {total}' if total > 1 else 'leave --ranks out'}{more}."
        )
    deadline_s = time.monotonic() + _ROOM_S
    while (free := int(cluster.free(resource))) < ranks:
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"{ranks} ranks need {ranks} {kind}, of which {free} of {total} are free: `ray status` says what has "
                f"the others. Wait for that{f', say --ranks {free}' if free > 1 else ''}, or add nodes with "
                "`vla-fleet ray-node`."
            )
        time.sleep(_LOOK_S)


def _is_death(error: Exception) -> bool:
    from ray.exceptions import RayActorError

    return isinstance(getattr(error, "health_check_failure", error), RayActorError)


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _failed(failures: Mapping[int, Exception]) -> str:
    rank, error = min(failures.items(), key=lambda one: one[0])
    return f"rank {rank} failed ({type(error).__name__}: {_last_line(error)})"


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip().rstrip(".")
