"""What nodes offer, what parts need, and which part goes where. Pure: nothing here knows Ray or a clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet.launch.backend import ProcessSpec
from wire.errors import ConfigError
from wire.transport.keys import check_name
from wire.types import Role

ROBOT = "robot:"
"""a node that has robot NAME offers 1 of the custom resource `robot:NAME`"""


@dataclass(frozen=True, slots=True)
class Node:
    """One living node of the cluster."""

    id: str
    host: str
    resources: Mapping[str, float] = field(default_factory=dict)
    """what it offers in all, not what is free"""
    home: bool = False
    """where `vla-fleet up` runs"""
    shares_data: bool = False
    """the gateway's data directory is there, under the same path"""
    keys: frozenset[str] = frozenset()
    """names whose secret keys are there"""


@dataclass(frozen=True, slots=True)
class Need:
    """What a role needs of its node."""

    cpus: float = 0.0
    gpu: bool = False
    """one GPU where there is one"""
    shares_data: bool = False
    """it reads the buffer or writes checkpoints in the gateway's data directory"""
    spread: bool = False
    """as far from other parts as there is room"""


NEEDS = {
    # A robot's computer lends no CPU to be counted: its edge runs there because the robot is there.
    Role.edge: Need(),
    Role.trainer: Need(cpus=1.0, gpu=True, shares_data=True),
    Role.evaluator: Need(cpus=1.0, spread=True),
    Role.thinker: Need(cpus=1.0, gpu=True),
}
"""by role; the others (gateway, demonstrator) stay where `vla-fleet up` runs"""


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What Ray is asked for, for one actor."""

    cpus: float = 0.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    node: str = ""
    """id of the one node it may run on, '' where its resources are"""


def robot_resource(name: str) -> str:
    """The custom resource of robot `name`. Raises `ConfigError` for what cannot be a name."""
    return ROBOT + check_name(name)


def living(nodes: Iterable[Mapping[str, Any]]) -> dict[str, Node]:
    """Nodes by id from what `ray.nodes()` returns, without the dead ones."""
    return {
        node["NodeID"]: Node(node["NodeID"], node["NodeManagerHostname"], dict(node["Resources"]))
        for node in nodes
        if node["Alive"]
    }


def discover(nodes: Iterable[Node]) -> tuple[dict[str, str], list[str]]:
    """Host name by name of each robot that `nodes` offer, and what is wrong with what they offer.

    A name that two nodes offer is one robot: Ray gives it to one edge.
    """
    robots: dict[str, str] = {}
    complaints = []
    for node in sorted(nodes, key=lambda node: (node.host, node.id)):
        for resource, amount in sorted(node.resources.items()):
            if not resource.startswith(ROBOT) or amount <= 0:
                continue
            name = resource.removeprefix(ROBOT)
            try:
                check_name(name)
            except ConfigError as error:
                complaints.append(f"node {node.host} offers {resource}: {error}")
                continue
            if name in robots:
                complaints.append(
                    f"{resource} is offered by {robots[name]} and by {node.host}: two robots have one name and only "
                    "one of them works. Give one another name with --robots where its node is started."
                )
                continue
            if amount != 1:
                complaints.append(f"node {node.host} offers {amount:g} of {resource}: a robot is 1.")
            robots[name] = node.host
    return robots, complaints


def choose_node(
    part: ProcessSpec, nodes: Mapping[str, Node], placed: Mapping[str, ResourceRequest]
) -> ResourceRequest | str:
    """Where `part` goes among the living `nodes`, next to the other parts' requests `placed` (by part name).

    A sentence that says for what it waits, when there is no place now.

    An edge goes wherever its robot is; a trainer and a think server to a GPU if one is free where they can work, else
    to a CPU, near the gateway rather than far; evaluators to the node with the least of our parts.
    """
    if part.role == Role.edge:
        return ResourceRequest(resources={robot_resource(part.name): 1.0})
    need = NEEDS[part.role]
    able = [node for node in nodes.values() if node.home or _able(part, need, node)]
    with_gpu = [node for node in able if need.gpu and _free(node, placed, "GPU") >= 1]
    if with_gpu:
        best = min(with_gpu, key=lambda node: (not node.home, -node.resources["GPU"], node.host, node.id))
        return ResourceRequest(cpus=min(need.cpus, best.resources.get("CPU", 0.0)), gpus=1.0, node=best.id)
    with_cpu = [node for node in able if _free(node, placed, "CPU") >= need.cpus]
    if with_cpu:
        busy = {node.id: sum(request.node == node.id for request in placed.values()) for node in with_cpu}
        best = min(
            with_cpu,
            key=lambda node: ((busy[node.id], node.home) if need.spread else (not node.home, 0), node.host, node.id),
        )
        return ResourceRequest(cpus=need.cpus, node=best.id)
    where = "sees the gateway's data directory" if need.shares_data else f"has the secret key of '{part.name}'"
    return f"{part.name} waits for a node that {where} and has {need.cpus:g} CPU free."


def _able(part: ProcessSpec, need: Need, node: Node) -> bool:
    return node.shares_data if need.shares_data else node.shares_data or part.name in node.keys


def _free(node: Node, placed: Mapping[str, ResourceRequest], kind: str) -> float:
    """What our own parts leave of it. What others on the cluster took shows when Ray lets a part wait."""
    taken = sum(
        request.gpus if kind == "GPU" else request.cpus for request in placed.values() if request.node == node.id
    )
    return node.resources.get(kind, 0.0) - taken
