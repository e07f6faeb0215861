"""Layouts of the model over the ranks: data parallel, full model parallelism, 2D."""

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from sparse2d.config import ParallelismConfig, ParallelismKind
from sparse2d.mesh import Mesh
from sparse2d.parallel.plans import TableSharder
from sparse2d.parallel.sparse_2d import Sparse2D


def shard_model(
    module: nn.Module,
    config: ParallelismConfig,
    mesh: Mesh,
    plan: ShardingPlan,
    sharder: TableSharder,
    device: torch.device,
) -> DistributedModelParallel:
    """Lay ``module`` out over the ranks; the dense part is data parallel over all T in every layout.

    Args:
        module: a model whose tables are on the meta device.
        config: which layout.
        mesh: T, M, N.
        plan: made for one group (see ``plans.make_plan``); changed in place for 2D.
        sharder: carries the fused optimizer.
        device: of this rank.
    """
    world = dist.group.WORLD
    assert world is not None
    if config.kind is ParallelismKind.sparse_2d:
        return Sparse2D(module, mesh=mesh, plan=plan, sharders=[sharder], device=device, global_pg=world)
    return DistributedModelParallel(
        module, env=ShardingEnv.from_process_group(world), device=device, plan=plan, sharders=[sharder]
    )
