"""The paper's algorithm in one process on plain tensors: what real ranks are tested against."""

from dataclasses import dataclass

import torch
from ranks import TableRun
from torch import Tensor

from sparse2d.config import Combine, OptimizerConfig, ShardingKind, SyncMoments, TableOptimizer
from sparse2d.mesh import Mesh
from sparse2d.optimizers import reference
from sparse2d.sync.reference import delayed_moments

SPLITS_COLUMNS = (ShardingKind.column_wise, ShardingKind.table_column_wise, ShardingKind.grid_shard)


@dataclass
class Table:
    """One replica: weight and moments, each [rows, dim]; a row-wise moment is spread over the columns of its shard."""

    weight: Tensor
    moments: list[Tensor]


def expected(run: TableRun, before: Tensor, table: str, num_ranks: int) -> Table:
    """Every group steps on its own mean gradient, then replicas are merged; the last replica."""
    mesh = Mesh(num_ranks, run.parallelism.num_groups)
    replicas = [Table(before.clone(), [torch.zeros_like(before) for _ in range(2)]) for _ in mesh.groups]
    old = [before.clone(), *(torch.zeros_like(before) for _ in range(2))]
    touched_since = torch.zeros(mesh.num_groups, len(before), dtype=torch.bool)
    snapshots: list[list[Tensor]] | None = None
    for step in range(len(run.ids)):
        of_groups = [
            [torch.stack(parts) for parts in zip(*(gradient(run, step, rank, table) for rank in ranks), strict=True)]
            for ranks in mesh.groups
        ]
        grads = torch.stack([grad.mean(dim=0) for grad, _ in of_groups])
        touched = torch.stack([looked_up.any(dim=0) for _, looked_up in of_groups])
        touched_since |= touched
        if run.sync.combine is Combine.gradient:
            grads, touched = grads.mean(dim=0, keepdim=True), touched.any(dim=0, keepdim=True)
            grads, touched = grads.expand(mesh.num_groups, -1, -1), touched.expand(mesh.num_groups, -1)
        if run.sync.combine in (Combine.delta_sum, Combine.merged_gradient):
            grads = grads / mesh.num_groups
        for number, replica in enumerate(replicas):
            optimizer_step(run, replica, grads[number], touched[number], step + 1)
        if (step + 1) % run.sync.interval == 0:
            if run.sync.combine is Combine.merged_gradient:
                _step_on_the_sum(run, replicas, old)
                continue
            _merge(run, [replica.weight for replica in replicas], old[0], touched_since, is_moment=False)
            if run.sync.moments is SyncMoments.with_weights:
                for number in range(2):
                    moments = [replica.moments[number] for replica in replicas]
                    _merge(run, moments, old[1 + number], touched_since, is_moment=True)
            if run.sync.moments is SyncMoments.delayed:
                if snapshots is not None:
                    for number, snapshot in enumerate(snapshots):
                        own = [replica.moments[number] for replica in replicas]
                        for moment, late in zip(own, delayed_moments(own, snapshot), strict=True):
                            moment.copy_(late)
                snapshots = [[replica.moments[number].clone() for replica in replicas] for number in range(2)]
            touched_since.zero_()
    return replicas[-1]


def _merge(run: TableRun, replicas: list[Tensor], old: Tensor, touched: Tensor, *, is_moment: bool) -> None:
    """Set all replicas, and what is remembered as old, to what the rule makes of them."""
    change = torch.stack([replica - old for replica in replicas]).sum(dim=0)
    rule = run.sync.combine
    if rule is Combine.delta_sum:
        merged = old + change
    elif rule is Combine.touch_mean:
        count = touched.sum(dim=0).clamp(min=1).unsqueeze(1)
        merged = old + change / (count if is_moment else count.sqrt())
    else:
        merged = old + change / len(replicas)
    for replica in (*replicas, old):
        replica.copy_(merged)


def _step_on_the_sum(run: TableRun, replicas: list[Table], old: list[Tensor]) -> None:
    """Take the groups' gradients back out of their steps, sum them, and step once from where all were."""
    lr, eps = run.optimizer.lr, run.optimizer.eps
    grad = sum((old[0] - replica.weight) / lr * (replica.moments[0].sqrt() + eps) for replica in replicas)
    assert isinstance(grad, Tensor)
    merged = Table(old[0].clone(), [old[1].clone(), old[2].clone()])
    optimizer_step(run, merged, grad, grad.any(dim=1), step=1)
    for replica in replicas:
        replica.weight.copy_(merged.weight)
        replica.moments[0].copy_(merged.moments[0])
    old[0].copy_(merged.weight)
    old[1].copy_(merged.moments[0])


def gradient(run: TableRun, step: int, rank: int, table: str) -> tuple[Tensor, Tensor]:
    """Dense gradient of one rank's loss, by torch's autograd on a plain table, and which rows were looked up."""
    rows, dim = run.shapes[table]
    index = list(run.shapes).index(table)
    weight = torch.zeros((rows, dim), requires_grad=True)
    batch = run.factors.shape[2]
    bags = torch.from_numpy(run.ids[step, rank, index]).view(batch, -1)
    start = sum(other_dim for _, other_dim in list(run.shapes.values())[:index])
    factors = torch.from_numpy(run.factors[step, rank, :, start : start + dim])
    (weight[bags].sum(dim=1) * factors).sum().backward()
    touched = torch.zeros(rows, dtype=torch.bool)
    touched[bags.flatten()] = True
    assert weight.grad is not None
    return weight.grad, touched


def optimizer_step(run: TableRun, table: Table, grad: Tensor, touched: Tensor, step: int) -> None:
    """One reference step; column-wise shards of row-wise AdaGrad step with their own moments."""
    config = run.optimizer
    if config.name is TableOptimizer.sgd:
        reference.sgd(table.weight, grad, lr=config.lr)
    elif config.name is TableOptimizer.adagrad:
        reference.adagrad(table.weight, grad, table.moments[0], lr=config.lr, eps=config.eps)
    elif config.name is TableOptimizer.adam:
        first, second = table.moments
        numbers = {"lr": config.lr, "beta1": config.beta1, "beta2": config.beta2, "eps": config.eps}
        reference.adam(table.weight, grad, (first, second), touched, step=step, **numbers)
    else:
        dim = grad.shape[1]
        columns = 4 if run.parallelism.sharding[0] in SPLITS_COLUMNS else dim
        for start in range(0, dim, columns):
            shard = slice(start, start + columns)
            _rowwise_step(run, config, table.weight[:, shard], grad[:, shard], table.moments[0][:, shard])


def _rowwise_step(run: TableRun, config: OptimizerConfig, weight: Tensor, grad: Tensor, moment: Tensor) -> None:
    row_moment = moment[:, 0].clone()
    scale = run.parallelism.num_groups if config.moment_scale == "auto" else config.moment_scale
    reference.rowwise_adagrad(weight, grad, row_moment, lr=config.lr, eps=config.eps, moment_scale=float(scale))
    moment.copy_(row_moment.unsqueeze(1).expand_as(moment))
