"""Open addressing over 32-bit tokens: an array of keys beside an array of values, where 0 marks an empty slot."""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

# Knuth's multiplier: the golden ratio of 2**32.
_MULTIPLIER = np.uint64(2654435769)
_LEAST_SLOTS = 16


def empty_slots(at_least: int) -> NDArray[np.uint32]:
    """Keys of an empty table: a power of two of slots."""
    return np.zeros(max(_LEAST_SLOTS, 1 << max(at_least - 1, 0).bit_length()), np.uint32)


@numba.njit(cache=True, nogil=True, boundscheck=False)
def slot_of(token: np.uint32, keys: NDArray[np.uint32], values: NDArray[np.signedinteger[Any]]) -> np.uintp:
    """The slot that holds a token, or the empty one that it would take; one slot at least must be empty."""
    last = np.uint64(len(keys) - 1)
    mixed = np.uint64(token) * _MULTIPLIER
    slot = (mixed ^ (mixed >> np.uint64(32))) & last
    while values[slot] != 0 and keys[slot] != token:
        slot = (slot + np.uint64(1)) & last
    return slot
