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
| actor, recovery, version, lag | of the row in which it ends |
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
    lag: np.ndarray
    """int32[T] of `control.arrival_lag`"""
    done: np.ndarray
    """bool[T]: the episode ends with the step"""
    truncated: np.ndarray
    """bool[T]: it was cut off there, by time or by a person"""
    frame_times_ns: np.ndarray
    """int64[T, C]: when the frames that the step saw were taken"""
    row: np.ndarray
    """int64[T]: the tick of the episode, or row of a dataset, that saw them"""
    recovery: np.ndarray
    """bool[T]: whoever acted only brought the robot back"""

    def __len__(self) -> int:
        return len(self.times_ns)

    def at(self, here: slice) -> Steps:
        return Steps(*(getattr(self, name)[here] for name in self.__struct_fields__))


def same_rate(fps: float, control_hz: float) -> bool:
    return abs(control_hz - fps) <= 1e-6 * control_hz


def resampled(steps: Steps, fps: float, control_hz: float, dimensions: Sequence[Dimension]) -> Steps:
    """The R `steps` at `fps`, at least one, as T of them at `control_hz`; themselves where these are one.

    dimensions: da of them, whose meanings say what becomes of the action
    """
    if same_rate(fps, control_hz):
        return steps
    rows = len(steps)
    edges = np.round(np.arange(rows * control_hz / fps + 2) * (fps / control_hz), _DECIMALS)
    ticks = int(np.searchsorted(edges, rows))
    begin, end = edges[:ticks], np.minimum(edges[1 : ticks + 1], rows)
    shown, last = begin.astype(np.int64), np.ceil(end).astype(np.int64) - 1
    ended = np.searchsorted(end, np.arange(1, rows + 1))
    row_edges = np.arange(rows + 1)

    def sums(values: np.ndarray) -> np.ndarray:
        return np.bincount(ended, values, ticks)

    action = _interpolated(end, row_edges[1:], steps.action)
    total = np.vstack([np.zeros(action.shape[1]), np.cumsum(steps.action, 0, dtype=np.float64)])
    for number, dimension in enumerate(dimensions):
        if dimension.meaning == CommandType.absolute:
            continue
        column = np.interp(end, row_edges, total[:, number]) - np.interp(begin, row_edges, total[:, number])
        action[:, number] = column if dimension.meaning == CommandType.delta else column / (end - begin)
    first_ns = steps.times_ns[0]
    since_ns = np.append(steps.times_ns - first_ns, steps.times_ns[-1] - first_ns + round(1e9 / fps))
    return Steps(
        times_ns=first_ns + np.rint(np.interp(begin, row_edges, since_ns)).astype(np.int64),
        state=_interpolated(begin, row_edges[:-1], steps.state),
        action=action,
        reward=sums(steps.reward).astype(np.float32),
        actor=steps.actor[last],
        version=steps.version[last],
        lag=steps.lag[last],
        done=sums(steps.done) > 0,
        truncated=sums(steps.truncated) > 0,
        frame_times_ns=steps.frame_times_ns[shown],
        row=steps.row[shown],
        recovery=steps.recovery[last],
    )


def _interpolated(at: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    columns = [np.interp(at, known, column) for column in values.T]
    return np.stack(columns, 1).astype(np.float32) if columns else np.zeros((len(at), 0), np.float32)
