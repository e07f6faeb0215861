"""The rows of this rank's shards under one numbering, and access to their weights and moments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from sparse2d.parallel.tables import kernel_shards, lookup_kernels


class State(Enum):
    """What a row consists of."""

    weights = "weights"
    moments = "moments"


# Rows of each shard, in the order of ``ShardRows.shards``: indices [n], or None for all rows.
RowsByShard = Sequence[Tensor | None]


@dataclass(frozen=True)
class RowValues:
    """Weights and moments of some rows, one after the other in one buffer.

    Attributes:
        flat: all of it, [n].
        parts: views of it: for each shard in turn, [rows, columns] or [rows] for each part of the state.
    """

    flat: Tensor
    parts: list[Tensor]

    @classmethod
    def empty(cls, shapes: Sequence[Sequence[int]], device: torch.device) -> "RowValues":
        """Room for parts of these shapes, fp32."""
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.empty(sum(sizes), device=device)
        parts = [part.view(*shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        return cls(flat, parts)


class ShardRows:
    """Numbers the rows of all shards on this rank: key = the shard's first key + row inside the shard.

    Replicas of a shard have the same shards in the same order, so a key means the same row on each of them.

    Args:
        model: the sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kernels = lookup_kernels(model)
        by_kernel = [kernel_shards(kernel) for kernel in self.kernels]
        self.shards = [shard for shards in by_kernel for shard in shards]
        self.device = self.shards[0].weight.device if self.shards else torch.device("cpu")
        self.starts = torch.tensor([0, *(len(shard.weight) for shard in self.shards)]).cumsum(0).to(self.device)
        first_shards = torch.tensor([0, *(len(shards) for shards in by_kernel)]).cumsum(0)
        # The first key of each kernel.
        self.kernel_starts = [int(self.starts[first]) for first in first_shards[:-1]]

    @property
    def num_rows(self) -> int:
        """Rows of all shards on this rank."""
        return int(self.starts[-1])

    def split(self, keys: Tensor) -> list[Tensor]:
        """Rows of each shard, from sorted keys [n]."""
        bounds = torch.searchsorted(keys, self.starts).tolist()
        return [
            keys[bounds[i] : bounds[i + 1]] - self.starts[i]  # stays on the device
            for i in range(len(self.shards))
        ]

    def tensors(self, state: Sequence[State]) -> list[list[Tensor]]:
        """For each shard its weight and moments, as asked for: views of the kernels' own memory."""
        return [
            ([shard.weight] if State.weights in state else []) + (list(shard.moments) if State.moments in state else [])
            for shard in self.shards
        ]

    def read(self, rows: RowsByShard, state: Sequence[State]) -> RowValues:
        """Copies of some rows: for each shard in turn, one tensor [n, columns] or [n] for each part of ``state``."""
        pairs = [
            (index, tensor) for index, tensors in zip(rows, self.tensors(state), strict=True) for tensor in tensors
        ]
        shapes = [tensor.shape if index is None else (len(index), *tensor.shape[1:]) for index, tensor in pairs]
        values = RowValues.empty(shapes, self.device)
        for (index, tensor), part in zip(pairs, values.parts, strict=True):
            if index is None:
                part.copy_(tensor)
            else:
                torch.index_select(tensor, 0, index, out=part)
        return values

    def write(self, rows: RowsByShard, state: Sequence[State], values: Sequence[Tensor]) -> None:
        """Put back what ``read`` took, in its order."""
        remaining = iter(values)
        for index, tensors in zip(rows, self.tensors(state), strict=True):
            for tensor in tensors:
                if index is None:
                    tensor.copy_(next(remaining))
                else:
                    tensor.index_copy_(0, index, next(remaining))

    def row_bytes(self, state: Sequence[State]) -> list[int]:
        """Bytes of one row of each shard."""
        return [
            sum(tensor[:1].numel() * tensor.element_size() for tensor in tensors) for tensors in self.tensors(state)
        ]
