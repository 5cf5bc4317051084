"""What a batch must hold according to the segments of a buffer, by brute force."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import cv2
import numpy as np

from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.control import marked_actor
from tests.cloud_learner.buffer.loading.memory_buffer import TASKS, MemoryBuffer
from wire.messages.gateway import ACTORS, CameraFrames, Segment
from wire.types import Actor

_PEOPLE = {Actor.human, Actor.script}


class Reference:
    """What a window must be, by brute force from the segments of a buffer as they are now."""

    def __init__(
        self,
        buffer: MemoryBuffer,
        target,
        horizon: int,
        ticks_ahead=(),
        newest_row: int = 2**62,
        max_offset: int = 0,
        rolled: Sequence[bool] = (),
        n_step: int = 0,
        gamma: float = 0.99,
    ) -> None:
        self.buffer, self.target, self.horizon, self.ticks_ahead = buffer, target, horizon, ticks_ahead
        self.max_offset, self.n_step, self.gamma = max_offset, n_step, gamma
        self.rolled = np.array(rolled or [True] * buffer.robot.state_dim)
        self.steps: dict[tuple[int, int], tuple[Segment, int]] = {}
        known = {row: s for row, s in buffer.segments.items() if row <= newest_row}
        self.readable = {s.id for row, s in known.items() if row not in buffer.damaged}
        self.episodes: dict[int, list[Segment]] = {}
        for s in known.values():
            number = buffer.numbers[s.episode.id]
            self.episodes.setdefault(number, []).append(s)
            for t in range(s.steps if s.id in self.readable else 0):
                self.steps[number, s.first_tick + t] = s, t
        for segments in self.episodes.values():
            segments.sort(key=lambda s: s.index)

    @functools.cached_property
    def starts(self) -> set[tuple[int, int]]:
        """(episode, tick) of all steps at which a window may begin."""
        return {at for at in self.steps if self._starts(*at)}

    def landings(self, number: int, seen: int) -> set[int]:
        """Ticks at which a window may begin whose frames are those of `seen`."""
        found = {seen}
        for tick in range(seen, seen + self.max_offset + 1):
            if not self._joined(number, seen, tick) or not self._continues(number, tick):
                break
            if self._acts(number, tick):
                found.add(tick)
        return found

    def seen(self, batch: dict, at: tuple[int, ...], planned: int) -> list[int]:
        """Ticks whose frames a window of a batch may show: `planned`, or one of its group in a grouped batch."""
        number, tick = int(batch["episode"][at[0]]), int(batch["tick"][at])
        if len(at) == 1:
            return [planned] if tick in self.landings(number, planned) else []
        segment, t = self.steps[number, planned]
        group = [planned] if not segment.frame_times_ns else []
        if segment.frame_times_ns:
            same = np.all([times == times[t] for times in segment.frame_times_ns.values()], 0)
            group = [segment.first_tick + int(other) for other in np.flatnonzero(same)]
        still = ~self.rolled
        return [
            other
            for other in group
            if self._starts(number, other)
            and tick in self.landings(number, other)
            and np.array_equal(batch["state"][at][still], segment.state[other - segment.first_tick][still])
        ]

    def check(
        self, batch: dict, i: int, j: int | None = None, planned: int | None = None, drawn: int | None = None
    ) -> None:
        """That one window of a batch is what it must be; `planned`: the tick `drawn`, where there are offsets."""
        number = int(batch["episode"][i])
        at = (i,) if j is None else (i, j)
        tick = seen = int(batch["tick"][at])
        if planned is not None:
            candidates = self.seen(batch, at, planned)
            assert candidates, f"tick {tick} cannot follow from the frames of tick {planned}"
            seen = candidates[0]
        before, s = self.steps[number, seen]
        segment, t = self.steps[number, tick]
        assert self._starts(number, seen)
        expect = {
            "state": np.where(self.rolled, segment.state[t], before.state[s]),
            "version": segment.version[t],
            "actor": segment.actor[t],
            "recovery": isinstance(segment.recovery, np.ndarray) and segment.recovery[t],
            "delay": segment.delay_ticks[t],
            "actions": np.zeros((self.horizon, segment.executed.shape[1]), np.float32),
            "mask": np.zeros(self.horizon, np.float32),
            "action_is_pad": np.ones(self.horizon, bool),
            "reward": np.zeros(self.horizon, np.float32),
            "terminated": np.zeros(self.horizon, bool),
            "truncated": np.zeros(self.horizon, bool),
        }
        goes_on = True
        for h in range(self.horizon):
            if (found := self.steps.get((number, tick + h))) is None or not self._joined(number, tick, tick + h):
                break
            expect["action_is_pad"][h] = False
            for name in ("reward", "terminated", "truncated"):
                expect[name][h] = getattr(found[0], name)[found[1]]
            goes_on = goes_on and self._continues(number, tick + h)
            if goes_on:
                expect["mask"][h] = 1
                expect["actions"][h] = found[0].executed[found[1]]
        for name, value in expect.items():
            np.testing.assert_array_equal(batch[name][at], value, err_msg=name)
        for w, ticks in enumerate(self.ticks_ahead):
            last = tick
            for other in range(tick, tick + ticks + 1):
                if not self._joined(number, tick, other) or not self._continues(number, other):
                    break
                last = other
            there, k = self.steps[number, last]
            np.testing.assert_array_equal(batch["ahead"][at][w], there.state[k])
        if "later_index" in batch:
            index = int(batch["later_index"][at])
            assert 0 <= index < max(1, expect["mask"].sum())
            there, k = self.steps[number, tick + index]
            np.testing.assert_array_equal(batch["later_state"][at], there.state[k])
        whole = self.episodes[number]
        ended = whole[-1].last and [s.index for s in whole] == list(range(len(whole)))
        later = sum(float(s.reward[max(0, tick - s.first_tick) :].sum()) for s in whole)
        np.testing.assert_allclose(batch["return_to_go"][at], later if ended else np.nan, rtol=1e-4, atol=1e-4)
        last = next((s.first_tick + s.steps - 1 for s in whole if s.last), None)
        assert batch["ticks_to_end"][at] == (-1 if last is None else last - tick)
        outcome = next((OUTCOMES.index(s.outcome) for s in whole if s.last), -1)
        assert batch["outcome"][i] == outcome
        assert batch["online"][i] == (segment.episode.source == "online")
        assert list(TASKS)[batch["task"][i]] == segment.episode.task
        assert batch["instructions"][i] == TASKS[segment.episode.task]
        oldest = min((int(times[s]) for times in before.frame_times_ns.values()), default=int(before.times_ns[s]))
        age = (int(before.times_ns[s]) - oldest) / self.buffer.robot.period_ns + tick - seen
        np.testing.assert_allclose(batch["frame_age"][at], age, rtol=1e-6)
        for camera in before.frame_times_ns:
            np.testing.assert_array_equal(batch["images"][camera][i], self._picture(number, before, s, camera))
        if "next_state" in batch:
            self._check_next(batch, at, number, tick, tick if drawn is None else drawn)
        if "past_state" in batch:
            self._check_past(batch, at, number, tick, seen, tick if drawn is None else drawn)

    def _check_next(self, batch: dict, at: tuple[int, ...], number: int, tick: int, seen: int) -> None:
        """`seen`: the tick whose frames are shown."""

        def steps_from(first: int, count: int = self.n_step + 1) -> list[tuple[Segment, int]]:
            found = []
            for tick in range(first, first + count):
                if (step := self.steps.get((number, tick))) is None or not self._joined(number, first, tick):
                    break
                found.append(step)
            return found

        def observation(first: int, ticks: int) -> tuple[np.ndarray, dict[str, bytes | None], int]:
            """The state so many ticks after `first`, the pictures seen, and how many ticks there are."""
            steps = steps_from(first)
            if ticks == len(steps) and (end := self._end(number, *steps[-1])):
                times = end.terminal.frame_times_ns
                return end.terminal.state, {c: self._image(number, end.index, c, times[c]) for c in times}, ticks
            segment, t = steps[ticks := min(ticks, len(steps) - 1)]
            return segment.state[t], {c: self._picture(number, segment, t, c) for c in segment.frame_times_ns}, ticks

        steps = steps_from(tick)
        state, _, ticks = observation(tick, min(self.n_step, len(steps)))
        still, pictures, _ = observation(seen, min(self.n_step, len(steps_from(seen))))
        ends = next((i + 1 for i, (s, t) in enumerate(steps[: self.n_step]) if s.terminated[t]), 0)
        if ends:
            ticks = ends
        elif any(picture is None for picture in pictures.values()):
            ticks, state = 0, steps[0][0].state[steps[0][1]]
        assert batch["next_ticks"][at] == ticks
        acted = [ACTORS[s.actor[t]] for s, t in steps[: self.n_step + 1]]
        assert batch["taken_over"][at] == (acted[0] == Actor.policy and bool(_PEOPLE & {*acted}))
        horizon = batch["mask"].shape[-1]
        demonstrated = not batch["online"][at[0]]
        wanted = [
            ACTORS[s.actor[t]] in _PEOPLE or (demonstrated and ACTORS[s.actor[t]] == Actor.policy)
            for s, t in steps_from(tick, horizon)
        ]
        run = next((i for i, one in enumerate(wanted) if not one), len(wanted))
        found = batch["mask"][at] * (np.arange(horizon) < run)
        np.testing.assert_array_equal(batch["imitable"][at], found)
        gains = [s.reward[t] * self.gamma**i for i, (s, t) in enumerate(steps[:ticks])]
        np.testing.assert_allclose(batch["n_step_return"][at], sum(gains), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(batch["discount"][at], 0 if ends else self.gamma**ticks, rtol=1e-6)
        if not ends:
            np.testing.assert_array_equal(batch["next_state"][at], np.where(self.rolled, state, still))
            for camera, picture in pictures.items() if ticks else ():
                np.testing.assert_array_equal(batch["next_images"][camera][at], picture)

    def _check_past(self, batch: dict, at: tuple[int, ...], number: int, tick: int, seen: int, drawn: int) -> None:
        history = batch["past_state"].shape[-2]
        for n in range(history):
            whole, still = self._known(number, tick - history + n, tick), min(tick - history + n, seen)
            expect = np.where(
                self.rolled, self._state(number, whole), self._state(number, self._known(number, still, seen))
            )
            np.testing.assert_array_equal(batch["past_state"][at][n], expect)
            for camera in self.steps[number, drawn][0].frame_times_ns:
                shown = self._known(number, drawn - history + n, drawn)
                while (picture := self._picture(number, *self.steps[number, shown], camera)) is None:
                    shown += 1
                np.testing.assert_array_equal(batch["past_images"][camera][at[0], n], picture)

    def _known(self, number: int, tick: int, until: int) -> int:
        """`tick`, or the first after it from which all are there to `until`."""
        return next(t for t in range(tick, until + 1) if self._joined(number, t, until))

    def _state(self, number: int, tick: int) -> np.ndarray:
        segment, t = self.steps[number, tick]
        return segment.state[t]

    def _starts(self, number: int, tick: int) -> bool:
        segment, t = self.steps[number, tick]
        if not self._acts(number, tick):
            return False
        return all(self._picture(number, segment, t, camera) is not None for camera in segment.frame_times_ns)

    def _acts(self, number: int, tick: int) -> bool:
        segment, t = self.steps[number, tick]
        return bool(self.target.starts(marked_actor(segment)[t : t + 1], segment.episode.source == "demonstration")[0])

    def _continues(self, number: int, tick: int) -> bool:
        segment, t = self.steps[number, tick]
        return bool(
            self.target.continues(marked_actor(segment)[t : t + 1], segment.episode.source == "demonstration")[0]
        )

    def _joined(self, number: int, first: int, last: int) -> bool:
        """Whether all ticks from one to the other are there."""
        return all((number, tick) in self.steps for tick in range(first, last + 1))

    def _picture(self, number: int, segment: Segment, t: int, camera: str) -> np.ndarray | None:
        """The frame that a step saw, from its segment or those right before it without a gap."""
        return self._image(number, segment.index, camera, int(segment.frame_times_ns[camera][t]))

    def _end(self, number: int, segment: Segment, t: int) -> Segment | None:
        """The segment with the observation after that step, if it is the episode's last one."""
        by_index = {s.index: s for s in self.episodes[number]}
        while t == segment.steps - 1 and not segment.last and segment.index + 1 in by_index:
            segment = by_index[segment.index + 1]
            if segment.steps or segment.id not in self.readable:
                return None
            t = -1
        return segment if t == segment.steps - 1 and segment.terminal else None

    def _image(self, number: int, index: int, camera: str, time: int) -> np.ndarray | None:
        by_index = {s.index: s for s in self.episodes[number]}
        while index in by_index:
            frames = by_index[index].frames[camera] if by_index[index].id in self.readable else CameraFrames([], ())
            for other, data in zip(frames.times_ns, frames.encoded, strict=True):
                if other == time:
                    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
                    return None if pixels is None else pixels[:, :, ::-1]
            index -= 1
        return None
