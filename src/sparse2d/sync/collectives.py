"""Collectives over the M replicas of a shard, and how many bytes were handed to them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """What one rank exchanges with the replicas of its shards.

    Args:
        group: the M replicas.
        num_rows: of all shards on this rank; keys are below it.
    """

    def __init__(self, group: dist.ProcessGroup, num_rows: int) -> None:
        self._group = group
        # Keys fit into 32 bits unless a rank holds more than two billion rows.
        self._key_dtype = torch.int32 if num_rows < 2**31 else torch.int64
        self.size = dist.get_world_size(group)
        self.payloads_bytes: list[int] = []

    @property
    def key_bytes(self) -> int:
        """Bytes of a key on its way."""
        return int(self._key_dtype.itemsize)

    def begin(self) -> None:
        """Count bytes for a new averaging."""
        self.payloads_bytes.append(0)

    def _count(self, sent: Tensor) -> None:
        self.payloads_bytes[-1] += sent.numel() * sent.element_size()

    def all_keys(self, keys: Tensor) -> Tensor:
        """The keys of all replicas, one replica after the other; ``keys`` [n] are this rank's."""
        count = torch.tensor([len(keys)], device=keys.device)
        counts = [torch.empty_like(count) for _ in range(self.size)]
        dist.all_gather(counts, count, group=self._group)
        sizes = torch.cat(counts).tolist()
        padded = torch.zeros(max(sizes), dtype=self._key_dtype, device=keys.device)
        padded[: len(keys)] = keys
        self._count(padded)
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self._group)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)]).long()

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the replicas of a tensor, in place; bit-equal on all of them."""
        if values.numel():
            self._count(values)
            # Gloo has no ReduceOp.AVG.
            dist.all_reduce(values, group=self._group)
            values.div_(self.size)
        return values

    def mean_together(self, tensors: list[Tensor]) -> None:
        """Average some tensors in place in one collective: one for each would cost 26 latencies."""
        if not tensors:
            return
        flat = self.mean(flatten(tensors, tensors[0].device))
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def start_sum(self, values: Tensor) -> Any:
        """Begin to sum a tensor over the replicas, in place; what is returned has ``wait``."""
        self._count(values)
        return dist.all_reduce(values, group=self._group, async_op=True)

    def mean_bf16(self, values: Tensor) -> Tensor:
        """The mean over the replicas of ``values`` [n], sent as bf16 and summed in fp32; bit-equal on all of them.

        A reduce-scatter made of an all-to-all, so that every rank sums its part in fp32, and an all-gather: half the
        bytes of an fp32 all-reduce.
        """
        part = -(-len(values) // self.size)
        send = torch.zeros(self.size * part, dtype=torch.bfloat16, device=values.device)
        send[: len(values)] = values
        self._count(send)
        received = torch.empty_like(send)
        # As bytes: gloo does not know bf16 in every collective.
        dist.all_to_all_single(received.view(torch.uint8), send.view(torch.uint8), group=self._group)
        mean = received.view(self.size, part).float().mean(dim=0).bfloat16()
        gathered = torch.empty_like(send)
        dist.all_gather_into_tensor(gathered.view(torch.uint8), mean.view(torch.uint8), group=self._group)
        return gathered[: len(values)].float()


def flatten(tensors: list[Tensor], device: torch.device) -> Tensor:
    """All elements, one tensor after the other."""
    return torch.cat([torch.empty(0, device=device), *(tensor.reshape(-1) for tensor in tensors)])
