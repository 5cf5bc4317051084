"""The steps of an episode as columns, and the same episode at another rate: LeRobot has rows, a robot has ticks.

Counted in rows, row i lasts from i to i + 1, and tick k from k f/c to (k + 1) f/c with f rows and c ticks a second; the
last tick ends with the last row. An import makes ticks of rows by these rules, an export rows of ticks.

| what | a tick has |
|---|---|
| time, state | those of its beginning, linear between the rows' beginnings; the last row's state stays until its end |
| absolute action | the target at its end, linear between the rows' ends; before the first of these the first row's |
| delta action | its part of the rows' deltas, each spread evenly over its row: sums stay |
| velocity action | the mean over the tick of the rows' velocities, each held over its row: ways stay |
| reward, end flags | of all rows that end within it: summed, or any |
| actor, version | of the row in which it ends |
| frames | the newest of its beginning, with its own time; one that no tick sees is left out |

An absolute target is not held: at a higher rate that would be one jump a row and a standstill after it, which limits of
velocity refuse and a policy would learn. It belongs to the end of its row, so that c ticks made one row and then c
ticks again are what they were where c is a whole number.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from wire.types import CommandType, Dimension

_DECIMALS = 6
"""of a row: what is closer is at the same time"""


class Steps(msgspec.Struct, frozen=True, eq=False):
    """T steps of one episode in order of their time; C cameras in the order of the robot spec."""

    times_ns: np.ndarray
    """int64[T]"""
    state: np.ndarray
    """float32[T, ds]"""
    action: np.ndarray
    """float32[T, da], as executed"""
    reward: np.ndarray
    """float32[T]"""
    actor: np.ndarray
    """uint8[T], index into `ACTORS`"""
    version: np.ndarray
    """int32[T], of the policy"""
    done: np.ndarray
    """bool[T]: the episode ends with the step"""
    truncated: np.ndarray
    """bool[T]: it was cut off there, by time or by a person"""
    frame_times_ns: np.ndarray
    """int64[T, C]: when the frames that the step saw were taken"""
    row: np.ndarray
    """int64[T]: number of the stored step, or row of a dataset, at which those frames were seen"""

    def __len__(self) -> int:
        return len(self.times_ns)

    def at(self, here: slice) -> Steps:
        return Steps(*(getattr(self, name)[here] for name in self.__struct_fields__))


def resampled(steps: Steps, fps: float, control_hz: float, dimensions: Sequence[Dimension]) -> Steps:
    """`steps` at `fps` as those at `control_hz`, of an action that has `dimensions`; themselves where these are one."""
    if same_rate(fps, control_hz):
        return steps
    grid = TickGrid(len(steps), fps, control_hz)
    return Steps(
        times_ns=grid.times(steps.times_ns),
        state=grid.states(steps.state),
        action=grid.actions(steps.action, dimensions),
        reward=grid.sums(steps.reward).astype(np.float32),
        actor=steps.actor[grid.last],
        version=steps.version[grid.last],
        done=grid.sums(steps.done) > 0,
        truncated=grid.sums(steps.truncated) > 0,
        frame_times_ns=steps.frame_times_ns[grid.shown],
        row=steps.row[grid.shown],
    )


def same_rate(fps: float, control_hz: float) -> bool:
    return abs(control_hz - fps) <= 1e-6 * control_hz


class TickGrid:
    """Where T ticks lie among R rows."""

    def __init__(self, rows: int, fps: float, control_hz: float) -> None:
        """`rows`: R, at least 1; `fps`: of the rows."""
        edges = np.round(np.arange(rows * control_hz / fps + 2) * (fps / control_hz), _DECIMALS)
        ticks = int(np.searchsorted(edges, rows))
        self._rows, self._fps = rows, fps
        self._begin, self._end = edges[:ticks], np.minimum(edges[1 : ticks + 1], rows)
        self.shown = self._begin.astype(np.int64)
        """int64[T] row that began last when the tick begins"""
        self.last = np.ceil(self._end).astype(np.int64) - 1
        """int64[T] row in which the tick ends"""
        self._ended: np.ndarray = np.searchsorted(self._end, np.arange(1, rows + 1))

    def times(self, times_ns: np.ndarray) -> np.ndarray:
        """int64[T] of int64[R]."""
        since = np.append(times_ns - times_ns[0], times_ns[-1] - times_ns[0] + round(1e9 / self._fps))
        return times_ns[0] + np.rint(np.interp(self._begin, np.arange(self._rows + 1), since)).astype(np.int64)

    def states(self, state: np.ndarray) -> np.ndarray:
        """float32[T, ds] of float32[R, ds]."""
        return _interpolated(self._begin, np.arange(self._rows), state)

    def actions(self, action: np.ndarray, dimensions: Sequence[Dimension]) -> np.ndarray:
        """float32[T, da] of float32[R, da], by the meaning of each of the da `dimensions`."""
        found = _interpolated(self._end, np.arange(1, self._rows + 1), action)
        total = np.vstack([np.zeros(action.shape[1]), np.cumsum(action, 0, dtype=np.float64)])
        edges = np.arange(self._rows + 1)
        for number, dimension in enumerate(dimensions):
            if dimension.meaning == CommandType.absolute:
                continue
            column = np.interp(self._end, edges, total[:, number]) - np.interp(self._begin, edges, total[:, number])
            found[:, number] = column if dimension.meaning == CommandType.delta else column / (self._end - self._begin)
        return found

    def sums(self, values: np.ndarray) -> np.ndarray:
        """float64[T] of the R numbers or flags in `values`."""
        return np.bincount(self._ended, values, len(self._end))


def _interpolated(at: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    columns = [np.interp(at, known, column) for column in values.T]
    return np.stack(columns, 1).astype(np.float32) if columns else np.zeros((len(at), 0), np.float32)
