"""Table shards by name: initial weights that no layout changes, and whole tables gathered from their shards."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag, BatchedFusedEmbeddingBag
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

# Rows that are drawn together; a rank draws only the blocks that it holds rows of.
BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class Shard:
    """A rectangle of one table on this rank; its tensors are views of the kernel's own memory.

    Attributes:
        table: name of the table.
        row: first row of the table that the shard holds.
        column: first column.
        weight: [rows, columns].
        moments: optimizer state, each [rows] (row-wise) or [rows, columns]; empty where nothing is fused.
    """

    table: str
    row: int
    column: int
    weight: Tensor
    moments: tuple[Tensor, ...]


def local_shards(model: nn.Module) -> list[Shard]:
    """All shards on this rank, taken from the lookup kernels, which look alike in every layout."""
    return [shard for kernel in lookup_kernels(model) for shard in kernel_shards(kernel)]


def lookup_kernels(model: nn.Module) -> list[BatchedFusedEmbeddingBag | BatchedDenseEmbeddingBag]:
    """The kernels that look up this rank's shards; each serves the shards of several tables."""
    return [
        kernel
        for collection in model.modules()
        if isinstance(collection, ShardedEmbeddingBagCollection)
        for lookup in collection._lookups
        for kernel in lookup.modules()
        if isinstance(kernel, BatchedFusedEmbeddingBag | BatchedDenseEmbeddingBag)
    ]


def kernel_shards(kernel: BatchedFusedEmbeddingBag | BatchedDenseEmbeddingBag) -> list[Shard]:
    """The shards of one kernel, in the order in which it numbers their rows."""
    tables = kernel._config.embedding_tables
    weights = kernel.split_embedding_weights()
    moments: list[tuple[Tensor, ...]] = [()] * len(tables)
    if isinstance(kernel, BatchedFusedEmbeddingBag):
        moments = [tuple(state) for state in kernel.emb_module.split_optimizer_states()] or moments
    shards = []
    for table, weight, moment in zip(tables, weights, moments, strict=True):
        row, column = (0, 0) if table.local_metadata is None else table.local_metadata.shard_offsets
        shards.append(Shard(table.name, row, column, weight.detach(), moment))
    return shards


@torch.no_grad()
def initialise_tables(model: nn.Module, shapes: Mapping[str, tuple[int, int]], seed: int) -> None:
    """Draw every table from uniform(-1/sqrt(rows), 1/sqrt(rows)), TorchRec's default, block by block.

    A row's weights depend on the seed, the table and the row alone: not on T, M, N, sharding or device.

    Args:
        model: the sharded model.
        shapes: (rows, dim) of every table, by name.
        seed: of the run.
    """
    for shard in local_shards(model):
        height, width = shard.weight.shape
        for first, rows in initial_rows(shapes, shard.table, seed, range(shard.row, shard.row + height)):
            part = rows[:, shard.column : shard.column + width]
            shard.weight[first - shard.row : first - shard.row + len(part)].copy_(part)


def initial_rows(
    shapes: Mapping[str, tuple[int, int]], table: str, seed: int, wanted: range
) -> Iterator[tuple[int, Tensor]]:
    """The rows ``wanted`` of a table before training, by blocks: the first one's number and values [n, dim].

    Args:
        shapes: (rows, dim) of every table, by name.
        table: which of them.
        seed: of the run.
        wanted: consecutive rows.
    """
    rows, dim = shapes[table]
    bound = 1 / math.sqrt(rows)
    for start in range(wanted.start - wanted.start % BLOCK_ROWS, wanted.stop, BLOCK_ROWS):
        draws = np.random.default_rng([seed, sorted(shapes).index(table), start])
        block = draws.uniform(-bound, bound, (min(BLOCK_ROWS, rows - start), dim)).astype(np.float32)
        first, last = max(start, wanted.start), min(start + len(block), wanted.stop)
        yield first, torch.from_numpy(block[first - start : last - start])


def gather_tables(model: nn.Module, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Every whole table [rows, dim], on every rank (a collective; for tests and small models)."""
    return _assemble([[(shard, shard.weight) for shard in local_shards(model)]], shapes)[0]


def gather_moments(model: nn.Module, shapes: Mapping[str, tuple[int, int]]) -> list[dict[str, Tensor]]:
    """Every table's moments, each spread to [rows, dim]: column-wise shards of one table keep their own.

    Adam's two, AdaGrad's one, none for SGD or where nothing is fused.
    """
    shards = local_shards(model)
    numbers = range(max((len(shard.moments) for shard in shards), default=0))
    spread = [
        [(shard, shard.moments[number].view(len(shard.weight), -1).expand_as(shard.weight)) for shard in shards]
        for number in numbers
    ]
    return _assemble(spread, shapes)


def _assemble(
    states: list[list[tuple[Shard, Tensor]]], shapes: Mapping[str, tuple[int, int]]
) -> list[dict[str, Tensor]]:
    """Whole tables from all ranks' rectangles; replicas write the same place, so the highest rank's copy stays."""
    own = [
        (number, shard.table, shard.row, shard.column, tensor.cpu().clone())
        for number, pairs in enumerate(states)
        for shard, tensor in pairs
    ]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    tables: dict[int, dict[str, Tensor]] = {}
    for number, name, row, column, tensor in (part for rank_parts in parts for part in rank_parts):
        table = tables.setdefault(number, {}).setdefault(name, torch.full(shapes[name], float("nan")))
        table[row : row + tensor.shape[0], column : column + tensor.shape[1]] = tensor
    return [tables[number] for number in sorted(tables)]
