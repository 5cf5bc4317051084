"""What a policy with n_obs_steps > 1 remembers on the robot: states and latents of the ticks before."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

_LONGEST_GAP_NS = 1_000_000_000
"""between two observations of one motion; after a longer one the memory begins anew"""
_KEPT = 64


class ObservationHistory:
    """Vectors by time, asked for at regular ticks before the newest.

    A robot asks for chunks at its own pace, so the ticks that lerobot was trained on were mostly not seen. Numbers are
    interpolated between the two moments around a tick, features taken from the nearer one. Before the first moment
    there is only that. The memory begins anew when time goes back or a second is missing, or with another instruction.
    """

    def __init__(self, steps: int, period_ns: int) -> None:
        self._steps, self._period_ns = steps, period_ns
        self._seen: deque[tuple[int, list[torch.Tensor]]] = deque(maxlen=_KEPT)
        self._task = ""

    def clear(self) -> None:
        """Forget all, because what was remembered was made by other weights."""
        self._seen.clear()

    def add(self, time_ns: int, task: str, values: list[torch.Tensor]) -> None:
        """`values` [1, ...] of the moment `time_ns`, instead of any of the same moment."""
        if self._seen:
            gap = time_ns - self._seen[-1][0]
            if gap == 0 and task == self._task:
                self._seen.pop()
            elif not 0 < gap <= _LONGEST_GAP_NS or task != self._task:
                self._seen.clear()
        self._task = task
        self._seen.append((time_ns, values))

    def nearest(self) -> list[torch.Tensor]:
        """Each value as [1, steps, ...], oldest first: at every tick that of the nearest moment."""
        chosen = []
        for wanted in self._ticks():
            chosen.append(min(reversed(self._seen), key=lambda moment: abs(moment[0] - wanted))[1])
        return [torch.stack(values, 1) for values in zip(*chosen, strict=True)]

    def interpolated(self) -> list[torch.Tensor]:
        """Each value as [1, steps, ...], oldest first, linear in time between the moments."""
        times = np.array([time for time, _ in self._seen], np.int64)
        chosen = []
        for wanted in self._ticks():
            after = int(np.searchsorted(times, wanted))
            before = max(after - 1, 0)
            if after == before or times[after] == wanted:
                chosen.append(self._seen[after][1])
                continue
            share = float((wanted - times[before]) / (times[after] - times[before]))
            pairs = zip(self._seen[before][1], self._seen[after][1], strict=True)
            chosen.append([torch.lerp(a, b, share) for a, b in pairs])
        return [torch.stack(values, 1) for values in zip(*chosen, strict=True)]

    def _ticks(self) -> list[int]:
        newest = self._seen[-1][0]
        return [newest - ago * self._period_ns for ago in range(self._steps - 1, -1, -1)]
