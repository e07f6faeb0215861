"""Named tensors as rectangles with explicit offsets, for ``torch.distributed.checkpoint``.

TorchRec hands out ShardedTensor, DTensor or plain tensors, depending on the layout. A rectangle says directly which
part of which whole tensor a rank holds; the checkpoint's own resharding then reads any layout into any other one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from sparse2d.errors import UserError


@dataclass(frozen=True)
class Rectangle:
    """A part of a whole tensor on this rank.

    Attributes:
        tensor: the part; loading writes into it.
        offset: where it starts in the whole tensor.
        size: of the whole tensor.
    """

    tensor: Tensor
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> "Rectangle":
        """A tensor that this rank has all of."""
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Its place, in the checkpoint's terms."""
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.shape)


# What a rank saves or loads: rectangles of each named tensor.
State = dict[str, list[Rectangle]]


def _find(state: State, index: MetadataIndex) -> Tensor:
    return next(part.tensor for part in state[index.fqn] if torch.Size(part.offset) == index.offset)


class RectangleSavePlanner(DefaultSavePlanner):
    """Writes each distinct rectangle once: upstream's deduplication spreads those of replicas over their ranks."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """All rectangles of this rank."""
        items = [
            WriteItem(
                index=MetadataIndex(name, part.offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=part.chunk,
                    properties=TensorProperties.create_from_tensor(part.tensor),
                    size=torch.Size(part.size),
                ),
            )
            for name, parts in self.state_dict.items()
            for part in parts
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The tensor behind a write item."""
        return _find(self.state_dict, index)


class RectangleLoadPlanner(DefaultLoadPlanner):
    """Fills rectangles from however the checkpoint was cut; ranks may ask for different names."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Keep what is to be filled."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Reads for all rectangles of this rank."""
        assert self.metadata is not None
        items = []
        for name, parts in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            if any(torch.Size(part.size) != saved.size for part in parts):
                raise UserError(f"{name} is {list(saved.size)} in the checkpoint and {list(parts[0].size)} here")
            items += create_read_items_for_chunk_list(name, saved, [part.chunk for part in parts])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor that a read item fills."""
        return _find(self.state_dict, index)


class Staging:
    """Copies in host memory that training does not change; the memory is used again by the next save."""

    # Part of upstream's protocol for stagers: the copy is complete when ``stage`` returns.
    should_synchronize_after_execute = False

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def stage(self, state: State) -> State:
        """The same rectangles with tensors of their own."""
        return {name: [self._copy(name, part) for part in parts] for name, parts in state.items()}

    def _copy(self, name: str, part: Rectangle) -> Rectangle:
        buffer = self._buffers.get((name, part.offset))
        if buffer is None or buffer.shape != part.tensor.shape or buffer.dtype != part.tensor.dtype:
            buffer = torch.empty(part.tensor.shape, dtype=part.tensor.dtype)
            self._buffers[name, part.offset] = buffer
        buffer.copy_(part.tensor.detach())
        return Rectangle(buffer, part.offset, part.size)

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
