"""Plans in TorchRec's own form, and what TorchRec takes for granted of them."""

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets, placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from sparse2d.config import ShardingKind
from sparse2d.plan import DATA_PARALLEL, Layout, Plan, PlannedShard, PlannedTable

# FBGEMM works on rows of a multiple of four elements.
MIN_COLUMNS = 4


def table_configs(module: nn.Module) -> list[EmbeddingBagConfig]:
    """The tables of a model that is not sharded yet."""
    return [config for _, collection in collections(module) for config in collection.embedding_bag_configs()]


def collections(module: nn.Module) -> list[tuple[str, EmbeddingBagCollection]]:
    """The collections of tables in a model, by path."""
    return [(path, child) for path, child in module.named_modules() if isinstance(child, EmbeddingBagCollection)]


def kernel_of(sharding: str) -> str:
    """TorchRec's lookup: with the optimizer fused into it, unless the table is replicated."""
    return str((EmbeddingComputeKernel.DENSE if sharding == DATA_PARALLEL else EmbeddingComputeKernel.FUSED).value)


def planned_table(table: EmbeddingBagConfig, parameter: ParameterSharding, group_size: int) -> PlannedTable:
    """Where TorchRec's planner puts a table."""
    rows, dim = table.num_embeddings, table.embedding_dim
    if parameter.sharding_type == DATA_PARALLEL:
        shards = [PlannedShard(rank, (0, rows), (0, dim)) for rank in range(group_size)]
        return PlannedTable(table.name, rows, dim, DATA_PARALLEL, shards)
    shards = []
    for rank, shard in zip(parameter.ranks, parameter.sharding_spec.shards, strict=True):
        (row, column), (height, width) = shard.shard_offsets, shard.shard_sizes
        shards.append(PlannedShard(rank, (row, row + height), (column, column + width)))
    return PlannedTable(table.name, rows, dim, parameter.sharding_type, shards)


def follows_torchrec(table: PlannedTable, layout: Layout) -> bool:
    """Whether TorchRec's lookups would find the rows where the plan has them: they compute the place, not read it."""
    group, host = layout.group_size, layout.ranks_per_host
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(table.rows, table.dim, device="meta"), group, host, table.sharding, MIN_COLUMNS
    )
    expected = [
        ((row, row + height), (column, column + width))
        for (row, column), (height, width) in zip(offsets, sizes, strict=True)
    ]
    if [(shard.rows, shard.columns) for shard in table.shards] != expected:
        return False
    ranks = [shard.rank for shard in table.shards]
    if table.sharding in (DATA_PARALLEL, ShardingKind.row_wise.value):
        return ranks == list(range(group))
    if table.sharding == ShardingKind.table_column_wise.value:
        return len({rank // host for rank in ranks}) == 1
    if table.sharding in (ShardingKind.table_row_wise.value, ShardingKind.grid_shard.value):
        firsts = ranks[::host]
        in_order = [first + place for first in firsts for place in range(host)]
        return ranks == in_order and all(first % host == 0 for first in firsts)
    return True


def torchrec_plan(plan: Plan, module: nn.Module) -> ShardingPlan:
    """The plan as TorchRec's sharders want it."""
    planned = {table.name: table for table in plan.tables}
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan(
                {
                    config.name: _parameter_sharding(planned[config.name], plan.layout)
                    for config in collection.embedding_bag_configs()
                }
            )
            for path, collection in collections(module)
        }
    )


def _parameter_sharding(table: PlannedTable, layout: Layout) -> ParameterSharding:
    sharding = table.sharding
    if sharding == ShardingType.TABLE_COLUMN_WISE.value:
        # Once the ranks are chosen it is column-wise, and has the same lookups; under 2D TorchRec 1.8 fails on ranks
        # that hold nothing of a table if it is called by its own name.
        sharding = ShardingType.COLUMN_WISE.value
    spec = None
    if sharding != DATA_PARALLEL:
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[shard.rows[0], shard.columns[0]],
                    shard_sizes=[shard.rows[1] - shard.rows[0], shard.columns[1] - shard.columns[0]],
                    placement=placement(layout.device, shard.rank, layout.ranks_per_host),
                )
                for shard in table.shards
            ]
        )
    return ParameterSharding(
        sharding_type=sharding,
        compute_kernel=kernel_of(sharding),
        ranks=[shard.rank for shard in table.shards],
        sharding_spec=spec,
    )


def shards_inside_hosts(plan: Plan) -> bool:
    """Whether a table is split in a way that needs process groups of hosts."""
    kinds = (ShardingKind.table_row_wise.value, ShardingKind.grid_shard.value)
    return any(table.sharding in kinds for table in plan.tables)
