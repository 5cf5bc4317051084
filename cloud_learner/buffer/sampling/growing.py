"""An array that grows at its end."""

from __future__ import annotations

import numpy as np


class Growing:
    """A column with room at its end: appending costs what is appended."""

    def __init__(self, dtype: type) -> None:
        self._array: np.ndarray = np.zeros(64, dtype)
        self._length = 0

    def append(self, values: np.ndarray) -> None:
        length = self._length + len(values)
        if length > len(self._array):
            # room that nobody writes to takes no memory
            larger = np.zeros(2 * length, self._array.dtype)
            larger[: self._length] = self.all
            self._array = larger
        self._array[self._length : length] = values
        self._length = length

    def cut(self, length: int) -> np.ndarray:
        """Shorten it; what goes, in place: for use before `append`."""
        gone, self._length = self._array[length : self._length], length
        return gone

    @property
    def all(self) -> np.ndarray:
        """What is there, in place: take it again after `append`."""
        return self._array[: self._length]

    def view(self) -> np.ndarray:
        view = self.all
        view.flags.writeable = False
        return view
