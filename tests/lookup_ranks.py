"""What tests of compressed lookups run on real ranks; importable by name, for the fork server's children."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from ranks import CPU
from torch import Tensor

from sparse2d.compression.lookups import SelectedAllToAll, SelectedReduceScatter, Sender
from sparse2d.config import LookupCompressionConfig
from sparse2d.mesh import process_group
from sparse2d.wire import WireCounter


@dataclass(frozen=True)
class Exchange:
    """Pooled embeddings to be exchanged, step by step.

    Attributes:
        config: which entries are sent.
        dims: of the tables on each rank; of row-wise ones, on all ranks.
        row_wise: whether ranks hold partial sums.
        batch: samples of each rank.
        pooled: of each step, what each rank pools for all samples, [samples, dims].
        factors: of each step, the gradient of each rank's result.
        evaluated: of each step, whether it is an evaluation.
    """

    config: LookupCompressionConfig
    dims: list[list[int]]
    row_wise: bool
    batch: list[int]
    pooled: list[list[np.ndarray]]
    factors: list[list[np.ndarray]]
    evaluated: list[bool]


@dataclass(frozen=True)
class Exchanged:
    """Of each step and rank: what came, the gradient that came back, and bytes that were sent by part."""

    arrived: list[list[Tensor]]
    gradients: list[list[Tensor | None]]
    sent: list[list[dict[str, float]]]


def exchange_all(exchanges: list[Exchange]) -> list[Exchanged]:
    """One exchange after the other on the same ranks."""
    torch.set_num_threads(1)
    with process_group(CPU) as rank, WireCounter() as wire:
        return [_exchange(exchange, rank.rank, wire) for exchange in exchanges]


def _exchange(exchange: Exchange, rank: int, wire: WireCounter) -> Exchanged:
    group = dist.group.WORLD
    sender = Sender(group, exchange.dims[rank], exchange.config)
    widths = [sum(dims) for dims in exchange.dims]
    collective = SelectedReduceScatter(sender) if exchange.row_wise else SelectedAllToAll(sender, widths, None)
    own = []
    for number, (pooled, factors, evaluated) in enumerate(
        zip(exchange.pooled, exchange.factors, exchange.evaluated, strict=True), start=1
    ):
        wire.sent_bytes.clear()
        embeddings = torch.from_numpy(pooled[rank]).requires_grad_(not evaluated)
        sender.step = number
        with wire.counting():
            arrived = collective(embeddings, exchange.batch).wait()
            if not evaluated:
                (arrived * torch.from_numpy(factors[rank])).sum().backward()
        sent = {kind.part.name: bytes_sent for kind, bytes_sent in wire.sent_bytes.items() if kind.part is not None}
        own.append((arrived.detach(), embeddings.grad, sent))
    ranks: list = [None] * group.size()
    dist.all_gather_object(ranks, own)
    by_step = [list(zip(*of_step, strict=True)) for of_step in zip(*ranks, strict=True)]
    return Exchanged(*(list(column) for column in zip(*by_step, strict=True)))
