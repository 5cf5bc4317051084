"""Parts as Ray actors: placed where they can work, followed, and placed again when their node is lost for good."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fleet.launch.backend import LocalBackend, News, ProcessSpec, ProcessState
from fleet.ray_backend.cluster import ActorLost, Cluster
from fleet.ray_backend.host import TOKEN
from fleet.ray_backend.resources import NEEDS, Node, ResourceRequest, choose_node, discover
from wire.errors import storage_errors
from wire.types import Role

log = logging.getLogger(__name__)

_NODES_EVERY_S = 0.5
_ASK_EVERY_S = 0.5
_SILENT_S = 5.0
_STARTING_S = 30.0
"""how long an actor may take to start before it is said that it has not"""
_PLACE_EVERY_S = 1.0
_LOST_PAUSE_S = 3.0
_PLACED_TIMEOUT_S = 60.0
"""an actor that Ray could not start on its node for so long is placed anew: others took what it was to have"""
_PROBE_TIMEOUT_S = 30.0
_KILL_S = 10.0


@dataclass(slots=True)
class _Placed:
    """A part and its actor."""

    part: ProcessSpec
    state: ProcessState = field(default_factory=ProcessState)
    request: ResourceRequest | None = None
    actor: Any = None
    question: Any = None
    asked_s: float = 0.0
    next_s: float = 0.0
    host_pid: int = 0
    starts_before: int = 0
    """of the actor's earlier incarnations"""
    wanted: bool = True


class RayBackend:
    """Robots are what nodes offer; the gateway and what records beside it stay on this machine."""

    def __init__(self, cluster: Cluster, data: Path, local: LocalBackend) -> None:
        """`data`: the gateway's data directory; `local` runs what stays here."""
        self._cluster = cluster
        self._data = data
        self._local = local
        self._placed: dict[str, _Placed] = {}
        self._nodes: dict[str, Node] = {}
        self._probes: dict[str, tuple[Any, float]] = {}
        self._facts: dict[str, tuple[bool, frozenset[str]]] = {}
        self._robots: dict[str, str] = {}
        self._complaints: list[str] = []
        self._news = News()
        self._next_nodes_s = 0.0
        # What a driver started in some folder may import, its processes elsewhere may, if the folder is there.
        paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {"PYTHONPATH": os.pathsep.join(paths)}
        self._token = secrets.token_hex(16)
        with storage_errors("marking the data directory", data):
            (data / TOKEN).write_text(self._token + "\n")

    @property
    def parts(self) -> Mapping[str, ProcessState]:
        return {**self._local.parts, **{name: placed.state for name, placed in self._placed.items()}}

    def robots(self) -> Mapping[str, str]:
        self._refresh_nodes(time.monotonic())
        return self._robots

    def start(self, part: ProcessSpec) -> None:
        if part.role not in NEEDS:
            self._local.start(part)
            return
        self._placed[part.name] = _Placed(part)

    def poll(self) -> list[str]:
        now_s = time.monotonic()
        said = self._local.poll()
        self._refresh_nodes(now_s)
        said += [text for text in self._complaints if self._news.is_new(text, text)]
        self._handle_answers(now_s)
        for name, placed in self._placed.items():
            self._step(placed, now_s)
            if (fault := placed.state.fault) and placed.wanted and self._news.is_new(name, fault):
                said.append(fault)
        return said

    def stop(self, names: list[str], grace_s: float) -> None:
        self._local.stop([name for name in names if name not in self._placed], grace_s)
        asked = {}
        for placed in (self._placed[name] for name in names if name in self._placed):
            placed.wanted = False
            # One that never answered has nothing to put away.
            if placed.actor is not None and placed.host_pid:
                asked[placed.part.name] = self._cluster.stop(placed.actor, grace_s)
        deadline_s = time.monotonic() + grace_s + _KILL_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            # An actor whose node is gone answers at once with that it is.
            if len(self._cluster.ready(list(asked.values()), min(left_s, 0.2))) == len(asked):
                break
        ready = self._cluster.ready(list(asked.values()))
        for name in names:
            if (found := self._placed.get(name)) is None:
                continue
            answer = self._cluster.answer(asked[name]) if asked.get(name) in ready else None
            if isinstance(answer, dict):
                self._update(found, answer)
            elif name in asked:
                log.error("%s did not say within %.0f s that it ended; its actor is killed.", name, grace_s)
            self._end_actor(found)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _refresh_nodes(self, now_s: float) -> None:
        """See which nodes there are, and ask new ones that could do more than hold robots what they have."""
        if now_s < self._next_nodes_s:
            return
        self._next_nodes_s = now_s + _NODES_EVERY_S
        nodes = self._cluster.nodes()
        self._robots, self._complaints = discover(nodes.values())
        for node in nodes.values():
            strong = node.resources.get("CPU", 0.0) >= 1 or node.resources.get("GPU", 0.0) >= 1
            if strong and node.id not in self._facts and node.id not in self._probes and node.id != self._cluster.home:
                self._probes[node.id] = (self._cluster.probe(node, str(self._data), self._token), now_s)
        ready = self._cluster.ready([question for question, _ in self._probes.values()])
        for node_id, (question, since_s) in list(self._probes.items()):
            if question in ready:
                answer = self._cluster.answer(question)
                if isinstance(answer, ActorLost):
                    log.warning("node %s cannot be used for more than robots: %s", node_id[:8], answer.why)
                    answer = (False, [])
                self._facts[node_id] = (answer[0], frozenset(answer[1]))
            if question in ready or node_id not in nodes or now_s - since_s > _PROBE_TIMEOUT_S:
                del self._probes[node_id]
                self._facts.setdefault(node_id, (False, frozenset()))
        self._nodes = {node_id: self._known(node) for node_id, node in nodes.items()}

    def _known(self, node: Node) -> Node:
        if node.id == self._cluster.home:
            return replace(node, home=True, shares_data=True)
        shares, keys = self._facts.get(node.id, (False, frozenset()))
        return replace(node, shares_data=shares, keys=keys)

    # --- actors -----------------------------------------------------------------------------------------------------

    def _step(self, placed: _Placed, now_s: float) -> None:
        if not placed.wanted or now_s < placed.next_s:
            return
        if placed.actor is None:
            self._start_actor(placed, now_s)
        elif placed.question is None:
            placed.question, placed.asked_s = self._cluster.ask(placed.actor), now_s
        else:
            self._check_silence(placed, now_s)

    def _start_actor(self, placed: _Placed, now_s: float) -> None:
        """Start the actor where `choose_node` says; nobody is placed while nodes are still being looked at."""
        part = placed.part
        others = {name: one.request for name, one in self._placed.items() if one.request is not None}
        if part.role != Role.edge and self._probes:
            found: ResourceRequest | str = f"{part.name} waits until the nodes have said what they have."
        else:
            found = choose_node(part, self._nodes, others)
        if isinstance(found, str):
            placed.next_s = now_s + _PLACE_EVERY_S
            placed.state = msgspec.structs.replace(placed.state, running=False, fault=found)
            return
        placed.request = found
        placed.actor = self._cluster.start(part, found, str(self._data), self._environment)
        placed.question, placed.asked_s = self._cluster.ask(placed.actor), now_s
        placed.state = msgspec.structs.replace(placed.state, fault="")

    def _check_silence(self, placed: _Placed, now_s: float) -> None:
        """An actor that does not answer: say so, and place it anew where that can help."""
        name, silent_s, request = placed.part.name, now_s - placed.asked_s, placed.request
        if request is None or silent_s < (_SILENT_S if placed.host_pid else _STARTING_S):
            return
        node = self._nodes.get(request.node)
        where = f" on {node.host}" if node else ""
        fault = f"{name}{where} does not answer" if placed.host_pid else f"Ray has not started {name}{where} yet"
        placed.state = msgspec.structs.replace(placed.state, running=False, fault=fault)
        # A robot is where it is. Others may go elsewhere when Ray does not bring them up.
        if request.node and (node is None or silent_s > _PLACED_TIMEOUT_S):
            self._give_up(placed, now_s, fault)

    def _give_up(self, placed: _Placed, now_s: float, why: str) -> None:
        """Give an actor up; its part is placed anew."""
        self._end_actor(placed)
        placed.wanted = True
        placed.next_s = now_s + _LOST_PAUSE_S
        placed.state = msgspec.structs.replace(placed.state, fault=why)

    def _end_actor(self, placed: _Placed) -> None:
        """End the actor for good."""
        if placed.actor is not None:
            self._cluster.kill(placed.actor)
        placed.actor = placed.question = placed.request = None
        placed.host_pid, placed.starts_before = 0, placed.state.starts
        placed.wanted = False
        placed.state = msgspec.structs.replace(placed.state, running=False)

    def _handle_answers(self, now_s: float) -> None:
        """Take in what actors answered."""
        asked = {placed.question: placed for placed in self._placed.values() if placed.question is not None}
        for question in self._cluster.ready(list(asked)):
            placed, answer = asked[question], self._cluster.answer(question)
            placed.question, placed.next_s = None, now_s + _ASK_EVERY_S
            if not isinstance(answer, ActorLost):
                self._update(placed, answer)
                if not placed.part.restart and placed.state.starts and not placed.state.running:
                    self._end_actor(placed)  # what it held is for others now
                continue
            why = f"{placed.part.name}: {answer.why}"
            # Ray would wait for the very node to return; only a robot has a reason to.
            elsewhere = placed.request is not None and placed.request.node and placed.request.node not in self._nodes
            if elsewhere or not answer.comes_back:
                self._give_up(placed, now_s, why)
            else:
                placed.state = msgspec.structs.replace(placed.state, running=False, fault=why)

    def _update(self, placed: _Placed, answer: dict[str, Any]) -> None:
        host_pid = answer.pop("host_pid")
        state = msgspec.convert(answer, ProcessState)
        if placed.host_pid not in (0, host_pid):
            placed.starts_before = placed.state.starts
        placed.host_pid = host_pid
        placed.state = msgspec.structs.replace(state, starts=placed.starts_before + state.starts)
