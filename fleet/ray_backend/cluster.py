"""The only module that talks to Ray: connect, nodes, actors. Nothing here waits for a node or an actor."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fleet.cli.client import FleetClient
from fleet.launch.backend import ProcessSpec
from fleet.ray_backend.host import RayHost, probe_node
from fleet.ray_backend.resources import Node, ResourceRequest, discover, living, robot_resource
from wire.errors import ConfigError, WireError, storage_errors
from wire.messages.fleet import RobotState

log = logging.getLogger(__name__)

_OWN_STORE_BYTES = 100 * 1024 * 1024
"""object store of a cluster of our own: experience and weights do not go through it"""
_OWN_LEAST_CPUS = 4
"""it offers: trainer, evaluators and think server ask for one each"""


@dataclass(frozen=True, slots=True)
class ActorLost:
    """An actor that does not answer. `comes_back`: Ray starts it again when its resources are there again."""

    why: str
    comes_back: bool


class Cluster:
    """A connection to a Ray cluster; see `connected`."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._run = secrets.token_hex(3)
        self._made = 0
        self.home: str = ray.get_runtime_context().get_node_id()
        self.address: str = ray.util.get_node_ip_address()
        """of this machine, as the other nodes reach it"""

    def nodes(self) -> dict[str, Node]:
        """The living nodes by id."""
        return living(self._ray.nodes())

    def free(self, resource: str) -> float:
        """So much of it nobody has now."""
        return float(self._ray.available_resources().get(resource, 0.0))

    def probe(self, node: Node, data: str, token: str) -> Any:
        """Begin to ask `node` what it has; its `answer` is (sees the data directory, key names)."""
        task = self._ray.remote(probe_node).options(num_cpus=0, max_retries=0, scheduling_strategy=self._only(node.id))
        return task.remote(data, token)

    def start(self, part: ProcessSpec, request: ResourceRequest, data: str, environment: dict[str, str]) -> Any:
        """Begin to start the actor of `part`; Ray starts it again as often as it dies."""
        self._made += 1
        options: dict[str, Any] = {
            "num_cpus": request.cpus,
            "num_gpus": request.gpus,
            "resources": dict(request.resources) or None,
            "max_restarts": -1,
            "max_task_retries": 0,
            "name": f"vla-fleet.{self._run}.{self._made}.{part.name}",
        }
        if request.node:
            options["scheduling_strategy"] = self._only(request.node)
        actor = self._ray.remote(RayHost).options(**options)
        return actor.remote(msgspec.to_builtins(part), data, environment)

    def ask(self, actor: Any) -> Any:
        """Begin to ask an actor how its part is."""
        return actor.state.remote()

    def stop(self, actor: Any, grace_s: float) -> Any:
        """Begin to end an actor's part."""
        return actor.stop.remote(grace_s)

    def kill(self, actor: Any) -> None:
        """End an actor for good, and its part with it if that still runs."""
        self._ray.kill(actor, no_restart=True)

    def ready(self, questions: Sequence[Any], timeout_s: float = 0.0) -> set[Any]:
        """Those of `questions` that have an answer, or never will."""
        if not questions:
            return set()
        done, _ = self._ray.wait(list(questions), num_returns=len(questions), timeout=timeout_s, fetch_local=True)
        return set(done)

    def answer(self, question: Any) -> Any:
        """The answer to a ready question: what was asked for, or `ActorLost`."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(question)
        except errors.ActorUnavailableError:
            return ActorLost("its node does not answer, or its actor is being started again", comes_back=True)
        except errors.RayError as error:
            # What an actor's own code raised stands at the end of many lines; what Ray says, at the beginning.
            lines = (str(error).strip() or type(error).__name__).splitlines()
            raised = any(line.startswith("Traceback") or "ray::" in line for line in lines)
            return ActorLost(lines[-1 if raised else 0].strip(), comes_back=False)

    def _only(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=False)


def robots(cluster: Cluster, fleet: FleetClient) -> dict[str, tuple[str, RobotState | None]]:
    """All robots that a node of `cluster` offers or that the gateway of `fleet` knows, by name.

    Of each the host name of the node that offers it, '' when none does now, and what the gateway knows of it: health,
    lease, job; None: it has not come to the gateway yet.
    """
    offered, _ = discover(cluster.nodes().values())
    known = {state.name: state for state in fleet.robots()}
    names = sorted(offered.keys() | known.keys())
    return {name: (offered.get(name, ""), known.get(name)) for name in names}


@contextlib.contextmanager
def connected(address: str, robots: Sequence[str], log_file: Path) -> Iterator[Cluster]:
    """A connection to the cluster at `address` (auto, or HOST:PORT), which must have a node on this machine.

    '' starts a cluster of one node on this machine, with `robots`, and ends it. What Ray itself says, at length, of
    nodes that die goes to `log_file`. Raises `ConfigError` when Ray is not installed, `WireError` when there is
    no such cluster, `StorageError` when the file cannot be written.
    """
    # Ray tells its maker of each cluster unless it is asked not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("a cluster needs Ray: pip install 'vla-fleet[cluster]' on every node.") from error
    options: dict[str, Any] = {"namespace": "vla-fleet", "log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        options["address"] = address
    else:
        options["resources"] = {robot_resource(name): 1 for name in robots}
        options |= {"include_dashboard": False, "object_store_memory": _OWN_STORE_BYTES}
        # Alone on a machine the parts share what cores it has, as they do without Ray; none waits for another to end.
        options["num_cpus"] = max(_OWN_LEAST_CPUS, os.cpu_count() or 1)
    # a node on a machine that is busy starts later than Ray waits for, half a minute
    for tries_left in (0,) if address else (2, 1, 0):
        try:
            ray.init(**options)
            break
        except Exception as error:
            ray.shutdown()
            what = f"joining the Ray cluster at '{address}'" if address else "starting Ray on this machine"
            if not tries_left:
                raise WireError(
                    f"{what} failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}. A node of "
                    "the cluster must run on this machine: start one with `vla-fleet ray-node --address HOST:PORT`, or "
                    "the first one with `vla-fleet ray-node --head`."
                ) from error
    with contextlib.ExitStack() as held:
        held.callback(ray.shutdown)
        with storage_errors("writing Ray's messages", log_file):
            log_file.parent.mkdir(parents=True, exist_ok=True)
            output = held.enter_context(log_file.open("a", buffering=1))
        # Ray prints messages of its nodes wherever the driver's output goes, into the middle of a live table.
        held.enter_context(contextlib.redirect_stdout(output))
        yield Cluster(ray)
