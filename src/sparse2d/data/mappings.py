"""The two documented mappings from raw dense values to features.

Both are fixed: one raw row has one image, whichever file it is in, and every image is finite.

- ``fixed_shift``: ``log(max(x, -2) + 3)``, in double precision (``criteo.dense_features``);
- ``torchrec``: ``log(max(x, m) - m + 2)`` in single precision, ``m`` being ``data.dense_min``. TorchRec's
  ``BinaryCriteoUtils.tsv_to_npys`` takes each file's own minimum for m; given that minimum, this is equal to it bit for
  bit, as far as TorchRec's own 32-bit integers reach.

A missing value is a 0 in both.
"""

import numpy as np
from numpy.typing import NDArray

from sparse2d.config import DataConfig, DenseMapping
from sparse2d.data.criteo import DENSE_MAPPING, dense_features


def map_dense(values: NDArray[np.int64], missing: NDArray[np.bool_], data: DataConfig) -> NDArray[np.float32]:
    """Dense features, float32 [n, 13], by the mapping that ``data.dense`` names."""
    if data.dense is DenseMapping.fixed_shift:
        return dense_features(values, missing)
    x = np.maximum(np.where(missing, 0, values), data.dense_min)
    # Modulo 2**64, where the difference of any int64 and an int32 fits.
    shifted = x.astype(np.uint64) + np.uint64((2 - data.dense_min) % 2**64)
    return np.log(shifted.astype(np.float32))


def dense_mapping_name(data: DataConfig) -> str:
    """The mapping in words, for the manifest."""
    if data.dense is DenseMapping.fixed_shift:
        return DENSE_MAPPING
    return f"log(max(x, {data.dense_min}) - {data.dense_min} + 2) in float32, as TorchRec's; missing = 0"
