"""From one rank's rows to the batch that TorchRec's models take."""

from functools import lru_cache

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from sparse2d.data.criteo import FEATURE_NAMES
from sparse2d.data.dataset import RankBatch

_KEYS = list(FEATURE_NAMES)


def to_torchrec(batch: RankBatch, device: torch.device) -> Batch:
    """Dense float32 [b, 13], ids as a KeyedJaggedTensor (keys C1..C26, int32), labels float32 [b].

    Padding rows are included. To a GPU, rows travel from pinned memory without waiting.
    """
    size = len(batch.labels)
    lengths, offsets = _lengths(size, batch.hotness, device)
    if max(batch.hotness) == 1:
        ids = np.ascontiguousarray(batch.sparse.T).reshape(-1)
    else:
        ends = np.cumsum(batch.hotness)[:-1]
        ids = np.concatenate([part.reshape(-1) for part in np.split(batch.sparse, ends, axis=1)])
    return Batch(
        dense_features=_to_device(batch.dense, device),
        sparse_features=KeyedJaggedTensor(
            keys=_KEYS, values=_to_device(ids, device), lengths=lengths, offsets=offsets, stride=size
        ),
        labels=_to_device(batch.labels, device),
    )


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@lru_cache(maxsize=4)
def _lengths(size: int, hotness: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths and offsets of a batch, feature by feature: the same for every batch of that size."""
    lengths = torch.tensor(hotness, dtype=torch.int32, device=device).repeat_interleave(size)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    offsets[1:] = lengths.cumsum(0)
    return lengths, offsets
