"""What a fleet of N robots does: what arrives, how far behind, and what limits it first. Pure arithmetic, no I/O.

A version is published each T_pub = max(publish interval, k T_train) seconds, k gradient steps of T_train, and acts on a
robot T_bcast later. Until the next one acts there, so for at most P = max(T_pub, time to fetch it) more, steps are made
by it, and they arrive T_arrive after they were decided. Versions committed meanwhile are the lag of the last of them:

    lag = ceil((P + T_bcast + T_arrive) / T_pub) - 1, in gradient steps ceil((P + T_bcast + T_arrive) / T_train) - 1

which for P = k T_train is k - 1 + ceil((T_bcast + T_arrive) / T_train): the version lag S of ECHO-2 (arXiv 2602.02192)
with the way back to the learner added. It is the largest that is to be expected; most steps arrive with less.

Throughput is counted in recorded steps a second: what the trainer uses up, robots make, their links carry and the
gateway takes in. The smallest of these is the bottleneck.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from wire.errors import ConfigError

MOST_ROBOTS = 4096
"""looked at"""
_HAIR = 1e-9
"""what floating point may be off by before something is rounded up"""


class Bottleneck(StrEnum):
    """What limits a fleet first."""

    trainer = "trainer"
    """it is busy all the time, and robots bring enough"""
    robots = "robots"
    """they record too little, or hand it in too late"""
    link = "link"
    """between robots and gateway, either way"""
    gateway = "gateway"
    """what it takes in"""


class FleetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan follows from. Seconds, bytes, bytes a second. Raises `ConfigError` for what cannot be."""

    gradient_step_s: float
    """T_train, busy all the time"""
    draws_per_step: float
    """steps that one gradient step is drawn from: the batch, times those behind each image"""
    draws_per_insert: float = 1.0
    """how often a recorded step is drawn, on average: `samples_per_insert`, or else the echo"""
    publish_every_s: float = 0.0
    """between two versions, at least"""
    steps_per_publish: float = 1.0
    """k: gradient steps between two versions, at least"""
    version_bytes: float
    """of what one robot fetches of a version"""
    publish_s: float = 0.0
    """from a version's number until the gateway has it"""
    apply_s: float = 0.0
    """from the last byte on a robot until it acts on the version"""
    gateway_up_bytes_s: float
    """to all robots together"""
    gateway_down_bytes_s: float
    robot_up_bytes_s: float
    """of each"""
    robot_down_bytes_s: float
    relay_fanout: int = 0
    """robots to which the gateway and each robot hand a version on, piece by piece; 0: all fetch it from the gateway"""
    relay_chunk_bytes: float = 1e6
    """of a piece"""
    control_hz: float
    active: float = 1.0
    """share of the time in which a robot records"""
    step_bytes: float
    """of a recorded step on the line"""
    segment_s: float = 1.0
    """of recording that is handed in at once"""
    chunk_s: float = 0.0
    """for which a robot goes on by actions that were chosen by the version before"""
    ingest_bytes_s: float
    """that a gateway takes in"""
    gateway_robots: float = math.inf
    """whose messages it can serve"""

    def __post_init__(self) -> None:
        positive = (
            *("gradient_step_s", "draws_per_step", "draws_per_insert", "version_bytes", "gateway_up_bytes_s"),
            *("gateway_down_bytes_s", "robot_up_bytes_s", "robot_down_bytes_s", "relay_chunk_bytes", "control_hz"),
            *("active", "step_bytes", "segment_s", "ingest_bytes_s", "gateway_robots"),
        )
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if math.isnan(value) or value < 0 or (name in positive and value == 0):
                least = "above 0" if name in positive else "0 or more"
                raise ConfigError(f"plan: {name} is {value:g}; it must be {least}.")
        if self.active > 1:
            raise ConfigError(f"plan: active is {self.active:g}; it is a share of the time, 1 at most.")
        if self.steps_per_publish < 1:
            raise ConfigError(
                f"plan: steps_per_publish is {self.steps_per_publish:g}; a version has at least one step."
            )

    @property
    def needed_steps_s(self) -> float:
        """Recorded steps a second that keep the trainer busy."""
        return self.draws_per_step / self.gradient_step_s / self.draws_per_insert

    def fetch_s(self, robots: int) -> float:
        """Until all `robots` have a version: N size/BW, or relayed in pieces down a tree size/BW + depth chunk/BW."""
        if not self.relay_fanout:
            return max(
                robots * self.version_bytes / self.gateway_up_bytes_s, self.version_bytes / self.robot_down_bytes_s
            )
        one_way = min(self.gateway_up_bytes_s, self.robot_up_bytes_s) / self.relay_fanout
        pace = min(one_way, self.robot_down_bytes_s)
        depth, reached = 1, self.relay_fanout
        while self.relay_fanout > 1 and reached < robots:
            depth += 1
            reached += self.relay_fanout**depth
        depth = robots if self.relay_fanout == 1 else depth
        return (self.version_bytes + (depth - 1) * self.relay_chunk_bytes) / pace


class FleetRow(msgspec.Struct, frozen=True):
    """A fleet of so many robots."""

    robots: int
    recorded_steps_s: float
    """by all robots together"""
    arriving_steps_s: float
    """of these, as many as links and gateway take"""
    trainer_busy: float
    """share of the time"""
    publish_every_s: float
    """T_pub"""
    broadcast_s: float
    """T_bcast, until the last robot acts on a version"""
    arrive_s: float
    """T_arrive"""
    lag: int | None
    """in versions, at most; None: it grows without end, for more is recorded than arrives"""
    lag_steps: int | None
    """the same in gradient steps"""
    within: bool
    """whether the lag is within S"""
    link_share: float
    """of what the links can carry, the busier way of them; above 1 they cannot"""
    ingest_share: float
    """the same of the gateway"""
    bottleneck: Bottleneck


class FleetPlan(msgspec.Struct, frozen=True):
    """What robots are enough, and too many."""

    max_lag: int
    """S"""
    needed_steps_s: float
    busy_robots: int | None
    """fewest that keep the trainer busy with a lag within S; None: no number does"""
    most_robots: int | None
    """most with a lag within S, None: not even one; `MOST_ROBOTS` or more are not told apart"""
    best: FleetRow
    """of the fewest robots with which the trainer is as busy as it can be within S; of one if none is within S"""
    bottleneck: Bottleneck
    """why the trainer cannot be busier than with these"""
    publish_every_s: float | None
    """the shortest interval between versions at which the lag of `best` stays within S and the links carry them; None
    for S = 0"""
    rows: tuple[FleetRow, ...]


def fleet_row(figures: FleetFigures, robots: int, max_lag: int) -> FleetRow:
    """A fleet of `robots`, at least 1, with S = `max_lag`."""
    f = figures
    each = f.control_hz * f.active
    offered, needed = robots * each, f.needed_steps_s
    carried = min(robots * f.robot_up_bytes_s, f.gateway_down_bytes_s) / f.step_bytes
    taken = min(f.ingest_bytes_s / f.step_bytes, f.gateway_robots * each)
    arriving = min(offered, carried, taken)
    busy = min(1.0, arriving / needed)
    step_s = f.gradient_step_s / busy
    publish_s = max(f.publish_every_s, f.steps_per_publish * step_s)
    fetch_s = f.fetch_s(robots)
    upload_s = f.segment_s * each * f.step_bytes / min(f.robot_up_bytes_s, f.gateway_down_bytes_s / robots)
    broadcast_s, arrive_s = f.publish_s + fetch_s + f.apply_s, f.chunk_s + f.segment_s + upload_s
    lag = lag_steps = None
    if offered <= min(carried, taken) * (1 + _HAIR):
        behind_s = max(publish_s, fetch_s) + broadcast_s + arrive_s
        lag, lag_steps = (math.ceil(behind_s / unit_s - _HAIR) - 1 for unit_s in (publish_s, step_s))
    within = lag is not None and lag <= max_lag
    stages = {
        Bottleneck.trainer: needed,
        Bottleneck.robots: offered,
        Bottleneck.link: carried,
        Bottleneck.gateway: taken,
    }
    bottleneck = min(stages, key=lambda stage: stages[stage])
    if lag is None:
        bottleneck = Bottleneck.link if carried <= taken else Bottleneck.gateway
    elif not within:
        sent_s = f.publish_s + fetch_s + upload_s
        bottleneck = Bottleneck.link if sent_s >= broadcast_s + arrive_s - sent_s else Bottleneck.robots
    return FleetRow(
        robots=robots,
        recorded_steps_s=offered,
        arriving_steps_s=arriving,
        trainer_busy=busy,
        publish_every_s=publish_s,
        broadcast_s=broadcast_s,
        arrive_s=arrive_s,
        lag=lag,
        lag_steps=lag_steps,
        within=within,
        link_share=max(offered / carried, fetch_s / publish_s),
        ingest_share=offered / taken,
        bottleneck=bottleneck,
    )


def make_plan(figures: FleetFigures, max_lag: int, shown: Iterable[int] = ()) -> FleetPlan:
    """How many robots are enough at S = `max_lag`; with rows for `shown` of them, else for those that tell something.

    Raises `ConfigError` for a number that is none of robots, or a negative lag.
    """
    shown = sorted(set(shown))
    if max_lag < 0 or (shown and not 1 <= shown[0] <= shown[-1] <= MOST_ROBOTS):
        raise ConfigError(
            f"plan: a lag of {max_lag} and {shown} robots; 0 or more, and 1 to {MOST_ROBOTS} are possible."
        )
    every = [fleet_row(figures, robots, max_lag) for robots in range(1, MOST_ROBOTS + 1)]
    good = [row for row in every if row.within]
    best = max(good or every[:1], key=lambda row: (row.trainer_busy, -row.robots))
    busy = best.robots if good and best.trainer_busy >= 1 - _HAIR else None
    most = good[-1].robots if good else None
    if not shown:
        until = min(MOST_ROBOTS, 2 * best.robots)
        shown = sorted({2**n for n in range(until.bit_length() + 1) if 2**n <= until} | {best.robots})
        if most is not None and most < until:
            shown = sorted({*shown, most, most + 1})
    needed_s = None
    if max_lag:
        fetch_s = figures.fetch_s(best.robots)
        needed_s = max(fetch_s, (best.broadcast_s + best.arrive_s) / max_lag)
    # one more would be too many, and says why
    limit = every[most] if busy is None and most is not None and most < MOST_ROBOTS else best
    rows = tuple(every[robots - 1] for robots in shown)
    return FleetPlan(max_lag, figures.needed_steps_s, busy, most, best, limit.bottleneck, needed_s, rows)
