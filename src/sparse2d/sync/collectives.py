"""Collectives over the M replicas of a shard."""

import torch
import torch.distributed as dist
from torch import Tensor


def gather_keys(keys: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The keys [n_r] of each replica r, on every replica.

    Args:
        keys: of this rank, [n]; n differs between replicas.
        group: the replicas.
    """
    world = dist.get_world_size(group)
    count = torch.tensor([len(keys)], device=keys.device)
    counts = [torch.empty_like(count) for _ in range(world)]
    dist.all_gather(counts, count, group=group)
    sizes = torch.cat(counts).tolist()
    padded = keys.new_zeros(max(sizes))
    padded[: len(keys)] = keys
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded, group=group)
    return [part[:size] for part, size in zip(gathered, sizes, strict=True)]


def mean_fp32(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over the replicas of ``values`` [n], in place; bit-equal on all of them."""
    # Gloo has no ReduceOp.AVG.
    dist.all_reduce(values, group=group)
    return values.div_(dist.get_world_size(group))


def mean_bf16(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over the replicas of ``values`` [n], sent as bf16 and summed in fp32; bit-equal on all of them.

    A reduce-scatter made of an all-to-all, so that every rank sums its part in fp32, and an all-gather: half the bytes
    of an fp32 all-reduce.
    """
    world = dist.get_world_size(group)
    part = -(-len(values) // world)
    send = torch.zeros(world * part, dtype=torch.bfloat16, device=values.device)
    send[: len(values)] = values
    received = torch.empty_like(send)
    # As bytes: gloo does not know bf16 in every collective.
    dist.all_to_all_single(received.view(torch.uint8), send.view(torch.uint8), group=group)
    mean = received.view(world, part).float().mean(dim=0).bfloat16()
    gathered = torch.empty_like(send)
    dist.all_gather_into_tensor(gathered.view(torch.uint8), mean.view(torch.uint8), group=group)
    return gathered[: len(values)].float()
