"""From tokens to table rows: ``hash`` (modulo the table's rows) and ``contiguous`` (by a vocabulary)."""

from collections.abc import Sequence
from typing import Protocol

import numba
import numpy as np
from numpy.typing import NDArray

from sparse2d.config import NUM_SPARSE
from sparse2d.data.criteo import SPARSE_MAPPING


class IdMap(Protocol):
    """A mapping of one dataset: rows of each table, its name in words, the digest of its vocabulary, if it has one."""

    num_embeddings: list[int]
    name: str
    digest: str

    def __call__(
        self, tokens: NDArray[np.uint32], missing: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids, int32 [n, 26], and how many tokens of each column the vocabulary does not hold, int64 [26]."""


class HashIds:
    """Token modulo table rows; nothing is out of vocabulary, and a missing value shares row 0."""

    name = SPARSE_MAPPING
    digest = ""

    def __init__(self, num_embeddings: Sequence[int]) -> None:
        self.num_embeddings = list(num_embeddings)
        self._rows = np.array(num_embeddings, np.uint32)

    def __call__(
        self, tokens: NDArray[np.uint32], missing: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """See ``IdMap``."""
        ids = np.empty(tokens.shape, np.int32)
        _modulo(tokens, missing, self._rows, ids)
        return ids, np.zeros(NUM_SPARSE, np.int64)


@numba.njit(cache=True, nogil=True, boundscheck=False)
def _modulo(
    tokens: NDArray[np.uint32], missing: NDArray[np.bool_], rows: NDArray[np.uint32], ids: NDArray[np.int32]
) -> None:
    """``criteo.sparse_ids``, in a third of the time."""
    for row in range(tokens.shape[0]):
        for column in range(tokens.shape[1]):
            ids[row, column] = 0 if missing[row, column] else tokens[row, column] % rows[column]
