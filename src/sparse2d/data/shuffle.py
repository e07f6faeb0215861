"""A seeded order of rows that reads the disk in long pieces: blocks are shuffled, then rows within a window of blocks.

The order is a function of seed, epoch and rows: not of the number of ranks, nor of where a run was resumed.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# 0.6 MB of arrays to a block, 42 MB to a window.
BLOCK_ROWS = 4096
WINDOW_BLOCKS = 64


class ShuffledOrder:
    """An order of ``rows``; memory is that of two windows and of one number for each block."""

    def __init__(
        self,
        rows: range,
        seed: int,
        epoch: int = 0,
        block_rows: int = BLOCK_ROWS,
        window_blocks: int = WINDOW_BLOCKS,
    ) -> None:
        self._seed = (seed, epoch)
        num_blocks = -(-len(rows) // block_rows)
        order = np.random.default_rng([*self._seed, 0]).permutation(num_blocks)
        self._starts = rows.start + order * block_rows
        self._lengths = np.minimum(self._starts + block_rows, rows.stop) - self._starts
        self._window_blocks = window_blocks
        window_rows = np.add.reduceat(self._lengths, np.arange(0, num_blocks, window_blocks))
        self._bounds = np.append(0, np.cumsum(window_rows))
        self._window = lru_cache(maxsize=2)(self._make_window)

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """The rows at places ``[start, stop)`` of the order."""
        first, last = np.searchsorted(self._bounds, [start, stop - 1], side="right") - 1
        parts = [
            self._window(window)[max(start - self._bounds[window], 0) : stop - self._bounds[window]]
            for window in range(first, last + 1)
        ]
        return np.concatenate(parts)

    def _make_window(self, window: int) -> NDArray[np.int64]:
        blocks = slice(window * self._window_blocks, (window + 1) * self._window_blocks)
        rows = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(self._starts[blocks], self._lengths[blocks], strict=True)]
        )
        np.random.default_rng([*self._seed, 1 + window]).shuffle(rows)
        return rows
