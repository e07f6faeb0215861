"""Global half of DCT-DP: the mean over the ranks of sparse entries, by the collective that sends fewest bytes.

With R ranks, k entries of the rank that has most, n elements, indices of i and values of v bytes, a rank sends

- gather: ``(R-1) k (i + v)``, every rank's entries to all;
- union: ``(R-1) k i + 2 (R-1)/R 4 |U|``, the indices to all, then a sum over their union U;
- dense: ``2 (R-1)/R 4 n``, a sum over everything, in which case nothing needs to be held back.
"""

from collections.abc import Sequence
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from sparse2d.compression.error_feedback import Entries
from sparse2d.config import ValueDtype

FLOAT = 4


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

    def mean(self, entries: Entries, everything: Tensor, chooses: bool) -> tuple[Tensor, Collective]:
        """The mean and how it was found; bit-equal on all ranks, the collective too. A collective.

        Args:
            entries: of this rank.
            everything: what ``dense`` sends in place of them, fp32 [n]; left as it is.
            chooses: whether to choose between ``gather`` and ``union`` anew, which may cost a round; as on all ranks.
        """
        header = torch.tensor([entries.indices.numel(), float(entries.scale)], dtype=torch.float64, device=self._device)
        headers = header.new_empty(self._size, 2)
        dist.all_gather_into_tensor(headers.view(-1), header, group=self._group)
        counts = headers[:, 0].long().tolist()
        # The union has at least as many entries as any rank.
        sent = {kind: self.sent_bytes(kind, max(counts), max(counts)) for kind in Collective}
        if min(sent, key=lambda kind: sent[kind]) is Collective.dense:
            total = everything.clone()
            dist.all_reduce(total, group=self._group)
            return total.div_(self._size), Collective.dense
        scales = headers[:, 1].float()
        can_be_union = sent[Collective.union] < sent[Collective.gather]
        if self.sparse is Collective.gather and not (chooses and can_be_union):
            parts = self._gather([entries.values, self._packed(entries.indices)], counts)
            return self._sum([(self._unpacked(i), v, s) for (v, i), s in zip(parts, scales, strict=True)]), self.sparse
        indices = [self._unpacked(i) for (i,) in self._gather([self._packed(entries.indices)], counts)]
        union = torch.cat(indices).unique()
        if chooses:
            sparse = (Collective.gather, Collective.union)
            self.sparse = min(sparse, key=lambda kind: self.sent_bytes(kind, max(counts), len(union)))
        if self.sparse is Collective.gather:
            values = [v for (v,) in self._gather([entries.values], counts)]
            return self._sum(list(zip(indices, values, scales, strict=True))), self.sparse
        total = torch.zeros(len(union), device=self._device)
        total[torch.searchsorted(union, entries.indices)] = entries.decoded()
        dist.all_reduce(total, group=self._group)
        return torch.zeros_like(everything).index_copy_(0, union, total.div_(self._size)), self.sparse

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
        received = send.new_empty(self._size, len(send))
        dist.all_gather_into_tensor(received.view(-1), send, group=self._group)

        def part(rank: int, tensor: Tensor, start: int) -> Tensor:
            # A copy, since a wider type must not begin at any byte.
            size = counts[rank] * tensor.element_size()
            return received[rank, start : start + size].clone().view(tensor.dtype)

        return [
            [part(rank, tensor, start) for tensor, start in zip(own, bounds, strict=False)]
            for rank in range(self._size)
        ]

    def _sum(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """The mean of every rank's indices, values and scale, summed in the order of ranks."""
        total = torch.zeros(self._numel, device=self._device)
        for indices, values, scale in parts:
            # A rank's indices differ, so that this is no sum over an order that a GPU may choose.
            total[indices] += values.float() * scale
        return total.div_(self._size)
