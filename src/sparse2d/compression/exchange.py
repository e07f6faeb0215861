"""Global half of DCT-DP: the mean over the ranks of sparse entries, by the collective that sends fewest bytes.

With R ranks, k entries of the rank that has most, n elements, indices of i and values of v bytes, a rank sends

- gather: ``(R-1) k (i + v)``, every rank's entries to all;
- union: ``(R-1) k i + 2 (R-1)/R 4 |U|``, the indices to all, then a sum over their union U;
- dense: ``2 (R-1)/R 4 n``, a sum over everything, in which case nothing needs to be held back.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sparse2d.compression.error_feedback import Entries
from sparse2d.config import ValueDtype

FLOAT = 4


class Sum(NamedTuple):
    """A mean over the ranks, as parts that are to be added up in their order.

    Attributes:
        collective: how it was found.
        parts: indices [k] and values fp32 [k] each; empty if it is dense.
        everything: fp32 [n], if it is dense.
    """

    collective: "Collective"
    parts: list[tuple[Tensor, Tensor]]
    everything: Tensor | None = None


class Collective(Enum):
    """How entries get to all ranks."""

    gather = "gather"
    union = "union"
    dense = "dense"


class SparseMean:
    """The mean over a group's ranks of what each of them has of a flat tensor.

    Args:
        numel: n, elements of the tensor.
        dtype: what values are sent as.
        group: the ranks.
        device: of the tensors.
    """

    def __init__(self, numel: int, dtype: ValueDtype, group: dist.ProcessGroup, device: torch.device) -> None:
        self._numel = numel
        self._value_bytes = FLOAT if dtype is ValueDtype.fp32 else 2
        self._group = group
        self._size = int(dist.get_world_size(group))
        self._device = device
        # 16 bits are enough for small models, in which they are half of what is sent.
        self._index_dtype = torch.int16 if numel <= 2**16 else torch.int32 if numel < 2**31 else torch.int64
        # Handed to collectives so far.
        self.payload_bytes = 0
        # The better one of the sparse collectives when that was last asked.
        self.sparse = Collective.gather

    def sent_bytes(self, collective: Collective, most: int, union: int) -> float:
        """What a rank sends.

        Args:
            collective: by which.
            most: k.
            union: entries of U.
        """
        others, index = self._size - 1, int(self._index_dtype.itemsize)
        if collective is Collective.gather:
            return others * most * (index + self._value_bytes)
        summed = self._numel if collective is Collective.dense else union
        return 2 * others / self._size * summed * FLOAT + (
            others * most * index if collective is Collective.union else 0
        )

    def mean(self, entries: Entries, everything: Tensor | None, chooses: bool) -> Sum:
        """The mean; bit-equal on all ranks. A collective.

        Args:
            entries: of this rank.
            everything: what ``dense`` sends in place of them, fp32 [n], left as it is; None rules that out.
            chooses: whether to choose between ``gather`` and ``union`` anew, which may cost a round; as on all ranks.
        """
        header = torch.tensor([len(entries.indices), float(entries.scale)], dtype=torch.float64, device=self._device)
        headers = self._all(header)
        counts = headers[:, 0].long().tolist()
        if max(counts) == 0:
            return Sum(self.sparse, [])
        # The union has at least as many entries as any rank.
        sent = {kind: self.sent_bytes(kind, max(counts), max(counts)) for kind in Collective}
        if everything is not None and min(sent, key=lambda kind: sent[kind]) is Collective.dense:
            return Sum(Collective.dense, [], self._mean_of(everything.clone()))
        factors = (headers[:, 1] / self._size).float()
        can_be_union = sent[Collective.union] < sent[Collective.gather]
        if self.sparse is Collective.gather and not (chooses and can_be_union):
            gathered = self._gather([entries.values, self._packed(entries.indices)], counts)
            parts = [(self._unpacked(i), v.float() * factor) for (v, i), factor in zip(gathered, factors, strict=True)]
            return Sum(Collective.gather, parts)
        indices = [self._unpacked(i) for (i,) in self._gather([self._packed(entries.indices)], counts)]
        union = torch.cat(indices).unique()
        if chooses:
            sparse = (Collective.gather, Collective.union)
            self.sparse = min(sparse, key=lambda kind: self.sent_bytes(kind, max(counts), len(union)))
        if self.sparse is Collective.gather:
            values = self._gather([entries.values], counts)
            parts = [(i, v.float() * factor) for i, (v,), factor in zip(indices, values, factors, strict=True)]
            return Sum(Collective.gather, parts)
        own = torch.zeros(len(union), device=self._device)
        own[torch.searchsorted(union, entries.indices)] = entries.decoded()
        return Sum(Collective.union, [(union, self._mean_of(own))])

    def _mean_of(self, values: Tensor) -> Tensor:
        """Of the same tensor on all ranks, in place."""
        self.payload_bytes += values.nbytes
        dist.all_reduce(values, group=self._group)
        return values.div_(self._size)

    def _all(self, own: Tensor) -> Tensor:
        """The tensors [n] of all ranks, [R, n]."""
        self.payload_bytes += own.nbytes
        gathered = own.new_empty(self._size, len(own))
        dist.all_gather_into_tensor(gathered.view(-1), own, group=self._group)
        return gathered

    def _packed(self, indices: Tensor) -> Tensor:
        # 16 bits hold half of the indices as negative numbers.
        return indices.to(self._index_dtype)

    def _unpacked(self, packed: Tensor) -> Tensor:
        return packed.long() & 0xFFFF if packed.dtype is torch.int16 else packed.long()

    def _gather(self, own: Sequence[Tensor], counts: list[int]) -> list[list[Tensor]]:
        """Every rank's tensors, each of as many elements as it has entries; as bytes, which any backend takes."""
        most = max(counts)
        bounds = torch.tensor([0, *(most * tensor.element_size() for tensor in own)]).cumsum(0).tolist()
        send = torch.zeros(bounds[-1], dtype=torch.uint8, device=self._device)
        for tensor, start in zip(own, bounds, strict=False):
            send[start : start + tensor.nbytes] = tensor.view(torch.uint8)
        received = self._all(send)

        def part(rank: int, tensor: Tensor, start: int) -> Tensor:
            # A copy, since a wider type must not begin at any byte.
            size = counts[rank] * tensor.element_size()
            return received[rank, start : start + size].clone().view(tensor.dtype)

        return [
            [part(rank, tensor, start) for tensor, start in zip(own, bounds, strict=False)]
            for rank in range(self._size)
        ]
