"""Layouts of the model over the ranks: data parallel, full model parallelism, 2D."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from sparse2d.config import ParallelismConfig, ParallelismKind
from sparse2d.mesh import Mesh, host_process_groups
from sparse2d.parallel.plans import TableSharder
from sparse2d.parallel.sparse_2d import Sparse2D
from sparse2d.parallel.torchrec_plans import shards_inside_hosts, torchrec_plan
from sparse2d.plan import Plan


def shard_model(
    module: nn.Module,
    config: ParallelismConfig,
    mesh: Mesh,
    plan: Plan,
    sharder: TableSharder,
    device: torch.device,
) -> DistributedModelParallel:
    """Lay ``module`` out over the ranks; the dense part is data parallel over all T in every layout.

    Args:
        module: a model whose tables are on the meta device.
        config: which layout.
        mesh: T, M, N.
        plan: made for one group (see ``plans.make_plan``).
        sharder: carries the fused optimizer.
        device: of this rank.
    """
    world = dist.group.WORLD
    assert world is not None
    local_size = plan.layout.ranks_per_host
    placed = torchrec_plan(plan, module)
    with host_process_groups(mesh, local_size) if shards_inside_hosts(plan) else nullcontext():
        if config.kind is ParallelismKind.sparse_2d:
            return Sparse2D(
                module,
                mesh=mesh,
                plan=placed,
                sharders=[sharder],
                device=device,
                global_pg=world,
                local_group_size=local_size,
            )
        return DistributedModelParallel(
            module, env=ShardingEnv.from_process_group(world), device=device, plan=placed, sharders=[sharder]
        )
