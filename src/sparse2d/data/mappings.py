"""The two documented mappings from raw dense values to features.

Both are fixed: one raw row has one image, whichever file it is in, and every image is finite.

- ``fixed_shift``: ``log(max(x, -2) + 3)``, in double precision (``criteo.dense_features``);
- ``torchrec``: ``log(max(x, m) - m + 2)`` in single precision, ``m`` being ``data.dense_min``. TorchRec's
  ``BinaryCriteoUtils.tsv_to_npys`` takes each file's own minimum for m; given that minimum, this is equal to it bit for
  bit, as far as TorchRec's own 32-bit integers reach.

A missing value is a 0 in both.
"""

from functools import lru_cache

import numba
import numpy as np
from numpy.typing import NDArray

from sparse2d.config import DataConfig, DenseMapping
from sparse2d.data.criteo import DENSE_MAPPING, dense_features

_TABLED = 4096


def map_dense(values: NDArray[np.int64], missing: NDArray[np.bool_], data: DataConfig) -> NDArray[np.float32]:
    """Dense features, float32 [n, 13], by the mapping that ``data.dense`` names.

    Most values are small: these are looked up in a table of what the formula says of them.
    """
    table = _table(data.dense, data.dense_min)
    features = np.empty(values.shape, np.float32)
    if _look_up(values, missing, table, features):
        large = np.isnan(features)
        features[large] = _formula(values[large], missing[large], data.dense, data.dense_min)
    return features


def _formula(
    values: NDArray[np.int64], missing: NDArray[np.bool_], mapping: DenseMapping, dense_min: int
) -> NDArray[np.float32]:
    if mapping is DenseMapping.fixed_shift:
        return dense_features(values, missing)
    x = np.maximum(np.where(missing, 0, values), dense_min)
    # Modulo 2**64, where the difference of any int64 and an int32 fits.
    shifted = x.astype(np.uint64) + np.uint64((2 - dense_min) % 2**64)
    return np.asarray(np.log(shifted.astype(np.float32)))


@lru_cache(maxsize=4)
def _table(mapping: DenseMapping, dense_min: int) -> NDArray[np.float32]:
    """The features of 0, 1, 2, ..."""
    values = np.arange(_TABLED)
    return _formula(values, np.zeros(len(values), np.bool_), mapping, dense_min)


@numba.njit(cache=True, nogil=True, boundscheck=False)
def _look_up(
    values: NDArray[np.int64], missing: NDArray[np.bool_], table: NDArray[np.float32], features: NDArray[np.float32]
) -> bool:
    """Fill in what the table holds, NaN for the rest; return whether there is any."""
    rest = False
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            # As unsigned, a negative value is beyond the table too.
            place = np.uint64(0) if missing[row, column] else np.uint64(values[row, column])
            if place < np.uint64(len(table)):
                features[row, column] = table[place]
            else:
                features[row, column] = np.nan
                rest = True
    return rest


def dense_mapping_name(data: DataConfig) -> str:
    """The mapping in words, for the manifest."""
    if data.dense is DenseMapping.fixed_shift:
        return DENSE_MAPPING
    return f"log(max(x, {data.dense_min}) - {data.dense_min} + 2) in float32, as TorchRec's; missing = 0"
