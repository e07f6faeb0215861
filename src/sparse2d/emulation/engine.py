"""The engine of ``engine=emulated``: DLRM on the whole batch, each row looking up its group's replica."""

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from sparse2d.config import Combine, OptimizerConfig, TableOptimizer, TrainConfig
from sparse2d.data.dataset import Dataset
from sparse2d.emulation.tables import ReplicatedTables
from sparse2d.errors import UserError
from sparse2d.mesh import Mesh
from sparse2d.models.dlrm import build_dlrm, table_name
from sparse2d.optimizers.fused import build_optimizer, moment_scale, table_sharder
from sparse2d.parallel.plan_summary import plan_and_summarise
from sparse2d.parallel.torchrec_plans import table_configs
from sparse2d.plan import Plan
from sparse2d.sync.combine import SUMS


class GroupedLookups(nn.Module):
    """Pooled embeddings of a batch whose rows belong to M groups; the backward pass updates the groups' replicas.

    Row i of b rows is of rank ``i // (b / T)``, as ``train_batches`` and ``eval_batches`` deal them, and a rank looks
    up the replica of its group: in training, and in an evaluation between two averagings, when replicas differ.

    Args:
        tables: of all groups.
        mesh: which rank is in which group.
        gradient_scale: what the gradient of the whole batch's mean loss is multiplied by before a group steps on it.
    """

    def __init__(self, tables: ReplicatedTables, mesh: Mesh, gradient_scale: float) -> None:
        super().__init__()
        self.tables = tables
        self._group_of = torch.tensor([mesh.group_of(rank) for rank in range(mesh.world_size)])
        self._gradient_scale = gradient_scale
        # The same for all batches of a size.
        self._bags_of_batch: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """[b, features, dim] from ids of b rows."""
        keys, batch, lengths = features.keys(), features.stride(), features.lengths()
        first_rows, groups = self._bags(keys, batch, features.device())
        # One id in every bag: nothing to pool.
        bags = None if bool((lengths == 1).all()) else _bags_of_ids(lengths)
        if bags is not None:
            first_rows, groups = first_rows[bags], groups[bags]
        rows = features.values().long() + first_rows
        pooled = self.tables.lookup(rows, groups)
        if bags is not None:
            pooled = pooled.new_zeros((len(lengths), pooled.shape[1])).index_add_(0, bags, pooled)
        if torch.is_grad_enabled():

            def update(grad: Tensor) -> None:
                of_ids = grad if bags is None else grad[bags]
                self.tables.update(rows, groups, of_ids * self._gradient_scale)

            pooled.requires_grad_().register_hook(update)
        return pooled.view(len(keys), batch, -1).transpose(0, 1)

    def _bags(self, keys: list[str], batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of each bag, feature by feature, the first row of its table and the group of its row; [features x batch]."""
        if batch not in self._bags_of_batch:
            first_rows = torch.tensor([self.tables.first_row(table_name(key)) for key in keys], device=device)
            groups = self._group_of.to(device).repeat_interleave(batch // len(self._group_of)).repeat(len(keys))
            if self.tables.num_groups == 1:
                groups = torch.zeros_like(groups)
            self._bags_of_batch[batch] = (first_rows.repeat_interleave(batch), groups)
        return self._bags_of_batch[batch]


def _bags_of_ids(lengths: Tensor) -> Tensor:
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths.long())


class EmulatedAverager:
    """Averages the replicas every K steps; nothing is sent, so that there is nothing to time or to count.

    Nothing of it is kept in checkpoints, which emulated runs do not write.

    Args:
        tables: of all groups.
        interval: K.
    """

    def __init__(self, tables: ReplicatedTables, interval: int) -> None:
        self._tables, self._interval = tables, interval
        self.durations_s: list[float] = []
        self.payloads_bytes: list[int] = []

    def after_step(self, step: int) -> None:
        """Average if ``step`` (1-based) is a multiple of K."""
        if step % self._interval == 0:
            self._tables.average()


def emulate(config: TrainConfig, dataset: Dataset, device: torch.device) -> dict[str, Any]:
    """The parts of an ``Engine`` in which T emulated ranks differ from real ones, by field.

    Raises:
        UserError: if no plan fits, or one cuts columns unevenly.
    """
    mesh = Mesh(config.launch.num_ranks, config.parallelism.num_groups, config.parallelism.replicas)
    module = build_dlrm(config.model, dataset.num_embeddings, dataset.base_rate, config.seed, device)
    shapes = {table.name: (table.num_embeddings, table.embedding_dim) for table in table_configs(module)}
    # Nothing is placed, but columns on several ranks have row-wise moments of their own there.
    plan, summary = plan_and_summarise(
        module,
        table_sharder(config.optimizer, mesh.num_groups, device),
        config.parallelism,
        mesh=mesh,
        local_world_size=mesh.world_size,
        rank_batch_size=config.global_batch_size // mesh.world_size,
        device=device,
    )
    rule = config.sync.combine
    tables = ReplicatedTables(
        shapes,
        _column_shards(plan, config.optimizer),
        # Replicas that step on one gradient are always equal.
        num_groups=1 if rule is Combine.gradient else mesh.num_groups,
        seed=config.seed,
        optimizer=config.optimizer,
        moment_scale=moment_scale(config.optimizer, mesh.num_groups),
        sync=config.sync,
        device=device,
    )
    # A group's gradient is that of the mean over its own rows, 1 / M of the batch.
    in_batch_units = rule in (*SUMS, Combine.gradient)
    module.model.sparse_arch = GroupedLookups(tables, mesh, 1.0 if in_batch_units else float(mesh.num_groups))
    return {
        "model": module,
        "optimizer": build_optimizer(config.optimizer, EmptyFusedOptimizer(), dict(module.named_parameters())),
        "averager": EmulatedAverager(tables, config.sync.interval),
        "compressors": {},
        "plan": summary,
        "placement": plan,
        "table_shapes": shapes,
    }


def _column_shards(plan: Plan, optimizer: OptimizerConfig) -> dict[str, int]:
    """How many shards hold the columns of each table, as far as it matters."""
    if optimizer.name in (TableOptimizer.sgd, TableOptimizer.adagrad, TableOptimizer.adam):
        return {table.name: 1 for table in plan.tables}
    shards = {}
    for table in plan.tables:
        columns = {shard.columns for shard in table.shards}
        if len({stop - start for start, stop in columns}) > 1:
            raise UserError(
                f"table {table.name}: the plan cuts its {table.dim} columns unevenly, which engine=emulated cannot; "
                "leave column_wise out of parallelism.sharding"
            )
        shards[table.name] = len(columns)
    return shards
