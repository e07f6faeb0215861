"""2D sparse parallelism: TorchRec's ``DMPCollection``, which also runs on CPU ranks over gloo."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import (
    DMPCollectionContext,
    EnumerableShardingSpec,
    ModuleSharder,
    ShardingEnv2D,
    ShardingPlan,
    ShardingStrategy,
)

from sparse2d.config import Replicas
from sparse2d.mesh import Mesh


class Sparse2D(DMPCollection):
    """``torchrec.distributed.model_parallel.DMPCollection`` for every device.

    On CUDA, construction is upstream's. On the CPU three things differ: upstream asserts CUDA, writes placements as
    ``cpu:LOCAL_RANK`` (which then mismatch the local tensors), and averages with an operation that gloo lacks.

    Args:
        module: a model whose tables are on the meta device.
        mesh: T, M, N and the rank layout.
        plan: made for one group of N ranks; remapped in place to this rank's group.
        sharders: carry the fused optimizer.
        device: of this rank.
        global_pg: all T ranks.
        local_group_size: ranks of one group that share a host.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: Mesh,
        plan: ShardingPlan,
        sharders: list[ModuleSharder[nn.Module]],
        device: torch.device,
        global_pg: dist.ProcessGroup,
        local_group_size: int,
    ) -> None:
        inter_host = mesh.replicas is Replicas.inter_host
        if device.type != "cpu":
            super().__init__(
                module,
                device=device,
                plan=plan,
                world_size=mesh.world_size,
                sharding_group_size=mesh.group_size,
                global_pg=global_pg,
                sharders=sharders,
                use_inter_host_allreduce=inter_host,
                node_group_size=local_group_size,
            )
            return
        self._init_on_cpu(module, mesh, plan, sharders, device, global_pg, inter_host, local_group_size)

    def _init_on_cpu(
        self,
        module: nn.Module,
        mesh: Mesh,
        plan: ShardingPlan,
        sharders: list[ModuleSharder[nn.Module]],
        device: torch.device,
        global_pg: dist.ProcessGroup,
        inter_host: bool,
        local_group_size: int,
    ) -> None:
        """Upstream's constructor, step for step, for the one context we use and without its CUDA assertion."""
        self._device = device
        self._pg = global_pg
        self._global_rank = dist.get_rank(global_pg)
        self._custom_all_reduce = None
        self._sharder_map = {sharder.module_type: sharder for sharder in sharders}
        self._use_sharded_relay = False
        self._sharded_relay_state = None
        context = DMPCollectionContext(
            module=None,  # upstream's default context has none either
            plan=plan,
            sharding_group_size=mesh.group_size,
            use_inter_host_allreduce=inter_host,
            sharding_strategy=ShardingStrategy.DEFAULT,
        )
        context.device_mesh, context.sharding_pg, context.replica_pg = self._create_process_groups(
            global_rank=self._global_rank,
            world_size=mesh.world_size,
            local_size=mesh.group_size,
            use_inter_host_allreduce=inter_host,
        )
        self._default_ctx, self._ctxs = context, [context]
        self._submodule_ctxs: list[DMPCollectionContext] = []
        self._remap_sharding_plan(
            plan=plan,
            rank=self._global_rank,
            step=mesh.num_groups,
            sharding_group_size=mesh.group_size,
            use_inter_host_allreduce=inter_host,
        )
        env = ShardingEnv2D(
            global_pg=global_pg,
            sharding_pg=context.sharding_pg,
            replica_pg=context.replica_pg,
            device_mesh=context.device_mesh,
            node_group_size=local_group_size,
            use_inter_host_allreduce=inter_host,
            sharding_strategy=context.sharding_strategy,
        )
        DistributedModelParallel.__init__(self, module, env, device, plan, sharders)
        self._group_sharded_modules(self._ctxs)
        self._cache_sync_tensors(self._ctxs)

    def _remap_sharding_plan(self, plan: ShardingPlan, *args: Any, **kwargs: Any) -> None:
        """Upstream's remap to this group's global ranks, with placements that gloo's CPU tensors match."""
        super()._remap_sharding_plan(plan, *args, **kwargs)
        if self._device.type != "cpu":
            return
        for module_plan in plan.plan.values():
            for parameter in module_plan.values():
                if isinstance(parameter.sharding_spec, EnumerableShardingSpec):
                    for shard in parameter.sharding_spec.shards:
                        shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    def _cache_sync_tensors(self, contexts: list[DMPCollectionContext]) -> None:
        """Collect every weight and moment to average; upstream reads ``state["sum"]``, which SGD and Adam lack."""
        for context in contexts:
            context.weights_by_dtype, context.optimizer_tensors_by_dtype, context.hash_zch_modules = {}, {}, []
            for kernel, _ in context.modules_to_sync:
                for weight in kernel.split_embedding_weights():
                    context.weights_by_dtype.setdefault(weight.dtype, []).append(weight)
                for moments in kernel.split_optimizer_states():
                    for moment in moments:
                        context.optimizer_tensors_by_dtype.setdefault(moment.dtype, []).append(moment)

    @property
    def replica_pg(self) -> dist.ProcessGroup:
        """The M ranks that hold a replica of this rank's shards."""
        return self._default_ctx.replica_pg

    @property
    def table_weights(self) -> list[torch.Tensor]:
        """This rank's shards: views [rows, columns] of the kernels' own memory."""
        return [weight for weights in self._default_ctx.weights_by_dtype.values() for weight in weights]

    @property
    def table_moments(self) -> list[torch.Tensor]:
        """Optimizer state of this rank's shards: views of the kernels' own memory."""
        return [moment for moments in self._default_ctx.optimizer_tensors_by_dtype.values() for moment in moments]
