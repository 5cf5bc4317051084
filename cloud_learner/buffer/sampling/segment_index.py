"""Every segment that may be learned from, as flat arrays: what the planner draws from and the loader looks up.

A *segment number* s is the position here (0 to n - 1, in the order of ledger rows); it never changes while the process
lives. A *run* is a stretch of steps of one segment with the same actor, marked if it recovers, and policy version.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, get_origin, get_type_hints

import numpy as np

from cloud_learner.buffer.check import DISCARDED, SOURCES
from cloud_learner.buffer.control import arrival_lag
from cloud_learner.buffer.ledger.rows import EpisodeFacts, SegmentColumns
from cloud_learner.buffer.sampling.growing import Growing
from cloud_learner.buffer.sampling.target import StepRuns
from wire.errors import ConfigError, InvalidDataError

_ONLINE, _DEMONSTRATION = SOURCES[0], SOURCES[1]


def on_side(episode_id: str, validation: float, held_out: bool) -> bool:
    """Whether an episode is among those held out, a share `validation` of all, or among the others.

    A hash of its id says so: it is the same for everybody and for good. With a share of 0 nothing is split.
    """
    return not validation or (zlib.crc32(episode_id.encode()) < validation * 2**32) == held_out


class SegmentIndex:
    """Grows with the ledger. Its arrays are read-only views: take them again after `extend`.

    Left out: evaluation episodes (held-out seeds stay held out), tasks that were not asked for, and the episodes of a
    validation share. Not for several threads at once.
    """

    row: Annotated[np.ndarray, np.int64]
    """[n] ledger row, growing"""
    episode: Annotated[np.ndarray, np.int64]
    """[n] dense number of the episode here: an index into `episode_numbers`"""
    index: Annotated[np.ndarray, np.int32]
    """[n]"""
    first_tick: Annotated[np.ndarray, np.int64]
    """[n]"""
    steps: Annotated[np.ndarray, np.int32]
    """[n]"""
    frames: Annotated[np.ndarray, np.int32]
    """[n] over all cameras"""
    task: Annotated[np.ndarray, np.int32]
    """[n] index into `tasks`"""
    online: Annotated[np.ndarray, np.bool_]
    """[n]"""
    demonstration: Annotated[np.ndarray, np.bool_]
    """[n]"""
    reward_sum: Annotated[np.ndarray, np.float64]
    """[n]"""
    last: Annotated[np.ndarray, np.bool_]
    """[n]"""
    newest_version: Annotated[np.ndarray, np.int32]
    """[n] of the fleet, when the segment arrived"""
    gone: Annotated[np.ndarray, np.bool_]
    """[n] pruned or damaged since it was added"""
    label: Annotated[np.ndarray, np.float32]
    """[n] what `put_labels` was told last, nan for nothing"""
    previous: Annotated[np.ndarray, np.int64]
    """[n] segment number of index - 1 of the same episode if it is there and its ticks adjoin, else -1"""
    following: Annotated[np.ndarray, np.int64]
    """[n] the same for index + 1"""
    run_offsets: np.ndarray
    """int64[n + 1]: runs of segment s are [run_offsets[s], run_offsets[s + 1])"""
    run_segment: Annotated[np.ndarray, np.int64]
    """[R] segment number"""
    run_first: Annotated[np.ndarray, np.int32]
    """[R] first offset in the segment"""
    run_count: Annotated[np.ndarray, np.int32]
    """[R] steps"""
    run_actor: Annotated[np.ndarray, np.uint8]
    """[R] index into `wire.messages.gateway.ACTORS`"""
    run_version: Annotated[np.ndarray, np.int32]
    """[R]"""
    episode_numbers: np.ndarray
    """int64[E] ledger number by dense number"""
    forgotten: np.ndarray
    """int64 segment numbers in the order in which they left"""

    def __init__(
        self,
        tasks: tuple[str, ...],
        validation: float = 0.0,
        held_out: bool = False,
        until_row: int = 0,
    ) -> None:
        """`tasks` in the order that `task` counts. A share `validation` of the episodes is left out, or with `held_out`
        all others; so is what came after `until_row`, if it is not 0. Raises `ConfigError` for no task or one twice.
        """
        self._validation, self._held_out, self._until = validation, held_out, until_row or 2**63 - 1
        if not tasks or len(set(tasks)) != len(tasks):
            raise ConfigError(f"universe: tasks {tasks} must be at least one, each once.")
        self.tasks = tuple(tasks)
        self.watermark = 0
        """newest ledger row looked at, also those left out: pass it to `ledger.index(after=...)`"""
        columns = get_type_hints(type(self), include_extras=True).items()
        grown = {name: Growing(hint.__metadata__[0]) for name, hint in columns if get_origin(hint) is Annotated}
        self._segment = {name: column for name, column in grown.items() if not name.startswith("run_")}
        self._run = {name: column for name, column in grown.items() if name.startswith("run_")}
        self._run_offsets = Growing(np.int64)
        self._run_offsets.append(np.zeros(1, np.int64))
        self._dense: dict[int, int] = {}
        self.robot_names: dict[str, int] = {}
        self._episode = {
            "number": Growing(np.int64),
            "task": Growing(np.int32),
            "demonstration": Growing(np.bool_),
            "robot": Growing(np.int32),
            "outcome": Growing(np.int8),
            # segment number of its last segment, -1 until that is there, and how many there are
            "last": Growing(np.int64),
            "segments": Growing(np.int64),
            # segment number of the one that came last, -1 for none
            "newest": Growing(np.int64),
        }
        # by segment number, the one of the same episode that came before it, -1 for none
        self._earlier = Growing(np.int64)
        self._forgotten, self._after = Growing(np.int64), Growing(np.float64)
        self._publish()

    def __len__(self) -> int:
        return len(self.row)

    def extend(self, index: SegmentColumns, until: int | None = None) -> np.ndarray:
        """Take in the segments of `index` above the watermark. int64[k] numbers of those added, growing.

        `until`: and only those up to this row. Raises `InvalidDataError` if the rows of `index` do not grow, for then
        it is no answer of a ledger.
        """
        rows = np.asarray(index.row)
        if (np.diff(rows) <= 0).any():
            raise InvalidDataError("universe: the rows of the ledger's index do not grow; it cannot be taken in.")
        episode = self._dense_numbers(np.asarray(index.episode), index.episodes)
        last = until if until is not None else int(rows[-1]) if len(rows) else 0
        wanted = np.flatnonzero((rows > self.watermark) & (rows <= min(last, self._until)) & (episode >= 0))
        self.watermark = max(self.watermark, last)
        added = len(self) + np.arange(len(wanted))
        if not len(added):
            return added
        episode = episode[wanted]
        task, demonstration = self._episode["task"].all[episode], self._episode["demonstration"].all[episode]
        columns: dict[str, np.ndarray] = {
            name: np.asarray(getattr(index, name))[wanted]
            for name in ("row", "index", "first_tick", "steps", "frames", "reward_sum", "last", "newest_version")
        }
        columns |= {"episode": episode, "task": task, "demonstration": demonstration, "online": ~demonstration}
        columns |= {"gone": np.zeros(len(added), bool), "label": np.full(len(added), np.nan)}
        columns |= {name: np.full(len(added), -1) for name in ("previous", "following")}
        for name, values in columns.items():
            self._segment[name].append(values)
        self._after.append(np.full(len(added), np.nan))
        self._append_runs(index, wanted, added)
        self._note_ends(added, np.asarray(index.outcome)[wanted])
        self._publish()
        self._link(added)
        return added

    def forget(self, episodes: Iterable[int], rows: np.ndarray) -> np.ndarray:
        """Segments left the ledger: those of these ledger numbers of episodes, and these int64[k] ledger rows.

        They are `gone` from now on and nobody's neighbours. int64[k] those that went just now.
        """
        dense = np.array([number for number in map(self._dense.get, episodes) if number is not None], np.int64)
        dense, rows = dense[dense >= 0], self.find(rows)
        rows = rows[rows >= 0]
        members = self.members(np.union1d(dense, self.episode[rows]))
        self._after.all[members] = np.nan
        pruned = np.isin(self.episode[members], dense) | np.isin(members, rows)
        newly = members[pruned & ~self.gone[members]]
        self._segment["gone"].all[newly] = True
        self._forgotten.append(newly)
        self.forgotten = self._forgotten.view()
        np.subtract.at(self._episode["segments"].all, self.episode[newly], 1)
        ended = self.episode[newly[self.last[newly]]]
        self._episode["outcome"].all[ended] = self._episode["last"].all[ended] = -1
        for one, other in (("previous", "following"), ("following", "previous")):
            beside = self._segment[one].all[newly]
            self._segment[other].all[beside[beside >= 0]] = -1
            self._segment[one].all[newly] = -1
        return newly

    def put_labels(self, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Note labels float32[k] of int64[k] ledger rows, nan for nothing; int64 growing segments that had another."""
        segments = self.find(rows)
        here = segments >= 0
        segments, labels = segments[here], np.asarray(labels, np.float32)[here]
        differs = ~((self.label[segments] == labels) | (np.isnan(self.label[segments]) & np.isnan(labels)))
        self._segment["label"].all[segments[differs]] = labels[differs]
        return np.unique(segments[differs])

    def robots(self, segments: np.ndarray) -> np.ndarray:
        """int32[k]: whose each of these int64[k] segments is, in the order of `robot_names`."""
        return self._episode["robot"].all[self.episode[segments]]

    def find(self, rows: np.ndarray) -> np.ndarray:
        """int64[k] segment numbers of int64[k] ledger rows, -1 for rows that are not here or gone."""
        rows = np.asarray(rows, np.int64)
        if not len(self):
            return np.full(len(rows), -1)
        at = np.minimum(np.searchsorted(self.row, rows), len(self) - 1)
        return np.where((self.row[at] == rows) & ~self.gone[at], at, -1)

    def outcome(self, segments: np.ndarray) -> np.ndarray:
        """int8[k] outcome of each segment's episode, an index into `check.OUTCOMES`, -1 while it is unknown."""
        return self._episode["outcome"].all[self.episode[segments]]

    @property
    def left_out(self) -> np.ndarray:
        """bool[segments]: forgotten, or of a discarded episode."""
        return self.gone | (self._episode["outcome"].all[self.episode] == DISCARDED)

    def return_after(self, segments: np.ndarray) -> np.ndarray:
        """float64[k] sum of the rewards of all later segments of the episode; nan unless it is finished and whole."""
        last = self._episode["last"].all[np.unique(self.episode[segments])]
        for end in last[(last >= 0) & np.isnan(self._after.all[last])].tolist():
            self._sum_rewards(end)
        return self._after.all[segments]

    def last_tick(self, segments: np.ndarray) -> np.ndarray:
        """int64[k] tick of the last step of each segment's episode, -1 until its last segment is here."""
        last = self._episode["last"].all[self.episode[segments]]
        return np.where(last >= 0, self.first_tick[last] + self.steps[last] - 1, -1)

    def finished(self, demonstration: bool, but: Sequence[int] = ()) -> int:
        """Episodes of tasks `but` these, not discarded, of which all segments are here; demonstrations or others."""
        last, outcome, kind, task = (self._episode[one].all for one in ("last", "outcome", "demonstration", "task"))
        ended = np.flatnonzero((last >= 0) & (outcome != DISCARDED) & (kind == demonstration) & ~np.isin(task, but))
        return int((self.index[last[ended]] + 1 == self._episode["segments"].all[ended]).sum())

    def members(self, episodes: np.ndarray) -> np.ndarray:
        """int64 all segments, growing, of dense int64[k] numbers of episodes, each once."""
        at, found = self._episode["newest"].all[episodes], [self.row[:0]]
        while len(at := at[at >= 0]):
            found.append(at)
            at = self._earlier.all[at]
        return np.sort(np.concatenate(found))

    def runs_of(self, segments: np.ndarray) -> np.ndarray:
        """int64 runs of int64[k] segments, one segment after the other."""
        first = self.run_offsets[segments]
        counts = self.run_offsets[segments + 1] - first
        return np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)

    def prefix(self, watermark: int) -> tuple[int, int]:
        """(segments, runs) that had been committed when `watermark` was the newest row: the first of each."""
        segments = int(np.searchsorted(self.row, watermark, "right"))
        return segments, int(self.run_offsets[segments])

    def runs(self, chosen: slice | np.ndarray, watermark: int) -> StepRuns:
        """What factors may know of these runs when `watermark` was the newest row: no outcome that came later."""
        segment = self.run_segment[chosen]
        episode = self.episode[segment]
        known = self.row[self._episode["last"].all[episode]] <= watermark
        return StepRuns(
            actor=self.run_actor[chosen],
            version=self.run_version[chosen],
            demonstration=self.demonstration[segment],
            outcome=np.where(known, self._episode["outcome"].all[episode], np.int8(-1)),
            label=self.label[segment],
            arrival_lag=arrival_lag(self.run_version[chosen], self.newest_version[segment]),
        )

    def neighbours(
        self, segments: np.ndarray, back: int, lookahead: int, watermark: int
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Ledger rows of up to `back` segments before each of int64[k] `segments`, nearest first, and of those after.

        These reach `lookahead` steps far. Only what had been committed when `watermark` was the newest row.
        """
        before, after, at = [], [], segments
        for _ in range(back):
            at = np.where(at >= 0, self.previous[at], -1)
            at = np.where(self.row[at] <= watermark, at, -1)
            if (at < 0).all():
                break
            before.append(np.where(at >= 0, self.row[at], -1))
        at, reached = segments, np.zeros(len(segments), np.int64)
        while True:
            at = np.where((at >= 0) & (reached < lookahead), self.following[at], -1)
            at = np.where(self.row[at] <= watermark, at, -1)
            if (at < 0).all():
                break
            after.append(np.where(at >= 0, self.row[at], -1))
            reached += self.steps[at]
        none = np.zeros((len(segments), 0), np.int64)
        sides = (np.stack(found, 1) if found else none for found in (before, after))
        found = [[tuple(row for row in rows if row >= 0) for rows in side.tolist()] for side in sides]
        return list(zip(*found, strict=True))

    # --- taking in ------------------------------------------------------------------------------------------------

    def _dense_numbers(self, numbers: np.ndarray, facts: Mapping[int, EpisodeFacts]) -> np.ndarray:
        """int64[n] dense episode number, -1 for those left out; new episodes are noted."""
        different, inverse = np.unique(numbers, return_inverse=True)
        new: list[tuple[int, int, int, int]] = []
        for number in different.tolist():
            if number not in self._dense:
                self._dense[number] = self._new_episode(number, facts[number], new)
        dense = np.array([self._dense[number] for number in different.tolist()], np.int64)
        if new:
            for name, values in zip(("number", "task", "demonstration", "robot"), np.array(new).T, strict=True):
                self._episode[name].append(values)
            for name, nothing in (("outcome", -1), ("last", -1), ("segments", 0), ("newest", -1)):
                self._episode[name].append(np.full(len(new), nothing))
        return dense[inverse]

    def _new_episode(self, number: int, facts: EpisodeFacts, new: list[tuple[int, int, int, int]]) -> int:
        if facts.source not in (_ONLINE, _DEMONSTRATION) or facts.task not in self.tasks:
            return -1
        if not on_side(facts.id, self._validation, self._held_out):
            return -1
        kind = self.tasks.index(facts.task), int(facts.source == _DEMONSTRATION)
        whose = self.robot_names.setdefault(facts.robot, len(self.robot_names))
        new.append((number, *kind, whose))
        return len(self.episode_numbers) + len(new) - 1

    def _append_runs(self, index: SegmentColumns, wanted: np.ndarray, added: np.ndarray) -> None:
        offsets, runs = np.asarray(index.run_offsets), np.asarray(index.runs)
        counts = offsets[wanted + 1] - offsets[wanted]
        ends = np.cumsum(counts)
        chosen = runs[np.arange(ends[-1]) + np.repeat(offsets[wanted] - ends + counts, counts)]
        self._run["run_segment"].append(np.repeat(added, counts))
        for column, name in enumerate(("run_first", "run_count", "run_actor", "run_version")):
            self._run[name].append(chosen[:, column])
        self._run_offsets.append(self._run_offsets.all[-1] + ends)

    def _note_ends(self, segments: np.ndarray, outcome: np.ndarray) -> None:
        last = self._segment["last"].all[segments]
        ended = self._segment["episode"].all[segments[last]]
        self._episode["outcome"].all[ended] = outcome[last]
        self._episode["last"].all[ended] = segments[last]
        episode = self._segment["episode"].all[segments]
        np.add.at(self._episode["segments"].all, episode, 1)
        # an episode's segments are a chain, each with the one before it
        order = np.argsort(episode, kind="stable")
        following = np.flatnonzero(np.diff(episode[order], prepend=-1) == 0)
        earlier = self._episode["newest"].all[episode]
        earlier[order[following]] = segments[order[following - 1]]
        self._earlier.append(earlier)
        np.maximum.at(self._episode["newest"].all, episode, segments)

    def _publish(self) -> None:
        for name, column in (self._segment | self._run).items():
            setattr(self, name, column.view())
        self.run_offsets = self._run_offsets.view()
        self.episode_numbers, self.forgotten = self._episode["number"].view(), self._forgotten.view()

    def _link(self, added: np.ndarray) -> None:
        """Join new segments with their neighbours, whichever of them came first."""
        # nearly always an episode came in turn, and nothing but the segment before a new one matters
        earlier, episode = self._earlier.all[added], self.episode[added]
        in_turn = np.where(earlier >= 0, self.index[earlier] + 1, 0) == self.index[added]
        in_turn &= self.index[self._episode["newest"].all[episode]] + 1 == self._episode["segments"].all[episode]
        others = self.members(np.unique(episode[~in_turn]))
        others = others[np.lexsort((self.index[others], self.episode[others]))]
        left = np.concatenate([earlier[in_turn], others[:-1]])
        right = np.concatenate([added[in_turn], others[1:]])
        adjoin = (left >= 0) & (self.episode[left] == self.episode[right]) & (self.index[left] + 1 == self.index[right])
        adjoin &= self.first_tick[left] + self.steps[left] == self.first_tick[right]
        adjoin &= ~self.gone[left] & ~self.gone[right]
        self._segment["following"].all[left[adjoin]] = right[adjoin]
        self._segment["previous"].all[right[adjoin]] = left[adjoin]

    def _sum_rewards(self, last: int) -> None:
        """Note the returns of the episode that ends with segment `last`, if it is whole."""
        if self._episode["segments"].all[self.episode[last]] != self.index[last] + 1:
            return
        # from the end, so that the sum is the same whatever else is here
        members = [last]
        while (before := int(self.previous[members[-1]])) >= 0:
            members.append(before)
        if len(members) == self.index[last] + 1:
            self._after.all[members] = np.append(0.0, np.cumsum(self.reward_sum[members])[:-1])
