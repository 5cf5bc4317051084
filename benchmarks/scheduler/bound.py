"""What nobody could exceed who knew all arrivals and failures beforehand.

The bound is the largest flow through this network, the time being cut into intervals: from the source to (kind of job,
interval), as much as the work that arrives in the interval; from there to the same kind in the next interval, without
limit, and to (group of equal robots, the same interval) if the group fits; from there to the sink, as much as the
group's robots can do in the times in which they are there and well. Work is counted in seconds of a robot of speed 1.

It is a bound: take what any scheduler, with whatever knowledge, has finished by the end. Send the work of each finished
episode into the interval its job came in, on to the intervals in which its robot worked on it, and through that robot's
group there. Work is done after its job came, so the way exists; a robot works on one episode at a time and only while
it is well, so no group's limit is passed; and no more of a job is done than came. So what has been finished is a flow,
and no flow is larger than the largest.

The network allows more than any scheduler could do: work may be done in its interval before it came, an episode may be
cut and shared, robots change jobs at no cost, and one job may use all robots at once.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise, product

import numpy as np

from benchmarks.scheduler.simulator import SECOND, Scenario, SimulatedRobot, available_ns
from benchmarks.scheduler.world import work_s
from hal.resource.capabilities import missing_requirements
from hal.scheduler.records import SchedulerConfig
from wire.messages.fleet import Capabilities, Requirement

INTERVAL_S = 30


def overtaken_s(priority: int, highest: int, config: SchedulerConfig) -> float:
    """After so long a job that waits has become so urgent that no other, up to priority `highest`, comes before it that
    is submitted or given a unit later (docs/scheduling.md)."""
    return max(0, highest - priority) * config.aging_s + config.scarce_s


def clairvoyant_s(world: Scenario, end_ns: int) -> float:
    """The bound of the module's docstring, in seconds of work."""
    groups: dict[Capabilities, list[SimulatedRobot]] = {}
    for robot in world.robots:
        groups.setdefault(robot.capabilities, []).append(robot)
    kinds: dict[tuple[Requirement, tuple[str, ...]], int] = {}
    for arrival in world.arrivals:
        kinds.setdefault((arrival.request.requirement, arrival.request.tasks), len(kinds))
    edges = [*range(0, end_ns, INTERVAL_S * SECOND), end_ns]
    spans = list(pairwise(edges))
    flow = Flow(2 + len(spans) * (len(kinds) + len(groups)))

    def of_kind(kind: int, span: int) -> int:
        return 2 + span * len(kinds) + kind

    def of_group(group: int, span: int) -> int:
        return 2 + len(spans) * len(kinds) + span * len(groups) + group

    arrived = np.zeros((len(kinds), len(spans)), int)
    for arrival in world.arrivals:
        request = arrival.request
        span = min(arrival.time_ns // (INTERVAL_S * SECOND), len(spans) - 1)
        arrived[kinds[request.requirement, request.tasks], span] += round(1e3 * work_s(request))
    fits = [
        (kind, group)
        for ((requirement, tasks), kind), (group, able) in product(kinds.items(), enumerate(groups))
        if not missing_requirements(requirement, "", able) and set(tasks) & set(able.tasks)
    ]
    for span, (begin_ns, stop_ns) in enumerate(spans):
        for kind in range(len(kinds)):
            flow.edge(0, of_kind(kind, span), int(arrived[kind, span]))
            if span + 1 < len(spans):
                flow.edge(of_kind(kind, span), of_kind(kind, span + 1), Flow.NO_LIMIT)
        for kind, group in fits:
            flow.edge(of_kind(kind, span), of_group(group, span), Flow.NO_LIMIT)
        for group, members in enumerate(groups.values()):
            able_ms = sum(available_ns(robot, begin_ns, stop_ns) / robot.speed / 1e6 for robot in members)
            flow.edge(of_group(group, span), 1, int(able_ms) + 1)
    return flow.largest(0, 1) / 1e3


class Flow:
    """The largest flow through a network (Dinic, 1970)."""

    NO_LIMIT = 1 << 60

    def __init__(self, nodes: int) -> None:
        self._from: list[list[int]] = [[] for _ in range(nodes)]
        self._to: list[int] = []
        self._room: list[int] = []

    def edge(self, a: int, b: int, room: int) -> None:
        for here, there, limit in ((a, b, room), (b, a, 0)):
            self._from[here].append(len(self._to))
            self._to.append(there)
            self._room.append(limit)

    def largest(self, source: int, sink: int) -> int:
        total = 0
        while (levels := self._levels(source, sink))[sink] >= 0:
            at = [0] * len(self._from)
            while (sent := self._send(source, sink, levels, at)) > 0:
                total += sent
        return total

    def _levels(self, source: int, sink: int) -> list[int]:
        levels = [-1] * len(self._from)
        levels[source] = 0
        todo = deque([source])
        while todo:
            node = todo.popleft()
            for edge in self._from[node]:
                if self._room[edge] > 0 and levels[self._to[edge]] < 0:
                    levels[self._to[edge]] = levels[node] + 1
                    todo.append(self._to[edge])
        return levels

    def _send(self, source: int, sink: int, levels: list[int], at: list[int]) -> int:
        """As much as one shortest way still carries; 0: there is none."""
        way: list[int] = []
        node = source
        while node != sink:
            edges = self._from[node]
            while at[node] < len(edges):
                edge = edges[at[node]]
                if self._room[edge] > 0 and levels[self._to[edge]] == levels[node] + 1:
                    break
                at[node] += 1
            if at[node] == len(edges):
                if not way:
                    return 0
                node = self._to[way.pop() ^ 1]
                at[node] += 1
            else:
                way.append(edges[at[node]])
                node = self._to[way[-1]]
        sent = min(self._room[edge] for edge in way)
        for edge in way:
            self._room[edge] -= sent
            self._room[edge ^ 1] += sent
        return sent
