"""Statistics of columns, in one pass over rows that are in the cache.

Which ids occur is exact, in one bit for each table row, whatever the number of rows.
"""

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

from sparse2d.config import NUM_SPARSE


class SeenIds:
    """The ids of some rows: ``bits`` uint8, one bit for each table row, tables on byte boundaries one after another.

    ``smallest`` and ``largest`` are each column's, int64 [26].
    """

    def __init__(self, num_embeddings: Sequence[int], bits: NDArray[np.uint8] | None = None) -> None:
        self._offsets = np.cumsum([0, *(-(-rows // 8) for rows in num_embeddings)])
        self.bits = np.zeros(self._offsets[-1], np.uint8) if bits is None else bits
        self.smallest = np.full(NUM_SPARSE, np.iinfo(np.int64).max)
        self.largest = np.full(NUM_SPARSE, -1)

    def add(self, ids: NDArray[np.int32]) -> None:
        """Mark the ids of some rows, int32 [n, 26], all within their tables."""
        _mark(ids, self._offsets, self.bits, self.smallest, self.largest)

    def distinct(self) -> list[int]:
        """How many ids occur in each column."""
        return [
            int(np.bitwise_count(self.bits[start:stop]).sum(dtype=np.int64))
            for start, stop in zip(self._offsets[:-1], self._offsets[1:], strict=True)
        ]


@numba.njit(cache=True, nogil=True, boundscheck=False)
def _mark(
    ids: NDArray[np.int32],
    offsets: NDArray[np.int64],
    bits: NDArray[np.uint8],
    smallest: NDArray[np.int64],
    largest: NDArray[np.int64],
) -> None:
    for row in range(ids.shape[0]):
        for column in range(ids.shape[1]):
            index = np.int64(ids[row, column])
            place = np.uintp(offsets[column] + (index >> 3))
            bits[place] |= np.uint8(1) << np.uint8(index & 7)
            smallest[column] = min(smallest[column], index)
            largest[column] = max(largest[column], index)


@numba.njit(cache=True, nogil=True, boundscheck=False)
def count_true(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many are true in each column."""
    counts = np.zeros(mask.shape[1], np.int64)
    for row in range(mask.shape[0]):
        for column in range(mask.shape[1]):
            counts[column] += mask[row, column]
    return counts


@numba.njit(cache=True, nogil=True, boundscheck=False)
def widen(values: NDArray[np.float32], smallest: NDArray[np.float32], largest: NDArray[np.float32]) -> None:
    """Extend each column's range to some finite values, [n, columns]."""
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            smallest[column] = min(smallest[column], values[row, column])
            largest[column] = max(largest[column], values[row, column])
