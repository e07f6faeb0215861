"""What a plan puts on each rank: shards, rows, bytes, and TorchRec's estimate of the load."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner import Topology

from sparse2d.config import ParallelismConfig
from sparse2d.mesh import Mesh
from sparse2d.parallel.plans import (
    VALUE_BYTES,
    TableSharder,
    enumerator_of,
    make_plan,
    table_constraints,
)
from sparse2d.plan import Plan


@dataclass(frozen=True)
class PlanSummary:
    """What a plan puts on the N ranks of a group.

    Attributes:
        num_shards: over all ranks.
        shards_per_rank: rectangles of tables.
        rows_per_rank: of all shards.
        bytes_per_rank: weights and optimizer state.
        load_ms_per_rank: modelled: TorchRec's estimate of lookups and their communication, forward and backward, on
            the hardware that its planner assumes; for comparing ranks, not for predicting this machine.
        sharding: of each table.
    """

    num_shards: int
    shards_per_rank: list[int]
    rows_per_rank: list[int]
    bytes_per_rank: list[int]
    load_ms_per_rank: list[float]
    sharding: dict[str, str]

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest rank over the mean."""
        return _imbalance(self.bytes_per_rank)

    @property
    def load_imbalance(self) -> float:
        """Estimated load of the busiest rank over the mean."""
        return _imbalance(self.load_ms_per_rank)

    def as_record(self) -> dict[str, Any]:
        """The record's ``plan`` part."""
        return asdict(self) | {"imbalance": self.imbalance, "load_imbalance": self.load_imbalance}


def _imbalance(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values)


def summarise_plan(
    plan: Plan, module: nn.Module, sharder: TableSharder, config: ParallelismConfig, rank_batch_size: int
) -> PlanSummary:
    """Count shards, rows and bytes per rank, and let TorchRec estimate the load."""
    layout = plan.layout
    # What a rank can hold has no part in these estimates.
    topology = Topology(
        world_size=layout.group_size, local_world_size=layout.ranks_per_host, compute_device=layout.device
    )
    constraints = table_constraints(module, config, layout, plan)
    options = {
        o.name: o for o in enumerator_of(topology, constraints, rank_batch_size, sharder).enumerate(module, [sharder])
    }
    size = layout.group_size
    shards, rows, held, load = [0] * size, [0] * size, [0] * size, [0.0] * size
    for table in plan.tables:
        for shard, estimate in zip(table.shards, options[table.name].shards, strict=True):
            height, width = shard.rows[1] - shard.rows[0], shard.columns[1] - shard.columns[0]
            shards[shard.rank] += 1
            rows[shard.rank] += height
            held[shard.rank] += height * (width * VALUE_BYTES + sharder.state_bytes_per_row(width))
            load[shard.rank] += estimate.perf.total
    return PlanSummary(
        num_shards=sum(shards),
        shards_per_rank=shards,
        rows_per_rank=rows,
        bytes_per_rank=held,
        load_ms_per_rank=load,
        sharding={table.name: table.sharding for table in plan.tables},
    )


def plan_and_summarise(
    module: nn.Module,
    sharder: TableSharder,
    config: ParallelismConfig,
    *,
    mesh: Mesh,
    local_world_size: int,
    rank_batch_size: int,
    device: torch.device,
) -> tuple[Plan, PlanSummary]:
    """``make_plan`` for a mesh whose hosts have ``local_world_size`` ranks each, and what it puts where."""
    plan = make_plan(
        module,
        sharder,
        config,
        group_size=mesh.group_size,
        local_group_size=mesh.local_group_size(config.ranks_per_host or local_world_size),
        rank_batch_size=rank_batch_size,
        device=device,
        local_world_size=local_world_size,
    )
    return plan, summarise_plan(plan, module, sharder, config, rank_batch_size)
