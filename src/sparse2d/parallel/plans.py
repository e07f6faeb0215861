"""Sharding plans: TorchRec's planner, run for one group of N ranks, or a plan file in its place."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, ShardingOption, Storage

from sparse2d.config import ParallelismConfig, ParallelismKind, ShardingKind
from sparse2d.environment import found_versions
from sparse2d.errors import UserError
from sparse2d.parallel.tables import lookup_kernels
from sparse2d.parallel.torchrec_plans import MIN_COLUMNS, follows_torchrec, kernel_of, planned_table, table_configs
from sparse2d.plan import DATA_PARALLEL, REMEDY, SCHEMA, Layout, Plan, read_plan, refuse_stale

# Share of a rank's memory that is not for tables: dense layers, activations, batches.
RESERVED = 0.15
# Tables and their optimizer state are fp32.
VALUE_BYTES = 4


class TableSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, which leaves kinds out on the CPU although the kernels have them.

    Args:
        fused_params: FBGEMM's optimizer and its numbers.
        prepare: called with the lookup kernels of each collection as soon as it is sharded.
        state_bytes_per_row: optimizer state of a row, given its columns: a shard's own, where columns are split.
    """

    def __init__(
        self,
        fused_params: dict[str, Any],
        prepare: Callable[[list[nn.Module]], None] = lambda kernels: None,
        state_bytes_per_row: Callable[[int], int] = lambda columns: 0,
    ) -> None:
        super().__init__(fused_params=fused_params)
        self._prepare = prepare
        self.state_bytes_per_row = state_bytes_per_row

    def shard(self, *args: Any, **kwargs: Any) -> ShardedEmbeddingBagCollection:
        """Upstream's, then ``prepare``."""
        sharded = super().shard(*args, **kwargs)
        self._prepare(lookup_kernels(sharded))
        return sharded

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Upstream's sharding types, and ours on every device."""
        types = super().sharding_types(compute_device_type)
        return [*types, *(kind.value for kind in ShardingKind if kind.value not in types)]


def allowed_kinds(
    rows: int, group_size: int, local_group_size: int, wanted: Sequence[ShardingKind]
) -> list[ShardingKind]:
    """Sharding kinds that leave no rank of the group with an empty shard of a table of ``rows`` rows.

    Row-wise gives every rank ceil(rows / N) rows until they run out; table-row-wise and grid do so over the ranks of
    one host. A table too small for all that is wanted is placed table-wise.
    """
    splits_rows_over = {
        ShardingKind.row_wise: group_size,
        ShardingKind.table_row_wise: local_group_size,
        ShardingKind.grid_shard: local_group_size,
    }

    def fills(ranks: int) -> bool:
        return math.ceil(rows / ranks) * (ranks - 1) < rows

    return [kind for kind in wanted if fills(splits_rows_over.get(kind, 1))] or [ShardingKind.table_wise]


def make_plan(
    module: nn.Module,
    sharder: TableSharder,
    config: ParallelismConfig,
    *,
    group_size: int,
    local_group_size: int,
    rank_batch_size: int,
    device: torch.device,
    local_world_size: int | None = None,
) -> Plan:
    """Plan all tables of ``module`` over one group, or read the plan from ``config.plan_file``.

    The same inputs give the same plan on every rank. No process group is needed.

    Args:
        module: a model whose tables are on the meta device.
        sharder: TorchRec's view of what can be sharded.
        config: layout and the sharding kinds to choose from.
        group_size: N, the ranks that the tables are spread over.
        local_group_size: how many of them share a host.
        rank_batch_size: rows per rank and step.
        device: what the ranks compute on.
        local_world_size: ranks of all groups that share a host's memory; None = all T.

    Raises:
        UserError: if the tables do not fit, or the file is not of this run.
    """
    layout = Layout(
        parallelism=config.kind.name,
        world_size=group_size * config.num_groups,
        num_groups=config.num_groups,
        group_size=group_size,
        replicas=config.replicas.name,
        ranks_per_host=local_group_size,
        device=device.type,
    )
    if config.plan_file is not None:
        return _pinned(module, config, layout)
    topology = group_topology(layout, device, local_world_size or layout.world_size)
    constraints = table_constraints(module, config, layout)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        constraints=constraints,
        batch_size=rank_batch_size,
        enumerator=enumerator_of(topology, constraints, rank_batch_size, sharder),
        storage_reservation=FixedPercentageStorageReservation(RESERVED),
        stats=NoopEmbeddingStats(),
    )
    try:
        chosen = planner.plan(module, [sharder])
    except PlannerError as error:
        raise UserError(_no_plan(module, sharder, config, topology)) from error
    sharding = {name: parameter for part in chosen.plan.values() for name, parameter in part.items()}
    tables = [planned_table(table, sharding[table.name], group_size) for table in table_configs(module)]
    return Plan(SCHEMA, layout, found_versions(), tables)


def group_topology(layout: Layout, device: torch.device, local_world_size: int) -> Topology:
    """The group as TorchRec's planner sees it.

    Args:
        layout: of the run.
        device: what the ranks compute on; on the CPU their memory is a share of this host's.
        local_world_size: ranks, of all groups, that share a host.
    """
    return Topology(
        world_size=layout.group_size,
        local_world_size=layout.ranks_per_host,
        compute_device=device.type,
        hbm_cap=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        ddr_cap=psutil.virtual_memory().total // local_world_size,
    )


def table_constraints(
    module: nn.Module, config: ParallelismConfig, layout: Layout, plan: Plan | None = None
) -> dict[str, ParameterConstraints]:
    """What each table may be: what the options allow, or what ``plan`` says."""
    replicated = config.kind is ParallelismKind.data_parallel
    kinds = {
        table.name: [kind.value for kind in _allowed(table.num_embeddings, config, layout)]
        for table in table_configs(module)
    }
    if plan is not None:
        kinds = {table.name: [table.sharding] for table in plan.tables}
    return {
        name: ParameterConstraints(
            sharding_types=[DATA_PARALLEL] if replicated else types,
            compute_kernels=[kernel_of(DATA_PARALLEL if replicated else types[0])],
            min_partition=MIN_COLUMNS,
            pooling_factors=[1.0],
        )
        for name, types in kinds.items()
    }


def _allowed(rows: int, config: ParallelismConfig, layout: Layout) -> list[ShardingKind]:
    return allowed_kinds(rows, layout.group_size, layout.ranks_per_host, config.sharding)


class _TableStorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's estimate of memory, which counts no state of fused optimizers."""

    def __init__(self, sharder: TableSharder, **options: Any) -> None:
        super().__init__(**options)
        self._sharder = sharder

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        super().estimate(sharding_options, sharder_data_map)
        on_gpu = self._topology.compute_device == "cuda"
        for shard in (shard for option in sharding_options for shard in option.shards):
            size = shard.size[0] * self._sharder.state_bytes_per_row(shard.size[1])
            shard.storage += Storage(hbm=size if on_gpu else 0, ddr=0 if on_gpu else size)


def enumerator_of(
    topology: Topology, constraints: dict[str, ParameterConstraints], rank_batch_size: int, sharder: TableSharder
) -> EmbeddingEnumerator:
    """Lists the ways to cut each table, with TorchRec's estimate of their load and memory."""
    return EmbeddingEnumerator(
        topology=topology,
        batch_size=rank_batch_size,
        constraints=constraints,
        estimator=[
            EmbeddingPerfEstimator(topology=topology, constraints=constraints),
            _TableStorageEstimator(sharder, topology=topology, constraints=constraints),
        ],
    )


def _no_plan(module: nn.Module, sharder: TableSharder, config: ParallelismConfig, topology: Topology) -> str:
    sizes = {
        table.name: table.num_embeddings
        * (table.embedding_dim * VALUE_BYTES + sharder.state_bytes_per_row(table.embedding_dim))
        for table in table_configs(module)
    }
    largest = max(sizes, key=lambda name: sizes[name])
    storage = topology.devices[0].storage
    gib = 2**30
    return (
        f"TorchRec's planner finds no plan with parallelism.sharding={[kind.name for kind in config.sharding]}: weights"
        f" and optimizer state take {sum(sizes.values()) / gib:.1f} GiB ({largest} {sizes[largest] / gib:.1f}), each of"
        f" {topology.world_size} ranks of a group has {(storage.hbm or storage.ddr) / gib:.1f} GiB, of which "
        f"{RESERVED:.0%} is kept free; use more ranks, fewer groups, smaller tables, or more sharding kinds"
    )


def _pinned(module: nn.Module, config: ParallelismConfig, layout: Layout) -> Plan:
    """The plan of ``config.plan_file``, unless it was made for another run or TorchRec would not place it so."""
    path = Path(str(config.plan_file))
    plan = read_plan(path)
    refuse_stale(
        plan, path, layout, {table.name: (table.num_embeddings, table.embedding_dim) for table in table_configs(module)}
    )
    for table in plan.tables:
        kinds = [kind.value for kind in _allowed(table.rows, config, layout)]
        if config.kind is ParallelismKind.data_parallel:
            kinds = [DATA_PARALLEL]
        fault = None
        if table.sharding not in kinds:
            fault = f"is {table.sharding}, which parallelism.sharding and its {table.rows} rows do not allow: {kinds}"
        elif not follows_torchrec(table, layout):
            fault = f"is not cut and placed as TorchRec does it for {table.sharding}"
        if fault is not None:
            raise UserError(f"parallelism.plan_file={path}: table {table.name} {fault}; {REMEDY}")
    return plan
