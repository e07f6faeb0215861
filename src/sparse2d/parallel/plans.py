"""Sharding plans: TorchRec's planner, run for one group of N ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import psutil
import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from sparse2d.config import ParallelismConfig, ParallelismKind, ShardingKind
from sparse2d.parallel.tables import lookup_kernels

# FBGEMM works on rows of a multiple of four elements.
MIN_COLUMNS = 4


class TableSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, which leaves row-wise out on the CPU although the kernels have it.

    Args:
        fused_params: FBGEMM's optimizer and its numbers.
        prepare: called with the lookup kernels of each collection as soon as it is sharded.
    """

    def __init__(
        self, fused_params: dict[str, Any], prepare: Callable[[list[nn.Module]], None] = lambda kernels: None
    ) -> None:
        super().__init__(fused_params=fused_params)
        self._prepare = prepare

    def shard(self, *args: Any, **kwargs: Any) -> ShardedEmbeddingBagCollection:
        """Upstream's, then ``prepare``."""
        sharded = super().shard(*args, **kwargs)
        self._prepare(lookup_kernels(sharded))
        return sharded

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Upstream's sharding types, and row-wise on every device."""
        types = super().sharding_types(compute_device_type)
        return types if ShardingType.ROW_WISE.value in types else [*types, ShardingType.ROW_WISE.value]


def allowed_kinds(rows: int, group_size: int, wanted: Sequence[ShardingKind]) -> list[ShardingKind]:
    """Sharding kinds that leave no rank of the group with an empty shard of a table of ``rows`` rows.

    Row-wise gives every rank ceil(rows / N) rows until they run out. A table too small for all that is wanted is placed
    table-wise.
    """
    block = math.ceil(rows / group_size)
    fits_row_wise = block * (group_size - 1) < rows
    kinds = [kind for kind in wanted if kind is not ShardingKind.row_wise or fits_row_wise]
    return kinds or [ShardingKind.table_wise]


def make_plan(
    module: nn.Module,
    sharder: TableSharder,
    config: ParallelismConfig,
    *,
    group_size: int,
    local_group_size: int,
    rank_batch_size: int,
    device: torch.device,
) -> ShardingPlan:
    """Plan all tables of ``module`` over one group; the same inputs give the same plan on every rank.

    Args:
        module: a model whose tables are on the meta device.
        sharder: TorchRec's view of what can be sharded.
        config: layout and the sharding kinds to choose from.
        group_size: N, the ranks that the tables are spread over.
        local_group_size: how many of them share a host.
        rank_batch_size: rows per rank and step.
        device: what the ranks compute on.
    """
    replicated = config.kind is ParallelismKind.data_parallel
    constraints = {}
    for table in table_configs(module):
        kinds = allowed_kinds(table.num_embeddings, group_size, config.sharding)
        constraints[table.name] = ParameterConstraints(
            sharding_types=[ShardingType.DATA_PARALLEL.value] if replicated else [kind.value for kind in kinds],
            compute_kernels=[(EmbeddingComputeKernel.DENSE if replicated else EmbeddingComputeKernel.FUSED).value],
            min_partition=MIN_COLUMNS,
            pooling_factors=[1.0],
        )
    topology = Topology(
        world_size=group_size,
        local_world_size=local_group_size,
        compute_device=device.type,
        hbm_cap=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        ddr_cap=psutil.virtual_memory().total // local_group_size,
    )
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints, batch_size=rank_batch_size)
    return planner.plan(module, [sharder])


def table_configs(module: nn.Module) -> list[EmbeddingBagConfig]:
    """The tables of a model that is not sharded yet."""
    return [
        config
        for child in module.modules()
        if isinstance(child, EmbeddingBagCollection)
        for config in child.embedding_bag_configs()
    ]


@dataclass(frozen=True)
class PlanSummary:
    """What a plan puts on the N ranks of a group."""

    num_shards: int
    rows_per_rank: list[int]
    bytes_per_rank: list[int]
    sharding: dict[str, str]

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest rank over the mean."""
        return max(self.bytes_per_rank) * len(self.bytes_per_rank) / sum(self.bytes_per_rank)


def summarise_plan(plan: ShardingPlan, module: nn.Module, group_size: int) -> PlanSummary:
    """Count shards, rows and weight bytes (fp32) per rank, before the plan is remapped to global ranks."""
    rows, size, shards = [0] * group_size, [0] * group_size, 0
    sharding: dict[str, str] = {}
    tables = {table.name: table for table in table_configs(module)}
    for module_plan in plan.plan.values():
        for name, parameter in cast(dict[str, ParameterSharding], module_plan).items():
            sharding[name] = parameter.sharding_type
            table = tables[name]
            if parameter.sharding_spec is None:  # replicated on every rank
                placed = [(rank, table.num_embeddings, table.embedding_dim) for rank in range(group_size)]
            else:
                spec = cast(EnumerableShardingSpec, parameter.sharding_spec)
                placed = [(shard.placement.rank(), shard.shard_sizes[0], shard.shard_sizes[1]) for shard in spec.shards]
            for rank, shard_rows, shard_columns in placed:
                rows[rank] += shard_rows
                size[rank] += shard_rows * shard_columns * 4
                shards += 1
    return PlanSummary(num_shards=shards, rows_per_rank=rows, bytes_per_rank=size, sharding=sharding)
