"""Arrays that grow by rows and can forget some, without ever holding two copies of a large one."""

from __future__ import annotations

import numpy as np

_ROWS_AT_ONCE = 4096
_MAX_GROWTH_BYTES = 32 * 1024 * 1024


class Column:
    """One growing numpy array of rows of a fixed shape.

    Room is taken in steps of half the size, but of at most 32 MiB: `nbytes` counts the rows in use, and no more than
    that comes on top.
    """

    def __init__(self, dtype: type[np.generic], row_shape: tuple[int, ...] = ()) -> None:
        self._data = np.empty((0, *row_shape), dtype)
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def rows(self) -> np.ndarray:
        """[rows, *row_shape]: a view, valid until the next `append` or `keep`."""
        return self._data[: self._rows]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def append(self, rows: np.ndarray) -> int:
        """Add [n, *row_shape] at the end; the index of the first of them."""
        first, end = self._rows, self._rows + len(rows)
        if end > len(self._data):
            row_bytes = max(1, self._data.strides[0])
            size = max(end, 64, len(self._data) + min(len(self._data) // 2, _MAX_GROWTH_BYTES // row_bytes))
            # grows in place where the allocator can; views given out before are invalid, as `rows` says
            self._data.resize((size, *self._data.shape[1:]), refcheck=False)
        self._data[first:end] = rows
        self._rows = end
        return first

    def keep(self, kept: np.ndarray) -> None:
        """Forget all rows but those of the growing int64[n] `kept`, which become rows 0 to n."""
        for first in range(0, len(kept), _ROWS_AT_ONCE):
            some = kept[first : first + _ROWS_AT_ONCE]
            self._data[first : first + len(some)] = self._data[some]
        self._rows = len(kept)
