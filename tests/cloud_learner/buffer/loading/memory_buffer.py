"""A buffer in memory and a sampler that does anything it may."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import msgspec
import numpy as np

from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.control import marked_actor
from cloud_learner.buffer.sampling.sampler import BatchPlan
from tests.cloud_learner.buffer.synthetic import fake_jpeg
from wire.errors import InvalidDataError
from wire.messages.gateway import ACTORS, CameraFrames, Segment, TerminalObservation
from wire.types import CameraSpec, Dimension, Episode, RobotSpec

HUMAN, POLICY, SCRIPT, HOLD = (ACTORS.index(name) for name in ("human", "policy", "script", "hold"))
TASKS = {"drawer-open": "open the drawer", "door-open": "open the door"}


class Index(msgspec.Struct, frozen=True, eq=False):
    row: np.ndarray
    episode: np.ndarray
    index: np.ndarray
    first_tick: np.ndarray
    steps: np.ndarray
    frames: np.ndarray
    reward_sum: np.ndarray
    last: np.ndarray
    newest_version: np.ndarray
    outcome: np.ndarray
    run_offsets: np.ndarray
    runs: np.ndarray
    episodes: dict


class Found(msgspec.Struct, frozen=True):
    segments: dict[int, Segment]
    damaged: dict[int, str]
    elsewhere: tuple[int, ...] = ()
    labels: dict[int, np.ndarray] = {}


class MemoryBuffer:
    """Ledger and store at once."""

    def __init__(self, spec: RobotSpec) -> None:
        self.robot = spec
        self.specs = {spec.hash: spec}
        self.segments: dict[int, Segment] = {}
        """by ledger row, all that live"""
        self.stored: dict[int, Segment] = {}
        """all that can still be read"""
        self.numbers: dict[str, int] = {}
        """by episode id"""
        self.damaged: set[int] = set()
        """cannot be read, but the ledger does not know yet"""
        self.elsewhere: set[int] = set()
        self.reads: list[int] = []
        self.asked: list[int] = []
        """what `index` was to begin after"""
        self.version = 0
        self.arrived: dict[int, int] = {}
        """the fleet's newest version when a segment arrived, by ledger row"""
        self.labels: dict[int, np.ndarray] = {}
        """the first label asked for, of each step by ledger row"""
        self._labelled: list[list[int]] = []
        self._row = 0
        self._pruned: list[int] = []
        self._marked: list[int] = []

    def add(self, *segments: Segment) -> list[int]:
        rows = []
        for segment in segments:
            self._row += 1
            self.segments[self._row] = self.stored[self._row] = segment
            self.arrived[self._row] = self.version
            self.numbers.setdefault(segment.episode.id, len(self.numbers) + 1)
            rows.append(self._row)
        return rows

    def prune(self, episode: str) -> None:
        self.segments = {row: s for row, s in self.segments.items() if s.episode.id != episode}
        self._pruned.append(self.numbers.get(episode, -1))

    def mark_damaged(self, row: int) -> None:
        del self.segments[row], self.stored[row]
        self._marked.append(row)
        self._pruned.append(-1)

    def until(self, row: int) -> MemoryBuffer:
        """A copy as it was when `row` was the newest."""
        copy = MemoryBuffer(self.robot)
        copy.segments = {r: s for r, s in self.segments.items() if r <= row}
        copy.stored = dict(copy.segments)
        copy.numbers = {
            id: n for id, n in self.numbers.items() if any(s.episode.id == id for s in copy.segments.values())
        }
        copy.arrived = dict(self.arrived)
        copy._row = row
        return copy

    def spec(self, spec_hash: str) -> RobotSpec:
        if spec_hash not in self.specs:
            raise InvalidDataError(f"robot spec {spec_hash} is unknown.")
        return self.specs[spec_hash]

    def put_step_labels(self, labels: dict[int, np.ndarray]) -> None:
        self.labels |= labels
        self._labelled.append(sorted(labels))

    def step_labels(self, rows: Sequence[int], names: Sequence[str]) -> dict[int, dict[str, np.ndarray]]:
        return {row: {names[0]: self.labels[row]} for row in rows if row in self.labels}

    def labelled_since(self, revision: int, names: Sequence[str]) -> tuple[tuple[int, ...], int]:
        return tuple(sorted({row for rows in self._labelled[revision:] for row in rows})), len(self._labelled)

    def generation(self) -> int:
        return len(self._pruned)

    def gone_since(self, generation: int) -> tuple[tuple[int, ...], np.ndarray]:
        return tuple(self._pruned[generation:]), np.array(sorted(self._marked), np.int64)

    def newest_version(self):
        return SimpleNamespace(version=SimpleNamespace(number=self.version))

    def places(self, rows: Sequence[int]):
        return {row: SimpleNamespace(journal=1 if row in self.elsewhere else None) for row in rows}

    def index(self, after: int, data_hash: str, limit: int | None = None) -> Index:
        assert data_hash == self.robot.data_hash
        self.asked.append(after)
        chosen = [(row, s) for row, s in self.segments.items() if row > after]
        chosen = chosen[:limit]
        runs, offsets = [], [0]
        for _, s in chosen:
            actor = marked_actor(s)
            change = np.flatnonzero((np.diff(actor) != 0) | (np.diff(s.version) != 0)) + 1
            firsts = np.r_[0, change] if s.steps else np.zeros(0, np.int64)
            counts = np.diff(np.r_[firsts, s.steps])[: len(firsts)]
            runs += [(f, c, actor[f], s.version[f]) for f, c in zip(firsts.tolist(), counts.tolist(), strict=True)]
            offsets.append(len(runs))
        ep = {self.numbers[s.episode.id]: s.episode for _, s in chosen}
        return Index(
            row=np.array([row for row, _ in chosen], np.int64),
            episode=np.array([self.numbers[s.episode.id] for _, s in chosen], np.int64),
            index=np.array([s.index for _, s in chosen], np.int32),
            first_tick=np.array([s.first_tick for _, s in chosen], np.int64),
            steps=np.array([s.steps for _, s in chosen], np.int32),
            frames=np.array([sum(len(f.encoded) for f in s.frames.values()) for _, s in chosen], np.int32),
            reward_sum=np.array([s.reward.sum(dtype=np.float64) for _, s in chosen]),
            last=np.array([s.last for _, s in chosen], bool),
            newest_version=np.array([self.arrived[row] for row, _ in chosen], np.int32),
            outcome=np.array([OUTCOMES.index(s.outcome) if s.last else -1 for _, s in chosen], np.int8),
            run_offsets=np.array(offsets, np.int64),
            runs=np.array(runs, np.int32).reshape(-1, 4),
            episodes=ep,
        )

    def read(self, rows: Sequence[int]) -> Found:
        self.reads += rows
        there = [row for row in rows if row in self.stored and row not in self.elsewhere]
        return Found(
            {row: self.stored[row] for row in there if row not in self.damaged},
            {row: "it is damaged" for row in there if row in self.damaged},
            tuple(row for row in rows if row in self.elsewhere),
        )


# --- episodes ---------------------------------------------------------------------------------------------------------


def robot(cameras: Sequence[tuple[int, int, float]]) -> RobotSpec:
    """A robot of 40 Hz with cameras of (height, width, rate)."""
    return RobotSpec(
        embodiment="fake",
        state=tuple(Dimension(f"s{i}", "m", -1.0, 1.0) for i in range(3)),
        action=tuple(Dimension(f"a{i}", "m", -1.0, 1.0) for i in range(2)),
        cameras=tuple(CameraSpec(f"camera{i}", h, w, rate) for i, (h, w, rate) in enumerate(cameras)),
        control_hz=40.0,
    )


def record(
    spec: RobotSpec,
    name: str,
    lengths: Sequence[int],
    seed: int,
    *,
    source: str = "online",
    task: str = "drawer-open",
    finished: bool = True,
    early: bool = False,
) -> list[Segment]:
    """An episode of segments of these `lengths`, random in all that it may be.

    `early`: some frames come with the segment before the one whose steps saw them first.
    """
    rng = np.random.default_rng([seed, len(lengths)])
    total, ends = sum(lengths), np.cumsum(lengths)
    times = 10**12 + np.arange(total, dtype=np.int64) * spec.period_ns
    actor = rng.integers(0, 4, total + 1)[np.cumsum(rng.random(total) < 0.15)].astype(np.uint8)
    version = np.cumsum(rng.random(total) < 0.1).astype(np.int32)
    # what is random otherwise stays what it was; half of the episodes are of robots that cannot say so
    recovers = (actor == HUMAN) & (np.arange(total) // 5 % 2 == 0) & bool(seed % 2)
    seen, images = {}, {}
    for c, camera in enumerate(spec.cameras):
        fresh = rng.random(total) < camera.rate_hz / spec.control_hz
        fresh[:1] = True
        taken = times - rng.integers(1000, spec.period_ns // 2) - c
        seen[camera.name] = taken[np.maximum.accumulate(np.where(fresh, np.arange(total), 0))]
        images[camera.name] = {
            int(time): fake_jpeg(camera.height, camera.width, rng) for time in np.unique(seen[camera.name])
        }
    state = rng.normal(size=(total, spec.state_dim)).astype(np.float32)
    executed = rng.normal(size=(total, spec.action_dim)).astype(np.float32)
    reward = rng.normal(size=total).astype(np.float32)
    delay = rng.integers(-1, 9, total).astype(np.int16)
    ended = np.zeros((3, total), bool)
    if finished:
        # by itself, cut short, or in a recording that does not say
        ended[rng.integers(3), -1:] = True
    terminal = None
    if finished and total and rng.random() < 0.7:
        after = times[-1] + spec.period_ns
        looked = {camera.name: int(seen[camera.name][-1]) for camera in spec.cameras}
        for camera in spec.cameras:
            if rng.random() < 0.5:
                looked[camera.name] = int(after) - 500
                images[camera.name][looked[camera.name]] = fake_jpeg(camera.height, camera.width, rng)
        terminal = TerminalObservation(int(after), rng.normal(size=spec.state_dim).astype(np.float32), looked)
    episode = Episode(name, "r1", spec.hash, task, seed, source, 10**12)
    outcome = OUTCOMES[int(rng.integers(3))]
    found = []
    brought: dict[str, set[int]] = {camera.name: set() for camera in spec.cameras}
    for index, (end, length) in enumerate(zip(ends.tolist(), lengths, strict=True)):
        here = slice(end - length, end)
        frames = {}
        for camera in spec.cameras:
            until = min(total, end + int(rng.integers(0, 6))) if early else end
            shown = set(seen[camera.name][:until].tolist())
            if terminal and index == len(lengths) - 1:
                shown.add(terminal.frame_times_ns[camera.name])
            new = sorted(shown - brought[camera.name])
            brought[camera.name] |= set(new)
            frames[camera.name] = CameraFrames(np.array(new, np.int64), tuple(images[camera.name][t] for t in new))
        last = finished and index == len(lengths) - 1
        found.append(
            Segment(
                id=f"{name}/{index}",
                episode=episode,
                index=index,
                first_tick=end - length,
                last=last,
                outcome=outcome if last else "",
                closed_ns=10**12,
                times_ns=times[here],
                state=state[here],
                proposed=executed[here],
                executed=executed[here],
                actor=actor[here],
                chunk_tick=np.zeros(length, np.int32),
                delay_ticks=delay[here],
                version=version[here],
                reward=reward[here],
                terminated=ended[0][here],
                truncated=ended[1][here],
                frame_times_ns={name: values[here] for name, values in seen.items()},
                frames=frames,
                terminal=terminal if last else None,
                recovery=recovers[here] if recovers[here].any() else msgspec.UNSET,
            )
        )
    return found


# --- a sampler --------------------------------------------------------------------------------------------------------


class ChaosSampler:
    """Admits and releases random neighbours within its budget, and draws anywhere in what it holds."""

    most_blocks = 6

    def __init__(self, universe, target, cost, budget_bytes, batch, seed, echo=1.0, newest_version=0):
        self.universe, self.target, self.cost = universe, target, cost
        self.budget, self.batch, self.seed = budget_bytes, batch, seed
        self.number, self.held, self.echo = 0, [], echo
        self.loaded = set()
        self.noted = []
        self.refresh(newest_version)

    def refresh(self, newest_version):
        self.known = len(self.universe)
        self.version = newest_version
        self.held = [block for block in self.held if not any(self.universe.gone[s] for s in block)]

    @property
    def stats(self):
        return SimpleNamespace(sweeping_strata=0, eligible_steps=1, rollout_steps=0, stale_steps=0)

    def note(self, task, online, loss):
        self.noted.append((task, online, loss))

    def next(self):
        rng = np.random.default_rng([self.seed, self.number])
        eligible = self._eligible()
        if not eligible:
            raise InvalidDataError("there is no step to learn from yet")
        population = sorted(eligible)
        for _ in range(int(rng.integers(1, 4))):
            first = population[int(rng.integers(len(population)))]
            block, at = [first], int(self.universe.following[first])
            while 0 <= at < self.known and rng.random() < 0.5:
                block.append(at)
                at = int(self.universe.following[at])
            if self._size([*self.held, block]) <= self.budget and len(self.held) < self.most_blocks:
                self.held.append(tuple(block))
        here = {s for block in self.held for s in block}
        there = [s for s in dict.fromkeys(s for block in self.held for s in block) if s in eligible]
        segments = np.array([there[i] for i in rng.integers(0, len(there), self.batch)], np.int64)
        offsets = np.array([rng.choice(eligible[s]) for s in segments.tolist()], np.int64)
        drop, load = sorted(self.loaded - here), sorted(here - self.loaded)
        self.loaded = here
        for block in [block for block in self.held if rng.random() < 0.4][: len(self.held) - 1]:
            self.held.remove(block)
        # at least one block with something to draw stays or comes next time: the budget allows one at any time
        self.number += 1
        return BatchPlan(
            self.number - 1,
            np.array(drop, np.int64),
            np.array(load, np.int64),
            segments,
            offsets,
            np.zeros(self.batch),
            self.version,
        )

    def state(self):
        rows = self.universe.row
        return {
            "number": self.number,
            "known": int(rows[self.known - 1]) if self.known else 0,
            "version": self.version,
            "held": [[int(rows[s]) for s in block] for block in self.held],
        }

    def restore(self, state):
        self.number, self.version = state["number"], state["version"]
        self.known = int(np.searchsorted(self.universe.row, state["known"], "right"))
        self.held = [tuple(self.universe.find(np.array(block)).tolist()) for block in state["held"]]
        self.loaded = set()
        return True

    def _size(self, blocks):
        return int(self.cost(np.unique([s for block in blocks for s in block])).sum())

    def _eligible(self):
        found = {}
        u = self.universe
        for s in range(self.known):
            if u.gone[s]:
                continue
            offsets = []
            for r in range(int(u.run_offsets[s]), int(u.run_offsets[s + 1])):
                if self.target.starts(u.run_actor[r : r + 1], bool(u.demonstration[s]))[0]:
                    offsets += range(u.run_first[r], u.run_first[r] + u.run_count[r])
            if offsets:
                found[s] = offsets
        return found


SHAPES = {"arm": robot([(8, 8, 20.0)]), "base": robot([]), "hand": robot([(16, 8, 40.0)])}
"""robots of three shapes"""


def shape_buffers() -> dict[str, MemoryBuffer]:
    """One of each; what the hand has done is not there yet."""
    found = {name: MemoryBuffer(spec) for name, spec in SHAPES.items()}
    for number, (name, buffer) in enumerate(found.items()):
        if name != "hand":
            buffer.add(*record(buffer.robot, f"{name}-e", [20, 20], number))
    return found
