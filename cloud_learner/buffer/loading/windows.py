"""Training windows out of the steps in memory: pure functions on flat arrays, no Python loop over samples.

A batch is a dict of:

| name | shape | what |
|---|---|---|
| `images` | {camera: uint8[b, h, w, 3]} | the newest frame that the step saw, RGB |
| `instructions` | list of b str | the task as a person would say it |
| `task` | int64[b] | index into `DatasetConfig.tasks` |
| `outcome` | int8[b] | how the episode ended, index into `check.OUTCOMES`, -1 while it goes on; or its verdict |
| `online` | bool[b] | whether it comes from the running fleet, not from a demonstration |
| `episode` | int64[b] | the episode's number in the ledger |
| `tick` | int64[b] | of the step in its episode, delta later than the frames' step |
| `state` | float32[b, ds] | before the first action: rolled dimensions delta later, the others as seen |
| `actions` | float32[b, H, da] | executed from this step on, 0 where masked |
| `mask` | float32[b, H] | 1 while steps follow each other that may be continued over, 0 from the first that may not |
| `action_is_pad` | bool[b, H] | no step was recorded there, as LeRobot has it: behind the end, or not here yet |
| `reward` | float32[b, H] | of each step, whoever acted; 0 where there is none |
| `terminated`, `truncated` | bool[b, H] | whether the episode ended with that step, by itself or cut short |
| `return_to_go` | float32[b] | sum of the rewards from this step to the end, nan while the episode is unfinished |
| `ticks_to_end` | int64[b] | from this step to the episode's last, 0 at that, -1 while the episode is unfinished |
| `ahead` | float32[b, W, ds] | the state W given numbers of ticks later, or the last one before the mask ends |
| `version`, `lag` | int32[b] | policy version that acted or was ready to act; how many versions ago that is |
| `arrival_lag` | int32[b] | with a `staleness` of the target: how many versions ago it was when the step arrived |
| `probability` | float64[b] | of drawing the step whose frames are shown, by the target when it was planned |
| `actor` | uint8[b] | who acted, index into `wire.messages.gateway.ACTORS` |
| `recovery` | bool[b] | whoever acted only brought the robot back |
| `delay` | int16[b] | measured inference delay in ticks, -1 when none |
| `seen_state` | float32[b, ds] | with an offset: as it was at the step drawn, when the frames were seen |
| `frame_age` | float32[b] | ticks between the oldest of the frames seen and the first action; delta without cameras |
| `next_state` | float32[b, ds] | with `n_step` n: the state m ticks later, m <= n |
| `next_images` | {camera: uint8[b, h, w, 3]} | likewise m ticks after `images` |
| `next_ticks` | int64[b] | m: n, or less where the episode ends or nothing later is here; 0: nothing is known |
| `taken_over` | bool[b] | with `n_step`: the policy acted, and a person or a script within the n ticks after |
| `imitable` | float32[b, H] | with `n_step`: `mask` up to the first step that the policy did, but in a demonstration |
| `n_step_return` | float32[b] | sum over i < m of gamma^i times the reward of step i |
| `discount` | float32[b] | gamma^m; 0 where the episode terminated within these m steps |
| `labels` | {name: float32[b]} | on request: written back by a job (`Ledger.put_step_labels`), nan for nothing |
| `later_index` | int64[b] | on request: i, any of the actions that `mask` keeps, 0 if there is none |
| `later_state` | float32[b, ds] | on request: the whole state before action i |
| `traces` | {name: [b, ...]} | on request: of the chunk that the window begins with, see below |
| `past_state` | float32[b, n, ds] | on request: `state` 1 to n ticks before the first action, the oldest first |
| `past_images` | {camera: uint8[b, n, h, w, 3]} | on request: what was seen 1 to n ticks before `images`, likewise |

A grouped batch has k steps behind each image as a second axis, [b, k, ...] for all from `tick` on but `past_images` and
`seen_state`: each drawn from the eligible steps of the segment that saw the same frames.

With `n_step`, the target of a value is n_step_return + discount * V(next), n-step returns as in Sutton and Barto 2018,
eq. 12.1. An episode that terminates has no value after it; one that was truncated is bootstrapped from the observation
after its last step, or where none was recorded from the last there is.

With `traces`, a window that was drawn at a later step of a chunk which has one (`FlowTrace`) begins at the first step
of the segment that the policy did by it, with the frames that the chunk was made from; so a chunk counts by its
executed steps. They are `points` float32[b, P, H * da], `state` float32[b, ds], `age` float32[b], `step` int16[b], -1
where there is none, and `log_prob` float32[b].

The past reaches back over the segments of an episode, whoever acted. Before the oldest step that is known it is that
step again, and a frame that never came is the one after it.

An inference takes time, and its actions begin when the robot is elsewhere already. With `max_offset` D > 0, all from
`tick` on therefore belongs to a step up to D after the one the frames were seen at, each sample with its own delay
(VLASH, arXiv 2512.01031; k of them behind one image are its shared observation): drawn evenly from the delays at which
a window may begin and before which nothing ends that may not be continued over. What a robot cannot foretell (`rolled`
is False) it knows only as of the frames' step: these dimensions of `state` come from there, and those of `past_state`
are never newer. `ahead`, a target and not an input, and `later_state`, which a robot reads when it is there, are whole
later states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cloud_learner.buffer.control import POLICY, actor_index, by_human, is_recovery
from cloud_learner.buffer.loading.cache import StepCache
from cloud_learner.buffer.loading.layout import NO_TRACE, TERMINATED, TRUNCATED, Layout
from cloud_learner.buffer.sampling.target import VERDICT, Moment, StepRuns, imitable_steps, outcome_by_verdict

Batch = dict[str, object]
Weigh = Callable[[np.ndarray], np.ndarray]
"""float64[b, ...] weight of the steps in int64[b, ...] rows, where not all that may begin a window weigh the same"""
_ALIGNED = 64


class BatchSlot:
    """Memory of one batch, used again for later ones: arrays by name."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
        """[*shape] of `dtype`, whatever was in it; the same memory as long as name, shape and type are the same."""
        found = self._arrays.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            memory = np.empty(size + _ALIGNED, np.uint8)
            # copying into memory that is not aligned takes up to twice as long
            begin = -memory.ctypes.data % _ALIGNED
            found = self._arrays[name] = memory[begin : begin + size].view(dtype).reshape(shape)
        return found

    def put(self, name: str, values: np.ndarray, dtype: np.dtype | type | None = None) -> np.ndarray:
        """A copy of `values`, as `dtype` if that is another."""
        found = self.array(name, values.shape, dtype or values.dtype)
        found[...] = values
        return found

    def take(self, name: str, source: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """`source[rows]`, for `rows` that are all there."""
        found = self.array(name, (*rows.shape, *source.shape[1:]), source.dtype)
        # "clip" only because numpy would fill a second buffer to check the indices first
        return np.take(source, rows, 0, out=found, mode="clip")


def settle(pool: StepCache, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(positions int64[b], rows int64[b]): which of DRAW[b] to use and where in `pool` they begin.

    A draw at which no window can begin, because its segment or frame could not be read, is replaced by the next one
    that can, the first after the last. None when there is none.
    """
    first = pool.first_rows(draws["segment"])
    rows = first + draws["offset"]
    able = (first >= 0) & (pool.columns["mates"][np.where(first >= 0, rows, 0)] > 0) if len(pool) else first >= 0
    positions: np.ndarray = np.arange(len(rows))
    if not able.all():
        good = np.flatnonzero(able)
        if not len(good):
            return None
        positions = good[np.searchsorted(good, positions) % len(good)]
    return positions, rows[positions]


class WindowReader:
    """Batches of what lies in the step cache `pool` and in `frames`, uint8[rows, h, w, 3] by shape."""

    def __init__(self, pool: StepCache, frames: Sequence[np.ndarray], layout: Layout) -> None:
        self._pool, self._frames, self._layout, self._config = pool, frames, layout, layout.config
        unrolled = ~np.array(self._config.rolled, bool) if self._config.max_offset else np.zeros(0, bool)
        self._unrolled = np.flatnonzero(unrolled)

    def gather(
        self, draws: np.ndarray, rows: np.ndarray, slot: BatchSlot, rng: np.random.Generator, newest_version: int
    ) -> Batch:
        """The windows of DRAW[b] that begin at the int64[b] `rows` of the step cache; the arrays lie in `slot`.

        Of several ranks that share the batch, this one's. What is random is drawn for all of them, so that it does not
        matter how many there are.
        """
        config, columns, instructions = self._config, self._pool.columns, tuple(self._config.tasks.values())
        target = config.target
        # what weighs nothing for its lag is no step to choose from in the first place
        uneven = target.factors or (target.staleness and target.staleness.weight)
        weigh = self._weigh(draws, newest_version) if uneven else None
        if config.traces:
            draws, rows, lead = self._begin_with_chunks(draws, rows)
        seen = self._spread(rows, draws["offset"], rng, weigh) if config.ticks_per_frame > 1 else rows
        delta = self._postpone(seen, draws["online"], rng, weigh) if config.max_offset else np.zeros_like(seen)
        if config.traces:
            delta = np.where(lead >= 0, lead, delta)
        index = rng.integers(0, np.clip(columns["run"][seen + delta], 1, config.horizon)) if config.later else delta
        own = config.own_rows(len(rows))
        draws, rows, seen, delta, index = draws[own], rows[own], seen[own], delta[own], index[own]
        batch: Batch = {"images": self._images("images/", rows, slot)}
        batch["instructions"] = [instructions[number] for number in draws["task"].tolist()]
        for name in ("task", "outcome", "online", "episode", "probability"):
            batch[name] = slot.put(name, draws[name])
        if target.label == VERDICT:
            batch["outcome"] = slot.put("outcome", outcome_by_verdict(draws["outcome"], draws["label"]))
        return_after, last = draws["return_after"], draws["last_tick"]
        tick = draws["first_tick"] + draws["offset"]
        if config.ticks_per_frame > 1:
            return_after, last = return_after[:, None], last[:, None]
            tick = tick[:, None] + (seen - rows[:, None])
        start, age, to_go = seen, columns["frame_age"][seen], columns["later_reward"][seen]
        if config.max_offset or config.traces:
            start, tick, age = seen + delta, tick + delta, age + delta
            # the step may lie behind its segment's end, where no sum is known
            passed = np.arange(max(config.max_offset, delta.max(initial=0)))
            reward = np.take(columns["reward"], seen[..., None] + passed, mode="clip")
            to_go = to_go - np.where(passed < delta[..., None], reward, 0.0).sum(-1, dtype=np.float64)
            batch["seen_state"] = slot.take("seen_state", columns["state"], rows)
        batch["tick"] = slot.put("tick", tick)
        batch["ticks_to_end"] = slot.put("ticks_to_end", np.where(last >= 0, last - tick, -1))
        run, left = columns["run"][start], columns["left"][start]
        steps = np.arange(config.horizon)
        batch["mask"] = mask = slot.put("mask", steps < run[..., None], np.float32)
        batch["action_is_pad"] = pad = slot.put("action_is_pad", steps >= left[..., None])
        at = start[..., None] + np.minimum(steps, left[..., None] - 1)
        batch["actions"] = actions = slot.take("actions", columns["executed"], at)
        actions *= mask[..., None]
        batch["reward"] = reward = slot.take("reward", columns["reward"], at)
        reward[pad] = 0
        end = np.take(columns["end"], at, mode="clip")
        for name, code in (("terminated", TERMINATED), ("truncated", TRUNCATED)):
            batch[name] = slot.put(name, (end == code) & ~pad)
        reach = np.minimum(np.array(config.ticks_ahead, np.int64), np.maximum(run[..., None] - 1, 0))
        batch["ahead"] = slot.take("ahead", columns["state"], start[..., None] + reach)
        for name in ("state", "version", "delay"):
            batch[name] = slot.take(name, columns[name], start)
        batch["actor"] = slot.put("actor", actor_index(columns["actor"][start]))
        batch["recovery"] = slot.put("recovery", is_recovery(columns["actor"][start]))
        self._hold(batch["state"], seen)
        batch["lag"] = slot.put("lag", newest_version - columns["version"][start])
        if target.staleness:
            batch["arrival_lag"] = slot.take("arrival_lag", columns["arrival_lag"], start)
        batch["frame_age"] = slot.put("frame_age", age, np.float32)
        batch["return_to_go"] = slot.put("return_to_go", to_go + return_after, np.float32)
        if config.labels:
            values = slot.take("labels", columns["label"], start)
            batch["labels"] = {name: values[..., number] for number, name in enumerate(config.labels)}
        if config.traces:
            names = ("points", "state", "age", "step", "log_prob")
            batch["traces"] = traces = {
                name: slot.take(f"traces/{name}", columns[f"trace_{name}"], start) for name in names
            }
            traces["step"][lead[own] < 0] = NO_TRACE
        if config.n_step:
            self._add_transition(batch, rows, start, slot)
        if config.later:
            batch["later_index"] = slot.put("later_index", index)
            batch["later_state"] = slot.take("later_state", columns["state"], start + index)
        if config.history:
            self._add_past(batch, rows, seen, start, slot)
        return batch

    def _spread(
        self, rows: np.ndarray, offsets: np.ndarray, rng: np.random.Generator, weigh: Weigh | None
    ) -> np.ndarray:
        """int64[b, k] steps, each one of the eligible ones that saw the same frames as int64[b] `rows`, by weight."""
        columns, ticks = self._pool.columns, self._config.ticks_per_frame
        first, mates = rows - offsets, columns["mates"][rows][:, None]
        group = (first + columns["group"][rows])[:, None]
        if weigh is None:
            number = rng.integers(0, mates, size=(len(rows), ticks))
        else:
            every = np.arange(mates.max())
            others = first[:, None] + columns["eligible_offset"][group + np.minimum(every, mates - 1)]
            until = np.cumsum(np.where(every < mates, weigh(others), 0.0), 1)
            point = rng.random((len(rows), ticks)) * until[:, -1:]
            number = np.minimum((until[:, None, :] <= point[..., None]).sum(-1), mates - 1)
        return first[:, None] + columns["eligible_offset"][group + number]

    def _begin_with_chunks(self, draws: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(DRAW[b], rows int64[b] whose frames are shown, int64[b] by how much later windows begin, -1 where no chunk
        that has a trace begins)."""
        columns = self._pool.columns
        first = rows - columns["chunk_back"][rows]
        lead = columns["trace_lead"][first].astype(np.int64)
        begun = rows - draws["offset"]
        seen = np.maximum(first - lead, begun)
        # the frames of steps before the segment are not here, and not those of which nothing begins
        traced = (columns["trace_step"][first] >= 0) & (first - lead >= begun) & (columns["mates"][seen] > 0)
        draws, shown = draws.copy(), np.where(traced, seen, rows)
        draws["offset"] += shown - rows
        return draws, shown, np.where(traced, lead, -1)

    def _postpone(
        self, start: np.ndarray, online: np.ndarray, rng: np.random.Generator, weigh: Weigh | None
    ) -> np.ndarray:
        """int64[b(, k)]: how many steps later than int64[b(, k)] `start` each window begins, 0 to `max_offset`.

        Evenly among those there are. Were one that there is not replaced by the last that is, half of the windows would
        be of the ends of episodes as soon as `max_offset` is about as long as they are. `online`: bool[b].
        """
        columns, share = self._pool.columns, self._config.offset_share
        reach = np.arange(self._config.max_offset + 1)
        at = np.minimum(start[..., None] + reach, len(columns["actor"]) - 1)
        source = (~online).astype(np.intp).reshape(-1, *(1,) * (at.ndim - 1))
        able = (reach < columns["run"][start][..., None]) & self._layout.starts[source, columns["actor"][at]]
        if weigh is not None:
            able &= weigh(at) > 0
            able[..., 0] = True
        rank = (rng.random(start.shape) * able.sum(-1)).astype(np.int64)
        if share < 1:
            rank[rng.random(start.shape) >= share] = 0
        return np.argmax(able.cumsum(-1) > rank[..., None], -1)

    def _add_transition(self, batch: Batch, rows: np.ndarray, start: np.ndarray, slot: BatchSlot) -> None:
        """Add what `n_step` asks for; `rows` int64[b] whose frames are shown, `start` int64[b] where windows begin."""
        columns, n, gamma = self._pool.columns, self._config.n_step, self._config.gamma
        left, reach = columns["left"][start], columns["reach"][start]
        seen_later = rows + np.minimum(n, columns["reach"][rows])
        shown = (columns["frame"][seen_later] >= 0).all(1)
        ends = (left <= n) & (columns["end"][start + left - 1] == TERMINATED)
        ticks = np.where(ends, left, np.where(shown, np.minimum(n, reach), 0))
        steps = np.arange(n)
        reward = np.take(columns["reward"], start[:, None] + np.minimum(steps, left[:, None] - 1), mode="clip")
        weight = np.where(steps < ticks[:, None], gamma**steps, 0.0)
        batch["next_ticks"] = slot.put("next_ticks", ticks, np.int64)
        later = columns["actor"][start[:, None] + np.minimum(steps + 1, reach[:, None])]
        alone = actor_index(columns["actor"][start]) == POLICY
        at = start[:, None] + np.minimum(np.arange(self._config.horizon), left[:, None] - 1)
        people = imitable_steps(actor_index(columns["actor"][at]), ~np.asarray(batch["online"])[:, None])
        batch["imitable"] = slot.put("imitable", batch["mask"] * people.cumprod(1), np.float32)
        batch["taken_over"] = slot.put("taken_over", alone & by_human(later).any(1))
        batch["n_step_return"] = slot.put("n_step_return", (reward * weight).sum(1), np.float32)
        batch["discount"] = slot.put("discount", np.where(ends, 0.0, gamma**ticks), np.float32)
        batch["next_state"] = slot.take("next_state", columns["state"], start + np.minimum(ticks, reach))
        self._hold(batch["next_state"], seen_later)
        batch["next_images"] = self._images("next_images/", np.where(shown, seen_later, rows), slot)

    def _add_past(self, batch: Batch, rows: np.ndarray, seen: np.ndarray, start: np.ndarray, slot: BatchSlot) -> None:
        """Add `past_state` and `past_images`; `seen` int64[b(, k)] the steps that windows at `start` were drawn for."""
        columns, history = self._pool.columns, self._config.history
        at = start[..., None] + np.arange(-history, 0)
        batch["past_state"] = slot.take("past_state", columns["state"], at)
        self._hold(batch["past_state"], np.minimum(at, seen[..., None]))
        images = {}
        for c, camera in enumerate(self._layout.cameras):
            numbers = columns["frame"][rows[:, None] + np.arange(-history, 1), c]
            for i in reversed(range(history)):
                numbers[:, i] = np.where(numbers[:, i] < 0, numbers[:, i + 1], numbers[:, i])
            frames = self._frames[self._layout.shape_of[c]]
            images[camera] = slot.take(f"past_images/{camera}", frames, numbers[:, :-1])
        batch["past_images"] = images

    def _images(self, prefix: str, rows: np.ndarray, slot: BatchSlot) -> dict[str, np.ndarray]:
        """{camera: uint8[b, h, w, 3]} that the steps in int64[b] `rows` saw."""
        numbers, shape_of = self._pool.columns["frame"][rows], self._layout.shape_of
        return {
            camera: slot.take(prefix + camera, self._frames[shape_of[c]], numbers[:, c])
            for c, camera in enumerate(self._layout.cameras)
        }

    def _hold(self, state: object, seen: np.ndarray) -> None:
        """Put what a robot cannot foretell back to what it was at the steps `seen`."""
        if len(self._unrolled):
            state[..., self._unrolled] = self._pool.columns["state"][seen][..., self._unrolled]  # type: ignore[index]

    def _weigh(self, draws: np.ndarray, newest_version: int) -> Weigh:
        """The target's weights, as of the batch's plan, of steps in the episodes of DRAW[b]."""
        columns, known = self._pool.columns, (~draws["online"], draws["outcome"], draws["label"])

        def weigh(rows: np.ndarray) -> np.ndarray:
            alike = [np.broadcast_to(each.reshape(-1, *(1,) * (rows.ndim - 1)), rows.shape).ravel() for each in known]
            lag = columns["arrival_lag"][rows].ravel() if self._config.target.staleness else np.zeros(rows.size, int)
            actor, version = columns["actor"][rows].ravel(), columns["version"][rows].ravel()
            demonstration, outcome, label = alike
            runs = StepRuns(actor, version, demonstration, outcome, label, lag)
            return self._config.target.weights(runs, Moment(newest_version)).reshape(rows.shape)

        return weigh
