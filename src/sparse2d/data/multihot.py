"""Several ids for each feature and row, where the log has one: the row's own first, the others drawn.

The others are a fixed function of seed, feature, place and the row's id: equal ids have equal companions, as in
MLPerf's synthetic multi-hot Criteo, and nothing has to be stored, neither the arrays nor a table of companions.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SEED = 0

# The constants of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
_STEP, _MIX_1, _MIX_2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def expand(ids: NDArray[np.int32], hotness: Sequence[int], num_embeddings: Sequence[int]) -> NDArray[np.int32]:
    """Ids int32 [n, 26] to int32 [n, sum(hotness)]: each feature's ids side by side, the row's own first."""
    columns = np.empty((len(ids), sum(hotness)), np.int32)
    first = 0
    for feature, (count, rows) in enumerate(zip(hotness, num_embeddings, strict=True)):
        own = ids[:, feature]
        columns[:, first] = own
        for place in range(1, count):
            columns[:, first + place] = _mixed(own, feature, place) % np.uint64(rows)
        first += count
    return columns


def _mixed(ids: NDArray[np.int32], feature: int, place: int) -> NDArray[np.uint64]:
    """64 well-mixed bits for each id."""
    stream = np.uint64((SEED << 32) + (feature << 16) + place)
    x = ids.astype(np.uint64) + (stream << np.uint64(31))
    x = (x + _STEP) * _STEP
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
